"""The forward of a frozen model of its own beside what the trained one has left: a teacher's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from memplan.catalog.config_keys.method_keys import Method
from memplan.catalog.entries import Gpu
from memplan.model.model import Model
from memplan.step.kernels.card_support import on_card
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import forward_alone, forward_arguments
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, fixed_form, single_form
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import TrainingSetup
from memplan.training.second_models import TEACHER, VALUES, BesideModel, as_it_runs, with_seconds


def frozen_states(second: BesideModel) -> ModelStates:
    """Return what a second model keeps: its weights, of which none trains where it is frozen."""
    setup = second.setup
    if setup.config.adapter is not None:  # which stands for its being frozen, a head of scores too
        setup = replace(setup, config=replace(setup.config, method=Method()))
    return model_states(setup, second.model.inventory, ())


def with_states_beside(states: ModelStates, seconds: Mapping[str, BesideModel]) -> ModelStates:
    """Return states of a model with those of others beside it, of which no tape of the first has any."""
    for role, second in seconds.items():
        trains = role == VALUES
        own = frozen_states(second)
        named = (replace(e.tensor, name=f"{role}.{e.tensor.name}", frozen=not trains, used=False) for e in own.tensors)
        beside = (replace(entry, tensor=tensor) for entry, tensor in zip(own.tensors, named, strict=True))
        states = replace(
            states,
            tensors=(*states.tensors, *beside),
            weight_bytes=states.weight_bytes + own.weight_bytes,
            gradient_bytes=states.gradient_bytes + (own.gradient_bytes if trains else 0),
            state_bytes=states.state_bytes + (own.state_bytes if trains else 0),
        )
    return states


def second_bytes(tensors: Iterable[TensorStates], role: str = TEACHER) -> int:
    """Return the weights of a second model among the states of a job."""
    beside = (entry for entry in tensors if entry.tensor.name.startswith(f"{role}."))
    return sum(entry.weight_bytes * entry.tensor.count for entry in beside)


def states_on_tape(second: BesideModel) -> ModelStates:
    """Return a second model's states as autocast sees them: floats that ask for a gradient, whose copies it keeps to its end.

    Source:
        ``cached_cast`` in aten/src/ATen/autocast_mode.cpp (v2.13.0); trainers of TRL freeze no parameter of a teacher (1.16.0).
    """
    states = frozen_states(second)
    return replace(states, tensors=tuple([replace(e, trainable=not e.quantized) for e in states.tensors]))


def cached_sizes(taped: ModelOnTape) -> tuple[tuple[int, int], ...]:
    """Return what a second model's layers return beside its logits: quantities, and the bytes for each unit of them."""
    counts = taped.counts()
    parts = [(kind, storage) for kind, section in enumerate(taped.layers) for storage in section.tape.cached]
    forms = (single_form(*taped.layers[kind].tape.storages[storage]) * counts[kind] for kind, storage in parts)
    whole = sum(forms, ZERO)
    return tuple([(place, size) for place, size in enumerate(whole.totals()) if size])


def moments_alone(inputs: StepInputs, taped: ModelOnTape, values: Sequence[int]) -> list[tuple[str, Form]]:
    """Return the moments of a second model's forward, with fixed sizes."""
    moments = forward_alone(inputs, taped, ZERO, "forward", forward_arguments(inputs))
    return [(f"{TEACHER}: {moment.operation}", fixed_form(moment.form, values)) for moment in moments]


def running(second: BesideModel, padded_rows: bool | Literal["multiple"] | None) -> BesideModel:
    """Return a second model as it runs on the rows of the first."""
    setup = as_it_runs(second.setup)
    config = replace(setup.config, padded_rows=padded_rows)
    return replace(second, setup=replace(setup, config=config))


def all_on_card(setup: TrainingSetup, model: Model, gpu: Gpu) -> TrainingSetup:
    """Return a setup as it runs on a card, with a second model's.

    Raises:
        CannotAnswerError: The card cannot do something that one of them needs.
    """
    setup = on_card(setup, model, gpu)
    own = {role: on_card(second.setup, second.model, gpu) for role, second in setup.seconds.items()}
    changed = {
        role: replace(setup.seconds[role], setup=new)
        for role, new in own.items()
        if new is not setup.seconds[role].setup
    }
    return with_seconds(setup, changed)
