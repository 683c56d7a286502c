"""What one rank keeps under DeepSpeed's ZeRO 1 and 2: whole weights in a flat tensor, a partition of everything else.

An optimizer's parameters are laid one after the other in a flat tensor, group by group, which is padded to a multiple of
twice the ranks. Every rank has an equal piece of it: fp32 weights and the optimizer's states. The engine casts everything
that is not quantised to the dtype of products beforehand.

Source:
    deepspeed/runtime/zero/stage_1_and_2.py (0.19.8), ``DeepSpeedZeroOptimizer.__init__``, ``get_partition_info`` and
    ``copy_grads_in_partition``; deepspeed/runtime/engine.py, ``get_data_types``.
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.entries import StorageFormat
from memplan.catalog.training_config import Offload
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.inventory import ROLES, Inventory, ParameterTensor
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.optimizer_scratch import Temporaries, step_temporaries
from memplan.step.states.parallel_shards import Named, in_layers, is_flat
from memplan.step.tensors.tensor_states import TensorStates, tensor_states
from memplan.step.units.host_memory import HostMemory, flat_host_memory
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import round_up

ALIGNMENT = 2
"""Elements that a rank's piece starts at a multiple of (``nccl_start_alignment_factor``)."""

Single = tuple[str, ParameterTensor]
"""A single tensor and its name."""

