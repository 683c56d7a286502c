"""Weights, gradients and states are sums over every single tensor, each routed by its role."""

from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.catalog.catalog import data_directory
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Gradients, Offload
from memplan.model.inventory import parameters_by_role
from memplan.plan.bytes_per_parameter import bytes_per_parameter
from memplan.plan.planner import CompiledPlan
from memplan.step.states.model_states import model_states
from memplan.step.states.optimizer_scratch import step_temporaries
from memplan.step.states.update_algorithms import depends_on_kernel
from tests.jobs import yaml_data

DATA = data_directory()


def read(name: str) -> Any:
    return yaml_data(DATA / "configs" / name)


FORMATS, GRADIENTS, OPTIMIZERS = (read(f"{name}.yaml") for name in ("weight_formats", "gradient_dtypes", "optimizers"))
CONFIGS = {path.stem: read(f"training/{path.name}") for path in sorted(Path(DATA / "configs/training").iterdir())}
FULL = [name for name, config in CONFIGS.items() if "adapter" not in config]
MODELS = (
    "llama-3.1-8b", "qwen2.5-0.5b", "gpt2", "gemma-2-2b", "phi-2", "falcon-7b", "pythia-160m", "olmo-1b",
    "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "stablelm-2-1.6b",
)  # fmt: skip
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}


def blocks(elements: int, layout: dict[str, Any]) -> int:
    size, count = layout.get("block_bytes", 4), 0
    full, rest = divmod(elements, layout.get("block_elements", 1))
    count = full + (1 if rest else 0)
    return count * size + layout.get("tensor_bytes", 0)


def format_of(config: dict[str, Any], role: str, shape: tuple[int, ...]) -> str:
    chain = {"expert_matrix": ["hidden_matrix"], "head": ["embedding"], "bias": ["norm"]}.get(role, [])
    weights = config["weights"]
    name = next(weights[key] for key in (role, *chain, "default") if key in weights)
    elements = FORMATS[name]["block_elements"]
    divides = elements == 1 or (len(shape) > 1 and shape[-1] % elements == 0)
    return name if divides else config.get("compute_dtype", "bf16")


def optimizer_of(config: dict[str, Any], role: str) -> str:
    chosen = config["optimizer"]
    keys = [role, "hidden_matrix"] if role == "expert_matrix" else [role]
    name = next(chosen[key] for key in (*keys, "default") if key in chosen)
    if role not in ("hidden_matrix", "expert_matrix") and OPTIMIZERS[name].get("takes") == "matrices":
        return OPTIMIZERS[name]["rest"]
    return name


def states_of(optimizer: dict[str, Any], shape: tuple[int, ...], width: int) -> int:
    elements = 1
    for size in shape:
        elements *= size
    small = elements < optimizer.get("exempt_below", 0) or elements % optimizer.get("exempt_unless_multiple", 1)
    total = 0
    for slot in optimizer["exempt_slots" if small else "slots"]:
        if slot.get("device", "device") != "device":
            continue
        total += elements * width if slot.get("as_parameter") else blocks(elements, slot)
    return total


@pytest.mark.parametrize("config", FULL)
@pytest.mark.parametrize("name", MODELS)
def test_model_states_are_the_sum_over_all_tensors_one_by_one(model, setup_of, name, config):
    keys, weights, gradients, states = CONFIGS[config], 0, 0, 0
    inventory = model(name).inventory
    used = set()
    for tensor in inventory:
        for _ in tensor.expanded_names():
            chosen = format_of(keys, tensor.role, tensor.shape)
            width = WIDTHS.get(chosen, WIDTHS[keys.get("compute_dtype", "bf16")])
            gradient = GRADIENTS.get(keys.get("gradients", {}).get("dtype"), {"element_bytes": width})
            weights += blocks(tensor.elements, FORMATS[chosen])
            gradients += tensor.elements * gradient["element_bytes"] + gradient.get("tensor_bytes", 0)
            optimizer = optimizer_of(keys, tensor.role)
            states += states_of(OPTIMIZERS[optimizer], tensor.shape, width)
            used.add(optimizer)
    states += sum(OPTIMIZERS[name].get("shared_bytes", 0) for name in used)
    found = model_states(setup_of(config), inventory, ())
    assert (found.weight_bytes, found.gradient_bytes, found.state_bytes) == (weights, gradients, states)


