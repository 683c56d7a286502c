"""How ``[ ... ]`` and ``[[ ... ]]`` end, where that can be told from a script alone."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from memplan.importer.shell.expansions import NOT_GIVEN, Scope, text_of

NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


def outcome(words: Sequence[str], scope: Scope) -> bool | None:
    """Return whether a test holds; None where that depends on more than the script, such as files or what commands print.

    A variable that the script never sets, and an argument that is not given, is empty.
    """
    inner = list(words[1:-1] if words[0] in ("[", "[[") else words[1:])
    return _any(inner, Scope(scope.variables, scope.arguments, in_test=True))


def _any(words: Sequence[str], scope: Scope) -> bool | None:
    """Return how a test ends whose parts ``||`` joins, which holds where one of them does."""
    results = [_every(part, scope) for part in _parts(words, ("||", "-o"))]
    return True if True in results else None if None in results else False


def _every(words: Sequence[str], scope: Scope) -> bool | None:
    results = [_one(part, scope) for part in _parts(words, ("&&", "-a"))]
    return False if False in results else None if None in results else True


def _parts(words: Sequence[str], signs: tuple[str, str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in signs:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _one(words: Sequence[str], scope: Scope) -> bool | None:
    if words and words[0] == "!":
        result = _one(words[1:], scope)
        return None if result is None else not result
    texts = [NOT_GIVEN.sub("", text) if NOT_GIVEN.fullmatch(text := text_of(word, scope)) else text for word in words]
    if any("$" in text or "`" in text for text in texts) or not texts:
        return None
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) == (texts[0] == "-n")
    return _compared(words, texts) if len(texts) == 3 else None


def _compared(words: Sequence[str], texts: Sequence[str]) -> bool | None:
    left, sign, right = texts
    if sign in ("=", "==", "!="):
        quoted = words[2][:1] in ("'", '"')
        return (left == right if quoted else fnmatchcase(left, right)) == (sign != "!=")
    if sign in NUMBERS and all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in (left, right)):
        return NUMBERS[sign](int(left), int(right))
    return None
