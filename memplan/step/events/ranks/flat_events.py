"""The events of DeepSpeed's ZeRO 1 and 2 on its fullest rank: flat weights, buckets, and its own piece of the step.

What is there only while the engine is made, when it lays weights into flat tensors, is left out: it gives that memory back to the
driver (``empty_cache`` before each group), and lays them on the CPU where the device has no room.

Source:
    deepspeed/runtime/zero/stage_1_and_2.py (0.19.8): ``DeepSpeedZeroOptimizer.__init__``, ``initialize_optimizer_states``,
    ``setup_buckets``, ``reduce_independent_p_g_buckets_and_remove_grads``, ``reduce_ipg_grads``, ``allreduce_and_scatter``,
    ``copy_grads_in_partition``, ``independent_gradient_partition_epilogue``, ``scaled_global_norm`` and ``step``.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from memplan.step.engines.engine_step import NORM_BYTES
from memplan.step.engines.reduced_gradients import parts_of_bucket
from memplan.step.events.around_step import Around, first_and_last, handed_over
from memplan.step.events.event_stream import EventStream
from memplan.step.events.model_tensors import ModelTensors
from memplan.step.events.update_events import Updates
from memplan.step.states.flat_partitions import (
    FlatGroup,
    flat_groups,
    fullest_rank,
    in_fp32,
    partition_states,
    rank_shares,
    stepped_tensors,
)
from memplan.step.states.parallel_shards import reduced_elements
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.taped_operations import Mode
from memplan.step.units.host_memory import FP32_BYTES

REDUCES = 3
"""The stream that gradients are reduced on beside backward (``reduction_stream``)."""


class FlatEngine:
    """A rank's step.

    Args:
        stream: Where events are written to.
        tensors: The model's tensors.
    """

    def __init__(self, stream: EventStream, inputs: StepInputs, tensors: ModelTensors) -> None:
        setup = inputs.setup
        config, zero = setup.config, setup.config.parallel.deepspeed
        self._stream, self._tensors, self._width = stream, tensors, setup.compute_bytes
        self._groups = flat_groups(setup, stepped_tensors(setup, inputs.states))
        shares = rank_shares(setup, self._groups)
        self._rank = fullest_rank(setup, shares)
        self._share = shares[self._rank]
        self._pieces = {name: group.pieces(place) for group in self._groups for place, name in enumerate(group.names)}
        pieces = [(str(place), partition_states(setup, group.partition)) for place, group in enumerate(self._groups)]
        self._updates = Updates(stream, replace(inputs, setup=in_fp32(setup)), tensors, pieces)
        self._last, self._stage = config.gradient_accumulation_steps - 1, config.parallel.zero_stage
        self._size, self._copies = reduced_elements(config.parallel, inputs.spec.hidden_size), zero.reduce_scatter
        self._overlaps = bool(zero.overlap_comm)
        self._micro_step = 0
        self._buckets: list[int] = []
        self._names: list[str] = []  # of the gradients in the bucket
        self._elements = 0
        self._large: int | None = None  # A gradient that is larger than the bucket
        self._whole: dict[str, int] = {}  # Gradients that wait for the last micro-step
        self._lingering: list[int] = []  # Such larger ones of other ranks, which stay to the end under ZeRO 1
        self._own: int | None = None  # What the rank has of this micro-step's gradients
        self._summed: list[int] = []  # The same of those before
        self._pads: list[list[int]] = []  # Of each group

    def around(self) -> Around:
        """Return what is written around the parts."""
        return Around(
            make_weights=self.make_weights,
            wrap=self._updates.make_early_states,
            mode=self.mode,
            micro_steps=first_and_last,
            leave_backward=self.leave_backward,
            use_up=self.use_up,
            update=self.update,
        )

    def make_weights(self, stream: EventStream, sizes: Sequence[int]) -> None:
        """Allocate what is not trained, then flat weights and the rank's piece of each in fp32."""
        del sizes
        stream.allocate_all(self._tensors.weight_sizes(without=self._pieces.keys()))
        for group in self._groups:
            stream.of("weights")
            stream.allocate(self._width * group.padded)
            stream.of("master_weights")
            stream.allocate(FP32_BYTES * group.partition)
        stream.free_all(stream.allocate_all([FP32_BYTES * group.partition for group in self._groups]))

    def mode(self, mode: Mode, micro_step: int) -> Mode:
        """Have every gradient handed over as it is formed."""
        self._micro_step = micro_step
        return handed_over(mode, micro_step)

    # ---------------------------------------------------------------- backward
    def use_up(self, name: str, gradient: int) -> None:
        """Take in the gradient of a parameter."""
        stream = self._stream
        stream.of("communication")
        if not self._buckets:
            self._buckets = stream.allocate_all([self._size * self._width] * (1 + self._overlaps))
        if name in self._whole:  # to which it is added
            stream.free(gradient)
            gradient = self._whole[name]
        if self._leaves:
            self._whole.pop(name, None)
            self._take(name, gradient)
        else:
            self._whole[name] = gradient

    @property
    def _leaves(self) -> bool:
        """Whether gradients leave as they are formed: not before the last micro-step under ZeRO 1, nor in it unless beside backward."""
        return self._stage == 2 or (self._overlaps and self._micro_step == self._last)

    def _take(self, name: str, gradient: int) -> None:
        elements = sum(size for _, size in self._pieces[name])
        if self._elements + elements > self._size and self._names:
            self._reduce()
        self._names.append(name)
        self._elements += elements
        if elements > self._size:
            self._large = gradient
        else:
            self._stream.free(gradient)

    def _reduce(self) -> None:
        """Reduce what is in the bucket; copies of it are made in the memory of the stream that reduces."""
        stream, on = self._stream, REDUCES * self._overlaps
        stream.of("communication")
        for part in parts_of_bucket([self._pieces[name] for name in self._names], self._size) if self._copies else ():
            stream.free(stream.allocate(self._width * part, on))
        is_own = not self._share.names.isdisjoint(self._names)
        if is_own and self._own is None:
            stream.of("gradients")
            self._own = stream.allocate(self._share.gradient_bytes, on)
        if self._large is not None and self._stage == 1 and not is_own:
            self._lingering.append(self._large)
        elif self._large is not None:
            stream.free(self._large)
        self._names, self._elements, self._large = [], 0, None

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Reduce what is left as backward ends, and let go of the buckets."""
        del gradients
        last = self._micro_step == self._last
        if place or not (last or self._stage == 2):
            return
        stream = self._stream
        for name in [name for group in self._groups for name in group.names if name in self._whole]:
            self._take(name, self._whole.pop(name))
        self._reduce()
        if self._share.zeros_bytes:
            self._summed.append(stream.allocate(self._share.zeros_bytes))
        if last:
            stream.of("gradients")
            pads = [self._width * (group.partition - sum(self._sizes(group))) for group in self._groups]
            self._pads = [stream.allocate_all([pad] if pad else []) for pad in pads]
        stream.free_all([*self._buckets, *self._lingering])
        self._buckets, self._lingering = [], []
        if self._own is not None and self._micro_step and self._stage == 2:
            stream.free(self._own)  # added to that of micro-steps before
        elif self._own is not None:
            self._summed.append(self._own)
        self._own = None

    def _sizes(self, group: FlatGroup) -> list[int]:
        """Return the elements of the rank's piece of each parameter of a group."""
        return [group.piece(place, self._rank) for place in group.places(self._rank)]

    # ---------------------------------------------------------------- step
    def update(self, *, first: bool) -> None:
        """Form the norm, and step group by group: gradients joined and cast to fp32, then the update."""
        stream, sizes = self._stream, [self._sizes(group) for group in self._groups]
        stream.of("temporaries")
        for elements in chain(*sizes):
            stream.passing(NORM_BYTES * elements)
        last = max((place for place, own in enumerate(sizes) if own), default=-1)
        for place, (group, own, pads) in enumerate(zip(self._groups, sizes, self._pads, strict=True)):
            joined = stream.allocate_all([self._width * group.partition] * (len(own) + len(pads) > 1))
            cast = stream.allocate_all([FP32_BYTES * group.partition] * (self._width < FP32_BYTES))
            stream.free_all(joined if cast else [])
            formed = cast or joined
            if formed:
                stream.free_all([*pads, *(self._summed if place == last else ())])
            self._updates.update_alone(str(place), first=first)
            stream.free_all(formed if formed else [*pads, *(self._summed if place == last else ())])
        self._summed = []
