"""A training loop as transformers' and PEFT's documentation writes it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from memplan.errors import CannotAnswerError
from memplan.trace.pretended_cuda.bitsandbytes_layers import cuda_backend, paged_states
from memplan.trace.pretended_cuda.flash_attention_2 import flash_attention_2
from memplan.trace.pretended_cuda.known_images import image_columns, known_images
from memplan.trace.recording.recorder import Recorder
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.huggingface.built_model import adapted, loaded_model, text_config
from memplan.trace.stacks.huggingface.masked_rows import masked_rows, pads_rows
from memplan.trace.stacks.huggingface.watched_model import mark_weights, watch, watched_by
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import pretended_card, watch_states
from memplan.training.resolved import TrainingSetup

PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes")
COLLATED = ("input_ids", "attention_mask", "labels")
"""What a collator of transformers makes of rows of one length, int64 each."""

LEARNING_RATE = 1e-4
OWN_RATE = {"transformers.optimization.Adafactor": {"scale_parameter": False, "relative_step": False}}
"""Classes that set a rate of their own -> what a loop tells them so that they take its rate."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run the loop on the model that the inputs ask for."""
    config = inputs.setup.config
    if config.loss_scaling or config.gradients.lifetime != "step" or config.master_weights != "none":
        raise CannotAnswerError("the plain loop has neither a loss scale nor master weights, and steps after backward")
    with _kernels(inputs):
        model = loaded_model(inputs)
        if config.adapter is not None:
            model = adapted(model, inputs)
        elif inputs.setup.checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": inputs.details.reentrant})
        model.train()
        watch(model, recorder)
        optimizer = optimizer_of(model, inputs.setup)
        with watched_by(recorder):
            _loop(model, optimizer, inputs, recorder)
    return StackRun(f"a plain loop over {type(model).__name__}", int(text_config(model.config).vocab_size))


@contextmanager
def _kernels(inputs: StackInputs) -> Iterator[None]:
    """Let libraries choose the kernels of a card that is pretended; on a device they choose themselves."""
    if not inputs.is_traced:
        yield
        return
    with (
        pretended_card(inputs.compute_capability),
        cuda_backend(),
        paged_states(),
        flash_attention_2(),
        known_images(inputs.model.spec, inputs.setup),
        masked_rows(inputs),
    ):
        yield


def _loop(model: Any, optimizer: torch.optim.Optimizer, inputs: StackInputs, recorder: Recorder) -> None:
    """Train; names live as long as they do where this is written, the last step's among them, unless the config says less."""
    config, until = inputs.setup.config, inputs.setup.config.outputs_until
    accumulated = config.gradient_accumulation_steps
    for step in range(STEPS):
        recorder.next_step()
        for micro_step in range(accumulated):
            recorder.instant("forward", later=micro_step > 0)
            recorder.forward_begins()
            batch = _batch(inputs, config.micro_batch_size)
            with autocast_of(inputs):
                out = model(**batch)
            if until == "forward":
                out = {"loss": out.loss}
            recorder.forward_ends()
            recorder.instant("loss backward", backward=True, later=micro_step > 0)
            (out["loss"] / accumulated if accumulated > 1 else out["loss"]).backward()
            if until in ("forward", "backward"):
                del out
        if config.clip_gradients:
            recorder.instant("gradient clipping")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        recorder.instant("optimizer step")
        optimizer.step()
        watch_states(optimizer, recorder)
        mark_weights(model, recorder)
        optimizer.zero_grad()
        if until == "step":
            del out
        if config.evaluation and step == STEPS - 1:  # as an epoch ends, so that the reported forward follows a step
            recorder.instant("evaluation")
            model.eval()
            batch = _batch(inputs, config.evaluation_batch_size or config.micro_batch_size)
            with torch.no_grad(), autocast_of(inputs):
                out = model(**batch)
            if until != "next":
                del out
            model.train()


def _batch(inputs: StackInputs, rows: int) -> dict[str, Any]:
    """Return what a collator makes of so many rows, on the device."""
    shape = (rows, inputs.setup.config.sequence_length)
    batch = {name: torch.ones(shape, dtype=torch.long, device=inputs.device) for name in COLLATED}
    if pads_rows(inputs.setup, rows):
        batch["attention_mask"][:, -1] = 0
    images = image_columns(inputs.model.spec, inputs.setup, rows)
    return batch | {name: part.to(inputs.device) for name, part in images.items()}


def autocast_of(inputs: StackInputs) -> AbstractContextManager[Any]:
    """Return the region that forward runs in."""
    setup = inputs.setup
    if not setup.autocast:
        return nullcontext()
    return torch.autocast("cpu" if inputs.device == "cpu" else "cuda", dtype=TORCH_DTYPES[setup.config.compute_dtype])


def optimizer_of(model: Any, setup: TrainingSetup) -> torch.optim.Optimizer:
    """Return the optimizer of the setup over all parameters, as a script makes it.

    Raises:
        CannotAnswerError: There are several, or its class cannot be imported.
    """
    entries = {name: setup.optimizers[role] for role, name in setup.optimizer_names.items()}
    if len(entries) > 1:
        raise CannotAnswerError(f"the plain loop has one optimizer, and this job has {', '.join(entries)}")
    ((name, entry),) = entries.items()
    module, _, last = entry.implementation.rpartition(".")
    try:
        chosen: Any = getattr(import_module(module), last)
    except (ImportError, AttributeError, ValueError):
        raise CannotAnswerError(
            f"optimizer {name} has no class that a loop could use: {entry.implementation}"
        ) from None
    options: dict[str, Any] = {"lr": LEARNING_RATE, **OWN_RATE.get(entry.implementation, {})}
    if entry.implementation == "torch.optim.AdamW":
        kernel = setup.profile.optimizer
        options |= {"fused": True} if kernel == "fused" else {"foreach": kernel == "foreach"}
    elif module.startswith("torch."):
        options["foreach"] = setup.profile.optimizer != "for-loop"
    optimizer: torch.optim.Optimizer = chosen(model.parameters(), **options)
    return optimizer
