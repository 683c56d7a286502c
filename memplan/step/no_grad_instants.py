"""The instants of forwards without gradients, and of what a loop does with their results: a reference model, metrics, evaluation."""

from collections.abc import Iterator
from dataclasses import replace

from memplan.model.spec import ModelSpec
from memplan.step.alive_around_layers import returned_before
from memplan.step.ends.end_settings import embeds_with_gradient
from memplan.step.ends.head_on_tape import head_on_tape
from memplan.step.kernels.family_code import dropouts, family_code
from memplan.step.kernels.layer_arguments import layer_arguments, position_quantity
from memplan.step.losses.logit_metrics import WholeLogits
from memplan.step.model_on_tape import ModelOnTape, model_on_tape
from memplan.step.playing.peak_layers import last_places
from memplan.step.playing.section import Section
from memplan.step.step_inputs import StepInputs, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.moments import BEHIND_REGION, Instant
from memplan.step.tensors.tensor_states import reference_setup
from memplan.step.units.collated_rows import (
    ID_BYTES,
    LABEL_BYTES,
    MASK_BYTES,
    evaluated_rows,
    joined_ids,
    keeps_old_log_probabilities,
    token_types,
)
from memplan.training.adapters import REFERENCE

STATISTICS_BYTES = 4 + 4 + 4 + 1
"""What a loss over preferences still has names for beside labels: log-probability, entropy, mean of logits and whether the
target came first (``FusedCausalLMOutput`` in trl/trainer/utils.py, 1.16.0)."""

EVALUATION = "evaluation"
"""The instant of a forward that evaluates."""

GENERATION = "generation"
"""The instant at which completions are generated and their log-probabilities computed."""

PLACE = "forward of a second model"
"""Operation of a moment in whose place those of a second model's forward are put."""

EMBEDDING, HEAD = -1, -2
"""Stand for the embedding, and for norm and head, among the kinds of layers."""


def forward_only_instants(inputs: StepInputs, taped: ModelOnTape, around: Form) -> Iterator[Instant]:
    """Yield the moments between a forward and its backward: a reference model's forward, and metrics.

    Args:
        taped: The model that is trained, on tape.
        around: What its forward leaves.
    """
    if inputs.setup.names_hidden:
        return  # all is compared that has been generated, before the first step of a phase
    named = around + _whole_logits(inputs, taped).named(graph=True)
    if inputs.setup.config.method.stage == "kto" and taped.settings.metrics == "softmax":
        yield from _mismatched_forwards(inputs, taped, named, "forward")
    else:
        yield from _reference_forward(inputs, taped, named, "forward")
    for form in _whole_logits(inputs, taped).measured(around, graph=True):
        yield Instant("forward", "metrics", form)


def places_beside(inputs: StepInputs, taped: ModelOnTape, around: Form) -> Iterator[Instant]:
    """Yield the moment between a model's forward and its loss at which a second model runs.

    Args:
        around: What is there then but what the end of the model has left.
    """
    if inputs.setup.teacher is None:
        return
    entry = taped.head.section.entry
    fused = inputs.setup.profile.loss == "fused-divergence"
    settings = replace(taped.settings, loss="hidden-states" if fused else "logits")
    section = head_on_tape(settings, taped.weights, entry.needs_gradient, entry.element_bytes).section
    states = single_form(Part.ACTIVATIONS, section.output.quantity, section.output.coefficient)
    named = states if fused else _compared(inputs, taped)
    yield Instant("forward", PLACE, around + section.played("first").saved + named)


def evaluation(inputs: StepInputs, taped: ModelOnTape, around: Form) -> Iterator[Instant]:
    """Yield the moments of a forward that evaluates, of a reference model's where logits are whole, and of metrics."""
    around += joined_ids(inputs.setup, forward=True) + evaluated_rows(
        inputs.setup, token_types(inputs.spec, inputs.setup)
    )
    taped = evaluated_model(inputs, taped)
    yield from forward_alone(inputs, taped, around, EVALUATION, forward_arguments(inputs))
    if named := _whole_logits(inputs, taped).named(graph=False):
        yield from _reference_forward(inputs, taped, around + named, EVALUATION)
    if inputs.setup.teacher is not None:
        yield Instant(EVALUATION, PLACE, around + _compared(inputs, taped))
    for form in _whole_logits(inputs, taped).measured(around, graph=False):
        yield Instant(EVALUATION, "metrics", form)


