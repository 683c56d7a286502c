"""Gradients between backward and step: stores, accumulation, and release inside backward."""

import gc

import pytest
import torch
from torch import nn

from memplan.muon import Muon, OptimizerError, split_parameters
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS, GradientStore, TensorGradient

from .memory import LiveStorages


def network(width=32, layers=4, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(width, width) for _ in range(layers)).to(dtype)


def loss_of(model, batch):
    for layer in model:
        batch = torch.tanh(layer(batch))
    return batch.square().mean()


@pytest.mark.parametrize("name", sorted(GRADIENT_FORMATS))
def test_a_second_backward_adds_up(name):
    torch.manual_seed(0)
    model, batch = network(), torch.randn(8, 32)
    optimizer = Muon(split_parameters(model), gradient_format=name)
    loss_of(model, batch).backward()
    assert all(p.grad is None for p in model.parameters())
    once = decoded(optimizer, model[0].weight)
    loss_of(model, batch).backward()
    twice = decoded(optimizer, model[0].weight)
    assert torch.allclose(
        twice, 2 * once, rtol=0.07 if name != "fp8-e5m2" else 0.15, atol=1e-2 * once.abs().max().item()
    )
    optimizer.step()
    assert all(handle.store.nbytes == 0 for handle, _ in optimizer.handles())


def decoded(optimizer, weight):
    store = next(handle.store for handle, _ in optimizer.handles() if handle.key is weight)
    out = torch.empty(weight.numel())
    store.read_(0, out)
    return out


@pytest.mark.parametrize(("name", "bound"), [("bf16", 0.003), ("fp8-e4m3", 0.04), ("fp8-e5m2", 0.08)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_stores_keep_gradients_of_any_magnitude(name, bound, size):
    torch.manual_seed(0)
    gradient = torch.randn(64, 65) * size
    store = GradientStore(name, gradient.shape, chunk_elements=1000)
    store.add_(gradient)
    out = torch.empty(gradient.numel())
    store.read_(0, out)
    assert ((out.view_as(gradient) - gradient).norm() / gradient.norm()).item() < bound


@pytest.mark.parametrize("name", sorted(GRADIENT_FORMATS))
def test_a_bad_gradient_in_a_store_is_refused_at_the_step(name):
    p = nn.Parameter(torch.randn(8, 8))
    optimizer = Muon([p], gradient_format=name, momentum_format="int8")
    (p * torch.tensor(float("nan"))).sum().backward()
    before = p.detach().clone(), optimizer.state[p]["codes"].clone()
    with pytest.raises(OptimizerError, match="not finite"):
        optimizer.step()
    assert torch.equal(p, before[0])
    assert torch.equal(optimizer.state[p]["codes"], before[1])
    optimizer.zero_grad()
    p.square().sum().backward()
    optimizer.step()


def test_stores_refuse_another_shape():
    with pytest.raises(OptimizerError, match="shape"):
        GradientStore("bf16", torch.Size((2, 2))).add_(torch.zeros(3, 2))


@pytest.mark.parametrize("gradient_format", [None, "fp8-e4m3"])
def test_release_inside_backward_equals_a_step_after_it(gradient_format):
    batch = torch.randn(8, 32)
    models = network(), network()
    optimizers = [
        Muon(split_parameters(m), lr=0.02, gradient_format=f)
        for m, f in zip(models, (None, gradient_format), strict=True)
    ]
    optimizers[1].enable_gradient_release()
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("gradient_format", [None, "bf16", "fp8-e4m3"])
def test_release_with_accumulation(gradient_format):
    """The sum over micro-batches is what is released; stores round it, which a singular matrix amplifies."""
    batches = torch.randn(3, 64, 32)
    plain, released = network(layers=1), network(layers=1)
    after = Muon(split_parameters(plain), lr=0.02)
    inside = Muon(split_parameters(released), lr=0.02, gradient_format=gradient_format)
    inside.enable_gradient_release()
    for batch in batches:
        loss_of(plain, batch).backward()
    after.step()
    with inside.accumulating():
        for batch in batches[:-1]:
            loss_of(released, batch).backward()
    assert inside.state[released[0].weight]["step"].item() == 0
    loss_of(released, batches[-1]).backward()
    assert all(p.grad is None for p in released.parameters())
    assert inside.state[released[0].weight]["step"].item() == 1
    tolerance = {None: 0.0, "bf16": 0.05, "fp8-e4m3": 0.3}[gradient_format]
    a, b, start = plain[0].weight, released[0].weight, network(layers=1)[0].weight
    assert (a - b).norm() <= tolerance * (a - start).norm()


def test_release_holds_one_gradient_at_a_time():
    peaks = {}
    for release in (False, True):
        model, batch = network(256, 6, torch.bfloat16), torch.randn(4, 256).bfloat16()
        optimizer = Muon(split_parameters(model), momentum_format="int8", ns_workspace="min", ns_chunk_columns=32)
        if release:
            optimizer.enable_gradient_release()
        existing = [*model.parameters(), batch, *(t for s in optimizer.state.values() for t in s.values())]
        with LiveStorages(existing) as memory:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks[release] = memory.extra
    matrix = 256 * 256 * 2
    assert peaks[False] - peaks[True] > 4 * matrix


def test_an_optimizer_that_is_gone_leaves_gradients_alone():
    model = network(layers=1)
    optimizer = Muon(split_parameters(model), gradient_format="bf16")
    optimizer.enable_gradient_release()
    del optimizer
    gc.collect()
    loss_of(model, torch.randn(4, 32)).backward()
    assert model[0].weight.grad is not None


def test_a_bad_gradient_stops_release_before_its_parameter_changes():
    model = network(layers=1)
    optimizer = Muon(split_parameters(model))
    optimizer.enable_gradient_release()
    before = model[0].weight.detach().clone()
    with pytest.raises(OptimizerError, match="not finite"):
        loss_of(model, torch.full((2, 32), float("nan"))).backward()
    assert torch.equal(model[0].weight, before)


def test_offloaded_states_are_released_inside_backward_to_the_same_weights():
    models = [network(), network()]
    for model, offload in zip(models, (False, True), strict=True):
        optimizer = Muon(split_parameters(model), adamw_format="int8", chunk_elements=256, offload=offload)
        optimizer.enable_gradient_release()
        for seed in range(3):
            loss_of(model, torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))).backward()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("value", [-7.0, 7.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_magnitude_of_a_gradient(dtype, value):
    gradient = torch.linspace(-3, 2, 33).to(dtype)
    gradient[5] = value
    expected = torch.linalg.vector_norm(gradient, ord=float("inf"))
    assert torch.equal(TensorGradient(gradient).largest(), expected) or value != value
    assert bool(TensorGradient(gradient).largest().isfinite()) is (abs(value) == 7)
