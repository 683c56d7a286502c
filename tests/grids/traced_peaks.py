"""Peaks of Megatron-LM's steps on tensors without memory, over jobs drawn at random: its own modules and Transformer Engine's.

``python tests.grids.traced_peaks.py FOLDER [--engine FOLDER] [--seed 0] [--count 40] [--record FILE]`` runs two steps of each job with
the megatron-core and einops in FOLDER, as one rank of a pipeline over a fake process group: its GPT model, ``DistributedDataParallel``,
schedule (one stage, 1F1B, interleaved) and loss. ``--engine`` is a folder with Transformer Engine's Python (see transformer_engine_stub.py).
"""

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.grids.megatron_steps import _forward_step, _nothing_sent, _to_meta, without_cuda
from tests.grids.transformer_engine_stub import compiled_functions, install


@dataclass(frozen=True)
class PeakJob:
    """A small model, the grid that it is divided over and what its step is given; sizes are Megatron-LM's."""

    engine: bool
    gpt: bool
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    tensor: int
    sequence: bool
    pipeline: int
    virtual: int
    stage: int
    data: int
    sharded: bool
    batch: int
    length: int
    micro_batches: int
    checkpointing: str
    dropout: float
    fused_gradients: bool
    fused_rotary: bool
    attention: str


def drawn(seed: int, engine: bool) -> PeakJob:
    """Return the job of a seed."""
    draw = random.Random(f"peak {engine} {seed}")
    gpt, tensor = draw.random() < 0.4, draw.choice((1, 2, 4))
    pipeline = draw.choice((1, 1, 2, 4))
    virtual = draw.choice((1, 2)) if pipeline > 1 else 1
    return PeakJob(
        engine, gpt, draw.choice((1, 2, 3)) * pipeline * virtual, draw.choice((512, 768, 1024)), 16,
        16 if gpt else draw.choice((4, 8, 16)), draw.choice((32, 64)), draw.choice((1408, 2048, 4096)), draw.choice((4000, 16384, 32000)),
        draw.random() < 0.3, tensor, engine and tensor > 1 and draw.random() < 0.5, pipeline, virtual, draw.randrange(pipeline),
        draw.choice((1, 2, 8)), draw.random() < 0.7, draw.choice((1, 2, 4)), draw.choice((256, 512, 1024)),
        draw.choice((1, 2, 3)) * pipeline, draw.choice(("none", "none", "none", "selective", "full")),
        draw.choice((0.0, 0.0, 0.1)) if engine or gpt else 0.0, engine and draw.random() < 0.5, engine and draw.random() < 0.5,
        draw.choice(("fused", "fused", "unfused")) if engine else "own",
    )  # fmt: skip


