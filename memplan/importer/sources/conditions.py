"""Conditions of a mapping: what keys have to be for a rule to hold."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from memplan.importer.sources.given_keys import MISSING

Lookup = Callable[[str], Any]
"""Name of a key, or of a result with a ``$`` in front -> its value, or :data:`MISSING`."""

OFF = frozenset(("false", "none", "no", "off", "null", "0", "0.0", "", "[]", "{}", "disabled", "disable"))
"""Words that switch a feature off in one trainer or another."""

TRUE, FALSE = frozenset(("true", "yes", "on", "y", "t")), frozenset(("false", "no", "off", "n", "f"))
"""Words for true and false where YAML, or a parser of arguments, left them as text."""

LARGEST = 10**18
"""No size or count is as large."""

_COMPARED = re.compile(r"(<=|>=|<|>)\s*([0-9.]+)")


def word(value: Any) -> str:
    """Return a value as conditions and tables name it.

    Example:
        >>> word(True), word(" BF16 "), word(4.0), word(["full_shard", "auto_wrap"])
        ('true', 'bf16', '4', 'full_shard auto_wrap')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return " ".join(word(item) for item in value)
    return str(value).strip().lower()


def truth(value: Any) -> str:
    """Return ``true`` or ``false`` for a word that says so, any other value as :func:`word` has it.

    Example:
        >>> truth("Y"), truth("off"), truth("unsloth")
        ('true', 'false', 'unsloth')
    """
    text = word(value)
    return "true" if text in TRUE else "false" if text in FALSE else text


def is_on(value: Any) -> bool:
    """Tell whether a value switches something on."""
    if value is MISSING or value is None:
        return False
    if isinstance(value, Mapping) and "enabled" in value:
        return is_on(value["enabled"])
    return bool(value) and word(value) not in OFF


def holds(condition: Mapping[str, Any], lookup: Lookup) -> bool:
    """Tell whether all parts of a condition hold; each part is one accepted value, or several of which one has to be.

    ``given`` and ``absent`` ask whether there is a key at all, ``on`` and ``off`` whether it switches something on,
    ``<``, ``>=`` and the like compare numbers and versions; anything else is a value, with ``*`` for any text, and with
    ``$`` in front that of a result.

    Example:
        >>> [holds({"max_grad_norm": "<0"}, {"max_grad_norm": norm}.get) for norm in (-1, -0.5, "-1e-3", 0, "0.5")]
        [True, True, True, False, False]
    """
    return all(_matches(lookup(name), wanted, lookup) for name, wanted in condition.items())


def _matches(value: Any, wanted: Any, lookup: Lookup) -> bool:
    if isinstance(wanted, list):
        return any(_matches(value, one, lookup) for one in wanted)
    if value is MISSING and wanted == "given":  # most that a script of many commands asks
        return False
    text = word(wanted)
    if text.startswith("$"):
        text = word(lookup(text))
    if text in ("given", "absent"):
        return (value is not MISSING) == (text == "given")
    if text in ("on", "off") and not isinstance(wanted, bool):
        return is_on(value) == (text == "on")
    if value is MISSING:
        return False
    if compared := _COMPARED.fullmatch(text):
        return _compare(value, compared[1], compared[2])
    given = word(value)
    if isinstance(wanted, bool) and not isinstance(value, bool):
        return given in (TRUE if wanted else FALSE)
    return given == text or ("*" in text and fnmatchcase(given, text))


def _compare(value: Any, sign: str, bound: str) -> bool:
    number = "e" in word(value) or word(value).startswith("-")  # 1e-3 or -0.5, whose parts are no version's
    try:
        left = (float(word(value)),) if number else version_parts(word(value))
        right = (float(bound),) if number else version_parts(bound)
    except ValueError:
        return False
    return {"<": left < right, ">": left > right, "<=": left <= right, ">=": left >= right}[sign]


def version_parts(text: str) -> tuple[int, ...]:
    """Return a version or whole number as numbers that compare.

    Raises:
        ValueError: It is neither.
    """
    try:
        return tuple(int(float(part)) if part else 0 for part in text.split("."))
    except OverflowError:
        raise ValueError(text) from None


def as_number(value: Any) -> int | float | None:
    """Return a number, or one written as text, as YAML 1.1 leaves ``2e-5``; None for anything else.

    Example:
        >>> as_number("5e8"), as_number("1_000"), as_number(True), as_number("auto")
        (500000000.0, 1000.0, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        number = value if isinstance(value, int | float) else float(str(value).replace("_", ""))
    except ValueError:
        return None
    return number if abs(number) < LARGEST else None
