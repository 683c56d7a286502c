"""A training step of one rank of a pipeline, under torch's ``fully_shard``: the same tapes, stage by stage, micro-batch by micro-batch.

Weights are gathered in the first forward of a stage, or before it. Each kind of thing that a rank does is looked at once
for each different state that it finds.

Source:
    ``backward_maybe_with_nosync`` and ``perform_reduce_grad`` in torch/distributed/pipelining/stage.py (v2.13.0).
"""

from collections.abc import Iterator
from dataclasses import replace

from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.parameter_tensors import inventory_of
from memplan.step.blocks.block_settings import Regime
from memplan.step.collectives.gathered_units import Unit
from memplan.step.head_instants import after_backward, head_backward
from memplan.step.instants import StepForms, saved_by_layers
from memplan.step.pipelines.pipeline_schedules import layers_of_stages
from memplan.step.pipelines.rank_memory import RankMemory
from memplan.step.pipelines.rank_timeline import StageStates, moments_of
from memplan.step.ranks.chunked_head import chunk_losses
from memplan.step.ranks.forwards_alone import with_gathered
from memplan.step.ranks.sharded_forward import rows_of_head
from memplan.step.ranks.sharded_units import ShardedStep, sharded_step
from memplan.step.regimes import setup_in
from memplan.step.states.model_states import ModelStates
from memplan.step.states.optimizer_scratch import Temporaries, step_temporaries
from memplan.step.step_inputs import buffers
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode
from memplan.step.units.collated_rows import LABEL_BYTES
from memplan.training.resolved import TrainingSetup

ATTENTION = ("attention", "linear self_attn", "norm input_layernorm")
"""How operations begin that a layer runs before the first of its sums."""
HEADS = ("norm self_attn", "split", "slice", "mul sin")
"""How others begin, between products of attention; where layers are computed again they run before their backward too."""


def compile_pipeline_step(
    model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime, layers: int
) -> StepForms:
    """Return the closed forms of one rank's training step.

    Args:
        model: As the rank has it (:func:`memplan.step.pipelines.pipeline_schedules.staged`).
        setup: The training setup, whose ``parallel.stage`` is the rank.

    Raises:
        CannotAnswerError: torch stops at what the last stage would reduce.
    """
    whole = replace(model, inventory=inventory_of(model.spec))
    setup = setup_in(setup, padded=regime.padded)
    step = sharded_step(whole, setup, states, regime)
    step = replace(step, inputs=replace(step.inputs, optimizer=_largest_update(setup, states, step, layers)))
    rank = RankMemory(step, setup, layers_of_stages(layers, setup.config.parallel))
    _refuse_mixed_gradients(rank)
    retained = rank.reduced_gradient_sizes()
    behind = rank.received + constant_form(Part.GRADIENTS, sum(retained) - states.gradient_bytes)
    candidates = [*_all_instants(rank), *(one.around(behind) for one in after_backward(step.inputs, step.taped, 0))]
    return StepForms(
        tuple(candidates),
        buffers(step.inputs),
        saved_by_layers(step.taped),
        step.inputs.optimizer.formula,
        rank.stream_bytes,
        retained,
    )


def _refuse_mixed_gradients(rank: RankMemory) -> None:
    """Raise where a head's gradients would be reduced as they are formed beside the norm's, which an earlier backward has summed.

    Source:
        ``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (v2.13.0): "expects uniform gradient
        dtype"; a head whose loss is over several chunks is summed too.
    """
    profile, parallel = rank.setup.profile, rank.setup.config.parallel
    if rank.step.chunked and rank.converts and profile.loss_chunks == 1 and parallel.order != "gpipe":
        raise CannotAnswerError(
            f"kernels.loss_chunks: 1 under {parallel.order} has fully_shard reduce gradients of norm and head in two dtypes, at which torch stops; "
            "use 2 or more"
        )


