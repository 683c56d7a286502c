"""The events of replicas: weights are sent once, gradients in buckets that stay, and outputs are copied where unused parameters are looked for.

Source:
    ``DistributedDataParallel`` in torch/nn/parallel/distributed.py, ``broadcast_coalesced``, ``initialize_buckets``,
    ``rebuild_buckets`` and ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp (v2.13.0).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from memplan.step.events.around_step import Around
from memplan.step.events.event_stream import EventStream
from memplan.step.events.head_events import LOSS_BYTES
from memplan.step.events.model_tensors import ModelTensors
from memplan.step.states.parallel_shards import looks_for_unused_parameters
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.taped_operations import Value
from memplan.units import MIB

SENT_BYTES = 250 * MIB
"""Bytes of weights that are sent together (``broadcast_bucket_size``)."""

SENT_AT_ONCE = 2
"""Sends that are under way at a time (``max_in_flight``)."""

BUCKET_LIMITS = (MIB, 25 * MIB)
"""Bytes from which on the first bucket, and each other one, is full: ``_DEFAULT_FIRST_BUCKET_BYTES``, ``_DEFAULT_BUCKET_CAP_MB``."""

COUNTER_BYTES = 4
"""An entry of ``local_used_map_dev_``, which says of a parameter whether it was used."""


class Replicas:
    """Replicas of a model, of which this is one.

    Args:
        stream: Where events are written to.
        tensors: The model's tensors.
        logits: What it returns beside the loss; None for nothing.
        values: Values of the quantities that sizes are made of.
    """

    def __init__(
        self,
        stream: EventStream,
        inputs: StepInputs,
        tensors: ModelTensors,
        logits: Value | None,
        values: Sequence[int],
    ) -> None:
        self._stream, self._tensors = stream, tensors
        self._looks = looks_for_unused_parameters(inputs.setup)
        self._waits = inputs.setup.stack.model_code != "own"  # for the last micro-step (``no_sync``)
        self._buckets: list[int] = []
        self._order: list[str] = []  # Names of weights as their gradients came in the first backward
        self._rebuilt = False
        width = 0 if logits is None else 4 if inputs.setup.autocast else logits.element_bytes
        self._casts = logits is not None and width > logits.element_bytes
        self._copied = 0 if logits is None else width * logits.width * values[logits.quantity]
        self._copies = self._looks and logits is not None

    def around(self) -> Around:
        """Return what is written around the parts."""
        return Around(
            wrap=self.wrap,
            begin=self.begin,
            copy_returned=self.copy_returned if self._copies else None,
            leave_backward=self.leave_backward,
        )

    def wrap(self) -> None:
        """Send the model, and make buckets."""
        self._stream.of("communication")
        self._send_weights()
        self._make_buckets([name for name, _ in self._tensors.trained], BUCKET_LIMITS if self._looks else ())
        if self._looks:
            self._stream.allocate(COUNTER_BYTES * len(self._tensors.trained))

    def begin(self, micro_step: int) -> None:
        """Make buckets anew before the forward that follows the first reduction, unless unused parameters are looked for."""
        if self._order and not (self._looks or self._rebuilt or (micro_step and self._waits)):
            self._stream.of("communication")
            self._stream.free_all(self._buckets)
            self._make_buckets(self._order, BUCKET_LIMITS, in_order=True)
            self._rebuilt = True

    def copy_returned(self, logits: Sequence[int]) -> None:
        """Copy the loss and logits that the model returns, which accelerate has cast to fp32.

        Args:
            logits: Storages of those that the model has formed, which go.

        Source:
            ``_DDPSink`` in torch/nn/parallel/distributed.py (v2.13.0); ``ConvertOutputsToFp32`` in
            accelerate/utils/operations.py (1.15.0).
        """
        stream = self._stream
        stream.of("logits")
        cast = stream.allocate_all([self._copied] * self._casts)
        stream.free_all(logits if cast else [])
        copies = stream.allocate_all([LOSS_BYTES, self._copied])
        stream.free_all([*(cast or logits), *copies])

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Note the order in which gradients came."""
        if place == 0 and not self._order:
            self._order = [*gradients]

    def _send_weights(self) -> None:
        """Write what weights are put together in to be sent; a tensor that is sent alone is not copied."""
        sending: list[int | None] = []
        for sizes in bucketed(self._tensors.sent(), (SENT_BYTES,)):
            if len(sending) == SENT_AT_ONCE:
                self._stream.free_all(storage for storage in [sending.pop(0)] if storage is not None)
            sending.append(self._stream.allocate(sum(sizes)) if len(sizes) > 1 else None)
        self._stream.free_all(storage for storage in sending if storage is not None)

    def _make_buckets(self, names: Sequence[str], limits: Sequence[int], *, in_order: bool = False) -> None:
        """Allocate buckets of gradients, given the order of their weights, those of the last one first unless it is that of gradients."""
        entries = dict(self._tensors.trained)
        buckets = bucketed(((entries[name].gradient_name, entries[name].gradient_bytes) for name in names), limits)
        self._buckets = self._stream.allocate_all(map(sum, buckets if in_order else reversed(buckets)))


def bucketed(tensors: Iterable[tuple[str, int]], limits: Sequence[int]) -> list[list[int]]:
    """Return buckets of tensors of one dtype each, in the order of their first tensors, as lists of bytes.

    Args:
        tensors: Dtype and bytes of each.
        limits: Bytes from which on the first bucket of a dtype is full, and so on, the last for all others; none for no limit.
    """
    buckets: list[list[int]] = []
    opened: dict[str, list[int]] = {}
    filled: dict[str, int] = defaultdict(int)
    for dtype, size in tensors:
        if dtype not in opened:
            buckets.append(opened.setdefault(dtype, []))
        opened[dtype].append(size)
        if limits and sum(opened[dtype]) >= limits[min(filled[dtype], len(limits) - 1)]:
            filled[dtype] += 1
            del opened[dtype]
    return buckets
