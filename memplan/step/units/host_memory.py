"""Host memory that one rank takes where an engine of several GPUs keeps its tensors there, or a trainer inputs of layers."""

from collections.abc import Iterable, Iterator, Sequence

from memplan.documents.frozen_values import dataclass
from memplan.model.spec import ModelSpec
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div, format_bytes


@dataclass(frozen=True, slots=True)
class HostTensors:
    """Tensors alike that one rank has in host memory."""

    component: str  # What they are: ``weights``, ``gradients``, ``optimizer_states`` ..
    tensor_bytes: int  # Bytes of one of them
    count: int  # How many there are
    pinned: bool  # Whether they are pinned, so that the GPU copies them while it computes

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.tensor_bytes * self.count

    @property
    def taken_bytes(self) -> int:
        """What they take: torch rounds each pinned tensor up to a power of two.

        Source:
            ``CachingHostAllocatorImpl::allocate`` in aten/src/ATen/core/CachingHostAllocator.h (v2.13.0).

        Example:
            >>> HostTensors("weights", 5_000, 3, pinned=True).taken_bytes
            24576
        """
        return (rounded_to_power(self.tensor_bytes) if self.pinned else self.tensor_bytes) * self.count


def rounded_to_power(size: int) -> int:
    """Return the least power of two that is at least ``size``; 0 stays 0.

    Example:
        >>> rounded_to_power(4_096), rounded_to_power(4_097)
        (4096, 8192)
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What one rank has in host memory, beside what every process takes."""

    tensors: tuple[HostTensors, ...] = ()  # All tensors there

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.bytes for part in self.tensors)

    @property
    def pinned_bytes(self) -> int:
        """What pinned tensors take, rounded up."""
        return sum(part.taken_bytes for part in self.tensors if part.pinned)

    @property
    def taken_bytes(self) -> int:
        """What all tensors take, pinned ones rounded up."""
        return sum(part.taken_bytes for part in self.tensors)

    @property
    def components(self) -> dict[str, int]:
        """Bytes of each component, by name."""
        sizes: dict[str, int] = {}
        for part in self.tensors:
            sizes[part.component] = sizes.get(part.component, 0) + part.bytes
        return sizes

    def words(self, unit: str = "") -> str:
        """Return what lies there, in words: each component with its bytes."""
        return ", ".join(f"{name} {format_bytes(size, unit)}" for name, size in self.components.items())


NOTHING_ON_HOST = HostMemory()


def host_memory(parts: Iterable[HostTensors]) -> HostMemory:
    """Return what a rank has in host memory, tensors alike once."""
    counts: dict[tuple[str, int, bool], int] = {}
    for part in parts:
        if part.tensor_bytes:
            key = part.component, part.tensor_bytes, part.pinned
            counts[key] = counts.get(key, 0) + part.count
    return HostMemory(tuple([HostTensors(name, size, n, pinned) for (name, size, pinned), n in counts.items()]))


SMALL_INPUT_BYTES = 2 * 1024 * 1024
"""Up to so many, an input of a layer stays on the device under unsloth."""
HOOKED_BYTES = 1024
"""Below so many, a saved tensor stays there under torchtune's and TRL's hooks (``min_offload_size``)."""


def waits_on_host(spec: ModelSpec, setup: TrainingSetup, tokens: int) -> bool:
    """Tell whether inputs of layers wait in host memory, given the tokens of a micro-batch.

    Source:
        ``UnslothCheckpointFunction`` in unsloth_zoo/gradient_checkpointing.py (2026.10.9); ``pack_tensor`` in
        torchtune/training/_activation_offloading.py (0.6.1).
    """
    least = {"buffers": SMALL_INPUT_BYTES + 1, "copies": 0}
    offloaded = setup.config.offload.activations == "cpu"
    size = tokens * spec.hidden_size * setup.residual_bytes
    return offloaded and size >= least.get(setup.stack.checkpointing.offloads, HOOKED_BYTES)


def copied_widths(spec: ModelSpec, setup: TrainingSetup, tokens: int, rows: int) -> tuple[int, int]:
    """Return the bytes for each token, and for each that another follows, from which hooks copy a tensor: 9 where more are needed.

    Without hooks they are 0.

    Args:
        rows: Sequences of the micro-batch, whose last token none follows.
    """
    if not (setup.stack.checkpointing.hooked and waits_on_host(spec, setup, tokens)):
        return 0, 0
    return min(9, ceil_div(HOOKED_BYTES, tokens)), min(9, ceil_div(HOOKED_BYTES, max(1, tokens - rows)))


MOMENTS = 2
"""What Adam keeps of each element."""
FP32_BYTES = 4


def flat_host_memory(
    partitions: Sequence[int], summed: Iterable[int], largest: int, width: int, *, pinned: bool
) -> HostMemory:
    """Return what a rank has there under ZeRO 1 and 2.

    Args:
        partitions: Elements of its piece of each group.
        summed: Elements of the parameters whose gradients micro-steps sum up there, each of them whole; none without accumulation.
        largest: Elements of the largest parameter, whose gradient has a buffer there.
        width: Bytes of an element of weights.
        pinned: Whether what DeepSpeed can pin is pinned; moments never are.
    """
    return host_memory(
        (
            *(part for elements in partitions for part in _stepped(elements, pinned=pinned, pinned_master=pinned)),
            *(HostTensors("weights", width * elements, 1, pinned) for elements in partitions),
            *(HostTensors("gradients", width * elements, 1, pinned) for elements in summed),
            HostTensors("buffers", width * largest, 1, pinned),
        )
    )


def pieces_host_memory(
    subgroups: Sequence[int],
    weights: Sequence[int],
    frozen: Iterable[int],
    width: int,
    *,
    pinned: bool,
    pinned_frozen: bool,
) -> HostMemory:
    """Return what a rank has there under ZeRO 3.

    Args:
        subgroups: Elements of its pieces of the parameters that are stepped together.
        weights: Elements of its pieces of each group's weights; none where these stay on the device.
        frozen: Elements of its piece of each frozen parameter, likewise.
        width: Bytes of an element of weights.
        pinned: Whether gradients are pinned; weights that are trained always are, moments and fp32 weights never.
        pinned_frozen: Whether frozen weights are.
    """
    return host_memory(
        (
            *(part for elements in subgroups for part in _stepped(elements, pinned=pinned, pinned_master=False)),
            HostTensors("gradients", width * sum(subgroups), 1, pinned),
            *(HostTensors("weights", width * elements, 1, pinned=True) for elements in weights),
            *(HostTensors("weights", width * elements, 1, pinned_frozen) for elements in frozen),
        )
    )


def _stepped(elements: int, *, pinned: bool, pinned_master: bool) -> Iterator[HostTensors]:
    """Yield a piece's fp32 weights, their gradients and moments."""
    size = FP32_BYTES * elements
    yield HostTensors("master_weights", size, 1, pinned_master)
    yield HostTensors("gradients", size, 1, pinned)
    yield HostTensors("optimizer_states", size, MOMENTS, pinned=False)
