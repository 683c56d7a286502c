"""Weight stores: GGUF's bytes, decoded bit for bit as gguf does, trained in place without a float weight."""

import numpy as np
import pytest
import torch
from torch import nn

from memplan.errors import UnknownNameError
from memplan.muon import Muon, OptimizerError, split_parameters
from memplan.muon.byte_model import predict_bytes, predict_optimizer_bytes
from memplan.muon.group_options import DEFAULTS
from memplan.muon.stores.gradient_stores import DEFAULT_CHUNK_ELEMENTS
from memplan.muon.updates.handles import join_, split_
from memplan.muon.weights.grid_formats import FRACTIONS, GridFormat, _nearest, _rounded, grid_of, largest_of, lengths_of
from memplan.muon.weights.quantised import DECODE_CHUNK, QuantisedWeight
from memplan.muon.weights.quantised_layers import QuantisedEmbedding, QuantisedLinear, quantise_
from memplan.muon.weights.weight_codecs import WEIGHT_FORMATS, weight_format
from memplan.muon.weights.weight_formats import DECODED_AT_ONCE, TEMPORARIES
from memplan.step.states.muon_scratch import CHUNK_ELEMENTS

from .memory import LiveStorages, storage_bytes, tensors_of
from .plain_grid_search import plain_sub_scales

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.thorough
NAMES = sorted(WEIGHT_FORMATS)
GGUF = [name for name in NAMES if not name.endswith("-b64")]
GRIDS = [name for name in NAMES if isinstance(WEIGHT_FORMATS[name], GridFormat)]

# Relative root mean square error on normal values. Q8_0, Q4_0 and Q5_0 equal gguf's own encoder; the bound
# for the grids is the least error that any code of so many bits can have, 2**-bits, times 1.5.
ERRORS = {
    "q8-0": 0.0056,
    "q6-b64": 0.0255,
    "q5-0": 0.044,
    "q5-b64": 0.05,
    "q4-0": 0.088,
    "iq3-xxs": 0.18,
    "iq2-xxs": 0.335,
    "iq2-xs": 0.29,
    "iq2-s": 0.245,
}


def gguf_type(name):
    return gguf.GGMLQuantizationType[name.upper().replace("-", "_")]


def random_blocks(chosen, blocks):
    codes = torch.randint(0, 256, (blocks, chosen.block_bytes), dtype=torch.uint8)
    codes[:, :2] = torch.randn(blocks, 1).half().view(torch.uint8)
    return codes


def tables(chosen):
    return list(grid_of(chosen.name, torch.device("cpu"))) if isinstance(chosen, GridFormat) else []


@pytest.mark.parametrize("name", GGUF)
def test_layouts_are_those_of_gguf(name):
    chosen = weight_format(name)
    assert (chosen.block_elements, chosen.block_bytes) == tuple(gguf.GGML_QUANT_SIZES[gguf_type(name)])


@pytest.mark.parametrize("name", GGUF)
def test_random_blocks_decode_as_gguf_does_to_the_bit(name):
    chosen = weight_format(name)
    codes = random_blocks(chosen, 70)
    out = torch.empty(70 * chosen.block_elements)
    chosen.decode_(codes, out)
    assert np.array_equal(out.numpy(), gguf.quants.dequantize(codes.numpy(), gguf_type(name)).reshape(-1))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", GGUF)
def test_encoded_blocks_decode_as_gguf_does_to_the_bit(name, stochastic):
    chosen = weight_format(name)
    values, codes = torch.randn(40 * chosen.block_elements), torch.zeros(40, chosen.block_bytes, dtype=torch.uint8)
    chosen.encode_(values, codes, torch.Generator() if stochastic else None)
    out = chosen.decode_(codes, torch.empty_like(values))
    assert np.array_equal(out.numpy(), gguf.quants.dequantize(codes.numpy(), gguf_type(name)).reshape(-1))


@pytest.mark.parametrize("name", ["q8-0", "q4-0", "q5-0"])
def test_encoding_equals_gguf_to_the_bit(name):
    chosen = weight_format(name)
    values, codes = torch.randn(640), torch.zeros(20, chosen.block_bytes, dtype=torch.uint8)
    values[32:64] = 0
    chosen.encode_(values, codes)
    expected = gguf.quants.quantize(values.numpy().reshape(20, 32), gguf_type(name))
    assert np.array_equal(codes.numpy(), expected.reshape(20, -1))