def _largest_update(setup: TrainingSetup, states: ModelStates, step: ShardedStep, layers: int) -> Temporaries:
    """Return the scratch of the largest of a rank's updates: each stage has an optimizer of its own (``OptimizersContainer``)."""
    rank, result = RankMemory(step, setup, layers_of_stages(layers, setup.config.parallel)), []
    for stage in rank.own:
        ends = {"embedding": stage == 0, "head": stage == rank.last, "norm": stage == rank.last}
        own = [
            entry.of(replace(entry.tensor, count=rank.sizes[stage])) if "{}" in entry.tensor.name else entry
            for entry in states.tensors
            if "{}" in entry.tensor.name or ends.get(entry.tensor.role, True)
        ]
        result.append(step_temporaries(setup, own))
    return max(result, key=lambda one: one.bytes)


def _all_instants(rank: RankMemory) -> Iterator[Instant]:
    """Yield the candidates for the peak from the first forward to the last reduction."""
    parallel = rank.setup.config.parallel
    kinds = {"forward": _forward, "backward": _backward, "reduce": _reduce}
    for action, resident in moments_of(parallel.stage or 0, parallel):
        there = rank.gathered_bytes(resident)
        if action.kind in ("forward", "backward") and resident.buffered[rank.own.index(action.stage)]:
            yield from _copied_out(rank, action.kind, action.stage, resident)
        for one in kinds[action.kind](rank, action.stage, resident) if action.kind in kinds else ():
            yield Instant(one.name, one.operation, one.form, one.communication or there, one.reduces)


def _copied_out(rank: RankMemory, name: str, stage: int, resident: StageStates) -> Iterator[Instant]:
    """Yield the moments at which a stage that was gathered as a whole is first run: each unit is copied out, and lets go of its buffer.

    Source:
        ``_perform_action`` in torch/distributed/pipelining/schedules.py, which waits for a stage's gathers when it runs it (v2.13.0).
    """
    units = rank.units_of(stage)
    around = rank.around(resident) - constant_form(Part.TEMPORARIES, sum(unit.gathered_bytes for unit in units))
    gathered, waiting = 0, sum(unit.buffer_bytes for unit in units)
    for unit in units:
        waiting -= unit.buffer_bytes
        yield with_gathered(name, "copy of a stage", around, gathered + waiting + unit.copied_bytes)
        gathered += unit.gathered_bytes


def _forward(rank: RankMemory, stage: int, resident: StageStates) -> Iterator[Instant]:
    """Yield the forward of a micro-batch: of the first and the last layer, whose units are gathered one after another the first time.

    The buffer that a unit was gathered in stays until the next one has been copied out of its own.
    """
    step, size, gathers, done, last = rank.step, rank.sizes[stage], not rank.has_gathered(stage, resident), 0, 0
    around, layer, unit = rank.around(resident) + rank.entered(stage), rank.layer, rank.step.units[0]

    def gathered(size: int) -> Form:
        return constant_form(Part.TEMPORARIES, size if gathers else 0)

    if stage == 0:
        copied, alone = gathered(step.first.copied_bytes), around - rank.entered(stage)
        yield Instant("forward", "copy of the embedding", alone + copied)
        for moment in step.played.embedding.forward:
            yield moment.around(alone + copied, "forward")
        done, last = step.first.gathered_bytes, step.first.buffer_bytes
    for position in dict.fromkeys((0, size - 1)):
        there = around + layer.saved * position + gathered(done + unit.gathered_bytes * position + unit.copied_bytes)
        given, waiting = (rank.stream, unit.buffer_bytes) if position else (ZERO, last)
        yield Instant("forward", "copy of a layer", there + given + gathered(waiting))
        for moment in layer.forward:
            yield moment.around(there, "forward")
    around += layer.saved * size + gathered(done + unit.gathered_bytes * size)
    if stage != rank.last:
        return
    copied = gathered(step.tail.copied_bytes)
    if step.chunked:
        if not resident.tail.gathered:
            yield Instant(
                "forward", "copy of norm and head", around + rank.stream + copied + gathered(unit.buffer_bytes)
            )
        yield from _chunks(rank, resident, around)
        return
    around += copied
    yield Instant("forward", "copy of norm and head", around + rank.stream + gathered(unit.buffer_bytes))
    yield Instant("forward", "head", around + rows_of_head(step) + rank.logits)
    for moment in step.played.head.forward:  # the last output's name is that of this one by then
        yield moment.around(around - rank.logits * resident.outputs, "forward")


