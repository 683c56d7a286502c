"""torchtitan's trainer: its models, its checkpointing, its loss, its optimizers, and the lines of its own step.

What is called on a stand-in for the trainer are ``Trainer.train_step`` and ``Trainer._forward_backward_body`` themselves.
On one GPU the trainer wraps the model in FSDP over a group of one, which is left out here, and CUDA graphs are off.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.distributed.fsdp
from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools.utils import set_default_dtype
from torchtitan.trainer import Trainer

from memplan.catalog.training_config import CheckpointedLayers
from memplan.errors import CannotAnswerError
from memplan.model.spec import MixtureOfExperts, ModelSpec
from memplan.step.states.parallel_shards import is_sharded
from memplan.trace.compiled.compiler import COMPILED_NOTE, pretended_compiler
from memplan.trace.jobs.training_job import watch_layers
from memplan.trace.pretended_cuda.composite_kernels import BACKENDS
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.ranks.fully_shard import ShardedRecorder, mesh_degrees, sharding
from memplan.trace.recording.recorder import Recorder
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.registry import StackInputs, StackRun
from memplan.trace.stacks.titan import torchtitan_parts
from memplan.trace.stacks.titan.flex_kernel import block_mask
from memplan.trace.stacks.titan.torchtitan_models import FAMILIES, model_config
from memplan.trace.stacks.titan.torchtitan_pipeline import Pipeline, nothing_sent, pipeline
from memplan.trace.stacks.titan.torchtitan_steps import run_steps
from memplan.trace.stacks.watched_parts import pretended_card, refuse_settings, watch_states, watch_tensors
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

PACKAGES = ("torchtitan",)
ALONE = "torchtitan's FSDP over a group of one GPU is left out"
NOTES = (
    "its CUDA graphs are left out",
    "flex attention is a Triton kernel; what it allocates is stated from torch/_inductor/kernel/flex/flex_attention.py",
)
SORTS = "what CUDA sorts the numbers of routed rows with, some tens of bytes a row, and the update of experts' biases are left out"
META = torch.device("meta")
BACKEND = "partial_dtensor"
"""``parallelism.spmd_backend``: the one that divides a model under torch 2.13.0, whose ``fully_shard`` refuses what others give it."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run torchtitan's trainer on the model that the inputs ask for."""
    logging.getLogger().setLevel(logging.ERROR)
    setup = inputs.setup
    refuse_settings(setup, "torchtitan", compiles="layers", fills=True)
    with ExitStack() as around:
        for one in (pretended_card(inputs.compute_capability), torchtitan_parts.runs_flex(), _attends(setup)):
            around.enter_context(one)
        if setup.config.compile == "layers":
            around.enter_context(pretended_compiler(inputs.compute_capability))
        trainer = _trainer(_built(inputs.model.spec, setup), setup, recorder, around)
        run_steps(trainer.step, recorder)
    compiled = (COMPILED_NOTE,) if setup.config.compile == "layers" else ()
    notes = NOTES if isinstance(recorder, ShardedRecorder) else (ALONE, *NOTES)
    if any(isinstance(run.layer.feed_forward, MixtureOfExperts) for run in inputs.model.spec.runs):
        notes = (*notes, SORTS)
    vocabulary = ceil_div(inputs.model.spec.vocab_size, setup.config.parallel.tensor)
    return StackRun(f"torchtitan's {FAMILIES[inputs.model.spec.architecture].name}", vocabulary, (*compiled, *notes))


# -------------------------------------------------------------------- model
def _built(spec: ModelSpec, setup: TrainingSetup) -> nn.Module:
    """Return torchtitan's model of these shapes, without memory."""
    dtype = setup.format_names["hidden_matrix"]
    gathered = is_sharded(setup.config.parallel)  # in the compute dtype
    plain = (gathered or dtype == setup.config.compute_dtype) and setup.config.adapter is None
    if spec.architecture not in FAMILIES or dtype not in ("fp32", "bf16") or not plain:
        names = ", ".join(FAMILIES)
        raise CannotAnswerError(
            f"torchtitan's models of {names} are traced in fp32 or in bf16 throughout, without adapters"
        )
    with set_default_dtype(TORCH_DTYPES[dtype]), META:
        model: Any = model_config(spec, setup).build()
    model.train()
    return model  # type: ignore[no-any-return]


