"""What Megatron-LM's own optimizers hold after a step, rank by rank, beside what is planned.

``python tests/grids/megatron_optimizers.py FOLDER [--seed 0] [--count 60]``: jobs of :mod:`tests.grids.megatron_jobs`, whose
models are wrapped in the megatron-core of FOLDER's ``DistributedDataParallel`` and given to its ``get_megatron_optimizer``,
which steps once on a CPU; on the first, the last and one more rank of the first and of the last stage.
"""

import argparse
import random

from tests.grids import megatron_jobs
from tests.grids.megatron_jobs import MegatronJob, drawn, drawn_wide
from tests.grids.planned_ranks import grid_of_job, spec_of, split_of


def main() -> None:  # pragma: no cover - needs megatron-core
    """Compare, and end with 1 where anything differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument(
        "--wide", action="store_true", help="up to 1,024 ranks, experts anywhere, stages laid out by hand"
    )
    given = parser.parse_args()
    draw = drawn_wide if given.wide else drawn
    megatron_jobs.without_cuda(given.folder)
    _as_on_cuda()
    equal = different = 0
    for seed in range(given.seed, given.seed + given.count):
        job = draw(seed)
        if job.bucket:  # its own size of buckets
            continue
        for stage, rank in _ranks(job, seed):
            try:
                held = _held(job, stage, rank)
            except ZeroDivisionError:  # Megatron-LM cannot number the layers
                continue
            planned = _planned(job, stage, rank)
            equal, different = equal + (held == planned), different + (held != planned)
            if held != planned:
                print(f"{seed}: rank {rank} of stage {stage}: held {held}, planned {planned}")
    print(f"{equal} ranks equal, {different} differ")
    raise SystemExit(different > 0)


def _ranks(job: MegatronJob, seed: int) -> list[tuple[int, int]]:
    count = job.world // job.pipeline
    ranks = sorted({0, count - 1, random.Random(seed).randrange(count)})
    return [(stage, rank) for stage in sorted({0, job.pipeline - 1}) for rank in ranks]


def _planned(job: MegatronJob, stage: int, rank: int) -> tuple[int, ...]:
    from memplan.step.grids.megatron_states import MegatronSettings, megatron_states
    from memplan.step.grids.megatron_tensors import MegatronBuild

    settings = MegatronSettings(split_of(job), MegatronBuild("local", job.multiple))
    states = megatron_states(spec_of(job), grid_of_job(job), settings)[stage].rank(rank)
    return states.weights, states.gradients, states.master_weights, states.optimizer_states


def _held(job: MegatronJob, stage: int, rank: int) -> tuple[int, ...]:  # pragma: no cover - needs megatron-core
    """Return bytes of weights, gradients, fp32 copies and moments after a step on zero gradients."""
    import torch

    with megatron_jobs.process_groups(job, stage * (job.world // job.pipeline) + rank):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        chunks = [megatron_jobs.wrapped_chunk(job, stage, virtual) for virtual in range(job.virtual)]
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0,
            use_distributed_optimizer=job.sharded,
        )  # fmt: skip
        whole = get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False)
        parts = [part for part in getattr(whole, "chained_optimizers", [whole]) if not part.is_stub_optimizer]
        master = moments = 0
        for part in parts:
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                assert parameter.dtype == torch.float32
                parameter.grad = torch.zeros_like(parameter)
                master += parameter.nbytes
            part.optimizer.step()
            for state in part.optimizer.state.values():
                moments += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        weights = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
        if job.sharded:
            weights = sum(buffer.param_data.nbytes for buffer in buffers)
        return weights, sum(buffer.grad_data.nbytes for buffer in buffers), master, moments


def _as_on_cuda() -> None:  # pragma: no cover - needs megatron-core
    """Name dtypes of tensors as on CUDA, by which its optimizers tell them, and make on the CPU what names CUDA."""
    import torch

    named, make = torch.Tensor.type, torch.tensor
    torch.Tensor.type = lambda self, *args: named(self, *args) if args else named(self).replace("torch.", "torch.cuda.")
    torch.tensor = lambda *args, device=None, **keys: make(*args, **keys)
    torch.cuda.FloatTensor = torch.FloatTensor


if __name__ == "__main__":
    main()
