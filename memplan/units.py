"""Bytes, shares and parameter counts: exact integers inside, readable text at the edges."""

import re
from fractions import Fraction
from functools import lru_cache

from memplan.errors import UnitError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

UNIT_BYTES: dict[str, int] = {
    "bytes": 1,
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

_UNITS_IN_ANY_CASE = {name.lower(): scale for name, scale in UNIT_BYTES.items()}

MAXIMUM_BYTES = 2**60
"""Larger quantities are refused: no machine has an exbibyte, so it is a slip."""

_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` rounded up.

    Example:
        >>> ceil_div(257, 256)
        2
    """
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@lru_cache(maxsize=64)
def nearest_divisor(total: int, parts: int) -> int:
    """Return the number nearest to ``parts`` that divides a total, both at least 1: the smaller one of two.

    Example:
        >>> nearest_divisor(32, 5), nearest_divisor(8, 16), nearest_divisor(8, 3)
        (4, 8, 2)
    """
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - parts))


def parse_bytes(text: str) -> int:
    """Return the bytes that ``text`` names; the unit is required.

    ``GiB`` is 2**30 bytes and ``GB`` is 10**9: the two are never taken for each other.

    Raises:
        UnitError: No number, no unit, an unknown unit, or more than 2**60 bytes.

    Example:
        >>> parse_bytes("24 GiB"), parse_bytes("24GB")
        (25769803776, 24000000000)
    """
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(f"{shown!r} is not a size: write a number and a unit, such as '24 GiB' or '24 GB'")
    number, unit = match.groups()
    scale = _UNITS_IN_ANY_CASE.get(unit.lower())
    if scale is None:
        raise UnitError(f"{shown!r} has an unknown unit {unit!r}: use one of bytes, MiB, GiB, TiB, MB, GB, TB")
    if len(number) > 25:
        raise UnitError(f"{shown!r} is too large to be a size in memory")
    value = Fraction(number.replace("_", "")) * scale
    if value > MAXIMUM_BYTES:
        raise UnitError(f"{shown!r} is too large to be a size in memory")
    return int(value)


def format_bytes(value: int, unit: str = "") -> str:
    """Return ``value`` as text in ``unit``, or in the largest binary unit that fits.

    Rounding carries: 1023.96 MiB is written ``1.00 GiB``.

    Example:
        >>> format_bytes(66_344_000_000), format_bytes(2**30 - 2**15), format_bytes(66_344_000_000, "GB")
        ('61.79 GiB', '1.00 GiB', '66.34 GB')
    """
    if unit == "bytes":
        return f"{value:,} B"
    if unit:
        return f"{_decimal(value, UNIT_BYTES[unit])} {unit}"
    sign, size = ("-", -value) if value < 0 else ("", value)
    for name, scale in (("B", 1), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB)):
        if 20 * size < (20 * 1024 - 1) * scale:
            return f"{sign}{size if scale == 1 else _decimal(size, scale)} {name}"
    return f"{sign}{_decimal(size, TIB)} TiB"


def _decimal(value: int, scale: int, digits: int = 2) -> str:
    """Return ``value / scale`` with ``digits`` decimals, rounded half up in integers."""
    sign, value = ("-", -value) if value < 0 else ("", value)
    scaled = (2 * value * 10**digits + scale) // (2 * scale)
    whole, rest = divmod(scaled, 10**digits)
    return f"{sign}{whole}.{rest:0{digits}d}"


def format_count(value: int) -> str:
    """Return a parameter count as people write it: ``8.03B``, ``124M``.

    Example:
        >>> format_count(8_030_261_248), format_count(124_439_808), format_count(999_999_999)
        ('8.03B', '124.4M', '1.00B')
    """
    if value < 1000:
        return str(value)
    for scale, suffix, digits in ((10**3, "K", 1), (10**6, "M", 1), (10**9, "B", 2)):
        text = _decimal(value, scale, digits)
        if float(text) < 1000:
            return text + suffix
    return _decimal(value, 10**12) + "T"


def format_fraction(value: Fraction, digits: int = 4) -> str:
    """Return a ratio as decimal text without trailing zeros.

    Example:
        >>> format_fraction(Fraction(49, 128))
        '0.3828'
    """
    sign, scaled = ("-", -value) if value < 0 else ("", value)
    text = _decimal(scaled.numerator, scaled.denominator, digits).rstrip("0").rstrip(".")
    return sign + text
