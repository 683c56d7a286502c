"""A rank's step: what plays its passes, and what is written around its parts, by whose code several GPUs train.

The code of several GPUs is imported where it is taken: forty modules that an answer for one does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.model.parameter_tensors import inventory_of
from memplan.step.events.around_step import Around
from memplan.step.events.model_passes import ModelPasses, WrittenModel
from memplan.step.events.model_tensors import ModelTensors
from memplan.step.events.step_events import StepPlayer
from memplan.step.events.update_events import Updates
from memplan.step.states.parallel_shards import is_flat, is_partitioned, is_replicated
from memplan.step.step_inputs import StepInputs

if TYPE_CHECKING:
    from memplan.step.ranks.sharded_units import ShardedStep


def step_player(
    model: WrittenModel, inputs: StepInputs, sharded: ShardedStep | None, sizes_of_stages: Sequence[int]
) -> StepPlayer:
    """Return what plays a rank's training run.

    Args:
        inputs: What the rank stores.
        sharded: The units that the rank gathers its model in; None where it is whole.
        sizes_of_stages: Layers of every stage of a pipeline; none where there is none.
    """
    tensors = ModelTensors(inputs)
    updates = Updates(model.stream, inputs, tensors)
    if sharded is not None and sizes_of_stages:
        from memplan.step.events.ranks.pipeline_events import StagePasses
        from memplan.step.events.ranks.staged_units import StagedUnits
        from memplan.step.events.ranks.unit_events import UnitEvents
        from memplan.step.pipelines.rank_memory import RankMemory

        rank = RankMemory(sharded, inputs.setup, tuple(sizes_of_stages))
        units = StagedUnits(
            UnitEvents(model.stream, sharded, inputs.setup.config.parallel), rank, [name for name, _ in tensors.trained]
        )
        updates.divide(units.stage_of)  # each stage has an optimizer of its own (``OptimizersContainer``)
        return StepPlayer(model.stream, inputs, tensors, updates, StagePasses(model, rank, units), units.around())
    around = _around(model, inputs, tensors, sharded)
    passes = ModelPasses(model, around, around.use_up or updates.use_up)
    return StepPlayer(model.stream, inputs, tensors, updates, passes, around)


def _around(model: WrittenModel, inputs: StepInputs, tensors: ModelTensors, sharded: ShardedStep | None) -> Around:
    """Return what is written around the parts of a model that is no pipeline's."""
    stream, parallel = model.stream, inputs.setup.config.parallel
    if sharded is not None:
        return _around_units(model, inputs, sharded)
    if is_flat(parallel):
        from memplan.step.events.ranks.flat_events import FlatEngine

        return FlatEngine(stream, inputs, tensors).around()
    if is_partitioned(parallel):
        from memplan.step.events.ranks.partitioned_events import PartitionedEngine

        return PartitionedEngine(stream, inputs, tensors, model.taped).around()
    if is_replicated(parallel):
        from memplan.step.events.ranks.replicated_events import Replicas

        return Replicas(stream, inputs, tensors, model.taped.head.logits, model.values).around()
    loading = inputs.setup.loads_codes
    whole = inputs.spec.tower is None and all(run.layer.mixture is None for run in inputs.spec.runs)
    if loading is not None and whole:  # experts that are stacked as they load, and towers, are not followed
        return Around(make_weights=lambda stream, _: tensors.load(stream, loading))
    return Around()


def _around_units(model: WrittenModel, inputs: StepInputs, sharded: ShardedStep) -> Around:
    """Return what is written around the parts of a model that is gathered unit by unit."""
    from memplan.step.collectives.gathered_units import unit
    from memplan.step.events.ranks.adapted_events import AdaptedUnits
    from memplan.step.events.ranks.chunked_gradients import ChunkedHead
    from memplan.step.events.ranks.gathered_events import GatheredParts
    from memplan.step.events.ranks.unit_events import UnitEvents

    units = UnitEvents(model.stream, sharded, inputs.setup.config.parallel)
    if sharded.adapters:
        return AdaptedUnits(units, model.values).around()
    norm = [t for t in inventory_of(inputs.spec) if t.role == "norm" and "{}" not in t.name]
    head = ChunkedHead(units, unit(norm, inputs.setup)) if sharded.chunked else None
    return GatheredParts(units, head).around()
