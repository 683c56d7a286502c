"""LitGPT's finetuning: its models, and the loops of ``litgpt/finetune/`` themselves under Lightning Fabric, or one rank of its FSDP.

What stands in are the data, the tokenizer, the checkpoint and the validation before the first step. With adapters the
whole of ``main`` in ``litgpt/finetune/lora.py`` runs, up to the end of its loop.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lightning.fabric import Fabric, connector
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins import BitsandbytesPrecision, MixedPrecision
from lightning.fabric.strategies import FSDPStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricOptimizer
from litgpt.args import EvalArgs, TrainArgs
from litgpt.finetune import full, lora
from litgpt.model import GPT, Block
from torch import Tensor

from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.trace.pretended_cuda.bitsandbytes_layers import FOUR_BIT, fill_four_bit, paged_states
from memplan.trace.ranks.flat_shards import flat_shards
from memplan.trace.ranks.fully_shard import ShardedRecorder
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.litgpt_models import adapted_config_of, config_of
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import pretended_card, refuse_settings, watch_parts, watch_states
from memplan.training.resolved import TrainingSetup

PACKAGES = ("litgpt", "lightning", "bitsandbytes")
META = torch.device("meta")
PRECISIONS = {"bf16": "bf16-true", "fp16": "16-true", "fp32": "32-true"}
"""Dtype of the weights -> what LitGPT calls it where products are in the same."""
BATCHES = 3
"""Batches that are evaluated: the loop still has a name for the logits of the one before."""
VALIDATE = full.validate
_SCHEDULER = SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0])


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run LitGPT's loop on the model that the inputs ask for."""
    setup = inputs.setup
    refuse_settings(setup, "litgpt", evaluates=True)
    sharded, adapted = isinstance(recorder, ShardedRecorder), setup.config.adapter is not None
    if setup.config.clip_gradients or setup.checkpointing != ("full" if sharded else "none"):
        raise CannotAnswerError("litgpt's finetuning clips no gradients, and checkpoints on several GPUs alone")
    ranks: AbstractContextManager[Any] = nullcontext()
    if isinstance(recorder, ShardedRecorder):
        ranks = flat_shards(setup.config.parallel, recorder)
    with pretended_card(inputs.compute_capability), ranks:
        loop = _AdaptedLoop(inputs.model, setup, recorder) if adapted else _Loop(inputs.model, setup, recorder)
        loop.train()
    kind = "finetuning of adapters" if adapted else "full fine-tuning"
    where = "under its FSDP" if sharded else "on one device"
    return StackRun(f"LitGPT's {kind} {where}", inputs.model.spec.vocab_size)


def precision_of(setup: TrainingSetup, *, sharded: bool = False) -> dict[str, Any]:
    """Return Fabric's arguments that say the dtypes of a setup.

    Args:
        sharded: Whether its FSDP strategy makes a plugin of its own of them.

    Raises:
        CannotAnswerError: LitGPT has no name for them.
    """
    weights, compute = setup.format_names["hidden_matrix"], setup.config.compute_dtype
    if weights in FOUR_BIT:
        return {"plugins": BitsandbytesPrecision(weights, TORCH_DTYPES[compute])}
    if (weights, compute) == ("fp32", "bf16"):
        return {"precision": "bf16-mixed"} if sharded else {"plugins": MixedPrecision("bf16-mixed", "cuda")}
    if weights != compute or weights not in PRECISIONS:
        raise CannotAnswerError(
            f"litgpt is traced in bf16-true, 32-true and bf16-mixed, not with {weights} and {compute}"
        )
    return {"precision": PRECISIONS[weights]}


class _NoDevice(CPUAccelerator):  # type: ignore[misc]
    """An accelerator whose device needs no setting up."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing."""


