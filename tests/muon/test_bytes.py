"""Prediction equals measurement to the byte: state, gradients, stores, and the peak of a step."""

import pytest
import torch
from torch import nn

from memplan.muon import Muon, OptimizerError
from memplan.muon.byte_model import BlockLayout, predict_bytes, predict_optimizer_bytes
from memplan.muon.state_codecs.state_formats import MOMENTUM_FORMATS
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS, GradientStore

from .memory import LiveStorages, allocator_peak, storage_bytes, tensors_of

SHAPES = [(128, 128), (300, 96), (96, 300), (50, 51), (3, 64, 80), (512, 16)]
SOUND = [name for name in MOMENTUM_FORMATS if name != "int2-notes"]
SMALL = {"chunk_elements": 2048, "ns_chunk_columns": 24}


def measured(optimizer, parameters):
    """The state's bytes, and what one step allocates beyond everything that exists."""
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn(p.shape).to(p.dtype)
        if optimizer.gradient_format:
            for handle, _ in optimizer.handles():
                handle.collect(keep=True)
        existing = tensors_of([[p, p.grad] for p in parameters] + [list(s.values()) for s in optimizer.state.values()])
        existing += [
            t for h, _ in optimizer.handles() if h.store for t in (h.store.codes, h.store.scale) if t is not None
        ]
        with LiveStorages(existing) as memory:
            optimizer.step()
        optimizer.zero_grad()
    return memory.extra


def check(shape, dtype, gradient_format=None, **options):
    p = nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = Muon([p], gradient_format=gradient_format, **options)
    predicted = predict_bytes(shape, options, parameter_dtype=dtype, gradient_format=gradient_format)
    states = [t for name, t in optimizer.state[p].items() if name not in ("step", "mantissa")]
    assert storage_bytes(states) == predicted.optimizer_states + predicted.host_states
    assert (predicted.host_states > 0) is bool(options.get("offload"))
    assert p.nbytes == predicted.weights
    assert measured(optimizer, [p]) == predicted.temporaries
    assert predict_optimizer_bytes(optimizer) == predicted


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_momentum_formats(shape, name):
    check(shape, torch.bfloat16, momentum_format=name, **SMALL)


