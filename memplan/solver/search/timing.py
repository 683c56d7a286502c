"""An estimate of a step's time from a GPU's bandwidth and arithmetic: a roofline, and no measurement.

It serves to order settings. Kernels reach 30 to 80 % of such rates, so the times are too short, and the
order of settings with close estimates means little.
"""

from collections.abc import Mapping

from memplan.catalog.entries import Gpu
from memplan.catalog.shipped_tables import SAME, Link
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.gated_delta_net import CHUNK_TOKENS, GatedDeltaNet
from memplan.model.inventory import Role
from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention, Mixer
from memplan.model.state_space import StateSpace
from memplan.step.collectives.gathered_units import sent_bytes
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.muon_scratch import is_minimal
from memplan.step.states.parallel_shards import gathered_setup, is_sharded
from memplan.step.states.update_algorithms import depends_on_kernel
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

PICOSECONDS = 10**12
SAVED_BYTES = 34
"""Bytes that a layer keeps for each token and unit of width in 16 bits, without scores.

Source: https://arxiv.org/abs/2205.05198, equation 1.
"""
LOGIT_PASSES = 6
"""Times that logits pass through memory: product, logarithms (in, out), their gradient (in, out), product."""
NEWTON_SCHULZ_STEPS = 5
MATRICES: frozenset[Role] = frozenset(("hidden_matrix", "expert_matrix", "router"))


@dataclass(frozen=True, slots=True)
class Rates:
    """Throughput of a GPU, per second."""

    source: str  # Catalog name of the GPU that the rates are of
    flops: Mapping[str, int]  # Dense floating-point operations by dtype
    bytes: int  # Memory bandwidth
    host_link: str  # Link to host memory
    host_bytes: int  # Its bandwidth, one way
    peer_bytes: int = 0  # Bandwidth to other GPUs, one way; 0 where there is no link

    def compute(self, operations: int, dtype: str) -> int:
        """Return the picoseconds of so many operations; dtypes that a GPU lacks run as fp32."""
        return operations * PICOSECONDS // self.flops.get(dtype, self.flops["fp32"])

    def traffic(self, moved: int) -> int:
        """Return the picoseconds of moving so many bytes."""
        return moved * PICOSECONDS // self.bytes

    def host_traffic(self, moved: int) -> int:
        """Return the picoseconds of moving so many bytes between host and device."""
        return moved * PICOSECONDS // self.host_bytes

    def peer_traffic(self, sent: int) -> int:
        """Return the picoseconds of sending so many bytes to other GPUs, while as many come in.

        Raises:
            CannotAnswerError: The GPU has no link to others.
        """
        if sent and not self.peer_bytes:
            raise CannotAnswerError(
                f"{self.source} has no interconnect bandwidth in the catalog, which the time estimate needs"
            )
        return sent * PICOSECONDS // self.peer_bytes if sent else 0


def host_link(gpu: Gpu, links: Mapping[str, Link]) -> tuple[str, int]:
    """Return the link of a GPU to host memory and its bandwidth: its PCIe slot, or what joins a superchip's parts.

    Raises:
        CannotAnswerError: It is not known.
    """
    own = gpu.interconnect
    if own.host is None and own.kind not in links:
        raise CannotAnswerError(
            f"{gpu.name}: the link of a card with {own.kind} to its host is unknown; set interconnect.host in its entry"
        )
    kind = own.host or links[own.kind].host
    return (own.kind, own.bytes_per_second) if kind == SAME else (kind, links[kind].bytes_per_second)


def rated_gpu(gpu: Gpu, name: str, known: Mapping[str, Gpu]) -> tuple[str, Gpu]:
    """Return a GPU that has rates, with its name: where one has none (``--gpu-memory``) NVIDIA's nearest in memory of its own, with bf16.

    Raises:
        CannotAnswerError: No GPU of the catalog has rates.
    """
    if gpu.bandwidth_bytes_per_second and "fp32" in gpu.dense_flops:
        return name, gpu
    rated = [(k, g) for k, g in known.items() if g.bandwidth_bytes_per_second and "fp32" in g.dense_flops]
    alike = [(k, g) for k, g in rated if g.vendor == "nvidia" and "bf16" in g.dense_flops and not g.unified_memory]
    if not rated:
        raise CannotAnswerError("no GPU of the catalog has memory bandwidth and FLOP/s, which the time estimate needs")
    return min(alike or rated, key=lambda item: (abs(item[1].cuda_total_bytes - gpu.cuda_total_bytes), item[0]))


