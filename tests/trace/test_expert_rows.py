"""Experts of a width whose rows are no multiple of 16 bytes: grouped products pad rows, of gradients too."""

import pytest

from tests.survey.drawn_jobs import Job, verdict

MODEL = {
    "model_type": "gpt_oss",
    "hidden_size": 130,
    "head_dim": 64,
    "intermediate_size": 257,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "sliding_window": 128,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LEFT = 1e-5
"""The last row of a result is not padded, which a formula by token does not tell."""


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"gradients": {"lifetime": "layer"}},
        {"gradients": {"dtype": "fp8-e4m3"}},
        {"weights": {"default": "fp32"}, "gradient_accumulation_steps": 3},
    ],
    ids=["kept", "used at once", "stored in 8 bits", "cast and added up"],
)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_a_gradient_whose_rows_lie_apart_is_copied_and_goes_before_anything_else(family, keys, catalog):
    training = {"description": "", "micro_batch_size": 1, "sequence_length": 64, **keys}
    result = verdict(Job({**MODEL, "model_type": family}, training), catalog)
    assert (result.outcome, result.exact_states) == ("agrees", True)
    assert max(result.peak_share, result.instant_share) < LEFT


WHOLE_ROWS = {"hidden_size": 128, "intermediate_size": 256, "num_experts_per_tok": 2}
ADAPTED = {"description": "", "sequence_length": 128, "adapter": {"kind": "lora", "rank": 4}}
CODED = {"weights": {"default": "bf16", "hidden_matrix": "q5-b64", "expert_matrix": "q5-b64"}}
TRAINED = {"description": "", "sequence_length": 128, "optimizer": {"default": "muon-int8"}}


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_frozen_experts_keep_no_numbers_for_biases_and_sum_scores_when_a_wide_gradient_is_gone(family, catalog):
    """Each was counted for every row: 8 bytes of its expert's number, 4 of its score's gradient."""
    result = verdict(Job({**MODEL, **WHOLE_ROWS, "model_type": family}, ADAPTED), catalog)
    assert (result.outcome, result.differences, result.components) == ("agrees", {}, {})


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("keys", [ADAPTED, TRAINED], ids=["frozen", "trained"])
def test_products_with_coded_experts_keep_where_rows_end_until_the_graph_goes(keys, checkpointing, catalog):
    """Four bytes an expert and layer, which were let go of with what the product had saved, or at once."""
    training = {**keys, **CODED, "activation_checkpointing": checkpointing}
    result = verdict(Job({**MODEL, **WHOLE_ROWS}, training), catalog)
    assert (result.outcome, result.differences, result.components) == ("agrees", {}, {})
