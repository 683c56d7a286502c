"""The formula beside the libraries' own code at toy size: every instant of adapters, quantised bases and both kinds of checkpointing."""

from dataclasses import replace
from typing import Any

import pytest

for package in ("transformers", "peft", "accelerate", "bitsandbytes"):
    pytest.importorskip(package)

from memplan.catalog.config_keys.parallel_keys import Parallel  # noqa: E402
from memplan.catalog.kernel_profiles import Kernels  # noqa: E402
from memplan.catalog.training_config import Adapter, TrainingConfig  # noqa: E402
from memplan.model.families import model_spec  # noqa: E402
from memplan.model.model import Model  # noqa: E402
from memplan.plan.memory_plan import Device  # noqa: E402
from memplan.plan.planner import CompiledPlan  # noqa: E402
from memplan.trace.stacks.registry import (  # noqa: E402
    StackInputs,
    details_of,
    trace_stack,
)
from memplan.training.resolution.resolve_config import resolve  # noqa: E402

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

KEYS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
NF4 = {"hidden_matrix": "nf4-dq", "default": "bf16"}
EFFICIENT = Kernels(attention="efficient")

TOLERANCE_BYTES = 2 * (2 * 128 * 32 * 4) + 32 * 128
"""Rotary tables, which transformers drops between steps, and keeps twice where a loop holds a graph that is computed
again reentrantly; and ids of positions and padded labels, of a few bytes a token."""


def differences(catalog, keys=KEYS, reentrant=False, **settings) -> dict[str, int]:
    """Return, for each instant, by how many bytes the formula exceeds the trace."""
    small = {"micro_batch_size": 2, "sequence_length": 128, "stack": "plain-loop"}
    config = TrainingConfig("", **{**small, **settings})
    setup = resolve(config, catalog, "test")
    if reentrant:
        kind = replace(setup.stack.checkpointing, reentrant=True)
        setup = replace(setup, stack=replace(setup.stack, checkpointing=kind))
    model = Model.from_spec(model_spec(keys, "toy", "test"), "test")
    trace, _ = trace_stack(config.stack, StackInputs(model, keys, setup, "9.0", details_of(setup)))
    name = "h100-sxm-80gb"
    formula = dict(CompiledPlan(model, setup).evaluate(Device(catalog.gpus[name], name)).instants)
    return {instant: formula[instant] - size for instant, size in trace.instant_bytes.items()}


JOBS: dict[str, dict[str, Any]] = {
    "fp32 adapters": {"adapter": Adapter(rank=4)},
    "bf16 adapters": {"adapter": Adapter(rank=4, dtype="bf16")},
    "dropout": {"adapter": Adapter(rank=4, dropout=0.1)},
    "some targets": {"adapter": Adapter(rank=4, targets=("q_proj", "down_proj"), dropout=0.1)},
    "dora": {"adapter": Adapter(kind="dora", rank=4)},
    "dora, dropout": {"adapter": Adapter(kind="dora", rank=4, dropout=0.1)},
    "4 bits, fp32 beside": {"adapter": Adapter(rank=4), "weights": NF4, "kernels": EFFICIENT},
    "4 bits, one level": {"adapter": Adapter(rank=4), "weights": {**NF4, "hidden_matrix": "nf4"}, "kernels": EFFICIENT},
}


