"""The loop of TRL's PPOTrainer, which is its own: rollouts, scores, and epochs of a policy with a model of values beside it."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.catalog.config_keys.method_keys import Ppo
from memplan.trace.pretended_cuda.chosen_rows import ChosenRows
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import LATER_MICRO_STEP
from memplan.trace.stacks.huggingface.built_model import loaded_model, lora_config, made_on, text_config
from memplan.trace.stacks.huggingface.generated_rows import whole_completions
from memplan.trace.stacks.huggingface.trainer_loop import backward_begins, innermost, training_arguments
from memplan.trace.stacks.huggingface.watched_model import mark_weights, watch, watched_by
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import finished_gradient, watch_states
from memplan.training.second_models import REWARD, VALUES

VALUE_BACKWARD = "value model backward"
"""The instant of the backward of a model of values, behind the policy's."""


def run_ppo(
    trainer_class: Any, arguments_class: Any, inputs: StackInputs, tokenizer: Any, recorder: Recorder
) -> StackRun:
    """Run PPOTrainer on the models that the inputs ask for; the machine is pretended already."""
    module, config = import_module(trainer_class.__module__), inputs.setup.config
    with tempfile.TemporaryDirectory() as folder:
        policy = loaded_model(inputs)
        referred = loaded_model(inputs).eval() if config.method.reference_model == "resident" else None
        values, rewards = loaded_model(inputs.beside(VALUES)), loaded_model(inputs.beside(REWARD)).eval()
        keywords = training_arguments(inputs, Path(folder))
        with made_on(inputs.device):
            adapters = lora_config(inputs) if config.adapter is not None else None
            trainer: Any = trainer_class(
                args=arguments_class(**keywords, **_phase_arguments(inputs)),
                model=policy,
                ref_model=referred,
                reward_model=rewards,
                value_model=values,
                train_dataset=_prompts(inputs),
                peft_config=adapters,
                processing_class=tokenizer,
            )
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.log = lambda *_: None
        chosen = ChosenRows(0) if inputs.is_traced else nullcontext()
        with chosen, whole_completions(inputs.setup), _told(module, trainer, recorder), watched_by(recorder):
            trainer.train()
    size = int(text_config(trainer.policy_model.config).vocab_size)
    return StackRun(f"TRL's {trainer_class.__name__} on {type(policy).__name__}", size, (ASSUMED,))


class _SomeCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no sum of a mask be zero, which ``masked_var`` asks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return False
        return func(*args, **(kwargs or {}))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        with _SomeCount():  # type: ignore[no-untyped-call]
            return function(*args, **options)

    return counted


ASSUMED = "every prompt is as long as the longest, and every answer as long as it may be"


def _phase_arguments(inputs: StackInputs) -> dict[str, Any]:
    """Return the keywords of ``PPOConfig`` for a job."""
    setup, config = inputs.setup, inputs.setup.config
    phase = config.method.ppo or Ppo()
    rows = config.micro_batch_size * config.gradient_accumulation_steps
    return {
        "response_length": setup.rollout.completion_length,
        "num_ppo_epochs": phase.epochs,
        "num_mini_batches": phase.mini_batches,
        "local_rollout_forward_batch_size": phase.forward_batch,
        "total_episodes": rows * STEPS,
        "num_sample_generations": 0,
    }


def _prompts(inputs: StackInputs) -> Any:
    config = inputs.setup.config
    length = config.sequence_length - inputs.setup.rollout.completion_length
    datasets = import_module("datasets")
    return datasets.Dataset.from_dict(
        {"input_ids": [[1] * length] * (config.micro_batch_size * config.gradient_accumulation_steps * (STEPS + 2))}
    )


def _announced(function: Callable[..., Any], before: Callable[[], None], after: Callable[[], None]) -> Any:
    def told(*args: Any, **options: Any) -> Any:
        before()
        try:
            return function(*args, **options)
        finally:
            after()

    return told


@contextmanager
def _told(module: Any, trainer: Any, recorder: Recorder) -> Iterator[None]:
    """Tell a recorder what the trainer's models are, and where its loop is."""
    optimizer, policy, values = innermost(trainer.optimizer), trainer.policy_model, trainer.value_model
    watch(policy, recorder)
    _watch_values(values, recorder)
    for model in (trainer.ref_model, trainer.reward_model):
        if model is not None:
            mark_weights(model, recorder)

    def begins() -> None:
        recorder.next_step()
        recorder.instant("generation")

    accumulated = [0]

    def forward(model: Any, *args: Any, **options: Any) -> Any:
        if model is trainer.model:
            recorder.instant(LATER_MICRO_STEP if accumulated[0] else "forward")
            accumulated[0] += 1
            recorder.forward_begins()
        return own(model, *args, **options)

    def steps(*_: Any) -> None:
        recorder.instant("optimizer step")
        accumulated[0] = 0
        for parameter in trainer.model.parameters():
            if parameter.grad is not None and isinstance(recorder, Recorder):
                recorder.book_apart(parameter.grad, "gradients")

    def stepped(*_: Any) -> None:
        watch_states(optimizer, recorder)
        for model in (policy, values):
            mark_weights(model, recorder)

    own = module.forward
    optimizer.register_step_pre_hook(steps)
    optimizer.register_step_post_hook(stepped)
    trainer.accelerator.backward = _announced(
        trainer.accelerator.backward, lambda: backward_begins(recorder), lambda: None
    )
    rolled = _announced(module.batch_generation, begins, lambda: recorder.instant("scoring"))
    trainer.optimizer.zero_grad = _announced(
        trainer.optimizer.zero_grad, lambda: None, lambda: recorder.instant("metrics")
    )
    replaced = {"forward": forward, "batch_generation": rolled, "masked_var": _counted(module.masked_var)}
    with patch.multiple(module, **replaced):
        yield


def _watch_values(model: Any, recorder: Recorder) -> None:
    """Let a recorder see a model of values: its tensors, its gradients, and when its backward begins."""
    mark_weights(model, recorder)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(finished_gradient(recorder, name))
    for name, tensor in model.named_buffers():
        recorder.mark(tensor, "buffers", name)
    model.score.register_forward_hook(lambda _m, _i, out: recorder.backward_reaches(out, VALUE_BACKWARD))
