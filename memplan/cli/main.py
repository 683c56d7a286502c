"""The ``memplan`` command: its parts, and the one place where errors become exit codes."""

import gc
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

import memplan
from memplan.cli.grouped_command import Commands, add_command
from memplan.documents.escaping import escaped_lines
from memplan.documents.writing import guarded_streams, say, write_remark
from memplan.errors import InvalidFileError, MemplanError, MemplanWarning, match_hint, printable

EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130

COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("commands.fit", "Will this training job fit on that GPU?"),
    "max": ("commands.largest", "How large can it be?"),
    "where": ("commands.largest", "Which GPU, and how many?"),
    "frontier": ("commands.frontier", "What batch and sequence length?"),
    "suggest": ("commands.suggest", "Which settings should I use?"),
    "compare": ("commands.compare", "How do these compare?"),
    "recommend": ("commands.compare", "What should I train with on this GPU?"),
    "explain": ("commands.explain", "Why this number?"),
    "why": ("commands.explain", "Why was it out of memory?"),
    "report": ("ui.page_commands", "The whole answer as one HTML file."),
    "ui": ("ui.page_commands", "A page on this machine whose answer follows sliders."),
    "trace": ("commands.torch_commands", "What would torch do, exactly?"),
    "run": ("commands.torch_commands", "What would my own script need?"),
    "validate": ("commands.torch_commands", "Is that true here?"),
    "import": ("commands.trainer_commands", "What does my trainer's file say?"),
    "emit": ("commands.trainer_commands", "How do I say that in my trainer's file?"),
    "check": ("commands.check", "Does every job of a budget file still fit its budget?"),
    "diff": ("commands.check", "What moved between two baselines, and why?"),
    "tables": ("commands.catalog_commands", "Are the published tables right?"),
    "list": ("commands.catalog_commands", "List what the catalog holds of a kind."),
    "show": ("commands.catalog_commands", "Show one entry with its sources, or a model with its parameters by role."),
    "schema": ("schema_and_doctor", "Print a JSON Schema: of answers, of training configs, or of catalog entries."),
    "doctor": ("schema_and_doctor", "Print versions, the catalog in use, and the device that is seen."),
    "lab": ("lab.lab_commands", "Experiments: what formats and methods do to learning, measured for real."),
}
"""Command -> the module under this folder that has it, as a function or as an application with commands of its own, and what
the list of commands says of it: the first sentence of its help."""


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
    app = _empty_app()
    for name in names:
        module, about = COMMANDS[name]
        command = getattr(import_module(f"memplan.cli.{module}"), f"{name}_command")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=about)
        else:
            add_command(app, name, command)
    return app


def list_of_commands() -> typer.Typer:
    """Return the application for a line that calls no command: it has their names, and what is said of them."""
    app = _empty_app()
    for name, (_, about) in COMMANDS.items():
        app.command(name, short_help=about)(_callback)
    return app


def _empty_app() -> typer.Typer:
    app = typer.Typer(
        name="memplan",
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog="Example: memplan fit llama-8b --gpu rtx4090 --qlora",
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 120,
            "token_normalize_func": lambda name: name.replace("_", "-"),
        },
    )
    app.callback()(_callback)
    return app


def run(words: Sequence[str] | None = None) -> None:
    """Run the command; expected errors are one line each on standard error, bugs exit with 70.

    Only the command that was asked for is imported, since importing all of them takes as long as an answer.

    Args:
        words: The line that a shell asks to be completed, without the program; else what was typed is run.
    """
    with _no_collections(), guarded_streams(), warnings.catch_warnings():
        warnings.simplefilter("default", MemplanWarning)
        warnings.showwarning = _say_ours(warnings.showwarning)
        code = _exit_code(sys.argv[1:] if words is None else words)
    sys.exit(code)


_commands_run = count()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no cycles in a process of one command, which is too short for it to pay: neither while it runs nor at its end.

    The end looks through all that is not frozen. What a command leaves are cycles, some MiB of them, so that in a process
    that runs another they are collected as anywhere else.
    """
    if next(_commands_run):
        gc.unfreeze()
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def _say_ours(otherwise: Callable[..., None]) -> Callable[..., None]:
    """Return what shows a warning: ours in a line, others as they were."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, MemplanWarning):
            say(str(message))
        else:
            otherwise(message, category, *where)

    return show


def _exit_code(words: Sequence[str]) -> int:
    typed = next((word for word in words if not word.startswith("-")), "")
    try:
        refuse_undecodable(sys.argv)
        app = make_app([typed]) if typed in COMMANDS else list_of_commands()
        code = app(standalone_mode=False, prog_name="memplan")
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
            write_remark(f"{escaped_lines(text)}\n")
        else:
            say(text)
        return EXIT_USAGE
    except Exception:
        import traceback

        write_remark(escaped_lines(traceback.format_exc()))
        say("this is a bug in memplan; please report it with the lines above")
        return EXIT_BUG


UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read; it exports only this child."""

LONGEST_LINE = 600

_CHOICES = re.compile(r"'([^']*)' is not one of (.*?)\.?$")
_COMMAND = re.compile(r"No such command '([^']*)'")
_EXTRA = re.compile(r"unexpected extra arguments? \((.*)\)")
_OPTION = re.compile(r"No such option: (\S+)")


def refuse_undecodable(arguments: Iterable[str]) -> None:
    """Refuse words that are no UTF-8, which no answer could name.

    Raises:
        InvalidFileError: The first of them.
    """
    for word in arguments:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise InvalidFileError([f"an argument is not UTF-8 text: {printable(word)}"])


def usage_line(error: Exception, commands: Iterable[str]) -> str:
    """Return the one line that says what was wrong with a command line, or the help that it asked for by being empty."""
    text = str(getattr(error, "format_message", error.__str__)())
    if text.startswith("Usage:"):
        return text
    text = re.sub(r"\.? Did you mean .*", "", " ".join(text.split()))
    text = text.replace("Value error, ", "").replace("argument(s)", "arguments")
    text = re.sub(
        r"Input should be a valid integer(, unable to parse string as an integer)?", "expected a whole number", text
    )
    text = text.replace("Input should be less than or equal to", "expected at most")
    text = text.replace("Input should be greater than or equal to", "expected at least")
    context = getattr(error, "ctx", None)
    if (match := _OPTION.match(text)) and (ours := _word_for(match[1], context)):
        text = f"No such option: {match[1]}; here it is {ours}"
    inner = getattr(getattr(context, "command", None), "commands", {}) or commands
    return printable(text.rstrip("."), LONGEST_LINE) + printable(_hint(text, inner, _help_of(context)), LONGEST_LINE)


def _word_for(option: str, context: Any) -> str:
    """Return what a command calls another program's option, or nothing where it has none for it."""
    own = {word for parameter in getattr(getattr(context, "command", None), "params", ()) for word in parameter.opts}
    from memplan.documents.loading import load_document

    known = load_document(Path(__file__).with_name("foreign_options.yaml")).data
    words = (ours for ours, theirs in known.items() if option in theirs)
    return next((ours for ours in words if not ours.startswith("-") or ours.split()[0] in own), "")


def _help_of(context: Any) -> str:
    """Return the command line that prints the help of what was typed."""
    path = re.sub(r" *[\[{].*?[\]}](\.\.\.)?", "", str(getattr(context, "command_path", "memplan")))
    return f"{path} --help"


def _hint(text: str, commands: Iterable[str], where: str) -> str:
    if match := _CHOICES.search(text):
        return match_hint(match[1], re.findall(r"'([^']*)'", match[2])) if len(match[1]) > 2 else ""
    if match := _COMMAND.search(text):
        if _is_model(match[1]):
            return f"; did you mean memplan fit {match[1]}?"
        return f"{match_hint(match[1], commands)} (see: {where})"
    if match := _EXTRA.search(text):
        return _spaced_name(match[1].split(" ")) or _extra_hint(next(iter(match[1].split()), ""), where)
    return "" if "(see:" in text else f" (see: {where})"


def _is_model(word: str) -> bool:
    from memplan.library.lookup import open_catalog

    try:
        return word in open_catalog(None).models
    except MemplanError:
        return False


def _spaced_name(surplus: Sequence[str]) -> str:
    """Return how a name is written whose second word and those after it were taken for surplus ones, or nothing."""
    typed = sys.argv[1:]
    places = (place for place, word in enumerate(typed) if place and word == surplus[0])
    first = typed[next(places, 0) - 1] if surplus[0] in typed[1:] else ""
    names = (" ".join((first, *surplus[:count])) for count in range(1, len(surplus) + 1))
    known = next((name for name in names if first and _is_model(name)), "")
    return f'; quote a name of several words: "{known}"' if known else ""


def _extra_hint(word: str, where: str) -> str:
    """Return what a surplus word may have been meant as."""
    from memplan.documents.opening import is_file, usable_path
    from memplan.library.lookup import open_catalog

    try:
        catalog = open_catalog(None)
        if is_file(usable_path(word)):
            options = ("--message",) if where.startswith("memplan why") else ("--config", "--with")
            return f"; did you mean {' or '.join(f'{option} {word}' for option in options)}?"
        if word in catalog.gpus:
            return f"; did you mean --gpu {word}?"
        if word in catalog.models:
            return f"; a command takes one model: ask for {word} by itself"
        return f"; did you mean --config {word}?" if word in catalog.configs else f" (see: {where})"
    except MemplanError:
        return f" (see: {where})"
