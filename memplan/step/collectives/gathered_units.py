"""What ranks gather, and reduce, together: a unit of ``fully_shard``, or of FullyShardedDataParallel; and what they send at least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass as mutable
from dataclasses import field, replace
from fractions import Fraction

from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import ParameterTensor
from memplan.model.spec import Attention, MixtureOfExperts, ModelSpec
from memplan.step.states.parallel_shards import (
    ADAPTER,
    as_sharded,
    casts_shards,
    cut,
    gathered_width,
    in_floats,
    is_apart,
    is_flat,
    is_partitioned,
    is_whole,
    reduced_width,
    shard,
    stored_dtype,
    stored_width,
)
from memplan.step.units.flat_units import flat_elements
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are gathered, and whose gradients are reduced, together."""

    gathered_bytes: int  # All of them whole, in the compute dtype, padding included
    buffer_bytes: int  # What they are gathered into before they are copied out; one rank has none
    # What is there besides while they are copied: that buffer, or what one rank casts of its own, one by one.
    copying_bytes: int
    reduced_bytes: int  # Their gradients as they go into the reduction, likewise
    kept_bytes: int  # The rank's share of these gradients, in the weights' dtype
    # The same as it comes out of the reduction, where that is in another dtype, or is formed by one rank alone; or 0.
    narrow_bytes: int
    # Its share of the weights, cast to the compute dtype or copied from host memory before they are gathered; 0 for
    # none.
    cast_bytes: int
    # The whole gradient of the last matrix, which the variable of a loop over several ranks' gradients holds until the
    # end of the reduction.
    last_bytes: int
    # Its share of gradients as several groups reduce it among them, which it keeps until the end of backward, be it its
    # gradient or beside that (``AllReduceState`` in _fsdp_param_group.py, v2.13.0).
    waited_bytes: int = 0
    converted: bool = False  # Whether its gradients are reduced in another dtype than they are kept in
    # What its share takes on the device as it is copied from host memory once more, and cast, while it is whole.
    moved_bytes: int = 0
    leaves: bool = False  # Whether its gradients leave for host memory as soon as they have been reduced
    formed_bytes: int = 0  # Their whole gradients as they are formed, without padding
    # The whole gradient that a variable holds besides from before the reduction on, where that puts pieces of some
    # tensors in order first.
    reordered_bytes: int = 0
    # The groups that it is gathered and reduced in, in that order and in the other, where experts lie on a mesh of their own.
    groups: tuple[Unit, ...] = ()
    tensor_bytes: tuple[
        int, ...
    ] = ()  # Each of them whole, as it is copied out of the buffer, or as a flat one is made of them

    @property
    def left_bytes(self) -> int:
        """Its gradients once they have been reduced, as far as they are on the device."""
        return 0 if self.leaves else self.kept_bytes

    def waiting_bytes(self, *, new: bool) -> int:
        """What it keeps of the reduction among groups: nothing where that is its ``new`` gradient itself."""
        return 0 if new and not self.converted and not self.leaves else self.waited_bytes

    @property
    def copied_bytes(self) -> int:
        """What is there while they are copied out of their buffer."""
        return self.copying_bytes + self.gathered_bytes


@mutable(slots=True)
class UnitTensors:
    """What there is of a unit."""

    unit: Unit
    whole: list[int] = field(default_factory=list)  # Its weights, gathered
    buffer: list[int] = field(
        default_factory=list
    )  # What they have been gathered into, until they are copied out of it
    flat: int = -1  # Its gradients in one tensor, which wait for those of later micro-steps; -1 for none
    share: int = -1  # The rank's share of its gradients; -1 for none
    groups: list[UnitTensors] = field(default_factory=list)  # Those that it is gathered and reduced in, if several

    def __post_init__(self) -> None:
        self.groups = [UnitTensors(group) for group in self.unit.groups] or [self]


