"""The one way to divide: what one rank of a data-parallel group holds, and what passes between ranks.

Every byte that several GPUs share out goes through :func:`shard`; nothing else in memplan divides by
their number. Ranks are equal but for the last shards, which may be emptier; the first rank is planned,
whose shards are full.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.entries import StorageFormat
from memplan.catalog.training_config import Offload
from memplan.model.inventory import Inventory, ParameterTensor, Role
from memplan.step.states.update_algorithms import run_of
from memplan.step.tensors.tensor_states import TensorStates, stored_format
from memplan.step.units.flat_units import adapter_pieces, as_stored, flat_pieces, place_in_block
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import ceil_div

Named = tuple[str, TensorStates]
"""A single tensor: its name, with the number of its layer, and its states."""


def numbered(name: str, number: object) -> str:
    """Return a tensor's name with the number of its layer."""
    return name.replace("{}", str(number))


def in_layers(tensors: Sequence[TensorStates]) -> Iterator[Named]:
    """Yield every single tensor layer by layer, as a model has them."""
    for (first, count), group in groupby(tensors, key=run_of):
        entries = list(group)
        for number in range(first, first + count):
            for entry in entries:
                yield numbered(entry.tensor.name, number), entry


ADAPTER = ".lora_"
"""What names of adapters' tensors have in them."""

FULLY_SHARDED = 3
"""The ZeRO stage that shards weights, gradients and optimizer states (https://arxiv.org/abs/1910.02054)."""


SHARED_STATES = 1
"""The stage that shards optimizer states alone; without DeepSpeed it is an optimizer of a stack's own that does (``Stack.shares_states``)."""


def is_sharded(parallel: Parallel) -> bool:
    """Tell whether ranks hold torch's shards, be it one in each group of those that divide a model; without, each holds everything."""
    several = parallel.gpus > 1
    return several and parallel.zero_stage == FULLY_SHARDED and parallel.engine != "deepspeed"


def is_replicated(parallel: Parallel) -> bool:
    """Tell whether torch's DistributedDataParallel has the whole model on each rank."""
    return (
        parallel.data > 1
        and parallel.zero_stage != SHARED_STATES
        and not is_sharded(parallel)
        and not runs_engine(parallel)
    )


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


def shard(tensor: ParameterTensor, ranks: int, dimension: int = 0) -> ParameterTensor:
    """Return the first rank's part of a tensor: whole slices of one dimension, the first as a rule, padding included.

    Formula:
        ``ceil(rows / ranks)`` rows.

    Source:
        ``_init_sharded_param`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py (v2.13.0).

    Example:
        >>> shard(ParameterTensor("w", (10, 3), "hidden_matrix"), 4).shape
        (3, 3)
    """
    rows = ceil_div(tensor.shape[dimension], ranks)
    shape = (*tensor.shape[:dimension], rows, *tensor.shape[dimension + 1 :])
    return replace(tensor, shape=shape, divided=tensor.divided or tensor.shape if ranks > 1 else tensor.divided)


def is_apart(tensor: ParameterTensor, parallel: Parallel) -> bool:
    """Tell whether a tensor is of experts that GPUs share, whose shards lie on a mesh of their own."""
    return parallel.expert > 1 and tensor.role == "expert_matrix"


def cut(tensor: ParameterTensor, parallel: Parallel) -> tuple[int, int]:
    """Return among how many ranks of ``fully_shard`` a tensor is divided, and along which of its dimensions.

    A rank's experts, where they are shared, are divided among those that have the same ones: along their width where they
    are fewer.

    Source:
        ``apply_fsdp_to_decoder`` in torchtitan/distributed/fsdp.py (0.3.0).
    """
    if not is_apart(tensor, parallel):
        return parallel.shards, 0
    return parallel.expert_shards, int(parallel.expert_shards > tensor.shape[0])


def is_coded(tensor: ParameterTensor, setup: TrainingSetup) -> bool:
    """Tell whether a tensor is frozen codes of a few bits."""
    return ADAPTER not in tensor.name and not tensor.stays_float and setup.format_names[tensor.role] not in FLOAT_BYTES


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
        frozen = in_floats([tensor for tensor in tensors if ADAPTER not in tensor.name], setup)
        role: Role = "hidden_matrix" if setup.config.adapter is None else "norm"
        order = place_in_block if setup.stack.model_code == "litgpt" else None
        own = flat_pieces(frozen, parallel, width, role, order)
        return (*own, *adapter_pieces(adapters, parallel, width))
    return tuple(t if is_whole(t, setup) else shard(t, *cut(t, parallel)) for t in as_sharded(inventory, setup))


def as_sharded(tensors: Iterable[ParameterTensor], setup: TrainingSetup) -> list[ParameterTensor]:
    """Return tensors as ``fully_shard`` has them."""
    return in_floats(tensors, setup) if shards_codes(setup) else list(tensors)


def in_floats(tensors: Iterable[ParameterTensor], setup: TrainingSetup) -> list[ParameterTensor]:
    """Return tensors with codes in the dtype that they are stored in, which FSDP1 needs to be that of all others, or as bytes."""
    return [as_stored(t, gathered_width(t, setup)) if is_coded(t, setup) else t for t in tensors]


