"""LitGPT's full fine-tuning on one GPU: its models, and the loop of ``litgpt/finetune/full.py`` itself under Lightning Fabric.

What stands in are the data, the tokenizer and the validation before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricOptimizer
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.finetune import full
from litgpt.model import GPT
from torch import Tensor

from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.spec import Attention, Mlp
from memplan.trace.jobs.optimizers import cuda_optimizer_paths
from memplan.trace.pretended_cuda.autocast_region import cuda_autocast
from memplan.trace.pretended_cuda.composite_kernels import composite_kernels
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import LATER_MICRO_STEP
from memplan.trace.stacks.stack_inputs import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import AnyNumber, refuse_settings, watch_parts, watch_states
from memplan.training.resolved import TrainingSetup

PACKAGES = ("litgpt", "lightning")
META = torch.device("meta")
PRECISIONS = {"bf16": "bf16-true", "fp16": "16-true", "fp32": "32-true"}
"""Dtype of the weights -> what LitGPT calls it where products are in the same."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run LitGPT's loop on the model that the inputs ask for."""
    setup = inputs.setup
    refuse_settings(setup, "litgpt")
    if setup.config.clip_gradients or setup.checkpointing != "none" or setup.config.adapter is not None:
        raise CannotAnswerError(
            "litgpt's full fine-tuning on one GPU neither clips nor checkpoints, and has no adapters"
        )
    with cuda_autocast(), composite_kernels(inputs.compute_capability), cuda_optimizer_paths():
        loop = _Loop(inputs.model, setup, recorder)
        with AnyNumber(), recorder:  # type: ignore[no-untyped-call]
            loop.train()
    return StackRun("LitGPT's full fine-tuning on one device", inputs.model.spec.vocab_size)


def config_of(model: Model) -> Config:
    """Return LitGPT's config of a model that is built like Llama.

    Raises:
        CannotAnswerError: It is of another family, or has layers of several kinds.
    """
    spec = model.spec
    layer = spec.runs[0].layer
    heads, mlp = layer.attention, layer.feed_forward
    assert isinstance(heads, Attention)
    assert isinstance(mlp, Mlp)
    gemma = spec.architecture == "gemma"
    return Config(
        name="Gemma" if gemma else spec.architecture,
        block_size=spec.max_position_embeddings,
        vocab_size=spec.vocab_size,
        padded_vocab_size=spec.vocab_size,
        n_layer=spec.num_hidden_layers,
        n_embd=spec.hidden_size,
        n_head=heads.num_heads,
        head_size=heads.head_dim,
        n_query_groups=heads.num_key_value_heads,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        attn_bias=heads.qkv_bias,
        norm_qk=heads.query_key_norm is not None,
        norm_class_name="RMSNorm",
        mlp_class_name="GemmaMLP" if gemma else "LLaMAMLP",
        intermediate_size=mlp.intermediate_size,
        scale_embeddings=gemma,
    )


def precision_of(setup: TrainingSetup) -> dict[str, Any]:
    """Return Fabric's arguments that say the dtypes of a setup.

    Raises:
        CannotAnswerError: LitGPT has no name for them.
    """
    weights, compute = setup.format_names["hidden_matrix"], setup.config.compute_dtype
    if (weights, compute) == ("fp32", "bf16"):
        return {"plugins": MixedPrecision("bf16-mixed", "cuda")}
    if weights != compute or weights not in PRECISIONS:
        raise CannotAnswerError(
            f"litgpt is traced in bf16-true, 32-true and bf16-mixed, not with {weights} and {compute}"
        )
    return {"precision": PRECISIONS[weights]}


class _NoDevice(CPUAccelerator):  # type: ignore[misc]
    """An accelerator whose device needs no setting up."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing."""


