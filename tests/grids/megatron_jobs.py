"""Models and grids drawn at random, and what Megatron-LM's own modules hold of them on every rank.

``python tests/grids/megatron_jobs.py FOLDER [--seed 0] [--count 60] [--record FILE]`` builds each job's model with the
megatron-core that is unpacked in FOLDER (``pip download megatron-core --no-deps``), in its own ``DistributedDataParallel``,
over a fake process group, on a CPU: all stages, one tensor rank, every data parallel rank's ranges.
"""

import argparse
import json
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

VERSION = "0.16.1"


@dataclass(frozen=True)
class MegatronJob:
    """A small model and the grid that it is divided over.

    ``kind`` is dense, gpt, mixture or latent; sizes are Megatron-LM's. ``sparse`` has a 1 for each layer with experts, and is
    empty where ``dense_first`` says it.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int
    shared: int
    dense_first: int
    q_rank: int
    world: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int
    first: int | None
    last: int | None
    embedding: bool
    loss: bool
    sharded: bool
    bucket: int
    multiple: int
    replicate: int
    gated: bool = True
    sparse: tuple[int, ...] = ()
    layout: str | None = None
    predicted: int = 0


def drawn(seed: int) -> MegatronJob:
    """Return the job of a seed; what Megatron-LM refuses is not drawn."""
    draw = random.Random(seed)
    kind = draw.choice(("dense", "dense", "gpt", "mixture", "mixture", "latent"))
    tensor, context, data = draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 2)), draw.choice((1, 2, 3, 4))
    pipeline = draw.choice((1, 2, 3, 4))
    virtual = draw.choice((1, 2)) if pipeline > 1 else 1
    world = tensor * context * data * pipeline
    mixture = kind == "mixture" or (kind == "latent" and draw.random() < 0.7)
    expert, expert_tensor = 1, tensor
    if mixture:
        rest = world // pipeline
        expert = draw.choice([n for n in (1, 2, 4) if rest % n == 0])
        expert_tensor = draw.choice([n for n in (1, 2, 4) if rest % (expert * n) == 0 and tensor % n == 0])
    per = draw.choice((1, 2, 3)) * virtual
    layers, first, last, embedding, loss = per * pipeline, None, None, False, False
    uneven = draw.choice(("no", "no", "ends", "embedding", "loss", "both"))
    if uneven == "ends" and pipeline > 1:
        first, last = draw.choice((None, virtual)), 2 * virtual
        middle = pipeline - 1 - (first is not None)
        layers = (first or 0) + last + per * middle
    elif uneven != "no" and pipeline > 1 and per // virtual > 1:
        embedding, loss = uneven in ("embedding", "both"), uneven in ("loss", "both")
        layers -= embedding + loss
    groups = draw.choice((1, 2, 4, 8))
    sharded, bucket, multiple = draw.random() < 0.75, draw.choice((0, 0, 20_000)), draw.choice((1, 128))
    groups_of = [world // pipeline // tensor, world // pipeline // (expert * expert_tensor)]
    replicate = draw.choice((1, 2)) if sharded and all(ranks % 2 == 0 for ranks in groups_of) else 1
    return MegatronJob(
        kind, layers, draw.choice((64, 72, 96)), 8, 8 if kind in ("gpt", "latent") else groups, draw.choice((8, 16)),
        draw.choice((48, 100, 176)), draw.choice((500, 1000, 1537)), draw.random() < 0.4,
        kind == "dense" and draw.random() < 0.5, kind in ("dense", "mixture") and draw.random() < 0.4,
        draw.choice((4, 8)) if mixture else 0, draw.choice((0, 48)) if mixture else 0,
        draw.choice((0, 1)) if mixture else 0, draw.choice((0, 24)) if kind == "latent" else 0,
        world, tensor, pipeline, virtual, context, expert, expert_tensor, first, last, embedding, loss,
        sharded, bucket, multiple, replicate,
    )  # fmt: skip


def drawn_wide(seed: int) -> MegatronJob:
    """Return the job of a seed over up to 1,024 ranks, its experts in any layers, gated or not, its stages maybe laid out by hand."""
    job, draw = drawn(seed), random.Random(f"wide {seed}")
    most = 1024 // job.world
    job = replace(job, world=job.world * draw.choice([n for n in (1, 3, 8, 16, 32, 64, 128) if n <= most]))
    if job.experts:
        sparse = tuple(draw.choice((0, 1, 1)) for _ in range(job.layers))
        job = replace(job, gated=draw.random() < 0.6, sparse=sparse)
    if job.pipeline > 1 and draw.random() < 0.5:
        chunks = ["" for _ in range(job.pipeline * job.virtual)]
        for place in sorted(draw.randrange(len(chunks)) for _ in range(job.layers)):
            chunks[place] += "t"
        layout = "E" + "|".join(chunks) + "L"
        job = replace(job, layout=layout, first=None, last=None, embedding=False, loss=False)
    return job


def with_predicted(job: MegatronJob, predicted: int) -> MegatronJob:
    """Return a job that predicts further tokens: behind the last layer, or where a layout has it, in the chunk before the head's."""
    head, _, last = (job.layout or "").rpartition("|")
    if predicted and job.layout:
        more = "m" * predicted
        apart = head and last == "L" and job.pipeline > 1
        job = replace(job, layout=f"{head}{more}|L" if apart else job.layout.replace("L", f"{more}L"))
    return replace(job, predicted=predicted)