@pytest.mark.parametrize("name", NAMES)
def test_encoding_error_is_within_its_bound(name):
    chosen = weight_format(name)
    values, codes = (
        torch.randn(64 * 256),
        torch.zeros(64 * 256 // chosen.block_elements, chosen.block_bytes, dtype=torch.uint8),
    )
    chosen.encode_(values, codes)
    out = chosen.decode_(codes, torch.empty_like(values))
    error = ((out - values).norm() / values.norm()).item()
    assert error <= ERRORS[name]
    bits = 8 * chosen.block_bytes / chosen.block_elements
    assert name not in GRIDS or error <= 1.5 * 2**-bits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "values", [torch.zeros(256), torch.full((256,), 1e-20), torch.full((256,), -3.0)], ids=["zero", "tiny", "constant"]
)
def test_degenerate_values_stay_finite(name, values):
    chosen = weight_format(name)
    codes = torch.zeros(256 // chosen.block_elements, chosen.block_bytes, dtype=torch.uint8)
    for generator in (torch.Generator(), None):
        for keep in (False, True):
            chosen.encode_(values, codes, generator, keep=keep)
            out = chosen.decode_(codes, torch.empty(256))
            assert torch.isfinite(out).all()
    assert values.abs().max() < 1 or (out - values).abs().max() < 3.0


@pytest.mark.parametrize("name", NAMES)
def test_kept_scales_make_encoding_idempotent(name):
    chosen = weight_format(name)
    codes = torch.zeros(2560 // chosen.block_elements, chosen.block_bytes, dtype=torch.uint8)
    chosen.encode_(torch.randn(2560), codes)
    first = chosen.decode_(codes, torch.empty(2560))
    chosen.encode_(first, codes, keep=True)
    assert torch.allclose(chosen.decode_(codes, torch.empty(2560)), first, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("random", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("kind", ["normal", "alike", "heavy", "sparse"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(4)
def test_weights_that_nothing_changes_stay_and_do_not_grow(name, kind, random):
    """Updates decode and encode the whole weight each step, with the scales it has: without an update all stays.

    A fresh encoding may be larger than what it was made of (GGUF's own rule for Q4_0 has no least squares), but it
    is made once. One 4-bit scale of a 2-bit format may be redrawn in the first steps.
    """
    chosen, size = weight_format(name), 2560
    values, share = torch.randn(size), torch.rand(size)
    values = {
        "normal": values,
        "alike": values.sign(),
        "heavy": values / share.clamp(min=0.01),
        "sparse": values * (share < 0.02),
    }[kind]
    codes = torch.zeros(size // chosen.block_elements, chosen.block_bytes, dtype=torch.uint8)
    chosen.encode_(values, codes)
    norms, generator = [], torch.Generator().manual_seed(0) if random else None
    for _ in range(40):
        stored = chosen.decode_(codes, torch.empty(size))
        norms.append(stored.view(-1, chosen.block_elements).norm(dim=1))
        chosen.encode_(stored, codes, generator, keep=True)
    assert torch.equal(chosen.decode_(codes, torch.empty(size)), stored)
    assert (norms[-1] <= norms[0] * (1.06 if random and name.startswith("iq2") else 1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("name", "least"),
    [*((name, 0.95) for name in NAMES if name > "q5"), ("q4-0", 0.9), *((name, 0.8) for name in GRIDS)],
)
def test_stochastic_rounding_follows_updates_that_nearest_loses(name, least):
    chosen = weight_format(name)
    size = 4096
    codes = torch.zeros(size // chosen.block_elements, chosen.block_bytes, dtype=torch.uint8)
    chosen.encode_(torch.randn(size), codes)
    start, drift = chosen.decode_(codes, torch.empty(size)), torch.randn(size) * 1e-3
    moved = {}
    for generator in (None, torch.Generator().manual_seed(0)):
        here = codes.clone()
        for _ in range(40):
            chosen.encode_(chosen.decode_(here, torch.empty(size)) + drift, here, generator, keep=True)
        change = chosen.decode_(here, torch.empty(size)) - start
        moved[generator is not None] = ((change * drift).sum() / (40 * drift.square().sum())).item()
    assert least < moved[True] < 1.3
    assert name == "q8-0" or moved[False] < 0.5


@pytest.mark.parametrize("blocks", [5, 300, 40_000])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(3)
def test_temporaries_are_exact_and_bounded(name, blocks):
    chosen = weight_format(name)
    blocks = min(blocks, 3 * chosen.encoded_blocks)
    codes, values = (
        torch.zeros(blocks, chosen.block_bytes, dtype=torch.uint8),
        torch.randn(blocks * chosen.block_elements),
    )
    out, noise = torch.empty_like(values), torch.Generator()
    ordered = lengths_of(chosen.name)[:2] if isinstance(chosen, GridFormat) else ()
    cases = [
        (lambda: chosen.encode_(values, codes), TEMPORARIES[chosen.name].fresh * min(blocks, chosen.encoded_blocks)),
        (lambda: chosen.decode_(codes, out), chosen.decode_bytes(blocks)),
        (lambda: chosen.encode_(values, codes, keep=True), chosen.update_bytes(blocks)),
        (lambda: chosen.encode_(values, codes, noise, keep=True), chosen.update_bytes(blocks, stochastic=True)),
    ]
    for call, expected in cases:
        with LiveStorages([codes, values, out, *tables(chosen), *ordered]) as memory:
            call()
        assert memory.extra == expected


@pytest.mark.parametrize("name", GRIDS)
def test_scales_are_those_of_a_search_through_every_point(name):
    chosen = weight_format(name)
    subs = torch.randn(64, 256 // chosen.sub, chosen.sub, generator=torch.Generator().manual_seed(5)).abs_()
    subs[0], subs[1] = 0, 1e-6 * subs[1]
    plain = plain_sub_scales(chosen, subs.clamp_min(1e-20), 9)
    assert torch.allclose(chosen._sub_scales(subs, 9)[1:], plain[1:], rtol=1e-5, atol=0)


@pytest.mark.parametrize("groups", [3, 1024, 2500])
@pytest.mark.parametrize("name", GRIDS)
def test_the_nearest_point_is_that_of_exact_sums_the_first_of_equal_ones(name, groups):
    """Numbers on the points, between two of them, far beyond all, and anywhere."""
    chosen, grid = weight_format(name), grid_of(name, torch.device("cpu"))
    generator = torch.Generator().manual_seed(groups)
    one, other = grid.points[torch.randint(len(grid.points), (2, groups), generator=generator)]
    share = torch.randint(3, (groups, 1), generator=generator) / 2
    points = one + share * (other - one)
    points[::3] += torch.randn(points[::3].shape, generator=generator) * 30
    points[::50] *= 1e5
    points = _rounded(points, largest_of(name))
    exact = points.double() @ grid.points.double().mT - grid.halves.double()
    assert exact.abs().max() * FRACTIONS * 2 < 2**24
    assert torch.equal(_nearest(points, grid).long(), exact.argmax(dim=1))
    assert points.shape == (groups, chosen.group)


def test_rows_that_do_not_divide_and_unknown_formats_are_refused():
    with pytest.raises(OptimizerError, match="blocks of 256"):
        QuantisedWeight.of(torch.zeros(4, 128), "iq3-xxs")
    with pytest.raises(UnknownNameError, match="q4-0"):
        weight_format("q4_0")
    with pytest.raises(OptimizerError, match="rows of 64"):
        QuantisedWeight(torch.zeros(4, 35, dtype=torch.uint8), "q4-0", 64)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_with_the_decoded_matrix(name, dtype):
    plain = nn.Linear(256, 24)
    layer = QuantisedLinear.of(plain, name)
    x = torch.randn(2, 5, 256, dtype=dtype, requires_grad=True)
    matrix = layer.weight.dequantised(dtype)
    y = layer(x)
    assert torch.allclose(y, x @ matrix.mT + plain.bias.to(dtype), rtol=1e-2, atol=1e-2)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.allclose(x.grad, grad @ matrix, rtol=1e-2, atol=1e-2)
    out = torch.empty(24 * 256)
    layer.weight.gradient.read_(0, out)
    expected = grad.reshape(-1, 24).mT @ x.reshape(-1, 256)
    assert ((out.view(24, 256) - expected).norm() / expected.norm()).item() < 0.02


def test_no_float_weight_exists():
    layer = QuantisedLinear.of(nn.Linear(256, 64, bias=False), "q4-0")
    assert [p.dtype for p in layer.parameters()] == [torch.uint8]
    assert storage_bytes(layer.parameters()) == 64 * 256 // 32 * 18
    assert set(layer.state_dict()) == {"weight.codes"}
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    with LiveStorages(tensors_of([list(layer.parameters()), x])) as memory:
        y = layer(x)
    held = memory.live - memory.start
    assert held == y.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_product_takes_the_matrix_and_a_few_rows(name, dtype):
    """Forward and backward each dequantise the matrix; the planner counts these bytes."""
    rows, columns = 500, 256
    layer = QuantisedLinear.of(nn.Linear(columns, rows, bias=False), name)
    x = torch.randn(3, columns, dtype=dtype)
    chosen = layer.weight.format
    decoding = min(1_048_576 // columns, rows) * columns
    decode = chosen.decode_bytes(decoding // chosen.block_elements)
    expected = rows * columns * dtype.itemsize + decode + (4 * decoding if dtype != torch.float32 else 0)
    assert layer.weight.dequantise_bytes(dtype) == expected
    with LiveStorages([layer.weight.codes, x, *tables(chosen)]) as memory:
        y = layer(x)
    assert memory.extra == max(expected, rows * columns * dtype.itemsize + y.nbytes)
    grad = torch.randn_like(y)
    with LiveStorages([layer.weight.codes, x, y, grad, *tables(chosen)]) as memory:
        y.backward(grad)
    store = layer.weight.gradient
    formed = rows * columns * dtype.itemsize
    adding = 0 if dtype == torch.bfloat16 else store.nbytes + store.add_workspace_bytes(rows * columns) - 8
    assert memory.extra == formed + adding


def tiny(tied=False, name="q8-0"):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 256)
            self.layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(2)])
            self.norm = nn.LayerNorm(256)
            self.lm_head = nn.Linear(256, 64, bias=False)
            if tied:
                self.lm_head.weight = self.embed.weight

        def forward(self, index):
            x = self.embed(index).float()
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return self.lm_head(self.norm(x))

    torch.manual_seed(0)
    return quantise_(Model(), lambda *_: name)


def loss_of(model, index):
    return nn.functional.cross_entropy(model(index[:-1]), index[1:])


def test_quantised_layers_are_routed_by_role():
    groups = split_parameters(tiny())
    found = {entry.name: (entry.algorithm, entry.role) for entry in groups.report}
    assert found["embed.weight"] == ("adamw", "embedding")
    assert found["layers.0.weight"] == ("muon", "hidden_matrix")
    assert found["lm_head.weight"] == ("adamw", "head")
    tied = {entry.name for entry in split_parameters(tiny(tied=True)).report}
    assert "embed.weight" in tied
    assert "lm_head.weight" not in tied


@pytest.mark.parametrize(
    ("name", "tied", "release", "gradient_format"),
    [
        *(
            ("q4-0", tied, release, form)
            for tied in (False, True)
            for release in (False, True)
            for form in (None, "fp8-e4m3")
        ),
        *((name, True, True, None) for name in NAMES if name != "q4-0"),
    ],
)
@pytest.mark.one_in(4)
def test_a_quantised_network_learns(name, tied, release, gradient_format):
    model, index = tiny(tied, name), torch.randint(64, (40,), generator=torch.Generator().manual_seed(1))
    optimizer = Muon(
        split_parameters(model),
        lr=0.02,
        weight_decay=0.0,
        momentum_format="int8",
        adamw_format="int8",
        rounding="stochastic",
        gradient_format=gradient_format,
    )
    if release:
        optimizer.enable_gradient_release()
    first = loss_of(model, index).item()
    for _ in range(6):
        loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(handle.store is None or handle.store.nbytes == 0 for handle, _ in optimizer.handles())
    assert loss_of(model, index).item() < 0.8 * first


def test_a_tied_weight_is_released_once_with_both_gradients():
    model, index = tiny(tied=True), torch.randint(64, (20,))
    optimizer = Muon(split_parameters(model), lr=0.01)
    optimizer.enable_gradient_release()
    loss_of(model, index).backward()
    assert optimizer.state[model.embed.weight.codes]["step"].item() == 1


def test_a_second_backward_adds_to_the_store():
    layer, x = QuantisedLinear.of(nn.Linear(256, 8, bias=False), "q4-0"), torch.randn(4, 256)
    out = [torch.empty(8 * 256) for _ in range(2)]
    for result in out:
        layer(x).sum().backward()
        layer.weight.gradient.read_(0, result)
    assert torch.allclose(out[1], 2 * out[0], rtol=1e-2)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_the_predicted_bytes(name, algorithm, stochastic):
    weight = QuantisedWeight.of(torch.randn(48, 512), name)
    options = {
        "algorithm": algorithm,
        "momentum_format": "int8",
        "adamw_format": "int8",
        "rounding": "stochastic" if stochastic else "nearest",
        "chunk_elements": 8192,
    }
    optimizer = Muon([{"params": [weight], **options}])
    predicted = predict_optimizer_bytes(optimizer)
    for _ in range(2):
        weight.receive(torch.randn(48, 512).bfloat16())
        existing = tensors_of([weight.codes, weight.gradient.codes, list(optimizer.state[weight.codes].values())])
        with LiveStorages([*existing, *tables(weight.format)]) as memory:
            optimizer.step()
        weight.gradient.clear()
    assert memory.extra == predicted.temporaries
    assert predicted.weights == weight.codes.nbytes
    assert predicted == predict_bytes(
        (48, 512), options, parameter_dtype=torch.bfloat16, handle=weight.as_handle(), weight=weight.format
    )


def test_checkpoints_of_quantised_training_round_trip():
    index = torch.randint(64, (30,))
    models = tiny(), tiny()
    optimizers = [Muon(split_parameters(m), lr=0.01, momentum_format="int4", rounding="stochastic") for m in models]
    for _ in range(2):
        loss_of(models[0], index).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, index).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_embeddings_share_their_weight_with_the_head():
    weight = QuantisedWeight.of(torch.randn(32, 256), "q8-0")
    embedding = QuantisedEmbedding(weight, torch.float32)
    index = torch.tensor([[3, 1], [3, 7]])
    rows = embedding(index)
    assert torch.equal(rows, weight.dequantised()[index])
    rows.sum().backward()
    out = torch.empty(32 * 256)
    weight.gradient.read_(0, out)
    assert out.view(32, 256)[:, 0].tolist() == [{3: 2.0, 1: 1.0, 7: 1.0}.get(row, 0.0) for row in range(32)]


def test_splitting_is_exact_for_every_bit_pattern():
    values = torch.randint(-(2**31), 2**31 - 1, (20_000,), dtype=torch.int32).view(torch.float32)
    values = values[values.abs() < 3.3e38]
    rounded, low = torch.empty(values.numel(), dtype=torch.bfloat16), torch.empty(values.numel(), dtype=torch.int16)
    split_(values, rounded, low)
    back = torch.empty_like(values)
    join_(rounded, low, back)
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))
    error = (rounded.float() - values).abs()
    assert (error <= (values.bfloat16().float() - values).abs() * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_planner_knows_what_coding_and_decoding_take(name, catalog):
    """The catalog's entries need no torch, and so have figures of their own."""
    chosen, table = weight_format(name), TEMPORARIES[name]
    entry = catalog.formats[name]
    assert (entry.codec, entry.block_elements) == (name, chosen.block_elements)
    scratch = entry.codec_scratch
    assert (scratch.coding_bytes, scratch.blocks_at_once) == (table.stochastic, chosen.encoded_blocks)
    assert (scratch.decoding_bytes, scratch.once_bytes) == (table.decode, table.decode_once)
    assert CHUNK_ELEMENTS == DECODED_AT_ONCE == DECODE_CHUNK == DEFAULTS["chunk_elements"] == DEFAULT_CHUNK_ELEMENTS
    assert scratch.table_bytes == sum(table.nbytes for table in tables(chosen))