def _compared(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return what a forward has yielded, which has a name while the teacher's runs: whole logits, or hidden states where it evaluates."""
    setup = inputs.setup
    if setup.profile.loss == "fused-divergence":
        return single_form(Part.ACTIVATIONS, Quantity.TOKENS, inputs.spec.hidden_size * setup.residual_bytes)
    width = 4 if setup.autocast else setup.compute_bytes
    return single_form(Part.LOGITS, Quantity.TOKENS, width * taped.settings.vocab_size)


def generation(inputs: StepInputs, taped: ModelOnTape, around: Form) -> Iterator[Instant]:
    """Yield the moments at which completions are scored: forwards of a micro-batch each, of the model and of a reference.

    Rows as they were generated are there beside those that steps have learnt from, and joined to their prompts; then in
    another order. What forwards yield of all positions stays until the last of them is done.

    Source:
        ``_generate_and_score_completions``, ``_get_per_token_logps_and_entropies`` and ``_prepare_inputs`` in
        trl/trainer/grpo_trainer.py (1.16.0).
    """
    setup, together = inputs.setup, inputs.setup.generated_micro_batches
    rows = single_form(Part.ACTIVATIONS, Quantity.TOKENS, (ID_BYTES + MASK_BYTES) * together)
    around += rows * 2
    yield Instant(GENERATION, "rows in another order", around)
    logs = single_form(Part.ACTIVATIONS, Quantity.PREDICTED_TOKENS, 4 * (together - 1))
    arguments = forward_arguments(inputs)
    several = 1 if together > 1 else 0
    if setup.copies_logits:  # the last ones keep their name until the next are there
        last = _whole_logits(inputs, taped).form(Quantity.ANSWER_TOKENS) * several
        cast = single_form(Part.LOGITS, Quantity.ANSWERED_TOKENS, (4 + setup.compute_bytes) * taped.settings.vocab_size)
        yield Instant(GENERATION, "logits of the next rows", around + last + cast)
        scored = around + single_form(Part.ACTIVATIONS, Quantity.ANSWER_TOKENS, 4 * (together - 1))
        before = last
    else:
        before = single_form(Part.ACTIVATIONS, Quantity.PREDICTED_TOKENS, 4 + 1) * several
        scored = around + logs + single_form(Part.ACTIVATIONS, Quantity.TOKENS, LABEL_BYTES)
    if keeps_old_log_probabilities(setup):
        yield from forward_alone(inputs, taped, scored + before, GENERATION, arguments, head=not setup.copies_logits)
        yield from forward_alone(inputs, taped, scored, GENERATION, arguments)
    scored += single_form(Part.ACTIVATIONS, Quantity.ANSWER_TOKENS, 4 * together * keeps_old_log_probabilities(setup))
    yield from _reference_moments(inputs, taped, scored, GENERATION)


def _reference_forward(inputs: StepInputs, taped: ModelOnTape, around: Form, name: str) -> Iterator[Instant]:
    """Yield the moments of a reference model's forward, which runs before backward, beside all that forward has saved."""
    if inputs.setup.answer_length:
        return  # it has been compared with before
    around += beside_reference(inputs)
    if taped.settings.metrics == "softmax":
        around += joined_ids(inputs.setup, forward=True)
    yield from _reference_moments(inputs, taped, around, name)


def beside_reference(inputs: StepInputs) -> Form:
    """Return what is there of a forward's results, and has names, while a reference model runs: nothing of whole logits, told elsewhere.

    Source:
        ``_compute_loss`` in trl/trainer/dpo_trainer.py and kto_trainer.py (1.16.0).
    """
    if inputs.setup.profile.loss == "log-probabilities":
        return ZERO
    labels = single_form(Part.ACTIVATIONS, Quantity.TOKENS, LABEL_BYTES)
    return labels + single_form(Part.LOGITS, Quantity.PREDICTED_TOKENS, STATISTICS_BYTES)


def _mismatched_forwards(inputs: StepInputs, taped: ModelOnTape, around: Form, name: str) -> Iterator[Instant]:
    """Yield the moments of forwards on mismatched answers, by the model and by its reference, beside logits of the others.

    Logits of desirable and undesirable answers are copied before the next model's forward, and stay until the loss is there.

    Args:
        around: What the model's forward leaves, with its logits.
    """
    # Source: ``concatenated_forward`` and ``get_batch_loss_metrics`` in llamafactory/train/kto/trainer.py (0.9.5).
    whole, ids = _whole_logits(inputs, taped).form(Quantity.TOKENS), joined_ids(inputs.setup, forward=True)
    yield from forward_alone(inputs, taped, around + ids, name, forward_arguments(inputs))
    yield Instant(name, "logits of desirable and undesirable answers", around + whole)
    yield from _reference_moments(inputs, taped, around + ids, name)
    yield from _reference_moments(inputs, taped, around + ids + whole, name)
    yield Instant(name, "logits of desirable and undesirable answers", around + whole * 2)


def forward_arguments(inputs: StepInputs) -> Form:
    """Return what layers of a forward are given."""
    return layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked) + tables_of_graph(inputs)