def _config(job: MegatronJob):  # pragma: no cover - needs megatron-core
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    keys = {
        "num_layers": job.layers, "hidden_size": job.hidden, "num_attention_heads": job.heads, "num_query_groups": job.groups,
        "kv_channels": job.head_dim, "ffn_hidden_size": job.ffn, "use_cpu_initialization": True, "perform_initialization": False,
        "add_bias_linear": job.kind == "gpt", "add_qkv_bias": job.qkv_bias, "gated_linear_unit": job.kind != "gpt" and job.gated,
        "activation_func": torch.nn.functional.gelu if job.kind == "gpt" else torch.nn.functional.silu,
        "normalization": "LayerNorm" if job.kind == "gpt" else "RMSNorm", "qk_layernorm": job.qk_norm or job.kind == "latent",
        "tensor_model_parallel_size": job.tensor, "pipeline_model_parallel_size": job.pipeline,
        "virtual_pipeline_model_parallel_size": job.virtual if job.virtual > 1 else None, "context_parallel_size": job.context,
        "expert_model_parallel_size": job.expert, "expert_tensor_parallel_size": job.expert_tensor,
        "num_layers_in_first_pipeline_stage": job.first, "num_layers_in_last_pipeline_stage": job.last,
        "account_for_embedding_in_pipeline_split": job.embedding, "account_for_loss_in_pipeline_split": job.loss,
        "pipeline_dtype": torch.bfloat16, "params_dtype": torch.bfloat16, "bf16": True,
    }  # fmt: skip
    if job.layout:
        keys |= {"pipeline_model_parallel_layout": job.layout, "mtp_num_layers": job.predicted or None}
    if job.experts:
        keys |= {
            "num_moe_experts": job.experts, "moe_ffn_hidden_size": job.ffn, "moe_router_topk": 2,
            "moe_shared_expert_intermediate_size": job.shared or None, "moe_token_dispatcher_type": "alltoall",
            "moe_router_enable_expert_bias": job.kind == "latent", "moe_router_score_function": "sigmoid",
            "moe_layer_freq": list(job.sparse) or [0] * job.dense_first + [1] * (job.layers - job.dense_first),
        }  # fmt: skip
    if job.kind != "latent":
        return TransformerConfig(**keys)
    del keys["num_query_groups"], keys["kv_channels"]
    keys["rope_type"] = "rope"  # the other's table is made in pinned memory
    ranks = {
        "q_lora_rank": job.q_rank or None,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
    }
    return MLATransformerConfig(**keys, **ranks)


@contextmanager
def process_groups(job: MegatronJob, rank: int) -> Iterator[None]:  # pragma: no cover - needs megatron-core
    """Be one rank of a job, without the others."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=job.world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=job.tensor, pipeline_model_parallel_size=job.pipeline,
            virtual_pipeline_model_parallel_size=job.virtual if job.virtual > 1 else None,
            context_parallel_size=job.context, expert_model_parallel_size=job.expert,
            expert_tensor_parallel_size=job.expert_tensor, create_gloo_process_groups=False,
            num_distributed_optimizer_instances=job.replicate,
        )  # fmt: skip
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def held(job: MegatronJob) -> list[list[dict]]:  # pragma: no cover - needs megatron-core
    """Return, for every stage and chunk, what the job's real modules hold: tensors, buffers and each rank's pieces."""
    stages = []
    for stage in range(job.pipeline):
        rank = stage * (job.world // job.pipeline) + random.Random(job.world).randrange(job.tensor * job.context)
        with process_groups(job, rank):
            stages.append([_chunk(job, wrapped_chunk(job, stage, virtual)) for virtual in range(job.virtual)])
    return stages


def wrapped_chunk(job: MegatronJob, stage: int, virtual: int):  # pragma: no cover - needs megatron-core
    """Return one chunk of a rank's model in 16 bits, in Megatron-LM's ``DistributedDataParallel``."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.module import Float16Module

    config = _config(job)
    config.mtp_num_layers = job.predicted or None
    chunk = virtual if job.virtual > 1 else None
    spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=chunk)
    ends = (stage, virtual) == (job.pipeline - 1, job.virtual - 1)
    predicts = "m" in job.layout.split("|")[virtual * job.pipeline + stage] if job.layout else job.predicted and ends
    behind = get_gpt_mtp_block_spec(config, spec, False, vp_stage=chunk) if predicts else None
    rows = job.multiple * job.tensor
    model = GPTModel(
        config, spec, vocab_size=-(-job.vocabulary // rows) * rows, max_sequence_length=128,
        pre_process=(stage, virtual) == (0, 0), post_process=ends, mtp_block_spec=behind,
        position_embedding_type="learned_absolute" if job.kind == "gpt" else "rope",
        share_embeddings_and_output_weights=job.tied, vp_stage=chunk,
    )  # fmt: skip
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=job.sharded, overlap_grad_reduce=job.bucket > 0,
        bucket_size=job.bucket or None, num_distributed_optimizer_instances=job.replicate,
    )  # fmt: skip
    return DistributedDataParallel(config, settings, Float16Module(config, model), disable_bucketing=virtual > 0)


