"""Adapters that PEFT puts on stacked experts, held against requested peaks of the trace of TRL's SFTTrainer with PEFT 0.21.2."""

import pytest

from memplan.errors import CannotAnswerError
from memplan.model.families import around
from memplan.plan.reserve.simulation import events_of
from memplan.training.adapters import adapter_tensors
from tests.families.tiny import CASES
from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned, stack_setup

SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 4096, "tie_word_embeddings": False}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, **SMALL}
QWEN3 = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384, **SMALL}
QWEN3 |= {"head_dim": 64}
QLORA = {"default": "bf16", "hidden_matrix": "nf4"}


def plan(catalog, model, weights, checkpointing, dtype, **adapter):
    training = {"description": "", "stack": "trl", "compute_dtype": "bf16", "weights": weights, "sequence_length": 256}
    training |= {"optimizer": {"default": "adamw-bf16" if dtype == "bf16" else "adamw-fp32"}, "micro_batch_size": 1}
    training |= {"activation_checkpointing": checkpointing}
    training["adapter"] = {"kind": "lora", "rank": 16, "dtype": dtype, **adapter}
    return planned(StackJob(Job(model, training), "9.0", reentrant=False), catalog)


@pytest.mark.parametrize(
    ("model", "weights", "checkpointing", "dtype", "peak", "persistent"),
    [
        (MIXTRAL, {"default": "bf16"}, "none", "fp32", 166_303_831, 84_911_216),
        (MIXTRAL, {"default": "bf16"}, "full", "fp32", 126_746_684, 84_911_216),
        (MIXTRAL, QLORA, "full", "bf16", 109_017_658, 67_968_624),
        (QWEN3, {"default": "bf16"}, "full", "fp32", 107_345_244, 73_397_872),
        (QWEN3, QLORA, "none", "fp32", 139_907_735, 71_137_392),
    ],
)
def test_weights_with_their_adapters_folded_in(catalog, model, weights, checkpointing, dtype, peak, persistent):
    answer = plan(catalog, model, weights, checkpointing, dtype)
    assert answer.requested_bytes == pytest.approx(peak, rel=5e-4)
    assert answer.persistent_bytes == persistent


def test_a_parametrisation_checks_its_sum_once_before_the_experts_read_it(catalog):
    answer = plan(catalog, MIXTRAL, {"default": "bf16"}, "none", "fp32")
    events, down = events_of(answer), 8 * 512 * 1024 * 2
    step = events.codes[events.steady_from :]
    names = {down: "down", 2 * down: "gate_up"}
    folds = [("+-"[code % 2], names[size]) for code in step if (size := events.sizes[code // 2]) in names]
    checked = [("+", "down"), ("-", "down"), ("+", "gate_up"), ("-", "gate_up")]
    assert folds[:6] == [*checked, ("+", "gate_up"), ("+", "down")]


@pytest.mark.parametrize(("key", "value", "word"), [("kind", "dora", "dora"), ("dropout", 0.1, "dropout")])
def test_what_peft_refuses_on_experts_is_refused(catalog, key, value, word):
    with pytest.raises(CannotAnswerError, match=f"which PEFT refuses with {word}"):
        plan(catalog, QWEN3, {"default": "bf16"}, "full", "fp32", **{key: value})


ADAPTED = {name: case for name, case in CASES.items() if around(case[0]).adapted_experts not in ("", "left")}
NAMED = ["q_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("targets", ["all-linear", "listed", "named"])
def test_adapters_are_those_that_peft_makes(catalog, name, targets):
    """PEFT takes the names of projections for stacked parameters, so that shared experts and dense layers have none."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    family, config = ADAPTED[name]
    real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **config))
    linear = {part.rpartition(".")[2] for part, one in real.named_modules() if "Linear" in type(one).__name__} - {
        "lm_head"
    }
    chosen = {"all-linear": "all-linear", "listed": sorted(linear), "named": NAMED}[targets]
    if targets == "named" and (around(family).adapted_experts != "named" or "q_proj" not in linear):
        pytest.skip("whose experts no names reach, or which has no q_proj")
    adapted = peft.get_peft_model(real, peft.LoraConfig(r=4, target_modules=chosen))
    training = {
        "description": "",
        "stack": "llama-factory" if targets == "listed" else "trl",
        "weights": {"default": "bf16"},
        "compute_dtype": "bf16",
    }
    training["adapter"] = {"kind": "lora", "rank": 4, "dtype": "fp32"}
    training["adapter"]["targets"] = NAMED if targets == "named" else ["all-linear"]
    job = StackJob(Job({"model_type": family, **config}, training), "9.0", reentrant=False)
    tensors = adapter_tensors(*stack_setup(job, catalog))
    assert sum(tensor.elements * tensor.count for tensor in tensors) == adapted.get_nb_trainable_parameters()[0]