def gathered_width(tensor: ParameterTensor, setup: TrainingSetup) -> int:
    """Return the bytes of an element as it is gathered: one of staged codes, else the compute dtype's, or its own without mixed precision."""
    if is_coded(tensor, setup):
        return 1 if setup.config.parallel.staged_codes else setup.compute_bytes
    return setup.compute_bytes if casts_shards(setup) else stored_width(tensor, setup)[0]


def casts_shards(setup: TrainingSetup) -> bool:
    """Tell whether shards are cast to the compute dtype before they are gathered: not without mixed precision."""
    return setup.config.autocast is not False


def share(parallel: Parallel) -> Fraction:
    """Return what one rank holds of a tensor that divides evenly."""
    return Fraction(1, (parallel.shards if is_sharded(parallel) else 1) * parallel.tensor)


def gathered_setup(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup that forward and backward of gathered weights run under.

    They are gathered in the compute dtype, so that nothing is cast in a product, and there is no autocast; norms run in it too. Evaluation is
    told apart: it gathers as well. What FSDP2's units are called with is cast likewise; FSDP1 casts what the root is.

    Source:
        ``MixedPrecisionPolicy`` in torch/distributed/fsdp/_fully_shard/_fsdp_api.py, ``_cast_forward_inputs`` in
        _fsdp_state.py beside it; ``cast_forward_inputs`` in torch/distributed/fsdp/api.py (v2.13.0).
    """
    config, dtype = setup.config, setup.config.compute_dtype
    adapter = config.adapter and replace(config.adapter, dtype=dtype if casts_shards(setup) else config.adapter.dtype)
    plain = StorageFormat(dtype, 1, FLOAT_BYTES[dtype], "", (), "float")
    floats = {role: name in FLOAT_BYTES for role, name in setup.format_names.items()}
    projections = replace(setup.stack.projections, adapter_input_bytes=_adapter_input_bytes(setup))
    casts_inputs = config.parallel.engine == "torch" and casts_shards(setup)
    tables = replace(setup.stack.rotary_tables, cast_for_layers=casts_inputs)
    return replace(
        setup,
        stack=replace(
            setup.stack, autocast="never", kbit_floats="as-is", projections=projections, rotary_tables=tables
        ),
        config=replace(
            config,
            parallel=replace(config.parallel, data=1, replicate=1, zero_stage=0),
            offload=Offload(),
            evaluation=False,
            adapter=adapter,
            gradients=replace(config.gradients, dtype=None),
        ),
        format_names={role: dtype if floats[role] else name for role, name in setup.format_names.items()},
        formats={role: plain if floats[role] else entry for role, entry in setup.formats.items()},
        gradient=None,
    )


def _adapter_input_bytes(setup: TrainingSetup) -> int:
    """Return what PEFT casts an adapter's input to: the dtype of its weight, which is seen before FSDP1 gathers it; else 0.

    Where parameters stay as they were, a module has its shard between two gathers; else the view that was last gathered.
    """
    # Source: ``_cast_input_dtype`` in peft/tuners/lora/layer.py (0.21.2); ``_use_sharded_views`` in
    # torch/distributed/fsdp/_flat_param.py (v2.13.0).
    parallel = setup.config.parallel
    if setup.config.adapter is None or parallel.engine != "fsdp1" or not parallel.flat.use_orig_params:
        return 0
    return FLOAT_BYTES[setup.adapter_dtype]


def reduced_width(setup: TrainingSetup) -> int:
    """Return the bytes of an element of a gradient as it is reduced: in the compute dtype, or in that of what is trained."""
    own = setup.format_names["hidden_matrix"] if setup.config.adapter is None else setup.adapter_dtype
    return setup.compute_bytes if is_accelerated(setup) and casts_shards(setup) else FLOAT_BYTES[own]


def stored_width(tensor: ParameterTensor, setup: TrainingSetup) -> tuple[int, bool]:
    """Return the bytes of an element of a tensor, and whether it is trained."""
    name, trains = stored_dtype(tensor, setup)
    return FLOAT_BYTES[name], trains


def stored_dtype(tensor: ParameterTensor, setup: TrainingSetup) -> tuple[str, bool]:
    """Return the dtype of a tensor, and whether it is trained."""
    if ADAPTER in tensor.name:
        return setup.adapter_dtype, tensor.used
    if not tensor.used or (tensor.stays_float and setup.config.adapter is not None):
        return stored_format(setup, tensor)[0], False
    if setup.config.adapter is None:
        return setup.format_names["hidden_matrix"], True
    return setup.format_names[tensor.role], False


def looks_for_unused_parameters(setup: TrainingSetup) -> bool:
    """Tell whether replicas look for parameters without a gradient, by what is asked for or the stack's rule."""
    if (said := setup.config.parallel.unused_parameters) is not None:
        return said
    adapted, rule = setup.config.adapter is not None, setup.stack.unused_parameters
    if rule == "never" or (not adapted and setup.asks_for_checkpointing):
        return False
    if rule == "preferences-unless-checkpointed":
        return setup.config.method.stage != "sft"
    return rule == "unless-checkpointed" or not adapted


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
    return gradient_bytes if is_replicated(parallel) else 0


def reduced_elements(parallel: Parallel, hidden_size: int) -> int:
    """Return the elements of DeepSpeed's bucket of gradients (``auto``: transformers/integrations/deepspeed.py, 5.23.0)."""
    size = parallel.deepspeed.reduce_bucket_size
    return hidden_size**2 if size == "auto" else size
