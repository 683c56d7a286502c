"""Our tellings of other packages' optimizers allocate what those packages do, and compute what they do."""

import pytest
import torch

from memplan.trace.jobs.optimizers import AdamMini, Bitsandbytes, Lion
from memplan.trace.recording.recorder import Recorder

SHAPES = ((33, 17), (129,), (5, 7), (64, 80), (3,), (80, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parameters(device, dtype):
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in SHAPES:
        values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        weight, gradient = (value if device == "cpu" else value.to(device) for value in values)
        found.append(torch.nn.Parameter(weight))
        found[-1].grad = gradient
    return found


def events(make, dtype):
    """Return births and deaths, with their sizes, of a second step without memory."""
    weights = parameters("meta", dtype)
    optimizer = make(weights)
    recorder = Recorder("meta")
    for weight in weights:
        recorder.mark(weight, "weights")
        recorder.mark(weight.grad, "gradients")
    with recorder:
        optimizer.step()
        recorder.next_step()
        optimizer.step()
    return [(born, recorder.records[index].bytes) for born, index in recorder.events[recorder.steady_from :]]


def state_bytes(optimizer):
    tensors = {
        v.untyped_storage()._cdata: v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    }
    return sorted(v.untyped_storage().nbytes() for v in tensors.values())


def lion(weights):
    return pytest.importorskip("lion_pytorch").Lion(weights, lr=1e-3)


def adam_mini(weights):
    """The package with no names of its own but one for matrices, which it then takes row by row."""
    package = pytest.importorskip("adam_mini")
    names = [(f"mlp.{i}" if weight.ndim > 1 else f"norm.{i}", weight) for i, weight in enumerate(weights)]
    return package.Adam_mini(names, lr=1e-3, verbose=False)


PACKAGES = [(lion, Lion), (adam_mini, AdamMini)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("package", "ours"), PACKAGES, ids=["lion", "adam-mini"])
def test_a_step_allocates_what_the_package_allocates(monkeypatch, package, ours, dtype):
    if package is adam_mini:  # it reads a size that it has just put on the device
        monkeypatch.setattr(torch.Tensor, "item", lambda self: 1.0)
        monkeypatch.setattr(pytest.importorskip("adam_mini.adam_mini"), "device", "cpu")
    assert events(lambda weights: ours(weights, lr=1e-3), dtype) == events(package, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("package", "ours"), PACKAGES, ids=["lion", "adam-mini"])
def test_a_step_computes_what_the_package_computes(package, ours, dtype):
    ours_weights, their_weights = parameters("cpu", dtype), parameters("cpu", dtype)
    for optimizer in (ours(ours_weights, lr=1e-3), package(their_weights)):
        for _ in range(3):
            optimizer.step()
    for first, second in zip(ours_weights, their_weights, strict=True):
        assert torch.equal(first, second)


def bitsandbytes(weights):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(weights, lr=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_in_8_bits_are_those_of_bitsandbytes(dtype):
    weights = parameters("cpu", dtype)
    ours, theirs = Bitsandbytes(weights, lr=1e-3, bits=8), bitsandbytes(weights)
    ours.step()
    for group, entries in enumerate(theirs.param_groups):
        for index, weight in enumerate(entries["params"]):
            theirs.init_state(entries, weight, group, index)
    assert state_bytes(ours) == state_bytes(theirs)
    assert state_bytes(ours).count(1024) == 2


def test_states_in_host_memory_may_be_larger_than_that_of_this_machine():
    """Seed 50130004, job 52, ended for want of 42 GiB."""
    weight = torch.nn.Parameter(torch.empty(2**20, 2**20, device="meta"))
    weight.grad = torch.empty_like(weight)
    optimizer, recorder = Bitsandbytes([weight], 1e-3, moments="1", paged=True), Recorder("meta")
    with recorder:
        optimizer.step()
    recorder.mark(optimizer.state[weight]["state1"], "optimizer_states")
    assert (recorder.host_bytes, recorder.events) == (4 * 2**40, [])
