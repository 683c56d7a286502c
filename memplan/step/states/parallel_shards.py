"""The one way to divide: what one rank of a data-parallel group holds, and what passes between ranks.

Every byte that several GPUs share out goes through :func:`shard`; nothing else in memplan divides by
their number. Ranks are equal but for the last shards, which may be emptier; the first rank is planned,
whose shards are full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.entries import StorageFormat
from memplan.catalog.training_config import Offload
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import Inventory, ParameterTensor, Role
from memplan.step.tensors.tensor_states import stored_format
from memplan.step.units.flat_units import adapter_pieces, as_stored, flat_elements, flat_pieces, place_in_block
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import ceil_div

ADAPTER = ".lora_"
"""What names of adapters' tensors have in them."""

FULLY_SHARDED = 3
"""The ZeRO stage that shards weights, gradients and optimizer states (https://arxiv.org/abs/1910.02054)."""


def is_sharded(parallel: Parallel) -> bool:
    """Tell whether ranks hold torch's shards, be it one in each group of those that divide a model; without, each holds everything."""
    several = parallel.gpus > 1
    return several and parallel.zero_stage == FULLY_SHARDED and parallel.engine != "deepspeed"


def is_accelerated(setup: TrainingSetup) -> bool:
    """Tell whether gradients are reduced in the compute dtype, after the last micro-step, as accelerate and Lightning prepare shards."""
    return setup.stack.sharded_units in ("accelerate", "axolotl", "lightning")


def runs_engine(parallel: Parallel) -> bool:
    """Tell whether DeepSpeed runs a job, at whatever stage of ZeRO."""
    return parallel.engine == "deepspeed" and parallel.zero_stage > 0


def is_flat(parallel: Parallel) -> bool:
    """Tell whether DeepSpeed cuts flat tensors of weights into equal pieces (ZeRO 1 and 2), which it does for one rank too."""
    return parallel.engine == "deepspeed" and parallel.zero_stage in (1, 2)


def is_partitioned(parallel: Parallel) -> bool:
    """Tell whether DeepSpeed cuts every parameter into equal pieces (ZeRO 3)."""
    return parallel.engine == "deepspeed" and parallel.zero_stage == FULLY_SHARDED


def shard(tensor: ParameterTensor, ranks: int) -> ParameterTensor:
    """Return the first rank's part of a tensor: whole slices of its first dimension, padding included.

    Formula:
        ``ceil(rows / ranks)`` rows.

    Source:
        ``_init_sharded_param`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py (v2.13.0).

    Example:
        >>> shard(ParameterTensor("w", (10, 3), "hidden_matrix"), 4).shape
        (3, 3)
    """
    return replace(tensor, shape=(ceil_div(tensor.shape[0], ranks), *tensor.shape[1:]))


def is_coded(tensor: ParameterTensor, setup: TrainingSetup) -> bool:
    """Tell whether a tensor is frozen codes of a few bits."""
    return ADAPTER not in tensor.name and setup.format_names[tensor.role] not in FLOAT_BYTES


def is_whole(tensor: ParameterTensor, setup: TrainingSetup) -> bool:
    """Tell whether each rank holds all of a tensor: frozen codes in bytes, which accelerate leaves out of what is sharded.

    Source:
        ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py (1.15.0): ``Params4bit`` whose storage is no float.
    """
    return is_coded(tensor, setup) and not shards_codes(setup)


def shards_codes(setup: TrainingSetup) -> bool:
    """Tell whether ``fully_shard`` shards codes, stored in bf16, while their scales stay whole on every rank.

    Source:
        ``_set_quantization_config`` in axolotl/loaders/model.py, ``apply_init_sharded_param_patch`` in
        axolotl/monkeypatch/fsdp2_qlora.py (0.21.0).
    """
    return setup.stack.sharded_units == "axolotl" and setup.config.parallel.engine == "torch"


def rank_tensors(inventory: Iterable[ParameterTensor], setup: TrainingSetup) -> Inventory:
    """Return the tensors that one rank holds: shards, or everything."""
    parallel = setup.config.parallel
    if not is_sharded(parallel):
        return tuple(inventory)
    if parallel.engine == "fsdp1":
        tensors, width = tuple(inventory), setup.compute_bytes
        adapters = [tensor for tensor in tensors if ADAPTER in tensor.name]
        frozen = _in_floats([tensor for tensor in tensors if ADAPTER not in tensor.name], setup)
        role: Role = "hidden_matrix" if setup.config.adapter is None else "norm"
        order = place_in_block if setup.stack.model_code == "litgpt" else None
        own = flat_pieces(frozen, parallel, width, role, order)
        return (*own, *adapter_pieces(adapters, parallel, width))
    return tuple(t if is_whole(t, setup) else shard(t, parallel.shards) for t in _as_sharded(inventory, setup))


def _as_sharded(tensors: Iterable[ParameterTensor], setup: TrainingSetup) -> list[ParameterTensor]:
    """Return tensors as ``fully_shard`` has them."""
    return _in_floats(tensors, setup) if shards_codes(setup) else list(tensors)


