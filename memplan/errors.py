"""Every error that memplan raises on purpose, and the exit code that each one means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from memplan.escaping import escaped

MAXIMUM_SHOWN = 20
"""Problems of a file that its message lists; nobody reads on."""


class MemplanError(Exception):
    """Base of all errors that a user can cause; one readable line, no traceback.

    Attributes:
        exit_code: 2 for bad input, 3 when memplan cannot answer (DESIGN section 7).
    """

    exit_code = 2


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
        more = len(self.problems) - MAXIMUM_SHOWN
        shown = (*self.problems[:MAXIMUM_SHOWN], *((f"... and {more:,} more",) if more > 0 else ()))
        super().__init__("\n".join(map(escaped, shown)))


class CatalogError(MemplanError, ValueError):
    """Catalog entries that contradict each other."""


class UnknownNameError(MemplanError, LookupError):
    """A name that is in no catalog; the message carries the nearest match."""


class CannotAnswerError(MemplanError):
    """The input is sound, but memplan does not model it; it refuses rather than guesses."""

    exit_code = 3


def nearest_match(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, or None when nothing is close.

    Separators and case do not count, as everywhere where memplan looks up names.
    """
    from difflib import get_close_matches

    by_key = {normalised_name(candidate): candidate for candidate in known}
    matches = get_close_matches(normalised_name(name), by_key, n=1, cutoff=0.6)
    return by_key[matches[0]] if matches else None


def match_hint(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean ...?" for the known name closest to ``name``, or ``otherwise``."""
    match = nearest_match(name, known)
    return f"; did you mean {match!r}?" if match else otherwise


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UnknownNameError:
    """Return the error for an unknown ``name`` of some ``kind``, with the nearest match."""
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    text = f"unknown {kind} {shown!r}{match_hint(name, known)}"
    return UnknownNameError(f"{text} (see: {hint})" if hint else text)


def printable(text: str, longest: int = 80) -> str:
    r"""Return outside text fit for one line of a message: cut where it is long, then escaped.

    Example:
        >>> print(printable("a\x1b[31m\n"), printable("x" * 100, 10))
        a\u001b[31m\n xxxxxxx...
    """
    return escaped(text if len(text) <= longest else f"{text[: longest - 3]}...")


@lru_cache(maxsize=1024)
def normalised_name(name: str) -> str:
    """Return ``name`` without case and separators: ``Llama-3.1-8B`` is ``llama318b``."""
    return name.lower().translate(_SEPARATORS)


_SEPARATORS = str.maketrans("", "", "-_. /:+")
