"""A model as each of several GPUs has it that share its matrices: fewer heads, narrower feed-forward parts, fewer words.

Norms and what is added to the residual stream are as wide as before, so that parameters, states, gradients and what products
yield follow from these shapes alone.

Source:
    torchtitan/models/common/decoder_sharding.py (0.3.0): ``wq``, ``wkv``, ``w1``, ``w3``, embedding and head by rows, ``wo``
    and ``w2`` by columns, norms whole; ``Decoder.Config.update_from_config`` in decoder.py: degrees that divide heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import lcm

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.model import Model
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import Attention, LayerRun, MixtureOfExperts, Mlp, ModelSpec
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

MASK_BLOCK = 128
"""Tokens of a block of flex attention's mask (``_DEFAULT_SPARSE_BLOCK_SIZE`` in torch/nn/attention/flex_attention.py, v2.13.0)."""


def divided(model: Model, setup: TrainingSetup) -> Model:
    """Return a model as the first rank has it: itself, where nothing divides it.

    Raises:
        InvalidFileError: A degree that does not divide what it has to, which is named with the nearest that does.
        CannotAnswerError: A part that no stack here divides.
    """
    parallel = setup.config.parallel
    _refuse_length(setup)
    if parallel.expert > 1:
        model = _with_own_experts(model, parallel)
    if parallel.tensor == 1:
        return model
    if model.spec.tie_word_embeddings:
        raise CannotAnswerError(
            f"parallel.tensor: {setup.stack.label} divides the embedding and the head of {model.spec.name} one by one, which "
            "makes two tensors of the one that they were; what becomes of these is not modelled"
        )
    length = setup.config.sequence_length
    if parallel.sequence and length % parallel.tensor:
        raise InvalidFileError(
            [f"parallel.sequence: {parallel.tensor} GPUs do not share a sequence of {length} tokens evenly"]
        )
    spec = _divided_spec(model.spec, parallel.tensor)
    parts = zip(inventory_of(spec), model.inventory, strict=True)
    inventory = tuple([replace(own, divided=whole.shape) if own.shape != whole.shape else own for own, whole in parts])
    return replace(model, spec=spec, inventory=inventory)


def _refuse_length(setup: TrainingSetup) -> None:
    """Refuse sequences that GPUs cannot share: whole blocks of flex attention's mask, for each of these and of those that share matrices."""
    # Source: ``_create_cp_block_mask`` in torch/distributed/tensor/experimental/_context_parallel/_attention.py
    # (v2.13.0).
    ranks, length = setup.config.parallel.context, setup.config.sequence_length
    if ranks == 1 or setup.stack.model_code != "torchtitan":
        return
    step = ranks * lcm(MASK_BLOCK, 2 * setup.config.parallel.tensor)
    if length % step:
        near = max(step, (length + step // 2) // step * step)
        raise InvalidFileError(
            [
                f"parallel.context: {ranks} GPUs do not share a sequence of {length:,} tokens evenly, in blocks of {MASK_BLOCK}; {near:,} they do"
            ]
        )


def _with_own_experts(model: Model, parallel: Parallel) -> Model:
    """Return a model as one of several GPUs has it that share its experts."""
    # Source: ``expert_param_placement_sparse`` in torchtitan/models/common/moe_sharding.py (0.3.0), along the number of
    # experts; ``_token_count_exchange`` in token_dispatcher.py, which counts as many of each rank;
    # ``ParallelDims.build_mesh``.
    name, ranks = model.spec.name, parallel.expert
    parts = [part for run in model.spec.runs if isinstance(part := run.layer.feed_forward, MixtureOfExperts)]
    if not parts:
        raise InvalidFileError([f"parallel.expert: {name} has no experts to share; leave it out"])
    sharing = parallel.shards * parallel.tensor

    def problem(degree: int) -> str:
        if odd := next((part.num_experts for part in parts if part.num_experts % degree), 0):
            return f"do not share {odd} experts of {name} evenly"
        if sharing % degree:
            return f"are no divisor of the {sharing:,} of a group"
        own, each = min(part.num_experts for part in parts) // degree, sharing // degree
        widths = (model.spec.hidden_size, *(part.intermediate_size for part in parts))
        if each > own and (odd := next((width for width in widths if width % each), 0)):
            return f"leave {each} for each expert, which do not share its width of {odd} evenly"
        return ""

    if reason := problem(ranks):
        do = "do" if (near := _nearest(ranks, lambda degree: not problem(degree))) > 1 else "does"
        raise InvalidFileError([f"parallel.expert: {ranks} GPUs {reason}; {near} {do}"])
    spec = _own_experts(model.spec, ranks, parallel.routing == "worst")
    return replace(model, spec=spec, inventory=inventory_of(spec))


def _nearest(ranks: int, divides: Callable[[int], bool]) -> int:
    """Return the number of GPUs nearest to one that divides, the smaller of two; 1, which is as without."""
    near = (n for step in range(1, ranks) for n in (ranks - step, ranks + step) if n > 1 and divides(n))
    return next(near, 1)


@lru_cache(maxsize=128)
def _own_experts(spec: ModelSpec, ranks: int, flooded: bool) -> ModelSpec:
    runs = (
        replace(run, layer=replace(run.layer, feed_forward=replace(part, ranks=ranks, flooded=flooded)))
        if isinstance(part := run.layer.feed_forward, MixtureOfExperts)
        else run
        for run in spec.runs
    )
    return replace(spec, runs=tuple(runs))


@lru_cache(maxsize=128)
def _divided_spec(spec: ModelSpec, ranks: int) -> ModelSpec:
    runs = tuple([_divided_run(spec, run, ranks) for run in spec.runs])
    return replace(spec, vocab_size=ceil_div(spec.vocab_size, ranks), runs=runs)


def _divided_run(spec: ModelSpec, run: LayerRun, ranks: int) -> LayerRun:
    heads, part = run.layer.attention, run.layer.feed_forward
    apart = isinstance(part, MixtureOfExperts) and part.ranks > 1
    if not isinstance(heads, Attention) or not (isinstance(part, Mlp) or apart):
        raise CannotAnswerError(f"parallel.tensor: {spec.name} has layers that are not modelled divided; use 1")
    sizes = {"attention heads": heads.num_heads, "key and value heads": heads.num_key_value_heads}
    if isinstance(part, Mlp):
        sizes["columns of the feed-forward part"] = part.intermediate_size
    for what, size in sizes.items():
        if size % ranks:
            near = max(n for n in range(1, ranks) if all(number % n == 0 for number in sizes.values()))
            raise InvalidFileError(
                [f"parallel.tensor: {ranks} GPUs do not share {size} {what} of {spec.name} evenly; {near} do"]
            )
    attention = replace(
        heads, num_heads=heads.num_heads // ranks, num_key_value_heads=heads.num_key_value_heads // ranks
    )
    if isinstance(part, Mlp):
        part = replace(part, intermediate_size=part.intermediate_size // ranks)
    return replace(run, layer=replace(run.layer, attention=attention, feed_forward=part))
