"""torchtune's recipes of fine-tuning on one device and over shards, in full and by adapters: its losses and the lines of their own training loops.

What is called on a stand-in for the recipe is its class's ``train`` itself.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torchtune
from torch import Tensor, nn
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.training import _activation_offloading, _distributed

from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.step.kernels.family_code import UNSCALED_POSITIONS
from memplan.trace.jobs.optimizers import cuda_optimizer_paths
from memplan.trace.pretended_cuda.composite_kernels import composite_kernels
from memplan.trace.ranks.fully_shard import ShardedRecorder, mesh_degrees, sharding
from memplan.trace.recording.host_copies import host_copies
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import refuse_settings, watch_parts, watch_states
from memplan.training.resolved import TrainingSetup

META = torch.device("meta")
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj")
PARTS = ("gate_proj", "up_proj", "down_proj")


def built(spec: ModelSpec, setup: TrainingSetup) -> nn.Module:
    """Return torchtune's model of these shapes, adapted and checkpointed as the setup says, without memory.

    Raises:
        CannotAnswerError: torchtune has no such model, or no such adapters.
    """
    adapter, floats = setup.config.adapter, setup.format_names["embedding"]
    if floats not in ("fp32", "bf16"):
        raise CannotAnswerError("torchtune's models are traced with floats in fp32 or bf16")
    builder = _builder(spec, adapted=adapter is not None)
    options = _shapes(spec) | ({} if adapter is None else _adapter_options(setup))
    with training.set_default_dtype(TORCH_DTYPES[floats]), META:
        model: Any = builder(**options)
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
            module.to(META)
    if adapter is not None:
        set_trainable_params(model, get_adapter_params(model))
    if setup.checkpointing == "full":
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    elif setup.checkpointing != "none":
        raise CannotAnswerError(f"activation_checkpointing: torchtune's recipes have no {setup.checkpointing}")
    model.train()
    return model  # type: ignore[no-any-return]


def _builder(spec: ModelSpec, *, adapted: bool) -> Callable[..., Any]:
    """Return torchtune's function for a family: Llama's is that of the release that is made for so many positions."""
    family = spec.architecture
    if family == "llama":
        shared = spec.max_position_embeddings > UNSCALED_POSITIONS
        family = "llama3_2" if spec.tie_word_embeddings else "llama3_1" if shared else "llama3"
    module = import_module(f"torchtune.models.{family}._component_builders")
    return getattr(module, f"lora_{family}" if adapted else family)  # type: ignore[no-any-return]


def _shapes(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of a builder that say a model's shapes."""
    layer = spec.runs[0].layer
    heads, mlp = layer.attention, layer.feed_forward
    assert isinstance(heads, Attention)
    assert isinstance(mlp, Mlp)
    options: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "num_layers": spec.num_hidden_layers,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_key_value_heads,
        "embed_dim": spec.hidden_size,
        "max_seq_len": spec.max_position_embeddings,
        "intermediate_dim": mlp.intermediate_size,
    }
    if spec.architecture in ("gemma", "gemma2"):
        return options | {"head_dim": heads.head_dim}
    if heads.query_size != spec.hidden_size:
        raise CannotAnswerError(f"torchtune's {spec.architecture} has heads that together are as wide as the model")
    if spec.architecture == "qwen2":
        options["tie_word_embeddings"] = spec.tie_word_embeddings
    return options


def _adapter_options(setup: TrainingSetup) -> dict[str, Any]:
    """Return the arguments of a builder that say its adapters."""
    adapter = setup.config.adapter
    assert adapter is not None
    targets = (*SPLIT, *PARTS) if "all-linear" in adapter.targets else adapter.targets
    return {
        "lora_attn_modules": [name.replace("o_proj", "output_proj") for name in SPLIT if name in targets],
        "apply_lora_to_mlp": PARTS[0] in targets,
        **({"apply_lora_to_output": True} if "lm_head" in targets else {}),
        "lora_rank": adapter.rank,
        "lora_alpha": 2 * adapter.rank,
        "lora_dropout": adapter.dropout or 0.0,
        "use_dora": adapter.kind == "dora",
        "quantize_base": bool(setup.formats["hidden_matrix"].decoding_temporaries),
    }