def _chunk(job: MegatronJob, replicated) -> dict:  # pragma: no cover - needs megatron-core
    import torch

    model = replicated.module
    names = [[name.removeprefix("module."), list(p.shape)] for name, p in model.named_parameters()]
    assert {p.dtype for p in model.parameters()} <= {torch.bfloat16}  # none in a chunk without layers
    for router in (module for module in model.modules() if hasattr(module, "_maintain_float32_expert_bias")):
        router._maintain_float32_expert_bias()  # as each forward does
    biases = sum(buffer.nbytes for name, buffer in model.named_buffers() if ".router." in name)
    groups = (replicated.buffers, replicated.expert_parallel_buffers)
    dense, experts = ([_buffer(job, buffer) for buffer in group] for group in groups)
    return {"tensors": names, "buffers": biases, "dense": dense, "experts": experts}


def _buffer(job: MegatronJob, buffer) -> dict:  # pragma: no cover - needs megatron-core
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    size = buffer.data_parallel_world_size
    held = buffer.grad_data.numel(), 0 if buffer.param_data is None else buffer.param_data.numel()
    assert held[1] in (0, held[0])
    if not job.sharded:
        return {"elements": held[0], "updated": [sum(p.numel() for p in buffer.params)] * size}
    updated = []
    for rank in range(size):
        buffer.data_parallel_group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        ranges = DistributedOptimizer._build_gbuf_range_map(buffer)
        maps = [bucket["param_map"] for buckets in ranges.values() for bucket in buckets]
        updated.append(sum(one["param"].size for each in maps for one in each.values()))
    return {"elements": held[0], "updated": updated}


def without_cuda(folder: str) -> None:  # pragma: no cover - needs megatron-core
    """Let megatron-core run on a CPU: what asks for the current device gets that, and moves to CUDA stay."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, folder)
    import torch

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda _: None
    torch.cuda._lazy_init = lambda: None
    import megatron.core
    import megatron.core.tensor_parallel.random as states

    states._set_cuda_rng_state = lambda *_, **__: None
    from megatron.core.transformer import dot_product_attention

    dot_product_attention.DotProductAttention.__init__ = lambda self, *_, **__: torch.nn.Module.__init__(self)
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.TELinear = type("TELinear", (), {})
    torch.cuda.Stream = (
        SimpleNamespace  # attention has no parameters, and its own refuses what Transformer Engine's does
    )
    assert megatron.core.__version__ == VERSION


def main() -> None:  # pragma: no cover - needs megatron-core
    """Compare what is planned with what is held, and write it down where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--record", type=Path)
    parser.add_argument(
        "--wide", action="store_true", help="up to 1,024 ranks, experts anywhere, stages laid out by hand"
    )
    parser.add_argument("--predicted", type=int, default=0, help="layers of multi-token prediction")
    given = parser.parse_args()
    without_cuda(given.folder)
    draw = drawn_wide if given.wide else drawn
    from tests.grids.planned_ranks import planned, summary

    rows, wrong, refused = [], 0, 0
    for seed in range(given.seed, given.seed + given.count):
        job = with_predicted(draw(seed), given.predicted)
        try:
            real = held(job)
        except ZeroDivisionError:
            refused += 1
            continue
        rows.append({"job": asdict(job), "held": [[summary(chunk) for chunk in stage] for stage in real]})
        ours = planned(job)
        if ours != real:
            wrong += 1
            print(f"{seed}: differs: {job}", _first_difference(ours, real), sep="\n    ")
    print(
        f"{len(rows)} jobs built, {refused} whose layers Megatron-LM cannot number (it divides by zero), {wrong} differ"
    )
    if given.record:
        text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        given.record.write_text(f'{{"megatron_core": "{VERSION}", "jobs": [\n{text}\n]}}\n')


def _first_difference(ours, real) -> str:
    for stage, (mine, theirs) in enumerate(zip(ours, real, strict=True)):
        for virtual, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            for key in b:
                if a[key] != b[key]:
                    own = [x for x in a[key] if x not in b[key]][:3]
                    return f"stage {stage} chunk {virtual} {key}: planned {own}, held {[x for x in b[key] if x not in a[key]][:3]}"
    return "in the order"


if __name__ == "__main__":
    main()