@pytest.mark.parametrize("workspace", ["min", "fast", "gram"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_workspaces(shape, dtype, workspace):
    check(shape, dtype, ns_workspace=workspace, momentum_format="int4", **SMALL)


@pytest.mark.parametrize(
    "options",
    [
        {"ns_batch": 2},
        {"reuse_gradient": False},
        {"ns_dtype": "fp32"},
        {"block_elements": 32, "scale_dtype": "fp16"},
        {"rounding": "stochastic", "momentum_rounding": "stochastic"},
        {"offload": True},
        {"chunk_elements": 1 << 18},
        {"ns_chunk_columns": 512},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(96, 300), (3, 64, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_options(shape, dtype, options):
    check(shape, dtype, **{"momentum_format": "int8", **SMALL, **options})


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(100,), (4096,), (5000,), (70, 90), (3, 40, 50)], ids=str)
def test_adamw(shape, dtype, name):
    check(shape, dtype, algorithm="adamw", adamw_format=name, **SMALL)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(100,), (2048,), (5000,), (70, 90)], ids=str)
def test_offloaded_adamw(shape, dtype, name):
    check(shape, dtype, algorithm="adamw", adamw_format=name, offload=True, **SMALL)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int4"])
def test_offloaded_momentum(name):
    check((96, 300), torch.bfloat16, momentum_format=name, offload=True, **SMALL)


class OnMeta(Muon):
    """Steps tensors without memory, for which two stretches take turns as on a GPU."""

    def _refuse_unusable(self, handles):
        """Look at no numbers."""

    def _seeded_generator(self, key):
        return torch.Generator()


@pytest.mark.parametrize("elements", [100, 2048, 3000, 4096, 9000])
@pytest.mark.parametrize(
    "options", [{"algorithm": "adamw", "adamw_format": "int8"}, {"algorithm": "adamw"}, {"momentum_format": "int4"}]
)
def test_two_stretches_take_turns_on_a_device(elements, options):
    shape, options = (1, elements), {"offload": True, **options, **SMALL}
    p = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    optimizer = OnMeta([p], **options)
    predicted = predict_bytes(shape, options, parameter_dtype=torch.bfloat16, device="cuda")
    p.grad = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with LiveStorages(tensors_of([p, p.grad, list(optimizer.state[p].values())])) as memory:
        optimizer.step()
    assert memory.extra == predicted.temporaries
    assert predict_optimizer_bytes(optimizer) == predicted


def test_split_master_weights():
    check((96, 300), torch.bfloat16, master="split", momentum_format="int8", **SMALL)


@pytest.mark.parametrize("name", sorted(GRADIENT_FORMATS))
@pytest.mark.parametrize("shape", [(96, 300), (50, 51)], ids=str)
def test_gradient_stores(shape, name):
    check(shape, torch.bfloat16, gradient_format=name, momentum_format="int8", **SMALL)


@pytest.mark.parametrize("name", sorted(GRADIENT_FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adding_to_a_gradient_store(name, dtype):
    store, gradient = GradientStore(name, torch.Size((40, 130)), 1000), torch.randn(40, 130).to(dtype)
    store.add_(gradient)
    with LiveStorages([gradient, store.codes, *([store.scale] if store.scale is not None else [])]) as memory:
        store.add_(gradient)
    assert store.nbytes == GradientStore.predicted_bytes(name, 40 * 130)
    assert memory.extra <= GradientStore.add_workspace_bytes(40 * 130, 1000)
    assert memory.extra >= GradientStore.add_workspace_bytes(40 * 130, 1000) - 8


def test_parameters_of_a_model_share_the_temporaries_of_the_largest():
    torch.manual_seed(0)
    big, small, vector = (nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((128, 256), (64, 64), (500,)))
    groups = [{"params": [big, small], "momentum_format": "int8"}, {"params": [vector], "algorithm": "adamw"}]
    optimizer = Muon(groups, **SMALL)
    predicted = predict_optimizer_bytes(optimizer)
    assert measured(optimizer, [big, small, vector]) == predicted.temporaries
    assert optimizer.state_bytes() == predicted.optimizer_states + predicted.step_counters
    assert predicted.step_counters == 12


def test_layouts_of_the_catalog_can_be_given():
    predicted = predict_bytes(
        (100, 256), states=[BlockLayout(128, 132)], weight=BlockLayout(256, 98), gradient=BlockLayout(1, 1, 4)
    )
    assert predicted.optimizer_states == 200 * 132
    assert predicted.weights == 100 * 98
    assert predicted.gradients == 25_604


@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "gauss4"])
def test_the_allocator_sees_nothing_else_in_fp32(name):
    """Kernels of fp32 products allocate nothing inside themselves, so the allocator's own events agree."""
    p = nn.Parameter(torch.randn(96, 300))
    options = {"momentum_format": name, "ns_dtype": "fp32", **SMALL}
    optimizer = Muon([p], **options)
    p.grad = torch.randn(96, 300)
    optimizer.step()
    p.grad = torch.randn(96, 300)
    expected = predict_bytes((96, 300), options).temporaries
    assert expected <= allocator_peak(optimizer.step) <= expected + 256


@pytest.mark.parametrize("options", [{"projection_rank": 2}, {"low_rank": 2}, {"ns_gram_format": "int8"}], ids=str)
def test_what_is_not_modelled_is_refused(options):
    with pytest.raises(OptimizerError, match="not modelled"):
        predict_bytes((8, 8), options)


@pytest.mark.thorough
def test_min_takes_a_quarter_of_torch_muon():
    shape, columns = (512, 512), 64
    ours, theirs = (nn.Parameter(torch.randn(shape).bfloat16()) for _ in range(2))
    optimizer = Muon([ours], ns_workspace="min", ns_chunk_columns=columns, chunk_elements=1 << 14)
    oracle = torch.optim.Muon([theirs])
    extra = []
    for chosen, p in ((optimizer, ours), (oracle, theirs)):
        for _ in range(2):
            p.grad = torch.randn(shape).bfloat16()
            with LiveStorages(tensors_of([p, p.grad, list(chosen.state[p].values())])) as memory:
                chosen.step()
        extra.append(memory.extra)
    assert 4 * extra[0] <= extra[1]
