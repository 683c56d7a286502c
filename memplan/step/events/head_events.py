"""The events of a loss over chunks of tokens, each of which is computed again in backward, and of metrics of whole logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from memplan.step.chunks_at_once import all_logits
from memplan.step.ends.head_on_tape import Head
from memplan.step.events.event_stream import EventStream, Libraries, PlayedSection, UseUp
from memplan.step.head_instants import AGAIN
from memplan.step.losses.logit_metrics import ENTROPY_BYTES
from memplan.step.playing.section_events import section_events
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.event_recorder import NO_STORAGE
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import Mode
from memplan.step.units.collated_rows import MASK_BYTES
from memplan.units import ceil_div

LOSS_BYTES = 4
"""The sum over a chunk is an fp32 number."""


class HeadGradients:
    """The gradients of a head whose loss is over chunks: of its weights, added up, and of what it is given.

    Args:
        mode: What becomes of weight gradients.
    """

    __slots__ = ("_mode", "_stream", "_values", "head")

    def __init__(self, stream: EventStream, head: Head, values: Sequence[int], mode: Mode) -> None:
        self._stream, self.head, self._values, self._mode = stream, head, values, mode

    def joined(self, rows_of_all: int, rows: Sequence[int]) -> int:
        """Write how the gradients of all chunks' rows are joined, what the head was given going; return what they are in."""
        stream, output = self._stream, self.head.section.output
        if rows_of_all != NO_STORAGE:
            stream.free(rows_of_all)
        stream.of("activations")
        joined = stream.allocate(output.coefficient * self._values[output.quantity]) if rows else NO_STORAGE
        stream.free_all(rows)
        return joined

    def add(self, formed: dict[str, int], sums: dict[str, int], *, first_sum: bool) -> None:
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

    def stored(self, sums: dict[str, int], use_up: UseUp) -> dict[str, int]:
        """Store the sums as the head's gradients; return those that stay."""
        retained = {}
        self._stream.of("gradients")
        for weight in self.head.weights:
            if weight.name not in sums:
                continue
            total = sums[weight.name]
            if weight.casts_gradient:
                whole, total = total, self._stream.allocate(weight.own_bytes)
                self._stream.free(whole)
            mode = "first" if weight.delayed else weight.own_mode(self._mode)
            if mode == "layer":
                use_up(weight.name, total)
                continue
            stored = weight.gradient_bytes if mode == "first" else 0
            if stored and stored == self._stream.sizes[total]:
                retained[weight.name] = total
                continue
            if stored:
                retained[weight.name] = self._stream.allocate(weight.gradient_codes_bytes)
            self._stream.of("temporaries")
            self._stream.free_all(self._stream.allocate_all([weight.add_bytes // 2] * 2 if weight.add_bytes else []))
            self._stream.of("gradients")
            self._stream.free(total)
        return retained


@dataclass(slots=True)
class _Sums:
    """Sums of the chunks' gradients of a head's weights."""

    use_up: UseUp  # Writes the events of an update inside backward
    retained: dict[str, int]  # Gradients that stay, which a sum joins as it is stored
    storages: dict[str, int] = field(default_factory=dict)  # Each weight's sum by now
    names: set[str] = field(default_factory=set)  # Weights that are added up here, and not in a store of codes


class ChunkedLoss:
    """Head and loss over chunks, within one forward and backward.

    Args:
        mode: What becomes of weight gradients.
    """

    __slots__ = ("_chunks", "_events", "_gradients", "_losses", "_parts", "_rows", "_stream", "_values")

    def __init__(self, stream: EventStream, head: Head, values: Sequence[int], mode: Mode) -> None:
        assert head.chunk is not None
        self._stream, self._values = stream, values
        self._gradients = HeadGradients(stream, head, values, mode)
        self._chunks = ceil_div(values[Quantity.TOKENS], values[Quantity.CHUNK])
        # Backward begins with the last chunk, whose gradient of codes is stored; those of others are added to it.
        later: Mode = "again" if mode != "layer" else mode
        kinds = [section_events(head.chunk, own, AGAIN) for own in (later, mode)]
        self._events = [*[kinds[0]] * (self._chunks - 1), kinds[1]]
        self._parts: list[PlayedSection] = []
        self._losses: list[int] = []
        self._rows = NO_STORAGE

    def forward(self, rows_of_all: int, named: Sequence[int]) -> None:
        """Write the forward of each chunk, whose loss stays; what autocast casts for the first serves all.

        Args:
            rows_of_all: What the head is given, to be freed once all chunks are done; ``NO_STORAGE`` where others do.
            named: What the model has names for until it returns, which no chunk waits for.
        """
        self._rows = rows_of_all
        self._stream.free_all(named)
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

    def backward(self, libraries: Libraries, use_up: UseUp) -> tuple[int, dict[str, int]]:
        """Write the backward of each chunk, the last first; return the gradient of all rows, and the weights' sums.

        Args:
            libraries: Libraries that have made no workspace in this thread.
            use_up: Writes the events of an update inside backward.
        """
        stream, rows, retained = self._stream, list[int](), dict[str, int]()
        sums = _Sums(use_up, retained)
        for number, part in enumerate(reversed(self._parts)):
            stream.of("temporaries")
            sum_up = partial(self._sum_up, sums, number)
            part.backward(stream.allocate(LOSS_BYTES), libraries, use_up, sum_up=sum_up)
            rows += [] if part.leaving == NO_STORAGE else [part.leaving]
            retained.update({name: own for name, own in part.gradient_storages.items() if name not in sums.names})
        stream.free_all(self._losses)
        return self._gradients.joined(self._rows, rows[::-1]), retained

    def _sum_up(self, sums: _Sums, number: int, name: str, formed: int) -> None:
        """Write how a chunk's gradient of a weight is added, and how the sum is stored once it is whole."""
        last = number == self._chunks - 1
        if last and self._rows != NO_STORAGE:
            self._stream.free(self._rows)
            self._rows = NO_STORAGE
        sums.names.add(name)
        self._gradients.add({name: formed}, sums.storages, first_sum=number == 1)
        if last:
            sums.retained.update(self._gradients.stored({name: sums.storages[name]}, sums.use_up))


class LogitsOfChunks:
    """Head and loss over chunks of each sequence, whose logits are all there before the first is cast to fp32.

    Chunks of several sequences lie apart, so that a product whose weight is trained copies each first.

    Args:
        mode: What becomes of weight gradients.
    """

    __slots__ = (
        "_copies",
        "_elements",
        "_gradients",
        "_head",
        "_losses",
        "_results",
        "_rows",
        "_sizes",
        "_stream",
        "_width",
    )

    def __init__(self, stream: EventStream, head: Head, values: Sequence[int], mode: Mode) -> None:
        assert head.chunk is not None
        self._stream, self._head = stream, head
        self._gradients = HeadGradients(stream, head, values, mode)
        _, self._elements, self._width = all_logits(head.chunk)
        full, last = values[Quantity.ROW_CHUNK], values[Quantity.LAST_ROW_CHUNK]
        self._sizes = [full] * ((values[Quantity.TOKENS] - last) // max(full, 1)) + [last]
        copied = (
            values[Quantity.POSITIONS] < values[Quantity.TOKENS] and head.weights[0].trainable and len(self._sizes) > 1
        )
        self._copies = [head.section.output.coefficient * size for size in self._sizes] if copied else []
        self._results: list[int] = []
        self._losses: list[int] = []
        self._rows = NO_STORAGE

    def forward(self, rows_of_all: int, named: Sequence[int]) -> None:
        """Write the products of all chunks, and the loss of each, whose result in fp32 stays; take what :class:`ChunkedLoss` does."""
        stream, self._rows = self._stream, rows_of_all
        stream.of("logits")
        logits, copies = list[int](), list[int]()
        for size, copy_bytes in zip(self._sizes, self._copies or [0] * len(self._sizes), strict=True):
            copies += [stream.allocate(copy_bytes)] if copy_bytes else []
            logits.append(stream.allocate(self._width * self._elements * size))
        self._copies = copies
        if (copies or not self._head.weights[0].trainable) and rows_of_all != NO_STORAGE:
            stream.free(rows_of_all)
            self._rows = NO_STORAGE
        stream.free_all(named)
        for size in self._sizes:
            wide = [stream.allocate(4 * self._elements * size)] if self._width < 4 else []
            self._results.append(stream.allocate(4 * self._elements * size))
            loss, counted = stream.allocate_all([LOSS_BYTES] * 2)
            self._losses.append(counted)
            stream.free_all([*wide, loss])
        stream.free_all(logits)

    def region_end(self) -> None:
        """Write nothing: nothing is cast by autocast."""

    def backward(self, libraries: Libraries, use_up: UseUp) -> tuple[int, dict[str, int]]:
        """Write the backward of all losses, the last first, then of all products; return what :class:`ChunkedLoss` does."""
        stream, sums, gradients, rows = self._stream, dict[str, int](), [], []
        stream.of("logits")
        for size, result, counted in zip(self._sizes[::-1], self._results[::-1], self._losses[::-1], strict=True):
            elements = self._elements * size
            picked = stream.allocate(4 * elements)
            stream.free(counted)
            wide = stream.allocate(4 * elements)
            stream.free_all((picked, result))
            gradients.append(stream.allocate(self._width * elements) if self._width < 4 else wide)
            stream.free_all([wide] if self._width < 4 else [])
        trained = [weight for weight in self._head.weights if weight.trainable]
        for number, (size, gradient) in enumerate(zip(reversed(self._sizes), gradients, strict=True)):
            stream.of("gradients")
            formed = {weight.name: stream.allocate(weight.formed_bytes) for weight in trained}
            if trained:
                stream.make_workspace(libraries, "cublas")
            stream.of("temporaries")
            rows.append(stream.allocate(self._head.section.output.coefficient * size))
            stream.make_workspace(libraries, "cublas")
            stream.free_all([gradient, *self._copies[::-1][number : number + 1]])
            self._gradients.add(formed, sums, first_sum=number == 1)
        return self._gradients.joined(self._rows, rows), self._gradients.stored(sums, use_up)


def measure_logits(
    stream: EventStream, inputs: StepInputs, vocab_size: int, values: Sequence[int], logits: Sequence[int]
) -> None:
    """Write metrics of whole logits in fp32, to which Accelerate casts them, before these go.

    Source:
        ``convert_outputs_to_fp32`` in accelerate/utils/operations.py (1.15.0); ``compute_loss`` in
        trl/trainer/sft_trainer.py (0.19.1, 0.29.0, 1.3.0, 1.6.0).
    """
    metrics, row = inputs.setup.stack.loop.metrics, 4 * vocab_size
    stream.of("logits")
    whole = [stream.allocate(row * values[Quantity.TOKENS])] if inputs.setup.compute_bytes != 4 else []
    stream.free_all(logits if whole else [])
    copy = [] if inputs.regime.one_sequence else [row * values[Quantity.PREDICTED_TOKENS]]
    stream.of("temporaries")
    copies = stream.allocate_all(copy if metrics in ("entropy", "both") else [])
    if metrics != "accuracy-alone":
        stream.free_all(stream.allocate_all([row * values[Quantity.CHUNK]] * 3))
    stream.free_all([*copies, *stream.allocate_all([] if metrics == "entropy" else copy)])
    stream.free_all(whole or logits)


def measure_answers(stream: EventStream, inputs: StepInputs, vocab_size: int, values: Sequence[int]) -> None:
    """Write metrics of a loss over preferences, as :mod:`memplan.step.no_grad_instants` counts them, which look at whole logits once it is there."""
    metrics, row, predicted = inputs.setup.stack.loop.metrics, 4 * vocab_size, values[Quantity.PREDICTED_TOKENS]
    stream.of("temporaries")
    mask = 0 if metrics in ("entropy", "fused") else MASK_BYTES
    retained = stream.allocate((mask + ENTROPY_BYTES) * predicted)
    stream.of("logits")
    if metrics != "fused":
        copy = [row * predicted] if metrics == "entropy" and not inputs.regime.one_sequence else []
        stream.passing(*copy, *[row * values[Quantity.CHUNK]] * 3)
    kto = inputs.setup.config.method.stage == "kto"
    stream.passing((4 * (2 * vocab_size + 1) if kto else 2 * (vocab_size + 1)) * predicted)
    stream.free(retained)
