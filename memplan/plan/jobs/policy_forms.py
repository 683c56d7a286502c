"""Closed forms of a phase of PPO: of the policy, the model of values beside it, and what judges answers, by batch and length."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from memplan.model.model import Model
from memplan.step.beside.policy_step import Phase, Taped, generated, micro_steps, scored
from memplan.step.beside.second_forward import running, states_on_tape
from memplan.step.generated_completions import cached_bytes, uncached
from memplan.step.instants import StepForms, saved_by_layers
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.step_inputs import module_bytes
from memplan.step.tapes.linear_forms import Form, Part, constant_form
from memplan.step.tapes.moments import Instant
from memplan.training.resolved import TrainingSetup

TapesOf = Callable[[Model, TrainingSetup, ModelStates], Callable[[int, int], Taped]]
"""Returns what puts a model on tape, for so many rows and tokens of each."""


class PolicyForms:
    """The closed forms of a phase for any batch and length.

    Args:
        model: The policy, as its stack builds it.
        states: Weights, gradients and optimizer states of all models.
        tapes_of: Puts models on tape.
    """

    def __init__(self, model: Model, setup: TrainingSetup, states: ModelStates, tapes_of: TapesOf) -> None:
        assert setup.value_model is not None
        assert setup.reward_model is not None
        self._model, self._setup = model, setup
        padded = setup.config.padded_rows
        value, reward = running(setup.value_model, padded), running(setup.reward_model, padded)
        self._values, self._rewards = value, reward
        self._policy, self._generating = (tapes_of(model, own, states) for own in (_named(setup), setup))
        own = model_states(value.setup, value.model.inventory, ())
        self._learning = tapes_of(value.model, value.setup, own)
        judges = ((setup.value_model, value), (setup.reward_model, reward))
        self._judging = [
            tapes_of(runs.model, _named(uncached(runs.setup)), states_on_tape(second)) for second, runs in judges
        ]

    def forms(self, batch: int, length: int, generation: Callable[[int], Iterator[Instant]]) -> StepForms:
        """Return the closed forms for micro-steps of so many rows.

        Args:
            generation: Yields the moments at which so many rows are generated.
        """
        phase = self._phase(batch, length)
        at_once = min(phase.at_once, phase.rows)
        policy, values = self._policy(batch, length), self._learning(batch, length)
        own = self._policy(at_once, length)
        judged = [tapes(at_once, length) for tapes in self._judging]
        instants = [
            *generated(phase, generation(at_once), self._cached(at_once, length)),
            *scored(phase, own, *judged),
            *micro_steps(phase, policy, values),
        ]
        buffers = constant_form(Part.ACTIVATIONS, self._module_bytes())
        formula = policy.inputs.optimizer.formula
        return StepForms(tuple(instants), buffers, saved_by_layers(policy.taped), formula)

    def _phase(self, batch: int, length: int) -> Phase:
        config, method = self._setup.config, self._setup.config.method
        assert method.ppo is not None
        accumulation = config.gradient_accumulation_steps
        return Phase(
            rows=batch * accumulation,
            at_once=min(method.ppo.forward_batch, batch * accumulation),
            micro_rows=batch,
            prompt=length - self._setup.completion_length,
            answer=self._setup.completion_length,
            vocab_size=self._model.spec.vocab_size,
            policy_bytes=self._setup.compute_bytes,
            value_bytes=self._values.setup.compute_bytes,
            micro_steps=method.ppo.epochs * method.ppo.mini_batches * accumulation,
            accumulates=accumulation > 1,
            renames=accumulation > method.ppo.mini_batches,
        )

    def _cached(self, rows: int, length: int) -> Form:
        """Return keys and values of all tokens but the last, and the rows; generation asks for no hidden states."""
        prompt, taped = length - self._setup.completion_length, self._generating(rows, length).taped
        ids = 8 * (3 * length + prompt) + prompt
        return constant_form(Part.ACTIVATIONS, rows * (cached_bytes(self._model.spec, taped, length - 1) + ids))

    def _module_bytes(self) -> int:
        """Return what modules of all models keep beside parameters."""
        resident = 1 + (self._setup.config.method.reference_model == "resident")
        own = module_bytes(self._model.spec, self._setup) * resident
        return own + sum(module_bytes(second.model.spec, second.setup) for second in (self._values, self._rewards))


def _named(setup: TrainingSetup) -> TrainingSetup:
    """Return a setup whose loop has names for all that a forward returns."""
    return replace(setup, stack=replace(setup.stack, loop=replace(setup.stack.loop, holds=("logits",))))
