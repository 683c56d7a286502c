"""Figures of the core against values that come from elsewhere: torch's own optimizer, the library's codecs, and paper."""

from dataclasses import replace

import pytest

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Gradients
from memplan.model.inventory import ParameterTensor, parameter_count
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.timing import PICOSECONDS, Rates, Work, micro_batch_picoseconds, update_work, work_of
from memplan.step.states.muon_scratch import decoding_sizes
from memplan.step.tensors.tensor_states import tensor_states
from memplan.step.tensors.update_kernels import slot_bytes
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()


# ------------------------------------------------------------------ states
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 4, 10), (1, 7)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_and_column_means_are_those_that_torchs_adafactor_keeps(catalog, shape, dtype):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.randn(shape, dtype=getattr(torch, dtype)))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.Adafactor([weight])
    optimizer.step()
    state = optimizer.state[weight]
    slots = {slot.name: slot for slot in catalog.optimizers["adafactor"].slots}
    for name in ("row_var", "col_var"):
        assert slot_bytes(slots[name], shape, weight.element_size()) == state[name].untyped_storage().nbytes()


@pytest.mark.parametrize(("shape", "role"), [((6, 10), "hidden_matrix"), ((3, 4, 10), "expert_matrix"), ((7,), "norm")])
def test_a_tensors_states_are_all_that_torchs_adafactor_keeps(catalog, shape, role):
    """Means of rows and columns for whatever has rows; the whole square for a vector."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.Adafactor([weight])
    optimizer.step()
    kept = {name: value.untyped_storage().nbytes() for name, value in optimizer.state[weight].items()}
    config = replace(catalog.configs["fp32-adamw"], optimizer={"default": "adafactor"})
    entry = tensor_states(resolve(config, catalog, "test"), ParameterTensor("w", shape, role), frozen=False)
    assert entry.state_bytes == sum(size for name, size in kept.items() if name != "step")


def test_a_frozen_tensor_has_a_weight_and_nothing_else(catalog):
    config = replace(catalog.configs["mixed-adamw"], master_weights="fp32", weights={"default": "bf16"})
    setup, tensor = resolve(config, catalog, "test"), ParameterTensor("w", (6, 10), "hidden_matrix")
    trained, frozen = (tensor_states(setup, tensor, frozen=frozen) for frozen in (False, True))
    names = ("master_bytes", "formed_bytes", "gradient_bytes", "state_bytes")
    assert [getattr(trained, name) for name in names] == [4 * 60, 2 * 60, 2 * 60, 2 * 4 * 60]
    assert [getattr(frozen, name) for name in (*names, "host_bytes")] == [0] * 5
    assert frozen.weight_bytes == trained.weight_bytes == 2 * 60


@pytest.mark.parametrize(
    ("config", "role", "each"),
    [
        ("bf16-adamw", "hidden_matrix", 0),
        ("mixed-adamw", "norm", 0),
        ("mixed-adamw", "hidden_matrix", 2),
        ("tier1", "hidden_matrix", 2),
    ],
)
def test_a_product_copies_a_weight_that_is_stored_otherwise(catalog, config, role, each):
    entry = tensor_states(resolve(catalog.configs[config], catalog, config), ParameterTensor("w", (6, 64), role), False)
    assert entry.copy_bytes == each * 6 * 64


# ------------------------------------------------------------------ coded weights
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(3, 256), (33, 768), (5000, 1024), (3, 2**21)])
@pytest.mark.parametrize("name", [n for n, e in CATALOG.formats.entries.items() if e.training == "coded"])
def test_decoding_takes_what_the_library_allocates(catalog, name, shape, dtype):
    """The library's own count is held against what its kernels allocate in ``tests/muon``."""
    torch = pytest.importorskip("torch")
    from memplan.muon.weights.quantised import QuantisedWeight
    from memplan.muon.weights.weight_codecs import WEIGHT_FORMATS

    rows, columns = shape
    codes = torch.empty(rows, WEIGHT_FORMATS[name].row_bytes(columns), dtype=torch.uint8, device="meta")
    exact = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    decoded = QuantisedWeight(codes, name, columns).dequantise_bytes(exact)
    config = replace(catalog.configs["tier1"], weights={"hidden_matrix": name, "default": dtype}, compute_dtype=dtype)
    tensor = ParameterTensor("layers.0.w", shape, "hidden_matrix")
    entry = tensor_states(resolve(config, catalog, "test"), tensor, frozen=False)
    copy = rows * columns * exact.itemsize
    assert entry.format_name == name
    assert copy + sum(decoding_sizes(entry, exact.itemsize)) == decoded


# ------------------------------------------------------------------ time
ATTENTION = {"input of Q, K and V": 2, "Q and K": 4, "V": 2, "input of the output product": 2, "dropout's mask": 1}
MLP = {
    "input of the first product": 2,
    "input of the activation": 8,
    "input of the second product": 8,
    "dropout's mask": 1,
}
NORMS = {"inputs of two norms": 4}
"""What a layer keeps, in bytes for each token and unit of width, as listed in section 4.1 of https://arxiv.org/abs/2205.05198."""

LOGITS = {"head's product writes": 1, "log-softmax reads and writes": 2, "its gradient likewise": 2, "products read": 1}


