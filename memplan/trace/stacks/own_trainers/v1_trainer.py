"""LLaMA-Factory's v1 engine: the ``fit`` of its own trainer, over a model whole or in its FSDP2 engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from llamafactory.v1.config.arg_utils import PluginConfig
from llamafactory.v1.config.training_args import TrainingArguments
from llamafactory.v1.core import base_trainer
from llamafactory.v1.plugins.trainer_plugins.distributed import fsdp2
from llamafactory.v1.trainers import sft_trainer
from llamafactory.v1.utils import helper
from torch import Tensor

from memplan.errors import CannotAnswerError
from memplan.trace.ranks.fully_shard import ShardedRecorder, mesh_degrees, sharding
from memplan.trace.recording.recorder import Recorder
from memplan.trace.stacks.huggingface.built_model import loaded_model, with_adapters
from memplan.trace.stacks.huggingface.trainer_loop import pretended_machine
from memplan.trace.stacks.huggingface.watched_model import mark_weights, watch, watched_by
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import refuse_settings, watch_states
from memplan.training.resolved import TrainingSetup

PACKAGES = ("llamafactory", "transformers", "peft", "accelerate", "bitsandbytes")
META = torch.device("meta")
CLIP = torch.nn.utils.clip_grad_norm_
COLUMNS = {"input_ids": torch.long, "attention_mask": torch.long, "labels": torch.long, "loss_weights": torch.float}
"""What its renderer makes of messages (v1/core/utils/rendering.py), positions aside."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run the trainer's own loop on the model as ``ModelEngine`` leaves it."""
    setup = inputs.setup
    refuse_settings(setup, "LLaMA-Factory's v1 engine")
    if not setup.config.clip_gradients or setup.optimizers["hidden_matrix"].implementation != "torch.optim.AdamW":
        raise CannotAnswerError("LLaMA-Factory's v1 engine steps torch's AdamW, after it has clipped gradients")
    with pretended_machine(inputs), _ranks(setup, recorder) as interface, TemporaryDirectory() as folder:
        model = loaded_model(inputs)
        if setup.config.adapter is not None:
            model = with_adapters(model, inputs)
        arguments = TrainingArguments(
            output_dir=folder,
            micro_batch_size=setup.config.micro_batch_size,
            cutoff_len=setup.config.sequence_length,
            max_steps=STEPS,
            bf16=setup.config.compute_dtype == "bf16",
            enable_activation_checkpointing=setup.checkpointing != "none",
            dist_config=_sharded(setup) if isinstance(recorder, ShardedRecorder) else None,
            logging_steps=STEPS + 1,
        )
        with _stand_ins(interface, _Micro(setup, recorder)):
            trainer = _RecordedTrainer(recorder, arguments, model)
            with watched_by(recorder):
                trainer.fit()
    vocabulary = int(trainer.model.config.get_text_config().vocab_size)
    return StackRun(f"LLaMA-Factory's v1 trainer on {type(model).__name__}", vocabulary)


def _sharded(setup: TrainingSetup) -> PluginConfig:
    parallel = setup.config.parallel
    return PluginConfig(name="fsdp2", reshard_after_forward=parallel.reshard_after_forward)


@contextmanager
def _ranks(setup: TrainingSetup, recorder: Recorder) -> Iterator[Any]:
    """Yield what the engine asks for ranks and devices: of one process, or of the first of several."""
    config = setup.config
    alone = SimpleNamespace(
        current_device=META,
        model_device_mesh=None,
        get_world_size=lambda *_: config.parallel.data,
        get_rank=lambda *_: 0,
        get_local_rank=lambda *_: 0,
        all_reduce=lambda data, **_: data,
        sync=lambda: None,
    )
    if not isinstance(recorder, ShardedRecorder):
        yield alone
        return
    with sharding(fsdp2, mesh_degrees(config.parallel), recorder) as mesh:
        alone.model_device_mesh = mesh
        yield alone


@contextmanager
def _stand_ins(interface: Any, batches: _Micro) -> Iterator[None]:
    """Let the engine's modules find ranks, device and batches that are pretended."""
    with ExitStack() as around:
        for module in (base_trainer, sft_trainer, fsdp2, helper):
            around.enter_context(mock.patch.object(module, "DistributedInterface", return_value=interface))
        around.enter_context(mock.patch.object(base_trainer, "BatchGenerator", return_value=batches))
        around.enter_context(mock.patch.object(base_trainer, "TrainingCheckpointCoordinator"))
        around.enter_context(mock.patch("torch.nn.utils.clip_grad_norm_", batches.clipped))
        yield


class _Micro:
    """Batches on the host, as its generator joins them: the micro-batches of a step in one list."""

    def __init__(self, setup: TrainingSetup, recorder: Recorder) -> None:
        self.setup, self.recorder = setup, recorder

    num_micro_batch = 1

    def clipped(self, *args: Any, **options: Any) -> Any:
        """Clip gradients, and tell that."""
        self.recorder.instant("gradient clipping")
        return CLIP(*args, **options)

    def __len__(self) -> int:
        return STEPS

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: rows are alike."""

    def __iter__(self) -> Iterator[list[dict[str, Tensor]]]:
        config = self.setup.config
        shape = (config.micro_batch_size, config.sequence_length)
        for _ in range(STEPS):
            self.recorder.next_step()
            self.recorder.instant("forward")
            rows = {name: torch.ones(shape, dtype=dtype) for name, dtype in COLUMNS.items()}
            rows["position_ids"] = torch.arange(1, shape[1] + 1).repeat(shape[0], 1)
            yield [rows] * config.gradient_accumulation_steps


class _RecordedTrainer(sft_trainer.SFTTrainer):  # type: ignore[misc]
    """Its trainer, which tells where a step is."""

    def __init__(self, recorder: Recorder, arguments: TrainingArguments, model: Any) -> None:
        self.recorder = recorder
        renderer = SimpleNamespace(processor=SimpleNamespace(model_input_names=[]))
        super().__init__(arguments, model, renderer, [None])
        watch(self.model, recorder)

    def _init_optimizer(self) -> None:
        super()._init_optimizer()
        self.done = 0
        self.optimizer.register_step_pre_hook(lambda *_: self.recorder.instant("optimizer step"))
        self.optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        watch_states(self.optimizer, self.recorder)
        mark_weights(self.model, self.recorder)
        self.done = 0

    def compute_loss(self, batch: Any) -> Tensor:
        """Form the loss, and tell where it begins and ends."""
        self.recorder.instant("forward", later=self.done > 0)
        self.recorder.forward_begins()
        loss: Tensor = super().compute_loss(batch)
        self.recorder.forward_ends()
        self.recorder.instant("loss backward", backward=True, later=self.done > 0)
        self.done += 1
        return loss