def reference_model(inputs: StepInputs, taped: ModelOnTape) -> ModelOnTape | None:
    """Return the reference model on tape, as its forward runs; None where there is none, or its results are known.

    Args:
        taped: The model that is trained.
    """
    if inputs.setup.config.method.reference_model in ("none", "precomputed"):
        return None
    states = inputs.states
    if inputs.setup.config.adapter is not None:
        setup = replace(inputs.setup, config=replace(inputs.setup.config, adapter=None))
        base = tuple(entry for entry in states.tensors if ".lora_" not in entry.tensor.name)
        return model_on_tape(replace(inputs, setup=setup, states=replace(states, tensors=base)))
    if inputs.setup.stack.loop.own_comparison:
        # its weights need no gradient, so that autocast keeps no casts of them (swift/pipelines/train/rlhf.py, 4.6.0)
        still = tuple(replace(entry, trainable=False) for entry in states.tensors)
        return model_on_tape(replace(inputs, states=replace(states, tensors=still)))
    if (narrow := reference_setup(inputs.setup)) is not inputs.setup:
        copies = tuple(entry for entry in states.tensors if entry.tensor.name.startswith(REFERENCE))
        named = tuple(replace(e, tensor=replace(e.tensor, name=e.tensor.name.removeprefix(REFERENCE))) for e in copies)
        return model_on_tape(replace(inputs, setup=narrow, states=replace(states, tensors=named)))
    return taped


def _reference_moments(inputs: StepInputs, taped: ModelOnTape, around: Form, name: str) -> Iterator[Instant]:
    """Yield the moments of a forward of the reference model, where there is one that runs."""
    if (reference := reference_model(inputs, taped)) is None:
        return
    if inputs.setup.config.adapter is None and not inputs.setup.stack.loop.own_comparison:
        inputs = replace(inputs, setup=reference_setup(inputs.setup))
    for moment in forward_alone(inputs, reference, around, name, forward_arguments(inputs)):
        yield replace(moment, operation=f"reference: {moment.operation}")


def forward_alone(
    inputs: StepInputs, taped: ModelOnTape, around: Form, name: str, arguments: Form = ZERO, *, head: bool = True
) -> Iterator[Instant]:
    """Yield the moments of a forward without gradients, whose loss is over all logits at once.

    Args:
        around: What is there throughout.
        head: Whether head and loss run too.
    """
    for kind, moment in parts_alone(inputs, taped, around, name, arguments):
        if head or kind != HEAD:
            yield moment


def parts_alone(
    inputs: StepInputs, taped: ModelOnTape, around: Form, name: str, arguments: Form = ZERO, *, loss_inside: bool = True
) -> Iterator[tuple[int, Instant]]:
    """Yield the same, each moment with the kind of layer that it is in, or the end."""
    for kind, below, section in places_alone(inputs, taped, around, arguments, loss_inside=loss_inside):
        for moment in section.evaluated().forward:
            yield kind, moment.around(around if kind == HEAD and moment.name == BEHIND_REGION else below, name)


