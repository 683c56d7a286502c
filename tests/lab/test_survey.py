"""Formula against trace on jobs drawn at random: every family, odd shapes, every key of a training config.

The seed is fixed here. ``python -m tests.survey --jobs 300 --shrink`` draws others, a new seed each day, and
prints what differs as the smallest job that still does; ``--job`` takes one back. ``pytest -m slow tests/lab/test_survey.py``
runs three hundred jobs of this seed, and of the one in ``MEMPLAN_SURVEY_SEED``, or of the day without it.
"""

import json
import os
import time
from random import Random

import pytest

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.families import families, model_spec
from tests.families.tiny import CASES
from tests.survey.__main__ import main
from tests.survey.drawn_jobs import INSTANT_SHARE, PEAK_SHARE, Job, drawn_job, resolved, verdict
from tests.survey.drawn_models import ENCODERS, model_values
from tests.survey.shrinking import shrunk

pytestmark = pytest.mark.thorough

SEED = 20_261_121
TOGETHER = 10
BATCHES = range(10)
WORST_PEAK = 0.01
COMPONENT_SHARE = 0.01
"""Of the peak: what one component of formula and trace may have that another has in the other."""
LEAST_RESERVED, MOST_RESERVED = 0.97, 1.10
"""Segments with the formula's events, as a share of those with the trace's: less could say FITS of what does not."""
MOST_REFUSED = 0.10


def verdicts(seed, numbers, catalog):
    return [verdict(drawn_job(seed, number, catalog), catalog) for number in numbers]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch", BATCHES)
def test_formula_and_trace_agree_wherever_one_looks(batch, catalog):
    """No job crashes, states are equal to the byte, no peak is off by more than 1 %, and one at most by 0.1 %."""
    numbers = range(batch * TOGETHER, (batch + 1) * TOGETHER)
    found = verdicts(SEED, numbers, catalog)
    assert not [(v.job.text, v.reason) for v in found if v.outcome == "crashed"]
    answered = [v for v in found if v.outcome != "refused"]
    assert not [(v.job.text, dict(v.differences)) for v in answered if not v.exact_states or v.peak_share > WORST_PEAK]
    far = [
        (v.job.text, dict(v.differences))
        for v in answered
        if v.peak_share > PEAK_SHARE or v.instant_share > INSTANT_SHARE
    ]
    assert len(far) <= 1, far
    assert len(answered) >= TOGETHER - 3
    assert not [(v.job.text, dict(v.components)) for v in answered if v.component_share > COMPONENT_SHARE]
    played = [(v.job.text, v.reserved_bytes / v.traced_reserved_bytes) for v in answered if v.reserved_bytes]
    assert played
    assert not [pair for pair in played if not LEAST_RESERVED <= pair[1] <= MOST_RESERVED]


OWN_WAYS = [
    # Layers have a module for the feed-forward part that those of transformers run themselves.
    ("opt", {"ffn_dim": 512}, {"activation_checkpointing": "full"}),
    # Experts are chosen in fp32, and autocast does not undo that.
    ("granite-moe", {}, {"weights": {"default": "fp32"}}),
]
"""Case of a family, keys of its model and of a job in which the bundled models' way of it shows."""


