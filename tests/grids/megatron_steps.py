"""What Megatron-LM's own modules leave for backward in a step on tensors without memory, over jobs drawn at random.

``python tests/grids/megatron_steps.py FOLDER [--seed 0] [--count 40] [--record FILE]`` runs forward and backward of two steps of each job
with the megatron-core and einops that are unpacked in FOLDER: its GPT model of its own modules (``transformer_impl: local``) in
its ``DistributedDataParallel``, its schedule without pipelining and its loss, as rank 0 of a fake process group.
"""

import argparse
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

VERSION = "0.16.1"


@dataclass(frozen=True)
class MegatronStep:
    """A small model, the grid that it is divided over and what its step is given; sizes are Megatron-LM's."""

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
    data: int
    sharded: bool
    batch: int
    length: int
    micro_batches: int
    checkpointing: str


def drawn(seed: int) -> MegatronStep:
    """Return the job of a seed."""
    draw = random.Random(f"step {seed}")
    gpt, tensor = draw.random() < 0.4, draw.choice((1, 2, 4))
    return MegatronStep(
        gpt, draw.choice((2, 3, 5)), draw.choice((64, 128, 192)), 8, 8 if gpt else draw.choice((4, 8)),
        draw.choice((16, 32)), draw.choice((176, 256, 512)), draw.choice((512, 1536, 4096)), draw.random() < 0.3,
        tensor, draw.choice((1, 2, 8, 128)), draw.random() < 0.7, draw.choice((1, 2, 3)), draw.choice((32, 48, 96)),
        draw.choice((1, 2, 3)), draw.choice(("none", "none", "selective", "full")),
    )  # fmt: skip


def traced(job: MegatronStep) -> dict[str, int]:  # pragma: no cover - needs megatron-core
    """Return bytes of a job's second step.

    ``left``: what the first forward has left for backward when the head begins, without scores of
    attention, tables of rotation and what is a number or two a token; ``logits``: logits of both dtypes; ``activations``: the peak
    beyond what is kept between steps.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from memplan.trace.pretended_cuda.composite_kernels import composite_kernels
    from memplan.trace.recording.recorder import Recorder
    from memplan.trace.recording.valueless_tensors import AnyNumber

    recorder = Recorder("meta")
    with _ranks(job), composite_kernels("9.0"):
        model = _built(job)
        head: Any = model.module.module.output_layer
        marks: list[int] = []
        head.register_forward_pre_hook(lambda *_: marks.append(len(recorder.events)))
        with _to_meta()(), AnyNumber(), recorder:
            _booked(model, recorder)
            for _ in range(2):
                marks.clear()
                recorder.next_step()
                model.zero_grad_buffer()
                get_forward_backward_func()(
                    forward_step_func=_forward_step(job), data_iterator=None, model=model, num_microbatches=job.micro_batches,
                    seq_length=job.length, micro_batch_size=job.batch, forward_only=False,
                )  # fmt: skip
                behind = len(recorder.events)
    return _figures(job, recorder, marks[0], behind)


def _figures(job: MegatronStep, recorder: Any, head: int, behind: int) -> dict[str, int]:  # pragma: no cover
    """Return the bytes of :func:`traced` from what was recorded until the head began, and until backward was done."""
    alive, peak = {}, 0
    before: set[int] = set()
    figures: dict[str, int] = {}
    for place, (born, index) in enumerate(recorder.events[:behind]):
        record = recorder.records[index]
        if place == recorder.steady_from:
            before = set(alive)
        if place == head:
            own = [recorder.records[i] for i in alive if i not in before]
            figures["left"] = sum(one.bytes for one in own if _is_counted(job, one))
        if born:
            alive[index] = record.bytes
        else:
            alive.pop(index, None)
        if place >= recorder.steady_from:
            peak = max(peak, sum(size for i, size in alive.items() if i not in before))
    columns = -(-job.vocabulary // (128 * job.tensor)) * 128
    wide = [
        r for r in recorder.records if r.shape == (job.length, job.batch, columns) and r.operation == "_to_copy.default"
    ]
    figures["logits"] = wide[-1].bytes * 3 // 2
    return figures | {"activations": peak}


def _is_counted(job: MegatronStep, record: Any) -> bool:  # pragma: no cover
    """Tell whether a tensor is none of scores of attention, of rotation's tables, of gradients, and of what is a number or two a token."""
    scores = record.shape[-2:] == (job.length, job.length)
    rotation = record.shape == (job.length, 1, 1, job.head_dim) and record.operation == "_to_copy.default"
    rotation = rotation or record.shape == (job.length, job.head_dim)
    return not scores and not rotation and record.bytes > 16 * job.batch * job.length


