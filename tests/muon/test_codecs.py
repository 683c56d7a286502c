"""State formats: exact bytes, exact packing, errors no larger than theory allows."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import UnknownNameError
from memplan.muon.state_codecs.block_codecs import LLOYD_MAX, TERNARY_LEVEL, GaussianCodec, LogCodec
from memplan.muon.state_codecs.codecs import Stretch, codec_bytes, padded, rounded_down_
from memplan.muon.state_codecs.packing import group_of, index_dtype, pack_, pack_ternary_, unpack_, unpack_ternary_
from memplan.muon.state_codecs.state_formats import DIVERGING, MOMENTUM_FORMATS, adamw_codecs, momentum_codec
from memplan.muon.stores.optimizer_errors import OptimizerError

from .memory import LiveStorages, allocator_peak, storage_bytes

CPU = torch.device("cpu")
SLOT = "momentum_buffer"
BLOCKED = [name for name in MOMENTUM_FORMATS if name not in ("fp32", "bf16")]


def round_trip(codec, values, noise=None):
    count = values.numel()
    state = codec.empty(SLOT, count, CPU)
    length = padded(count, codec.block_elements)
    scratch = codec.scratch(length, CPU)
    whole = Stretch(state, SLOT, 0, count)
    loaded = codec.load(whole, scratch)
    loaded[:count] = values
    codec.store(loaded, whole, scratch, noise)
    return codec.load(whole, scratch)[:count].clone()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_packing_round_trips(bits):
    count, size = group_of(bits)
    codes = torch.randint(2**bits, (count * 11,)).to(index_dtype(bits))
    packed = torch.empty(11 * size, dtype=torch.uint8)
    pack_(codes.clone(), packed, bits)
    back = torch.empty_like(codes)
    unpack_(packed, back, bits)
    assert torch.equal(back, codes)


@pytest.mark.parametrize("elements", [8, 64, 128, 256])
def test_ternary_packing_round_trips(elements):
    size = math.ceil(elements / 5)
    index = torch.randint(3, (7, elements), dtype=torch.int32)
    packed, back = torch.empty(7, size, dtype=torch.uint8), torch.empty_like(index)
    pack_ternary_(index.clone(), packed)
    assert packed.max() < 3**5
    unpack_ternary_(packed, back)
    assert torch.equal(back, index)


def test_packing_puts_the_first_code_in_the_low_bits():
    packed = torch.empty(1, dtype=torch.uint8)
    pack_(torch.tensor([5, 10], dtype=torch.uint8), packed, 4)
    assert packed.item() == 5 + 16 * 10


@given(
    st.sampled_from(BLOCKED),
    st.integers(1, 3000),
    st.sampled_from([8, 32, 64, 128, 2048]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
)
@settings(max_examples=40, deadline=None)
def test_state_bytes_are_whole_blocks(name, elements, block, scale):
    codec = momentum_codec(name, block, scale)
    state = codec.empty(SLOT, elements, CPU)
    codes = math.ceil(block / 5) if name == "ternary" else block * int(name[5 if name.startswith("gauss") else 3]) // 8
    expected = math.ceil(elements / block) * (codes + (4 if scale == "fp32" else 2))
    assert storage_bytes(state.values()) == codec_bytes(codec, elements) == expected


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_defaults_are_blocks_of_128_with_fp32_scales(name):
    codec = momentum_codec(name)
    assert (codec.block_elements, codec.block_bytes) == (128, 128 * int(name[3]) // 8 + 4)
    assert set(codec.empty(SLOT, 1, CPU)) == {"codes", "scales"}


@pytest.mark.parametrize("name", MOMENTUM_FORMATS)
def test_a_fresh_state_is_zero(name):
    codec = momentum_codec(name)
    state = codec.empty(SLOT, 300, CPU)
    assert not codec.load(Stretch(state, SLOT, 0, 300), codec.scratch(384, CPU)).any()


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("fp32", 0.0),
        ("bf16", 0.003),
        ("int8", 0.008),
        ("int4", 0.13),
        ("int2", 0.8),
        ("int2-no-zero", 0.58),
        ("gauss4", 0.105),
        ("gauss3", 0.19),
        ("gauss2", 0.35),
        ("ternary", 0.44),
    ],
)
def test_relative_error_on_normal_values(name, bound):
    torch.manual_seed(0)
    values = torch.randn(12_800)
    error = ((round_trip(momentum_codec(name), values) - values).norm() / values.norm()).item()
    assert error <= bound


@pytest.mark.parametrize(
    ("first", "levels"),
    [*((0.0, levels) for levels in LLOYD_MAX.values()), (TERNARY_LEVEL / 2, (TERNARY_LEVEL,))],
    ids=["2 bits", "3 bits", "4 bits", "ternary"],
)
def test_gaussian_levels_are_centroids_of_their_cells(first, levels):
    """Lloyd's and Max's condition: each level is the mean of the normal variable over its cell."""
    edges = [first, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]

    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def tail(x):
        return math.erfc(x / math.sqrt(2)) / 2

    for level, (low, high) in zip(levels, pairwise(edges), strict=True):
        assert level == pytest.approx((density(low) - density(high)) / (tail(low) - tail(high)), abs=1e-10)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "gauss4"])
def test_stochastic_rounding_is_unbiased_where_levels_are_even(name):
    torch.manual_seed(0)
    values = torch.full((128,), 0.3)
    values[0] = 1.0
    codec = momentum_codec(name)
    mean = torch.stack([round_trip(codec, values, torch.rand(128)) for _ in range(400)])[:, 1:].mean().item()
    assert mean == pytest.approx(0.3, abs=0.04 if name == "gauss4" else 0.01)


@pytest.mark.parametrize("name", ["int8", "int4", "gauss3"])
def test_stretches_of_a_state_do_not_disturb_each_other(name):
    torch.manual_seed(0)
    values, codec = torch.randn(1000), momentum_codec(name)
    state, scratch = codec.empty(SLOT, 1000, CPU), codec.scratch(512, CPU)
    for start in range(0, 1000, 512):
        count = min(512, 1000 - start)
        stretch = Stretch(state, SLOT, start, count)
        part = codec.load(stretch, scratch)
        part[:count] = values[start : start + count]
        codec.store(part, stretch, scratch)
    stretches = Stretch(state, SLOT, 0, 512), Stretch(state, SLOT, 512, 488)
    parts = [codec.load(stretch, scratch).clone() for stretch in stretches]
    assert torch.equal(torch.cat(parts)[:1000], round_trip(codec, values))


@pytest.mark.parametrize("name", MOMENTUM_FORMATS)
def test_scratch_is_all_that_loading_and_storing_allocates(name):
    codec = momentum_codec(name)
    state = codec.empty(SLOT, 5000, CPU)
    whole = Stretch(state, SLOT, 0, 5000)
    spare = torch.empty(5120)

    def work():
        scratch = codec.scratch(5120, CPU)
        values = codec.load(whole, scratch)
        codec.store(values.normal_(), whole, scratch, spare=spare)

    if name == "int2-notes":
        pytest.skip("its ranges go through Python, one number at a time")
    expected = codec.scratch_bytes(5120)
    with LiveStorages([*state.values(), spare]) as memory:
        work()
    assert memory.extra == expected
    assert allocator_peak(work) - expected <= 64


@pytest.mark.parametrize("extreme", [0.0, 1e-38, 1e-20, 1e30])
@pytest.mark.parametrize("name", BLOCKED)
def test_extreme_magnitudes_stay_finite(name, extreme):
    values = torch.zeros(130)
    values[3] = extreme
    assert torch.isfinite(round_trip(momentum_codec(name, scale_dtype="fp16"), values)).all()


def test_the_last_block_is_scaled_by_its_own_elements():
    torch.manual_seed(0)
    values = torch.randn(129)
    values[128] = 0.5
    assert round_trip(momentum_codec("gauss4"), values)[128].item() == pytest.approx(0.5, rel=0.2)


def test_the_notes_range_grows_without_any_gradient():
    codec = momentum_codec("int2-notes")
    state = codec.empty(SLOT, 128, CPU)
    scratch = codec.scratch(128, CPU)
    whole = Stretch(state, SLOT, 0, 128)
    values = codec.load(whole, scratch)
    values[0] = 1.0
    codec.store(values, whole, scratch)
    first = state["scales"].item()
    for _ in range(60):
        codec.store(codec.load(whole, scratch).mul_(0.95), whole, scratch)
    assert state["scales"].item() > 1000 * first


def blocks_drawn(kind, seed, elements):
    """Blocks that codecs find hard: alike magnitudes, a few large ones, two sizes, powers, zeros, one element."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(elements, generator=generator)
    share = torch.rand(elements, generator=generator)
    return {
        "normal": normal,
        "alike": normal.sign(),
        "nearly alike": normal.sign() * (1 + 0.2 * share),
        "two sizes": normal.sign() * torch.where(share < 0.27, 1.76, 0.52),
        "heavy": normal / share.clamp(min=1e-3),
        "powers": normal.sign() * 10 ** (-30 * share),
        "sparse": normal * (share < 0.02),
        "zero": torch.zeros(elements),
    }[kind]


