"""The loop of transformers' Trainer: its own ``train()``, on a device that is said to be CUDA's."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate.accelerator
import peft
import torch
import transformers
import transformers.modeling_utils
import transformers.training_args
from accelerate.state import AcceleratorState
from torch import Tensor

from memplan.errors import CannotAnswerError
from memplan.model.spec import ModelSpec
from memplan.step.ends.end_settings import embeds_with_gradient
from memplan.step.states.parallel_shards import is_replicated, is_sharded, runs_engine
from memplan.trace.pretended_cuda.bitsandbytes_layers import cuda_backend, paged_states
from memplan.trace.pretended_cuda.fake_devices import all_replaced
from memplan.trace.pretended_cuda.flash_attention_2 import flash_attention_2
from memplan.trace.pretended_cuda.known_images import image_columns, known_images
from memplan.trace.ranks.deepspeed_engine import deepspeed_ranks, record_engine, zero_config
from memplan.trace.ranks.prepared_model import several_gpus
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import LATER_MICRO_STEP
from memplan.trace.stacks.huggingface.built_model import loaded_model, text_config, with_adapters
from memplan.trace.stacks.huggingface.liger_kernels import liger_backend
from memplan.trace.stacks.huggingface.masked_rows import masked_rows, pads_rows
from memplan.trace.stacks.huggingface.watched_model import mark_weights, watch, watched_by
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import pretended_card, watch_states
from memplan.training.resolved import TrainingSetup

PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes")
COLUMNS = ("input_ids", "attention_mask", "labels")
"""What a collator makes of rows of one length."""

DEVICE = "ACCELERATE_TORCH_DEVICE"
"""Variable of the environment that names the device to accelerate and to Trainer."""

OPTIMIZERS = {
    ("torch.optim.AdamW", "fused"): "adamw_torch_fused",
    ("torch.optim.AdamW", "foreach"): "adamw_torch",
    ("transformers.optimization.Adafactor", ""): "adafactor",
    ("torch.optim.RMSprop", ""): "rmsprop",
    ("torch.optim.SGD", ""): "sgd",
    ("bitsandbytes.optim.AdamW8bit", ""): "adamw_bnb_8bit",
    ("bitsandbytes.optim.PagedAdamW8bit", ""): "paged_adamw_8bit",
    ("bitsandbytes.optim.PagedAdamW", ""): "paged_adamw_32bit",
    ("bitsandbytes.optim.Lion", ""): "lion_32bit",
    ("bitsandbytes.optim.PagedLion", ""): "paged_lion_32bit",
}
"""Class and kernel -> what ``optim`` calls it."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run Trainer on the model that the inputs ask for."""
    machine = machine_of(inputs)
    ranks = deepspeed_ranks(inputs.setup, inputs.details.rank)
    with machine, ranks, tempfile.TemporaryDirectory() as folder:
        model = loaded_model(inputs)
        if inputs.setup.kbit_floats:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if inputs.setup.config.adapter is not None:
            model = with_adapters(model, inputs)
            if inputs.setup.stack.input_gradients == "reentrant" and embeds_with_gradient(inputs.setup):
                model.enable_input_require_grads()
        arguments = transformers.TrainingArguments(**training_arguments(inputs, Path(folder)))
        rows = Rows(inputs.setup, typed=has_types(inputs.model.spec))
        trainer: Any = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=partial(collated, inputs),
        )
        return trained(trainer, model, recorder, "transformers' Trainer", inputs.setup)


def machine_of(inputs: StackInputs) -> AbstractContextManager[None]:
    """Return what libraries take for the machine: a card that is pretended, or this one."""
    return pretended_machine(inputs) if inputs.is_traced else nullcontext()


@contextmanager
def pretended_machine(inputs: StackInputs) -> Iterator[None]:
    """Let libraries take ``meta`` for the card of a job."""
    compute_capability = inputs.compute_capability
    answers: list[tuple[Any, dict[str, Any]]] = [
        (transformers.training_args, {"is_torch_bf16_gpu_available": lambda: True}),
        (accelerate.accelerator, {"is_bf16_available": lambda _=False: True}),
        (torch.amp.GradScaler, {"_maybe_opt_step": _finite_step}),
    ]
    if hasattr(transformers.modeling_utils, "is_bitsandbytes_available"):  # which asks for a device up to 4.44
        answers.append((transformers.modeling_utils, {"is_bitsandbytes_available": lambda: True}))
    with ExitStack() as stack:
        for one in (
            pretended_card(compute_capability),
            cuda_backend(),
            paged_states(),
            liger_backend(compute_capability),
            flash_attention_2(),
            known_images(inputs.model.spec, inputs.setup),
            masked_rows(inputs),
            all_replaced(answers),
        ):
            stack.enter_context(one)
        stack.enter_context(mock.patch.dict(os.environ, {DEVICE: "meta"}))  # with what TrainingArguments writes into it
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def _finite_step(_: Any, optimizer: Any, __: Any, *args: Any, **options: Any) -> Any:
    """Step as a scaler does that found all gradients finite, which takes values to find."""
    return optimizer.step(*args, **options)


