"""Matrices of one shape that are updated together: as each alone, in the bytes that are planned, in few kernels."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.muon import Muon, predict_optimizer_bytes
from memplan.muon.parameter_updates import batches_of
from memplan.muon.stores.optimizer_errors import OptimizerError

from .memory import LiveStorages, tensors_of

SHAPES = ((32, 32), (32, 32), (64, 32), (32, 96))
VIEWS = (
    "view", "slice", "select", "unbind", "t.default", "transpose", "detach", "empty", "alias", "unsqueeze", "expand",
)  # fmt: skip
BATCH = 1 << 22


class Kernels(TorchDispatchMode):
    """Counts what would be launched on a device: operators that are no views and allocate nothing but results."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not any(name in str(func) for name in VIEWS)
        return func(*args, **(kwargs or {}))


class OnMeta(Muon):
    """The optimizer of tensors without numbers."""

    def _seeded_generator(self, key):
        return torch.Generator()


def matrices(layers, dtype=torch.float32, device="cpu", shapes=SHAPES):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for _ in range(layers) for shape in shapes]


def stepped(parameters, kind=Muon, steps=1, **options):
    optimizer = kind(parameters, lr=0.02, check_finite=False, **options)
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_together_is_as_each_alone_to_the_bit_on_a_cpu(dtype, momentum, nesterov):
    assert_alike(dtype, momentum_format=momentum, nesterov=nesterov)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "golden"])
@pytest.mark.parametrize("momentum", ["bf16", "int8", "int4", "gauss4", "gauss2", "ternary"])
def test_codes_and_rounding_together_are_as_alone_to_the_bit(momentum, rounding):
    """Momentum in blocks, and weights rounded by each parameter's own numbers, in chunks of another length too."""
    drawn = "nearest" if rounding == "nearest" else "stochastic"
    assert_alike(
        torch.bfloat16, momentum_format=momentum, rounding=rounding, momentum_rounding=drawn, chunk_elements=512
    )


def assert_alike(dtype, **options):
    options["weight_decay"] = 0.1
    alone, together = matrices(3, dtype), matrices(3, dtype)
    first = stepped(alone, steps=3, **options)
    second = stepped(together, steps=3, batch_bytes=BATCH, **options)
    assert len(batches_of(list(second.handles()))) == len(set(SHAPES))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(first.state[a][key], second.state[b][key]) for key in first.state[a])


def test_a_batched_product_differs_by_rounding_alone():
    """As a GPU multiplies them: another order of sums in 16 bits, after five iterations."""
    from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_
    from memplan.muon.orthogonalisation.schedules import resolved_schedule

    torch.manual_seed(0)
    stack = torch.randn(3, 16, 24).bfloat16()
    schedule = resolved_schedule("keller-jordan", 5)
    alone = torch.stack([newton_schulz_(matrix.clone(), schedule) for matrix in stack])
    assert (newton_schulz_(stack, schedule) - alone).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("budget", [0, 1, 20_000, 60_000, BATCH])
@pytest.mark.parametrize(
    ("dtype", "momentum"),
    [(torch.float32, "fp32"), *((torch.bfloat16, name) for name in ("bf16", "int8", "int4", "gauss4", "ternary"))],
    ids=str,
)
def test_a_step_takes_the_planned_bytes_at_every_budget(dtype, momentum, budget):
    parameters = matrices(3, dtype)
    optimizer = stepped(parameters, momentum_format=momentum, batch_bytes=budget, rounding="stochastic")
    gradients = [parameter.grad for parameter in parameters]
    states = [list(optimizer.state[parameter].values()) for parameter in parameters]
    with LiveStorages(tensors_of([parameters, gradients, states])) as memory:
        optimizer.step()
    planned = predict_optimizer_bytes(optimizer).temporaries
    assert memory.extra == planned
    assert planned <= max(
        budget, predict_optimizer_bytes(stepped(matrices(3, dtype), momentum_format=momentum)).temporaries
    )


@pytest.mark.parametrize(
    "momentum", ["fp32", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("int8", "gauss2"))]
)
def test_a_model_of_24_layers_takes_a_tenth_of_the_kernels(momentum):
    """Of which each layer takes as many as the next, where each matrix is updated alone."""
    shapes = ((1024, 1024), (2816, 1024))
    counts = []
    for budget, layers in ((0, 1), (2**31, 24)):
        parameters = matrices(layers, torch.bfloat16, "meta", shapes)
        optimizer = stepped(parameters, OnMeta, batch_bytes=budget, momentum_format=momentum, rounding="stochastic")
        with Kernels() as kernels:
            optimizer.step()
        counts.append(kernels.count)
    assert counts[1] <= 24 * counts[0] / 10


def test_what_has_gradients_in_a_store_or_goes_to_the_host_is_updated_alone():
    for options in ({"offload": True}, {"low_rank": 2}, {"ns_gram_format": "int8"}, {"block_elements": 4096}):
        options = {"momentum_format": "int8", **options}
        alone, together = matrices(2, torch.bfloat16), matrices(2, torch.bfloat16)
        stepped(alone, **options)
        optimizer = stepped(together, batch_bytes=BATCH, **options)
        assert len(batches_of(list(optimizer.handles()))) == len(together)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_budget_is_a_number_of_bytes():
    with pytest.raises(OptimizerError, match="batch_bytes"):
        Muon(matrices(1), batch_bytes=-1)
