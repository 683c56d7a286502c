"""The notes' table of bytes per parameter: what they printed beside what true block layouts give.

Source: https://github.com/SQCU/pfhe/blob/5494a6a/notes/2025-12-29-max-trainable-scale.md
"""

from fractions import Fraction

import pytest

from memplan.plan.bytes_per_parameter import bytes_per_parameter
from memplan.units import format_fraction

Q4, IQ3, IQ2 = Fraction(18, 32), Fraction(98, 256), Fraction(66, 256)
MUON_8, MUON_4, MUON_2 = Fraction(132, 128), Fraction(68, 128), Fraction(36, 128)

# config, weights, gradients, states, the notes' printed total
ROWS = [
    ("fp16-adam", 2, 2, 8, "12.00"),
    ("fp16-muon", 2, 2, 4, "8.00"),
    ("q4-adam", Q4, 2, 8, "10.56"),
    ("q4-muon-bf16", Q4, 2, 2, "4.56"),
    ("q4-muon-int8", Q4, 2, MUON_8, "3.56"),
    ("tier1", Q4, 2, MUON_4, "3.06"),
    ("tier2", Q4, 1, MUON_4, "2.06"),
    ("iq3-muon-int4", IQ3, 2, MUON_4, "2.81"),
    ("tier3", IQ3, 1, MUON_4, "1.81"),
    ("q4-muon-int2", Q4, 2, MUON_2, "2.81"),
    ("iq2-fp8-muon-int4", IQ2, 1, MUON_4, "1.75"),
]
TRUE_TOTALS = {
    "fp16-adam": "12", "fp16-muon": "8", "q4-adam": "10.5625", "q4-muon-bf16": "4.5625", "q4-muon-int8": "3.5938",
    "tier1": "3.0938", "tier2": "2.0938", "iq3-muon-int4": "2.9141", "tier3": "1.9141", "q4-muon-int2": "2.8438", "iq2-fp8-muon-int4": "1.7891",
}  # fmt: skip


@pytest.mark.parametrize(("config", "weights", "gradients", "states", "printed"), ROWS, ids=[row[0] for row in ROWS])
def test_bytes_per_parameter_are_those_of_the_blocks(setup_of, config, weights, gradients, states, printed):
    found = bytes_per_parameter(setup_of(config))
    assert (found.weights, found.master_weights, found.gradients, found.optimizer_states) == (
        weights,
        0,
        gradients,
        states,
    )
    assert found.total == weights + gradients + states


@pytest.mark.parametrize(("config", "total"), list(TRUE_TOTALS.items()), ids=list(TRUE_TOTALS))
def test_true_totals_are_those_of_the_tables_notes(setup_of, config, total):
    assert format_fraction(bytes_per_parameter(setup_of(config)).total) == total


def test_tier1_weights_take_0_5625_and_tier3_1_9140625_in_all(setup_of):
    assert bytes_per_parameter(setup_of("tier1")).weights == Fraction("0.5625")
    assert bytes_per_parameter(setup_of("tier3")).total == Fraction("1.9140625")


@pytest.mark.parametrize(("config", "weights", "gradients", "states", "printed"), ROWS, ids=[row[0] for row in ROWS])
def test_the_notes_print_no_more_than_the_truth(setup_of, config, weights, gradients, states, printed):
    """They leave out scales, so that what they print is at most the true total, and never 7 % less."""
    total = bytes_per_parameter(setup_of(config)).total
    assert total * 93 / 100 <= Fraction(printed) <= total


@pytest.mark.parametrize("config", ["lora", "qlora"])
def test_frozen_weights_have_no_gradients_and_no_states(setup_of, config):
    found = bytes_per_parameter(setup_of(config))
    assert found.total == found.weights