def training_arguments(inputs: StackInputs, folder: Path) -> dict[str, Any]:
    """Return the keywords of ``TrainingArguments`` for a job.

    Raises:
        CannotAnswerError: Trainer cannot do what the setup asks for.
    """
    setup, config = inputs.setup, inputs.setup.config
    engine = runs_engine(config.parallel)
    masters = config.master_weights != "none" and not engine
    if config.gradients.lifetime != "step" or masters or config.weight_average != "none":
        raise CannotAnswerError("Trainer steps after backward, without master weights and averages")
    if setup.autocast and (config.compute_dtype == "fp16") != config.loss_scaling:
        raise CannotAnswerError("Trainer scales the loss under fp16, and only there: loss_scaling says so")
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "max_steps": _step_count(setup),
        "optim": _optimizer_name(setup),
        "bf16": setup.autocast or (engine and config.compute_dtype == "bf16"),
        **({"deepspeed": zero_config(setup), "fp16": config.compute_dtype == "fp16"} if engine else {}),
        "ddp_find_unused_parameters": config.parallel.unused_parameters,
        "max_grad_norm": 1.0 if config.clip_gradients else 0.0,
        "gradient_checkpointing": setup.checkpointing != "none",
        "gradient_checkpointing_kwargs": {"use_reentrant": inputs.details.reentrant},
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": inputs.device == "cpu",
        **({"eval_strategy": "steps", "eval_steps": _steps_between(setup)} if config.evaluation else {}),
        "per_device_eval_batch_size": config.evaluation_batch_size or config.micro_batch_size,
    }


def collated(inputs: StackInputs, rows: list[dict[str, Tensor]]) -> Any:
    """Return rows as a collator makes a micro-batch of them, with the pixels of their images one behind another."""
    return {**transformers.default_data_collator(rows), **image_columns(inputs.model.spec, inputs.setup, len(rows))}


def _steps_between(setup: TrainingSetup) -> int:
    """Return how many steps lie between two evaluations: over shards a step behind one differs from the others, and both are reported."""
    return 2 if setup.config.evaluation and is_sharded(setup.config.parallel) else 1


def _step_count(setup: TrainingSetup) -> int:
    """Return how many steps are run: two evaluations, where they are among what is reported."""
    return max(STEPS, 2 * _steps_between(setup))


def row_count(setup: TrainingSetup) -> int:
    """Return how many full rows the steps take, or two batches of evaluation."""
    config = setup.config
    trained = config.micro_batch_size * config.gradient_accumulation_steps * _step_count(setup)
    return max(trained, 2 * (config.evaluation_batch_size or 0))


def _optimizer_name(setup: TrainingSetup) -> str:
    entries = {setup.optimizers[role].implementation for role in setup.optimizers}
    if len(entries) > 1:
        raise CannotAnswerError(f"Trainer makes one optimizer, and this job has {', '.join(sorted(entries))}")
    (implementation,) = entries
    kernel = setup.profile.optimizer if implementation == "torch.optim.AdamW" else ""
    name = OPTIMIZERS.get((implementation, kernel))
    if name is None:
        raise CannotAnswerError(f"Trainer has no optimizer that is {implementation} {kernel}".rstrip())
    return name


def has_types(spec: ModelSpec) -> bool:
    """Tell whether a model's tokenizer tells the type of each token."""
    return spec.encoder is not None and spec.encoder.typed_rows


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """As many full rows as the steps take."""

    def __init__(self, setup: TrainingSetup, *, typed: bool = False) -> None:
        self.length, config = row_count(setup), setup.config
        self.row = {name: torch.ones(setup.config.sequence_length, dtype=torch.long) for name in COLUMNS}
        if typed:
            self.row["token_type_ids"] = torch.zeros(setup.config.sequence_length, dtype=torch.long)
        if any(pads_rows(setup, count) for count in (config.micro_batch_size, config.evaluation_batch_size or 1)):
            self.row["attention_mask"][-1] = 0
        if setup.scores:
            self.row["labels"] = torch.ones(
                (), dtype=torch.long if setup.score_count > 1 else torch.float
            )  # a class, or a number

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.row