BEHIND_TEXT = ("model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "lm_head.")
"""Parts behind the text model, in order (``Gemma4Model``, ``Gemma4UnifiedModel`` and the models around them in transformers 5.24.0)."""

NORMS_IN_LAYERS = {"model": 1, "model.language_model": 1, "model.text_model": 1, "gpt_neox": -1}
"""Where a model's layers register the norms that they have themselves: behind their attention and feed-forward part, or
before (``LlamaDecoderLayer`` and ``GPTNeoXLayer`` of transformers 5.23.0)."""

PLAIN_NORMS = (".norm1.weight", ".norm2.weight", ".ln_q.weight", ".ln_pre.weight")
"""What norms of towers are called that Trainer takes for none where they have no bias: no ``LayerNorm`` of torch, and not called one."""

Piece = tuple[int, int]
"""A rank and the elements of a parameter that lie in its partition."""


@dataclass(frozen=True, slots=False)
class FlatGroup:
    """A group of an optimizer's parameters in a flat tensor."""

    names: tuple[str, ...]  # The parameters, in the order in which they lie there
    sizes: tuple[int, ...]  # Their elements
    ranks: int  # Ranks that share it
    idle: frozenset[str] = frozenset()  # Those that no row passes through

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def padded(self) -> int:
        """Elements of the flat tensor."""
        return round_up(sum(self.sizes), ALIGNMENT * self.ranks)

    @cached_property
    def partition(self) -> int:
        """Elements of each rank's piece."""
        return self.padded // self.ranks

    def pieces(self, place: int) -> list[Piece]:
        """Return what each rank has of the parameter in that place."""
        start, end = self.starts[place], self.starts[place] + self.sizes[place]
        ranks = range(start // self.partition, (end - 1) // self.partition + 1)
        bounds = [(max(start, rank * self.partition), min(end, (rank + 1) * self.partition)) for rank in ranks]
        return [(rank, after - before) for rank, (before, after) in zip(ranks, bounds, strict=True)]

    def piece(self, place: int, rank: int) -> int:
        """Return the elements that a rank has of the parameter in a place, of which it has some."""
        start, first = self.starts[place], rank * self.partition
        return min(start + self.sizes[place], first + self.partition) - max(start, first)

    def places(self, rank: int) -> range:
        """Return the places of the parameters of which a rank has something."""
        first, end = rank * self.partition, (rank + 1) * self.partition
        begin = max(0, bisect_right(self.starts, first) - 1)
        if begin < len(self.sizes) and self.starts[begin] + self.sizes[begin] <= first:
            begin += 1
        return range(begin, bisect_right(self.starts, end - 1))


def flat_groups(setup: TrainingSetup, trained: Iterable[Named]) -> tuple[FlatGroup, ...]:
    """Return the flat tensors of a setup's trained parameters, in the order of the optimizer's groups.

    Args:
        trained: The parameters, single and in the order of the model.
    """
    parallel = setup.config.parallel
    ranks, (decayed, rest) = parallel.data, trained_groups(trained)
    if parallel.deepspeed.round_robin_gradients:
        decayed, rest = _dealt(decayed, ranks), _dealt(rest, ranks)
    return tuple(
        FlatGroup(
            tuple(name for name, _ in group),
            tuple(tensor.elements for _, tensor in group),
            ranks,
            frozenset(name for name, tensor in group if not tensor.used),
        )
        for group in (decayed, rest)
        if group
    )


def _registered(rest: Sequence[Single]) -> list[Single]:
    """Return norms and biases in the order in which modules have them, given in the order in which they run."""
    by_layer = groupby(rest, key=lambda item: item[0].partition(".layers.")[2].partition(".")[0])
    return [item for _, layer in by_layer for item in sorted(layer, key=lambda item: _norm_place(item[0]))]


def _norm_place(name: str) -> int:
    """Return 1 for a norm that stands behind the other parts of its layer, -1 for one that stands before them."""
    stem, _, inside = name.partition(".layers.")
    return NORMS_IN_LAYERS.get(stem, 0) if inside.count(".") == 2 else 0


def _part_place(name: str) -> int:
    """Return where a parameter's part stands among those that a model registers behind its text model; 0 before them."""
    return next((place for place, part in enumerate(BEHIND_TEXT, 1) if name.startswith(part)), 0)


def _decays(name: str, tensor: ParameterTensor, names: Container[str]) -> bool:
    """Tell whether a parameter lies in Trainer's first group (``get_decay_parameter_names`` in transformers/trainer.py, 5.23.0)."""
    plain = name.endswith(PLAIN_NORMS) and not tensor.used and name.replace("weight", "bias") not in names
    return (tensor.role != "norm" or plain) and "bias" not in name


def trained_groups(trained: Iterable[Named]) -> tuple[list[Single], list[Single]]:
    """Return the parameters of an optimizer's groups, in order: with weight decay, and without."""
    named = sorted(((name, entry.tensor) for name, entry in trained), key=lambda item: _part_place(item[0]))
    names = {name for name, _ in named}
    decayed = [item for item in named if _decays(*item, names)]
    return _result_first(decayed), _registered([item for item in named if not _decays(*item, names)])


def _result_first(decayed: list[Single]) -> list[Single]:
    """Return matrices with attention's last projection before a joint first one (``Phi3Attention`` of transformers 5.23.0)."""
    order = list(decayed)
    for place, (name, _) in enumerate(decayed[:-1]):
        if name.endswith("self_attn.qkv_proj.weight") and decayed[place + 1][0].endswith("self_attn.o_proj.weight"):
            order[place], order[place + 1] = order[place + 1], order[place]
    return order


def _dealt(group: Sequence[Single], ranks: int) -> list[Single]:
    """Return parameters as they are dealt out to the ranks in turn (``_round_robin_reorder``)."""
    return [item for rank in range(ranks) for item in group[rank::ranks]]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank has of the gradients of one step."""

    gradient_bytes: int  # The buffer that its parameters' gradients are copied into, each of them whole
    names: frozenset[str]
    step_bytes: int  # Most that its step takes besides what stays, that buffer included
    zeros_bytes: int = 0  # Gradients of zeros, whole, which are made for what no row passes through as backward ends
    padding_bytes: int = 0  # Zeros behind the last piece, which are there as the optimizer steps


def gradient_width(setup: TrainingSetup) -> int:
    """Return the bytes of an element of a gradient: as wide as weights are."""
    return setup.compute_bytes


def rank_shares(setup: TrainingSetup, groups: Sequence[FlatGroup]) -> tuple[RankShare, ...]:
    """Return what each rank has of the gradients, the first rank first.

    Formula:
        A step takes, besides the gradients, a norm's copy of the largest in fp64, or for one group after the other its
        flat gradients, which one parameter alone has without a copy, and their cast to fp32, then the update's scratch.

    Source:
        ``scaled_global_norm``, ``get_grad_norm_direct``, ``step`` and ``_get_flat_partition_unpadded``.
    """
    width = gradient_width(setup)
    scratch = tuple([flat_scratch(setup, group.partition).bytes for group in groups])
    shares = _shares(tuple(groups), width, scratch)
    return (
        tuple([replace(share, gradient_bytes=0, step_bytes=0, zeros_bytes=0, padding_bytes=0) for share in shares])
        if setup.steps_on_host
        else shares
    )


def fullest_rank(setup: TrainingSetup, shares: Sequence[RankShare]) -> int:
    """Return the rank whose step is told as events: the one with the most gradients.

    Where whole gradients are reduced behind backward, in the order of the model, it is the first, whose own are copied while all
    others are there.
    """
    parallel = setup.config.parallel
    if parallel.zero_stage == 1 and not parallel.deepspeed.overlap_comm:
        return 0
    return max(range(len(shares)), key=lambda rank: shares[rank].gradient_bytes + shares[rank].zeros_bytes)


@lru_cache(maxsize=8)
def _shares(groups: tuple[FlatGroup, ...], width: int, scratch: tuple[int, ...]) -> tuple[RankShare, ...]:
    return tuple([_share(groups, rank, width, scratch) for rank in range(groups[0].ranks)])


def _share(groups: Sequence[FlatGroup], rank: int, width: int, scratch: Sequence[int]) -> RankShare:
    owned = [group.places(rank) for group in groups]
    whole = width * sum(group.sizes[place] for group, places in zip(groups, owned, strict=True) for place in places)
    pieces = [[group.piece(place, rank) for place in places] for group, places in zip(groups, owned, strict=True)]
    paddings = [width * (group.partition - sum(sizes)) for group, sizes in zip(groups, pieces, strict=True)]
    needs = [8 * max((size for sizes in pieces for size in sizes), default=0)]
    zeros = [
        width * sum(group.sizes[place] for place in places if group.names[place] in group.idle)
        for group, places in zip(groups, owned, strict=True)
    ]
    names = frozenset(group.names[place] for group, places in zip(groups, owned, strict=True) for place in places)
    whole *= not names <= frozenset().union(*(group.idle for group in groups))
    resident, last = whole + sum(zeros) + sum(paddings), max((i for i, sizes in enumerate(pieces) if sizes), default=-1)
    most = resident + needs[0]
    for index, group in enumerate(groups):
        joined = width * group.partition if len(pieces[index]) + (paddings[index] > 0) > 1 else 0
        cast = 4 * group.partition if width < 4 else 0
        most = max(most, resident + joined + cast)
        resident -= (
            paddings[index] + zeros[index] * bool(cast or joined) + (whole if index == last and (cast or joined) else 0)
        )
        most = max(most, resident + (cast or joined) + scratch[index])
    return RankShare(whole, names, most, sum(zeros), sum(paddings))


def flat_scratch(setup: TrainingSetup, elements: int) -> Temporaries:
    """Return what updating a rank's piece of a flat tensor takes."""
    return step_temporaries(in_fp32(setup), [partition_states(setup, elements)])


def in_fp32(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup of what the optimizer steps."""
    wide = StorageFormat("fp32", 1, 4, "", (), "float")
    config = replace(
        setup.config, master_weights="none", adapter=None, compute_dtype="fp32", parallel=Parallel(), offload=Offload()
    )
    names, formats = dict.fromkeys(ROLES, "fp32"), dict.fromkeys(ROLES, wide)
    return replace(setup, config=config, format_names=names, formats=formats, gradient=None, compute_bytes=4)


def partition_states(setup: TrainingSetup, elements: int) -> TensorStates:
    """Return the states of a rank's piece of a flat tensor."""
    return tensor_states(in_fp32(setup), ParameterTensor("partition", (elements,), "hidden_matrix"), frozen=False)


def trained_tensors(states: ModelStates) -> list[Named]:
    """Return the trained parameters, single and in the order of the model, adapters where they are put."""
    own = len(states.tensors)
    adapted = next((i for i, entry in enumerate(states.tensors) if ".lora_" in entry.tensor.name), own)
    every = [*in_layers(states.tensors[:adapted]), *in_layers(states.tensors[adapted:])]
    return [(name, entry) for name, entry in every if entry.trainable]


def stepped_tensors(setup: TrainingSetup, states: ModelStates) -> list[Named]:
    """Return the same with those of a vision tower that no row passes through: DeepSpeed keeps a gradient of zeros for each, and steps it."""

    def is_idle(entry: TensorStates) -> bool:
        own = setup.config.adapter is None or ".lora_" in entry.tensor.name
        return own and not (entry.tensor.used or entry.tensor.frozen)

    entries = tuple(replace(entry, trainable=True) if is_idle(entry) else entry for entry in states.tensors)
    return trained_tensors(replace(states, tensors=entries))


def rank_states(setup: TrainingSetup, inventory: Inventory, adapters: Iterable[ParameterTensor]) -> ModelStates:
    """Return the states that one rank has of a model under a setup; its tensors are whole where an engine cuts them up.

    Raises:
        CannotAnswerError: The job's stack does what the formula does not follow.
    """
    states = model_states(setup, inventory, adapters)
    if not is_flat(setup.config.parallel):
        return states
    trained = stepped_tensors(setup, states)
    if setup.config.parallel.deepspeed.round_robin_gradients and any(e.tensor.role == "router" for _, e in trained):
        raise CannotAnswerError(
            f"{setup.name}: parallel.deepspeed.round_robin_gradients: the order in which a mixture's modules have their "
            "parameters, by which they are dealt out, is not followed; leave it out"
        )
    groups = flat_groups(setup, trained)
    if setup.steps_on_host:
        return _offloaded(setup, states, groups)
    pieces = [partition_states(setup, group.partition) for group in groups]
    shared = pieces[0].optimizer.shared_bytes
    return replace(
        states,
        weight_bytes=_weight_bytes(setup, states, groups),
        master_bytes=sum(piece.weight_bytes for piece in pieces),
        gradient_bytes=max(s.gradient_bytes + s.zeros_bytes + s.padding_bytes for s in rank_shares(setup, groups)),
        state_bytes=shared + sum(piece.state_bytes for piece in pieces),
        host_bytes=sum(piece.host_bytes for piece in pieces),
    )


def _weight_bytes(setup: TrainingSetup, states: ModelStates, groups: Iterable[FlatGroup]) -> int:
    """Return the bytes of whole weights: flat tensors, and what is frozen."""
    stepped = {name for group in groups for name in group.names}
    frozen = sum(
        entry.weight_bytes * entry.tensor.count
        for entry in states.tensors
        if stepped.isdisjoint(entry.tensor.expanded_names())
    )
    return frozen + FLOAT_BYTES[setup.config.compute_dtype] * sum(group.padded for group in groups)


def _offloaded(setup: TrainingSetup, states: ModelStates, groups: Sequence[FlatGroup]) -> ModelStates:
    """Return the states of ranks whose pieces lie in host memory: on the device are weights, and a buffer for one gradient.

    What is told of host memory is the rank that has most.
    """
    # Source: ``temp_grad_buffer_for_gpu_offload`` in deepspeed/runtime/zero/stage_1_and_2.py (0.19.8).
    width, largest = gradient_width(setup), max(max(group.sizes) for group in groups)
    parallel, pinned = setup.config.parallel, setup.config.parallel.deepspeed.pinned_optimizer
    several = parallel.zero_stage == 2 and setup.config.gradient_accumulation_steps > 1

    def on_host(rank: int) -> HostMemory:
        summed = [group.sizes[place] for group in groups for place in group.places(rank)] if several else []
        return flat_host_memory([group.partition for group in groups], summed, largest, width, pinned=pinned)

    host = max((on_host(rank) for rank in range(groups[0].ranks)), key=lambda memory: memory.taken_bytes)
    return replace(
        states,
        weight_bytes=_weight_bytes(setup, states, groups),
        master_bytes=0,
        gradient_bytes=0,
        state_bytes=0,
        host_bytes=host.bytes,
        host=host,
        staged_bytes=width * largest,
    )