def rates_of(name: str, gpu: Gpu, links: Mapping[str, Link]) -> Rates:
    """Return the rates of a GPU that has some."""
    peer = gpu.interconnect.bytes_per_second
    return Rates(name, gpu.dense_flops, gpu.bandwidth_bytes_per_second, *host_link(gpu, links), peer)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one token, and of one micro-batch, under some weights and gradients."""

    # Parameters of the layers' matrices that a token passes through, and as many more as the rule of gated delta networks,
    # or the scan of state space layers, multiplies for it.
    layer_parameters: int
    head_parameters: int  # Parameters of the head
    attention_width: int  # Sum over layers of all heads' key and value widths
    read_bytes: int  # Bytes moved to read all matrices once, decoding or casting included
    gradient_bytes: int  # Bytes moved to form and store all gradients
    stream_bytes: int  # Bytes of one token in all layers' saved tensors
    logit_bytes: int  # Bytes of one token's logits in the compute dtype
    backward: int  # Products of backward for each of forward: 2, or 1 where weights are frozen
    dtype: str  # What products compute in
    sent_bytes: int = 0  # Sent to other GPUs


def work_of(model: Model, setup: TrainingSetup, states: ModelStates) -> Work:
    """Return the work of a model's micro-batch under a setup's weights and gradients."""
    spec = model.spec
    sent = sent_bytes(setup, model.inventory, states.gradient_bytes)
    if is_sharded(setup.config.parallel):
        setup = gathered_setup(setup)
        states = model_states(setup, model.inventory, ())
    layers = sum(t.active_elements * t.count for t in model.inventory if t.role in MATRICES)
    layers += sum(
        run.count * _rule_products(part) for run in spec.runs for part in (run.layer.attention, run.layer.beside)
    )
    attention = sum(run.count * _attention_width(run.layer.attention) for run in spec.runs)
    saved = SAVED_BYTES * spec.hidden_size * spec.num_hidden_layers * setup.compute_bytes // 2
    return Work(
        layer_parameters=layers,
        head_parameters=spec.vocab_size * spec.hidden_size,
        attention_width=attention,
        read_bytes=sum(e.tensor.count * (e.weight_bytes + 2 * e.copy_bytes) for e in states.tensors),
        gradient_bytes=sum(e.tensor.count * _gradient_traffic(e) for e in states.tensors if e.trainable),
        stream_bytes=saved,
        logit_bytes=spec.vocab_size * setup.compute_bytes,
        backward=2 if setup.config.adapter is None else 1,
        dtype=setup.config.compute_dtype,
        sent_bytes=sent,
    )


def _attention_width(part: Mixer | None) -> int:
    if isinstance(part, Attention):
        return 2 * part.query_size
    return part.num_heads * (part.qk_head_dim + part.v_head_dim) if isinstance(part, LatentAttention) else 0


def _rule_products(part: Mixer | None) -> int:
    """Return what a rule or a scan multiplies and adds up for one token, whatever the length; of attention nothing.

    Formula:
        ``h (C (3 k + 2 v) + 3 k v)`` for h value heads, chunks of C tokens, keys of width k and values of width v: the two
        products of keys within a chunk, the solved system's two, and scores by values; then three by the state. Of a state
        space layer ``h (C (n + p) + 2 n p)`` for h heads of width p and n numbers of each dimension's state: scores, these by
        heads, what a chunk adds to the states, and what is read off them.
    """
    # Source: ``torch_chunk_gated_delta_rule`` in transformers 5.23.0, models/qwen3_next/modeling_qwen3_next.py, and
    # ``mamba2_chunk_scan`` in models/falcon_h1/modeling_falcon_h1.py.
    if isinstance(part, StateSpace):
        numbers = part.state_size + part.head_dim
        return part.num_heads * (part.chunk_tokens * numbers + 2 * part.state_size * part.head_dim)
    if not isinstance(part, GatedDeltaNet):
        return 0
    key, value = part.key_head_dim, part.value_head_dim
    return part.num_value_heads * (CHUNK_TOKENS * (3 * key + 2 * value) + 3 * key * value)


def _gradient_traffic(entry: TensorStates) -> int:
    """Return the bytes moved to form a gradient: one write, and a read and a write where it is stored in another dtype."""
    same = entry.gradient_bytes == entry.formed_bytes
    return entry.formed_bytes if same else 2 * entry.formed_bytes + entry.gradient_bytes


def micro_batch_picoseconds(
    work: Work, rates: Rates, batch: int, length: int, *, checkpointing: str, loss: str, accumulates: bool
) -> int:
    """Return the estimated time of one forward and backward.

    Formula:
        ``max(F / flops, W / bandwidth) + M / bandwidth`` for n = b t tokens, where
        F = (1 + B + r) (2 n P_layers + n t A / 2) + (1 + B + c) 2 n P_head, with B products of backward
        per product of forward, r = 1 for full checkpointing and c = 1 for a chunked loss; causal
        attention costs half its square. W = (2 + r) times the bytes of reading every matrix, and
        the gradients' (twice where they are added to others). M = 2 passes over the saved tensors, 3
        with checkpointing, and 6 over the logits, half as many again in fp32 and for a chunked loss.
        Several GPUs: communication overlaps with the rest, so the longer of the two counts.

    Source:
        Roofline: https://doi.org/10.1145/1498765.1498785. Operations: https://arxiv.org/abs/2001.08361,
        table 1. Saved tensors: https://arxiv.org/abs/2205.05198, equation 1.
    """
    n = batch * length
    full, chunked = int(checkpointing == "full"), int(loss == "chunked")
    layers = 2 * n * work.layer_parameters + n * length * work.attention_width // 2
    head = 2 * n * work.head_parameters
    operations = (1 + work.backward + full) * layers + (1 + work.backward + chunked) * head
    weights = (2 + full) * work.read_bytes + (2 if accumulates else 1) * work.gradient_bytes
    passes = 2 if checkpointing == "none" else 3
    wide = 2 if loss == "bf16" else 3
    moved = n * (passes * work.stream_bytes + (LOGIT_PASSES + 2 * chunked) * work.logit_bytes * wide // 2)
    alone = max(rates.compute(operations, work.dtype), rates.traffic(weights)) + rates.traffic(moved)
    return max(alone, rates.peer_traffic(work.sent_bytes))


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """The work of an optimizer in one step, without weights and gradients."""

    moved_bytes: int  # States and master weights read and written, and further passes
    operations: int  # Of Newton-Schulz
    host_bytes: int = 0  # Moved between host and device


def update_work(setup: TrainingSetup, states: ModelStates) -> UpdateWork:
    """Return the work of one optimizer step.

    Formula:
        States and master weights read and written. torch's foreach and for-loop AdamW pass over the
        weights once more, over the gradients too, and ten times more over one moment. Muon: five
        iterations of 6 m^2 n operations, or 4 m^2 n + 2 m^3 with ``fast`` and ``torch``, for sides m <= n.
        States in host memory are copied in and out besides, over the link and through buffers on the device.

    Source:
        torch/optim/adam.py (v2.13.0), ``_multi_tensor_adam`` beside the fused kernel;
        https://kellerjordan.github.io/posts/muon/; memplan/muon/orthogonalisation/newton_schulz.py.
    """
    moved = operations = linked = 0
    for entry in states.tensors:
        if entry.trainable:
            count = entry.tensor.count
            moved += count * (2 * (entry.master_bytes + entry.state_bytes) + _extra_traffic(setup, entry))
            if entry.optimizer.orthogonalises:
                operations += count * _newton_schulz(entry, setup.profile.newton_schulz)
            if setup.offloads_states:
                linked += 2 * count * entry.host_bytes
    return UpdateWork(moved + 2 * linked, operations, linked)


def update_picoseconds(trained_bytes: int, gradient_bytes: int, work: UpdateWork, rates: Rates) -> int:
    """Return the estimated time of one optimizer step.

    Formula:
        ``(2 * weights + gradients + moved) / bandwidth + operations / flops in bf16 + host / link``, the
        weights that are trained being read and written. Copies over the link are taken to run alone.
    """
    here = rates.traffic(2 * trained_bytes + gradient_bytes + work.moved_bytes)
    return here + rates.compute(work.operations, "bf16") + rates.host_traffic(work.host_bytes)


def _extra_traffic(setup: TrainingSetup, entry: TensorStates) -> int:
    optimizer = entry.optimizer
    plain = depends_on_kernel(optimizer) and entry.format_name in FLOAT_BYTES
    if not plain or setup.profile.optimizer == "fused" or setup.offloads_states:
        return 0
    return 3 * entry.tensor.elements * entry.element_bytes + 5 * entry.state_bytes


def _newton_schulz(entry: TensorStates, kind: str) -> int:
    """Return the operations of orthogonalising a matrix, or each of a stack of them."""
    rows, columns = entry.tensor.shape[-2:]
    stack = entry.tensor.elements // (rows * columns)
    m, n = min(rows, columns), max(rows, columns)
    each = 6 * m * m * n if is_minimal(kind, m) else 4 * m * m * n + 2 * m**3
    return NEWTON_SCHULZ_STEPS * stack * each
