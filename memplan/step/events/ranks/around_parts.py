"""What lies around the parts of a rank's step, by whose code several GPUs train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memplan.model.parameter_tensors import inventory_of
from memplan.step.collectives.gathered_units import unit
from memplan.step.events.event_stream import EventStream
from memplan.step.events.model_tensors import ModelTensors
from memplan.step.events.ranks.adapted_events import AdaptedUnits
from memplan.step.events.ranks.chunked_units import ChunkedUnits
from memplan.step.events.ranks.flat_events import FlatEngine
from memplan.step.events.ranks.gathered_events import Units
from memplan.step.events.ranks.partitioned_events import PartitionedEngine
from memplan.step.events.ranks.replicated_events import Replicas
from memplan.step.events.whole_model import WholeModel
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.states.parallel_shards import is_flat, is_partitioned, is_replicated
from memplan.step.step_inputs import StepInputs


def around_parts(
    inputs: StepInputs, taped: ModelOnTape, values: Sequence[int], sharded: ShardedStep | None
) -> Callable[[EventStream, ModelTensors], WholeModel]:
    """Return what makes what writes the events around the parts of a step, given what they are written to and the model's tensors.

    Args:
        taped: The model on tape.
        values: Values of the quantities that sizes are made of.
        sharded: The units that the rank gathers its model in; None where it is whole.
    """
    parallel = inputs.setup.config.parallel
    if sharded is not None and sharded.adapters:
        return lambda stream, _: AdaptedUnits(stream, sharded, parallel, values)
    if sharded is not None and sharded.chunked:
        norm = unit([t for t in inventory_of(inputs.spec) if t.role == "norm" and "{}" not in t.name], inputs.setup)
        return lambda stream, _: ChunkedUnits(stream, sharded, parallel, norm)
    if sharded is not None:
        return lambda stream, _: Units(stream, sharded, parallel)
    if is_flat(parallel):
        return lambda stream, tensors: FlatEngine(stream, inputs, tensors)
    if is_partitioned(parallel):
        return lambda stream, tensors: PartitionedEngine(stream, inputs, tensors, taped)
    if is_replicated(parallel):
        return lambda stream, tensors: Replicas(stream, inputs, tensors, taped.head.logits, values)
    return lambda _, __: WholeModel()
