"""A model that generates its completions itself, between steps: the forward of the prompts, and that of the last token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, ModelSpec
from memplan.step.kernels.layer_arguments import layer_arguments
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import GENERATION, HEAD, parts_alone
from memplan.step.step_inputs import StepInputs, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, constant_form, fixed_form
from memplan.step.tapes.moments import Instant
from memplan.step.units.collated_rows import ID_BYTES
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.distillation_rules import on_policy

BEFORE_CACHE = frozenset(("attention",))
"""Operations of a layer at which what it caches is what it has just formed."""

LAST = "for the last token"
"""When an operation runs as a single token goes through the model."""

FORMED_AGAIN = 3
"""Copies of a position's logits in fp32 beside those that the model returns: of this token and the one before, and of their probabilities."""

Tapes = Callable[[int, int], tuple[StepInputs, ModelOnTape, Sequence[int]]]
"""Returns the model on tape for so many rows and tokens of each, and the values of the quantities."""


@dataclass(frozen=True, slots=True)
class Completions:
    """What is generated together."""

    rows: int  # Completions
    prompt: int  # Tokens of each prompt
    length: int  # Tokens of prompt and completion


def refuse_generation(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise where what a model caches as it generates is not followed.

    Raises:
        CannotAnswerError: Attention step by step, within a window, over compressed keys, or without keys.
    """
    if not setup.caches_generated and any(run.layer.mixture is not None for run in spec.runs):
        # ``_optimize_model_for_decode`` in transformers/generation/utils.py (5.24.0), by which each routed row has its expert's weights
        raise CannotAnswerError(
            f"{setup.name}: method.rollout: generation by experts without a cache is not modelled, for which their weights are gathered row "
            "by row; use activation_checkpointing: none, or leave method.rollout out"
        )
    parts = {type(run.layer.attention) for run in spec.runs}
    within = 0 < spec.window <= setup.config.sequence_length
    if parts != {Attention} or within or setup.profile.attention == "eager":
        why = "a window" if within else "eager attention" if parts == {Attention} else "such attention"
        instead = "leave method.rollout out" if setup.generates_rows else "use vllm or server"
        instead = "plan another policy" if setup.names_hidden else instead
        raise CannotAnswerError(
            f"{setup.name}: method.rollout.engine: generation by a model with {why} is not modelled; {instead}"
        )


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
    return replace(setup, stack=replace(setup.stack, loop=replace(setup.stack.loop, cache="none")))


def generation_moments(
    spec: ModelSpec, setup: TrainingSetup, requested: Completions, tapes: Tapes
) -> Iterator[Instant]:
    """Yield the fullest moments of generation, with fixed sizes: prompts, the last token, and the choice of it.

    Formula:
        keys and values of ``length - 1`` tokens, of all layers; besides a forward of one token; or logits of one position,
        as the model returns them and three times in fp32

    Source:
        ``_sample`` in transformers/generation/utils.py, ``DynamicLayer.update`` in cache_utils.py (5.23.0);
        ``_generate_single_turn`` in trl/trainer/grpo_trainer.py (1.16.0).
    """
    rows, prompt, last = requested.rows, requested.prompt, requested.length - 1
    by_layer = [2 * run.layer.attention.key_value_size for run in spec.runs for _ in range(run.count)]  # type: ignore[union-attr]
    if not setup.caches_generated:
        yield from _forward(tapes, (rows, last), 0, 0, 4 * last)
        yield from _chosen(spec, setup, rows, _activations(ID_BYTES * rows * (2 * last + 2)))
        return
    token = rows * max(setup.compute_bytes, setup.residual_bytes)  # keys are as wide as the tables that turn them
    yield from _forward(
        tapes, (rows, prompt), token * sum(by_layer) * prompt, token * by_layer[-1] * prompt, 4 * prompt
    )
    cached, ids = token * sum(by_layer) * last, 2 * last + 3 * prompt
    if last > prompt:
        old = token * by_layer[-1] // 2 * (last - 1)  # values of one layer, beside those with one more token
        yield from _forward(tapes, (rows, 1), cached, -old, ids)
    yield from _chosen(spec, setup, rows, _activations(cached + ID_BYTES * rows * (ids + 2)))


def _chosen(spec: ModelSpec, setup: TrainingSetup, rows: int, beside: Form) -> Iterator[Instant]:
    """Yield the choice of each row's next token."""
    returned = 4 if setup.autocast else setup.compute_bytes
    chosen = constant_form(Part.LOGITS, rows * spec.vocab_size * (returned + 4 * FORMED_AGAIN))
    yield Instant(GENERATION, "choice of a token", chosen + beside)


def _forward(tapes: Tapes, shape: tuple[int, int], cached: int, own: int, ids: int) -> Iterator[Instant]:
    """Yield the moments of a forward of prompts or of a token.

    Args:
        shape: Rows and tokens of each.
        cached: Keys and values of all layers.
        own: Those of the layer that runs which its own operations have already, or less than nothing for what is there besides.
        ids: Numbers of 64 bits for each row.
    """
    inputs, taped, values = tapes(*shape)
    arguments = layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked)
    by_row = inputs.setup.stack.rotary_tables.rows == "batch"
    arguments += tables_of_graph(inputs) * (1 if by_row else shape[0])  # positions are counted row by row
    retained = _activations(cached + ID_BYTES * shape[0] * ids)
    when = "as it generates" if shape[1] > 1 else LAST
    chosen = _chosen_weights(inputs, taped, shape[0]) if when == LAST else {}
    for kind, moment in parts_alone(inputs, taped, ZERO, GENERATION, arguments):
        if kind == HEAD:
            continue
        attends = moment.operation in BEFORE_CACHE
        form = fixed_form(moment.form, values) + retained - _activations(own if attends else 0)
        yield Instant(GENERATION, f"{moment.operation} {when}", form)
        if kind in chosen and not attends:
            yield Instant(GENERATION, f"weights of chosen experts {when}", form + _activations(chosen[kind]))


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