class _Shards(FSDPStrategy):  # type: ignore[misc]
    """What ``litgpt/finetune/full.py`` shards with, on a device without memory."""

    def __init__(self) -> None:
        super().__init__(
            accelerator=_NoDevice(),
            parallel_devices=[META],
            auto_wrap_policy={Block},
            activation_checkpointing_policy={Block},
            state_dict_type="full",
            limit_all_gathers=True,
            cpu_offload=False,
        )


class _Fabric(Fabric):  # type: ignore[misc]
    """Fabric, which tells where forward ends."""

    told: Any

    def backward(self, tensor: Tensor, *args: Any, **options: Any) -> None:
        """Run backward."""
        self.told.forward_ends()
        super().backward(tensor, *args, **options)

    def _validate_setup_optimizers(self, *_: Any) -> None:
        """Take parameters without memory, too."""


class _Loop:
    """A loop's inputs."""

    def __init__(self, model: Model, setup: TrainingSetup, recorder: Recorder) -> None:
        self.model, self.setup, self.recorder, self.micro_step = model, setup, recorder, 0
        sharded = isinstance(recorder, ShardedRecorder)
        strategy = _Shards() if sharded else SingleDeviceStrategy(device=META, accelerator=_NoDevice())
        with mock.patch.object(connector, "CUDAAccelerator", _NoDevice):  # bitsandbytes is for those alone
            self.fabric = _Fabric(strategy=strategy, **precision_of(setup, sharded=sharded))
        self.fabric._launched = True
        self.fabric.told, self.fabric.print = self, lambda *_, **__: None
        config = setup.config
        batch, accumulated = config.micro_batch_size, config.gradient_accumulation_steps
        self.arguments: dict[str, Any] = {
            "devices": 1,
            "train": TrainArgs(
                global_batch_size=batch * accumulated,
                micro_batch_size=batch,
                max_steps=STEPS,
                epochs=1,
                lr_warmup_steps=1,
                log_interval=STEPS * accumulated + 1,
                save_interval=None,
            ),
            "eval": EvalArgs(
                interval=1 if config.evaluation else STEPS + 1, max_new_tokens=1, initial_validation=False
            ),
            "data": None,
        }
        self.stand_ins: dict[str, Any] = {
            "Tokenizer": lambda *_: None,
            "ConcatDataset": lambda *_: None,
            "get_longest_seq_length": lambda *_: (config.sequence_length, 0),
            "validate": self.validate if config.evaluation else lambda *_, **__: None,
            "generate_example": lambda *_, **__: None,
            "CycleIterator": lambda _: _Epoch(self._batches()),
        }
        kernel = setup.profile.optimizer
        self.options: dict[str, Any] = {"fused": True} if kernel == "fused" else {"foreach": kernel == "foreach"}

    def train(self) -> None:
        """Run ``fit`` of ``litgpt/finetune/full.py``."""
        with self.fabric.init_module(empty_init=isinstance(self.recorder, ShardedRecorder)):
            module = GPT(config_of(self.model, self.setup))
        model: Any = self.fabric.setup(module)
        optimizer = torch.optim.AdamW(model.parameters(), **self.options)
        self.watch(module, optimizer)
        state = {
            "model": model,
            "optimizer": _FabricOptimizer(optimizer, self.fabric.strategy),
            "scheduler": _SCHEDULER,
            "iter_num": 0,
            "step_count": 0,
        }
        loader = SimpleNamespace(dataset=None)
        with mock.patch.multiple(full, **self.stand_ins), AnyNumber(), self.recorder:  # type: ignore[no-untyped-call]
            full.fit(
                fabric=self.fabric,
                state=state,
                train_dataloader=loader,
                val_dataloader=loader,
                resume=False,
                checkpoint_dir=None,
                out_dir=None,
                **self.arguments,
            )

    def watch(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Tell the recorder what there is, and where a step is."""
        watch_parts(module, module.transformer["h"], module.lm_head, self.recorder)
        optimizer.register_step_pre_hook(lambda *_: self.recorder.instant("optimizer step"))
        optimizer.register_step_post_hook(lambda *_: watch_states(optimizer, self.recorder))

    def validate(self, fabric: Any, model: Any, _: Any, given: Any, **__: Any) -> Any:
        """Run ``validate``, which both loops have, over batches like those of training."""
        self.recorder.instant("evaluation")
        with META:
            return VALIDATE(fabric, model, _Rows(self.rows() for _ in range(BATCHES)), given)

    def rows(self) -> dict[str, Tensor]:
        """Return token ids and labels."""
        shape = (self.setup.config.micro_batch_size, self.setup.config.sequence_length)
        return {name: torch.zeros(shape, dtype=torch.long, device=META) for name in ("input_ids", "labels")}

    def _batches(self) -> Iterator[dict[str, Any]]:
        config = self.setup.config
        while True:
            for self.micro_step in range(config.gradient_accumulation_steps):
                if not self.micro_step:
                    self.recorder.next_step()
                self.recorder.instant("forward", later=self.micro_step > 0)
                self.recorder.forward_begins()
                counts = torch.zeros(config.micro_batch_size, dtype=torch.long, device=META)
                yield {**self.rows(), "token_counts": {"raw": counts, "raw_plus_prompt_template": counts}}

    def forward_ends(self) -> None:
        """Note that the loss is there."""
        self.recorder.forward_ends()
        self.recorder.instant("loss backward", backward=True, later=self.micro_step > 0)


class _AdaptedLoop(_Loop):
    """The same with adapters."""

    def train(self) -> None:
        """Run ``main`` of ``litgpt/finetune/lora.py`` up to the end of ``fit``."""
        loop = lora.fit

        def fit(fabric: Any, model: Any, optimizer: Any, *given: Any, **options: Any) -> None:
            module = model._forward_module
            self.watch(module, optimizer.optimizer)
            for group in optimizer.param_groups:  # an embedding whose place another has taken is still among these
                for parameter in group["params"]:
                    self.recorder.mark(parameter, "weights")
            with AnyNumber(), self.recorder:  # type: ignore[no-untyped-call]
                loop(fabric, model, optimizer, *given, **options)
            raise _LoopEndedError

        loader, name, built = _Loader([None]), self.setup.format_names["hidden_matrix"], lora.GPT

        def quantised(config: Any) -> Any:
            module = built(config)
            for layer in module.modules() if name in FOUR_BIT else ():
                if hasattr(
                    getattr(layer, "weight", None), "quant_state"
                ):  # quantised from fp16 as soon as it is on a GPU
                    fill_four_bit(layer, name, torch.float16)
            return module

        stand_ins: dict[str, Any] = {
            **self.stand_ins,
            "fit": fit,
            "GPT": quantised,
            "load_checkpoint": lambda *_, **__: None,
            "get_lr_scheduler": lambda *_, **__: _SCHEDULER,
            "get_dataloaders": lambda *_: (loader, loader),
            "instantiate_torch_optimizer": lambda _, parameters: torch.optim.AdamW(parameters, **self.options),
        }
        config = adapted_config_of(self.model, self.setup)
        with mock.patch.multiple(lora, **stand_ins), paged_states(), TemporaryDirectory() as folder:
            try:
                lora.main(
                    fabric=self.fabric,
                    seed=1,
                    config=config,
                    checkpoint_dir=Path(folder),
                    out_dir=Path(folder),
                    optimizer="AdamW",
                    **self.arguments,
                )
            except _LoopEndedError:
                return


class _LoopEndedError(Exception):
    """Says that the loop has run, and that nothing need be saved."""


class _Loader(list[Any]):
    """A loader of batches."""

    dataset = None


class _Rows:
    """A loader of batches, made as they are asked for."""

    def __init__(self, batches: Iterator[dict[str, Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._batches


class _Epoch:
    """An iterator of one epoch."""

    epoch = 0

    def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
        self._batches = batches

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)