class _Fabric(Fabric):  # type: ignore[misc]
    """Fabric, which tells where forward ends."""

    told: Any

    def backward(self, tensor: Tensor, *args: Any, **options: Any) -> None:
        """Run backward."""
        self.told.forward_ends()
        super().backward(tensor, *args, **options)


class _Loop:
    """A loop's inputs."""

    def __init__(self, model: Model, setup: TrainingSetup, recorder: Recorder) -> None:
        self.setup, self.recorder, self.micro_step = setup, recorder, 0
        strategy = SingleDeviceStrategy(device=META, accelerator=_NoDevice())
        self.fabric = _Fabric(strategy=strategy, **precision_of(setup))
        self.fabric.told, self.fabric.print = self, lambda *_, **__: None
        with self.fabric.init_module(empty_init=False):
            module = GPT(config_of(model))
        self.model: Any = self.fabric.setup(module)
        kernel = setup.profile.optimizer
        options: dict[str, Any] = {"fused": True} if kernel == "fused" else {"foreach": kernel == "foreach"}
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **options)
        watch_parts(module, module.transformer["h"], module.lm_head, recorder)

    def train(self) -> None:
        """Run ``fit`` of ``litgpt/finetune/full.py``."""
        config = self.setup.config
        optimizer = _FabricOptimizer(self.optimizer, self.fabric.strategy)
        self.optimizer.register_step_pre_hook(lambda *_: self.recorder.instant("optimizer step"))
        self.optimizer.register_step_post_hook(lambda *_: watch_states(self.optimizer, self.recorder))
        state = {
            "model": self.model,
            "optimizer": optimizer,
            "scheduler": SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0]),
            "iter_num": 0,
            "step_count": 0,
        }
        batch, accumulated = config.micro_batch_size, config.gradient_accumulation_steps
        stand_ins: dict[str, Any] = {
            "Tokenizer": lambda *_: None,
            "ConcatDataset": lambda *_: None,
            "get_longest_seq_length": lambda *_: (config.sequence_length, 0),
            "validate": lambda *_, **__: None,
            "CycleIterator": lambda _: self.batches(),
        }
        with mock.patch.multiple(full, **stand_ins):
            full.fit(
                fabric=self.fabric,
                state=state,
                train_dataloader=SimpleNamespace(dataset=None),
                val_dataloader=SimpleNamespace(dataset=None),
                devices=1,
                resume=False,
                checkpoint_dir=None,
                out_dir=None,
                train=TrainArgs(
                    global_batch_size=batch * accumulated,
                    micro_batch_size=batch,
                    max_steps=STEPS,
                    epochs=1,
                    log_interval=STEPS * accumulated + 1,
                    save_interval=None,
                ),
                eval=EvalArgs(interval=STEPS + 1, initial_validation=False),
                data=None,
            )

    def batches(self) -> Any:
        """Return an endless iterator of micro-batches, which has an epoch."""
        return _Epoch(self._batches())

    def _batches(self) -> Iterator[dict[str, Any]]:
        config = self.setup.config
        shape = (config.micro_batch_size, config.sequence_length)
        while True:
            for self.micro_step in range(config.gradient_accumulation_steps):
                if not self.micro_step:
                    self.recorder.next_step()
                self._mark("forward")
                self.recorder.forward_begins()
                rows = {name: torch.zeros(shape, dtype=torch.long, device=META) for name in ("input_ids", "labels")}
                counts = torch.zeros(shape[0], dtype=torch.long, device=META)
                yield {**rows, "token_counts": {"raw": counts, "raw_plus_prompt_template": counts}}

    def forward_ends(self) -> None:
        """Note that the loss is there."""
        self.recorder.forward_ends()
        self._mark("loss backward", backward=True)

    def _mark(self, instant: str, *, backward: bool = False) -> None:
        self.recorder.instant(LATER_MICRO_STEP if self.micro_step else instant, backward=backward)


class _Epoch:
    """An iterator of one epoch."""

    epoch = 0

    def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
        self._batches = batches

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)
