"""The events of a loss whose chunks run backward as far as the head's input, one by one, before the model does.

Source:
    ``ChunkedLossWrapper.__call__`` and ``GradAccumulator`` in torchtitan/components/loss.py (0.3.0).
"""

from collections.abc import Mapping, Sequence

from memplan.step.blocks.block_settings import Regime
from memplan.step.chunks_at_once import LABEL_BYTES
from memplan.step.ends.head_on_tape import Head
from memplan.step.events.around_step import HeadSums
from memplan.step.events.event_stream import EventStream, Libraries, PlayedSection, UseUp
from memplan.step.events.head_events import LOSS_BYTES, ChunkedLoss, LogitsOfChunks
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.playing.recomputation import NOTHING_AGAIN
from memplan.step.playing.section_events import section_events
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.event_recorder import NO_STORAGE
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import Mode
from memplan.units import ceil_div

SUM_BYTES = 4
"""Of an element of the gradient of all rows, which chunks' are put into."""


class ChunksAtOnce:
    """Head and loss over chunks, within one forward.

    Args:
        mode: What becomes of weight gradients.
        libraries: Libraries that have made no workspace yet, of forward and of backward.
        sums: Adds up the gradients of the head; None where they are added in the place of the first chunk's.
    """

    def __init__(
        self,
        stream: EventStream,
        head: Head,
        values: Sequence[int],
        mode: Mode,
        libraries: tuple[Libraries, Libraries],
        sums: HeadSums | None,
        regime: Regime,
    ) -> None:
        assert head.chunk is not None
        self._stream, self._head, self._values, self._sums = stream, head, values, sums
        self._libraries, self._chunks = libraries, ceil_div(values[Quantity.TOKENS], values[Quantity.CHUNK])
        later: Mode = mode if sums is not None or mode == "layer" else "again"
        kinds = [section_events(head.chunk, own, NOTHING_AGAIN) for own in (mode, later)]
        first = next(operation for operation in head.chunk.tape.operations if operation.name == "head")
        self._logits = first.makes[0]
        self._events = [kind.holding(self._logits) for kind in kinds]
        self._copies_rows = not regime.one_sequence and self._chunks > 1
        self._joined, self._gradients = NO_STORAGE, dict[str, int]()

    def forward(self, rows_of_all: int, named: Sequence[int]) -> None:
        """Write forward and backward of each chunk, whose rows' gradients are put together.

        Args:
            rows_of_all: What the head is given, to be freed at the end; ``NO_STORAGE`` where others do.
            named: What the model has names for until it returns, which no chunk waits for.
        """
        stream, output, tokens = self._stream, self._head.section.output, self._values[Quantity.TOKENS]
        stream.free_all(named)
        stream.of("activations")
        copied, size = self._chunks * self._copies_rows, self._values[Quantity.CHUNK]
        copies = stream.allocate_all([output.coefficient * size] * copied)
        copies += stream.allocate_all([LABEL_BYTES // 2 * size] * (2 * copied))
        sums, loss = stream.allocate_all([SUM_BYTES * output.width * tokens, LOSS_BYTES])
        if self._sums is not None:
            self._sums.enter_chunks()
        logits = list[int]()
        for number in range(self._chunks):
            logits = self._chunk(number, logits)
        if self._sums is not None:
            self._sums.leave_chunks()
        stream.of("temporaries")
        narrow = output.element_bytes < SUM_BYTES
        self._joined = stream.allocate(output.coefficient * tokens) if narrow else sums
        stream.free_all([*([sums] if narrow else []), *logits, *copies, loss])
        stream.free_all([rows_of_all] if rows_of_all != NO_STORAGE else [])

    def _chunk(self, number: int, before: Sequence[int]) -> list[int]:
        """Write forward and backward of a chunk; return its logits, which have a name until the next ones do."""
        stream, events = self._stream, self._events[min(number, 1)]
        stream.of("logits")
        part = PlayedSection(stream, events, events.sizes(self._values), NO_STORAGE, owned=True)
        part.forward(self._libraries[0], lambda: stream.free_all(before))
        part.region_end()
        stream.of("temporaries")
        losses = stream.allocate_all([LOSS_BYTES] * 2)
        part.backward(losses[1], self._libraries[1], _never)
        last = number == self._chunks - 1
        if self._sums is not None:
            self._sums.take_chunk(part.gradient_storages, several=self._chunks > 1, last=last)
        elif number == 0:
            self._gradients = part.gradient_storages
        stream.of("temporaries")
        output = self._head.section.output
        if output.element_bytes < SUM_BYTES:
            stream.passing(SUM_BYTES * output.width * self._values[Quantity.CHUNK])
        stream.free_all([part.leaving] if part.leaving != NO_STORAGE else [])
        stream.free(losses[0])
        return [part.own_name(self._logits)]

    def region_end(self) -> None:
        """Write nothing: what autocast has cast went with each chunk."""

    def backward(self, libraries: Libraries, use_up: UseUp) -> tuple[int, dict[str, int]]:
        """Return the gradient of all rows, and the weights' gradients, which are there already."""
        del libraries, use_up
        return self._joined, self._gradients


def _never(name: str, gradient: int) -> None:
    """Stand for updates inside backward, which this loss is not run with."""
    raise AssertionError(name, gradient)


def loss_over_chunks(
    given: tuple[EventStream, Head, Sequence[int], Mode],
    inputs: StepInputs,
    taped: ModelOnTape,
    libraries: Mapping[str, Libraries],
    sums: HeadSums | None,
) -> ChunkedLoss | LogitsOfChunks | ChunksAtOnce:
    """Return head and loss over chunks, which a step plays.

    Args:
        given: What all of them take.
        libraries: Libraries that have made no workspace yet, of ``forward`` and of ``backward``.
        sums: Adds up the head's gradients over chunks that run backward at once, if anything does.
    """
    if taped.settings.backward_at_once:
        both = libraries["forward"], libraries["backward"]
        return ChunksAtOnce(*given, both, sums, inputs.regime)
    return (LogitsOfChunks if inputs.setup.profile.loss == "chunked-logits" else ChunkedLoss)(*given)
