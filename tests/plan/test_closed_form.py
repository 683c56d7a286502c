"""The planner's instants agree with a closed form that was written apart from it."""

from itertools import product

import pytest

from memplan.catalog.kernel_profiles import Kernels
from memplan.model.inventory import parameter_count
from memplan.model.readers.given_shapes import model_from_shapes
from memplan.plan.planner import CompiledPlan

from .closed_form import Shape, requested_peak, state_bytes

SHAPES = {
    "small": Shape(8, 512, 1536, 8, 4, 64, 32_000),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128_256),
    "8b": Shape(32, 4096, 14_336, 32, 8, 128, 128_256),
}
SIZES = {
    "small": [(1, 256), (4, 256), (8, 1024)],
    "1b": [(1, 512), (1, 2048), (2, 8192)],
    "8b": [(1, 512), (1, 4096), (2, 8192)],
}
OPTIMIZERS = [
    ("sgd", "foreach", "bf16"),
    ("adamw", "foreach", "bf16"),
    ("adamw", "fused", "bf16"),
    ("adamw", "fused", "fp32"),
    ("muon", "foreach", "bf16"),
]

CASES = [
    (name, checkpointing, *size, *optimizer)
    for name, checkpointing in product(SHAPES, (False, True))
    for size, optimizer in product(SIZES[name], OPTIMIZERS)
    if optimizer[0] != "muon" or name != "8b" or size == (1, 4096)
]

NAMES = {
    "sgd": {"default": "sgd"},
    "adamw": {"default": "adamw-bf16"},
    "muon": {"hidden_matrix": "muon-bf16", "default": "adamw-bf16"},
}


def compiled(setup_of, name, checkpointing, batch, length, optimizer, kernel, loss):
    shape = SHAPES[name]
    model = model_from_shapes(
        layers=shape.layers, hidden=shape.hidden, intermediate=shape.intermediate, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, vocab=shape.vocab,
    )  # fmt: skip
    setup = setup_of(
        optimizer=NAMES[optimizer],
        micro_batch_size=batch,
        sequence_length=length,
        activation_checkpointing="full" if checkpointing else "none",
        kernels=Kernels(optimizer=kernel, newton_schulz="torch", loss=loss),
    )
    return CompiledPlan(model, setup)


def test_there_are_86_configurations():
    assert len(CASES) == len(set(CASES)) == 86


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_requested_peak_agrees_within_a_thousandth(setup_of, case):
    name, checkpointing, batch, length, optimizer, kernel, loss = case
    planned = compiled(setup_of, *case).requested_bytes(batch, length)
    expected = requested_peak(SHAPES[name], batch, length, optimizer, kernel, checkpointing, loss == "fp32")
    assert abs(planned - expected) * 1000 <= expected, f"{planned:,} against {expected:,}"


@pytest.mark.parametrize(("name", "optimizer"), list(product(SHAPES, NAMES)), ids=lambda value: value)
def test_parameters_and_states_agree_to_the_byte(setup_of, name, optimizer):
    plan = compiled(setup_of, name, False, 1, 256, optimizer, "foreach", "bf16")
    assert parameter_count(plan.model.inventory) == SHAPES[name].parameters
    assert plan.states.weight_bytes == plan.states.gradient_bytes == 2 * SHAPES[name].parameters
    assert plan.states.state_bytes == state_bytes(SHAPES[name], optimizer)


@pytest.mark.parametrize("loss", ["bf16", "fp32"])
@pytest.mark.parametrize("kernel", ["foreach", "for-loop", "fused"])
def test_every_optimizer_kernel_agrees(setup_of, kernel, loss):
    planned = compiled(setup_of, "1b", True, 2, 2048, "adamw", kernel, loss).requested_bytes(2, 2048)
    expected = requested_peak(SHAPES["1b"], 2, 2048, "adamw", kernel, True, loss == "fp32")
    assert abs(planned - expected) * 1000 <= expected
