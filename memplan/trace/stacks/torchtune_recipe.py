"""torchtune's recipes of fine-tuning on one device, in full and by adapters: its losses and the lines of their own training loops.

What is called on a stand-in for the recipe is its class's ``train`` itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torchtune
from torch import Tensor, nn
from torchtune import training
from torchtune.modules.loss import CEWithChunkedOutputLoss

from memplan.errors import CannotAnswerError
from memplan.trace.jobs.optimizers import cuda_optimizer_paths
from memplan.trace.pretended_cuda.composite_kernels import composite_kernels
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import LATER_MICRO_STEP
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.stacks.stack_inputs import STEPS, StackInputs, StackRun
from memplan.trace.stacks.torchtune_models import META, built
from memplan.trace.stacks.watched_parts import refuse_settings, watch_parts, watch_states
from memplan.training.resolved import TrainingSetup

PACKAGES = ("torchtune",)
RECIPES = {
    False: ("full_finetune_single_device", "FullFinetuneRecipeSingleDevice", "full fine-tuning"),
    True: ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice", "fine-tuning by adapters"),
}
"""Whether a job has adapters -> module and class of its recipe, and what that does."""
IGNORED = -100


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run torchtune's recipe on the model that the inputs ask for."""
    setup = inputs.setup
    refuse_settings(setup, "torchtune")
    name, recipe_class, purpose = RECIPES[setup.config.adapter is not None]
    recipe = _recipe_module(name)
    with composite_kernels(inputs.compute_capability), cuda_optimizer_paths():
        model = built(inputs.model.spec, setup)
        loop = _Loop(recipe, getattr(recipe, recipe_class), model, setup, recorder)
        with AnyNumber(), recorder:  # type: ignore[no-untyped-call]
            loop.train()
    return StackRun(f"torchtune's recipe of {purpose} on one device", inputs.model.spec.vocab_size)


def _recipe_module(name: str) -> ModuleType:
    """Return a recipe, which torchtune installs beside its package and no import reaches."""
    path = Path(torchtune.__file__).parent.parent / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"torchtune_{name}", path)
    if spec is None or spec.loader is None:
        raise CannotAnswerError(f"torchtune's recipe {path.name} is not installed")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Loop:
    """A stand-in that has what the recipe's own loop reads."""

    def __init__(self, recipe: ModuleType, own: Any, model: Any, setup: TrainingSetup, recorder: Recorder) -> None:
        self.recipe, self.own, self.model, self.setup, self.recorder = recipe, own, model, setup, recorder
        self.micro_step = 0
        self.loss: Any = _loss(model, setup)
        options: dict[str, Any] = {"fused": True} if setup.profile.optimizer == "fused" else {}
        if setup.profile.optimizer == "for-loop":
            options["foreach"] = False
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)
        head = model.output if isinstance(model.output, nn.Module) else model.output.linear
        watch_parts(model, model.layers, head, recorder)
        batch = setup.config.micro_batch_size
        self.ignored = torch.full((batch, 1), IGNORED, device=META)
        recorder.mark(self.ignored, "buffers")

    def train(self) -> None:
        """Run the recipe's ``train``."""
        recipe: Any = self.recipe
        recipe.tqdm = lambda **_: SimpleNamespace(update=_nothing, set_description=_nothing)
        recipe.training = SimpleNamespace(scale_grads=self._scaled)
        self.own.train(self._stand_in())

    def _stand_in(self) -> Any:
        config = self.setup.config
        return SimpleNamespace(
            _compile=False,
            _optimizer_in_bwd=False,
            _optimizer=SimpleNamespace(step=self._update, zero_grad=self.optimizer.zero_grad),
            _profiler=mock.MagicMock(),
            epochs_run=0,
            total_epochs=1,
            _steps_per_epoch=STEPS,
            max_steps_per_epoch=STEPS,
            _dataloader=_Batches(self._batches),
            profiler_profile_memory=False,
            _device=META,
            _loss_fn=SimpleNamespace(ignore_index=IGNORED),
            _loss_step=self._loss_step,
            _gradient_accumulation_steps=config.gradient_accumulation_steps,
            _model=self.model,
            _clip_grad_norm=1.0 if config.clip_gradients else None,
            _lr_scheduler=SimpleNamespace(step=_nothing),
            global_step=0,
            _log_every_n_steps=STEPS + 1,
            save_checkpoint=_nothing,
        )

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        config = self.setup.config
        shape = (config.micro_batch_size, config.sequence_length)
        for _ in range(STEPS):
            for self.micro_step in range(config.gradient_accumulation_steps):
                if not self.micro_step:
                    self.recorder.next_step()
                self._mark("forward")
                self.recorder.forward_begins()
                yield {name: torch.zeros(shape, dtype=torch.long) for name in ("tokens", "labels")}

    def _loss_step(self, batch: dict[str, Tensor]) -> Tensor:
        stand_in = SimpleNamespace(
            activations_handling_ctx=contextlib.nullcontext(),
            _model=self.model,
            _loss_fn=self.loss,
            ignore_labels_cache=self.ignored,
        )
        loss: Tensor = self.own._loss_step(stand_in, batch)
        self.recorder.forward_ends()
        self._mark("loss backward", backward=True)
        return loss

    def _mark(self, instant: str, *, backward: bool = False) -> None:
        self.recorder.instant(LATER_MICRO_STEP if self.micro_step else instant, backward=backward)

    def _scaled(self, model: Any, scaler: Tensor) -> None:
        self.recorder.instant("gradient clipping")
        training.scale_grads(model, scaler)

    def _update(self) -> None:
        self.recorder.instant("optimizer step")
        self.optimizer.step()
        watch_states(self.optimizer, self.recorder)


class _Batches:
    """A loader of batches."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.sampler = SimpleNamespace(set_epoch=_nothing)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._batches()  # type: ignore[no-any-return]


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _loss(model: Any, setup: TrainingSetup) -> Any:
    """Return the loss that the setup's kernels ask for."""
    kind = setup.profile.loss
    if kind == "fp32":
        return nn.CrossEntropyLoss(ignore_index=IGNORED)
    if kind != "chunked-logits":
        raise CannotAnswerError(f"kernels.loss: torchtune has no loss {kind}; it has chunked-logits and fp32")
    loss = CEWithChunkedOutputLoss(num_output_chunks=setup.profile.loss_chunks)
    model.set_num_output_chunks(loss.num_output_chunks)
    return loss
