"""What one rank of a pipeline has under torch's ``fully_shard``: units of weights, gradients, micro-batches in flight, buffers.

For every micro-batch there are, from step to step, a buffer for what a stage receives and one for the gradient that it
receives. Weights stay gathered, and whole gradients are summed, until the stage's last backward.

Source:
    ``forward_one_chunk`` and ``_setup_forward_recv_info`` in torch/distributed/pipelining/stage.py,
    ``to_accumulated_grad_if_needed`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py (v2.13.0).
"""

from dataclasses import dataclass

from memplan.model.parameter_tensors import inventory_of
from memplan.step.collectives.gathered_units import Unit, unit
from memplan.step.pipelines.pipeline_schedules import ONE_STAGE, Action, stages_of
from memplan.step.pipelines.rank_timeline import StageStates, Tail, moments_of
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.tapes.linear_forms import ZERO, Form, Part, constant_form, single_form
from memplan.step.tapes.moments import Played
from memplan.training.resolved import TrainingSetup

VALID_TOKENS_BYTES = 8
"""The number of tokens that have labels (``Trainer.train_step`` in torchtitan/trainer.py, 0.3.0)."""


@dataclass(frozen=True)
class RankMemory:
    """One rank of a pipeline."""

    step: ShardedStep  # Tapes of gathered weights, and the units that weights are gathered in
    setup: TrainingSetup
    sizes: tuple[int, ...]  # Layers of every stage

    @property
    def own(self) -> tuple[int, ...]:
        """The rank's stages."""
        return stages_of(self.setup.config.parallel.stage or 0, self.setup.config.parallel)

    @property
    def layer(self) -> Played:
        """A layer whose gradients of weights are new tensors."""
        return self.step.played.layers[0]

    @property
    def stream(self) -> Form:
        """What passes between two stages."""
        value = self.step.taped.embedding.output
        return single_form(Part.ACTIVATIONS, value.quantity, value.coefficient)

    @property
    def logits(self) -> Form:
        """What the last stage gives: logits, or what chunks of the loss form them from."""
        value = self.step.taped.head.logits or self.step.taped.head.section.output
        return single_form(Part.LOGITS, value.quantity, value.coefficient)

    @property
    def received(self) -> Form:
        """Buffers for what the rank's stages receive, one for each micro-batch."""
        ends = sum((stage > 0) + (stage < self.last) for stage in self.own)
        return self.stream * (ends * self.setup.config.parallel.together) + constant_form(
            Part.LOGITS, VALID_TOKENS_BYTES
        )

    @property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of each of the rank's stages, in the order of its modules."""
        return tuple(self.units_of(stage) for stage in self.own)

    def units_of(self, stage: int) -> tuple[Unit, ...]:
        """Return the units of one stage."""
        first = (self.step.first,) if stage == 0 else ()
        last = (self.step.tail,) if stage == self.last else ()
        return *first, *(self.step.units[0] for _ in range(self.sizes[stage])), *last

    @property
    def stream_bytes(self) -> int:
        """Buffers of collectives that stay with a stream of their own: at most those of a stage, or of two of its units."""
        if self.setup.config.parallel.order in ONE_STAGE:
            return max(
                a.buffer_bytes + b.buffer_bytes
                for units in self.units
                for a, b in zip(units, (*units[1:], units[0]), strict=True)
            )
        return max(sum(unit.buffer_bytes for unit in units) for units in self.units)

    def whole(self, unit: Unit) -> int:
        """Return a unit's whole gradients as they are summed, without padding."""
        return sum(self.formed(unit)) * self.wide

    def formed(self, unit: Unit) -> tuple[int, ...]:
        """Return the gradients of a unit's parameters as backward forms them, in the order of its modules."""
        step, tensors = self.step, self.step.inputs.states.tensors
        if unit is step.units[0]:
            own = sorted((e for e in tensors if "{}" in e.tensor.name), key=lambda e: len(e.tensor.shape) == 1)
        else:
            embeds = unit is step.first
            own = [e for e in tensors if "{}" not in e.tensor.name and (e.tensor.role == "embedding") == embeds]
            own.sort(key=lambda e: len(e.tensor.shape) > 1)
        return tuple(entry.formed_bytes for entry in own)

    @property
    def wide(self) -> int:
        """How many times as wide gradients are summed as they are formed."""
        return self.step.reduced_width // self.setup.compute_bytes

    @property
    def last(self) -> int:
        """The last stage of the pipeline."""
        return len(self.sizes) - 1

    def has_gathered(self, stage: int, resident: StageStates) -> bool:
        """Tell whether a stage's weights are gathered."""
        return resident.gathered[self.own.index(stage)]

    def entered(self, stage: int) -> Form:
        """Return what the first layer finds saved: by the embedding, or nothing, as its input is a buffer that is counted already."""
        return self.step.played.embedding.saved if stage == 0 else self.stream * -1

    @property
    def converts(self) -> bool:
        """Whether gradients are summed in another dtype than they are formed in."""
        return self.step.reduced_width != self.setup.compute_bytes

    # ---------------------------------------------------------------- what there is
    def pair(self, stage: int) -> Form:
        """Return what a stage holds of a micro-batch that has run forward: what is saved, less the buffer that it came in; its output."""
        saved = self.layer.saved * self.sizes[stage] + self.entered(stage)
        if stage < self.last:
            return saved + self.stream
        return saved + self.step.played.head.saved + self.left_by_loss

    @property
    def left_by_loss(self) -> Form:
        """What is there of the last stage's output and its loss besides what is saved: the gradient of its output, if that is known."""
        known = self.logits if self.step.chunked else ZERO
        return self.logits + known + constant_form(Part.LOGITS, self.step.taped.settings.loss_bytes)

    @property
    def norm(self) -> Unit:
        """What the final norm alone is in the unit of norm and head."""
        return unit(
            [t for t in inventory_of(self.step.inputs.spec) if t.role == "norm" and "{}" not in t.name], self.setup
        )

    def tail_bytes(self, tail: Tail) -> tuple[int, int]:
        """Return the weights and buffers, and the gradients, that there are of norm and head whose loss is over chunks."""
        step, head = self.step, self.step.head
        assert head is not None
        pending = (0, head.reduced_bytes, step.tail.reduced_bytes)[tail.pending]
        retained = head.kept_bytes * tail.head + step.tail.kept_bytes * tail.both
        summed = self.norm.reduced_bytes * tail.summed
        return step.tail.gathered_bytes * tail.gathered + pending, retained + summed

    def gathered_bytes(self, resident: StageStates) -> int:
        """Return the weights that are gathered before an action, and what is there of buffers."""
        total = 0
        for index, units in enumerate(self.units):
            if self.step.chunked and self.own[index] == self.last:
                units, total = units[:-1], total + self.tail_bytes(resident.tail)[0]
            total += sum(unit.gathered_bytes for unit in units) * resident.gathered[index]
        return total

    def around(self, resident: StageStates) -> Form:
        """Return what is there before an action."""
        form, gradients = self.received, 0
        for index, stage in enumerate(self.own):
            form += self.pair(stage) * resident.pairs[index]
            units = self.units[index]
            if self.step.chunked and stage == self.last:
                units, gradients = units[:-1], gradients + self.tail_bytes(resident.tail)[1]
            if resident.reduced[index]:
                gradients += sum(unit.kept_bytes for unit in units)
            elif resident.summed[index]:
                gradients += sum(self.whole(unit) for unit in units)
        last = self.own[-1] == self.last
        form += (self.logits if last else self.stream) * resident.outputs + self.stream * resident.gradients
        form += constant_form(Part.TEMPORARIES, self.gathered_bytes(resident))
        return form + constant_form(Part.GRADIENTS, gradients)

    def reduced_gradient_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the tensors that hold the rank's gradients from their reduction on.

        Where the norm's and the head's have been reduced together after the head's alone, the norm's are a view of a tensor
        of both.
        """
        sizes = [one.kept_bytes for units in self.units for one in units]
        parallel = self.setup.config.parallel
        if not self.step.chunked or self.own[-1] != self.last:
            return tuple(sizes)
        last = max(self.own)
        *_, tail = (
            resident.tail
            for action, resident in moments_of(parallel.stage or 0, parallel)
            if action == Action("reduce", last)
        )
        assert self.step.head is not None
        own = [
            one.kept_bytes
            for stage, units in zip(self.own, self.units, strict=True)
            for one in units[: -1 if stage == last else None]
        ]
        return (*own, self.step.head.kept_bytes, (self.step.tail if tail.both else self.norm).kept_bytes)
