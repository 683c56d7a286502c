"""The events of DeepSpeed's ZeRO 3: parameters gathered as modules run, gradients that leave through a bucket, and the step of a rank's pieces.

Parameters come from the memory of the stream that gathers, copies of gradients from that of the one that reduces.

Source:
    deepspeed/runtime/zero/stage3.py (0.19.8): ``_create_fp16_partitions_with_defragmentation``, ``_setup_for_real_optimizer``,
    ``initialize_optimizer_states``, ``create_reduce_and_remove_grad_hooks``, ``__reduce_and_partition_ipg_grads``, ``step`` and ``_post_step``; ``fetch_sub_module`` in partitioned_param_coordinator.py;
    ``has_overflow``; ``reduce_scatter_coalesced`` in deepspeed/runtime/comm/coalesced_collectives.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from memplan.step.alive_around_layers import embedded_leaf
from memplan.step.engines.engine_step import NORM_BYTES
from memplan.step.engines.gathered_parameters import Buffer, GatheredParameters, Limits, Visit
from memplan.step.engines.gathered_step import NORM_ELEMENTS, GatheredStep
from memplan.step.engines.module_visits import followed
from memplan.step.events.around_step import Around, first_and_last, handed_over
from memplan.step.events.event_stream import EventStream
from memplan.step.events.model_tensors import ModelTensors
from memplan.step.events.update_events import Updates
from memplan.step.losses.token_chunk_loss import TOKEN_CHUNKS
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.states.flat_partitions import in_fp32, partition_states
from memplan.step.states.partitioned_weights import partitions, subgroups
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO
from memplan.step.units.host_memory import FP32_BYTES
from memplan.units import ceil_div

GATHERS, REDUCES = 1, 3
"""Streams, as units of FSDP have them."""


class _Script:
    """What one pass gathers and lets go of, mark by mark; later passes that begin alike do it again.

    Args:
        stream: Where events are written to.
        on: The CUDA stream that parameters are gathered on.
    """

    def __init__(self, stream: EventStream, on: int) -> None:
        self._stream, self._on = stream, on
        self._turns: list[list[int]] = []  # Of each mark, bytes that are allocated, or ``~n`` for the n-th that goes
        self._names: list[int] = []

    def turn(self) -> None:
        """Begin the next mark."""
        self._turns.append([])

    def allocate(self, size: int) -> int:
        """Allocate so many bytes; return the number of the storage within the pass."""
        self._turns[-1].append(size)
        self._names.append(self._stream.allocate(size, self._on))
        return len(self._names) - 1

    def free(self, number: int) -> None:
        """Free a storage."""
        self._turns[-1].append(~number)
        self._stream.free(self._names[number])

    def name(self, number: int) -> int:
        """Return the name of a storage in the stream."""
        return self._names[number]

    def again(self) -> Iterator[None]:
        """Write the same once more, one mark each time that the next is asked for."""
        names: list[int] = []
        for turn in self._turns:
            for one in turn:
                if one < 0:
                    self._stream.free(names[~one])
                else:
                    names.append(self._stream.allocate(one, self._on))
            yield


class _Written:
    """Writes down in a script what is gathered and let go of."""

    def __init__(self, script: _Script) -> None:
        self._script = script
        self._buffers: dict[int, int] = {}  # Storage of each buffer
        self._storages: dict[str, int] = {}  # and of each whole parameter
        self._retained: dict[str, int] = {}  # and of those that checkpointing alone holds

    def begin(self, buffer: Buffer) -> None:
        """Allocate a buffer."""
        self._buffers[id(buffer)] = self._script.allocate(buffer.bytes)

    def copy(self, buffer: Buffer, sizes: Mapping[str, int]) -> None:
        """Allocate the parameters that are copied out of a buffer; one alone is that."""
        if len(buffer.names) == 1:
            self._storages[buffer.names[0]] = self._buffers.pop(id(buffer))
            return
        for name in buffer.names:
            self._storages[name] = self._script.allocate(sizes[name])

    def empty(self, buffer: Buffer) -> None:
        """Free a buffer."""
        self._script.free(self._buffers.pop(id(buffer)))

    def let_go(self, name: str, *, retained: bool) -> None:
        """Free a parameter, unless checkpointing holds it."""
        storage = self._storages.pop(name)
        if retained:
            self._retained[name] = storage
        else:
            self._script.free(storage)

    def unhold(self, names: Sequence[str]) -> None:
        """Free what checkpointing has held."""
        for name in [name for name in names if name in self._retained]:
            self._script.free(self._retained.pop(name))

    def left(self, stays: Collection[str]) -> list[int]:
        """Return the storages of parameters that stay."""
        return [self._script.name(storage) for name, storage in self._storages.items() if name in stays]


class PartitionedEngine:
    """A rank's step.

    Args:
        stream: Where events are written to.
        tensors: The model's tensors.
        taped: The model on tape.
    """

    def __init__(self, stream: EventStream, inputs: StepInputs, tensors: ModelTensors, taped: ModelOnTape) -> None:
        setup = inputs.setup
        self._stream, self._rules = stream, partitions(setup, inputs.states, inputs.spec.hidden_size)
        self._step = GatheredStep(inputs, taped, self._rules)
        self._visited = self._step.listed()
        self._sizes = self._step.elements
        self._groups = subgroups(setup, inputs.states)
        stepped = [(str(place), partition_states(setup, sum(group))) for place, group in enumerate(self._groups)]
        self._updates = Updates(stream, replace(inputs, setup=in_fp32(setup)), tensors, stepped)
        self._on = (GATHERS, REDUCES) if setup.config.parallel.deepspeed.overlap_comm is not False else (0, 0)
        self._adds_tied = setup.profile.loss not in TOKEN_CHUNKS  # DeepSpeed's own product forms the head's as it lies
        self._overflows = setup.config.compute_dtype == "fp16"  # is looked for (``has_overflow``)
        self._leaf = inputs.spec.names.embedding if embedded_leaf(inputs, taped) is not ZERO else ""
        self._layer = inputs.spec.names.layer
        self._ends = False
        self._passed = self._resident = False  # Whether a pass is over; whether what stays gathered is there
        self._script = _Script(stream, self._on[0])
        self._again: Iterator[None] | None = None
        self._followed = False  # Whether a pass has been followed that all later ones are like
        self._names: list[str] = []  # of the gradients in the bucket
        self._elements = 0
        self._waiting: list[int] = []  # Gradients that found no room in it
        self._whole: list[int] = []  # Parameters that stay gathered
        self._head: list[int] = []  # The head as it was read in the first forward

    def around(self) -> Around:
        """Return what is written around the parts."""
        return Around(
            make_weights=self.make_weights,
            wrap=self._updates.make_early_states,
            mode=handed_over,
            micro_steps=first_and_last,
            begin=self.begin,
            enter_backward=self.enter_backward,
            leave_backward=self.leave_backward,
            visit=self.visit,
            use_up=self.use_up,
            update=self.update,
            adds_tied=self._adds_tied,
        )

    def make_weights(self, stream: EventStream, sizes: Sequence[int]) -> None:
        """Allocate a rank's pieces, of trained parameters in one tensor, and what the step keeps of them."""
        del sizes
        rules = self._rules
        trained = sum(map(sum, self._groups))
        frozen = [ceil_div(self._sizes[name], rules.ranks) for name in self._sizes if name in self._step.frozen]
        stream.allocate_all([rules.width * trained, *(rules.width * size for size in frozen)])
        stream.of("master_weights")
        stream.allocate_all(FP32_BYTES * sum(group) for group in self._groups)
        stream.passing(FP32_BYTES * max(map(sum, self._groups)))  # zeros, as states are made
        stream.of("communication")
        stream.allocate(rules.bucket * rules.width)
        stream.of("gradients")
        stream.allocate(rules.gradient_bytes)
        for name, elements in self._sizes.items():
            if name not in self._step.frozen:  # gathered one by one, for their hooks
                stream.passing(rules.width * rules.ranks * ceil_div(elements, rules.ranks))

    def _gather_whole(self) -> None:
        """Gather parameters of few elements, which stay until the next step."""
        rules, whole = self._rules, [self._sizes[name] for name in self._sizes if name in self._step.whole]
        self._stream.of("weights")
        self._whole = self._stream.allocate_all(
            rules.width * rules.ranks * ceil_div(size, rules.ranks) for size in whole
        )
        self._resident = True

    # ---------------------------------------------------------------- forward and backward
    def begin(self, micro_step: int) -> None:
        """Begin with nothing gathered but what stays; from the first pass that it was there for on, each does the same.

        The first pass, in which modules are put down, gathers nothing ahead, and lets go of all: what stays is there once
        the next one has asked for it, or behind a step.

        Source:
            ``release_sub_module`` in deepspeed/runtime/zero/partitioned_param_coordinator.py (0.19.8).
        """
        del micro_step
        rules, step = self._rules, self._step
        self._ends = False
        if self._followed:
            self._again = self._script.again()
            return
        self._followed = self._resident
        ahead, distance = (rules.ahead, rules.distance) if self._passed else (0, 0)
        limits = Limits(rules.ranks, rules.width, ahead, rules.live, distance)
        whole, stays = (step.whole, ()) if self._resident else ((), step.whole if self._passed else ())
        visited = self._visited if self._passed else self._unseen()
        self._script, self._stays = _Script(self._stream, self._on[0]), stays
        self._written, self._modules = _Written(self._script), step.modules()
        self._gathered = GatheredParameters(visited, self._sizes, whole, step.frozen, limits, self._written, stays)

    def _unseen(self) -> Sequence[Visit]:
        """Return the modules of the first pass, in whose forward none is known to read what is another's.

        Source:
            ``ZeROOrderedDict.__getitem__`` in deepspeed/runtime/zero/parameter_offload.py (0.19.8): what is read then is
            gathered at once, by the stream that computes.
        """
        modules = self._step.modules()
        return [
            one._replace(parameters=()) if one.way == "forward" and modules.external(one.module) else one
            for one in self._visited
        ]

    def _read_head(self, kind: str, name: str) -> None:
        """Gather the head where the first forward reads it, or let go of it as the model ends."""
        stream, rules, head = self._stream, self._rules, self._modules.head
        if kind == "forward" and self._modules.is_head_read(name):
            size = rules.width * rules.ranks * ceil_div(self._sizes[head], rules.ranks)
            self._head = [stream.allocate(size)]
        elif kind == "left forward" and self._head:
            stream.free_all(self._head)
            self._head = []

    def visit(self, kind: str, name: str) -> None:
        """Gather what a module needs as it begins, or let go of it as it ends."""
        if self._ends:
            return
        self._stream.of("communication")
        if not self._passed:
            self._read_head(kind, name)
        if self._again is not None:
            next(self._again)
            return
        self._script.turn()
        followed(self._modules, self._gathered, name, kind)

    def enter_backward(self, place: int) -> None:
        """Gather the embedding where its output needs a gradient."""
        if place == 0 and self._leaf:
            self.visit("backward", self._leaf)
            self._ends = True  # nothing before it has a gradient

    def use_up(self, name: str, gradient: int) -> None:
        """Take the gradient of a parameter into the bucket, which is reduced first where it has no room."""
        elements = self._sizes[name]
        if self._elements + elements > self._rules.bucket and self._names:
            self._reduce()
        self._names.append(name)
        if self._elements + elements > self._rules.bucket:
            self._waiting.append(gradient)
        else:
            self._stream.free(gradient)
        self._elements += elements

    def _reduce(self) -> None:
        """Reduce the bucket: its gradients interleaved in a tensor, with the padding of each."""
        rules, stream, on = self._rules, self._stream, self._on[1]
        sizes = [self._sizes[name] for name in self._names]
        padded = [rules.ranks * ceil_div(size, rules.ranks) for size in sizes]
        copies = rules.copies or self._elements > rules.bucket
        stream.of("communication")
        if copies and sizes and sizes != padded[:1]:
            paddings = [rules.width * (after - size) for after, size in zip(padded, sizes, strict=True) if after > size]
            made = [stream.allocate(size, on) for size in (*paddings, rules.width * sum(padded))]
            stream.free_all(made)
        stream.free_all(self._waiting)
        self._names, self._elements, self._waiting = [], 0, []

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Reduce what is left as backward ends."""
        del gradients
        if place:
            return
        self._reduce()
        if self._again is not None:
            next(self._again)
            return
        self._script.turn()
        self._gathered.end()
        self._whole += self._written.left(self._stays)
        self._resident, self._passed = self._resident or self._passed, True

    # ---------------------------------------------------------------- step
    def update(self, *, first: bool) -> None:
        """Form the norm, and step group by group; what stays gathered is let go of before, and gathered anew."""
        rules, stream = self._rules, self._stream
        stream.free_all(self._whole)
        stream.of("temporaries")
        for _ in range(2 * self._overflows):  # of infinities, then of what is no number
            stream.free(stream.allocate(rules.gradient_bytes // rules.width, self._on[1]))
        for own in (size for group in self._groups for size in group):
            stream.passing(NORM_BYTES * min(own, NORM_ELEMENTS))
        for place, group in enumerate(self._groups):
            joined = stream.allocate_all([rules.width * sum(group)] * (len(group) > 1))
            cast = stream.allocate_all([FP32_BYTES * sum(group)] * (rules.width < FP32_BYTES))
            stream.free_all(joined if cast else [])
            self._updates.update_alone(str(place), first=first)
            stream.free_all(cast or joined)
        self._gather_whole()
