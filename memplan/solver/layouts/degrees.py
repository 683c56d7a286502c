"""The axes along which GPUs may share a job: each widens a config into those with every degree on it.

Another kind of parallelism joins with a function and one line of ``AXES``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.step.grids.grid import grid_of
from memplan.step.states.parallel_shards import FULLY_SHARDED


@dataclass(frozen=True, slots=True)
class LayoutSpace:
    """What layouts are asked for."""

    gpus: int  # GPUs in all
    per_node: int  # GPUs of a node
    fixed: Collection[str] = ()  # Keys of ``parallel`` that stay as they are
    experts: int = 0  # Experts of each layer of the model, which its GPUs may share; 0 for none
    own_precision: bool = True  # Whether dtypes stay as they are, too, where an engine wants others


Axis = Callable[[TrainingConfig, Stack, LayoutSpace], Iterator[TrainingConfig]]


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


def _tensor(config: TrainingConfig, stack: Stack, requested: LayoutSpace) -> Iterator[TrainingConfig]:
    """Yield every number of GPUs of a node that may share each layer's matrices."""
    for degree in divisors(requested.gpus) if "tensor" in stack.divides else (1,):
        if degree == 1 or (degree <= requested.per_node and requested.per_node % degree == 0):
            yield _with(config, tensor=degree)


def _sequence(config: TrainingConfig, stack: Stack, _: LayoutSpace) -> Iterator[TrainingConfig]:
    """Yield whether these share what lies between the matrices too."""
    yield config
    if config.parallel.tensor > 1 and "sequence" in stack.divides:
        yield _with(config, sequence=True)


def _sharding(config: TrainingConfig, stack: Stack, requested: LayoutSpace) -> Iterator[TrainingConfig]:
    """Yield what data parallel GPUs divide: everything or nothing, and DeepSpeed's stages where the stack runs it."""
    for stage in (FULLY_SHARDED,) if "tensor" in stack.divides else (FULLY_SHARDED, 0):
        yield _with(config, zero_stage=stage)
    if stack.model_code != "transformers" or config.parallel.tensor > 1:
        return
    if not requested.own_precision:  # DeepSpeed keeps the fp32 weights itself, beside 16-bit ones
        config = replace(config, weights={"default": config.compute_dtype}, master_weights="fp32")
    for stage in (1, 2, 3):
        yield _with(config, engine="deepspeed", zero_stage=stage)


def _groups(config: TrainingConfig, stack: Stack, requested: LayoutSpace) -> Iterator[TrainingConfig]:
    """Yield how many groups may each divide everything anew, two GPUs at least in each."""
    yield config
    parallel = config.parallel
    if "replicate" in stack.divides and parallel.engine == "torch" and parallel.zero_stage == FULLY_SHARDED:
        for number in divisors(requested.gpus // parallel.tensor)[1:-1]:
            yield _with(config, replicate=number)


def _experts(config: TrainingConfig, stack: Stack, requested: LayoutSpace) -> Iterator[TrainingConfig]:
    """Yield how many GPUs may share the experts, which torchtitan gives its parts of the sequence where GPUs share matrices too."""
    yield config
    parallel = config.parallel
    if not requested.experts or "routing" not in stack.divides or (parallel.tensor > 1 and not parallel.sequence):
        return
    sharing = requested.gpus // (parallel.tensor * parallel.replicate) * parallel.tensor
    for degree in divisors(requested.experts)[1:]:
        if sharing % degree == 0:
            yield _with(config, expert=degree)


AXES: Mapping[str, Axis] = {
    "tensor": _tensor,
    "sequence": _sequence,
    "zero_stage": _sharding,
    "replicate": _groups,
    "expert": _experts,
}
"""Key of ``parallel`` -> what it may be."""


def layouts(config: TrainingConfig, stack: Stack, requested: LayoutSpace) -> Iterator[TrainingConfig]:
    """Yield a config with every layout of so many GPUs; what is left by the degrees is data parallel.

    Raises:
        CannotAnswerError: A pipeline, or sequences that GPUs share.
        InvalidFileError: No layout divides so many GPUs, which are named with the nearest that it does.
    """
    if config.parallel.pipeline > 1:
        raise CannotAnswerError("parallel.pipeline: suggest does not search pipelines yet; memplan fit plans one")
    if config.parallel.context > 1:
        raise CannotAnswerError(
            "parallel.context: suggest does not search shared sequences yet; memplan fit plans them"
        )
    result = [config]
    for key, axis in AXES.items():
        if key not in requested.fixed:
            result = [wider for one in result for wider in axis(one, stack, requested)]
    whole = [one for one in result if requested.gpus % one.parallel.tensor == 0]
    if not whole:
        grid_of(replace(result[0].parallel, data=1, expert_tensor=1), requested.gpus)
    for one in whole:
        yield _with(one, data=requested.gpus // one.parallel.tensor)


def _with(config: TrainingConfig, **degrees: Any) -> TrainingConfig:
    return replace(config, parallel=replace(config.parallel, **degrees))
