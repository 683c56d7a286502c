"""Which layers a pipeline stage has, as Megatron-LM divides them.

Source:
    ``get_num_layers_to_build`` in megatron/core/transformer/transformer_block.py and ``get_transformer_layer_offset`` in
    transformer_layer.py (megatron-core 0.16.1)
"""

from __future__ import annotations

from memplan.errors import InvalidFileError
from memplan.step.grids.grid import Grid
from memplan.values import dataclass


@dataclass(frozen=True, slots=True)
class StageSplit:
    """What is told about stages beyond their number.

    Attributes:
        first: Layers of the first stage; None for as many as of the others.
        last: Layers of the last stage; None for as many as of the others.
        embedding: The embedding counts as a layer of the first stage.
        loss: The loss counts as a layer of the last stage.
    """

    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False


EVEN = StageSplit()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers in a row that one stage computes at once.

    Attributes:
        first: Index of the first of its layers.
        count: How many layers it has.
        embeds: It begins with the embedding.
        ends: It ends with the final norm and the head.
    """

    first: int
    count: int
    embeds: bool
    ends: bool


def chunks_of(layers: int, grid: Grid, split: StageSplit = EVEN) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage, the first stage first.

    Args:
        layers: Layers of the model.
        grid: Degrees of parallelism.
        split: What is told about stages.

    Raises:
        InvalidFileError: Layers do not divide; the message names the nearest number of stages that does.
    """
    sizes = _layers_of_chunks(layers, grid, split)
    chunks: list[list[Chunk]] = [[] for _ in range(grid.pipeline)]
    first, last = 0, (grid.virtual - 1, grid.pipeline - 1)
    for virtual in range(grid.virtual):
        for stage in range(grid.pipeline):
            count = sizes[stage]
            count -= int(split.embedding and (virtual, stage) == (0, 0))
            count -= int(split.loss and (virtual, stage) == last)
            if count < 0:
                raise InvalidFileError([f"parallel.pipeline: stage {stage} has no layers left"])
            chunks[stage].append(Chunk(first, count, (virtual, stage) == (0, 0), (virtual, stage) == last))
            first += count
    return tuple(map(tuple, chunks))


def _layers_of_chunks(layers: int, grid: Grid, split: StageSplit) -> list[int]:
    """Return how many layers each chunk of a stage has, before those that stand for embedding and loss are taken off."""
    stages = grid.pipeline
    if grid.virtual > 1 and stages == 1:
        raise InvalidFileError(["parallel.virtual: one stage has no virtual stages; set parallel.pipeline"])
    ends = {0: split.first, stages - 1: split.last}
    told = {stage: count for stage, count in ends.items() if count is not None}
    if told and (split.embedding or split.loss):
        raise InvalidFileError(
            ["parallel: layers of the first or last stage and embedding or loss as a layer exclude each other"]
        )
    left, others = layers + split.embedding + split.loss - sum(told.values()), stages - len(told)
    if left < 0:
        text = f"parallel: the first and last stage have {sum(told.values())} layers, and the model {layers}"
        raise InvalidFileError([text])
    if left % others if others else left:
        raise InvalidFileError(
            [f"parallel.pipeline: {left} layers cannot be divided among {others} stages{_nearest(left, others)}"]
        )
    sizes = [told.get(stage, left // others if others else 0) for stage in range(stages)]
    for size in sizes:
        if size % grid.virtual:
            text = f"parallel.virtual: {size} layers of a stage cannot be divided into {grid.virtual} chunks"
            raise InvalidFileError([text + _nearest(size, grid.virtual)])
    return [size // grid.virtual for size in sizes]


def _nearest(layers: int, parts: int) -> str:
    """Return the nearest number of parts that divides so many layers, in words."""
    if layers < 1 or parts < 1:
        return ""
    near = min((n for n in range(1, layers + 1) if layers % n == 0), key=lambda n: (abs(n - parts), n))
    return f"; the nearest that divides them is {near}"
