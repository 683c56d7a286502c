"""What is planned for a drawn job, in the words of what is held."""

from math import prod

from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts, Mlp, ModelSpec, Norm, layer_runs
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_states import Bucketing, flat_buffer
from memplan.step.grids.megatron_tensors import MegatronBuild, chunk_tensors, expert_bias_bytes
from memplan.step.grids.pipeline_stages import StageSplit, chunks_of


def spec_of(job) -> ModelSpec:
    """Return the model of a drawn job."""
    gpt = job.kind == "gpt"
    norm = Norm("layer", bias=True) if gpt else Norm()
    if job.kind == "latent":
        attention = LatentAttention(job.heads, job.q_rank, 32, 16, 8, 8)
    else:
        qk = norm if job.qk_norm else None
        bias = job.qkv_bias or gpt
        attention = Attention(job.heads, job.groups, job.head_dim, 0, bias, gpt, query_key_norm=qk)
    dense = Layer(attention, Mlp(job.ffn, gated=job.gated and not gpt, bias=gpt), norm)
    layers = [dense] * job.layers
    if job.experts:
        latent = job.kind == "latent"
        mixture = MixtureOfExperts(
            job.experts, 2, job.ffn, shared_intermediate_size=job.shared, score_correction=latent, gated=job.gated
        )
        sparse = job.sparse or (0,) * job.dense_first + (1,) * (job.layers - job.dense_first)
        layers = [Layer(attention, mixture, norm) if one else dense for one in sparse]
    return ModelSpec(
        "drawn", job.kind, job.vocabulary, job.hidden, layer_runs(layers), norm,
        tie_word_embeddings=job.tied, learned_positions=128 if gpt else 0,
    )  # fmt: skip


def grid_of_job(job) -> Grid:
    """Return the grid of a drawn job."""
    return Grid(
        job.world,
        job.tensor,
        job.pipeline,
        job.virtual,
        job.context,
        job.expert,
        job.expert_tensor,
        int(job.sharded),
        job.replicate,
    )


def split_of(job) -> StageSplit:
    """Return what a drawn job says of stages."""
    return StageSplit(job.first, job.last, job.embedding, job.loss, job.predicted, job.layout)


def planned(job) -> list[list[dict]]:
    """Return, for every stage and chunk, the planned tensors, buffers and each rank's pieces."""
    grid = grid_of_job(job)
    stages = chunks_of(job.layers, grid, split_of(job))
    return [
        [_chunk(job, grid, stage, virtual, chunk) for virtual, chunk in enumerate(chunks)]
        for stage, chunks in enumerate(stages)
    ]


def _chunk(job, grid, stage, virtual, chunk) -> dict:
    tensors = chunk_tensors(spec_of(job), grid, chunk, MegatronBuild("local", job.multiple, job.predicted))
    bucket = job.bucket if stage == 0 and virtual == 0 else 0
    groups = ("dense", False, grid.shards), ("experts", True, grid.expert_shards)
    found = {"tensors": [[tensor.name, list(tensor.shape)] for tensor in tensors]}
    found["buffers"] = expert_bias_bytes(spec_of(job), chunk, job.predicted)
    for name, expert, ranks in groups:
        own = [tensor for tensor in tensors if tensor.expert is expert]
        buffer = flat_buffer(own, Bucketing(ranks, job.sharded, bucket))
        found[name] = [{"elements": buffer.elements, "updated": list(buffer.updated)}] if own else []
    return found


def summary(chunk: dict) -> dict:
    """Return a chunk as records have it: how many tensors, and how many elements."""
    return {**chunk, "tensors": [len(chunk["tensors"]), sum(prod(shape) for _, shape in chunk["tensors"])]}