def _chunks(rank: RankMemory, resident: StageStates, around: Form) -> Iterator[Instant]:
    """Yield the last stage's norm and its loss over chunks, which run backward too; norm and head are gathered first.

    Args:
        around: The same, with what layers have saved.
    """
    step, tail, played = rank.step, resident.tail, rank.step.played
    copied = constant_form(Part.TEMPORARIES, 0 if tail.gathered else step.tail.copied_bytes)
    for moment in played.head.forward:
        yield moment.around(around + copied, "forward")
    there, _ = rank.tail_bytes(tail)
    around -= rank.logits * resident.outputs + constant_form(Part.TEMPORARIES, there)
    if not step.inputs.regime.one_sequence and rank.setup.profile.loss_chunks > 1:
        around -= single_form(Part.ACTIVATIONS, Quantity.TOKENS, LABEL_BYTES)  # positions are not handed to the loss
    pending, keeps = there - step.tail.gathered_bytes * tail.gathered, not tail.head or (tail.summed and not tail.both)
    reduced = step.tail if tail.summed else step.head
    for moment in chunk_losses(step, around, played, reduced, pending=pending, keeps=keeps):
        yield replace(moment, name="forward")


def _backward(rank: RankMemory, stage: int, resident: StageStates) -> Iterator[Instant]:
    """Yield the backward of a micro-batch, whose gradients are summed: those of the stage's first are the sums."""
    step, size, first = rank.step, rank.sizes[stage], not resident.summed[rank.own.index(stage)]
    played = step.played_as("first" if first or rank.converts else "again")
    layer, unit, summed = played.layers[0], step.units[0], 0
    around = rank.around(resident) - rank.pair(stage)
    below = around + rank.entered(stage)
    if stage == rank.last:
        yield from _head_backward(rank, resident, below + layer.saved * size, first=first)
        if step.chunked:
            summed = 0 if resident.tail.summed else rank.norm.reduced_bytes
            around += constant_form(Part.TEMPORARIES, 0 if resident.tail.gathered else step.tail.gathered_bytes)
        else:
            summed = rank.whole(step.tail) * first
    output = rank.logits if stage == rank.last else rank.stream
    around, below = around + output, around + output + rank.entered(stage)
    behind_sum = ATTENTION if rank.setup.checkpointing != "none" else (*ATTENTION, *HEADS)
    for position in dict.fromkeys((size, max(1, size - 1), min(2, size), 1)):
        there = summed + rank.whole(unit) * (size - position) * first
        own = below + layer.saved * (position - 1)
        for moment in layer.backward:
            apart = position < size or stage == rank.last or moment.operation.startswith(behind_sum)
            given = ZERO if apart else rank.stream
            yield moment.around(own - given + constant_form(Part.GRADIENTS, there), "backward")
        yield from _summing(rank, unit, own + rank.stream, there, first=first)
    if stage == 0:
        there = summed + rank.whole(unit) * size * first
        for moment in played.embedding.backward:
            yield moment.around(around + constant_form(Part.GRADIENTS, there), "backward")
        yield from _summing(rank, step.first, around, there, first=first)


