"""What is planned for a drawn step of Megatron-LM's own modules, and what of theirs no other kernel keeps."""

from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_layers import MegatronBatch, RankSizes
from memplan.step.grids.megatron_peaks import least_activations
from memplan.step.grids.megatron_tensors import MegatronBuild
from memplan.step.grids.pipeline_stages import chunks_of
from memplan.units import round_up
from tests.grids.planned_peaks import drawn_spec


def planned(job) -> int:
    """Return what a step keeps at least, logits included."""
    grid = Grid(job.tensor * job.data, job.tensor, zero_stage=int(job.sharded))
    batch = MegatronBatch(job.batch, job.length, job.micro_batches, job.checkpointing == "full")
    sizes = RankSizes(drawn_spec(job, 0), grid, MegatronBuild("local"), batch)
    (least,) = least_activations(sizes, chunks_of(job.layers, grid))
    return least


def counted(job) -> int:
    """Return what is left when the head begins: what is planned, without logits, and what Megatron-LM's own modules keep besides.

    These are, of a token and all tensor ranks together: heads of keys and values repeated for each of the query, or, where they
    are not, the projection that values are a view of beside rotated queries and keys; the last layer's result and the final norm's.
    """
    tokens, query, keys = job.batch * job.length, job.heads * job.head_dim, job.groups * job.head_dim
    stream = 2 * tokens * job.hidden
    columns = round_up(job.vocabulary, 128 * job.tensor) // job.tensor
    ends = 2 * stream
    if job.checkpointing == "full":
        return job.layers * stream + ends
    repeated = job.groups < job.heads and job.checkpointing == "none"
    more = 0 if job.gpt else 2 * (query - keys) if repeated else query + keys
    own = job.layers * 2 * tokens * more // job.tensor
    return planned(job) - 6 * tokens * columns + own + ends
