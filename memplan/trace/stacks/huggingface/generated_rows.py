"""What stands for generation in a trainer that learns from completions: rows of full length, and rewards without values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from transformers.generation import utils

from memplan.catalog.config_keys.method_keys import Method
from memplan.trace.recording.recorder import Recorder
from memplan.trace.stacks.huggingface.trainer_loop import in_its_precision
from memplan.trace.stacks.registry import StackInputs
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.distillation_rules import DISTILLED, on_policy
from memplan.training.rules.method_rules import GENERATING

GENERATION = "generation"
"""The instant at which completions are generated and scored."""


def rollout_arguments(setup: TrainingSetup) -> dict[str, Any]:
    """Return the keywords of ``GRPOConfig`` for a job."""
    config, rollout = setup.config, setup.rollout
    if config.method.stage in DISTILLED:
        return {"max_completion_length": rollout.completion_length, "beta": BETAS[str(config.method.divergence)]}
    return {
        "max_completion_length": rollout.completion_length,
        "num_generations": config.micro_batch_size * setup.generated_micro_batches,
        "steps_per_generation": setup.generated_micro_batches,
        "num_iterations": rollout.iterations,
        "beta": 0.0 if config.method.reference_model == "none" else 0.04,
    }


def learns_generated(method: Method) -> bool:
    """Tell whether a trainer learns from rows that it generates for several micro-steps together."""
    return method.stage in GENERATING or on_policy(method)


def generating(trainer: Any, inputs: StackInputs, recorder: Recorder) -> None:
    """Let a trainer take completions of full length as generated, and say when it generates."""
    setup = inputs.setup
    length, rollout = setup.config.sequence_length, setup.rollout
    prompt, completion = [1] * (length - rollout.completion_length), [1] * rollout.completion_length
    by_engine = rollout.engine != "transformers"  # an engine tells the log-probabilities of what it samples
    scored = setup.config.method.stage in GENERATING

    def tokenized(prompts: list[Any]) -> Any:
        return [list(prompt) for _ in prompts], None, {}

    def generated(prompts: list[Any], *_: Any, **__: Any) -> Any:
        logs = [[0.0] * len(completion) for _ in prompts] if by_engine else None
        rows = [list(completion) for _ in prompts]
        if not scored:
            return rows
        return (rows, logs) if apart else (tokenized(prompts)[0], rows, logs, {})

    apart = hasattr(trainer, "_tokenize_prompts")
    trainer._tokenize_prompts = tokenized
    if by_engine:
        trainer._generate_single_turn, trainer.use_vllm = generated, True
    else:
        trainer.generation_config.use_cache = True  # as models have it that are loaded by their names
    if scored:
        trainer._calculate_rewards = lambda rows, *_: torch.zeros(len(rows), 1, device=trainer.accelerator.device)
        trainer.reward_func_names = []  # what they yield is told nobody
    own = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = _between(own, recorder)


def generating_within(trainer: Any, recorder: Recorder) -> None:
    """Say when a trainer generates the rows of a micro-step, at its beginning."""
    trainer.generate_on_policy_outputs = _between(trainer.generate_on_policy_outputs, recorder)


def _between(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def marked(*args: Any) -> Any:
        before = recorder.now
        recorder.instant(GENERATION)
        try:
            return function(*args)
        finally:
            recorder.instant("forward" if before == "optimizer step" else before)

    return marked


@contextmanager
def whole_completions(setup: TrainingSetup) -> Iterator[None]:
    """Let rows end when they are full, and not before; whether they have takes values to tell."""
    check: Any = getattr(utils, "StopCheck", None)  # which older versions have no need of
    if check is None:
        yield
        return
    length = setup.config.sequence_length
    with mock.patch.object(check, "__call__", lambda *given: given[-1] >= length):
        yield


@contextmanager
def loaded_reference(load: Callable[[StackInputs], Any], inputs: StackInputs) -> Iterator[None]:
    """Let a trainer that loads a reference model by its name get what ``load`` returns."""
    if inputs.setup.config.method.stage not in GENERATING:
        yield
        return
    module = import_module("trl.trainer.grpo_trainer")
    with mock.patch.object(module, "create_model_from_path", side_effect=lambda *_, **__: load(inputs).eval()):
        yield


# -------------------------------------------------------------------- rows that a teacher judges
BETAS = {"forward-kl": 0.0, "jsd": 0.5, "reverse-kl": 1.0}
"""What distillation compares by -> ``beta``."""


def taught_arguments(setup: TrainingSetup) -> dict[str, Any]:
    """Return the keywords of ``GKDConfig`` for a job."""
    beta, generates = BETAS[str(setup.config.method.divergence)], setup.generates
    more = {"max_new_tokens": setup.completion_length} if generates else {}
    return {"beta": beta, "lmbda": float(generates), **more}


def taught_columns(setup: TrainingSetup, count: int) -> dict[str, Any]:
    """Return rows as GKD's collator takes them, with prompts of one token where nothing is generated from them."""
    length = setup.config.sequence_length
    prompted = length - setup.completion_length if setup.generates else 1
    mask = [0] * prompted + [1] * (length - prompted)
    return {"prompt": ["-"] * count, "input_ids": [[1] * length] * count, "completion_mask": [mask] * count}


def taught(trainer: Any, setup: TrainingSetup, recorder: Recorder) -> None:
    """Prepare a trainer's teacher in the job's own precision, and say when rows are generated."""
    in_its_precision(trainer, setup)
    trainer.teacher_model = trainer.accelerator.prepare_model(trainer.teacher_model, evaluation_mode=True)
    if setup.generates_rows:
        generating_within(trainer, recorder)