def _trainer(model: Any, setup: TrainingSetup, recorder: Recorder, around: ExitStack) -> _Trainer:
    """Return what runs steps of a model, on one rank of a group that lasts as long as ``around``."""
    if not isinstance(recorder, ShardedRecorder):
        _checkpointed(model, setup)
        _compiled(model, setup)
        return _Trainer([model], setup, recorder)
    parallel = setup.config.parallel
    if parallel.pipeline > 1 and parallel.stage is None:
        text = f"parallel.stage: one rank of a pipeline is traced at a time; say which, 0 to {parallel.pipeline - 1}"
        raise CannotAnswerError(text)
    place = (parallel.stage or 0) * parallel.data * parallel.tensor
    several = parallel.tensor * parallel.pipeline * parallel.expert * parallel.context > 1
    degrees = (parallel.gpus,) if several else mesh_degrees(parallel)
    mesh = around.enter_context(sharding(torchtitan.distributed.fsdp, degrees, recorder, place))
    dims = None
    if several:
        set_spmd_backend(BACKEND)
        parallel_dims.device_type = "cpu"
        own, context = parallel.data // parallel.replicate, parallel.context
        shared = (parallel.replicate, own, context, parallel.tensor, parallel.pipeline, parallel.expert)
        dims = ParallelDims(*shared, mesh.size(), BACKEND)
        mesh = dims.get_mesh(["dp_replicate", "fsdp"] if parallel.replicate > 1 else ["fsdp"])
    if parallel.expert > 1:
        around.enter_context(torchtitan_parts.routed_rows(setup))
    if parallel.pipeline == 1:
        if parallel.context > 1:
            around.enter_context(torchtitan_parts.attending_along(model, dims))
        _parallelized(model, setup, mesh, dims)
        return _Trainer([model], setup, recorder, dims=dims)
    assert dims is not None
    around.enter_context(nothing_sent())
    loss = _loss(setup)
    staged = pipeline(model, setup, dims, lambda part: _parallelized(part, setup, mesh, dims), loss, recorder)
    return _Trainer(staged.parts, setup, recorder, staged)


def _parallelized(model: Any, setup: TrainingSetup, mesh: Any, dims: ParallelDims | None) -> None:
    """Divide and shard a model, or a part of one, as ``parallelize_llama`` does."""
    parallel = setup.config.parallel
    if parallel.tensor > 1 or parallel.expert > 1:
        model.parallelize(dims)
    _checkpointed(model, setup)
    _compiled(model, setup)
    if is_sharded(parallel):
        compute, own = setup.config.compute_dtype, setup.format_names["hidden_matrix"]
        torchtitan.distributed.fsdp.apply_fsdp_to_decoder(
            model,
            mesh,
            param_dtype=TORCH_DTYPES[compute],
            reduce_dtype=TORCH_DTYPES[own],
            pp_enabled=parallel.pipeline > 1,
            reshard_after_forward_policy="default" if parallel.reshard_after_forward else "never",
            ep_degree=parallel.expert,
            edp_mesh=torchtitan_parts.expert_mesh(dims, parallel) if dims else None,
        )


def _checkpointed(model: Any, setup: TrainingSetup) -> None:
    """Let a model checkpoint activations as the setup says."""
    kind: Any = {"none": None, "full": FullAC, "selective": _Selective}[setup.checkpointing]
    if kind is None:
        return
    policy = kind(kind.Config())
    if setup.config.checkpointed_layers == CheckpointedLayers():
        policy.apply(model)
        return
    for number, (name, block) in enumerate(list(model.layers.named_children())):
        if setup.computes_again(number):
            model.layers.register_module(name, policy._wrap_block(block, base_fqn=f"layers.{name}"))