@pytest.mark.parametrize(("case", "model", "training"), OWN_WAYS, ids=[case for case, _, _ in OWN_WAYS])
def test_families_agree_at_every_instant_where_the_bundled_models_have_a_way_of_their_own(
    case, model, training, catalog
):
    family, config = CASES[case]
    common = {"description": case, "micro_batch_size": 3, "sequence_length": 32}
    found = verdict(Job({"model_type": family} | config | model, common | training), catalog)
    assert (found.outcome, dict(found.differences)) == ("agrees", {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [SEED, int(os.environ.get("MEMPLAN_SURVEY_SEED", int(time.time()) // 86400))])
def test_other_jobs_and_a_new_seed_agree_as_well(seed, catalog):
    found = verdicts(seed, range(300), catalog)
    answered = [v for v in found if v.outcome != "refused"]
    assert not [(seed, v.job.text, v.reason) for v in found if v.outcome == "crashed"]
    assert not [(seed, v.job.text, dict(v.differences)) for v in answered if not v.exact_states]
    near = [v for v in answered if v.peak_share <= PEAK_SHARE]
    assert len(near) >= 0.99 * len(answered), seed
    assert max(v.peak_share for v in answered) <= WORST_PEAK, seed
    assert sum(v.instant_share <= INSTANT_SHARE for v in answered) >= 0.99 * len(answered), seed
    assert len(answered) >= (1 - MOST_REFUSED) * len(found), seed


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_autocast_casts_an_adapter_once(catalog, kind, checkpointing):
    """DoRA's norm and its product read one copy; two at the end of forward were 5.5 % of a small job's peak."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_hidden_layers": 2}
    model = {"model_type": "llama", "vocab_size": 97, "max_position_embeddings": 64, **sizes}
    training = {
        "description": "test",
        "adapter": {"kind": kind, "dtype": "fp32"},
        "weights": {"default": "fp32"},
        "activation_checkpointing": checkpointing,
        "micro_batch_size": 1,
        "sequence_length": 64,
    }
    assert dict(verdict(Job(model, training), catalog).differences) == {}


NARROW = {"num_hidden_layers": 1, "vocab_size": 1000, "max_position_embeddings": 1024, "tie_word_embeddings": False}
WIDE_GRADIENTS = {"weights": {"default": "fp16"}, "gradients": {"dtype": "fp32"}, "compute_dtype": "fp16"}


@pytest.mark.parametrize(
    ("family", "sizes", "training"),
    [
        ("arcee", (384, 1024, 6, 2), {"weights": {"default": "fp32"}}),  # autocast forms powers in fp32
        ("llama", (384, 40, 6, 2), {"weights": {"hidden_matrix": "nf4"}, "adapter": {"targets": ["down_proj"]}}),
        ("cohere", (1280, 257, 8, 8), WIDE_GRADIENTS),  # without a bias
        ("phi", (1280, 257, 8, 8), WIDE_GRADIENTS),  # with one
    ],
)
def test_gradients_of_narrow_layers_come_and_go_as_in_autograd(catalog, family, sizes, training):
    """What is alive between two products decides, where feed-forward parts are no wider than the model."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    model = {"model_type": family, **dict(zip(keys, sizes, strict=True)), **NARROW}
    job = Job(model, {"description": "test", "micro_batch_size": 1, "sequence_length": 512, **training})
    assert dict(verdict(job, catalog).differences) == {}


CHUNKED = {"kernels": {"loss": "chunked"}, "micro_batch_size": 5}
BIASED = {"model_type": "phi", "hidden_size": 48, "intermediate_size": 3, "num_attention_heads": 6, "vocab_size": 32000}
FEW_WORDS = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "vocab_size": 97,
}
ENDS_OF_CODES = {
    "weights": {"default": "fp32", "embedding": "iq3-xxs", "hidden_matrix": "q4-0"},
    "weight_average": "fp32",
}
DROPS = {"compute_dtype": "fp16", "weights": {"default": "fp16"}}
TURNED = {
    "model_type": "hunyuan_v1_dense",
    "hidden_size": 64,
    "head_dim": 128,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "vocab_size": 97,
}
LATE_NORM = {"weights": {"default": "fp32"}, "sequence_length": 128}
"""Heads lie apart when they are normalised, behind their rotation, so that the kernel copies them."""
NEAR = 64
"""Bytes: the numbers of a loss, and blocks of the smallest tensors."""


@pytest.mark.parametrize(
    ("model", "training"),
    [
        (BIASED, {**CHUNKED, "gradients": {"dtype": "fp32"}}),  # its bias is stored before its matrix
        (BIASED, {**CHUNKED, "gradients": {"dtype": "fp32", "lifetime": "layer"}}),
        (BIASED, {**CHUNKED, "gradients": {"dtype": "fp8-e4m3"}}),  # chunks add up, and store nothing
        (BIASED, {**CHUNKED, "gradients": {"lifetime": "layer"}}),
        (FEW_WORDS, {**CHUNKED, "weights": {"default": "fp32"}, "sequence_length": 1000}),
        ({**FEW_WORDS, "vocab_size": 20011}, {**ENDS_OF_CODES, "compute_dtype": "fp32"}),
        (FEW_WORDS, {**DROPS, "adapter": {"kind": "dora", "dropout": 0.1}}),
        (FEW_WORDS, {**DROPS, "adapter": {"dropout": 0.1}, "activation_checkpointing": "full"}),
        (FEW_WORDS, {"evaluation": True, "evaluation_batch_size": 7, "dropout": 0.1}),
        (TURNED, {**LATE_NORM, "activation_checkpointing": "full"}),
        (TURNED, {**LATE_NORM, "kernels": {"attention": "efficient"}}),
    ],
)
def test_what_later_draws_found_agrees(catalog, model, training):
    keys = {"num_hidden_layers": 1, "max_position_embeddings": 1024, "tie_word_embeddings": False}
    sizes = {"description": "test", "micro_batch_size": 1, "sequence_length": 2}
    found = verdict(Job({**keys, **model}, {**sizes, **training}), catalog)
    assert {name: size for name, size in found.differences.items() if abs(size) > NEAR} == {}, found.reason


SMALL = {
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("weights", "kernels"),
    [
        ({"default": "bf16", "head": "nf4"}, {"loss": "chunked", "loss_chunks": 1}),
        ({"default": "fp32", "embedding": "nf4"}, {}),
        ({"default": "fp32", "embedding": "bf16"}, {}),
    ],
    ids=["a frozen head's one chunk has let its rows go", "decoded rows under autocast", "narrow rows under autocast"],
)
def test_weights_of_other_formats_than_the_rest_agree_at_every_instant(catalog, weights, kernels):
    training = {
        "description": "test",
        "adapter": {"kind": "lora"},
        "weights": weights,
        "kernels": kernels,
        "micro_batch_size": 3,
        "sequence_length": 64,
    }
    assert dict(verdict(Job(SMALL, training), catalog).differences) == {}


def test_rows_of_a_trained_table_of_codes_are_decoded_in_forward_alone(catalog):
    weights = {"default": "bf16", "hidden_matrix": "q4-0", "embedding": "q4-0", "head": "bf16"}
    training = {"description": "test", "weights": weights, "micro_batch_size": 3, "sequence_length": 64}
    assert dict(verdict(Job(SMALL, training), catalog).differences) == {}


def test_gradients_of_weighted_rows_are_blocks_of_their_own_in_the_allocator(catalog):
    model = {"model_type": "mixtral", "hidden_size": 130, "head_dim": 96, "intermediate_size": 3, "vocab_size": 1000}
    model |= {"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1}
    model |= {"num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": False}
    training = {"description": "test", "adapter": {"kind": "lora", "targets": ["o_proj", "v_proj"]}}
    training |= {"kernels": {"attention": "math", "loss": "chunked"}, "micro_batch_size": 5, "sequence_length": 128}
    agreed = verdict(Job(model, training), catalog)
    assert agreed.reserved_bytes == agreed.traced_reserved_bytes


SIZES = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "vocab_size": 97,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v2", "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
FP32 = {"weights": {"default": "fp32"}, "compute_dtype": "fp32"}
MENDED = {
    "all parameters are one group, and the last norm's update is left over at the head": (
        {"tie_word_embeddings": False, "vocab_size": 8191},
        {"optimizer": {"default": "adafactor-transformers"}},
    ),
    "what attention's kernel made goes once it is joined": (
        LATENT,
        {**FP32, "adapter": {"kind": "dora", "targets": ["o_proj"]}, "evaluation": True},
    ),
    "one kernel forms the gradient of a gate that needs none": (
        {"intermediate_size": 1000},
        {"adapter": {"targets": ["up_proj"]}, "kernels": {"activation": "fused"}, "activation_checkpointing": "full"},
    ),
    "DoRA's dropped input goes before its sum": (
        {},
        {
            **FP32,
            "adapter": {"kind": "dora", "dtype": "fp16", "dropout": 0.1, "targets": ["down_proj"]},
            "activation_checkpointing": "full",
            "evaluation": True,
        },
    ),
    "the chunks' sum of a copy's gradients is no gradient yet": (
        {"tie_word_embeddings": True, "vocab_size": 50_257},
        {"weights": {"default": "fp32"}, "kernels": {"loss": "chunked"}, "optimizer": {"default": "adamw-fp32"}},
    ),
    "scores as long as the vocabulary is wide are no logits": (
        {"vocab_size": 192},
        {"kernels": {"attention": "math"}, "sequence_length": 192},
    ),
}
"""Jobs that a survey drew, made small: each had an instant or a component at its peak that was not the trace's."""


@pytest.mark.parametrize("case", MENDED)
def test_what_a_survey_has_shown_agrees_at_every_instant_and_by_component(case, catalog):
    model, training = MENDED[case]
    common = {"description": case, "micro_batch_size": 3, "sequence_length": 128}
    agreed = verdict(Job(SIZES | model, common | training), catalog)
    assert (agreed.outcome, dict(agreed.differences), dict(agreed.components)) == ("agrees", {}, {})


def test_every_family_is_drawn_and_every_model_is_one():
    from memplan.catalog.catalog import Catalog, data_directory

    catalog = Catalog(data_directory())
    drawn = [model_values(Random(number), catalog, linear=number >= 600) for number in range(660)]
    assert {values["model_type"] for values in drawn} == set(families()) - set(ENCODERS)
    for values in drawn:
        model_spec(values, "drawn", "test")


def test_a_job_is_drawn_again_alone(catalog):
    assert drawn_job(3, 17, catalog) == drawn_job(3, 17, catalog)
    assert drawn_job(3, 17, catalog) != drawn_job(3, 18, catalog)


def test_most_draws_are_possible_and_refusals_have_a_reason(catalog):
    refused = []
    for number in range(200):
        job = drawn_job(7, number, catalog)
        try:
            resolved(job, catalog)
        except (CannotAnswerError, InvalidFileError) as error:
            refused.append(str(error))
    assert len(refused) <= MOST_REFUSED * 200
    assert all(refused)


def test_what_fails_is_shrunk_to_what_matters(catalog, monkeypatch):
    """A formula that loses a byte under composite norms is found by a job that has little else."""
    import tests.survey.drawn_jobs as jobs

    honest = jobs.CompiledPlan.evaluate

    def forgetful(plan, device, *rest):
        answer = honest(plan, device, *rest)
        if plan.setup.profile.norm == "composite":
            from dataclasses import replace

            return replace(answer, persistent_bytes=answer.persistent_bytes - 1)
        return answer

    monkeypatch.setattr(jobs.CompiledPlan, "evaluate", forgetful)
    numbers = (number for number in range(200) if "composite" in drawn_job(1, number, catalog).text)
    failing = next(v for v in (verdict(drawn_job(1, n, catalog), catalog) for n in numbers) if v.outcome == "differs")
    small = shrunk(failing, catalog).job
    assert small.training["kernels"] == {"norm": "composite"}
    assert small.training["sequence_length"] == 64 or small.training["sequence_length"] < 64
    assert len(small.training) < len(failing.job.training)


def test_the_command_takes_a_job_back(catalog, capsys):
    job = drawn_job(SEED, 0, catalog)
    assert Job(**json.loads(job.text)) == job
    main(["--job", job.text])
    assert "1 jobs" in capsys.readouterr().out
