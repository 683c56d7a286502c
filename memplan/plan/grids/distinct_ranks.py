"""What each rank of a job under ``fully_shard`` holds, where shards are uneven.

Weights and gradients are padded to the first rank's, so that their storages are as large on every rank; the optimizer's states
are of the rows that a rank has, which may be fewer or none.

Source:
    ``FlatParamHandle._get_shard`` in torch/distributed/fsdp/_flat_param.py, ``FSDPParam._init_sharded_param`` (``padded_sharded_param``, narrowed) in torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
    and ``foreach_reduce`` (gradients are views of the padded result) in _fsdp_collectives.py (v2.13.0).
"""

from dataclasses import replace
from itertools import pairwise

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.inventory import ParameterTensor
from memplan.plan.memory_plan import MemoryPlan, Verdict, verdict_of
from memplan.plan.planner import CompiledPlan
from memplan.step.states.parallel_shards import cut, is_apart, is_sharded, runs_engine
from memplan.step.tensors.tensor_states import TensorStates
from memplan.step.tensors.update_kernels import placed_bytes
from memplan.training.adapters import adapter_tensors
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div, round_up

BLOCK_BYTES = 512
"""What CUDA's caching allocator rounds every tensor up to (kMinBlockSize, c10/core/AllocatorConfig.h)."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """Ranks that hold the same.

    Attributes:
        first: The first of the shards that they have, counted within a group that divides everything.
        last: The last of them.
        ranks: How many ranks they are, over all groups.
        persistent_bytes: Weights, gradients and states between forward and backward of a later step.
        requested_bytes: The peak of a step; at most, where the optimizer's scratch is in it.
    """

    first: int
    last: int
    ranks: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    requested_bytes: int
    device_bytes: int
    upper_bytes: int
    verdict: Verdict

    @property
    def persistent_bytes(self) -> int:
        """What stays from step to step, with the gradients."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes


def shard_rows(rows: int, ranks: int, place: int) -> int:
    """Return the rows of a tensor that the rank in a place has.

    Example:
        >>> [shard_rows(10, 4, place) for place in range(4)]
        [3, 3, 3, 1]
    """
    whole = ceil_div(rows, ranks)
    return max(0, min(whole, rows - place * whole))


def rank_rows(compiled: CompiledPlan, plan: MemoryPlan) -> tuple[RankRow, ...]:
    """Return all distinct ranks of a plan's job, the first rank first.

    Args:
        plan: Its first rank's plan.

    Raises:
        CannotAnswerError: DeepSpeed runs it, whose ranks differ from instant to instant, or FSDP1 with ``use_orig_params``.
    """
    parallel = plan.setup.config.parallel
    flat = parallel.engine == "fsdp1"
    if flat and parallel.flat.use_orig_params:
        raise CannotAnswerError(
            "--rank: which parameters FSDP1's pieces begin and end in with use_orig_params is not modelled; the fullest is planned"
        )
    if runs_engine(parallel):
        raise CannotAnswerError(
            "--rank: DeepSpeed's ranks keep equal pieces, and which copies most gradients changes from instant to instant; "
            "what is planned is the fullest at each"
        )
    shards = parallel.shards if is_sharded(parallel) else 1
    on_host = plan.setup.config.offload.optimizer_states == "cpu"
    trained = [] if flat or on_host else _trained(compiled)  # pieces of flat tensors are padded to one size
    bounds = {0, shards}
    for tensor, _ in trained:
        size, ranks, each = _division(tensor, parallel, shards)
        full = size // ceil_div(size, ranks)
        bounds |= {place * each for place in (full, full + 1) if place * each < shards}
    places = sorted(bounds)
    rows: list[RankRow] = []
    for first, end in pairwise(places):
        row = _row(plan, trained, first, end - 1)
        if rows and rows[-1].state_bytes == row.state_bytes:
            row = _row(plan, trained, rows.pop().first, end - 1)
        rows.append(row)
    return tuple(rows)


def _division(tensor: ParameterTensor, parallel: Parallel, shards: int) -> tuple[int, int, int]:
    """Return the rows of a tensor, among how many ranks they are divided, and how many neighbours have the same of them."""
    # Source: ``ParallelDims.build_mesh`` in torchtitan/distributed/parallel_dims.py (0.3.0): ranks that share experts
    # are neighbours.
    if not is_apart(tensor, parallel):
        return tensor.shape[0], shards, 1
    ranks, dimension = cut(tensor, parallel)
    return tensor.shape[dimension], ranks, parallel.expert


def _trained(compiled: CompiledPlan) -> list[tuple[ParameterTensor, TensorStates]]:
    """Return the trained tensors, whole, each with the first rank's states of one that is stepped alike."""
    setup, own = compiled.setup, compiled.own
    adapters = adapter_tensors(compiled.model, setup)
    alike = {entry.tensor.role: entry for entry in compiled.states.tensors if entry.trainable}
    stepped = [tensor for tensor in adapters or own.inventory if tensor.used and not tensor.frozen]
    return [(tensor, alike[tensor.role]) for tensor in stepped if tensor.role in alike]


def _state_bytes(setup: TrainingSetup, tensor: ParameterTensor, alike: TensorStates, rows: int) -> int:
    """Return the state bytes on the device of so many rows of a tensor, along the dimension that it is divided along."""
    if alike.stepper is None:
        return 0
    dimension = cut(tensor, setup.config.parallel)[1]
    shape = (*tensor.shape[:dimension], rows, *tensor.shape[dimension + 1 :])
    part = replace(tensor, shape=shape, divided=tensor.divided or tensor.shape)
    return placed_bytes(setup, alike.optimizer, alike.stepper, part, alike.element_bytes)[0]


def _row(plan: MemoryPlan, trained: list[tuple[ParameterTensor, TensorStates]], first: int, last: int) -> RankRow:
    """Return the ranks with shards from ``first`` to ``last``, which hold the same."""
    parallel, states = plan.setup.config.parallel, plan.states
    shards = parallel.shards if is_sharded(parallel) else 1
    less = rounded = 0
    for tensor, alike in trained:
        rows, ranks, each = _division(tensor, parallel, shards)
        whole, own = (
            _state_bytes(plan.setup, tensor, alike, shard_rows(rows, ranks, place)) for place in (0, first // each)
        )
        less += tensor.count * (whole - own)
        rounded += tensor.count * (round_up(whole, BLOCK_BYTES) - round_up(own, BLOCK_BYTES))
    device, upper = plan.device_bytes - rounded, plan.upper_bytes - rounded
    each = parallel.gpus // shards if is_sharded(parallel) else parallel.gpus
    return RankRow(
        first=first,
        last=last,
        ranks=(last - first + 1) * each,
        weight_bytes=states.weight_bytes,
        gradient_bytes=states.gradient_bytes,
        state_bytes=states.state_bytes - less,
        requested_bytes=plan.requested_bytes - less,
        device_bytes=device,
        upper_bytes=upper,
        verdict=verdict_of(device, upper, plan.usable_bytes) if rounded and plan.verdict != "fits" else plan.verdict,
    )
