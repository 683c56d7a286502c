"""A model that generates its completions itself, between steps: the forward of the prompts, and that of the last token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memplan.catalog.stacks import Cache
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention, ModelSpec
from memplan.step.kernels.layer_arguments import layer_arguments
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import GENERATION, HEAD, parts_alone
from memplan.step.step_inputs import StepInputs, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, fixed_form, with_cached
from memplan.step.tapes.moments import Instant
from memplan.step.units.collated_rows import ID_BYTES
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.distillation_rules import on_policy

LAST = "for the last token"
"""When an operation runs as a single token goes through the model."""

FORMED_AGAIN = 3
"""Copies of a position's logits in fp32 beside those that the model returns: of this token and the one before, and of their probabilities."""

Tapes = Callable[[int, int, Cache], tuple[StepInputs, ModelOnTape, Sequence[int]]]
"""Returns the model on tape for so many rows and tokens of each, by what it does with its cache, and the values of the quantities."""


@dataclass(frozen=True, slots=True)
class Completions:
    """What is generated together."""

    rows: int  # Completions
    prompt: int  # Tokens of each prompt
    length: int  # Tokens of prompt and completion


def refuse_generation(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise where what a model caches as it generates is not followed.

    Raises:
        CannotAnswerError: Attention without keys of its own, or within a window by a cache of all tokens.
    """
    if not setup.caches_generated and any(run.layer.mixture is not None for run in spec.runs):
        # ``_optimize_model_for_decode`` in transformers/generation/utils.py (5.24.0), by which each routed row has its expert's weights
        raise CannotAnswerError(
            f"{setup.name}: method.rollout: generation by experts without a cache is not modelled, for which their weights are gathered row "
            "by row; use activation_checkpointing: none, or leave method.rollout out"
        )
    parts = [run.layer.attention for run in spec.runs]
    older = setup.stack.loop.cache == "views" and 0 < spec.window <= setup.config.sequence_length
    if older or any(not isinstance(part, Attention | LatentAttention) or _reuses(part) for part in parts):
        why = "a window" if older else "such attention"
        instead = "leave method.rollout out" if setup.generates_rows else "use vllm or server"
        instead = "plan another policy" if setup.names_hidden else instead
        raise CannotAnswerError(
            f"{setup.name}: method.rollout.engine: generation by a model with {why} is not modelled; {instead}"
        )


def _reuses(part: object) -> bool:
    return isinstance(part, Attention) and part.reuses


def generating_setup(setup: TrainingSetup) -> TrainingSetup:
    """Return a setup as it runs while a model generates: with adapters without autocast, which wraps what PEFT wraps the model in.

    Source:
        ``PeftModelForCausalLM.generate`` in peft/peft_model.py (0.21.2), which calls the model inside;
        ``prepare_model`` in accelerate/accelerator.py (1.15.0).
    """
    if setup.config.adapter is None:
        if not on_policy(setup.config.method):
            return setup
        return replace(setup, stack=replace(setup.stack, autocast="always"))  # the wrapped forward is called then
    hidden = setup.format_names["hidden_matrix"]
    compute = hidden if hidden in FLOAT_BYTES else setup.config.compute_dtype
    config = replace(setup.config, compute_dtype=compute)  # type: ignore[arg-type]
    stack = replace(setup.stack, autocast="never")
    return replace(setup, config=config, stack=stack, compute_bytes=FLOAT_BYTES[compute])


def uncached(setup: TrainingSetup) -> TrainingSetup:
    """Return a setup of a model whose layers record no cache of their own."""
    return _caching(setup, "none")


def _caching(setup: TrainingSetup, form: Cache) -> TrainingSetup:
    return replace(setup, stack=replace(setup.stack, loop=replace(setup.stack.loop, cache=form)))


def generating_model(model: Model, setup: TrainingSetup, form: Cache) -> tuple[Model, TrainingSetup]:
    """Return model and setup as they generate, which fill a cache or read it whatever training does with one."""
    if form == "none":
        return model, uncached(setup)
    older = setup.stack.loop.cache
    setup = _caching(setup, older if form == "copies" and older != "none" else form)
    config = replace(setup.config, activation_checkpointing="none")
    setup = replace(setup, config=config, stack=replace(setup.stack, models=replace(setup.stack.models, uncached=())))
    return replace(model, spec=replace(model.spec, use_cache=True)), setup


def generation_moments(
    spec: ModelSpec, setup: TrainingSetup, requested: Completions, tapes: Tapes
) -> Iterator[Instant]:
    """Yield the fullest moments of generation, with fixed sizes: prompts, single tokens, and the choice of each.

    Formula:
        keys and values of ``length - 1`` tokens, of all layers; besides a forward of one token; or logits of one position,
        as the model returns them and three times in fp32

    Source:
        ``_sample`` in transformers/generation/utils.py, ``DynamicLayer.update`` and ``DynamicSlidingWindowLayer.update``, which has a
        look at the last tokens of what it has joined, in cache_utils.py (5.24.0); ``_generate_single_turn`` in
        trl/trainer/grpo_trainer.py (1.16.0).
    """
    rows, prompt, last = requested.rows, requested.prompt, requested.length - 1
    if not setup.caches_generated:
        yield from _whole_forward(tapes, rows, last, 4 * last, "none")
        yield from _chosen(spec, setup, rows, _activations(ID_BYTES * rows * (2 * last + 2)))
        return
    yield from _whole_forward(tapes, rows, prompt, 4 * prompt, "copies")
    taped = tapes(rows, prompt, "copies")[1]
    whole = rows * cached_bytes(spec, taped, prompt, within=False)
    yield from _chosen(spec, setup, rows, _activations(whole + ID_BYTES * rows * (5 * prompt + 2)))
    if last == prompt:
        return
    ids = 2 * last + 3 * prompt
    cached = rows * cached_bytes(spec, taped, last)
    if 0 < spec.window < prompt:  # what was joined first is there until layers have joined it with a token
        yield from _token_forward(tapes, rows, prompt + 1, whole, 5 * prompt)
    yield from _token_forward(tapes, rows, last, cached, ids)
    yield from _chosen(spec, setup, rows, _activations(cached + ID_BYTES * rows * (ids + 2)))


def cached_bytes(spec: ModelSpec, taped: ModelOnTape, tokens: int, *, within: bool = True) -> int:
    """Return what layers cache of a row's tokens, of which those with a window have as many at most, if ``within`` one.

    Args:
        taped: A model whose layers record their cache.
    """
    own = [sum(s.tape.storages[one][2] for one in s.tape.cached) for s in taped.layers]
    kinds = (kind for kind, run in zip(taped.kinds, taped.runs, strict=True) for _ in range(run.count))
    layers = ((own[kind], _attended(spec, number, tokens) if within else tokens) for number, kind in enumerate(kinds))
    return sum(size * count for size, count in layers)


def _attended(spec: ModelSpec, layer: int, tokens: int) -> int:
    """Return how many of so many tokens a layer has in its cache, within its window."""
    return min(tokens, spec.window) if spec.window and layer not in spec.full_layers else tokens


def _chosen(spec: ModelSpec, setup: TrainingSetup, rows: int, beside: Form) -> Iterator[Instant]:
    """Yield the choice of each row's next token."""
    returned = 4 if setup.autocast else setup.compute_bytes
    chosen = constant_form(Part.LOGITS, rows * spec.vocab_size * (returned + 4 * FORMED_AGAIN))
    yield Instant(GENERATION, "choice of a token", chosen + beside)


def _whole_forward(tapes: Tapes, rows: int, tokens: int, ids: int, form: Cache) -> Iterator[Instant]:
    """Yield the moments of a forward of all tokens that there are.

    Args:
        ids: Numbers of 64 bits for each row.
        form: What becomes of their keys and values.

    Source:
        ``generate``, which drops a mask that shuts nothing out, in transformers/generation/utils.py, and ``sdpa_mask``, which expands
        what is alike for all rows, in masking_utils.py (5.24.0).
    """
    inputs, taped, values = tapes(rows, tokens, form)
    own = list(values)
    if inputs.regime.masked and form != "none" and not inputs.setup.config.masks_rows:  # all share booleans of one row
        own[Quantity.SCORES] = values[Quantity.SCORES] // rows
    retained = _activations(ID_BYTES * rows * ids) + fixed_form(_arguments(inputs, rows), own)
    for kind, moment in parts_alone(inputs, taped, ZERO, GENERATION):
        if kind != HEAD:
            yield Instant(GENERATION, f"{moment.operation} as it generates", fixed_form(moment.form, values) + retained)


def _token_forward(tapes: Tapes, rows: int, tokens: int, cached: int, ids: int) -> Iterator[Instant]:
    """Yield the moments of a forward of one token of each row.

    Args:
        tokens: Those of a row that there are then, with this one.
        cached: Keys and values of all layers.
        ids: Numbers of 64 bits for each row.
    """
    inputs, taped, values = tapes(rows, 1, "continued")
    spec, chosen = inputs.spec, _chosen_weights(inputs, taped, rows)
    arguments = fixed_form(_arguments(inputs, rows), with_cached(values, rows, tokens))
    beside = _activations(cached + ID_BYTES * rows * ids) + arguments
    longest: dict[int, int] = {}
    least: dict[int, Form] = {}
    for kind, run in zip(taped.kinds, taped.runs, strict=True):
        reach = max(_attended(spec, run.first + place, tokens) for place in range(run.count))
        longest[kind] = max(reach, longest.get(kind, 0))
    for kind, moment in parts_alone(inputs, taped, ZERO, GENERATION):
        if kind == HEAD:
            continue
        own = with_cached(values, rows, longest.get(kind, tokens))
        form = fixed_form(moment.form, own) + beside
        yield Instant(GENERATION, f"{moment.operation} {LAST}", form)
        least[kind] = min(form, least.get(kind, form), key=lambda one: sum(one.totals()))
    for kind, weights in chosen.items():  # which projections before them have let go of all that they took
        yield Instant(GENERATION, f"weights of chosen experts {LAST}", least[kind] + _activations(weights))


def _arguments(inputs: StepInputs, rows: int) -> Form:
    """Return what layers are given; positions are counted row by row."""
    by_row = inputs.setup.stack.rotary_tables.rows == "batch"
    own = layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked)
    return own + tables_of_graph(inputs) * (1 if by_row else rows)


def _chosen_weights(inputs: StepInputs, taped: ModelOnTape, rows: int) -> dict[int, int]:
    """Return, of each kind of layer with experts, the bytes of their weights that are copied for each routed row of single tokens.

    The copy of the matrices up has a name until that of the matrix down is there; what else a token of each row has then is little.

    Source:
        ``batched_mm_experts_forward`` in transformers/integrations/moe.py, to which ``_optimize_model_for_decode`` in
        transformers/generation/utils.py switches from ``grouped_mm`` (5.24.0).
    """
    element = FLOAT_BYTES.get(inputs.setup.format_names["expert_matrix"], inputs.setup.compute_bytes)
    mixtures = {kind: run.layer.mixture for kind, run in zip(taped.kinds, taped.runs, strict=True)}
    return {
        kind: rows * one.experts_per_token * (3 if one.gated else 2) * width * one.intermediate_size * element
        for kind, one in mixtures.items()
        if one is not None and not (one.every_expert or one.modules)
        for width in (one.latent_size or inputs.spec.hidden_size,)
    }


def _activations(size: int) -> Form:
    return constant_form(Part.ACTIVATIONS, size)