@pytest.mark.parametrize("kind", ["none", "full", "reentrant"])
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.one_in(4)
def test_every_instant_is_that_of_the_libraries_own_code(catalog, job, kind):
    checkpointing = "none" if kind == "none" else "full"
    found = differences(catalog, reentrant=kind == "reentrant", activation_checkpointing=checkpointing, **JOBS[job])
    assert {"forward", "loss backward", "head backward", "layer 2 backward", "optimizer step"} <= found.keys()
    assert {name: size for name, size in found.items() if abs(size) > TOLERANCE_BYTES} == {}


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("adapter", [Adapter(rank=4), None], ids=["adapters", "all weights"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.one_in(5)
def test_head_and_loss_of_trl_are_one_function_over_tiles(catalog, kind, adapter, tied):
    pytest.importorskip("trl")
    keys = {**KEYS, "tie_word_embeddings": tied}
    found = differences(catalog, keys, stack="trl", activation_checkpointing=kind, adapter=adapter)
    assert "head backward" not in found, "its module is not called"
    assert {name: size for name, size in found.items() if abs(size) > TOLERANCE_BYTES} == {}


@pytest.mark.parametrize("floats", ["bf16", "fp32"])
@pytest.mark.parametrize("vocab_size", [1000, 40_000])
def test_a_second_tile_of_tokens_copies_rows_and_the_head_beside_the_first_ones(catalog, floats, vocab_size):
    pytest.importorskip("trl")
    keys = {**KEYS, "vocab_size": vocab_size, "max_position_embeddings": 8192}
    weights = {"default": floats}
    found = differences(catalog, keys, stack="trl", weights=weights, sequence_length=6000, micro_batch_size=1)
    assert abs(found["loss backward"]) <= TOLERANCE_BYTES


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens", "lm_head")], ids=len)
def test_modules_that_are_trained_whole_are_copies_beside_their_originals(catalog, kind, modules):
    adapter = Adapter(rank=4, modules_to_save=modules)
    found = differences(catalog, adapter=adapter, weights=NF4, kernels=EFFICIENT, activation_checkpointing=kind)
    assert {name: size for name, size in found.items() if abs(size) > TOLERANCE_BYTES} == {}


ENDS = ("embed_tokens", "lm_head")


@pytest.mark.parametrize("stack", ["plain-loop", "transformers"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize(
    "adapter",
    [Adapter(rank=4, targets=("q_proj", *ENDS)), Adapter(rank=4, modules_to_save=(*ENDS, "norm"))],
    ids=["adapters", "copies"],
)
@pytest.mark.one_in(4)
def test_ends_train_beside_adapters_be_they_tied_or_not(catalog, stack, tied, adapter):
    keys, weights = {**KEYS, "tie_word_embeddings": tied}, {"default": "bf16"}
    adapter = replace(adapter, dtype="fp32" if adapter.modules_to_save == () else "bf16")
    found = differences(
        catalog, keys, adapter=adapter, weights=weights, stack=stack, activation_checkpointing="full", kernels=EFFICIENT
    )
    largest = found.pop("head backward", 0)
    assert abs(largest) <= 512 * 128 * 4, "which of two moments the sum of two dtypes belongs to"
    assert {name: size for name, size in found.items() if abs(size) > TOLERANCE_BYTES} == {}


@pytest.mark.parametrize("stack", ["transformers", "trl"])
@pytest.mark.parametrize("loaded", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.one_in(5)
def test_four_bits_under_autocast_are_decoded_in_the_dtype_that_they_were_loaded_in(catalog, stack, loaded, kind):
    pytest.importorskip("trl")
    weights = {"hidden_matrix": "nf4-dq", "default": loaded}
    found = differences(
        catalog, stack=stack, weights=weights, adapter=Adapter(rank=4, dropout=0.1), activation_checkpointing=kind
    )
    assert {name: size for name, size in found.items() if abs(size) > TOLERANCE_BYTES} == {}


@pytest.mark.parametrize("job", ["all weights", "4 bits"])
@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("told", [None, True, False])
@pytest.mark.one_in(4)
def test_replicas_of_trainer_copy_what_the_model_returns(catalog, job, kind, told):
    keys = {"4 bits": {"adapter": Adapter(rank=4), "weights": NF4, "optimizer": {"default": "adamw-8bit-bnb"}}}
    parallel = Parallel(8, 0, unused_parameters=told)
    found = differences(
        catalog, stack="transformers", parallel=parallel, activation_checkpointing=kind, **keys.get(job, {})
    )
    assert {name: size for name, size in found.items() if abs(size) > TOLERANCE_BYTES} == {}
