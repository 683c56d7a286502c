"""Degrees of parallelism as one value, checked once against the number of GPUs."""

from math import lcm

from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS, Parallel
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError
from memplan.units import nearest_divisor, round_up


@dataclass(frozen=True, slots=True)
class Grid:
    """How many ways a job is divided.

    Attributes:
        world: GPUs.
        tensor: GPUs that share each layer's matrices.
        pipeline: Stages that layers are divided into.
        virtual: Chunks of layers that each stage has.
        context: GPUs that share each sequence.
        expert: GPUs that the routed experts are divided among.
        expert_tensor: GPUs that share each expert's matrices.
        zero_stage: What is divided among data parallel ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.
        replicate: Groups of data parallel GPUs that each divide states anew.
        sequence: What lies between the divided matrices is divided along the sequence.
        group: Micro-batches that pass a chunk of layers before the next one; 0 for as many as there are stages.
        alternating: Ranks are counted over stages before data parallel ranks (``--use-tp-pp-dp-mapping``), and not after.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    zero_stage: int = 0
    replicate: int = 1
    sequence: bool = False
    group: int = 0
    alternating: bool = False

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the stage that a rank has, and its place among the stage's ranks.

        Source:
            ``RankGenerator`` in megatron/core/parallel_state.py (0.16.1): the order is tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp
        """
        if not self.alternating:
            return divmod(rank, self.world // self.pipeline)
        block = self.tensor * self.context
        data, rest = divmod(rank, block * self.pipeline)
        stage, own = divmod(rest, block)
        return stage, data * block + own

    def rank_at(self, stage: int, place: int) -> int:
        """Return the rank in a place among a stage's ranks: the inverse of :meth:`place_of`."""
        if not self.alternating:
            return stage * (self.world // self.pipeline) + place
        block = self.tensor * self.context
        data, own = divmod(place, block)
        return (data * self.pipeline + stage) * block + own

    @property
    def data(self) -> int:
        """GPUs that hold the same part of the model and train on micro-batches of their own."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """GPUs among which the states of what is no expert are divided: data and context ranks of a group together."""
        return self.data * self.context // self.replicate

    @property
    def expert_shards(self) -> int:
        """GPUs among which the states of the same experts are divided."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline * self.replicate)


def grid_of(parallel: Parallel, gpus: int | None) -> Grid:
    """Return the grid that degrees make of so many GPUs; what is left of them is data parallel.

    Args:
        gpus: GPUs; None for as many as the degrees name, ``data`` among them.

    Raises:
        InvalidFileError: A degree is below 1, or degrees do not divide the number of GPUs, which is named with the nearest that
            they do.

    Source:
        ``initialize_model_parallel`` in megatron/core/parallel_state.py (0.16.1): experts have a grid of their own,
        with the same stages.
    """
    for name in ("tensor", "pipeline", "context", "expert", "expert_tensor", "replicate"):
        degree = getattr(parallel, name)
        if degree is not None and degree < 1:
            raise InvalidFileError([f"parallel.{name}: expected a whole number, at least 1, got {degree}"])
    model = parallel.tensor * parallel.pipeline * parallel.context
    expert_tensor = parallel.expert_tensor or parallel.tensor
    expert_model = expert_tensor * parallel.expert * parallel.pipeline
    world = gpus or model * max(parallel.data, parallel.replicate)
    copies = " x replicate" if parallel.replicate > 1 else ""
    for words, size in (("tensor x pipeline x context", model), ("expert tensor x expert x pipeline", expert_model)):
        size *= parallel.replicate
        if world % size:
            near = _nearest(world, lcm(model, expert_model) * parallel.replicate) + _nearest_degree(parallel, world)
            raise InvalidFileError([f"parallel: {world:,} GPUs are no multiple of {words}{copies} = {size:,}; {near}"])
    if parallel.data not in (1, world // model, world // model // parallel.replicate):
        text = f"{world:,} GPUs leave {world // model} for data parallelism, not {parallel.data}"
        raise InvalidFileError([f"parallel.data: {text}"])
    alternating = parallel.megatron.alternating and parallel.pipeline > 1
    if alternating and expert_model != model and (parallel.expert > 1 or parallel.expert_tensor):
        apart = f"tensor x context = {model // parallel.pipeline}, and expert tensor x expert = {expert_model // parallel.pipeline}"
        text = f"Megatron-LM counts stages before data parallel ranks where both are divided alike, not with {apart}"
        raise InvalidFileError([f"parallel.megatron.alternating: {text}; leave --use-tp-pp-dp-mapping out"])
    return Grid(
        world=world,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=expert_tensor,
        zero_stage=parallel.zero_stage,
        replicate=parallel.replicate,
        sequence=parallel.sequence,
        group=parallel.megatron.micro_batch_group or 0,
        alternating=alternating,
    )


def _nearest_degree(parallel: Parallel, world: int) -> str:
    """Return the degree next to the only one that is given that divides so many GPUs, in words; nothing where several are given."""
    names = ("tensor", "pipeline", "context", "expert", "expert_tensor", "replicate")
    given = {name: degree for name in names if (degree := getattr(parallel, name)) not in (None, 1)}
    if len(given) != 1:
        return ""
    name, degree = next(iter(given.items()))
    near = nearest_divisor(world, degree)
    return f", or {name.replace('_', ' ')} {near}" if near > 1 else ""


def _nearest(world: int, step: int) -> str:
    """Return the numbers of GPUs next to one that are multiples of a step, in words."""
    below, above = world // step * step, round_up(world, step)
    near = [number for number in sorted((below, above), key=lambda n: abs(n - world)) if 0 < number <= MAXIMUM_GPUS]
    return (
        f"the nearest that is: {near[0]}"
        if near
        else f"it takes {step} at least, and {MAXIMUM_GPUS:,} at most are planned"
    )
