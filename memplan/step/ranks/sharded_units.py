"""The units that one rank gathers weights in, around the tapes of whole weights."""

from collections.abc import Mapping
from dataclasses import field, replace

from memplan.catalog.config_keys.parallel_keys import FlatShards
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import Inventory, ParameterTensor
from memplan.model.model import Model
from memplan.model.spec import LayerRun, ModelSpec
from memplan.step.blocks.block_settings import Regime
from memplan.step.collectives.gathered_units import Unit, still_unit, unit
from memplan.step.kernels.refused_code import refuse_unread_code
from memplan.step.model_on_tape import ModelOnTape, PlayedModel, inventory_first, model_on_tape
from memplan.step.ranks.stored_head import gathers_head_by_hand, names_in_units, with_stored_head
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.optimizer_scratch import ON_HOST, sharded_clipping_bytes, step_temporaries
from memplan.step.states.parallel_shards import gathered_setup, is_accelerated, reduced_width
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Form, Part, single_form
from memplan.step.tapes.taped_operations import Mode
from memplan.step.tower.tower_settings import is_of_tower
from memplan.training.adapters import adapter_tensors, libraries_inventory, reference_tensors
from memplan.training.image_models import is_in_root, wraps_blocks
from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """One rank's step: tapes of gathered weights, and the units that weights are gathered in."""

    inputs: StepInputs  # What is compiled; its states are those of whole weights
    taped: ModelOnTape  # The model on tape
    played: PlayedModel  # Its parts played; whole gradients are always new ones
    first: Unit  # The unit of the embedding, or of all that no layer has
    tail: Unit  # The unit of final norm and head; the same one, or one apart
    units: tuple[Unit, ...]  # For each run of layers, the unit that one of them is
    rest: Unit | None  # The root's own unit besides those of the ends, where there is one
    head: Unit | None  # What the head alone is in the unit of norm and head, where that is one
    reduced_width: int  # Bytes of an element of a gradient as it is reduced
    head_by_hand: bool  # Whether the loss gathers a unit that is the head alone itself, whose module it does not call
    leaves_tail: bool  # Whether an evaluation leaves norm and head gathered for the next forward
    called_before: bool  # Whether a forward without gradients leaves them so before each that is learnt from
    reference: Unit | None  # All of a reference model of its own, but under FSDP1
    flat: FlatShards | None = None  # What FullyShardedDataParallel is told, where units are its flat tensors
    adapters: Mapping[str, Unit] = field(default_factory=dict)  # Those of adapters there, each matrix alone, by name

    @property
    def apart(self) -> bool:
        """Whether the ends are units of their own, so that nothing is gathered throughout."""
        return self.first is not self.tail

    @property
    def loss_inside(self) -> bool:
        """Whether the model itself forms the loss, before its root has let go of the last buffer, or the root stays as it is."""
        return is_accelerated(self.inputs.setup)

    @property
    def begins_behind_loss(self) -> bool:
        """Whether backward comes to the root, and gathers the first unit, when the gradient of its logits is there."""
        return self.inputs.setup.stack.sharded_units == "lightning"

    @property
    def loss_on_both_sides(self) -> bool:
        """Whether the model forms a loss of its own, and a trainer outside of it the one that runs backward."""
        return self.inputs.setup.profile.loss == "weighted-tokens"

    @property
    def root_again(self) -> bool:
        """Whether the root is let go of after forward, and gathered again when backward begins."""
        return self.inputs.setup.stack.sharded_units in ("axolotl", "own-root", "root-again") and not self.flat

    @property
    def root_behind_loss(self) -> bool:
        """Whether that is when the gradient of its logits is there: the loss lies outside the root.

        Source:
            ``shard_model`` in torchtune/training/_distributed.py (0.6.1), which says ``reshard_after_forward`` of the root too;
            ``_lazy_init`` in torch/distributed/fsdp/_fully_shard/_fsdp_state.py (v2.13.0).
        """
        return self.loss_on_both_sides or self.inputs.setup.stack.sharded_units == "root-again"

    @property
    def widens_logits(self) -> bool:
        """Whether the model casts its logits to fp32 itself, inside the root: ``unembed`` in torchtune/modules/transformer.py (0.6.1)."""
        narrow = self.taped.head.logits is not None and self.inputs.setup.compute_bytes < 4
        return narrow and self.inputs.setup.stack.sharded_units == "root-again"

    @property
    def head_instant(self) -> str:
        """The instant at whose end the last layer's backward begins; one function has loss and head."""
        chunked = self.chunked or self.inputs.setup.profile.loss == "chunked-logits"
        return "loss backward" if self.taped.head.logits is None and not chunked else "head backward"

    @property
    def gathers_before_head(self) -> bool:
        """Whether the last layer is gathered before backward reaches the head: torchtitan's tied ends are a unit of modules too.

        Source:
            ``apply_fsdp_to_decoder`` in torchtitan/distributed/fsdp.py (0.3.0), whose unit has the hooks of the head's module.
        """
        within = self.inputs.setup.stack.model_code == "torchtitan" or self.apart or self.loss_inside
        return within and self.hooks_outputs

    @property
    def hooks_outputs(self) -> bool:
        """Whether a hook has the last layer gathered before its own does: a root without weights has none, nor a head that is not called.

        Source:
            ``_pre_backward`` in torch/distributed/fsdp/_fully_shard/_fsdp_state.py (v2.13.0): OLMo's final norm has no weight.
        """
        return not self.head_by_hand or self.rest is not None

    @property
    def chunked(self) -> bool:
        """Whether chunks of the loss run backward as far as the head's input before the model does."""
        return self.inputs.setup.profile.loss == "chunked-backward"

    @property
    def reentrant(self) -> bool:
        """Whether layers run again by reentrant checkpointing, which hides their results from hooks."""
        setup = self.inputs.setup
        return setup.checkpointing != "none" and setup.stack.checkpointing.reentrant

    @property
    def end_instant(self) -> str:
        """The instant in which the first layer's gradients are reduced, and the embedding is gathered, as libraries' hooks tell it."""
        setup = self.inputs.setup
        inside = setup.stack.sharded_units == "root" or setup.config.compile == "layers"
        return "layer 1 backward" if inside else "end of backward"

    @property
    def reduces_last(self) -> bool:
        """Whether only the last micro-step reduces gradients, those of all of them at once."""
        return is_accelerated(self.inputs.setup)

    def played_as(self, mode: Mode) -> PlayedModel:
        """Return the parts of the model, played so that whole gradients are new ones, as flat tensors' always are, or are added to."""
        return self.played if mode == "first" or self.flat else self.taped.played(mode, self.inputs.recomputation)

    def whole_of(self, index: int) -> int:
        """Return the whole gradients of one layer of a run."""
        return self.taped.layer_of(index).gradients

    @property
    def whole_of_first(self) -> int:
        """The whole gradients of the first unit: of the embedding, or of the root, where a tied one counts once."""
        ends = [entry for entry in self.inputs.states.tensors if "{}" not in entry.tensor.name]
        return sum(e.formed_bytes for e in ends if not self.apart or e.tensor.role == "embedding")

    @property
    def whole_gradients(self) -> int:
        """The whole gradients of the model."""
        if self.flat:
            return self.first.reduced_bytes + sum(
                u.reduced_bytes * run.count for u, run in zip(self.units, self.taped.runs, strict=True)
            )
        whole = sum(entry.formed_bytes * entry.tensor.count for entry in self.inputs.states.tensors)
        return whole - (self.tail.formed_bytes - self.tail.left_bytes) * self.head_by_hand

    @property
    def root_weight_bytes(self) -> int:
        """Whole weights that are there while layers run: those of the root."""
        return 0 if self.apart and not self.stays else self.first.gathered_bytes

    @property
    def stays(self) -> bool:
        """Whether layers, and an embedding apart, stay gathered from their forward to the end of their backward.

        Source:
            ``FSDPParamGroup.reshard`` and ``unshard`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (v2.13.0).
        """
        return not self.inputs.setup.config.parallel.reshard_after_forward

    @property
    def last_stays(self) -> bool:
        """Whether the last layer stays gathered from its forward to the end of its backward, if no other does.

        Source:
            ``apply_fsdp`` in torchtitan/models/llama3/infra/parallelize.py (0.1.0).
        """
        return self.inputs.setup.stack.sharded_units == "root-and-last" and not self.stays

    def staying(self, index: int, position: int) -> int:
        """Return whole weights of the layers that lie before one of a run, where these stay."""
        if not self.stays:
            return 0
        before = zip(self.units[:index], self.taped.runs, strict=False)
        return sum(u.gathered_bytes * run.count for u, run in before) + self.units[index].gathered_bytes * (
            position - 1
        )

    @property
    def below_head(self) -> int:
        """Whole weights that are there beside the head's from the last layer's forward on: all layers' and the embedding's, where they stay."""
        if not self.stays:
            return self.last.gathered_bytes * self.last_stays
        last = self.staying(len(self.units) - 1, self.taped.runs[-1].count) + self.last.gathered_bytes
        return last + self.first.gathered_bytes * self.apart

    @property
    def arrived(self) -> Form:
        """The gradient of the residual stream between two layers."""
        entry = self.taped.head.section.entry
        return single_form(Part.TEMPORARIES, entry.quantity, entry.coefficient)

    @property
    def last(self) -> Unit:
        """The unit of the last layer."""
        return self.units[-1]

    @property
    def stream_bytes(self) -> int:
        """Buffers that weights are gathered into, which come from the memory of a stream of their own.

        Two are alive at a time: the root's and the first layer's, or those of two layers.
        """
        first, *layers = [self.first.buffer_bytes, *(unit.buffer_bytes for unit in self.units)]
        tail = layers[-1] + self.tail.buffer_bytes if self.apart else 0
        return max(first + layers[0], 2 * max(layers), tail)

    @property
    def unit_gradients(self) -> tuple[int, ...]:
        """The rank's gradients of each unit, or group of one, which are one tensor: what a reduction puts out."""
        layers = zip(self.units, self.taped.runs, strict=True)
        ends = {id(unit): unit.left_bytes for unit in (self.first, self.tail, self.rest) if unit}
        groups = (one for unit, run in layers for _ in range(run.count) for one in unit.groups or (unit,))
        return (*ends.values(), *(one.left_bytes for one in groups))

    @property
    def prefetches(self) -> bool:
        """Whether each unit has the next one gathered in forward too, before it runs.

        Source:
            ``apply_fsdp_to_decoder`` in torchtitan/distributed/fsdp.py (0.3.0), where GPUs share experts.
        """
        return self.inputs.setup.config.parallel.expert > 1

    @property
    def ahead_of_head(self) -> int:
        """What is there of layers, and an embedding apart, in the head's backward: the last layer is gathered then, or all have stayed."""
        return self.below_head if self.stays or self.last_stays else self.last.buffer_bytes * self.hooks_outputs

    def neighbour(self, index: int, position: int, step: int) -> Unit | None:
        """Return the unit of the layer that comes after (1) or before (-1) one of a run, or None."""
        if 1 <= position + step <= self.taped.runs[index].count:
            return self.units[index]
        other = index + step
        return self.units[other] if 0 <= other < len(self.units) else None