def unit(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> Unit:
    """Return what a unit takes; layers count once.

    Experts that GPUs share are a group of their own in their layer's unit, gathered after the rest of it and reduced before.

    Source:
        ``_get_mesh_info`` and ``fully_shard`` in torch/distributed/fsdp/_fully_shard (v2.13.0).
    """
    apart = [tensor for tensor in tensors if is_apart(tensor, setup.config.parallel)]
    if not apart:
        return _group(tensors, setup)
    rest, experts = _group([tensor for tensor in tensors if tensor not in apart], setup), _group(apart, setup)
    both = rest, experts
    buffers = rest.buffer_bytes + experts.buffer_bytes
    ahead = max(experts.buffer_bytes + experts.cast_bytes, buffers + rest.cast_bytes)
    first = rest.copying_bytes + experts.buffer_bytes - experts.gathered_bytes
    return Unit(
        gathered_bytes=sum(one.gathered_bytes for one in both),
        buffer_bytes=buffers,
        copying_bytes=max(first, experts.copying_bytes),
        reduced_bytes=sum(one.reduced_bytes for one in both),
        kept_bytes=sum(one.kept_bytes for one in both),
        narrow_bytes=sum(one.narrow_bytes for one in both),
        cast_bytes=ahead - buffers,
        last_bytes=rest.last_bytes,
        waited_bytes=sum(one.waited_bytes for one in both),
        converted=rest.converted,
        formed_bytes=sum(one.formed_bytes for one in both),
        groups=both,
    )


def still_unit(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> Unit | None:
    """Return what all tensors of a model take that is not trained, and is one unit; None for none."""
    still = [replace(tensor, used=False) for tensor in tensors for _ in range(tensor.count)]
    return unit(still, setup) if still else None


def _group(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> Unit:
    """Return what tensors take that are gathered at once.

    Formula:
        ``ranks * elements of the shards * bytes of an element``.
    """
    # Source: ``foreach_all_gather`` and ``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
    # (v2.13.0).
    compute, offloads = setup.compute_bytes, setup.offloads_weights
    if setup.config.parallel.engine == "fsdp1":
        return _flat_unit(tensors, setup)
    widths = [gathered_width(tensor, setup) for tensor in tensors if not is_whole(tensor, setup)]
    tensors = [tensor for tensor in as_sharded(tensors, setup) if not is_whole(tensor, setup)]
    cuts = [cut(tensor, setup.config.parallel) for tensor in tensors]
    ranks, _ = max(cuts, default=(1, 0))
    shards = [
        (shard(tensor, *way).elements, *stored_width(tensor, setup)) for tensor, way in zip(tensors, cuts, strict=True)
    ]
    reordered = [tensor.elements for tensor, (_, dimension) in zip(tensors, cuts, strict=True) if dimension]
    trained = sum(elements for elements, _, trains in shards if trains)
    own = max((width for _, width, trains in shards if trains), default=compute)
    reduced = reduced_width(setup)
    whole = [ranks * elements * width for (elements, _, _), width in zip(shards, widths, strict=True)]
    gathered = sum(whole)
    return Unit(
        gathered_bytes=gathered,
        buffer_bytes=gathered if ranks > 1 else 0,
        copying_bytes=gathered + sum(reordered) * compute
        if ranks > 1
        else 0
        if own == compute
        else _cast_alone(tensors) * compute,
        reduced_bytes=ranks * trained * reduced,
        kept_bytes=trained * own,
        narrow_bytes=trained * reduced if reduced != own or ranks == 1 else 0,
        cast_bytes=sum(
            elements
            for (elements, _, _), tensor in zip(shards, tensors, strict=True)
            if offloads or (casts_shards(setup) and stored_dtype(tensor, setup)[0] != setup.config.compute_dtype)
        )
        * compute
        * (ranks > 1),
        last_bytes=_last_elements(tensors, setup) * compute if ranks > 1 else 0,
        waited_bytes=trained * reduced if setup.config.parallel.replicate > 1 else 0,
        converted=reduced != own,
        leaves=offloads,
        formed_bytes=sum(t.elements for t, (_, _, trains) in zip(tensors, shards, strict=True) if trains) * compute,
        reordered_bytes=reordered[-1] * compute if reordered else 0,
        tensor_bytes=tuple(whole),
    )


def _flat_unit(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> Unit:
    """Return what a unit of FullyShardedDataParallel takes, which is gathered in place, from a copy in the compute dtype.

    Its gradients are put together in one tensor, which is copied where ranks do not divide it. Frozen weights have none, and
    adapters among them are units of their own. A piece that comes from host memory and is not cast is there on the device as
    long as the unit is gathered, where parameters stay apart: they are views of it meanwhile.
    """
    # Source: ``_use_low_precision_shard``, ``flat_param_to`` and ``_use_unsharded_views`` in
    # torch/distributed/fsdp/_flat_param.py, ``_get_reduce_scatter_tensors`` and ``_cast_grad_to_param_dtype`` in
    # _runtime_utils.py (v2.13.0).
    parallel = setup.config.parallel
    frozen = in_floats([tensor for tensor in tensors if ADAPTER not in tensor.name], setup) or tensors
    own, trained = stored_width(frozen[0], setup)
    compute = setup.compute_bytes if casts_shards(setup) else own
    elements = flat_elements(frozen, parallel, compute)
    piece = ceil_div(elements, parallel.shards)
    padded, narrow = piece * parallel.shards * compute, piece * compute * (own != compute)
    offloads = setup.offloads_weights
    moved = piece * compute if offloads and not narrow else 0
    retained = moved if parallel.flat.use_orig_params else 0
    return Unit(
        gathered_bytes=padded + retained,
        buffer_bytes=0,
        copying_bytes=narrow + moved - retained,
        reduced_bytes=elements * compute * trained,
        kept_bytes=piece * own * trained,
        narrow_bytes=narrow + (padded if padded != elements * compute else 0),
        cast_bytes=narrow,
        last_bytes=0,
        moved_bytes=piece * own + narrow - retained if offloads else 0,
        tensor_bytes=tuple([tensor.elements * own for tensor in frozen]),
    )


def _cast_alone(tensors: Sequence[ParameterTensor]) -> int:
    """Return the most elements that are there beyond all of a unit's, where each tensor is cast and then copied."""
    done, most, total = 0, 0, sum(tensor.elements for tensor in tensors)
    for tensor in sorted(tensors, key=lambda tensor: len(tensor.shape) == 1):  # norms come last
        done += tensor.elements
        most = max(most, done + tensor.elements)
    return most - total


def _last_elements(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> int:
    """Return the elements of a unit's last matrix; layers of transformers' and torchtitan's models end with a norm or a bias."""
    if setup.config.adapter is not None:
        return 0
    formed = [tensor for tensor in tensors if tensor.used]
    matrices = [tensor.elements for tensor in formed if len(tensor.shape) > 1]
    layer = any("{}" in tensor.name for tensor in formed)
    ends_with_vector = setup.stack.model_code in ("transformers", "torchtitan")
    ends_with_vector = ends_with_vector and len(matrices) < len(formed)  # a group of experts has matrices alone
    return matrices[-1] if matrices and not (layer and ends_with_vector) else 0


def divided_sent_bytes(setup: TrainingSetup, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes that each rank sends, at least, to those that it shares matrices with, for one forward and backward.

    Formula:
        ``(8 layers + 4) (T - 1) / T`` times the residual stream: of each layer attention and feed-forward part gather rows and
        reduce and scatter sums, or reduce them everywhere, which is as much; backward mirrors it; so do embedding and head.
        With full checkpointing ``12 layers``, whose forward runs twice.

    Source:
        What passes between ranks: :mod:`memplan.step.divided.shared_ends_and_rows`; ring algorithms as below.
    """
    ranks = setup.config.parallel.tensor
    stream = tokens * spec.hidden_size * setup.residual_bytes
    each = 12 if setup.checkpointing == "full" else 8
    return (each * spec.num_hidden_layers + 4) * stream * (ranks - 1) // ranks


def exchanged_bytes(setup: TrainingSetup, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes that each rank sends to those that it shares experts with, for one forward and backward of evenly routed rows.

    Formula:
        ``4 K (E - 1) / E`` times the tokens as experts read them: rows go to their experts and come back, and so do gradients;
        with full checkpointing ``6 K``, whose forward runs twice; selective keeps what has arrived.

    Source:
        ``AllToAllTokenDispatcher`` in torchtitan/models/common/token_dispatcher.py, ``_get_default_save_ops`` in
        distributed/activation_checkpoint.py (0.3.0).
    """
    ranks, total = setup.config.parallel.expert, 0
    for run in spec.runs:
        if isinstance(part := run.layer.feed_forward, MixtureOfExperts):
            times = 6 if setup.checkpointing == "full" else 4
            total += run.count * times * part.experts_per_token * tokens * spec.hidden_size * setup.compute_bytes
    return total * (ranks - 1) // ranks


def gathered_keys_bytes(setup: TrainingSetup, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of keys and values that each rank sends to those that it shares sequences with, for one forward and backward.

    Formula:
        ``2 (C - 1) / C`` times all keys and values, which a ring gathers and whose gradients it reduces; with checkpointing of
        either kind ``3``, whose forward runs twice.

    Args:
        tokens: Of the whole sequences.

    Source:
        ``flex_cp_allgather`` in torch/distributed/tensor/experimental/_context_parallel/_cp_custom_ops.py (v2.13.0).
    """
    parallel, total = setup.config.parallel, 0
    times = 2 if setup.checkpointing == "none" else 3
    for run in spec.runs:
        if isinstance(heads := run.layer.attention, Attention):
            total += run.count * 2 * heads.key_value_size * tokens * setup.compute_bytes // parallel.tensor
    return times * total * (parallel.context - 1) // parallel.context


def sent_bytes(setup: TrainingSetup, inventory: Iterable[ParameterTensor], trained_bytes: int) -> int:
    """Return the bytes that each rank sends, and receives, for one forward and backward; see :func:`sent_by_group`."""
    return sum(sent_by_group(setup, inventory, trained_bytes))


def sent_by_group(setup: TrainingSetup, inventory: Iterable[ParameterTensor], trained_bytes: int) -> tuple[int, int]:
    """Return the bytes that each rank sends for one forward and backward, in the group that divides everything and among groups.

    Formula:
        ``(N - 1) / N`` times: sharded, every layer gathered twice, the rest once, and all gradients
        reduced and scattered, their shares twice among groups; replicated, all gradients twice, as a ring reduces them.

    Args:
        trained_bytes: Gradients of the tensors that are trained, where everything is replicated.

    Source:
        Ring algorithms: https://arxiv.org/abs/1802.05799; what is gathered and when: torch's ``fully_shard``.
    """
    parallel = setup.config.parallel
    if parallel.data * parallel.context == 1:
        return 0, 0
    if is_flat(parallel):  # and the weights that each rank has updated
        return 3 * trained_bytes * (parallel.data - 1) // parallel.data, 0
    if parallel.zero_stage == 0:
        return 2 * trained_bytes * (parallel.data - 1) // parallel.data, 0
    if is_partitioned(parallel):  # gathered twice, and pieces of gradients
        weights = sum(tensor.elements * tensor.count for tensor in inventory) * setup.compute_bytes
        return (2 * weights + trained_bytes * parallel.data) * (parallel.data - 1) // parallel.data, 0
    sent, reduced, groups = Fraction(0), 0, parallel.replicate
    for tensor in inventory:
        whole, (shards, _) = unit((tensor,), setup), cut(tensor, parallel)
        times = 2 if "{}" in tensor.name else 1
        sent += Fraction(tensor.count * (times * whole.gathered_bytes + whole.reduced_bytes) * (shards - 1), shards)
        reduced += tensor.count * whole.reduced_bytes // shards
    return int(sent), 2 * reduced * (groups - 1) // groups
