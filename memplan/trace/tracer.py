"""Trace a training step: a real forward, backward and optimizer step on tensors without memory."""

from contextlib import nullcontext

from memplan.model.model import Model
from memplan.step.kernels.refused_code import refuse_foreign_parts
from memplan.step.states.parallel_shards import is_sharded
from memplan.trace.jobs import optimizers
from memplan.trace.jobs.bundled_optimizer import short_loops
from memplan.trace.jobs.reference_job import Session, skipped_files
from memplan.trace.pretended_cuda.cuda_kernels import cuda_operators
from memplan.trace.recording.assembly import assembled
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import Trace
from memplan.trace.recording.workspaces import cublas_workspace_bytes
from memplan.trace.reference.run_options import Target
from memplan.training.adapters import adapter_tensors
from memplan.training.resolved import TrainingSetup


def trace_training(
    model: Model,
    setup: TrainingSetup,
    *,
    compute_capability: str | None = None,
    workspaces: bool = True,
    target: Target = "cuda",
    steps: int = 2,
    rank: int = 0,
) -> Trace:
    """Return the trace of a training run on one device, or on one of several, whose last step is reported.

    Args:
        compute_capability: Of the GPU, such as ``9.0``; adds cuBLAS workspaces to the event stream.
        workspaces: Whether memory that CUDA's kernels allocate inside themselves is added.
        target: Whose kernels run: CUDA's as the profile says, or those of torch's CPU build.
        steps: Steps to run; the first also makes what stays, such as optimizer states.
        rank: Which of several devices is traced, where ``fully_shard`` divides the model; else it is the first.

    Raises:
        CannotAnswerError: The config asks for something that cannot be traced.
        InvalidFileError: A target of the adapters is no projection of the model.
    """
    adapter_tensors(model, setup)  # refuses what the formula refuses, in its words, as the next does
    refuse_foreign_parts(model.spec, setup)
    if setup.config.parallel.data > 1:
        if is_sharded(setup.config.parallel):
            from memplan.trace.ranks.sharded_trace import trace_sharded  # torch.distributed takes a second to import

            return trace_sharded(
                model, setup, compute_capability=compute_capability, workspaces=workspaces, target=target, rank=rank
            )
        from memplan.trace.ranks.replicated import trace_replicated

        return trace_replicated(model, setup, compute_capability=compute_capability, workspaces=workspaces)
    session = Session(model.spec, setup, target=target)
    cublas = cublas_workspace_bytes(compute_capability) if compute_capability else 0
    inside = workspaces and target == "cuda"
    recorder = Recorder("meta", (__file__, *skipped_files()), cublas_bytes=cublas, workspaces=inside)
    session.watch(recorder)
    operators = cuda_operators() if target == "cuda" else nullcontext()
    with optimizers.cuda_optimizer_paths(), short_loops(), operators, recorder:
        for _ in range(steps):
            recorder.next_step()
            session.step(recorder)
    return assembled(recorder, model.spec.vocab_size, session.notes)
