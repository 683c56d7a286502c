"""What memplan holds true of printed figures: the planner's own, and shapes planned to the byte."""

import pytest

from memplan.documents.printed_numbers import formatted_like
from memplan.plan.bytes_per_parameter import bytes_per_parameter
from memplan.published.planned import parameters, shape_plan

D20_FULL_MATRICES = 24 * (4 * 768**2 + 3 * 768 * 2688)


def plan(judge, catalog, name, optimizer):
    return shape_plan(name, judge.library.shapes[name], optimizer, catalog)


@pytest.mark.parametrize(
    ("name", "matrices", "rest"),
    [
        ("test-8bit", 4 * (4 * 256**2 + 3 * 256 * 512), 2 * 50257 * 256 + 9 * 256),
        ("d20-e3-full", D20_FULL_MATRICES, 2 * 50257 * 768 + 49 * 768),
        ("d20", 6 * (4 * 256**2 + 3 * 256 * 768), 50257 * 256 + 13 * 256),
    ],
)
def test_the_notes_shapes_are_planned_to_the_byte(judge, catalog, name, matrices, rest):
    """Muon takes the matrices; embedding, head and norms keep two fp32 moments of AdamW."""
    fp32, int8 = (plan(judge, catalog, name, optimizer) for optimizer in ("muon-fp32", "muon-int8"))
    assert parameters(fp32) == matrices + rest
    assert fp32.states.weight_bytes == fp32.states.gradient_bytes == 4 * (matrices + rest)
    assert fp32.states.state_bytes == 4 * matrices + 8 * rest
    assert int8.states.state_bytes == matrices * 132 // 128 + 8 * rest


def test_the_28_4m_shape_has_10_49_and_2_70_mb_under_muon():
    matrices = 4 * (4 * 256**2 + 3 * 256 * 512)
    assert (4 * matrices, matrices * 132 // 128) == (10_485_760, 2_703_360)


def test_three_billion_parameters_miss_the_card_that_the_notes_name(cell):
    found = cell("s000.t04", "Llama-3.2-3B", "Q4+Muon 4-bit")
    assert (found.printed, found.recomputed, found.corrected, found.wrong) == ("RTX 3060", "RTX 3060", "RTX 3090", True)


def test_a_card_holds_a_smaller_llama_than_the_notes_say(cell):
    row = [cell("s000.t05", "RTX 4090 24GB", column) for column in ("FP16+Adam", "Q4+Muon 4-bit", "IQ3+FP8+Muon")]
    assert [(one.printed, one.corrected, one.wrong) for one in row] == [
        ("1B", "1B", False),
        ("3B", "3B", False),
        ("8B", "3B", True),
    ]


def test_bytes_per_parameter_are_the_planners(cell, setup_of):
    found = cell("s000.t01", "IQ3 + FP8 grad + Muon 4-bit", "TOTAL")
    assert found.corrected == formatted_like("1.81", (bytes_per_parameter(setup_of("tier3")).total,)) == "1.91"


def test_checkpointing_keeps_less_than_a_third(cell):
    whole = float(cell("s000.t12", "batch 1", "seq=2048").corrected)
    kept = float(cell("s000.t13", "batch 1", "seq=2048").corrected)
    assert kept < whole / 8


def test_newton_schulz_in_bf16_takes_10_n_squared_bytes_not_half_of_fp32(cell):
    assert cell("s001.t10", "BF16", "Buffer Size (hidden=4096)").corrected == "168"
    assert cell("s001.t10", "FP32", "Buffer Size (hidden=4096)").corrected == "201"
    assert cell("s001.t10", "INT8", "Buffer Size (hidden=4096)").corrected is None


def test_a_bound_says_which_real_model_fits(judge):
    table = judge.library.tables["s000.t02"]
    found = judge.cell(table, judge.library.cell("s000.t02", "RTX 4090 24GB", "FP16+Adam (12 B/p)"))
    assert found.corrected == "2.1B; olmo-2-1b (1.48B)"


def test_a_config_that_lags_behind_does_not_bear_out_that_it_is_proven(cell):
    found = cell("s000.t07", "Q4_0 weights updated directly", "claim")
    assert found.status == "differs"
    assert found.corrected.startswith("behind")
