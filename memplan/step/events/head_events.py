"""The events of a loss over chunks of tokens, each of which is computed again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplan.step.ends_on_tape import Head
from memplan.step.events.event_stream import EventStream, Libraries, PlayedSection, UseUp
from memplan.step.events.section_events import section_events
from memplan.step.head_instants import AGAIN
from memplan.step.tapes.event_recorder import NO_STORAGE
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_weight import Mode
from memplan.units import ceil_div

LOSS_BYTES = 4
"""The sum over a chunk is an fp32 number."""


class ChunkedLoss:
    """Head and loss over chunks, within one forward and backward.

    Args:
        stream: What events are written to.
        head: Norm, head and loss.
        values: Values of the quantities.
        mode: What becomes of weight gradients.
    """

    __slots__ = ("_chunks", "_events", "_head", "_losses", "_mode", "_parts", "_stream", "_values")

    def __init__(self, stream: EventStream, head: Head, values: Sequence[int], mode: Mode) -> None:
        assert head.chunk is not None
        self._stream, self._head, self._values, self._mode = stream, head, values, mode
        self._chunks = ceil_div(values[Quantity.TOKENS], values[Quantity.CHUNK])
        # Backward begins with the last chunk, whose gradient of codes is stored; those of others are added to it.
        later: Mode = "again" if mode != "layer" else mode
        kinds = [section_events(head.chunk, own, AGAIN) for own in (later, mode)]
        self._events = [*[kinds[0]] * (self._chunks - 1), kinds[1]]
        self._parts: list[PlayedSection] = []
        self._losses: list[int] = []

    def forward(self) -> None:
        """Write the forward of each chunk, whose loss stays; what autocast casts for the first serves all."""
        for number, events in enumerate(self._events):
            cast = {code - 1 for code in events.region_end} if number else set()
            own = replace(events, forward=tuple([code for code in events.forward if code not in cast]))
            part = PlayedSection(self._stream, own, events.sizes(self._values_of(number)), NO_STORAGE)
            part.forward({})
            self._parts.append(part)
            self._losses.append(self._stream.allocate(LOSS_BYTES))

    def _values_of(self, number: int) -> list[int]:
        """Return the values of the quantities for one chunk; the last has what is left of the tokens."""
        values = list(self._values)
        rows = values[Quantity.TOKENS] - number * values[Quantity.CHUNK]
        values[Quantity.CHUNK] = min(values[Quantity.CHUNK], rows)
        return values

    def region_end(self) -> None:
        """Write the events at the end of the whole forward."""
        self._parts[0].region_end()

    def backward(self, rows_of_all: int, libraries: Libraries, use_up: UseUp) -> tuple[int, dict[str, int]]:
        """Write the backward of each chunk, the last first; return the gradient of all rows, and the weights' sums.

        Args:
            rows_of_all: What the head is given, to be freed once all chunks are done; ``NO_STORAGE`` where others do.
            libraries: Libraries that have made no workspace in this thread.
            use_up: Writes the events of an update inside backward.
        """
        stream, sums, rows = self._stream, dict[str, int](), []
        for part in reversed(self._parts):
            stream.of("temporaries")
            part.backward(stream.allocate(LOSS_BYTES), libraries, use_up)
            if part.leaving != NO_STORAGE:
                rows.append(part.leaving)
            self._add(part.kept, sums, first_sum=part is self._parts[-2] if self._chunks > 1 else False)
        stream.free_all(self._losses)
        if rows_of_all != NO_STORAGE:
            stream.free(rows_of_all)
        output = self._head.section.output
        stream.of("activations")
        joined = stream.allocate(output.coefficient * self._values[output.quantity]) if rows else NO_STORAGE
        stream.free_all(rows)
        return joined, self._stored(sums, use_up)

    def _add(self, formed: dict[str, int], sums: dict[str, int], *, first_sum: bool) -> None:
        """Add a chunk's gradients to those there are: the first sum is a new tensor, later ones are in place."""
        self._stream.of("gradients")
        for name, storage in formed.items():
            if name not in sums:
                sums[name] = storage
                continue
            if first_sum:
                total = self._stream.allocate(self._stream.sizes[storage])
                self._stream.free(sums[name])
                sums[name] = total
            self._stream.free(storage)

    def _stored(self, sums: dict[str, int], use_up: UseUp) -> dict[str, int]:
        """Store the sums as the head's gradients; return those that stay."""
        kept = {}
        self._stream.of("gradients")
        for weight in self._head.weights:
            if weight.name not in sums:
                continue
            total = sums[weight.name]
            mode = "first" if weight.delayed else weight.own_mode(self._mode)
            if mode == "layer":
                use_up(weight.name, total)
                continue
            stored = weight.gradient_bytes if mode == "first" else 0
            if stored and stored == self._stream.sizes[total]:
                kept[weight.name] = total
                continue
            if stored:
                kept[weight.name] = self._stream.allocate(weight.gradient_codes_bytes)
            self._stream.free(total)
        return kept
