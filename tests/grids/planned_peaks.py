"""What is planned for a drawn step of Megatron-LM, on the stage that was traced."""

from memplan.model.spec import Attention, Layer, Mlp, ModelSpec, Norm, layer_runs
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_layers import MegatronBatch, MegatronKernels, RankSizes
from memplan.step.grids.megatron_peaks import StepInterval, step_intervals, step_peaks
from memplan.step.grids.megatron_tensors import MegatronBuild
from memplan.step.grids.pipeline_stages import chunks_of


def planned_peak(job) -> int:
    """Return the peak that is planned for a job's stage, beyond weights, gradients and optimizer states, with what runs there."""
    return step_peaks(*_given(job))[job.stage]


def planned_interval(job) -> StepInterval:
    """Return between which bytes it is planned to lie, whether gradients and rotation are fused or not."""
    return step_intervals(*_given(job))[job.stage]


def _given(job) -> tuple:
    grid = Grid(
        job.tensor * job.data * job.pipeline, job.tensor, pipeline=job.pipeline, virtual=job.virtual,
        zero_stage=int(job.sharded), sequence=job.sequence,
    )  # fmt: skip
    modules = frozenset(["core_attn"] if job.checkpointing == "selective" else [])
    batch = MegatronBatch(job.batch, job.length, job.micro_batches, job.checkpointing == "full", modules)
    build = MegatronBuild("transformer_engine" if job.engine else "local")
    kernels = MegatronKernels(
        job.engine, job.fused_gradients, job.fused_rotary, job.attention == "fused", job.dropout > 0, job.dropout > 0
    )
    return RankSizes(drawn_spec(job, 0 if job.gpt else job.head_dim), grid, build, batch, kernels), chunks_of(
        job.layers, grid
    )


def drawn_spec(job, rotary_dim: int) -> ModelSpec:
    """Return the shapes of a drawn job's model."""
    norm = Norm("layer", bias=True) if job.gpt else Norm()
    attention = Attention(job.heads, job.groups, job.head_dim, rotary_dim, job.gpt, job.gpt)
    layer = Layer(attention, Mlp(job.ffn, gated=not job.gpt, bias=job.gpt), norm)
    return ModelSpec(
        "drawn", "dense", job.vocabulary, job.hidden, layer_runs([layer] * job.layers), norm,
        tie_word_embeddings=job.tied, learned_positions=job.length if job.gpt else 0,
    )  # fmt: skip
