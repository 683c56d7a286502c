"""Sizes need a unit, GiB and GB are never mixed, and rounding carries."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import MemplanError, UnitError
from memplan.units import (
    GIB,
    MAXIMUM_BYTES,
    UNIT_BYTES,
    ceil_div,
    format_bytes,
    format_count,
    format_fraction,
    parse_bytes,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("24gib", 24 * 2**30),
        ("0.5 TiB", 2**39),
        ("1.5MB", 1_500_000),
        ("0 MiB", 0),
        ("1_000 bytes", 1000),
        (" 7 B ", 7),
        ("0.1 B", 0),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, size):
    assert parse_bytes(text) == size


def test_binary_and_decimal_units_are_never_mixed():
    assert parse_bytes("80 GiB") - parse_bytes("80 GB") == 80 * (2**30 - 10**9)


@pytest.mark.parametrize(
    "text", ["80", "80G", "80 Gib it", "GiB", "", "-1 GiB", "1e3 GiB", "nan GiB", "inf GiB", "٣ GiB"]
)
def test_a_size_without_number_or_known_unit_is_refused(text):
    with pytest.raises(UnitError):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["2 EiB", "99999999 TiB", f"{10**30} B", "9" * 10_000 + " GiB"])
def test_an_absurd_size_is_refused_without_repeating_it(text):
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 160


def test_a_unit_error_is_a_value_error_and_ours():
    assert issubclass(UnitError, ValueError)
    assert issubclass(UnitError, MemplanError)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 2**15, "1.00 GiB"),
        (2**30 - 2**16, "1023.94 MiB"),
        (2**30 - 6 * 2**20, "1018.00 MiB"),
        (2**40, "1.00 TiB"),
        (1500 * 2**40, "1500.00 TiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_sizes_are_written_in_the_largest_binary_unit_and_rounding_carries(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("unit", "text"), [("GiB", "1.50 GiB"), ("GB", "1.61 GB"), ("MiB", "1536.00 MiB"), ("bytes", "1,610,612,736 B")]
)
def test_sizes_are_written_in_the_unit_that_was_asked_for(unit, text):
    assert format_bytes(3 * 2**29, unit) == text


@given(st.integers(0, MAXIMUM_BYTES))
def test_a_written_size_reads_back_within_its_rounding(size):
    text = format_bytes(size)
    unit = UNIT_BYTES[text.split()[1]]
    assert abs(parse_bytes(text) - size) <= unit // 200 + 1
    assert len(text.split(".")[0]) <= 7


@given(st.integers(0, MAXIMUM_BYTES))
def test_bytes_are_written_exactly(size):
    assert int(format_bytes(size, "bytes").removesuffix(" B").replace(",", "")) == size


@given(st.integers(0, 10**30), st.integers(1, 10**12))
def test_rounding_up_is_exact_in_integers(value, unit):
    assert (ceil_div(value, unit) - 1) * unit < value <= ceil_div(value, unit) * unit
    assert round_up(value, unit) == ceil_div(value, unit) * unit


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (8_030_261_248, "8.03B"),
        (671_026_419_200, "671.03B"),
        (124_439_808, "124.4M"),
        (999_999_999, "1.00B"),
        (950_000, "950.0K"),
        (995_000_000, "995.0M"),
        (999, "999"),
        (0, "0"),
    ],
)
def test_parameter_counts_read_as_people_write_them(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Fraction(49, 128), "0.3828"),
        (Fraction(2), "2"),
        (Fraction(0), "0"),
        (Fraction(-1, 3), "-0.3333"),
        (Fraction(99999, 10000) + 9, "18.9999"),
    ],
)
def test_ratios_are_decimal_text_without_trailing_zeros(ratio, text):
    assert format_fraction(ratio) == text


def test_a_tebibyte_is_1024_gibibytes():
    assert parse_bytes("1 TiB") == 1024 * GIB
