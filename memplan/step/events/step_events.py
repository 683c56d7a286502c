"""A whole training run as allocations and frees, in order: what is made first, then one step after another.

The order is that of the loop that is traced (memplan/trace/jobs/training_job.py).
"""

from collections.abc import Sequence
from typing import Protocol

from memplan.step.events.around_step import Around
from memplan.step.events.event_stream import EventStream, RunEvents
from memplan.step.events.model_tensors import ModelTensors
from memplan.step.events.update_events import Updates
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Form
from memplan.step.tapes.taped_operations import Mode

STEPS = 3
"""The first makes what stays; of 94 measured runs (tests/records/cuda) two took another segment in the third."""


class Passes(Protocol):
    """Plays forwards and backwards of a step."""

    gradients: dict[str, int]
    """Storage of each gradient that stays, by the name of its weight."""

    def play(self, mode: Mode) -> Sequence[tuple[int, int]]:
        """Play all micro-steps; return where each but the first begins, and where the last ends."""

    def end_step(self) -> None:
        """Let go of what a step has names for that is a function."""

    def verify(self) -> None:
        """Write what a loop evaluates before the first step, if it does."""

    def evaluate(self) -> None:
        """Write what a loop evaluates behind a step."""


class StepPlayer:
    """Plays a training run.

    Args:
        tensors: The model's tensors.
        passes: Plays forwards and backwards.
        around: What is written around the parts of the step.
    """

    def __init__(
        self,
        stream: EventStream,
        inputs: StepInputs,
        tensors: ModelTensors,
        updates: Updates,
        passes: Passes,
        around: Around,
    ) -> None:
        self._stream, self._config, self._leaves = stream, inputs.setup.config, inputs.setup.leaves_gradients
        self._by_epochs = inputs.setup.stack.evaluates_epochs
        self._tensors, self._updates, self._passes, self._around = tensors, updates, passes, around
        self._untouched = [name for name, entry in tensors.trained if entry.stepper is None]

    def run(self, buffers: Form, values: Sequence[int], steps: int = STEPS) -> RunEvents:
        """Return the events of what is made first, and of so many steps.

        Args:
            buffers: Token ids, targets and tables.
            values: Values of the quantities that their sizes are made of.
        """
        self._make_persistent(buffers, values)
        starts, passes, stream = [], [], self._stream
        if self._config.evaluation:
            self._passes.verify()
        for step in range(steps):
            starts.append(len(stream.codes))
            passes.append(self._step(first=step == 0))
            if self._config.evaluation and (step == steps - 1 or not self._by_epochs):
                self._passes.evaluate()
        return RunEvents(stream.sizes, stream.codes, frozenset(stream.libraries), tuple(starts), tuple(passes), stream)

    def _make_persistent(self, buffers: Form, values: Sequence[int]) -> None:
        """Allocate weights, buffers, master weights, averages, and the states that an optimizer makes when it is made."""
        stream, tensors, masters = self._stream, self._tensors, len(self._tensors.trained)
        copies = tensors.copy_sizes() if self._around.update is None else []
        stream.of("weights")
        self._around.make_weights(stream, tensors.weight_sizes())
        stream.of("buffers")
        replaced = stream.allocate_all(tensors.replaced_sizes(buffers, values))
        stream.allocate_all(tensors.buffer_sizes(buffers, values))
        stream.free_all(replaced)
        for component, sizes in (("master_weights", copies[:masters]), ("buffers", copies[masters:])):
            stream.of(component)
            stream.allocate_all(sizes)
        if self._around.update is None:
            self._updates.make_early_states()
        self._around.wrap()

    def _step(self, *, first: bool) -> tuple[tuple[int, int], ...]:
        """Play a step; return where each micro-step but its first begins, and where the last ends."""
        config = self._config
        filled = self._leaves and not first
        ends = self._passes.play("layer" if config.gradients.lifetime == "layer" else "filled" if filled else "first")
        if self._around.update is not None:
            self._stream.begin("optimizer step")
            self._around.update(first=first)
        elif config.gradients.lifetime == "step":
            self._update(first=first)
        self._passes.end_step()
        return () if self._around.update is not None else tuple(ends)  # an engine's last is like no other

    def _update(self, *, first: bool) -> None:
        """Clip gradients, update, and let go of gradients unless they are filled with zeros."""
        self._stream.of("temporaries")
        if self._config.clip_gradients:
            self._stream.begin("clipping")
            self._updates.clip()
        self._stream.begin("optimizer step")
        gradients = self._passes.gradients
        self._updates.step(gradients, first=first)
        if self._config.zero_gradients != "fill":
            order = dict.fromkeys(name for name, _ in self._tensors.trained)  # as an optimizer has parameters
            going = [name for name in {**order, **gradients} if name in gradients and name not in self._untouched]
            self._stream.free_all(gradients.pop(name) for name in going)
        self._updates.average()
        self._around.stepped()
