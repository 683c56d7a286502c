"""The units that one rank gathers weights in, around the tapes of whole weights."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.model.model import Model
from memplan.step.blocks.block_settings import Regime
from memplan.step.model_on_tape import ModelOnTape, PlayedModel, inventory_first, model_on_tape
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.optimizer_scratch import sharded_clipping_bytes, step_temporaries
from memplan.step.states.parallel_shards import Unit, gathered_setup, unit
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Quantity
from memplan.training.resolved import TrainingSetup

TOKENS = Quantity.TOKENS


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """One rank's step: tapes of gathered weights, and the units that weights are gathered in.

    Attributes:
        inputs: What is compiled; its states are those of whole weights.
        taped: The model on tape.
        played: Its parts played; whole gradients are always new ones.
        first: The unit of the embedding, or of all that no layer has.
        tail: The unit of final norm and head; the same one, or one apart.
        units: For each run of layers, the unit that one of them is.
    """

    inputs: StepInputs
    taped: ModelOnTape
    played: PlayedModel
    first: Unit
    tail: Unit
    units: tuple[Unit, ...]

    @property
    def apart(self) -> bool:
        """Whether the ends are units of their own, so that nothing is gathered throughout."""
        return self.first is not self.tail

    @property
    def held_bytes(self) -> int:
        """Whole weights that are there while layers run: those of the root."""
        return 0 if self.apart else self.first.gathered_bytes

    @property
    def last(self) -> Unit:
        """The unit of the last layer."""
        return self.units[-1]

    @property
    def stream_bytes(self) -> int:
        """Buffers that weights are gathered into, which come from the memory of a stream of their own.

        Two are alive at a time: the root's and the first layer's, or those of two layers.
        """
        first, *layers = [self.first.gathered_bytes, *(unit.gathered_bytes for unit in self.units)]
        tail = layers[-1] + self.tail.gathered_bytes if self.apart else 0
        return max(first + layers[0], 2 * max(layers), tail)

    @property
    def unit_gradients(self) -> tuple[int, ...]:
        """The rank's gradients of each unit, which are one tensor: what a reduction puts out."""
        layers = zip(self.units, self.taped.runs, strict=True)
        ends = {id(unit): unit.kept_bytes for unit in (self.first, self.tail)}
        return (*ends.values(), *(unit.kept_bytes for unit, run in layers for _ in range(run.count)))

    def neighbour(self, index: int, position: int, step: int) -> Unit | None:
        """Return the unit of the layer that comes after (1) or before (-1) one of a run, or None."""
        if 1 <= position + step <= self.taped.runs[index].count:
            return self.units[index]
        other = index + step
        return self.units[other] if 0 <= other < len(self.units) else None


def sharded_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> ShardedStep:
    """Return the tapes of gathered weights, and their units."""
    whole = gathered_setup(setup)
    optimizer, clipping = step_temporaries(setup, states.tensors), sharded_clipping_bytes(states.tensors)
    whole_states = model_states(whole, model.inventory, ())
    inputs = StepInputs(model.spec, whole, whole_states, regime, states.gradient_bytes, optimizer, clipping)
    taped = model_on_tape(inputs)
    played = taped.played("first", inputs.recomputation)
    first, tail = _ends(model, setup)
    layers = [tensor for tensor in model.inventory if "{}" in tensor.name]
    units = (
        unit([tensor for tensor in layers if tensor.first == inventory_first(model.spec, run)], setup)
        for run in taped.runs
    )
    return ShardedStep(inputs, taped, played, first, tail, tuple(units))


def _ends(model: Model, setup: TrainingSetup) -> tuple[Unit, Unit]:
    """Return the units of the embedding, and of final norm and head; both are one where they are not apart.

    Source:
        torchtitan/distributed/fsdp.py, ``apply_fsdp_to_decoder`` (0.3.0); ``fsdp2_prepare_model`` in
        accelerate/utils/fsdp_utils.py (1.15.0).
    """
    ends = [tensor for tensor in model.inventory if "{}" not in tensor.name]
    if setup.stack.sharded_units == "root" or model.spec.tie_word_embeddings:
        root = unit(ends, setup)
        return root, root
    embeddings = [tensor for tensor in ends if tensor.role == "embedding"]
    return unit(embeddings, setup), unit([tensor for tensor in ends if tensor.role != "embedding"], setup)
