"""A phase of PPO: what a policy generates, what judges it, and micro-steps of the policy and a model of values, one tape beside the other.

Source:
    ``PPOTrainer.train``, ``batch_generation`` and ``PolicyAndValueWrapper`` in trl/experimental/ppo/ppo_trainer.py (1.12.0).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.documents.frozen_values import dataclass
from memplan.step.alive_around_layers import escaped_form, named_cache, named_input, passed_on
from memplan.step.generated_completions import LAST
from memplan.step.instants import backward_instants, forward_instants
from memplan.step.losses.policy_loss import COMPARING
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import GENERATION, forward_alone, forward_arguments, reference_model
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, constant_form, fixed_form, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode
from memplan.units import ceil_div

SCORING, METRICS, VALUE_BACKWARD, LATER = "scoring", "metrics", "value model backward", "second backward"
"""Instants of a phase beside those of any step."""
ID_BYTES, NUMBER_BYTES = 8, 4
STATISTICS = 7
"""Numbers that are noted of each micro-step."""


@dataclass(frozen=True, slots=True)
class Taped:
    """A model on tape, for so many rows."""

    inputs: StepInputs
    taped: ModelOnTape
    values: Sequence[int]  # Of the quantities of its forms

    def fixed(self, instant: Instant, around: Form, name: str = "") -> Instant:
        """Return a moment with its own sizes, and what is around it."""
        own = replace(instant, form=fixed_form(instant.form, self.values))
        return own.around(around, name or instant.name)

    def bytes_of(self, form: Form) -> Form:
        """Return a form of its quantities with fixed sizes."""
        return fixed_form(form, self.values)


@dataclass(frozen=True, slots=True)
class Phase:
    """The sizes of a phase.

    Attributes:
        rows: Rows that are generated in all.
        at_once: Those that are generated, and judged, at a time.
        micro_rows: Those of a micro-step.
        prompt: Tokens of a prompt.
        answer: Tokens of an answer.
        vocab_size: Numbers that are returned for each.
        policy_bytes: Bytes of an element of what the policy returns.
        value_bytes: The same of the model of values.
        micro_steps: Those of all epochs.
        accumulates: Whether there are several micro-steps for one update.
        renames: Whether a micro-step follows one whose results still have names.
    """

    rows: int
    at_once: int
    micro_rows: int
    prompt: int
    answer: int
    vocab_size: int
    policy_bytes: int
    value_bytes: int
    micro_steps: int
    accumulates: bool
    renames: bool

    def logits(self, rows: int, element_bytes: int, tokens: int | None = None) -> Form:
        """Return logits of answers, or of so many tokens of each row."""
        tokens = self.answer if tokens is None else tokens
        return constant_form(Part.LOGITS, rows * tokens * self.vocab_size * element_bytes)

    @property
    def padded(self) -> int:
        """Return the rows that what was generated is padded to: as many each time (``pad`` in trl/trainer/utils.py, 1.12.0)."""
        return ceil_div(self.rows, self.at_once) * self.at_once

    @property
    def scores(self) -> Form:
        """Return the logits that answers were sampled from, in fp32, which are named until the next phase's are there."""
        return self.logits(self.padded, NUMBER_BYTES)

    @property
    def length(self) -> int:
        """Return the tokens of a row."""
        return self.prompt + self.answer

    @property
    def last(self) -> int:
        """Return the rows that are generated, and judged, last."""
        return self.rows % self.at_once or self.at_once

    @property
    def given(self) -> int:
        """Return the prompts and their mask, and all rows as they were generated."""
        return ID_BYTES * (self.rows * 2 * self.prompt + self.padded * self.length)

    @property
    def noted(self) -> int:
        """Return a few numbers of each row, and of each micro-step."""
        return self.rows * (6 * ID_BYTES + 7) + STATISTICS * NUMBER_BYTES * self.micro_steps

    @property
    def left(self) -> int:
        """Return what the last phase has left besides its logits: the rows that were judged last, and some numbers of answers."""
        last = ID_BYTES * self.last * self.length
        return last + self.noted + self.rows * self.answer * (2 * NUMBER_BYTES + self.value_bytes)

    @property
    def judged(self) -> Form:
        """Return what there is of a phase while it is learnt from: rows, and numbers of each generated token."""
        ids = self.given + self.last * ID_BYTES * self.length + self.noted
        numbers = 3 * ID_BYTES + 8 * NUMBER_BYTES + self.policy_bytes + self.value_bytes + 2
        return self.scores + constant_form(Part.ACTIVATIONS, ids + self.rows * self.answer * numbers)

    @property
    def chosen(self) -> Form:
        """Return the rows of a micro-step, and the numbers of them that have names until its part of the phase is done."""
        numbers = ID_BYTES + 11 * NUMBER_BYTES + 3 * self.value_bytes + self.policy_bytes
        tokens = (2 * ID_BYTES + self.value_bytes) * self.length
        return constant_form(Part.ACTIVATIONS, self.micro_rows * (tokens + self.answer * numbers))


# -------------------------------------------------------------------- what is generated, and judged
def generated(phase: Phase, moments: Iterator[Instant], cached: Form) -> Iterator[Instant]:
    """Yield the moments of generation, beside the logits of the last phase; logits that tokens are sampled from are retained, then stacked.

    Args:
        moments: Those of a model that generates, the last one as the last token is chosen.
        cached: Keys and values of a row's tokens, with the rows.
    """
    before = phase.rows - phase.last  # stacked already when the last of them are generated
    ids = phase.given + phase.left + ID_BYTES * (phase.rows * phase.prompt + before * phase.length)
    around = phase.scores + phase.logits(before, NUMBER_BYTES) + constant_form(Part.ACTIVATIONS, ids)
    retained = phase.logits(phase.last, NUMBER_BYTES)
    for moment in moments:
        sampled = moment.operation.endswith(("choice of a token", LAST))
        yield moment.around(around + (retained if sampled else ZERO))
    yield Instant(GENERATION, "stack of logits", around + retained * 2 + cached)
    ids += ID_BYTES * (phase.padded + phase.last) * phase.length
    every = phase.scores * 2 + phase.logits(phase.rows, NUMBER_BYTES)
    yield Instant(GENERATION, "logits of all rows", every + constant_form(Part.ACTIVATIONS, ids))