@pytest.mark.parametrize(("config", "width"), [("bf16-adamw", 2), ("fp32-adamw", 4)])
def test_a_layers_saved_tensors_are_those_that_the_paper_lists(catalog, model, config, width):
    spec = model("llama-8b").spec
    setup = resolve(replace(catalog.configs[config], compute_dtype={2: "bf16", 4: "fp32"}[width]), catalog, config)
    work = work_of(model("llama-8b"), setup, CompiledPlan(model("llama-8b"), setup).states)
    each = sum(sum(part.values()) for part in (ATTENTION, MLP, NORMS))
    assert work.stream_bytes == each * spec.hidden_size * spec.num_hidden_layers * width // 2


@pytest.mark.parametrize(
    ("checkpointing", "loss", "stream_passes", "logit_bytes"),
    [
        ("none", "bf16", 2, sum(LOGITS.values())),
        ("full", "bf16", 3, sum(LOGITS.values())),
        ("selective", "bf16", 3, sum(LOGITS.values())),
        ("none", "fp32", 2, sum(LOGITS.values()) * 3 // 2),
        ("none", "chunked", 2, (sum(LOGITS.values()) + 2) * 3 // 2),
    ],
)
def test_bytes_that_a_pass_moves_are_counted_pass_by_pass(checkpointing, loss, stream_passes, logit_bytes):
    """With one byte in a picosecond, no arithmetic and no weights, the time is the bytes moved."""
    rates = Rates("a test", {"fp32": PICOSECONDS, "bf16": PICOSECONDS}, PICOSECONDS, "", PICOSECONDS)
    work = Work(0, 0, 0, 0, 0, stream_bytes=1000, logit_bytes=10, backward=2, dtype="bf16")
    time = micro_batch_picoseconds(work, rates, 3, 7, checkpointing=checkpointing, loss=loss, accumulates=False)
    assert time == 3 * 7 * (1000 * stream_passes + 10 * logit_bytes)


def test_operations_are_six_for_each_parameter_and_token_and_eight_where_forward_runs_again():
    """https://arxiv.org/abs/2001.08361, table 1: two in forward and four in backward; attention over half the square."""
    rates = Rates("a test", {"fp32": PICOSECONDS, "bf16": PICOSECONDS}, PICOSECONDS, "", PICOSECONDS)
    work = Work(1000, 0, 40, 0, 0, 0, 0, backward=2, dtype="bf16")
    times = {
        kind: micro_batch_picoseconds(work, rates, 3, 8, checkpointing=kind, loss="bf16", accumulates=False)
        for kind in ("none", "full")
    }
    tokens, attention = 24, 24 * 8 * 40 // 2
    assert times == {"none": 6 * tokens * 1000 + 3 * attention, "full": 8 * tokens * 1000 + 4 * attention}


def planned(catalog, model, config: str, **keys):
    setup = resolve(replace(catalog.configs[config], **keys), catalog, config)
    plan = CompiledPlan(model, setup)
    return setup, plan.states


def test_attention_is_as_wide_as_the_heads_of_all_layers(catalog, model):
    """Scores and weighted values, each over 32 heads of 128 in 32 layers."""
    work = work_of(model("llama-8b"), *planned(catalog, model("llama-8b"), "bf16-adamw"))
    assert work.attention_width == 32 * (32 * 128 + 32 * 128)


@pytest.mark.parametrize(("dtype", "each"), [(None, 2), ("fp32", 2 + 2 + 4)])
def test_a_gradient_is_written_once_or_read_and_written_again_in_its_own_dtype(catalog, model, dtype, each):
    parameters = parameter_count(model("gpt2").inventory)
    keys = {"gradients": Gradients(dtype), "optimizer": {"default": "adamw-int8"}, "sequence_length": 64}
    work = work_of(model("gpt2"), *planned(catalog, model("gpt2"), "bf16-adamw", **keys))
    assert work.gradient_bytes == each * parameters


@pytest.mark.parametrize(("kernel", "passes"), [("foreach", 2 * 2 + 3 + 10), ("for-loop", 2 * 2 + 3 + 10)])
def test_an_unfused_adamw_passes_over_moments_weights_and_gradients_again(catalog, model, kernel, passes):
    """In fp32 numbers: both moments read and written; weights read and written and gradients read again; ten moments more."""
    parameters = parameter_count(model("gpt2").inventory)
    keys = {"kernels": Kernels(optimizer=kernel), "sequence_length": 64}
    work = update_work(*planned(catalog, model("gpt2"), "fp32-adamw", **keys))
    assert work.moved_bytes == 4 * passes * parameters
    assert (work.operations, work.host_bytes) == (0, 0)


@pytest.mark.parametrize(("kind", "cubes"), [("min", (6, 0)), ("fast", (4, 2))])
def test_newton_schulz_takes_five_iterations_of_three_products(catalog, model, kind, cubes):
    """For sides m <= n: X X^T and S X take 2 m^2 n each, the square 2 m^3; ``min`` goes by X three times instead where m > 512."""
    spec = model("smollm2-135m").spec
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (576, 1536), (576, 1536), (576, 1536)]
    keys = {
        "kernels": Kernels(newton_schulz=kind),
        "optimizer": {"hidden_matrix": "muon-fp32", "default": "adamw-fp32"},
    }
    work = update_work(*planned(catalog, model("smollm2-135m"), "bf16-adamw", **keys))
    each = [(m, n, *(cubes if m > 512 else (4, 2))) for m, n in shapes]
    assert work.operations == 5 * spec.num_hidden_layers * sum(
        m * m * (by_n * n + by_m * m) for m, n, by_n, by_m in each
    )
