"""Rounding by phases that advance by the golden ratio: steady updates add up to themselves, and nothing is stored."""

from math import log, sqrt

import pytest
import torch
from torch import nn

from memplan.muon import Muon, quantise_
from memplan.muon.byte_model import predict_bytes
from memplan.muon.stores.rounding_noise import phases_of, random_bits_, uniform
from memplan.muon.weights.weight_codecs import weight_format

from .memory import LiveStorages, tensors_of
from .small_training import backward, network, same, train

CPU = torch.device("cpu")
STEPS = 400


def bound(steps):
    """Levels that the worst element may be off by after so many steps, which grow as their logarithm."""
    return 1.2 + 0.35 * log(steps)


def moved(name, updates, noise):
    """Return how far steady ``updates``, in levels, have moved weights at each step, in levels."""
    chosen, size = weight_format(name), updates.numel()
    level = 1 / 127 if name == "q8-0" else 1 / 8
    codes = torch.zeros(size // 32, chosen.block_bytes, dtype=torch.uint8)
    values = torch.zeros(size // 32, 32)
    values[:, 0] = -1.0  # holds the block's scale
    chosen.encode_(values.view(-1), codes)
    first = chosen.decode_(codes, torch.empty(size)).clone()
    steps = []
    for step in range(STEPS):
        now = chosen.decode_(codes, torch.empty(size))
        chosen.encode_(now + level * updates, codes, noise(step), keep=True)
        steps.append((chosen.decode_(codes, torch.empty(size)) - first) / level)
    return torch.stack(steps)


def steady(name, generator):
    """Return updates that stay inside a format's range for all steps; none for the elements that hold the scale."""
    reach = 100 if name == "q8-0" else 6
    updates = (torch.rand(40, 32, generator=generator) * 2 - 1) * reach / STEPS
    updates[:, 0] = 0
    return updates.view(-1)


@pytest.mark.parametrize("name", ["q8-0", "q4-0"])
def test_a_steady_update_adds_up_to_itself(name):
    generator = torch.Generator().manual_seed(0)
    updates = steady(name, generator)
    expected = updates * torch.arange(1, STEPS + 1)[:, None]
    off = moved(name, updates, lambda step: phases_of(CPU, 7, 3, step)) - expected
    random = moved(name, updates, lambda _: generator) - expected
    for steps in (1, 10, 100, STEPS):
        assert off[:steps].abs().max() <= bound(steps)
        assert off[steps - 1].square().mean().sqrt() <= 1
    assert off.mean(dim=1).abs().max() < 0.2
    assert off[-1].square().mean() < 0.5 * random[-1].square().mean()


@pytest.mark.parametrize("update", [0.003, 0.25, 0.5, 0.7])
def test_the_sequence_is_off_by_the_logarithm_and_random_numbers_by_the_root(update):
    steps, elements = 5000, 200
    off = torch.zeros(elements)
    for step in range(steps):
        off += (uniform((elements,), phases_of(CPU, 0, 1, step), CPU) + update).floor() - update
        assert off.abs().max() <= bound(step + 1)
    assert off.square().mean().sqrt() <= 1.2
    assert sqrt(steps * update * (1 - update)) > 3


def test_bf16_weights_follow_a_steady_update():
    p = nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
    optimizer = Muon([{"params": [p], "algorithm": "adamw"}], lr=1e-3, weight_decay=0.0, rounding="golden")
    for _ in range(64):
        p.grad = torch.ones_like(p)
        optimizer.step()
    level = 2**-8  # of bf16 numbers from 0.5 to 1
    assert ((p.float() - (1 - 64 * 1e-3)).abs() <= bound(64) * level).all()


def test_phases_depend_on_seed_and_parameter_alone():
    drawn = {(seed, place): uniform((500,), phases_of(CPU, seed, place, 0), CPU) for seed in (0, 1) for place in (0, 1)}
    assert len({tuple(numbers.tolist()) for numbers in drawn.values()}) == 4
    later = uniform((500,), phases_of(CPU, 1, 1, 1000), CPU)
    gap = (later - drawn[1, 1]) % 1
    assert (gap - gap[0]).abs().max() < 1e-6 or (gap - gap[0]).abs().min() > 1 - 1e-6
    assert later.min() >= 0
    assert later.max() < 1
    assert 0.4 < later.mean() < 0.6


def test_bits_advance_too():
    first, later = (random_bits_(torch.empty(500, dtype=torch.int32), phases_of(CPU, 0, 0, step)) for step in (0, 5))
    assert len(((later - first) % (1 << 16)).unique()) == 1
    assert later.min() >= 0
    assert later.max() < 1 << 16


@pytest.mark.parametrize("format", ["q4-0", "q8-0", None])
def test_two_runs_are_equal_and_a_checkpoint_goes_on(format):
    dtype = torch.float32 if format else torch.bfloat16
    models = [network(format, dtype) for _ in range(3)]
    optimizers = [Muon.from_model(model, lr=0.02, rounding="golden", seed=5) for model in models]
    for pair in zip(models[:2], optimizers[:2], strict=True):
        train(*pair, steps=4)
    assert same(*models[:2])
    train(models[2], optimizers[2], steps=2)
    resumed = network(format, dtype)
    resumed.load_state_dict(models[2].state_dict())
    other = Muon.from_model(resumed, lr=0.02, rounding="golden", seed=5)
    other.load_state_dict(optimizers[2].state_dict())
    train(resumed, other, steps=2)
    assert same(models[0], resumed)


def test_coded_weights_learn_with_it():
    model = network("q4-0")
    optimizer = Muon.from_model(model, lr=0.02, rounding="golden")
    losses = []
    for _ in range(12):
        losses.append(backward(model).item())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_takes_the_bytes_of_stochastic_rounding(dtype):
    layer = nn.Linear(64, 96, bias=False).to(dtype)
    if dtype == torch.float32:
        layer = quantise_(nn.Sequential(layer), "q4-0")[0]
    extra, predicted = [], []
    for rounding in ("stochastic", "golden"):
        options = {"rounding": rounding, "chunk_elements": 2048, "momentum_format": "int8"}
        optimizer = Muon([layer.weight], **options)
        (handle, _), *_ = optimizer.handles()
        for _ in range(2):
            layer(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
            gradient = handle.store.codes if handle.store is not None else handle.key.grad
            with LiveStorages(tensors_of([handle.key, gradient, list(optimizer.state[handle.key].values())])) as memory:
                optimizer.step()
            optimizer.zero_grad()
        extra.append(memory.extra)
        predicted.append(predict_bytes((96, 64), options, parameter_dtype=torch.bfloat16, handle=handle).temporaries)
    assert extra[0] == extra[1]
    assert predicted == extra
