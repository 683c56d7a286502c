"""What a step of one layout takes and sends: a roofline of one GPU, and the bandwidth of links; no measurement.

What data parallel GPUs gather and reduce runs beside the products and counts where it takes longer. What GPUs that share matrices
exchange is waited for, as are rows between those that share experts. Without pipelines there is no bubble.
"""

from dataclasses import replace
from fractions import Fraction

from memplan.documents.frozen_values import dataclass
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.cluster import Cluster
from memplan.solver.search.timing import (
    Rates,
    UpdateWork,
    Work,
    micro_batch_picoseconds,
    update_picoseconds,
    update_work,
    work_of,
)
from memplan.step.collectives.gathered_units import divided_sent_bytes, exchanged_bytes, sent_by_group


@dataclass(frozen=True, slots=True)
class StepTime:
    """The estimate of an optimizer step, in picoseconds, and what each GPU sends in it."""

    total: int  # All of it
    exposed: int  # Communication that products wait for
    overlapped: int  # Communication that runs beside them
    inside_bytes: int  # Sent to GPUs of the same node
    between_bytes: int  # Sent to other nodes
    tokens: int  # That all GPUs together learn from

    @property
    def token_femtoseconds(self) -> int:
        """The time for each token of all GPUs."""
        return self.total * 1000 // self.tokens


class StepClock:
    """Estimates a layout's step at any batch."""

    def __init__(self, plan: CompiledPlan, cluster: Cluster, rates: Rates) -> None:
        self.plan, self.cluster, self.rates = plan, cluster, rates
        work = work_of(plan.own, plan.setup, plan.states)
        self.sent, self.among = sent_by_group(plan.setup, plan.own.inventory, plan.states.gradient_bytes)
        retained = saved_share(plan.own.spec, plan.setup.config.parallel.tensor, plan.setup.config.parallel.sequence)
        self.work: Work = replace(work, sent_bytes=0, stream_bytes=int(work.stream_bytes * retained))
        self.update: UpdateWork = update_work(plan.setup, plan.states)
        trained = (entry for entry in plan.states.tensors if entry.trainable)
        self.trained = sum(entry.tensor.count * entry.weight_bytes for entry in trained)

    def step(self, batch: int, length: int, steps: int) -> StepTime:
        """Return the estimate of an optimizer step of so many micro-batches.

        Args:
            batch: Sequences of a micro-batch.
            length: Tokens of a sequence.

        Raises:
            CannotAnswerError: A link that it needs has no known bandwidth.
        """
        setup, cluster, parallel = self.plan.setup, self.cluster, self.plan.setup.config.parallel
        tensor, shards, groups = parallel.tensor, parallel.shards, parallel.replicate
        alone = micro_batch_picoseconds(
            self.work,
            self.rates,
            batch,
            length,
            checkpointing=setup.checkpointing,
            loss=setup.profile.loss,
            accumulates=steps > 1,
        )
        shared = divided_sent_bytes(setup, self.plan.model.spec, batch * length)
        apart = tensor * shards
        beside = self._sending(self.sent, shards, tensor) + self._sending(self.among, groups, apart)
        rows = exchanged_bytes(setup, self.plan.model.spec, batch * length // tensor) if parallel.expert > 1 else 0
        waited = self._sending(shared, tensor, 1) + self._sending(rows, parallel.expert, 1)
        update = update_picoseconds(self.trained, self.plan.states.gradient_bytes, self.update, self.rates)
        sent = (self.sent, shards, tensor), (self.among, groups, apart), (shared, tensor, 1), (rows, parallel.expert, 1)
        links = zip(*(cluster.split(*one) for one in sent), strict=True)
        inside, between = (steps * sum(parts) for parts in links)
        return StepTime(
            total=steps * (max(alone, beside) + waited) + update,
            exposed=steps * (waited + max(0, beside - alone)),
            overlapped=steps * min(alone, beside),
            inside_bytes=inside,
            between_bytes=between,
            tokens=steps * parallel.data * batch * length,
        )

    def _sending(self, sent: int, ranks: int, stride: int) -> int:
        """Return the picoseconds in which each GPU of groups sends so many bytes."""
        rate = self.cluster.bytes_per_second(ranks, stride) if sent else 0
        return replace(self.rates, peer_bytes=rate).peer_traffic(sent)


def saved_share(own: ModelSpec, ranks: int, sequence: bool) -> Fraction:
    """Return what a GPU keeps of a layer's saved tensors where several share its matrices.

    Args:
        sequence: Whether they share what lies between these too.

    Formula:
        Of queries, keys, values, attention's result and four of the feed-forward part's width, its own; of two residual
        streams all or its own part; two whole streams as products read them. docs/many-gpus.md says what was traced.
    """
    layer = own.runs[0].layer
    if ranks == 1 or not isinstance(layer.attention, Attention) or not isinstance(layer.feed_forward, Mlp):
        return Fraction(1)
    heads = layer.attention
    divided = 2 * heads.query_size + 2 * heads.key_value_size + 4 * layer.feed_forward.intermediate_size
    streams = Fraction(2 * own.hidden_size, ranks if sequence else 1) + 2 * own.hidden_size
    return (divided + streams) / (divided * ranks + 4 * own.hidden_size)