def places_alone(
    inputs: StepInputs, taped: ModelOnTape, around: Form, arguments: Form = ZERO, *, loss_inside: bool = True
) -> Iterator[tuple[int, Form, Section]]:
    """Yield the last place of each kind of layer and the ends, with what lies around it and what runs there."""
    sections = {EMBEDDING: taped.embedding, **dict(enumerate(taped.layers))}
    runs = [(kind, run.count) for kind, run in zip(taped.kinds, taped.runs, strict=True)]
    left = {kind: section.evaluated().carried for kind, section in sections.items()}
    for kind, section in enumerate(taped.layers):
        left[kind] += sum((single_form(*section.tape.storages[own]) for own in section.tape.cached), ZERO)
    places, behind = last_places([(EMBEDDING, 1), *runs], left, around)
    named = _named_embeddings(inputs)
    last = {kind: run.first + run.count - 1 for kind, run in zip(taped.kinds, taped.runs, strict=True)}
    cached = [last[kind] for kind in taped.kinds if taped.layers[kind].tape.cached]
    for kind, below in places:
        first = (
            kind in (EMBEDDING, taped.kinds[0]) and taped.counts().get(kind, 1) == 1
        )  # given the embeddings themselves
        if kind != EMBEDDING:
            below += (
                returned_before(taped, kind, graph=False) + taped.handed.made + taped.handed.read(last[kind], cached)
            )
        yield kind, below + arguments + (ZERO if first else named), sections[kind]
    yield HEAD, behind, taped.head_alone(loss_inside=loss_inside)


def names_embedded(inputs: StepInputs) -> bool:
    """Tell whether a forward that saves nothing has a name for what the embedding has returned and the first layer is given."""
    if inputs.spec.encoder is not None:
        return True
    return family_code(inputs.setup.stack, inputs.spec.architecture).forms_tables and not inputs.spec.learned_positions


def _names_positions(spec: ModelSpec) -> bool:
    """Tell whether a model names rows of learned positions: an encoder names what they have been added to."""
    return spec.learned_positions > 0 and spec.encoder is None


def _named_embeddings(inputs: StepInputs) -> Form:
    """Return the embeddings, which a model of transformers has names for until its layers have run."""
    spec, setup = inputs.spec, inputs.setup
    code = family_code(setup.stack, spec.architecture)
    if not code.forms_tables and spec.encoder is None:
        return ZERO
    if setup.names_hidden and "logits" in setup.stack.loop.holds and not spec.learned_positions:
        return ZERO  # it is what the first layer is given, which the model returns, but where it generates
    row = spec.hidden_size * setup.residual_bytes
    positions = single_form(Part.TEMPORARIES, position_quantity(code), row) if _names_positions(spec) else ZERO
    return single_form(Part.TEMPORARIES, Quantity.TOKENS, row) + positions


def _whole_logits(inputs: StepInputs, taped: ModelOnTape) -> WholeLogits:
    settings = taped.settings
    return WholeLogits(inputs.setup, settings.vocab_size, settings.metrics, inputs.regime.one_sequence)


def evaluated_model(inputs: StepInputs, taped: ModelOnTape) -> ModelOnTape:
    """Return a model as it is evaluated: nothing is dropped (``Module.eval``), nor computed again, so that caches are returned.

    Source:
        ``if self.gradient_checkpointing and self.training and use_cache`` in ``LlamaModel.forward`` (transformers 4.51.3).
    """
    config, setup = inputs.setup.config, inputs.setup
    drops_inputs = config.adapter is not None and bool(config.adapter.dropout)
    models = setup.stack.models
    uncached = setup.checkpointing != "none" or inputs.spec.architecture in models.uncached  # where it trains
    caches = setup.stack.loop.cache != "none" and uncached
    if not (drops_inputs or any(dropouts(inputs.spec, setup)) or caches):
        return taped
    if caches:
        config = replace(config, activation_checkpointing="none")
        # the hook still makes embedded tokens a leaf, whose cast for embeddings of layers autocast keeps
        leaf = inputs.spec.layer_input and embeds_with_gradient(setup)
        asks = "always" if leaf else setup.stack.input_gradients
        setup = replace(setup, stack=replace(setup.stack, input_gradients=asks, models=replace(models, uncached=())))
    adapter = None if config.adapter is None else replace(config.adapter, dropout=0.0)
    config = replace(config, adapter=adapter, dropout=None if config.dropout is None else 0.0)
    spec = replace(inputs.spec, dropout=0.0, attention_dropout=0.0)
    return model_on_tape(replace(inputs, spec=spec, setup=replace(setup, config=config)))
