"""Trace one rank of data-parallel training: torch's own ``fully_shard`` around the reference model."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from memplan.model.model import Model
from memplan.model.spec import ModelSpec
from memplan.trace.jobs import optimizers
from memplan.trace.jobs.reference_job import Session, skipped_files
from memplan.trace.jobs.training_job import Watcher
from memplan.trace.pretended_cuda.cuda_kernels import cuda_operators
from memplan.trace.ranks import fully_shard
from memplan.trace.ranks.fully_shard import Allocates, ShardedRecorder
from memplan.trace.recording.assembly import assembled
from memplan.trace.recording.trace_result import Trace
from memplan.trace.recording.workspaces import cublas_workspace_bytes
from memplan.trace.reference.decoder import ReferenceModel
from memplan.trace.reference.parts import Tables
from memplan.trace.reference.run_options import ReferenceOptions, Target
from memplan.training.resolved import TrainingSetup


class LogitsModel(ReferenceModel):
    """A reference model that returns logits: the loss is no part of the root unit, as in torchtitan.

    Source:
        torchtitan/train.py, ``forward_backward_step``.
    """

    def forward(
        self, ids: Tensor, targets: Tensor, tables: tuple[Tables, ...], positions: Tensor | None = None
    ) -> Tensor:
        """Return the logits (batch, tokens, vocabulary)."""
        del targets
        x = self._hidden(ids, tables, positions)
        self.run.probe.section("head")
        return self._logits(self._final_norm[0](x))

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``logits``."""
        logits = logits.view(-1, self.spec.vocab_size)
        if self.run.options.profile.loss != "bf16":
            logits = logits.float()
        return self._cross_entropy(logits, targets.view(-1), "mean")


class ShardedSession(Session):
    """A reference model in training whose parameters are sharded over a mesh of ranks.

    One unit per layer, and the root with embedding, final norm and head. Products run in the compute
    dtype; where that is narrower than the weights, gradients are reduced in the weights' dtype.

    Source:
        torchtitan/models/llama3/parallelize.py, ``apply_fsdp``: ``MixedPrecisionPolicy(param_dtype=bf16,
        reduce_dtype=fp32)``.
    """

    model: LogitsModel

    def __init__(
        self, spec: ModelSpec, setup: TrainingSetup, mesh: DeviceMesh, device: str = "meta", target: Target = "cuda"
    ) -> None:
        self._mesh = mesh
        self.collective = Allocates()
        self._apart = setup.stack.sharded_units == "ends-apart" and not spec.tie_word_embeddings
        super().__init__(spec, setup, device, target)

    def built(self, spec: ModelSpec, options: ReferenceOptions, device: str) -> ReferenceModel:
        """Return the model, sharded."""
        model = LogitsModel(spec, replace(options, autocast=False), device)
        own = options.weight_dtype("hidden_matrix")
        policy = MixedPrecisionPolicy()
        if own != options.compute_dtype:
            policy = MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=own)
        ends: list[Any] = []
        if self._apart:
            ends = [model._embedding[0], [model._final_norm[0], model._head[0]]]
        units = [*model._layers, *ends, model]
        fully_shard.shard(units, self._mesh, policy)
        for unit in units if device == "meta" else ():
            fully_shard.on_meta(unit, self.collective)
        return model

    def loss(self) -> Tensor:
        """Return the loss of one micro-batch."""
        batch = self.batch
        logits: Tensor = self.model(batch.ids, batch.targets, batch.tables, batch.positions)
        return self.model.loss_of(logits, batch.targets)

    def watch_whole_gradients(self, watcher: Watcher) -> None:
        """Book gradients of gathered parameters, which exist from the first forward on."""
        for parameter in fully_shard.gathered(self.model):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: watcher.mark(p.grad, "gradients")
            )


def trace_sharded(
    model: Model,
    setup: TrainingSetup,
    *,
    compute_capability: str | None = None,
    workspaces: bool = True,
    target: Target = "cuda",
    rank: int = 0,
) -> Trace:
    """Return the trace of one rank under ``zero_stage: 3``, whose last step is reported."""
    cublas = cublas_workspace_bytes(compute_capability) if compute_capability else 0
    files = (__file__, str(fully_shard.__file__), str(Path(__file__).parent.with_name("tracer.py")), *skipped_files())
    degrees = fully_shard.mesh_degrees(setup.config.parallel)
    with warnings.catch_warnings(), fully_shard.process_group(*degrees, rank=rank) as mesh:
        # Logits are a view, as of any linear layer; nothing changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        session = ShardedSession(model.spec, setup, mesh, target=target)
        inside = workspaces and target == "cuda"
        recorder = ShardedRecorder("meta", files, cublas_bytes=cublas, workspaces=inside)
        session.collective.recorder = recorder
        session.watch(recorder)
        operators = cuda_operators() if target == "cuda" else nullcontext()
        with optimizers.cuda_optimizer_paths(), operators, recorder.following(), recorder:
            for number in range(2):
                if number == 1:
                    session.watch_whole_gradients(recorder)
                recorder.next_step()
                session.step(recorder)
    return assembled(recorder, model.spec.vocab_size, session.notes)
