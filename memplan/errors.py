"""Every error that memplan raises on purpose, and the exit code that each one means."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Self

MAXIMUM_SHOWN = 20
"""Problems of a file that its message lists; nobody reads on."""
MOST_EXPLAINED = 200
"""Problems that are explained, each with the nearest name, which takes a millisecond; no more are looked for where names are."""
LONGEST_PROBLEM = 2_000
"""Characters of one problem that its message has, however long what it quotes from the file is."""


class MemplanError(Exception):
    """Base of all errors that a user can cause; one readable line, no traceback.

    Attributes:
        exit_code: 2 for bad input, 3 when memplan cannot answer (DESIGN section 7).
    """

    exit_code = 2

    def __str__(self) -> str:
        """Return the message with what it quotes from outside fit for a terminal, which a program's traceback is shown on."""
        return "\n".join(escaped(line) for line in super().__str__().split("\n"))


class UnitError(MemplanError, ValueError):
    """A quantity without a unit, with an unknown unit, or out of range."""


class InvalidFileError(MemplanError, ValueError):
    """A file that cannot be read or does not follow its schema.

    Args:
        problems: One message per problem, each already naming file, line and key.
        paths: Keys leading to the values at fault, where they are known.
    """

    def __init__(self, problems: Sequence[str], paths: Iterable[tuple[str | int, ...]] = ()) -> None:
        self.problems = tuple(problems)
        self.paths = tuple(paths)
        super().__init__("\n".join(printable(problem, LONGEST_PROBLEM) for problem in first_lines(self.problems)))

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Return what makes this error anew in another process."""
        return type(self), (self.problems, self.paths)


class CatalogError(MemplanError, ValueError):
    """Catalog entries that contradict each other."""


class UnknownNameError(MemplanError, LookupError):
    """A name that is in no catalog; the message carries the nearest match."""


class CannotAnswerError(MemplanError):
    """The input is sound, but memplan does not model it; it refuses rather than guesses."""

    exit_code = 3


class MemplanWarning(UserWarning):
    """What an answer rests on that whoever asked should look at."""


class UnknownKeyWarning(MemplanWarning):
    """A trainer's file has a key that the trainer does not have, and that is left out."""


class GuessedNameWarning(MemplanWarning):
    """A model's name stands in no list, and its shapes are guessed from what it looks like."""


class StoredWeightsWarning(MemplanWarning):
    """A model's name says that its weights are quantised, and others are planned."""


def first_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the first lines of many, and how many more there are.

    Example:
        >>> first_lines(["one", "two"]), first_lines(["same"] * 1021)[-1]
        (('one', 'two'), '... and 1,001 more')
    """
    more = len(lines) - MAXIMUM_SHOWN
    return (*lines[:MAXIMUM_SHOWN], *((f"... and {more:,} more",) if more > 0 else ()))


FEW = 24
"""Names that a refusal lists, where none is near, at most."""

LEAST_BEGINNING = 4
"""Characters of a name that others are taken to begin with."""


def nearest_match(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, one that begins with it before others, or None when nothing is close.

    Separators and case do not count, as everywhere where memplan looks up names, but that a number goes on behind one is
    nearer than that it becomes another or gets a unit.

    Example:
        >>> nearest_match("llama3", ["llama-3b", "llama-3.1-405b", "llama-3.1-8b"])
        'llama-3.1-8b'
    """
    from difflib import get_close_matches

    key, by_key = normalised_name(name), {normalised_name(candidate): candidate for candidate in known}
    longer = [one for one in by_key if one.startswith(key)] if len(key) >= LEAST_BEGINNING else []
    if key[-1:].isdigit():
        longer = [one for one in longer if _goes_on(by_key[one], key)] or longer
    matches = get_close_matches(key, longer, n=1, cutoff=0) or get_close_matches(key, by_key, n=1, cutoff=0.6)
    return by_key[matches[0]] if matches else None


def _goes_on(name: str, beginning: str) -> bool:
    """Tell whether a separator stands in a name behind its beginning."""
    return any(normalised_name(name[: mark.start()]) == beginning for mark in _SEPARATOR.finditer(name))