PACKAGES = ("torchtune",)
DISTRIBUTED = {
    False: ("full_finetune_distributed", "FullFinetuneRecipeDistributed", "full fine-tuning over FSDP2's shards"),
    True: ("lora_finetune_distributed", "LoRAFinetuneRecipeDistributed", "fine-tuning by adapters over FSDP2's shards"),
}
"""Whether a job has adapters -> module and class of its recipe of one rank of several, and what that does."""
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
    sharded = isinstance(recorder, ShardedRecorder)
    name, recipe_class, purpose = (DISTRIBUTED if sharded else RECIPES)[setup.config.adapter is not None]
    recipe = _recipe_module(name)
    with ExitStack() as around, composite_kernels(inputs.compute_capability), cuda_optimizer_paths():
        model: Any = built(inputs.model.spec, setup)
        if isinstance(recorder, ShardedRecorder):
            mesh = around.enter_context(sharding(_distributed, mesh_degrees(setup.config.parallel), recorder))
            again = setup.config.parallel.reshard_after_forward
            conditions = [training.get_shard_conditions]
            training.shard_model(model, conditions, cpu_offload=False, reshard_after_forward=again, dp_mesh=mesh)
            around.enter_context(mock.patch.object(torch.distributed, "all_reduce", _nothing))
        around.enter_context(host_copies(_activation_offloading, recorder))
        loop = (_Ranks if sharded else _Loop)(recipe, getattr(recipe, recipe_class), model, setup, recorder)
        with AnyNumber(), recorder:  # type: ignore[no-untyped-call]
            loop.train()
    where = "one rank of several" if sharded else "one device"
    return StackRun(f"torchtune's recipe of {purpose} on {where}", inputs.model.spec.vocab_size)


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
        offloads = setup.config.offload.activations == "cpu"
        self.offloading = training.get_act_offloading_ctx_manager(model, offloads)
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
                self.recorder.instant("forward", later=self.micro_step > 0)
                self.recorder.forward_begins()
                yield {name: torch.zeros(shape, dtype=torch.long) for name in ("tokens", "labels")}

    def _loss_step(self, batch: dict[str, Tensor]) -> Tensor:
        stand_in = SimpleNamespace(
            activations_handling_ctx=self.offloading,
            _model=self.model,
            _loss_fn=self.loss,
            ignore_labels_cache=self.ignored,
        )
        loss: Tensor = self.own._loss_step(stand_in, batch)
        self.recorder.forward_ends()
        self.recorder.instant("loss backward", backward=True, later=self.micro_step > 0)
        return loss

    def _scaled(self, model: Any, scaler: Tensor) -> None:
        self.recorder.instant("gradient clipping")
        training.scale_grads(model, scaler)

    def _update(self) -> None:
        self.recorder.instant("optimizer step")
        self.optimizer.step()
        watch_states(self.optimizer, self.recorder)


class _Ranks(_Loop):
    """A stand-in for the recipe of one rank, whose loop calls the loss itself."""

    def train(self) -> None:
        """Run the recipe's ``train``."""
        recipe: Any = self.recipe
        recipe.tqdm = lambda **_: SimpleNamespace(update=_nothing, set_description=_nothing)
        recipe.training = SimpleNamespace(scale_grads=self._scaled, cleanup_before_training=_nothing)
        own: Any = Tensor.backward

        def backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
            self.recorder.forward_ends()
            self.recorder.instant("loss backward", backward=True, later=self.micro_step > 0)
            own(loss, *arguments, **options)

        self.loss.ignore_index = IGNORED
        stand_in = self._stand_in()
        vars(stand_in).update(
            _is_rank_zero=False,
            activations_handling_ctx=self.offloading,
            _loss_fn=self.loss,
            ignore_labels_cache=self.ignored,
            world_size=self.setup.config.parallel.shards,
            rank=1,
            seed=0,
            _checkpoint_client=mock.MagicMock(),
        )
        with mock.patch.object(Tensor, "backward", backward):
            self.own.train(stand_in)


class _Batches:
    """A loader of batches."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.sampler = SimpleNamespace(set_epoch=_nothing)
        self.state_dict = dict[str, Any]

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
