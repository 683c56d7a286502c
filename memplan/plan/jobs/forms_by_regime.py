"""Closed forms of a job's step, compiled once for each regime of batch and length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import mul
from typing import Literal

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stacks import Cache
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.model import Model
from memplan.model.routed_experts import routed_to
from memplan.plan.jobs.policy_forms import PolicyForms
from memplan.plan.jobs.unmodelled_jobs import refuse_unlearned, refuse_window
from memplan.step.beside.policy_step import Taped
from memplan.step.beside.second_forward import cached_sizes, moments_alone, running, states_on_tape
from memplan.step.blocks.block_settings import Regime
from memplan.step.columns.cached_passes import cached_pass
from memplan.step.columns.column_passes import Anchors, anchors_alone, column_pass, merges_columns
from memplan.step.compiled_layers.compiled_layer import refuse_padded_tokens
from memplan.step.instants import StepForms, compile_step, loss_moments, step_on_tape
from memplan.step.kernels.image_rows import image_sizes
from memplan.step.kernels.layer_arguments import grown_rows
from memplan.step.kernels.loss_pieces import TILED, has_all_words, next_rows, piece_rows
from memplan.step.losses.cross_entropy import PIECE_TOKENS
from memplan.step.losses.fused_linear_loss import linear_chunk
from memplan.step.losses.token_chunk_loss import STRETCH_TOKENS, TOKEN_CHUNK, TOKEN_CHUNKS
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import EVALUATION, PLACE
from memplan.step.playing.recomputation import NOTHING_AGAIN
from memplan.step.regimes import forwarded_rows, regime_of
from memplan.step.states.model_states import ModelStates
from memplan.step.states.parallel_shards import is_flat, is_partitioned, is_sharded
from memplan.step.states.partitioned_weights import rank_model_states
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import (
    Coefficients,
    Form,
    Part,
    Pieces,
    constant_form,
    fixed_form,
    quantities,
    with_columns,
)
from memplan.step.tapes.moments import Instant, dominant
from memplan.training.adapters import adapter_tensors
from memplan.training.resolved import TrainingSetup
from memplan.training.second_models import BesideModel
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class Compiled:
    """The closed forms of a step within one regime of batch and length."""

    forms: StepForms
    candidates: tuple[Instant, ...]  # For each instant, the moments that can be its fullest
    # Each candidate's coefficients, all parts together: what a peak by itself needs.
    totals: tuple[tuple[Coefficients, Instant], ...]


def _compiled(forms: StepForms, instants: Sequence[Instant]) -> Compiled:
    candidates = tuple(dominant(instants))
    return Compiled(forms, candidates, tuple((candidate.form.totals(), candidate) for candidate in candidates))


class FormsByRegime:
    """The closed forms of a job's step for any batch and length.

    Args:
        model: The model as its stack builds it.
        own: The same as a rank has it.
        states: Weights, gradients and optimizer states of a rank.
    """

    def __init__(self, model: Model, own: Model, setup: TrainingSetup, states: ModelStates) -> None:
        self.model, self.own, self.setup, self.states = model, own, setup, states
        self._by_regime: dict[tuple[Regime, int, int], Compiled] = {}
        self._steps: dict[Regime, StepForms] = {}
        self._on_tape: dict[Regime, tuple[StepInputs, ModelOnTape]] = {}
        self._policy = None if setup.value_model is None else PolicyForms(model, setup, states, _tapes_of)
        self._second = None if setup.teacher is None else SecondForward(setup.teacher, setup.config.padded_rows)

    def compiled(self, batch: int, length: int) -> Compiled:
        """Return the closed forms that hold for a batch and a length.

        Args:
            batch: Sequences per micro-batch.
            length: Tokens per sequence.

        Raises:
            InvalidFileError: Generated completions leave no room for a prompt, or images for text.
            CannotAnswerError: A compiler may pad so many tokens.
        """
        if length <= self.setup.completion_length:
            told = f"completions of {self.setup.completion_length} tokens leave no prompt; see method.rollout.completion_length"
            raise InvalidFileError([f"sequence_length: {length}: {told}"])
        if 0 < length <= (seen := image_sizes(self.own.spec, self.setup)[1]):
            raise InvalidFileError(
                [f"sequence_length: {length}: a row's images alone become {seen:,} tokens; see images"]
            )
        refuse_padded_tokens(self.setup, batch, length)
        length = self._own_length(length)
        if self._policy is not None:
            return self._compiled_phase(self._policy, batch, length)
        by_size = self.setup.generates or self._second is not None or merges_columns(self.setup)
        apart = (length if self.setup.evaluates_apart or by_size else 0, batch if by_size else 0)
        key = regime_of(self.own, self.setup, batch, length), *apart
        if key not in self._by_regime:
            embeds = self.setup.config.method.embedding is not None
            forms = self._forms_of_columns(key[0], batch, length) if embeds else self._forms(key[0])
            forms = self._with_second(forms, batch, length)
            instants = self._with_evaluation(forms, length) if self.setup.evaluates_apart else forms.candidates
            instants = (*instants, *self._generation(batch, length)) if self.setup.generates else instants
            self._by_regime[key] = _compiled(forms, instants)
        return self._by_regime[key]

    def _compiled_phase(self, policy: PolicyForms, batch: int, length: int) -> Compiled:
        """Return the closed forms of a phase of PPO, which are of one batch and length."""
        key = regime_of(self.own, self.setup, batch, length), length, batch
        if key not in self._by_regime:
            forms = policy.forms(batch, length, lambda rows: self._generation(rows, length))
            self._by_regime[key] = _compiled(forms, forms.candidates)
        return self._by_regime[key]

    def _forms_of_columns(self, regime: Regime, batch: int, length: int) -> StepForms:
        """Return the closed forms of a loss over the embeddings of several columns, of which the first may have other rows."""
        inputs, taped = self.tapes(regime)
        texts = self.setup.config.method.embedding
        if texts is not None and texts.mini_batch_size is not None:
            return compile_step(inputs, taped, partial(cached_pass, inputs, taped))
        if (alone := anchors_alone(self.setup)) is self.setup:
            return compile_step(inputs, taped, partial(column_pass, inputs, taped, None))
        own = step_on_tape(self.own, alone, self.states, regime_of(self.own, alone, batch, length))
        values = FormsByRegime(self.model, self.own, alone, self.states).values(batch, length)
        return compile_step(inputs, taped, partial(column_pass, inputs, taped, Anchors(*own, values)))

    def _own_length(self, length: int) -> int:
        """Return a rank's part of a sequence, where several share it."""
        return ceil_div(length, self.setup.config.parallel.context)

    def _generation(self, batch: int, length: int) -> Iterator[Instant]:
        """Yield the moments at which the rows that micro-batches of ``batch`` learn from are generated."""
        from memplan.step.generated_completions import (
            Completions,
            generating_model,
            generating_setup,
            generation_moments,
        )

        setup, states = generating_setup(self.setup), self.states
        if setup is not self.setup:  # nothing is cast for products
            adapters = adapter_tensors(self.model, setup)
            states = rank_model_states(setup, self.model.inventory, adapters, self.model.spec.hidden_size)

        def tapes(rows: int, tokens: int, form: Cache) -> tuple[StepInputs, ModelOnTape, Sequence[int]]:
            model, own = generating_model(self.model, setup, form)
            regime = regime_of(model, own, rows, tokens)
            return *step_on_tape(model, own, states, regime), self.values(rows, tokens)

        prompt = max(1, length - self.setup.completion_length)
        evaluated = (self.setup.config.evaluation_batch_size or 0) if self.setup.config.evaluation else 0
        rows = batch * (1 if self._policy is not None else self.setup.generated_micro_batches)
        requested = Completions(max(rows, evaluated), prompt, length)
        # between micro-steps, too, where a step generates the rows of each by itself
        within = self.setup.generates_rows and self.setup.config.gradient_accumulation_steps > 1
        formed = self.states.gradient_bytes if within else 0
        beside = constant_form(Part.GRADIENTS, formed)
        for moment in generation_moments(self.model.spec, setup, requested, tapes):
            yield moment.around(beside)

    def _with_second(self, forms: StepForms, batch: int, length: int) -> StepForms:
        """Return forms with the moments of a second model's forward, of so many rows, in each place where it runs."""
        if self._second is None:
            return forms
        beside = self._second.moments(batch, length)
        several = (
            [replace(one, operation=operation, form=one.form + form) for operation, form in beside]
            if one.operation.startswith(PLACE)
            else [one]
            for one in forms.candidates
        )
        return replace(forms, candidates=tuple(chain.from_iterable(several)))

    def _with_evaluation(self, forms: StepForms, length: int) -> tuple[Instant, ...]:
        """Return instants of which those of evaluation have its own rows, beside what is left of a micro-batch."""
        rows = self.setup.config.evaluation_batch_size
        assert rows is not None
        own = self._with_second(self._forms(regime_of(self.own, self.setup, rows, length)), rows, length)
        values = self.values(rows, length)
        evaluated = [instant for instant in own.candidates if instant.name == EVALUATION]
        fixed = [replace(one, form=fixed_form(one.form - own.left, values) + forms.left) for one in evaluated]
        return (*(instant for instant in forms.candidates if instant.name != EVALUATION), *fixed)

    def _forms(self, regime: Regime) -> StepForms:
        """Return the closed forms of one rank's step, which other lengths and evaluation may have asked for too."""
        if regime not in self._steps:
            self._steps[regime] = self._compiled_step(regime)
        return self._steps[regime]

    def _compiled_step(self, regime: Regime) -> StepForms:
        if is_flat(self.setup.config.parallel):
            from memplan.step.engines.engine_step import compile_engine_step

            return compile_engine_step(*self.tapes(regime))
        if self.setup.config.compile == "model":
            from memplan.step.compiled.compiled_model import compile_compiled_step

            return compile_compiled_step(*self.tapes(regime))
        if is_partitioned(self.setup.config.parallel):
            from memplan.step.engines.gathered_step import compile_gathered_step

            return compile_gathered_step(*self.tapes(regime))
        if not is_sharded(self.setup.config.parallel):
            return compile_step(*self.tapes(regime))
        if self.setup.config.parallel.pipeline > 1:
            from memplan.step.pipelines.pipeline_step import compile_pipeline_step

            layers = self.model.spec.num_hidden_layers
            return compile_pipeline_step(self.own, self.setup, self.states, regime, layers)
        from memplan.step.ranks.parallel_step import compile_sharded_step

        return compile_sharded_step(self.own, self.setup, self.states, regime)

    def tapes(self, regime: Regime) -> tuple[StepInputs, ModelOnTape]:
        """Return what a step is made from within a regime, and the model on its tapes."""
        if regime not in self._on_tape:
            setup = self.setup if self._second is None else self._second.beside(self.setup)
            self._on_tape[regime] = step_on_tape(self.own, setup, self.states, regime)
        return self._on_tape[regime]

    def saved_bytes(self, batch: int, length: int) -> int:
        """Return what layers save for backward, and the most of what the loss's own takes beside it and of what the last one saves as it is computed again.

        Moments of both are among those of a step on one GPU, in which nothing else is less than nothing.
        """
        values = self.values(batch, length)
        inputs, taped = self.tapes(regime_of(self.own, self.setup, batch, length))
        ways = [inputs.recomputation if again else NOTHING_AGAIN for again in taped.again]
        least = [section.least_saved(way) for section, way in zip(taped.layers, ways, strict=True)]
        saved = sum(least[kind].total_bytes(values) * count for kind, count in taped.counts().items())
        moments = loss_moments(inputs, taped)
        beside = [sum(map(mul, one.form.totals(), values)) + one.partial_bytes(values) for one in moments]
        last = taped.kinds[-1]  # its backward is the first, when nothing that others save has gone
        if taped.again[last] and self.setup.config.parallel == Parallel():
            beside.append(taped.layers[last].recomputed().total_bytes(values) - least[last].total_bytes(values))
        return saved + max(beside, default=0)

    def values(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the values of the quantities that the forms are made of.

        Raises:
            InvalidFileError: The model has fewer learned positions than ``length``.
        """
        refuse_unlearned(self.own, length)
        refuse_window(self.own, self.setup, length)
        length = self._own_length(length)
        spec, profile = self.own.spec, self.setup.profile
        examples, texts = batch, self.setup.config.method.embedding
        batch, length = forwarded_rows(self.setup, batch, length)
        chunk = linear_chunk(batch * length, spec) if profile.loss == "fused-linear" else 0
        metrics = self.setup.stack.loop.metrics
        if most := {**dict.fromkeys(TOKEN_CHUNKS, TOKEN_CHUNK), "fp32-pieces": PIECE_TOKENS}.get(profile.loss):
            chunk = min(most, batch * (length - 1))
        elif self.setup.copies_logits:
            whole = metrics == "accuracy" and profile.loss == "fp32"
            answered = self.setup.answer_length or (length if whole else length - 1)
            chunk = min(PIECE_TOKENS, batch * answered)
        row = min(length, STRETCH_TOKENS) if profile.loss == "fp32-stretches" else 0
        answer, ranks = self.setup.labelled_length, self.setup.config.parallel.tensor
        images = image_sizes(spec, self.setup)
        rows, more = grown_rows(spec.max_position_embeddings, batch * length), 0
        if profile.loss in TILED:
            predicted, whole = batch * (length - 1), has_all_words(profile.loss, spec.vocab_size, batch * length)
            most = piece_rows(spec.vocab_size, batch * length * spec.hidden_size, whole=whole)
            chunk, more = min(predicted, most), next_rows(predicted, most, whole=whole)
        pieces = Pieces(profile.loss_chunks, chunk, row, more)
        scanned = 0 if spec.state_space is None else spec.state_space.chunk_tokens
        table = spec.vocab_size, spec.hidden_size
        values = quantities(batch, length, table, pieces, answer, ranks, images, rows, scanned, routed_to(spec))
        if texts is None:
            return values
        return with_columns(values, texts.columns, examples, length, min(examples, texts.mini_batch_size or examples))


def _tapes_of(model: Model, setup: TrainingSetup, states: ModelStates) -> Callable[[int, int], Taped]:
    """Return what puts a model of a phase on tape, for so many rows and tokens of each."""
    forms = FormsByRegime(model, model, replace(setup, value_model=None), states)

    def taped(batch: int, length: int) -> Taped:
        return Taped(*forms.tapes(regime_of(model, setup, batch, length)), forms.values(batch, length))

    return taped


class SecondForward:
    """The forward of a frozen model beside the one that is trained, for any batch and length.

    Args:
        padded_rows: Whether rows have padding, as the trained one's config says it.
    """

    def __init__(self, second: BesideModel, padded_rows: bool | Literal["multiple"] | None) -> None:
        self._second = running(second, padded_rows)
        model = self._second.model
        self._forms = FormsByRegime(model, model, self._second.setup, states_on_tape(second))
        self._cached: tuple[tuple[int, int], ...] | None = None

    def moments(self, batch: int, length: int) -> list[tuple[str, Form]]:
        """Return its moments, each with what it is, of fixed sizes."""
        return moments_alone(*self._tapes(batch, length), self._forms.values(batch, length))

    def beside(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup of the trained model, which is told what the second one returns besides logits."""
        if self._cached is None:
            config = setup.config
            self._cached = cached_sizes(self._tapes(config.micro_batch_size, config.sequence_length)[1])
        assert setup.teacher is not None
        return replace(setup, teacher=replace(setup.teacher, cached=self._cached))

    def _tapes(self, batch: int, length: int) -> tuple[StepInputs, ModelOnTape]:
        try:
            return self._forms.tapes(regime_of(self._second.model, self._second.setup, batch, length))
        except CannotAnswerError as error:
            own = str(error).removeprefix(f"{self._second.setup.name}: ")
            raise CannotAnswerError(f"{self._second.setup.name}: {own}") from error