def _head_backward(rank: RankMemory, resident: StageStates, saved: Form, *, first: bool) -> Iterator[Instant]:
    """Yield the backward of loss and head, or of the norm alone whose loss has run backward before.

    Args:
        saved: The same, with what layers have saved.
        first: Whether gradients that are formed are the sums.
    """
    step = rank.step
    played = step.played_as("first" if first or rank.converts else "again")
    around = saved + rank.left_by_loss
    if step.chunked:
        copied = 0 if resident.tail.gathered else step.tail.copied_bytes
        yield with_gathered("backward", "copy of norm and head", around + played.head.saved, copied)
        for moment in played.head.backward:
            yield moment.around(around, "backward")
        return
    mode: Mode = "first" if first or rank.converts else "again"
    for moment in head_backward(step.inputs, step.taped.head, played.head, around, mode):
        yield replace(moment, name="backward")
    yield from _summing(rank, step.tail, saved + rank.logits + rank.stream, 0, first=first)


def _summing(rank: RankMemory, unit: Unit, around: Form, summed: int, *, first: bool) -> Iterator[Instant]:
    """Yield the moment at which a unit's gradients are cast to the dtype that they are summed in, one by one, where that is another."""
    sizes = rank.formed(unit)
    most = total = sum(sizes)
    if rank.converts and first:
        done, left = 0, total
        for size in sizes:
            most = max(most, done + rank.wide * size + left)
            done, left = done + rank.wide * size, left - size
    if rank.converts or first:
        yield Instant("backward", "sum of gradients", around + constant_form(Part.GRADIENTS, summed + most))


def _reduce(rank: RankMemory, stage: int, resident: StageStates) -> Iterator[Instant]:
    """Yield the reduction of a stage's gradients, group by group, each of whose weights is let go of before.

    The buffers of earlier reductions stay until a unit comes to its last group.

    Source:
        ``perform_reduce_grad`` in torch/distributed/pipelining/stage.py, ``post_backward`` in
        torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (v2.13.0).
    """
    around, retained, buffers = rank.around(resident), 0, 0
    yield Instant("gradient reduction", "start", around)
    rows = _reduced_groups(rank, stage, resident)
    if rank.step.chunked and stage == rank.last:
        buffers = rank.tail_bytes(resident.tail)[0] - rows[-1][2]  # of the head's, which the loss has had reduced
        around -= constant_form(Part.TEMPORARIES, buffers)
    waiting, weights = sum(whole for _, whole, *_ in rows), sum(size for _, _, size, _ in rows)
    around -= constant_form(Part.GRADIENTS, waiting) + constant_form(Part.TEMPORARIES, weights)
    for own, whole, size, last in rows:
        weights -= size
        buffers = own.reduced_bytes + (0 if last else buffers)
        form, there = around + constant_form(Part.GRADIENTS, retained + waiting), weights + buffers
        copying = form + constant_form(Part.GRADIENTS, own.reordered_bytes * rank.wide)
        yield with_gathered("gradient reduction", "copy into the buffer of the reduction", copying, there)
        formed = own.kept_bytes + own.narrow_bytes + own.last_bytes * rank.wide - whole
        yield with_gathered("gradient reduction", "reduction", form + constant_form(Part.GRADIENTS, formed), there)
        waiting -= whole
        retained += own.kept_bytes


def _reduced_groups(rank: RankMemory, stage: int, resident: StageStates) -> list[tuple[Unit, int, int, bool]]:
    """Return the groups that a stage's gradients are reduced in, in order: each with its whole gradients and weights, and whether it is its unit's last."""
    there, rows = rank.has_gathered(stage, resident), []
    for unit in rank.units_of(stage):
        for group in unit.groups:
            rows.append((group, group.formed_bytes * rank.wide, group.gathered_bytes * there, group is unit.groups[-1]))
        if not unit.groups:
            rows.append((unit, rank.whole(unit), unit.gathered_bytes * there, True))
    if rank.step.chunked and stage == rank.last:
        weights = rank.step.tail.gathered_bytes * resident.tail.gathered
        rows[-1] = (rank.norm, rank.norm.reduced_bytes, weights, True)
    return rows