def match_hint(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean ...?" for the known name closest to ``name``, or ``otherwise``."""
    match = nearest_match(name, known)
    return f"; did you mean {match!r}?" if match else otherwise


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UnknownNameError:
    """Return the error for an unknown ``name`` of some ``kind``, with the nearest match."""
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    names = [*known]
    few = f"; known: {', '.join(names)}" if len(names) <= FEW else ""
    text = f"unknown {kind} {shown!r}{match_hint(name, names, few)}"
    return UnknownNameError(f"{text} (see: {hint})" if hint else text)


def printable(text: str, longest: int = 80) -> str:
    r"""Return outside text fit for one line of a message: escaped, and cut where it is long then.

    Example:
        >>> print(printable("a\x1b[31m\n"), printable("x" * 100, 10))
        a\u001b[31m\n xxxxxxx...
    """
    shown = escaped(text[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def shown_value(value: object, longest: int = 80) -> str:
    r"""Return any value as a message quotes it; of one that cannot be written out, what it is.

    Example:
        >>> shown_value("a\x1b"), shown_value(2), shown_value(10**5000)
        ("'a\\x1b'", '2', 'an int')
    """
    try:
        return printable(repr(value), longest)
    except Exception:  # thousands of digits, a list in itself, or a class with a fault in its own code
        kind = type(value).__name__
        return f"a{'n' * kind.lower().startswith(tuple('aeiou'))} {printable(kind)}"


@lru_cache(maxsize=8192)  # a name is compared with each of the catalog's
def normalised_name(name: str) -> str:
    """Return ``name`` without case and separators: ``Llama-3.1-8B`` is ``llama318b``."""
    return name.lower().translate(_SEPARATORS)


def same_numbers(given: str, spelling: str) -> bool:
    """Tell whether a name means the numbers of a known one with the same letters and digits.

    It may leave out a separator, but not put one into a number, nor say another size.

    Example:
        >>> same_numbers("qwen25-7b", "qwen2.5-7b"), same_numbers("llama3-3b", "llama-33b"), same_numbers("qwen-38b", "qwen3-8b")
        (True, False, False)
    """
    divided, known = (
        {len(normalised_name(one[: gap.start() + 1])) for gap in _DIVIDED.finditer(one)} for one in (given, spelling)
    )
    sizes, said = (_SIZED.findall(one.lower()) for one in (given, spelling))
    return divided <= known and sizes == said


_SEPARATORS = str.maketrans("", "", "-_. /:+")
_SEPARATOR = re.compile(r"[-_. /:+]")
_DIVIDED = re.compile(r"\d(?=[-_. /:+]+\d)")
_SIZED = re.compile(r"(\d+)[bm](?![a-z])")


# ------------------------------------------------------------------ text from outside
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

_COMMAND = re.compile(r"(?<!\S):(?=:)|#(?=#\w*\[)")
"""Where GitHub and Azure read a workflow command: ``::name`` at the start of a line, and a line may start at any
word once it is folded; ``##[name]`` and ``##vso[name]`` anywhere in it.
Source: ActionCommand.cs in actions/runner; https://learn.microsoft.com/azure/devops/pipelines/scripts/logging-commands
"""


def escaped(text: str) -> str:
    r"""Return text as one line that shows what a terminal or a build log would obey.

    Control characters, line breaks, marks of writing direction and halves of surrogate pairs are written as
    JSON writes them, and so is the first character of a workflow command.

    Example:
        >>> print(escaped("a\x1b[31m\nb"), escaped("::error::no"), escaped("torch::sum"))
        a\u001b[31m\nb \u003a:error::no torch::sum
    """
    if not text.isprintable():
        text = "".join(one if one.isprintable() else character_code(one) for one in text)
    return _COMMAND.sub(lambda match: character_code(match[0]), text) if "::" in text or "##" in text else text


def character_code(character: str) -> str:
    """Return a character as JSON escapes it."""
    units = character.encode("utf-16-be", "surrogatepass")
    return _SHORT.get(character) or "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