def scored(phase: Phase, policy: Taped, values: Taped, rewards: Taped) -> Iterator[Instant]:
    """Yield the moments at which what was generated is judged: forwards of a reference model, of values, and of rewards."""
    rows, before = phase.at_once, phase.rows - phase.last
    judged = NUMBER_BYTES + phase.policy_bytes + phase.value_bytes
    ids = phase.given + phase.left + ID_BYTES * phase.padded * phase.length
    ids += phase.answer * (before * judged + phase.last * NUMBER_BYTES)
    around = phase.scores + constant_form(Part.ACTIVATIONS, ids)
    yield Instant(SCORING, "logits of the last phase", around + phase.scores)
    yield Instant(SCORING, "log-probabilities", around + phase.logits(1, NUMBER_BYTES))
    reference = reference_model(policy.inputs, policy.taped)
    assert reference is not None
    setup = policy.inputs.setup
    own = replace(policy.inputs, setup=replace(setup, config=replace(setup.config, adapter=None)))
    for moment in forward_alone(own, reference, ZERO, SCORING, forward_arguments(own)):
        yield policy.fixed(moment, around, SCORING)
    logits = phase.logits(rows, phase.policy_bytes, phase.length)
    left = around + policy.bytes_of(_named(reference)) + logits
    # of one row exponentials in fp32, and else the result beside that of the row before
    compared = phase.logits(1 if phase.policy_bytes == NUMBER_BYTES else min(2, rows), phase.policy_bytes)
    yield Instant(SCORING, "log-probabilities of the reference", left + compared)
    for second in (values, rewards):
        arguments = forward_arguments(second.inputs)
        for moment in forward_alone(second.inputs, second.taped, ZERO, SCORING, arguments):
            yield second.fixed(moment, around, SCORING)


def _named(taped: ModelOnTape) -> Form:
    """Return what a forward's output has of layers and the final norm, logits aside."""
    tapes = [(section.tape, taped.counts()[kind]) for kind, section in enumerate(taped.layers)]
    tapes.append((taped.head_alone().tape, 1))
    named = ((tape.storages[own], count) for tape, count in tapes for own in tape.cached)
    return sum((single_form(*storage) * count for storage, count in named), ZERO)


# -------------------------------------------------------------------- what learns
def micro_steps(phase: Phase, policy: Taped, values: Taped) -> Iterator[Instant]:
    """Yield the moments of the first micro-step, and of later ones, beside gradients and what still has a name."""
    played = policy.taped.played("first", policy.inputs.recomputation)
    returned = policy.bytes_of(escaped_form(policy.taped, played))
    shares = phase.logits(phase.micro_rows, phase.policy_bytes)
    around = phase.judged + phase.chosen
    gradients = constant_form(Part.GRADIENTS, policy.inputs.gradient_bytes)  # of both
    yield from _micro_step(policy, values, around, ZERO, "first")
    if phase.accumulates:
        stays = shares if phase.renames else ZERO
        old = returned if phase.renames else ZERO
        for moment in _micro_step(policy, values, around + gradients + stays, old, "again"):
            yield moment.around(ZERO, LATER, f"{moment.operation} ({moment.name})")
    update = constant_form(Part.TEMPORARIES, policy.inputs.optimizer.bytes)
    left = around + returned
    yield Instant("optimizer step", "update", left + gradients + update + (shares if phase.renames else ZERO))
    yield Instant(METRICS, "entropy", left + shares * 2 + (gradients if phase.accumulates else ZERO))


def _micro_step(policy: Taped, values: Taped, base: Form, old: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the moments of forward and backward of both: values first, and last in backward.

    Args:
        base: What is there throughout.
        old: What the last forward has returned, which has names until this one returns.
    """
    critic = values.taped.played(mode, values.inputs.recomputation)
    actor = policy.taped.played(mode, policy.inputs.recomputation)
    for moment in forward_instants(values.inputs, values.taped, critic, ZERO):
        yield values.fixed(moment, base + old)
    saved = values.bytes_of(critic.saved + critic.head.saved + passed_on(values.inputs))
    named = values.bytes_of(_named_in_forward(values))
    for moment in forward_instants(policy.inputs, policy.taped, actor, ZERO):
        behind = moment.operation in COMPARING
        yield policy.fixed(moment, base + saved + (ZERO if behind else old + named))
    for moment in backward_instants(policy.inputs, policy.taped, actor, ZERO, mode):
        yield policy.fixed(moment, base + saved)
    formed = policy.inputs.gradient_bytes - values.inputs.gradient_bytes if mode == "first" else 0
    left = base + policy.bytes_of(escaped_form(policy.taped, actor)) + constant_form(Part.GRADIENTS, formed)
    for moment in backward_instants(values.inputs, values.taped, critic, ZERO, mode):
        yield values.fixed(moment, left, VALUE_BACKWARD)


def _named_in_forward(values: Taped) -> Form:
    """Return what the model of values has returned, which has names until the policy's forward is done."""
    counts = values.taped.counts().items()
    kinds = (named_input(values.inputs, values.taped, kind) * count for kind, count in counts)
    caches = (named_cache(values.taped, kind) * count for kind, count in counts)
    return sum((*kinds, *caches), ZERO)