def _config(job: MegatronStep) -> Any:  # pragma: no cover - needs megatron-core
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    functional = torch.nn.functional
    whole = job.checkpointing == "full"
    return TransformerConfig(
        num_layers=job.layers, hidden_size=job.hidden, num_attention_heads=job.heads, num_query_groups=job.groups,
        kv_channels=job.head_dim, ffn_hidden_size=job.ffn, perform_initialization=False, add_bias_linear=job.gpt,
        gated_linear_unit=not job.gpt, activation_func=functional.gelu if job.gpt else functional.silu,
        normalization="LayerNorm" if job.gpt else "RMSNorm", tensor_model_parallel_size=job.tensor,
        params_dtype=torch.bfloat16, bf16=True, hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=True,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        recompute_granularity=None if job.checkpointing == "none" else job.checkpointing,
        recompute_method="uniform" if whole else None, recompute_num_layers=1 if whole else None,
        attention_softmax_in_fp32=True,
    )  # fmt: skip


def _built(job: MegatronStep) -> Any:  # pragma: no cover - needs megatron-core
    """Return a rank's wrapped model."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    config = _config(job)
    with torch.device("meta"):
        model = GPTModel(
            config, get_gpt_layer_local_spec(normalization=config.normalization),
            vocab_size=-(-job.vocabulary // (128 * job.tensor)) * 128 * job.tensor, max_sequence_length=job.length,
            position_embedding_type="learned_absolute" if job.gpt else "rope", share_embeddings_and_output_weights=job.tied,
        )  # fmt: skip
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=job.sharded)
    wrapped = DistributedDataParallel(config, settings, Float16Module(config, model))
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, wrapped.no_sync
    return wrapped


def _booked(model: Any, recorder: Any) -> None:  # pragma: no cover - needs megatron-core
    for name, parameter in model.named_parameters():
        recorder.mark(parameter, "weights", name)
    for buffer in model.buffers:
        recorder.mark(buffer.grad_data, "gradients")


def _forward_step(job: MegatronStep) -> Callable[..., Any]:  # pragma: no cover - needs megatron-core
    """Return what ``pretrain_gpt.py`` hands to the schedule: a batch, the model, and the masked mean of its losses."""
    import torch

    def forward_step(_: Any, model: Any) -> Any:
        shape = (job.batch, job.length)
        with torch.device("meta"):
            tokens, labels, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
            weights, mask = torch.ones(shape), torch.zeros(1, 1, job.length, job.length, dtype=torch.bool)

        def mean(losses: Any) -> Any:
            chosen = weights.view(-1).float()
            total, count = torch.sum(losses.view(-1).float() * chosen), chosen.sum().clone().detach().to(torch.int)
            return total, count, {"lm loss": torch.cat([total.clone().detach().view(1), count.view(1)])}

        return model(tokens, positions, mask, labels=labels), mean

    return forward_step


# -------------------------------------------------------------------- a rank without the others, and without a GPU
@contextmanager
def _ranks(job: MegatronStep) -> Iterator[None]:  # pragma: no cover - needs megatron-core
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=job.tensor * job.data, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=job.tensor, create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        with ExitStack() as around:
            for one in _nothing_sent():
                around.enter_context(one)
            yield
    finally:
        parallel_state.destroy_global_memory_buffer()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _nothing_sent() -> Iterator[Any]:  # pragma: no cover - needs megatron-core
    """Yield what lets collectives do nothing; what they fill is allocated by those that call them."""
    import torch.distributed as dist

    work = SimpleNamespace(wait=lambda *_: None)

    @contextmanager
    def together(*_: Any, **__: Any) -> Iterator[Any]:
        yield work

    nothing: Callable[..., Any] = lambda *_, **__: work  # noqa: E731
    exchanges = ("isend", "irecv", "P2POp")
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", *exchanges):
        yield patch.object(dist, name, nothing)
    yield patch.object(dist, "batch_isend_irecv", lambda *_: [work])
    for module in [
        module for name, module in sys.modules.items() if name.startswith(("megatron.", "transformer_engine."))
    ]:
        for name, new in (
            ("dist_reduce_scatter_func", nothing),
            ("dist_all_gather_func", nothing),
            ("_coalescing_manager", together),
        ):
            if name in vars(module):
                yield patch.object(module, name, new)


def _to_meta() -> Any:  # pragma: no cover - needs torch
    """Return a mode that makes on ``meta`` what is asked for on CUDA."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class ToMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if getattr(kwargs.get("device"), "type", "") == "cuda":
                kwargs["device"] = torch.device("meta")
            return func(*args, **kwargs)

    return ToMeta