def traced(job: PeakJob, show: bool = False) -> dict[str, int]:  # pragma: no cover - needs megatron-core
    """Return ``peak``, the most bytes of a job's second step beyond weights and gradients, and ``kept``, what of it stays behind."""
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    recording = import_module("memplan.trace.recording.recorder")
    from memplan.trace.pretended_cuda.composite_kernels import composite_kernels
    from memplan.trace.recording.valueless_tensors import AnyNumber

    for choice in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(choice, None)
    if job.engine:
        attention = import_module("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
        attention._attention_backends["backend_selection_requires_update"] = True
    recorder = recording.Recorder("meta")
    with _rank(job), composite_kernels("9.0"), ExitStack() as around:
        back = schedules.backward_step

        def backward_step(*args: Any, **keys: Any) -> Any:
            recorder.instant("backward", backward=True)
            try:
                return back(*args, **keys)
            finally:
                recorder.instant("forward")

        around.enter_context(patch.object(schedules, "backward_step", backward_step))
        around.enter_context(patch.object(recording, "_called_by_engine", _called_by_engine))
        models = _built(job)
        with _to_meta()(), AnyNumber(), recorder:
            for model in models:
                for name, parameter in model.named_parameters():
                    recorder.mark(parameter, "weights", name)
                for buffer in (*model.buffers, *model.expert_parallel_buffers):
                    recorder.mark(buffer.grad_data, "gradients")
            for _ in range(2):
                recorder.next_step()
                for model in models:
                    model.zero_grad_buffer()
                get_forward_backward_func()(
                    forward_step_func=_forward_step(job), data_iterator=[None] * job.virtual if job.virtual > 1 else None,
                    model=models if job.virtual > 1 else models[0], num_microbatches=job.micro_batches,
                    seq_length=job.length, micro_batch_size=job.batch, forward_only=False,
                )  # fmt: skip
                behind = len(recorder.events)
    return _figures(recorder, behind, show)


def _called_by_engine() -> bool:  # pragma: no cover
    """Tell whether autograd's engine calls, be it through Megatron-LM's own call of it."""
    import torch

    frame: Any = sys._getframe(3)
    while frame is not None:
        if frame.f_code.co_name in ("_engine_run_backward", "custom_backward"):
            return True
        if not frame.f_code.co_filename.startswith(torch.__path__[0]) and frame.f_code.co_name != "__torch_dispatch__":
            return False
        frame = frame.f_back
    return True


def _figures(recorder: Any, behind: int, show: bool) -> dict[str, int]:  # pragma: no cover
    alive: set[int] = set()
    size = kept = peak = 0
    at: tuple[set[int], int] = (set(), 0)
    for place, (born, index) in enumerate(recorder.events[:behind]):
        record = recorder.records[index]
        if place == recorder.steady_from:
            kept = size
            peak = max(peak, size)
        if record.component in ("weights", "gradients"):
            continue
        if born:
            alive.add(index)
            size += record.bytes
        else:
            alive.discard(index)
            size -= record.bytes
        if place >= recorder.steady_from and size > peak:
            peak, at = size, (set(alive), place)
    if show:
        _show(recorder, at)
    return {"kept": kept, "peak": peak}


def _show(recorder: Any, at: tuple[set[int], int]) -> None:  # pragma: no cover
    """Print what is alive at the peak, equal tensors of a line of code together."""
    groups: Counter[Any] = Counter()
    for index in at[0]:
        record = recorder.records[index]
        where = (
            f"{Path(record.line[0].co_filename).name}:{record.line[1]} {record.line[0].co_name}" if record.line else ""
        )
        groups[record.bytes, record.shape, record.operation, where] += 1
    for (size, shape, operation, where), count in sorted(groups.items(), key=lambda one: -one[0][0] * one[1]):
        print(f"   {count:4} x {size:12,} {shape} {operation} {where}")
    last = recorder.records[recorder.events[at[1]][1]]
    print(
        "   last:",
        last.operation,
        last.shape,
        last.line and f"{Path(last.line[0].co_filename).name}:{last.line[1]}",
        [m[1] for m in recorder.marks if m[0] <= at[1]][-1],
    )


def _config(job: PeakJob) -> Any:  # pragma: no cover - needs megatron-core
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    functional = torch.nn.functional
    whole = job.checkpointing == "full"
    return TransformerConfig(
        num_layers=job.layers, hidden_size=job.hidden, num_attention_heads=job.heads, num_query_groups=job.groups,
        kv_channels=job.head_dim, ffn_hidden_size=job.ffn, perform_initialization=False, add_bias_linear=job.gpt,
        gated_linear_unit=not job.gpt, activation_func=functional.gelu if job.gpt else functional.silu,
        normalization="LayerNorm" if job.gpt else "RMSNorm", tensor_model_parallel_size=job.tensor, sequence_parallel=job.sequence,
        pipeline_model_parallel_size=job.pipeline, virtual_pipeline_model_parallel_size=job.virtual if job.virtual > 1 else None,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bf16=True, hidden_dropout=job.dropout, attention_dropout=job.dropout,
        bias_activation_fusion=True, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=job.fused_gradients, apply_rope_fusion=job.fused_rotary and not job.gpt,
        deallocate_pipeline_outputs=True, overlap_p2p_comm=job.virtual > 1, batch_p2p_comm=job.virtual == 1, batch_p2p_sync=False,
        recompute_granularity=None if job.checkpointing == "none" else job.checkpointing,
        recompute_method="uniform" if whole else None, recompute_num_layers=1 if whole else None,
        attention_softmax_in_fp32=not job.engine, attention_backend=AttnBackend[job.attention] if job.engine else AttnBackend.auto,
    )  # fmt: skip


def _built(job: PeakJob) -> list[Any]:  # pragma: no cover - needs megatron-core
    """Return a rank's wrapped chunks."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.module import Float16Module

    config = _config(job)
    chunks = []
    for virtual in range(job.virtual):
        chunk = virtual if job.virtual > 1 else None
        spec = get_gpt_decoder_block_spec(config, job.engine, normalization=config.normalization, vp_stage=chunk)
        with torch.device("meta"):
            model = GPTModel(
                config, spec, vocab_size=-(-job.vocabulary // (128 * job.tensor)) * 128 * job.tensor, max_sequence_length=job.length,
                pre_process=(job.stage, virtual) == (0, 0),
                post_process=(job.stage, virtual) == (job.pipeline - 1, job.virtual - 1),
                position_embedding_type="learned_absolute" if job.gpt else "rope",
                share_embeddings_and_output_weights=job.tied, vp_stage=chunk,
            ).to("meta")  # fmt: skip
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=job.sharded)
        chunks.append(
            DistributedDataParallel(config, settings, Float16Module(config, model), disable_bucketing=virtual > 0)
        )
    config.finalize_model_grads_func = finalize_model_grads
    syncs = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = syncs if job.virtual > 1 else syncs[0]
    return chunks


@contextmanager
def _rank(job: PeakJob) -> Iterator[None]:  # pragma: no cover - needs megatron-core
    """Be a rank of the job's stage, without the others."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = job.tensor * job.data * job.pipeline
    dist.init_process_group("fake", rank=job.stage * job.tensor * job.data, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=job.tensor, pipeline_model_parallel_size=job.pipeline,
            virtual_pipeline_model_parallel_size=job.virtual if job.virtual > 1 else None, create_gloo_process_groups=False,
        )  # fmt: skip
        model_parallel_cuda_manual_seed(1, te_rng_tracker=False, force_reset_rng=True)
        with ExitStack() as around:
            for one in _nothing_sent():
                around.enter_context(one)
            yield
    finally:
        parallel_state.destroy_global_memory_buffer()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:  # pragma: no cover - needs megatron-core
    """Compare peaks with what is planned, and write them down where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    prepare(given.folder, given.engine)
    rows = []
    for seed in range(given.seed, given.seed + given.count):
        job = drawn(seed, bool(given.engine))
        real = traced(job, given.show)
        rows.append({"job": asdict(job), "traced": real})
        print(seed, job, real, flush=True)
    if given.record:
        text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        given.record.write_text(f'{{"jobs": [\n{text}\n]}}\n')


def prepare(folder: str, engine: str | None) -> None:  # pragma: no cover - needs megatron-core
    """Let both libraries be imported without CUDA."""
    sys.path.insert(0, folder)
    if engine:
        install(engine)
    compiled_functions()
    without_cuda(folder)


if __name__ == "__main__":
    main()
