"""Links inside nodes and between them, and what groups of GPUs send over each.

A collective is taken to run along a ring that visits the GPUs of a node one after the other, so that it enters and leaves each
node once, with every adapter of a node busy. That is the bandwidth of the links, and no measurement: latency, congestion,
topology of switches and reductions inside them are not in it.
"""

from collections.abc import Mapping
from dataclasses import replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Gpu
from memplan.catalog.shipped_tables import Network
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError, match_hint, shown_value
from memplan.plan.memory_plan import Device
from memplan.solver.search.timing import Rates, rated_gpu, rates_of

GPUS_PER_NODE = 8
"""Where nothing is said (https://docs.nvidia.com/dgx-basepod: "Eight NVIDIA Hopper GPUs")."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs, the nodes that they are in, and what joins them."""

    per_node: int  # GPUs of a node
    link: str  # What joins the GPUs of a node
    inside: int  # Bytes per second that a GPU sends over it, one way; 0 where it is not known
    network: str = ""  # What joins nodes, or nothing where that is not known
    between: int = 0  # Bytes per second of a GPU's share of it, one way; 0 likewise

    def spans(self, ranks: int, stride: int = 1) -> bool:
        """Tell whether groups of so many GPUs, every ``stride``-th of them, lie on several nodes."""
        return ranks > 1 and (ranks * stride > self.per_node or self.per_node % (ranks * stride) > 0)

    def members(self, ranks: int, stride: int = 1) -> int:
        """Return the GPUs of such a group that are in the same node."""
        return min(ranks, max(1, self.per_node // stride))

    def split(self, sent: int, ranks: int, stride: int = 1) -> tuple[int, int]:
        """Return what a GPU of such a group sends inside its node and to others, on average.

        Args:
            sent: Bytes that it sends in all.
            ranks: GPUs of the group.
            stride: Distance of one from the next.

        Formula:
            One of a node's k members sends to another node: ``sent / k``; the rest stays inside.

        Example:
            >>> Cluster(8, "nvlink-4", 450, "infiniband-400g", 50).split(800, 16)
            (700, 100)
        """
        outside = sent // self.members(ranks, stride) if self.spans(ranks, stride) else 0
        return sent - outside, outside

    def bytes_per_second(self, ranks: int, stride: int = 1) -> int:
        """Return the rate at which each GPU of such a group sends.

        Formula:
            That of the slowest hop: the link inside, or the adapters of a node's k members together.

        Raises:
            CannotAnswerError: What joins nodes is not known.

        Source:
            Bus bandwidth in https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (commit 03a204a): that of the
            hardware's bottleneck, "NVLink, PCI, QPI, or network".
        """
        if not self.spans(ranks, stride):
            return self.inside
        if not self.between:
            raise CannotAnswerError(
                f"the network between nodes of {self.per_node} GPUs is unknown, and the time estimate needs it: give --network, such "
                "as ethernet-100g"
            )
        members = self.members(ranks, stride)
        return min(members * self.between, self.inside) if members > 1 else self.between


def cluster_of(gpu: Gpu, networks: Mapping[str, Network], per_node: int | None = None, network: str = "") -> Cluster:
    """Return the cluster that GPUs of a kind are in.

    Args:
        per_node: GPUs of a node; None for eight.
        network: What joins nodes, one port for each GPU; nothing for that of the vendor's reference system.

    Raises:
        InvalidFileError: No network has the name.
    """
    own = gpu.interconnect
    name = network or own.network or ""
    if name and name not in networks:
        hint = match_hint(name, networks, f"; known: {', '.join(networks)}")
        raise InvalidFileError([f"--network: no network is called {shown_value(name)}{hint}"])
    port = networks[name].bytes_per_second if name else 0
    return Cluster(per_node or GPUS_PER_NODE, own.kind, own.bytes_per_second, name, port)


def rates_among(ranks: int, cluster: Cluster | None, device: Device, catalog: Catalog) -> Rates:
    """Return the rates of a GPU, or of the catalog's nearest, that communicates in groups of so many.

    Args:
        ranks: GPUs of a group.
        cluster: Where they are; None for nodes of eight of the vendor's own.

    Raises:
        CannotAnswerError: What it needs is not known.
    """
    name, gpu = rated_gpu(device.gpu, device.name, catalog.gpus.entries)
    cluster = cluster or cluster_of(gpu, catalog.tables.networks)
    return replace(rates_of(name, gpu, catalog.tables.links), peer_bytes=cluster.bytes_per_second(ranks))