def _compiled(model: Any, setup: TrainingSetup) -> None:
    """Compile each layer of a model as the trainer does, where the setup asks for it."""
    if setup.config.compile == "layers":
        apply_compile(model, compile_config=CompileConfig(enable=True), parallel_dims=_DIVIDES_NOTHING)


_DIVIDES_NOTHING: Any = SimpleNamespace(tp_enabled=False)


class _Selective(SelectiveAC):  # type: ignore[misc]
    """torchtitan's own policy, which saves flex attention's results by the name that they have here."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators whose results are saved."""
        saved: set[Any] = super().get_save_ops()
        return saved | {torch.ops.memplan.flex_attention.default}


@contextlib.contextmanager
def _attends(setup: TrainingSetup) -> Iterator[None]:
    """Let attention run by the kernel that a config names, where it names one, and else by the first of its own order that can."""
    named = next((backend for backend, name in BACKENDS.items() if name == setup.attention_choice), None)
    with replaced(ScaledDotProductAttention, {"sdpa_backends": [named] if named else []}):
        yield


# -------------------------------------------------------------------- trainer
class _Trainer:
    """A stand-in that has what the trainer's own step reads.

    Attributes:
        parts: The model, or a rank's parts of it.
        pipeline: What runs these where there are stages.
    """

    def __init__(
        self,
        parts: list[Any],
        setup: TrainingSetup,
        recorder: Recorder,
        pipeline: Pipeline | None = None,
        dims: Any = None,
    ) -> None:
        self.parts, self.setup, self.recorder, self.pipeline, self.dims = parts, setup, recorder, pipeline, dims
        self.loss, self.done = pipeline.loss if pipeline else _loss(setup), 0
        self.optimizers = torchtitan_parts.optimizers_of(parts, setup)
        for part in parts:
            watch_tensors(part, recorder)
        for optimizer in self.optimizers:
            watch_states(optimizer, recorder)
        model = parts[-1]
        if pipeline is None:
            watch_layers(model.layers.values(), model.lm_head, recorder)
        if isinstance(self.loss, ChunkedLossWrapper) and model.lm_head is not None:
            self.loss.set_lm_head(model.lm_head)
            model._skip_lm_head = True
            model.lm_head.register_forward_pre_hook(
                lambda _m, _i: self.recorder.instant("forward", later=self.done > 0)
            )
            self.loss.loss_fn = self._marking(self.loss.loss_fn, "forward" if pipeline else "loss backward")

    def step(self) -> None:
        """Run ``Trainer.train_step`` once."""
        config = self.setup.config
        self.done, shape = 0, (config.micro_batch_size, config.sequence_length)
        rows = [torch.zeros(shape, dtype=torch.long) for _ in range(3)]
        micro_steps = config.gradient_accumulation_steps * (self.pipeline.micro_batches if self.pipeline else 1)
        batches = [({"input": rows[0], "positions": rows[1]}, rows[2]) for _ in range(micro_steps)]
        Trainer.train_step(self._stand_in(), iter(batches))

    def _stand_in(self) -> Any:
        config, nothing = self.setup.config, (lambda *_, **__: None)
        clipped, eager = 1.0 if config.clip_gradients else float("inf"), config.zero_gradients == "free"
        return SimpleNamespace(
            config=SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=eager, max_norm=clipped)),
            step=1,
            device=META,
            model_parts=self.parts,
            loss_fn=self._whole_loss,
            train_context=contextlib.nullcontext,
            optimizers=SimpleNamespace(zero_grad=self.optimizers.zero_grad, step=self._update),
            lr_schedulers=SimpleNamespace(get_metrics=dict, step=nothing),
            metrics_processor=SimpleNamespace(should_log=lambda _: False),
            checkpointer=SimpleNamespace(maybe_wait_for_staging=nothing),
            parallel_dims=SimpleNamespace(
                dp_enabled=False,
                pp_enabled=self.pipeline is not None,
                ep_enabled=config.parallel.expert > 1,
                get_optional_mesh=nothing,
            ),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            num_pipeline_parallel_microbatches=self.pipeline.micro_batches if self.pipeline else 1,
            forward_backward_step=self._all_stages if self.pipeline else self._forward_backward,
            post_dataloading_process=self._prepared,
            pp_schedule=self.pipeline,
            pp_has_first_stage=self.pipeline is not None and self.pipeline.first,
            pp_has_last_stage=self.pipeline is not None and self.pipeline.last,
        )

    def _arguments(self, rows: dict[str, Any], labels: Tensor) -> dict[str, Any]:
        """Return what the model is called with besides token ids."""
        more: dict[str, Any] = {key: value for key, value in rows.items() if key != "input"}
        if self.setup.profile.attention == "flex":
            more["attention_masks"] = block_mask(labels.shape[0], labels.shape[1])
        return more

    def _prepared(self, rows: dict[str, Any], labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return token ids, labels and what else the model is called with, a rank's part of them where GPUs share sequences."""
        if self.setup.config.parallel.context > 1:
            return torchtitan_parts.own_part(rows, labels, self.dims)
        return rows["input"], labels, self._arguments(rows, labels)

    def _all_stages(self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor) -> Tensor:
        """Run the schedule as the trainer does."""
        self.recorder.instant("forward")
        self.recorder.forward_begins()
        loss: Tensor = Trainer.pp_forward_backward_step(
            self._stand_in(), input_dict_mbs=input_dict, label_mbs=labels, global_valid_tokens=global_valid_tokens
        )
        self.recorder.forward_ends()
        self.recorder.instant("gradient clipping")
        return loss

    def _forward_backward(self, *, input_dict: Any, labels: Tensor, global_valid_tokens: Tensor) -> Tensor:
        """Do what ``Trainer.forward_backward_step`` does on one GPU."""
        self.recorder.instant("forward", later=self.done > 0)
        self.recorder.forward_begins()
        inputs, labels, more = self._prepared(input_dict, labels)
        loss: Tensor = Trainer._forward_backward_body(self._stand_in(), inputs, labels, global_valid_tokens, more)
        self.done += 1
        if self.done == self.setup.config.gradient_accumulation_steps:
            self.recorder.instant("gradient clipping")
        return loss

    def _whole_loss(self, *args: Any, **options: Any) -> Any:
        result = self.loss(*args, **options)
        self.recorder.forward_ends()
        chunked = isinstance(self.loss, ChunkedLossWrapper)
        self.recorder.instant("head backward" if chunked else "loss backward", backward=True, later=self.done > 0)
        return result

    def _marking(self, function: Callable[..., Any], instant: str) -> Callable[..., Any]:
        def marked(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self.recorder.instant(instant, backward=True, later=self.done > 0)
            return result

        return marked

    def _update(self) -> None:
        self.recorder.instant("optimizer step")
        self.optimizers.step()
        for optimizer in self.optimizers:
            watch_states(optimizer, self.recorder)


def _loss(setup: TrainingSetup) -> Any:
    """Return the loss that the setup's kernels ask for."""
    kind = setup.profile.loss
    compiled = CompileConfig(enable=setup.config.compile == "layers")
    if kind == "fp32":
        return CrossEntropyLoss.Config().build(compile_config=compiled)
    if kind != "chunked-backward":
        raise CannotAnswerError(f"kernels.loss: torchtitan has no loss {kind}; it has chunked-backward and fp32")
    if setup.config.sequence_length % setup.profile.loss_chunks:
        raise CannotAnswerError("kernels.loss_chunks: torchtitan wants chunks of equal lengths")
    return ChunkedLossWrapper.Config(num_chunks=setup.profile.loss_chunks).build(compile_config=compiled)