def test_muon_takes_hidden_matrices_only_and_leaves_13_1_percent_of_llama_8b(model, setup_of):
    states = model_states(setup_of("tier1"), model("llama-8b").inventory, ())
    rest = sum(t.tensor.elements * t.tensor.count for t in states.tensors if t.optimizer_name != "muon-int4")
    roles = parameters_by_role(model("llama-8b").inventory)
    assert rest == roles["embedding"] + roles["head"] + roles["norm"]
    assert round(1000 * rest / sum(roles.values())) == 131
    assert {t.optimizer_name for t in states.tensors} == {"muon-int4", "adamw-int8"}


def test_tensors_whose_rows_do_not_divide_stay_in_the_compute_dtype(model, setup_of):
    """Qwen2.5-0.5B is 896 wide, which is no multiple of 256; its feed-forward part, 4864, is one."""
    states = model_states(setup_of("tier3"), model("qwen2.5-0.5b").inventory, ())
    formats = {
        t.tensor.name.rsplit(".", 2)[-2]: t.format_name for t in states.tensors if t.tensor.role == "hidden_matrix"
    }
    assert formats["q_proj"] == formats["up_proj"] == "bf16"
    assert formats["down_proj"] == "iq3-xxs"


def test_norms_and_biases_are_never_quantised(model, setup_of, catalog):
    for config in FULL:
        for entry in model_states(setup_of(config), model("gpt2").inventory, ()).tensors:
            if entry.tensor.role in ("norm", "bias"):
                assert catalog.formats[entry.format_name].block_elements == 1


@pytest.mark.parametrize(("master", "width"), [("none", 0), ("bf16", 2), ("fp32", 4)])
def test_master_weights_are_a_line_of_their_own(model, setup_of, master, width):
    states = model_states(setup_of(master_weights=master), model("gpt2").inventory, ())
    assert states.master_bytes == width * 124_439_808
    assert states.weight_bytes == 2 * 124_439_808


@pytest.mark.parametrize(("dtype", "size", "scale"), [(None, 2, 0), ("bf16", 2, 0), ("fp32", 4, 0), ("fp8-e4m3", 1, 4)])
def test_gradients_take_their_own_dtype(model, setup_of, dtype, size, scale):
    inventory = model("gpt2").inventory
    states = model_states(setup_of(gradients=Gradients(dtype)), inventory, ())
    tensors = sum(tensor.count for tensor in inventory)
    assert states.gradient_bytes == size * 124_439_808 + scale * tensors


def test_gradients_released_by_layer_do_not_persist(model, setup_of):
    kept = CompiledPlan(model("gpt2"), setup_of())
    released = CompiledPlan(model("gpt2"), setup_of(gradients=Gradients(lifetime="layer")))
    assert kept.persistent_bytes - released.persistent_bytes == 2 * 124_439_808


def test_rank_16_adapters_on_all_linear_layers_of_llama_8b_are_41_943_040_parameters(model, setup_of):
    plan = CompiledPlan(model("llama-8b"), setup_of("lora"))
    trained = [t for t in plan.states.tensors if t.trainable]
    assert sum(t.tensor.elements * t.tensor.count for t in trained) == 41_943_040
    assert plan.states.gradient_bytes == 4 * 41_943_040
    assert plan.states.state_bytes == 8 * 41_943_040 + 4 * sum(t.tensor.count for t in trained)  # one step each
    assert plan.states.weight_bytes == 2 * 8_030_261_248 + 4 * 41_943_040


def test_rank_8_adapters_on_queries_and_values_of_llama_7b_are_4_194_304_parameters(model, setup_of):
    """The usual first LoRA run: 4,194,304 trainable parameters (q_proj and v_proj, rank 8, Llama-7B)."""
    setup = setup_of(adapter=Adapter(rank=8, targets=("q_proj", "v_proj")))
    trained = [t for t in CompiledPlan(model("llama-2-7b"), setup).states.tensors if t.trainable]
    assert sum(t.tensor.elements * t.tensor.count for t in trained) == 4_194_304


