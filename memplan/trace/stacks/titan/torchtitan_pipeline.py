"""torchtitan's pipelines: its split into stages, torch's own schedules, and one rank of them on tensors without memory.

What other ranks would send is a buffer with nothing in it. ``Trainer.pp_forward_backward_step`` of torchtitan 0.3.0 hands
micro-batches to ``step`` that are split already, which torch 2.13.0 does not take: what that calls is called instead.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta, extract_tensor_meta
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.distributed import pipeline_parallel

from memplan.trace.recording.recorder import Recorder
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.resolved import TrainingSetup

META = torch.device("meta")
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""``parallel.schedule`` -> the name that ``get_schedule_class`` knows."""
INSTANTS = {"forward": "forward", "backward": "backward", "weight": "weight gradients", "reduce": "gradient reduction"}


class Pipeline:
    """One rank's stages, run by a schedule as torchtitan calls it.

    Attributes:
        parts: The rank's parts of the model.
        loss: Of the last stage.
        micro_batches: That pass together.
        first: Whether one of the stages is the first.
        last: Whether one of them is the last.
    """

    def __init__(self, schedule: Any, stages: list[Any], loss: Any, micro_batches: int) -> None:
        self.schedule, self.stages, self.loss, self.micro_batches = schedule, stages, loss, micro_batches
        self.parts = [stage.submod for stage in stages]
        self.first, self.last = any(s.is_first for s in stages), any(s.is_last for s in stages)

    def step(
        self, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
    ) -> None:
        """Do what ``step`` does in torch 2.13.0 once it has split its arguments."""
        for stage in self.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self.schedule._step_microbatches(
            arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
        )


def pipeline(
    model: Any, setup: TrainingSetup, dims: Any, parallelized: Callable[[Any], None], loss: Any, recorder: Recorder
) -> Pipeline:
    """Return a rank's part of a model, split as ``pipeline_llm`` does."""
    parallel = setup.config.parallel
    name, micro_batches = SCHEDULES[parallel.order], parallel.together
    split = pipeline_parallel._generate_llm_fqn_per_model_part(
        parallel.pipeline * parallel.virtual,
        len(model.layers),
        parallel.first_stage_less_layers,
        parallel.last_stage_less_layers,
    )
    mesh = pipeline_parallel._build_get_mesh_callback(dims)
    stages, parts = pipeline_parallel._pipeline_module_split(
        model, dims.get_mesh("pp"), name, META, split, get_mesh=mesh
    )
    between = _between(setup, model.tok_embeddings.weight.shape[1], dims)
    for stage, part in zip(stages, parts, strict=True):
        parallelized(part)
        _alone(stage, between, recorder)
    options = SimpleNamespace(
        pipeline_parallel_schedule_csv="",
        pipeline_parallel_schedule=name,
        pipeline_parallel_microbatch_size=1,
        pipeline_parallel_degree=parallel.pipeline,
    )
    schedule = pipeline_parallel._build_pipeline_schedule(
        parallelism=options, local_batch_size=micro_batches, stages=stages, loss_fn=loss
    )
    return Pipeline(schedule, stages, loss, micro_batches)


def _between(setup: TrainingSetup, width: int, dims: Any) -> Tensor:
    """Return what passes between two stages: the residual stream, which ranks share where they share sequences."""
    parallel = setup.config.parallel
    shape = (setup.config.micro_batch_size, setup.config.sequence_length, width)
    stream = torch.empty(shape, dtype=TORCH_DTYPES[setup.config.compute_dtype], device=META)
    if parallel.tensor > 1:
        ranks, place = dims.get_mesh("tp"), Shard(1) if parallel.sequence else Replicate()
        local = stream.chunk(parallel.tensor, dim=1)[0].contiguous() if parallel.sequence else stream
        stream = DTensor.from_local(local, ranks, [place], run_check=False)
    return stream.requires_grad_()


def _alone(stage: PipelineStage, between: Tensor, recorder: Recorder) -> None:
    """Let a stage do without its neighbours, and tell of what it does."""
    own: Any = stage
    zero, metas = torch.zeros(1, dtype=torch.int32), (extract_tensor_meta(between),)
    back = _StageBackwardMeta((extract_tensor_meta(between.detach()),))
    own._warmup_forward_vote = own._warmup_backward_result = lambda *_, **__: zero
    own._send_meta = lambda meta, _: _as_received(getattr(meta, "forward_metas", None) or meta.backward_metas, metas)
    own._recv_meta = lambda source: _StageForwardMeta(metas) if source < stage.stage_index else back
    for method, instant in (
        ("forward_one_chunk", "forward"),
        ("backward_one_chunk", "backward"),
        ("backward_weight_one_chunk", "weight"),
        ("perform_reduce_grad", "reduce"),
    ):
        setattr(own, method, _telling(getattr(own, method), INSTANTS[instant], recorder))
    own._compute_input_grads = _inferring(own._compute_input_grads, recorder)


def _as_received(sent: Any, known: Any) -> None:
    """Raise where a stage would send another tensor than its neighbour has a buffer for here."""
    pairs = [(one.shape, one.dtype, getattr(one, "placements", ())) for one in (*sent, *known)]
    if len(set(map(str, pairs))) != 1:
        raise RuntimeError(f"a stage sends {pairs[0]}, not {pairs[1]}")


def _telling(method: Callable[..., Any], instant: str, recorder: Recorder) -> Callable[..., Any]:
    def telling(*args: Any, **options: Any) -> Any:
        recorder.instant(instant, backward=instant != "forward")
        return method(*args, **options)

    return telling


def _inferring(method: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return what forms gradients of inputs to find out their shapes, told to be a backward."""

    def inferring(*args: Any, **options: Any) -> Any:
        recorder.instant("forward", backward=True)
        result = method(*args, **options)
        recorder.instant("forward")
        return result

    return inferring


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Let torch's pipelines send nothing, and leave random numbers of a device without any alone."""
    nothing: Callable[..., list[Any]] = lambda *_, **__: []  # noqa: E731
    with (
        patch.object(schedules, "_batch_p2p", nothing),
        patch.object(schedules, "_sorted_batch_p2p", lambda *_, **__: {}),
        patch.object(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext()),
        patch("torch.distributed.all_reduce", nothing),
    ):
        yield