def in_its_precision(trainer: Any, setup: TrainingSetup) -> None:
    """Turn an accelerator that runs bf16 into one that runs fp16 where a job does, which it refuses on a device that is not called CUDA.

    Source:
        accelerate 1.15.0, accelerator.py, ``Accelerator.__init__``: autocast in fp16, and ``torch.amp.GradScaler``.
    """
    if trainer.args.bf16 and setup.config.compute_dtype == "fp16":
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")


def trained(trainer: Any, model: Any, recorder: Recorder, title: str, setup: TrainingSetup) -> StackRun:
    """Let a trainer train, told to ``recorder``; return what was run."""
    in_its_precision(trainer, setup)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.add_callback(_Instants(recorder, trainer))
    _announce(trainer.accelerator, "backward", lambda: backward_begins(recorder))
    own = hasattr(trainer, "_clip_grad_norm")  # transformers 5.0 has the accelerator clip
    clips = (trainer, "_clip_grad_norm") if own else (trainer.accelerator, "clip_grad_norm_")
    _announce(*clips, lambda: recorder.instant("gradient clipping"))
    if is_replicated(setup.config.parallel):
        mark_weights(trainer.model, recorder)  # which are sent to all ranks before the loop begins
    with several_gpus(recorder, setup, trainer), watched_by(recorder):
        trainer.train()
    config = text_config(trainer.model.config)
    return StackRun(f"{title} on {type(model).__name__}", int(config.vocab_size))


def _announce(owner: Any, name: str, announce: Callable[[], None]) -> None:
    """Let a method of one object tell when it is called."""
    method = getattr(owner, name)

    def announced(*args: Any, **options: Any) -> Any:
        announce()
        return method(*args, **options)

    setattr(owner, name, announced)


def backward_begins(recorder: Recorder) -> None:
    """Tell a recorder that forward ends, and that the loss runs backward."""
    recorder.forward_ends()
    recorder.instant("loss backward", backward=True, later=recorder.now == LATER_MICRO_STEP)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that accelerate, and DeepSpeed inside of that, have wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class _Instants(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells a recorder where the loop is."""

    def __init__(self, recorder: Recorder, trainer: Any) -> None:
        self.recorder, self.trainer = recorder, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        del args, state, control
        watch(objects["model"], self.recorder, gradients=not self.trainer.is_deepspeed_enabled)
        for second in self._second_models():
            mark_weights(second, self.recorder)
        if self.trainer.is_deepspeed_enabled:
            record_engine(self.trainer, self.recorder)
        self._hear_steps(innermost(objects["optimizer"]), objects["model"])

    def _second_models(self) -> list[Any]:
        """Return the models of its own that the trainer has beside the one that it trains."""
        named = (getattr(self.trainer, name, None) for name in ("ref_model", "teacher_model"))
        return [model for model in named if model is not None]

    def _hear_steps(self, optimizer: Any, model: Any) -> None:
        """Have an optimizer tell of its steps where Trainer does not yet: before they begin up to 4.44, when they are done up to 4.41."""
        told = {"model": model, "optimizer": optimizer}
        if not hasattr(transformers.TrainerCallback, "on_pre_optimizer_step"):
            optimizer.register_step_pre_hook(lambda *_: self.on_pre_optimizer_step(None, None, None, **told))
        if not hasattr(transformers.TrainerCallback, "on_optimizer_step"):
            optimizer.register_step_post_hook(lambda *_: self.on_optimizer_step(None, None, None, **told))

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        del control, objects
        if args.eval_strategy == "no" or state.global_step % args.eval_steps == 0:
            self.recorder.next_step()
        self.recorder.instant("forward")
        self.recorder.forward_begins()

    def on_substep_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        del args, state, control, objects
        self.recorder.instant(LATER_MICRO_STEP)
        self.recorder.forward_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        del control, objects
        if args.eval_strategy != "no" and state.global_step % args.eval_steps == 0:
            self.recorder.instant("evaluation")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        del args, state, control
        self.recorder.instant("optimizer step")
        for parameter in objects["model"].parameters():
            if parameter.grad is not None and isinstance(self.recorder, Recorder):
                self.recorder.book_apart(parameter.grad, "gradients")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        del args, state, control
        watch_states(innermost(objects["optimizer"]), self.recorder)
        mark_weights(objects["model"], self.recorder)
        for second in self._second_models():
            mark_weights(second, self.recorder)  # what its own engine of DeepSpeed has gathered for good since
