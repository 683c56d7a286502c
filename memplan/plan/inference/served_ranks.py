"""A model as each GPU of a serving engine has it where several share its matrices.

Heads, feed-forward parts and the width of every expert are divided; norms, routers, learned positions and the projections
that latent attention compresses with are whole on each. Where there are fewer key and value heads than GPUs, each has one.

Source:
    vLLM 0.10: model_executor/layers/linear.py (``QKVParallelLinear``), layers/vocab_parallel_embedding.py
    (``DEFAULT_VOCAB_PADDING_SIZE``), layers/fused_moe/layer.py (``intermediate_size_per_partition``), models/deepseek_v2.py
    (``kv_a_proj_with_mqa`` is replicated), config ``verify_with_parallel_config``: a degree divides the heads.
"""

from collections.abc import Iterator
from dataclasses import replace

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.model import Model
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import Attention, LatentAttention, Layer, LayerRun, MixtureOfExperts, ModelSpec
from memplan.units import round_up

VOCABULARY_PADDING = 64
"""Words that a vocabulary is padded to a multiple of before it is divided."""


def served_shard(model: Model, ranks: int) -> Model:
    """Return a model as one of several GPUs has it, itself for one.

    Raises:
        InvalidFileError: The number of GPUs does not divide what it has to; the nearest that does is named.
        CannotAnswerError: A part whose division is not modelled.
    """
    if ranks == 1:
        return model
    spec = model.spec
    if spec.tower is not None:
        raise CannotAnswerError(f"{spec.name}: how GPUs share a vision tower in serving is not modelled")
    if problem := _problem(spec, ranks):
        near = max(degree for degree in range(1, ranks) if not _problem(spec, degree))
        raise InvalidFileError(
            [f"--gpus {ranks}: {problem} of {spec.name} cannot be shared evenly; {near} GPU{'s' * (near > 1)} can"]
        )
    runs = tuple(_shared_run(spec, run, ranks) for run in spec.runs)
    own = replace(spec, vocab_size=round_up(spec.vocab_size, VOCABULARY_PADDING) // ranks, runs=runs)
    return replace(model, spec=own, inventory=inventory_of(own))


def _problem(spec: ModelSpec, ranks: int) -> str:
    """Return what so many GPUs cannot share evenly, or nothing."""
    words = ("padded words", round_up(spec.vocab_size, VOCABULARY_PADDING), False)
    sizes = (words, *(share for run in spec.runs for share in _shares(run.layer)))
    return next(
        (f"{size:,} {what}" for what, size, copied in sizes if size % ranks and not (copied and ranks % size == 0)), ""
    )


def _shares(layer: Layer) -> Iterator[tuple[str, int, bool]]:
    """Yield what GPUs share of a layer: its name, how many, and whether GPUs beyond these have copies."""
    if isinstance(layer.attention, Attention | LatentAttention):
        yield "attention heads", layer.attention.num_heads, False
    if isinstance(layer.attention, Attention):
        yield "key and value heads", layer.attention.num_key_value_heads, True
    for part in (layer.feed_forward, layer.experts):
        if part is not None:
            yield "columns of the feed-forward part", part.intermediate_size, False
        if isinstance(part, MixtureOfExperts):
            yield "columns of the shared expert", part.shared_intermediate_size, False


def _shared_run(spec: ModelSpec, run: LayerRun, ranks: int) -> LayerRun:
    layer, heads = run.layer, run.layer.attention
    if layer.beside is not None or not isinstance(heads, Attention | LatentAttention):
        raise CannotAnswerError(f"{spec.name}: how GPUs share its layers in serving is not modelled")
    own: Attention | LatentAttention = replace(heads, num_heads=heads.num_heads // ranks)
    if isinstance(own, Attention):
        own = replace(own, num_key_value_heads=max(1, own.num_key_value_heads // ranks))
    experts = None if layer.experts is None else _shared_experts(layer.experts, ranks)
    part = layer.feed_forward
    if isinstance(part, MixtureOfExperts):
        part = _shared_experts(part, ranks)
    elif part is not None:
        part = replace(part, intermediate_size=part.intermediate_size // ranks)
    return replace(run, layer=replace(layer, attention=own, feed_forward=part, experts=experts))


def _shared_experts(part: MixtureOfExperts, ranks: int) -> MixtureOfExperts:
    shared = part.shared_intermediate_size // ranks
    return replace(part, intermediate_size=part.intermediate_size // ranks, shared_intermediate_size=shared)
