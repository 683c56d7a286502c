"""torchtitan's experts shared by GPUs: the mesh that shards them, and how many rows pass between ranks without values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.training.resolved import TrainingSetup

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims


def expert_mesh(dims: ParallelDims, parallel: Parallel) -> Any:
    """Return the mesh that shards experts, as ``parallelize_qwen3`` names it; None where GPUs do not share them."""
    if parallel.expert == 1:
        return None
    return dims.get_optional_mesh(["dp_replicate", "efsdp"] if parallel.replicate > 1 else ["efsdp"])


@contextlib.contextmanager
def routed_rows(setup: TrainingSetup) -> Iterator[None]:
    """Let ranks send and receive as many rows as a config's routing gives them, where counts have no values to be read.

    What ``AllToAllTokenDispatcher._sync_token_count_exchange`` allocates on the device is made as it makes it.
    """

    def exchanged(own: Any, counts: Tensor, received: Tensor, ranks: int) -> tuple[Tensor, list[int], list[int]]:
        received = torch.ops._c10d_functional.wait_tensor(received).reshape(-1)
        counts.view(ranks, -1).sum(dim=1)
        received.view(ranks, -1).sum(dim=1)
        parallel = setup.config.parallel
        tokens = setup.config.micro_batch_size * setup.config.sequence_length // (parallel.tensor * parallel.context)
        rows = tokens * own.top_k
        shares = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        if parallel.routing == "even":
            return received, shares, list(shares)
        most = tokens * min(own.top_k, own.num_experts // ranks)
        return received, [most, rows - most, *[0] * (ranks - 2)], [most] * ranks

    with replaced(AllToAllTokenDispatcher, {"_sync_token_count_exchange": exchanged}):
        yield
