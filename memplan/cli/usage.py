"""Usage errors in one line, with the nearest thing that would have been understood."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer

from memplan.errors import InvalidFileError, MemplanError, match_hint, printable

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read; it exports only this child."""

LONGEST_LINE = 600

_CHOICES = re.compile(r"'([^']*)' is not one of (.*?)\.?$")
_COMMAND = re.compile(r"No such command '([^']*)'")
_EXTRA = re.compile(r"unexpected extra arguments? \((.*)\)")


def refuse_undecodable(arguments: Iterable[str]) -> None:
    """Refuse words that are no UTF-8, which no answer could name.

    Raises:
        InvalidFileError: The first of them.
    """
    for word in arguments:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise InvalidFileError([f"an argument is not UTF-8 text: {printable(word)}"])


def usage_line(error: Exception, commands: Iterable[str]) -> str:
    """Return the one line that says what was wrong with a command line, or the help that it asked for by being empty.

    Args:
        error: What typer raised.
        commands: Names of all commands.
    """
    text = str(getattr(error, "format_message", error.__str__)())
    if text.startswith("Usage:"):
        return text
    text = re.sub(r"\.? Did you mean .*", "", " ".join(text.split()))
    text = text.replace("Value error, ", "").replace("argument(s)", "arguments")
    context = getattr(error, "ctx", None)
    inner = getattr(getattr(context, "command", None), "commands", {}) or commands
    return printable(text.rstrip("."), LONGEST_LINE) + printable(_hint(text, inner, _help_of(context)), LONGEST_LINE)


def _help_of(context: Any) -> str:
    """Return the command line that prints the help of what was typed."""
    path = re.sub(r" *[\[{].*?[\]}](\.\.\.)?", "", str(getattr(context, "command_path", "memplan")))
    return f"{path} --help"


def _hint(text: str, commands: Iterable[str], where: str) -> str:
    if match := _CHOICES.search(text):
        return match_hint(match[1], re.findall(r"'([^']*)'", match[2]))
    if match := _COMMAND.search(text):
        return f"{match_hint(match[1], commands)} (see: {where})"
    if match := _EXTRA.search(text):
        return _extra_hint(next(iter(match[1].split()), ""), where)
    return "" if "(see:" in text else f" (see: {where})"


def _extra_hint(word: str, where: str) -> str:
    """Return what a surplus word may have been meant as."""
    from memplan.library.lookup import open_catalog

    try:
        catalog = open_catalog(None)
        if word in catalog.gpus:
            return f"; did you mean --gpu {word}?"
        return f"; did you mean --config {word}?" if word in catalog.configs else f" (see: {where})"
    except MemplanError:
        return f" (see: {where})"
