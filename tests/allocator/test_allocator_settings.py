"""Reading ``PYTORCH_CUDA_ALLOC_CONF``: what torch accepts, in torch's meaning, and what it refuses."""

import ctypes
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.units import MIB

DIVISIONS = [
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[131072:8]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "roundup_power2_divisions:[1:2,>:4],max_split_size_mb:30",
]

ACCEPTED = [
    "",
    "expandable_segments:True",
    "expandable_segments:True,",
    " expandable_segments : False ",
    "max_split_size_mb:20",
    "max_split_size_mb:30,max_split_size_mb:40",
    "max_non_split_rounding_mb:64",
    "garbage_collection_threshold:0.8",
    "large_segment_size_mb:11",
    "large_segment_size_mb:20",
    "pinned_use_background_threads:True",
    *DIVISIONS,
]

REFUSED = [
    "expandable_segments", "expandable_segments:", "expandable_segments:true", "expandable_segments:True,,",
    "expandable_segments:True;max_split_size_mb:128", "max_split_size_mb:10", "max_split_size_mb:[128]",
    "max_split_size_mb=128", "max_split_size_mb:99999999999999999999999",
    "max_split_size_mb:30,large_segment_size_mb:40", "max_non_split_rounding_mb:10",
    "garbage_collection_threshold:1.0", "garbage_collection_threshold:0", "large_segment_size_mb:10",
    "roundup_power2_divisions:0", "roundup_power2_divisions:3", "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[300:2]", "roundup_power2_divisions:[256:1",
]  # fmt: skip


def test_defaults_are_those_of_torch():
    settings = parse_alloc_conf("")
    assert settings == AllocatorSettings()
    assert (settings.large_segment_bytes, settings.max_non_split_rounding_bytes) == (20 * MIB, 20 * MIB)


def test_every_setting_that_matters_is_read():
    settings = parse_alloc_conf(
        "expandable_segments:True,max_split_size_mb:128,max_non_split_rounding_mb:64,large_segment_size_mb:32,"
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.25,roundup_power2_divisions:4"
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        large_segment_bytes=32 * MIB,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        roundup_power2_divisions=(4,) * 16,
        garbage_collection_threshold=Fraction(4, 5),
        per_process_memory_fraction=Fraction(1, 4),
    )


def test_the_rounding_limit_follows_the_large_segment():
    """parseArgs: max_non_split_rounding_size starts from large_segment_size."""
    assert parse_alloc_conf("large_segment_size_mb:64").max_non_split_rounding_bytes == 64 * MIB


def test_settings_without_effect_on_the_device_change_nothing():
    assert parse_alloc_conf("pinned_num_register_threads:8,throw_on_cudamalloc_oom:True") == AllocatorSettings()


def test_the_native_backend_is_the_default_and_the_other_is_not_modelled():
    assert parse_alloc_conf("backend:native") == AllocatorSettings()
    with pytest.raises(CannotAnswerError, match="cudaMallocAsync"):
        parse_alloc_conf("backend:cudaMallocAsync")


@pytest.mark.parametrize("text", [*REFUSED, "max_split_size_mb:25x", "max_split_size_mb:-1", "nonsense:1", "[", "]:,"])
def test_malformed_settings_are_refused(text):
    with pytest.raises(InvalidFileError, match="PYTORCH_CUDA_ALLOC_CONF: "):
        parse_alloc_conf(text)


def test_a_mistyped_setting_gets_the_nearest_match_and_all_problems_are_told():
    with pytest.raises(InvalidFileError) as caught:
        parse_alloc_conf("max_split_size:128,expandable_segment:True,garbage_collection_threshold:2")
    first, second, third = caught.value.problems
    assert "did you mean 'max_split_size_mb'?" in first
    assert "did you mean 'expandable_segments'?" in second
    assert third.endswith("must be above 0 and below 1, got 2")


@given(st.text(alphabet="expandable_segments:True[],>0123456789.mbroundupower2division\n\u0661", max_size=60))
def test_any_text_is_read_or_refused_with_one_line_for_each_problem(text):
    problems = ()
    try:
        parse_alloc_conf(text)
    except InvalidFileError as error:
        problems = error.problems
    except MemplanError as error:
        problems = (str(error),)
    assert all("\n" not in problem for problem in problems)


@pytest.fixture
def torch_settings():
    """The setter of the installed torch, put back to the defaults afterwards."""
    torch = pytest.importorskip("torch")
    default = "large_segment_size_mb:20"
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(default)


def test_torch_accepts_and_refuses_the_same(torch_settings):
    """AcceleratorAllocatorConfig::parseArgs of the installed torch, on the keys that all devices share."""
    for text in ACCEPTED:
        torch_settings("large_segment_size_mb:20")
        torch_settings(text)
        parse_alloc_conf(text)
    for text in REFUSED:
        torch_settings("large_segment_size_mb:20")
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            torch_settings(text)


def test_torch_reads_the_same_divisions(torch_settings):
    """AcceleratorAllocatorConfig::roundup_power2_divisions(size) of the installed torch, asked for each interval."""
    torch = pytest.importorskip("torch")
    library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"), None)
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    if library is None or not hasattr(ctypes.CDLL(str(library)), name):
        pytest.skip("this torch does not export the function")
    divisions_of = ctypes.CDLL(str(library))[name]
    divisions_of.restype, divisions_of.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    for text in DIVISIONS:
        torch_settings(text)
        settings = parse_alloc_conf(text)
        assert settings.roundup_power2_divisions == tuple(divisions_of(MIB << i) for i in range(16)), text
        for size in (600, 5_000, *(MIB * 2**doubled // 2 + more for doubled in range(20) for more in (-1, 0, 1, 999))):
            alone = AllocatorSettings(roundup_power2_divisions=(divisions_of(size),) * 16)
            assert settings.rounded_bytes(size) == alone.rounded_bytes(size), (text, size)
