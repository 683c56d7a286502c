"""What torchtitan's trainer is given: flex attention, shared sequences, routed experts, and the optimizers that its config names."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import api
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.muon.parameter_groups import split_parameters
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.jobs.optimizers import update_of
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.stacks.titan.flex_kernel import block_mask, flex_attention
from memplan.training.resolved import TrainingSetup


class BundledOptimizers(list[torch.optim.Optimizer]):
    """The optimizers of a model, with what the trainer calls of its container."""

    def step(self) -> None:
        """Step one after the other."""
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none)


def optimizers_of(parts: Sequence[nn.Module], setup: TrainingSetup) -> Any:
    """Return what the trainer steps: the container that it has itself, unless the config's optimizers are the bundled ones."""
    if not any(entry.orthogonalises for entry in setup.optimizers.values()):
        config = default_adamw()
        config.implementation = setup.profile.optimizer
        return OptimizersContainer(config, model_parts=list(parts))
    groups: dict[str, list[Trained]] = {}
    for part in parts:
        parameters = dict(part.named_parameters())
        for entry in split_parameters(part).report:
            assert entry.role is not None
            item = Trained(entry.name, entry.role, entry.shape, parameters[entry.name], None, None)
            groups.setdefault(setup.optimizer_names[entry.role], []).append(item)
    ordered = sorted(groups.items(), key=lambda group: setup.optimizers[group[1][0].role].takes == "all")
    updates: list[Any] = [update_of(name, setup.optimizers[items[0].role], items, setup, ()) for name, items in ordered]
    return BundledOptimizers(update.optimizer for update in updates)


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


META = torch.device("meta")


@contextlib.contextmanager
def runs_flex() -> Iterator[None]:
    """Let flex attention run as its kernel does on CUDA."""
    with replaced(FlexAttention, {"compiled_flex_attn": staticmethod(flex_attention)}):
        yield


@contextlib.contextmanager
def attending_along(model: Any, dims: ParallelDims) -> Iterator[None]:
    """Let a model's attention gather keys and values over the ranks that share a sequence, as ``parallelize_llama`` does."""
    made = api._HeadTailLoadBalancer

    def balancer(length: int, ranks: int, _: str) -> Any:
        return made(length, ranks, META)

    with replaced(api, {"_HeadTailLoadBalancer": balancer}):
        api.apply_cp_to_forward(
            [block.attention.inner_attention for block in model.layers.values()], dims.get_mesh("cp")
        )
        yield


def own_part(rows: dict[str, Any], labels: Tensor, dims: ParallelDims) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return a rank's token ids and labels, and what else its model is called with, as the trainer prepares them."""
    mesh, more = dims.get_mesh("cp"), {key: value for key, value in rows.items() if key != "input"}
    length = labels.shape[1]
    inputs, labels, more = api.prepare_context_parallel_input(rows["input"], labels, more, mesh, META)
    more["attention_masks"] = block_mask(labels.shape[0], length, mesh.size())
    return inputs, labels, more
