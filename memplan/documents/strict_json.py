"""JSON to plain values, read strictly by its grammar and within limits: Python's own reader accepts far more."""

import json
import re
from math import isfinite
from pathlib import Path
from typing import Any

from memplan.documents.loading import MAXIMUM_DEPTH, MAXIMUM_DIGITS
from memplan.documents.opening import MAXIMUM_TEXT_BYTES, read_text, shown_path
from memplan.errors import InvalidFileError, printable, shown_value

MAXIMUM_VALUES = 10_000_000
"""Each takes about a hundred bytes as a Python object, so that these take a gigabyte."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, instead: str = "give a JSON file") -> Any:
    """Return the value in a JSON file; ``-`` is standard input.

    Raises:
        InvalidFileError: The file cannot be read, or as of :func:`parse_json`.
    """
    return parse_json(read_text(path, MAXIMUM_TEXT_BYTES, instead), shown_path(path))


def parse_object(text: str, name: str) -> dict[str, Any]:
    """Return the object in a JSON text.

    Raises:
        InvalidFileError: As of :func:`parse_json`, or another value.
    """
    value = parse_json(text, name)
    if not isinstance(value, dict):
        raise InvalidFileError([f"{name}:1: expected an object with keys, got {shown_value(value, 40)}"])
    return value


def parse_json(text: str, name: str) -> Any:
    """Return the value in a JSON text.

    Raises:
        InvalidFileError: Not JSON, a key given twice, NaN, an infinity, a number of more than 40 digits,
            half of a surrogate pair, or nested or long beyond the limits.
    """
    try:
        if text.count(",") + text.count("[") + text.count("{") > MAXIMUM_VALUES:
            raise ValueError(f"more than {MAXIMUM_VALUES:,} values")
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
        )
        _refuse_deep(value)
        _refuse_half_pairs(text, value)
    except json.JSONDecodeError as error:
        raise InvalidFileError([f"{name}:{error.lineno}: not valid JSON: {error.msg}"]) from None
    except RecursionError:
        raise InvalidFileError([f"{name}:1: nested too deeply"]) from None
    except ValueError as error:
        raise InvalidFileError([f"{name}:1: not valid JSON: {error!s:.120}"]) from None
    return value


def _refuse_deep(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAXIMUM_DEPTH):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def _refuse_half_pairs(text: str, value: Any) -> None:
    """Refuse what no UTF-8 text can hold, and so no answer that is printed."""
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {printable(twice, 60)!r} is given twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text:.40} is too large")
    return value


def _integer(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > MAXIMUM_DIGITS:
        raise ValueError(f"a number of {digits:,} digits")
    return int(text)
