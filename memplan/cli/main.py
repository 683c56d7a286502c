"""The ``memplan`` command: its parts, and the one place where errors become exit codes."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

import memplan
from memplan.cli.grouped_command import add_command
from memplan.cli.usage import UsageError, refuse_undecodable, usage_line
from memplan.documents.escaping import escaped_lines
from memplan.documents.writing import guarded_streams, say, write_remark
from memplan.errors import MemplanError, MemplanWarning

EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130

COMMANDS: dict[str, str] = {
    "fit": "commands.fit",
    "max": "commands.largest",
    "where": "commands.largest",
    "frontier": "commands.frontier",
    "suggest": "commands.suggest",
    "compare": "commands.compare",
    "recommend": "commands.recommend",
    "explain": "commands.explain",
    "why": "commands.explain",
    "report": "page_commands.html_report",
    "ui": "page_commands.local_ui",
    "trace": "torch_commands.trace",
    "run": "torch_commands.script_run",
    "validate": "torch_commands.validate",
    "import": "trainers.import_files",
    "emit": "trainers.emit_file",
    "check": "commands.check",
    "diff": "commands.check",
    "tables": "commands.tables",
    "list": "commands.catalog_commands",
    "show": "commands.catalog_commands",
    "schema": "schema_and_doctor",
    "doctor": "schema_and_doctor",
    "lab": "lab.lab_commands",
}
"""Command -> the module under this folder that has it, as a function or as an application with commands of its own."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memplan {memplan.__version__}")
        raise typer.Exit


def _callback(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = None,
) -> None:
    """Will this training job fit on that GPU, and if not, what do I change?"""


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the application with the commands called ``names``."""
    app = typer.Typer(
        name="memplan",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(_callback)
    for name in names:
        command = getattr(import_module(f"memplan.cli.{COMMANDS[name]}"), f"{name}_command")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            add_command(app, name, command)
    return app


def run() -> None:
    """Run the command; expected errors are one line each on standard error, bugs exit with 70.

    Only the command that was asked for is built, since building all of them takes a fifth of the
    time to an answer; and the process is too short for collecting cycles to pay.
    """
    gc.disable()
    with guarded_streams(), warnings.catch_warnings():
        warnings.simplefilter("default", MemplanWarning)
        warnings.showwarning = _say_ours(warnings.showwarning)
        sys.exit(_exit_code())


def _say_ours(otherwise: Callable[..., None]) -> Callable[..., None]:
    """Return what shows a warning: ours in a line, others as they were."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, MemplanWarning):
            say(str(message))
        else:
            otherwise(message, category, *where)

    return show


def _exit_code() -> int:
    typed = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        refuse_undecodable(sys.argv)
        code = make_app([typed] if typed in COMMANDS else COMMANDS)(standalone_mode=False, prog_name="memplan")
        return code if isinstance(code, int) else 0
    except MemplanError as error:
        for line in str(error).split("\n"):
            say(line)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except UsageError as error:
        text = usage_line(error, COMMANDS)
        if text.startswith("Usage:"):
            write_remark(escaped_lines(text))
        else:
            say(text)
        return EXIT_USAGE
    except Exception:
        import traceback

        write_remark(escaped_lines(traceback.format_exc()))
        say("this is a bug in memplan; please report it with the lines above")
        return EXIT_BUG