HARD = ("normal", "alike", "nearly alike", "two sizes", "heavy", "powers", "sparse", "zero")
FP32_ROUNDING = 1e-6
"""Relative, of sums over a block in fp32."""


def size_of(codec, values):
    """What storing must not make larger: of each block the norm where the scale is a fit, else the largest magnitude."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % codec.block_elements)).view(-1, codec.block_elements)
    order = 2 if isinstance(codec, GaussianCodec) else math.inf
    return torch.linalg.vector_norm(blocks.double(), ord=order, dim=1)


@pytest.mark.parametrize("name", [name for name in MOMENTUM_FORMATS if name not in DIVERGING])
@given(
    st.sampled_from(HARD),
    st.integers(0, 1000),
    st.integers(1, 400),
    st.sampled_from([8, 32, 128]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.sampled_from([1e-6, 1.0, 100.0]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_what_is_stored_is_never_larger_than_what_was_given(name, kind, seed, elements, block, scale, unit, random):
    codec = momentum_codec(name, block, scale)
    values = blocks_drawn(kind, seed, elements) * unit
    noise = torch.rand(padded(elements, codec.block_elements), generator=torch.Generator().manual_seed(seed))
    before, after = size_of(codec, values), size_of(codec, round_trip(codec, values, noise if random else None))
    scales = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-10}[scale]  # a linear codec's scale is rounded to nearest
    rounded = FP32_ROUNDING + (0 if isinstance(codec, GaussianCodec) else 2**-8 if name == "bf16" else scales)
    tiny = 2**-24 if scale == "fp16" and not isinstance(codec, GaussianCodec) else 0  # fp16 below its normal numbers
    assert (after <= before * (1 + rounded) + tiny).all()


@pytest.mark.parametrize("random", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("scale", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in MOMENTUM_FORMATS if name not in DIVERGING])
def test_a_running_mean_does_not_grow_however_often_it_is_stored(name, scale, random):
    """Rounding the same mean over and over, which decays ever so little: scales' own rounding must not add up."""
    torch.manual_seed(0)
    codec = momentum_codec(name, 128, scale)
    values = torch.cat([torch.nn.functional.pad(blocks_drawn(kind, 3, 300), (0, 84)) for kind in HARD])
    first = size_of(codec, values) * (1 + 2**-8)
    for _ in range(100):
        values = round_trip(codec, values * 0.999, torch.rand(values.numel()) if random else None)
        grown = (size_of(codec, values) > first).view(len(HARD), -1).any(1)
        assert not grown.any(), [kind for kind, larger in zip(HARD, grown, strict=True) if larger]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_blocks_of_one_magnitude_are_stored_as_they_are(bits):
    """The block that grew 1.51 times a step in two bits, and shrank in three and four."""
    values = blocks_drawn("alike", 0, 256)
    assert torch.allclose(round_trip(momentum_codec(f"gauss{bits}"), values), values, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(st.floats(0, 2.0**126, width=32))
def test_scales_are_rounded_towards_zero(dtype, value):
    given_value = torch.tensor([value])
    rounded = rounded_down_(given_value.clone(), dtype)
    stored = rounded.to(dtype)
    assert torch.equal(stored.float(), rounded)
    assert (rounded <= given_value).all()
    if value < torch.finfo(dtype).max and dtype != torch.float32:
        infinity = torch.tensor([math.inf]).to(dtype)
        assert (torch.nextafter(stored, infinity).float() > given_value).all()


@given(st.sampled_from(HARD), st.integers(0, 1000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_moments_of_adamw_have_no_larger_magnitude_than_was_given(kind, seed, random):
    first, second = adamw_codecs("int8", 4096)
    values, noise = blocks_drawn(kind, seed, 600), torch.rand(768)
    for codec, given_values in ((first, values), (second, values.square())):
        stored = round_trip(codec, given_values, noise.clone() if random else None)
        assert (size_of(codec, stored) <= size_of(codec, given_values) * (1 + FP32_ROUNDING)).all()


def test_second_moment_has_no_zero_and_keeps_its_mean():
    torch.manual_seed(0)
    _, codec = adamw_codecs("int8", 1 << 20)
    assert isinstance(codec, LogCodec)
    values = torch.full((256,), 3.3e-4)
    values[0] = 1.0
    stored = torch.stack([round_trip(codec, values, torch.rand(256)) for _ in range(400)])[:, 1:]
    assert stored.min() > 0
    assert stored.mean().item() == pytest.approx(3.3e-4, rel=2e-3)
    assert round_trip(codec, torch.tensor([1.0, 0.0]))[1] > 0


def test_small_tensors_keep_fp32_adamw_states():
    small, large = adamw_codecs("int8", 4095)[0], adamw_codecs("int8", 4096)[0]
    assert (small.block_elements, small.block_bytes) == (1, 4)
    assert (large.block_elements, large.block_bytes) == (256, 260)


def test_unknown_formats_and_blocks_are_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'int8'"):
        momentum_codec("int-8")
    with pytest.raises(UnknownNameError, match="scale dtype"):
        momentum_codec("int8", scale_dtype="fp8")
    with pytest.raises(OptimizerError, match="multiple of 8"):
        momentum_codec("int8", 12)
    with pytest.raises(UnknownNameError, match="AdamW"):
        adamw_codecs("int4", 10)