def positions(run: LayerRun) -> tuple[int, ...]:
    """Return the layers of a run that are looked at: between them, everything is linear."""
    return tuple(dict.fromkeys((run.count, max(1, run.count - 1), min(2, run.count), 1)))


def sharded_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> ShardedStep:
    """Return the tapes of gathered weights, and their units.

    Raises:
        CannotAnswerError: A part of the model whose activations are not modelled.
    """
    refuse_unread_code(model, setup)
    by_hand = gathers_head_by_hand(model.spec, setup)
    whole = with_stored_head(setup) if by_hand else gathered_setup(setup)
    optimizer, clipping = step_temporaries(setup, states.tensors), sharded_clipping_bytes(states.tensors)
    if setup.steps_on_host:
        optimizer, clipping = ON_HOST, 0
    adapters, loaded = adapter_tensors(model, setup), libraries_inventory(model.inventory, setup)
    inventory = (*loaded, *adapters)
    whole_states = model_states(whole, model.inventory, adapters)
    inputs = StepInputs(model.spec, whole, whole_states, regime, states.gradient_bytes, optimizer, clipping)
    taped = model_on_tape(inputs)
    played = taped.played("first", inputs.recomputation)
    first, tail, rest = _ends(model.spec, inventory, setup)
    alone = unit([tensor for tensor in inventory if tensor.role == "head"], setup) if first is not tail else None
    tower = model.spec.tower is not None
    layers = [tensor for tensor in inventory if "{}" in tensor.name and not (tower and is_of_tower(tensor.name))]
    units = (
        unit([tensor for tensor in layers if tensor.first == inventory_first(model.spec, run)], setup)
        for run in taped.runs
    )
    flat = setup.config.parallel.flat if setup.config.parallel.engine == "fsdp1" else None
    own = {name: unit([tensor], setup) for tensor in adapters for name in tensor.expanded_names()} if flat else {}
    return ShardedStep(
        inputs=inputs,
        taped=taped,
        played=played,
        first=first,
        tail=tail,
        rest=rest,
        head=alone,
        units=tuple(units),
        reduced_width=reduced_width(setup),
        head_by_hand=by_hand,
        leaves_tail=setup.config.evaluation and first is not tail and not by_hand,
        called_before=setup.config.method.stage == "kto" and first is not tail and not by_hand,
        reference=None if flat else still_unit(reference_tensors(loaded, setup), setup),
        flat=flat,
        adapters=own,
    )