def without_cuda(folder: str) -> None:  # pragma: no cover - needs megatron-core
    """Let megatron-core run on tensors without memory."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)
    import torch

    cuda: Any = torch.cuda
    cuda.current_device, cuda._lazy_init, cuda.Stream = lambda: "meta", lambda: None, SimpleNamespace
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = cuda.manual_seed_all = lambda _: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    named, words = torch.Tensor.type, {torch.bfloat16: "BFloat16", torch.float32: "Float"}
    torch.Tensor.type = lambda self, *args: named(self, *args) if args else f"torch.cuda.{words.get(self.dtype)}Tensor"
    make = torch.tensor
    torch.tensor = lambda *args, device=None, **keys: make(*args, device=device and "meta", **keys)
    import megatron.core
    from megatron.core.tensor_parallel import random as states

    states._set_cuda_rng_state = lambda *_, **__: None
    assert megatron.core.__version__ == VERSION


def pairs(stages: int, chunks: int, rank: int, micro_batches: int) -> int:  # pragma: no cover - needs megatron-core
    """Return what ``get_pp_rank_microbatches`` says a rank runs forward before its first backward, the one behind it included."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    group = SimpleNamespace(size=lambda: stages, rank=lambda: rank)
    neighbours: Any = SimpleNamespace(
        pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    total, _, warm, _ = get_pp_rank_microbatches(micro_batches, chunks, stages, p2p_communicator=neighbours)
    return min(total, warm + 1)


def main() -> None:  # pragma: no cover - needs megatron-core
    """Compare what is counted with what is left, and write it down where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    without_cuda(given.folder)
    from memplan.step.grids.grid import Grid
    from memplan.step.grids.megatron_peaks import pairs_in_flight
    from tests.grids.planned_steps import counted, planned

    grids = [(p, v, r, m * p) for p in (2, 3, 4, 8, 16) for v in (1, 2, 4) for m in (1, 2, 5) for r in range(p)]
    unlike = [
        one
        for one in grids
        if pairs(*one) != pairs_in_flight(Grid(one[0], pipeline=one[0], virtual=one[1]), one[2], one[3])
    ]
    print(f"{len(grids)} ranks of pipelines, {len(unlike)} differ {unlike[:3] or ''}")
    rows, wrong = [], 0
    for seed in range(given.seed, given.seed + given.count):
        job = drawn(seed)
        real = traced(job)
        rows.append({"job": asdict(job), "traced": real})
        if counted(job) != real["left"] or planned(job) > real["activations"]:
            wrong += 1
            print(f"{seed}: {job}: {real}, left {counted(job)}, at least {planned(job)}")
    print(f"{len(rows)} jobs, {wrong} differ")
    if given.record:
        text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        given.record.write_text(f'{{"megatron_core": "{VERSION}", "jobs": [\n{text}\n]}}\n')
    raise SystemExit(bool(wrong or unlike))


if __name__ == "__main__":
    main()
