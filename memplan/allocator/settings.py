"""Settings of the CUDA caching allocator, as ``PYTORCH_CUDA_ALLOC_CONF`` writes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError, match_hint
from memplan.units import MIB, round_up

MINIMUM_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MINIMUM_LARGE_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LARGE_ROUNDING_BYTES = 2 * MIB
POWER_OF_TWO_INTERVALS = 16
"""From 1 MiB to 64 GiB, one interval for each power of two (c10/core/AllocatorConfig.cpp)."""

_FIRST_INTERVAL_BITS = MIB.bit_length()
_MAXIMUM_MEBIBYTES = 2**40
_SOURCE = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings that change where a block goes or how large it is.

    Source:
        c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13;
        https://docs.pytorch.org/docs/stable/notes/cuda.html
    """

    expandable_segments: bool = False  # Grow one virtual segment page by page instead of calling cudaMalloc
    # Segment taken for a block above 1 and below 10 MiB; with expandable segments, the page of the large pool.
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    max_split_bytes: int | None = None  # Blocks of this size or more are never split; None when all may be
    # How much larger than the request an unsplit oversize block may be.
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    # Steps between two powers of two, for requests from ``2**i`` MiB on; 0 and 1 round to 512 bytes. The first entry
    # also covers everything below 1 MiB.
    roundup_power2_divisions: tuple[int, ...] = (0,) * POWER_OF_TWO_INTERVALS
    # Share of the allowed memory above which old cached blocks are released; 0 never. Without
    # ``per_process_memory_fraction`` below 1 it has no effect.
    garbage_collection_threshold: Fraction = Fraction(0)
    per_process_memory_fraction: Fraction = Fraction(1)  # Share of the card that the process may reserve

    def rounded_bytes(self, requested_bytes: int) -> int:
        """Return the size of the block that a request needs.

        Formula:
            Whole 512 bytes. With ``roundup_power2_divisions`` of ``d`` above 1 and more than
            ``512 * d`` bytes: the next ``d``-th part of the power of two below.

        Source:
            round_size and roundup_power2_next_division in c10/cuda/CUDACachingAllocator.cpp.

        Example:
            >>> AllocatorSettings().rounded_bytes(513)
            1024
            >>> parse_alloc_conf("roundup_power2_divisions:4").rounded_bytes(1200 * 1024) // 1024
            1280
        """
        bits = requested_bytes.bit_length()
        interval = min(max(bits - _FIRST_INTERVAL_BITS, 0), POWER_OF_TWO_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and requested_bytes > MINIMUM_BLOCK_BYTES * divisions:
            return round_up(requested_bytes, (1 << bits - 1) // divisions)
        return round_up(requested_bytes, MINIMUM_BLOCK_BYTES)

    def segment_bytes(self, block_bytes: int) -> int:
        """Return the size of the segment that is taken for a block of so many (rounded) bytes.

        Source:
            get_allocation_size in c10/cuda/CUDACachingAllocator.cpp.

        Example:
            >>> AllocatorSettings().segment_bytes(11 * 2**20) // 2**20
            12
        """
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MINIMUM_LARGE_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, LARGE_ROUNDING_BYTES)


def parse_alloc_conf(text: str) -> AllocatorSettings:
    """Return the settings that the value of ``PYTORCH_CUDA_ALLOC_CONF`` stands for.

    Settings of pinned host memory, and those that change when torch fails rather than where a
    block goes, are accepted and have no effect. A number is read whole: torch takes ``25x`` for 25.

    Args:
        text: ``key:value,key:value``; blanks do not count, the last of two equal keys holds.

    Raises:
        InvalidFileError: Unknown keys and unusable values, all of them at once.
        CannotAnswerError: ``backend:cudaMallocAsync``, the driver's own allocator.

    Source:
        AcceleratorAllocatorConfig::parseArgs in c10/core/AllocatorConfig.cpp,
        CUDAAllocatorConfig::parseArgs in c10/cuda/CUDAAllocatorConfig.cpp.

    Example:
        >>> parse_alloc_conf("expandable_segments:True,max_split_size_mb:128").max_split_bytes
        134217728
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for item in _items("".join(text.split())):
        key, colon, value = item.partition(":")
        try:
            _read(key, colon, value, values)
        except ValueError as error:
            problems.append(f"{_SOURCE}: {error}")
    problems += [f"{_SOURCE}: {problem}" for problem in _contradictions(values)]
    if problems:
        raise InvalidFileError(problems)
    large = values.get("large_segment_bytes", LARGE_SEGMENT_BYTES)
    return replace(AllocatorSettings(large_segment_bytes=large, max_non_split_rounding_bytes=large), **values)


def _items(text: str) -> Iterator[str]:
    """Yield the parts between commas, leaving the commas inside brackets alone."""
    depth = start = 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth <= 0:
            yield text[start:index]
            start = index + 1
    if start < len(text):
        yield text[start:]


def _read(key: str, colon: str, value: str, values: dict[str, Any]) -> None:
    """Put one setting into ``values`` under the field that it sets."""
    known = (*_FIELDS, *_WITHOUT_EFFECT, "backend")
    if key not in known:
        hint = match_hint(key, known, f"; known: {', '.join(sorted(known))}")
        raise ValueError(f"unknown setting {_shown(key)}{hint}")
    if not colon or not value:
        raise ValueError(f"{key}: expected {key}:value, got {_shown(key + colon)}")
    if key in _FIELDS:
        field, parse = _FIELDS[key]
        values[field] = parse(key, value)
    elif key == "backend":
        _check_backend(value)


def _contradictions(values: dict[str, Any]) -> Iterator[str]:
    """Yield the limits that are smaller than a large segment, which torch refuses too."""
    least = values.get("large_segment_bytes", LARGE_SEGMENT_BYTES)
    limits = {"max_split_bytes": "max_split_size_mb", "max_non_split_rounding_bytes": "max_non_split_rounding_mb"}
    for field, key in limits.items():
        if values.get(field, least) < least:
            yield f"{key}: must be at least {least // MIB}, the large segment size, got {values[field] // MIB}"


def _check_backend(value: str) -> None:
    if value == "cudaMallocAsync":
        raise CannotAnswerError(f"{_SOURCE}: backend:cudaMallocAsync is the driver's own allocator; not modelled")
    if value != "native":
        raise ValueError(f"backend: expected native or cudaMallocAsync, got {_shown(value)}")


def _boolean(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{key}: expected True or False, got {_shown(value)}")
    return value == "True"


def _integer(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or len(value) > 20:
        raise ValueError(f"{key}: expected a whole number, got {_shown(value)}")
    return int(value)


def _mebibytes(key: str, value: str) -> int:
    return min(_integer(key, value), _MAXIMUM_MEBIBYTES) * MIB


def _large_segment(key: str, value: str) -> int:
    size_bytes = _mebibytes(key, value)
    if size_bytes <= MINIMUM_LARGE_BYTES:
        raise ValueError(f"{key}: must be above {MINIMUM_LARGE_BYTES // MIB}, got {value}")
    return size_bytes


def _share(key: str, value: str) -> Fraction:
    if len(value) > 30 or "/" in value or "_" in value or "e" in value.lower():
        raise ValueError(f"{key}: expected a decimal number, got {_shown(value)}")
    try:
        return Fraction(value)
    except ValueError:
        raise ValueError(f"{key}: expected a decimal number, got {_shown(value)}") from None


def _threshold(key: str, value: str) -> Fraction:
    share = _share(key, value)
    if not 0 < share < 1:
        raise ValueError(f"{key}: must be above 0 and below 1, got {value}")
    return share


def _memory_fraction(key: str, value: str) -> Fraction:
    share = _share(key, value)
    if not 0 <= share <= 1:
        raise ValueError(f"{key}: must be from 0 to 1, got {value}")
    return share


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Return the divisions for each interval: one number for all, or ``[MiB:n,...,>:n]``."""
    if not value.startswith("["):
        return (_power_of_two(key, value, least=1),) * POWER_OF_TWO_INTERVALS
    if not value.endswith("]"):
        raise ValueError(f"{key}: the list has no closing bracket: {_shown(value)}")
    result = [0] * POWER_OF_TWO_INTERVALS
    last, first = 0, True
    for entry in value[1:-1].split(",") if value != "[]" else []:
        boundary, _, count = entry.partition(":")
        divisions = _power_of_two(key, count, least=0)
        if boundary == ">":
            result[last + 1 :] = [divisions] * (POWER_OF_TWO_INTERVALS - last - 1)
            continue
        index = _power_of_two(key, boundary, least=1).bit_length() - 1
        last = min(index, POWER_OF_TWO_INTERVALS - 1)
        if first:
            result[:last] = [divisions] * last
        result[last], first = divisions, False
    return tuple(result)


def _power_of_two(key: str, value: str, least: int) -> int:
    number = _integer(key, value)
    if number & (number - 1) or number < least:
        raise ValueError(f"{key}: expected a power of two{'' if least else ' or 0'}, got {value}")
    return number


def _shown(value: str) -> str:
    return repr(value if len(value) <= 40 else f"{value[:37]}...")


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "large_segment_size_mb": ("large_segment_bytes", _large_segment),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "per_process_memory_fraction": ("per_process_memory_fraction", _memory_fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}

_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
)  # fmt: skip