def _ends(spec: ModelSpec, inventory: Inventory, setup: TrainingSetup) -> tuple[Unit, Unit, Unit | None]:
    """Return the units of the embedding, of final norm and head, and of what else the root has; the first two may be one."""
    # Source: torchtitan/distributed/fsdp.py, ``apply_fsdp_to_decoder`` (0.3.0); ``fsdp2_prepare_model`` in
    # accelerate/utils/fsdp_utils.py (1.15.0), and in axolotl/monkeypatch/accelerate/fsdp2.py (0.21.0).
    blocks, layout = wraps_blocks(spec, setup.config.parallel), setup.stack.sharded_units
    ends = [
        tensor for tensor in inventory for _ in range(tensor.count) if is_in_root(tensor, spec.tower, blocks=blocks)
    ]
    layout = "root" if setup.config.parallel.engine == "fsdp1" else layout
    others: list[ParameterTensor] = []
    if layout == "accelerate":
        others = [tensor for tensor in ends if not tensor.name.startswith(names_in_units(spec, setup))]
        ends = [tensor for tensor in ends if tensor not in others]
    rest = unit(others, setup) if others else None
    if layout in ("root", "root-again", "root-and-last", "axolotl", "own-root") or spec.tie_word_embeddings:
        root = unit(ends, setup)
        return root, root, rest
    embeddings = [tensor for tensor in ends if tensor.role == "embedding"]
    others = [tensor for tensor in ends if tensor.role != "embedding"]
    as_stored = replace(setup, config=replace(setup.config, autocast=False))
    return unit(embeddings, setup), unit(others, as_stored if gathers_head_by_hand(spec, setup) else setup), rest
