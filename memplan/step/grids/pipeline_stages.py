"""Which layers a pipeline stage has, as Megatron-LM divides them.

Source:
    ``get_num_layers_to_build`` in megatron/core/transformer/transformer_block.py, ``get_transformer_layer_offset`` in
    transformer_layer.py and ``PipelineParallelLayerLayout`` in pipeline_parallel_layer_layout.py (megatron-core 0.16.1)
"""

import re
from collections.abc import Mapping

from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError
from memplan.step.grids.grid import Grid
from memplan.units import nearest_divisor


@dataclass(frozen=True, slots=True)
class StageSplit:
    """What is told about stages beyond their number."""

    first: int | None = None  # Layers of the first stage; None for as many as of the others
    last: int | None = None  # Layers of the last stage; None for as many as of the others
    embedding: bool = False  # The embedding counts as a layer of the first stage
    loss: bool = False  # The loss counts as a layer of the last stage
    predicted: int = 0  # Layers of multi-token prediction, which the last chunk has, or the one that a layout says
    # Every chunk's layers one by one, over all stages: ``E`` the embedding, ``t`` a layer, ``m`` one of those, ``L`` the head and loss,
    # ``|`` between chunks, ``*`` repeats; None where the rest says it.
    layout: str | None = None


EVEN = StageSplit()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers in a row that one stage computes at once."""

    first: int  # Index of the first of its layers
    count: int  # How many layers it has
    embeds: bool  # It begins with the embedding
    ends: bool  # It ends with the head, and the final norm where nothing predicts further tokens
    predicts: bool = False  # It has the layers of multi-token prediction, with an embedding of their own


def chunks_of(layers: int, grid: Grid, split: StageSplit = EVEN) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage, the first stage first.

    Raises:
        InvalidFileError: Layers do not divide; the message names the nearest number of stages that does.
    """
    if split.layout is not None:
        return _laid_out(layers, grid, split)
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
            ends = (virtual, stage) == last
            chunks[stage].append(Chunk(first, count, (virtual, stage) == (0, 0), ends, ends and split.predicted > 0))
            first += count
    return tuple(map(tuple, chunks))


def _laid_out(layers: int, grid: Grid, split: StageSplit) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage as a layout says them: those of the first chunks of all stages, then of the second ones."""
    if split != StageSplit(predicted=split.predicted, layout=split.layout):
        raise InvalidFileError(["parallel.stage_layout: it says every chunk, and other keys about stages exclude it"])
    parts = chunks_of_layout(split.layout or "")
    given = "".join(parts)
    predicted = f", {split.predicted} m" * bool(split.predicted)
    if given != f"E{'t' * layers}{'m' * split.predicted}L":
        text = f"expected E, {layers} t{predicted} and L in this order, with | between chunks, got {given[:60]!r}"
        raise InvalidFileError([f"parallel.stage_layout: {text}"])
    predicting = [place for place, part in enumerate(parts) if "m" in part]
    if len(predicting) > 1 or any(place < grid.pipeline * (grid.virtual - 1) for place in predicting):
        raise InvalidFileError(["parallel.stage_layout: all m have to be in one chunk, the last one of its stage"])
    if len(parts) != grid.pipeline * grid.virtual:
        raise InvalidFileError(
            [
                f"parallel.stage_layout: {len(parts)} chunks are not those of {grid.pipeline} stages with {grid.virtual} each"
            ]
        )
    chunks, first = [], 0
    for part in parts:
        chunks.append(Chunk(first, part.count("t"), "E" in part, "L" in part, "m" in part))
        first += part.count("t")
    return tuple(tuple(chunks[stage :: grid.pipeline]) for stage in range(grid.pipeline))


def chunks_of_layout(layout: str) -> list[str]:
    """Return what every chunk has, a letter for each part, as ``StageSplit.layout`` says it.

    Backslashes, with which Megatron-LM's own test cases keep a shell from signs, mean nothing.

    Example:
        >>> chunks_of_layout("Et*2|(tt|)*2L")
        ['Ett', 'tt', 'tt', 'L']
    """
    text = layout.replace(",", "").replace("\\", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        text = re.sub(repeated, lambda result: result[1] * int(result[2]), text)
    return text.split("|")


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
            [f"parallel.pipeline: {left} layers cannot be divided among {others} stages{_possible(left, others, told)}"]
        )
    sizes = [told.get(stage, left // others if others else 0) for stage in range(stages)]
    for size in sizes:
        if size % grid.virtual:
            text = f"parallel.virtual: {size} layers of a stage cannot be divided into {grid.virtual} chunks"
            raise InvalidFileError([text + _nearest(size, grid.virtual)])
    return [size // grid.virtual for size in sizes]


def _possible(layers: int, stages: int, told: Mapping[int, int]) -> str:
    """Return the nearest number of stages that divides layers and, unless some are told, the last stage's nearest to an even share."""
    if told or not 1 < stages <= layers:
        return _nearest(layers, stages)
    last = min(range(layers % (stages - 1), layers, stages - 1), key=lambda count: abs(count - layers / stages))
    uneven = f"; parallel.last_stage_layers: {last} leaves {(layers - last) // (stages - 1)} for each other one"
    return _nearest(layers, stages) * (nearest_divisor(layers, stages) > 1) + uneven


def _nearest(layers: int, parts: int) -> str:
    """Return the nearest number of parts that divides so many layers, in words."""
    if layers < 1 or parts < 1:
        return ""
    return f"; the nearest that divides them is {nearest_divisor(layers, parts)}"
