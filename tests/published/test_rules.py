"""The rules of the notes at their printed digits, and the form in which a number is written."""

from fractions import Fraction

import pytest

from memplan.documents.printed_numbers import Interval, formatted_like, lies_within, numbers
from memplan.errors import MemplanError
from memplan.muon.orthogonalisation.schedules import YOU_JIACHENG
from memplan.published import notes_accounting

GB = 10**9


@pytest.mark.parametrize(
    ("printed", "value", "unit", "text"),
    [
        ("3.06", Fraction(49, 16), None, "3.06"),
        ("12.0", 12, None, "12.0"),
        ("833M", 833_222_784, None, "833M"),
        ("167.2B", Fraction(167_183_673_469), None, "167.2B"),
        ("201", 201_326_592, "MB", "201"),
        ("84 GB", 84 * GB, None, "84 GB"),
        ("~2.2", 2_256_000_000, "GB", "~2.3"),
        ("74.2%", Fraction(95, 128), None, "74.2%"),
        ("-2.7%", Fraction(-94, 3490), None, "-2.7%"),
        ("+2.5%", Fraction(26, 1023), None, "+2.5%"),
        ("+0.0 %", Fraction(1, 1000), None, "+0.1 %"),
        ("0.00006", Fraction(1, 16000), None, "0.00006"),
        ("2.0x smaller", 2, None, "2.0x smaller"),
        ("10MB", 10_485_760, None, "10MB"),
    ],
)
def test_a_number_takes_the_form_of_the_printed_one(printed, value, unit, text):
    assert formatted_like(printed, (value,), unit) == text


def test_several_numbers_take_their_places_and_words_stay():
    assert formatted_like("~8-11 GB minimum", (Fraction("8.4") * GB, Fraction("12.4") * GB)) == "~8-12 GB minimum"
    assert formatted_like("8 MB (74.2% reduction)", (8_000_000, Fraction(4, 5))) == "8 MB (80.0% reduction)"
    assert formatted_like("~40% total", (Interval(Fraction("0.454"), Fraction("0.5")),)) == "~45-50% total"
    assert formatted_like(">640GB", "impossible") == "impossible"


def test_the_numbers_of_a_text_have_the_next_suffix_or_the_tables_unit():
    assert [float(n.value) for n in numbers("~4-8 GB")] == [4e9, 8e9]
    assert [float(n.value) for n in numbers("50-75%")] == [0.5, 0.75]
    assert [float(n.value) for n in numbers("~2.2", "GB")] == [2.2e9]
    assert [float(n.value) for n in numbers("8B+")] == [8e9]


@pytest.mark.parametrize(("low", "high", "inside"), [("0.1395", "0.149", True), ("0.1456", "0.15", False)])
def test_a_measurement_lies_within_a_spread_widened_by_half_of_its_last_digit(low, high, inside):
    assert lies_within("0.145", [Interval(Fraction(low), Fraction(high))]) is inside


@pytest.mark.parametrize(
    ("config", "total"),
    [("fp16-adam", "12"), ("tier1", "3.0625"), ("tier2", "2.0625"), ("tier3", "1.81"), ("iq2-fp8-muon-int4", "1.75")],
)
def test_notes_scale_adds_parts_without_scales(config, total):
    assert notes_accounting.parts_of(notes_accounting.SCALE, config).total == Fraction(total)


def test_notes_scale_uses_four_fifths_of_decimal_gigabytes():
    assert notes_accounting.largest_parameters(notes_accounting.SCALE, "tier3", 24 * GB) == Fraction(
        "19.2"
    ) * GB / Fraction("1.81")
    assert (
        formatted_like("10.6B", (notes_accounting.largest_parameters(notes_accounting.SCALE, "tier3", 24 * GB),))
        == "10.6B"
    )


def test_notes_precision_takes_a_buffer_off_0_85_of_the_card():
    found = notes_accounting.largest_parameters(notes_accounting.PRECISION, "fp16-adam", 12 * GB)
    assert found == (Fraction("10.2") * GB - 201_326_592) / 12
    assert formatted_like("833M", (found,)) == "833M"
    assert (
        formatted_like("181.3B", (notes_accounting.largest_parameters(notes_accounting.PRECISION, "tier1", 640 * GB),))
        == "181.3B"
    )


@pytest.mark.parametrize(
    ("config", "billions", "gpus"),
    [
        ("tier1", 7, (1, "rtx4090")),
        ("tier1", 8, (1, "rtx4090")),
        ("tier1", 13, (1, "h100-sxm-80gb")),
        ("fp16-adam", 7, (2, "h100-sxm-80gb")),
        ("fp16-adam", 405, (61, "h100-sxm-80gb")),
        ("tier1", 405, (16, "h100-sxm-80gb")),
    ],
)
def test_notes_min_gpus_fills_cards_to_the_last_byte(config, billions, gpus):
    assert notes_accounting.minimum_gpus(config, Fraction(billions)) == gpus


def test_the_first_card_is_that_of_the_scripts_order_not_the_smallest():
    assert notes_accounting.first_card("tier1", 8) == "A6000"
    assert notes_accounting.first_card("fp16-adam", 405) == ">640GB"


@pytest.mark.parametrize(("batch", "sequence", "whole"), [(1, 512, "0.8"), (1, 4096, "36.5"), (32, 2048, "309")])
def test_the_activation_rule(batch, sequence, whole):
    assert formatted_like(whole, (notes_accounting.activation_bytes(batch, sequence, False),), "GB") == whole
    assert 3 * notes_accounting.activation_bytes(batch, sequence, True) == notes_accounting.activation_bytes(
        batch, sequence, False
    )


def test_the_coefficients_are_those_that_the_bundled_optimizer_runs():
    assert [tuple(map(float, row.values())) for row in notes_accounting.YOU_JIACHENG] == list(YOU_JIACHENG)


@pytest.mark.parametrize("accounting", notes_accounting.ACCOUNTINGS)
def test_an_unknown_config_is_refused_with_those_that_the_rule_knows(accounting):
    with pytest.raises(MemplanError) as caught:
        notes_accounting.parts_of(accounting, "bf16-adamw")
    assert "fp16-adam" in str(caught.value)
    assert "tier1" in str(caught.value)