def test_dora_adds_one_magnitude_per_output_row(model, setup_of):
    sizes = {}
    for kind in ("lora", "dora"):
        setup = setup_of(adapter=Adapter(kind=kind, rank=8, targets=("q_proj", "v_proj")))
        plan = CompiledPlan(model("llama-2-7b"), setup)
        sizes[kind] = sum(t.tensor.elements * t.tensor.count for t in plan.states.tensors if t.trainable)
    assert sizes["dora"] - sizes["lora"] == 32 * 2 * 4096


def test_qlora_keeps_frozen_matrices_in_four_bits(model, setup_of):
    states = CompiledPlan(model("llama-8b"), setup_of("qlora")).states
    frozen = [t for t in states.tensors if t.tensor.role == "hidden_matrix" and not t.trainable]
    elements = sum(t.tensor.elements * t.tensor.count for t in frozen)
    stored = sum(t.weight_bytes * t.tensor.count for t in frozen)
    assert {t.format_name for t in frozen} == {"nf4-dq"}
    assert 0.515 < stored / elements < 0.517


def test_a_tied_head_is_counted_once(model, setup_of):
    tied = model_states(setup_of(), model("llama-3.2-1b").inventory, ())
    assert tied.weight_bytes == 2 * 1_235_814_400


@pytest.mark.parametrize("kernel", ["foreach", "for-loop", "fused"])
def test_step_counters_lie_on_the_host_unless_the_optimizer_is_fused(model, setup_of, kernel):
    inventory = model("gpt2").inventory
    states = model_states(setup_of(kernels=Kernels(optimizer=kernel)), inventory, ())
    counters = 4 * sum(tensor.count for tensor in inventory)
    device = counters if kernel == "fused" else 0
    assert states.state_bytes == 4 * 124_439_808 + device
    assert states.host_bytes == counters - device


OFFLOADED = Offload(optimizer_states="cpu")


@pytest.mark.parametrize("optimizer", ["adamw-fp32", "adamw-bf16", "adamw-int8", "muon-fp32", "muon-int8", "muon-int4"])
def test_offloaded_states_lie_on_the_host_and_nothing_else_changes_but_the_update(model, setup_of, optimizer):
    keys = {"optimizer": {"default": optimizer}}
    here = CompiledPlan(model("gpt2"), setup_of(**keys))
    there = CompiledPlan(model("gpt2"), setup_of(**keys, offload=OFFLOADED))
    assert there.states.state_bytes == 0
    assert there.states.host_bytes == here.states.state_bytes + here.states.host_bytes
    assert there.persistent_bytes == here.persistent_bytes - here.states.state_bytes
    apart = there.constant_bytes - here.constant_bytes
    for before, after in zip(here.candidates, there.candidates, strict=True):
        if before.name != "optimizer step":
            assert after == before
    assert apart == -here.states.state_bytes


@pytest.mark.parametrize(
    ("optimizer", "each"), [("adamw-fp32", 8), ("adamw-bf16", 4), ("adamw-int8", 2 + 8 / 256)], ids=str
)
def test_an_offloaded_update_takes_two_stretches_besides_its_chunks(model, setup_of, optimizer, each):
    """Of 2^18 elements each, in the format of the states; chunks are those of the bundled AdamW."""
    setup = setup_of(optimizer={"default": optimizer}, offload=OFFLOADED)
    states = model_states(setup, model("gpt2").inventory, ())
    chunks = {"adamw-fp32": 8, "adamw-bf16": 16, "adamw-int8": 16 + 1 / 32}[optimizer]
    assert step_temporaries(setup, states.tensors).bytes == 2**20 * chunks + 2**21 * each


def test_offloaded_states_are_not_in_the_uniform_bound(setup_of):
    assert bytes_per_parameter(setup_of(offload=OFFLOADED)).optimizer_states == 0


@pytest.mark.parametrize("name", ["adamw-bf16", "sgd", "sgd-momentum", "lion", "adafactor"])
def test_an_updates_scratch_is_another_by_kernel_where_torch_has_kernels_for_it(catalog, name):
    def step(kernel: str) -> int:
        given = {"optimizer": name, "kernels.optimizer": kernel}
        return dict(memplan.plan("gpt2", gpu="h100", config="bf16-adamw", set=given).memory.instants)["optimizer step"]

    assert (len({step(kernel) for kernel in ("for-loop", "foreach", "fused")}) > 1) == depends_on_kernel(
        catalog.optimizers[name]
    )