def _in_floats(tensors: Iterable[ParameterTensor], setup: TrainingSetup) -> list[ParameterTensor]:
    """Return tensors with codes in the dtype that they are stored in, which FSDP1 needs to be that of all others, or as bytes."""
    return [as_stored(t, _width(t, setup)) if is_coded(t, setup) else t for t in tensors]


def _width(tensor: ParameterTensor, setup: TrainingSetup) -> int:
    """Return the bytes of an element as it is gathered: one of staged codes, else the compute dtype's, or its own without mixed precision."""
    if is_coded(tensor, setup):
        return 1 if setup.config.parallel.staged_codes else setup.compute_bytes
    return setup.compute_bytes if casts_shards(setup) else _stored(tensor, setup)[0]


def casts_shards(setup: TrainingSetup) -> bool:
    """Tell whether shards are cast to the compute dtype before they are gathered: not without mixed precision."""
    return setup.config.autocast is not False


def share(parallel: Parallel) -> Fraction:
    """Return what one rank holds of a tensor that divides evenly."""
    return Fraction(1, (parallel.shards if is_sharded(parallel) else 1) * parallel.tensor)


def gathered_setup(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup that forward and backward of gathered weights run under.

    They are gathered in the compute dtype, so that nothing is cast in a product, and there is no autocast; norms run in it too. Evaluation is
    told apart: it gathers as well.

    Source:
        ``MixedPrecisionPolicy`` in torch/distributed/fsdp/_fully_shard/_fsdp_api.py (v2.13.0).
    """
    config, dtype = setup.config, setup.config.compute_dtype
    adapter = config.adapter and replace(config.adapter, dtype=dtype if casts_shards(setup) else config.adapter.dtype)
    plain = StorageFormat(dtype, 1, FLOAT_BYTES[dtype], "", (), "float")
    floats = {role: name in FLOAT_BYTES for role, name in setup.format_names.items()}
    projections = replace(setup.stack.projections, adapter_input_bytes=_adapter_input_bytes(setup))
    return replace(
        setup,
        stack=replace(setup.stack, autocast="never", kbit_floats="as-is", projections=projections),
        config=replace(
            config,
            parallel=replace(config.parallel, data=1, replicate=1, zero_stage=0),
            offload=Offload(),
            evaluation=False,
            adapter=adapter,
        ),
        format_names={role: dtype if floats[role] else name for role, name in setup.format_names.items()},
        formats={role: plain if floats[role] else entry for role, entry in setup.formats.items()},
        gradient=None,
    )


def _adapter_input_bytes(setup: TrainingSetup) -> int:
    """Return what PEFT casts an adapter's input to: the dtype of its weight, which is seen before FSDP1 gathers it; else 0.

    Where parameters stay as they were, a module has its shard between two gathers; else the view that was last gathered.

    Source:
        ``_cast_input_dtype`` in peft/tuners/lora/layer.py (0.21.2); ``_use_sharded_views`` in
        torch/distributed/fsdp/_flat_param.py (v2.13.0).
    """
    parallel = setup.config.parallel
    if setup.config.adapter is None or parallel.engine != "fsdp1" or not parallel.flat.use_orig_params:
        return 0
    return FLOAT_BYTES[setup.adapter_dtype]


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
    leaves: bool = False  # Whether its gradients leave for host memory as soon as they have been reduced

    @property
    def left_bytes(self) -> int:
        """Its gradients once they have been reduced, as far as they are on the device."""
        return 0 if self.leaves else self.kept_bytes

    def waiting_bytes(self, *, new: bool) -> int:
        """What it keeps of the reduction among groups: nothing where that is its ``new`` gradient itself."""
        return 0 if new and not self.narrow_bytes and not self.leaves else self.waited_bytes

    @property
    def copied_bytes(self) -> int:
        """What is there while they are copied out of their buffer."""
        return self.copying_bytes + self.gathered_bytes


def unit(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> Unit:
    """Return what a unit takes; layers count once.

    Formula:
        ``ranks * elements of the shards * bytes of an element``.

    Source:
        ``foreach_all_gather`` and ``foreach_reduce`` in
        torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (v2.13.0).
    """
    ranks, compute, offloads = setup.config.parallel.shards, setup.compute_bytes, setup.offloads_weights
    if setup.config.parallel.engine == "fsdp1":
        return _flat_unit(tensors, setup)
    widths = [_width(tensor, setup) for tensor in tensors if not is_whole(tensor, setup)]
    tensors = [tensor for tensor in _as_sharded(tensors, setup) if not is_whole(tensor, setup)]
    shards = [(shard(tensor, ranks).elements, *_stored(tensor, setup)) for tensor in tensors]
    trained = sum(elements for elements, _, trains in shards if trains)
    own = max((width for _, width, trains in shards if trains), default=compute)
    reduced = reduced_width(setup)
    gathered = ranks * sum(elements * width for (elements, _, _), width in zip(shards, widths, strict=True))
    return Unit(
        gathered_bytes=gathered,
        buffer_bytes=gathered if ranks > 1 else 0,
        copying_bytes=gathered if ranks > 1 else 0 if own == compute else _cast_alone(tensors) * compute,
        reduced_bytes=ranks * trained * reduced,
        kept_bytes=trained * own,
        narrow_bytes=trained * reduced if reduced != own or ranks == 1 else 0,
        cast_bytes=sum(n for n, width, _ in shards if (width != compute and casts_shards(setup)) or offloads)
        * compute
        * (ranks > 1),
        last_bytes=_last_elements(tensors, setup) * compute if ranks > 1 else 0,
        waited_bytes=trained * reduced if setup.config.parallel.replicate > 1 else 0,
        leaves=offloads,
    )


def _flat_unit(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> Unit:
    """Return what a unit of FullyShardedDataParallel takes, which is gathered in place, from a copy in the compute dtype.

    Its gradients are put together in one tensor, which is copied where ranks do not divide it. Frozen weights have none, and
    adapters among them are units of their own. A piece that comes from host memory and is not cast is there on the device as
    long as the unit is gathered, where parameters stay apart: they are views of it meanwhile.

    Source:
        ``_use_low_precision_shard``, ``flat_param_to`` and ``_use_unsharded_views`` in
        torch/distributed/fsdp/_flat_param.py, ``_get_reduce_scatter_tensors`` and
        ``_cast_grad_to_param_dtype`` in _runtime_utils.py (v2.13.0).
    """
    parallel = setup.config.parallel
    frozen = _in_floats([tensor for tensor in tensors if ADAPTER not in tensor.name], setup) or tensors
    own, trained = _stored(frozen[0], setup)
    compute = setup.compute_bytes if casts_shards(setup) else own
    elements = flat_elements(frozen, parallel, compute)
    piece = ceil_div(elements, parallel.shards)
    padded, narrow = piece * parallel.shards * compute, piece * compute * (own != compute)
    moved = piece * compute if setup.offloads_weights and not narrow else 0
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
    )


def _cast_alone(tensors: Sequence[ParameterTensor]) -> int:
    """Return the most elements that are there beyond all of a unit's, where each tensor is cast and then copied."""
    done, most, total = 0, 0, sum(tensor.elements for tensor in tensors)
    for tensor in sorted(tensors, key=lambda tensor: len(tensor.shape) == 1):  # norms come last
        done += tensor.elements
        most = max(most, done + tensor.elements)
    return most - total


def reduced_width(setup: TrainingSetup) -> int:
    """Return the bytes of an element of a gradient as it is reduced: in the compute dtype, or in that of what is trained."""
    own = setup.format_names["hidden_matrix"] if setup.config.adapter is None else setup.adapter_dtype
    return setup.compute_bytes if is_accelerated(setup) and casts_shards(setup) else FLOAT_BYTES[own]


def _stored(tensor: ParameterTensor, setup: TrainingSetup) -> tuple[int, bool]:
    """Return the bytes of an element of a tensor, and whether it is trained."""
    if ADAPTER in tensor.name:
        return FLOAT_BYTES[setup.adapter_dtype], tensor.used
    if not tensor.used:
        return FLOAT_BYTES[stored_format(setup, tensor)[0]], False
    if setup.config.adapter is None:
        return FLOAT_BYTES[setup.format_names["hidden_matrix"]], True
    return FLOAT_BYTES[setup.format_names[tensor.role]], False


def _last_elements(tensors: Sequence[ParameterTensor], setup: TrainingSetup) -> int:
    """Return the elements of a unit's last matrix; layers of transformers' and torchtitan's models end with a norm or a bias."""
    if setup.config.adapter is not None:
        return 0
    formed = [tensor for tensor in tensors if tensor.used]
    matrices = [tensor.elements for tensor in formed if len(tensor.shape) > 1]
    layer = any("{}" in tensor.name for tensor in formed)
    ends_with_vector = setup.stack.model_code == "transformers" or setup.stack.sharded_units == "ends-apart"
    return matrices[-1] if matrices and not (layer and ends_with_vector) else 0


def bucket_bytes(parallel: Parallel, compute_bytes: int, gradient_bytes: int, hidden_size: int) -> int:
    """Return the buckets that gradients are reduced in, where these stay from step to step: those of replicas, and of ZeRO 3.

    Formula:
        As many bytes as there are gradients, beside them (``gradient_as_bucket_view=False``, the default); DeepSpeed's bucket.

    Source:
        ``initialize_buckets`` in torch/csrc/distributed/c10d/reducer.cpp (v2.13.0); ``_setup_for_real_optimizer`` in
        deepspeed/runtime/zero/stage3.py (0.19.8).
    """
    if is_partitioned(parallel):
        return reduced_elements(parallel, hidden_size) * compute_bytes
    replicated = parallel.data > 1 and not is_sharded(parallel) and not runs_engine(parallel)
    return gradient_bytes if replicated else 0


def reduced_elements(parallel: Parallel, hidden_size: int) -> int:
    """Return the elements of DeepSpeed's bucket of gradients (``auto``: transformers/integrations/deepspeed.py, 5.23.0)."""
    size = parallel.deepspeed.reduce_bucket_size
    return hidden_size**2 if size == "auto" else size
