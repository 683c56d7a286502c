"""What a layer of a Megatron-LM job keeps of a micro-batch on one rank, and the fullest instant of its backward.

Every term is a tensor of Megatron-LM's or Transformer Engine's code; which they are was traced (tests/grids/traced_peaks.py), but for
experts, latent attention, context parallelism and what kernels allocate inside themselves, which were read.

Source:
    megatron-core 0.16.1 (core/): tensor_parallel/layers.py, lines 440 to 640; fusions/fused_bias_swiglu.py, fused_bias_gelu.py and
    fused_bias_dropout.py; transformer/attention.py and dot_product_attention.py; models/common/embeddings/rope_utils.py, lines 100 to
    130; tensor_parallel/random.py, lines 500 to 570. Transformer Engine 2.20.2 (pytorch/): module/linear.py and layernorm_linear.py;
    attention/dot_product_attention/backends.py and utils.py, line 2965.
"""

from typing import NamedTuple

from memplan.documents.frozen_values import dataclass
from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts, Mlp, ModelSpec
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_tensors import MegatronBuild
from memplan.step.tapes.reduction_workspaces import MULTIPROCESSORS, column_sum_bytes
from memplan.units import round_up


@dataclass(frozen=True, slots=True)
class MegatronBatch:
    """What a step is given, and how it keeps it."""

    micro_batch_size: int  # Sequences of a micro-batch
    sequence_length: int  # Tokens of each
    micro_batches: int = 1  # Of a step
    # Only layers' inputs are kept, and layers computed again (``--recompute-granularity full``).
    whole_layers: bool = False
    modules: frozenset[str] = frozenset()  # What of a layer is computed again otherwise (``--recompute-modules``)
    element_bytes: int = 2  # Bytes of an element that products read
    wide_logits: bool = True  # The loss copies logits to fp32
    copied_softmax: bool = False  # Its backward copies the probabilities that it is given


@dataclass(frozen=True, slots=True)
class MegatronKernels:
    """What runs, where flags and installed packages decide."""

    engine: bool = True  # Transformer Engine's modules; else Megatron-LM's own
    # Products add weights' gradients to the buffer (``--no-gradient-accumulation-fusion`` not given).
    fused_gradients: bool = False
    fused_rotary: bool = False  # One kernel rotates (``--no-rope-fusion`` not given)
    fused_attention: bool = True  # cuDNN's or flash attention; else scores are formed
    dropout: bool = False  # Of hidden states
    attention_dropout: bool = False  # Of scores
    gathered_experts: bool = False  # Ranks that share experts gather each other's tokens
    grouped_experts: bool = True  # Transformer Engine's grouped products run experts
    masks: int = 1  # Sequences of a micro-batch that have a mask of attention of their own
    workspace_bytes: int = 32 * 1024 * 1024 + 1024  # One of Transformer Engine's for its products
    most: bool = False  # What was read and not run is taken at its most


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Sizes of one micro-batch on one rank."""

    spec: ModelSpec
    grid: Grid
    build: MegatronBuild
    batch: MegatronBatch
    kernels: MegatronKernels = MegatronKernels()

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that the rank has."""
        return self.batch.micro_batch_size * (self.batch.sequence_length // self.grid.context)

    @property
    def rows(self) -> int:
        """Tokens of the residual stream that it has."""
        return self.tokens // (self.grid.tensor if self.grid.sequence else 1)

    @property
    def words(self) -> int:
        """Words of the vocabulary that it has rows of."""
        multiple = self.build.vocabulary_multiple * self.grid.tensor
        return round_up(self.spec.vocab_size, multiple) // self.grid.tensor

    @property
    def whole(self) -> int:
        """Bytes of hidden states of all its tokens."""
        return self.tokens * self.spec.hidden_size * self.batch.element_bytes

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.rows * self.spec.hidden_size * self.batch.element_bytes

    @property
    def gathered(self) -> int:
        """A whole sequence beside a rank's part of it, where there are parts."""
        return self.whole if self.grid.sequence else 0

    @property
    def scattered(self) -> int:
        """The rank's part beside the whole, where there are parts."""
        return self.stream if self.grid.sequence else 0

    @property
    def mask(self) -> int:
        """A mask of dropout over the residual stream."""
        return self.rows * self.spec.hidden_size if self.kernels.dropout else 0

    @property
    def square(self) -> int:
        """Masks of attention, a byte for each pair of tokens."""
        return self.kernels.masks * self.batch.sequence_length**2

    def wide(self, width: int) -> int:
        """Bytes of so many elements a token that tensor ranks share."""
        return self.tokens * (width // self.grid.tensor) * self.batch.element_bytes

    def product_gradient(self, inner: int, outer: int, shared: bool = True) -> int:
        """A matrix's gradient before it is added to the buffer."""
        if self.kernels.fused_gradients:
            return 0
        return inner * (outer // (self.grid.tensor if shared else 1)) * self.batch.element_bytes


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Half of a layer, its norm included: bytes that it keeps, and the most that its backward takes beyond all that is kept below and with it."""

    saved: int
    backward: int


def layer_sizes(rank: RankSizes, layer: Layer) -> tuple[int, int]:
    """Return what a layer keeps of a micro-batch, and the most that its backward takes beyond."""
    attention, feed = _attention(rank, layer), _feed_forward(rank, layer)
    retained = attention.saved + feed.saved
    backward = max(feed.backward, attention.backward - feed.saved)
    if rank.batch.whole_layers:
        return rank.stream, retained + backward
    return retained, backward


def _norm(rank: RankSizes, layer: Layer) -> int:
    """Return what a norm keeps: its input, its result, and statistics of each row."""
    return 2 * rank.stream + 4 * rank.rows * (1 + (layer.norm.kind == "layer"))


def _row_instants(rank: RankSizes, width: int, bias: bool) -> int:
    """Return the most beyond what is kept while a matrix divided by rows goes backward: gradients of its result and input, and its own."""
    hidden = rank.spec.hidden_size
    gradient = rank.stream * (1 + rank.kernels.dropout) - rank.mask
    sums = column_sum_bytes(rank.rows, hidden) + hidden * rank.batch.element_bytes if bias else 0
    products = rank.gathered + rank.wide(width) + rank.product_gradient(hidden, width)
    return max(gradient + sums, gradient + products)


def _column_instants(rank: RankSizes, width: int) -> int:
    """Return the same of a matrix divided by columns with its norm, the gradient of its result included, its input's product not."""
    return (
        rank.wide(width)
        + rank.whole
        + rank.scattered
        + rank.gathered
        + rank.product_gradient(rank.spec.hidden_size, width)
    )


def _feed_forward(rank: RankSizes, layer: Layer) -> LayerPart:
    part = layer.feed_forward
    assert part is not None  # layers of one part are refused
    if isinstance(part, MixtureOfExperts):
        return _experts(rank, layer, part)
    inner, outer = part.intermediate_size, part.intermediate_size * (1 + part.gated)
    retained = _norm(rank, layer) + rank.wide(outer) + rank.wide(inner) + rank.mask
    rows = _row_instants(rank, inner, part.bias)
    sums = column_sum_bytes(rank.tokens, inner // rank.grid.tensor) + 2 * inner // rank.grid.tensor if part.bias else 0
    above = rank.stream - rank.mask
    activation = above + rank.wide(outer) + max(0, sums - rank.wide(inner))
    columns = above - rank.wide(inner) - rank.wide(outer) + _column_instants(rank, outer)
    return LayerPart(retained, max(rows, activation, columns))


def _experts(rank: RankSizes, layer: Layer, part: MixtureOfExperts) -> LayerPart:
    """Return what a mixture keeps with every expert given as many rows: those that are sent and received, and what experts form of them.

    At most, all ranks that share the experts gather each other's tokens, as one of the dispatchers does.
    """
    # Source: megatron-core 0.16.1: transformer/moe/token_dispatcher.py (``MoEAlltoAllTokenDispatcher``,
    # ``MoEAllGatherTokenDispatcher``), experts.py, router.py; read, not run
    size, hidden, kernels = rank.batch.element_bytes, rank.spec.hidden_size, rank.kernels
    rows = rank.rows * part.experts_per_token
    received, width = rows * rank.grid.expert_tensor, part.intermediate_size // rank.grid.expert_tensor
    routing = rank.rows * part.num_experts * 24 + rows * 32
    # ranks whose tokens are all gathered
    around = rank.grid.expert * rank.grid.expert_tensor if kernels.most or kernels.gathered_experts else 0
    sent, given = rows * hidden * size, received * hidden * size
    moved = 2 * sent + 3 * given if kernels.most else given
    inside = received * width * (2 + part.gated) * size
    shared = rank.wide(part.shared_intermediate_size * (2 + part.gated)) + rank.gathered * bool(
        part.shared_intermediate_size
    )
    own = hidden * width * (1 + part.gated) * size * max(part.num_experts // rank.grid.expert, 1)
    retained = _norm(rank, layer) + routing * max(around, 1) + moved + inside + shared + rank.mask
    gathered = 2 * (1 + around) * rank.stream
    return LayerPart(
        retained, 2 * (sent + given) + inside + own * (not kernels.fused_gradients) + gathered + rank.whole
    )


class _Widths(NamedTuple):
    """Elements of a token: of attention's result and of keys; of queries, keys and values together; where keys and values are repeated for
    each query, how many more; bytes beside; heads, and rotated dimensions of one.
    """

    result: int
    keys: int
    joined: int
    repeated: int
    beside: int
    heads: int
    rotary: int


def _widths(rank: RankSizes, part: object) -> _Widths:
    if isinstance(part, LatentAttention):
        query, result = part.num_heads * part.qk_head_dim, part.num_heads * part.v_head_dim
        narrow = part.q_lora_rank + part.kv_lora_rank + part.qk_rope_head_dim
        joined = 2 * query + result
        beside = rank.tokens * narrow * 2 * rank.batch.element_bytes + rank.wide(joined)
        return _Widths(result, query, joined, 0, beside, part.num_heads, part.qk_rope_head_dim)
    assert isinstance(part, Attention)
    query, keys = part.query_size, part.key_value_size
    normed = rank.wide(query + keys) if part.query_key_norm is not None else 0
    return _Widths(query, keys, query + 2 * keys, 2 * (query - keys), normed, part.num_heads, part.rotary_dim)


def _attention(rank: RankSizes, layer: Layer) -> LayerPart:
    kernels, batch, width = rank.kernels, rank.batch, _widths(rank, layer.attention)
    length, heads = batch.sequence_length // rank.grid.context, width.heads // rank.grid.tensor
    result, joined, rotary = rank.wide(width.result), rank.wide(width.joined), width.rotary > 0
    again = "core_attn" in batch.modules
    retained = _norm(rank, layer) + rank.mask + joined + result + width.beside
    if rotary and not kernels.fused_rotary:
        retained += 4 * length * width.rotary * batch.element_bytes
    if rotary and (again or not (kernels.engine or width.repeated)):
        retained += joined - rank.wide(
            width.keys
        )  # values are a view of what their projection returned, which stays whole
    pairs = batch.micro_batch_size * heads * length
    if kernels.fused_attention:
        inside, forming = 4 * pairs + 16, joined + result
    else:
        inside, forming = _scores(rank, pairs * batch.sequence_length, rank.wide(width.repeated))
        forming -= result
    if kernels.most or rank.grid.context > 1:
        forming += _inside_kernels(rank, heads, width.result // width.heads, length, rank.wide(2 * width.keys))
    above, inside_kept = rank.stream - rank.mask, inside * (not again)
    middle = above + (inside + max(_again(rank, width, pairs, forming)) if again else forming)
    rows = _row_instants(rank, width.result, isinstance(layer.feed_forward, Mlp) and layer.feed_forward.bias)
    below = above - result - inside_kept
    columns = below - joined + _column_instants(rank, width.joined)
    return LayerPart(retained + inside_kept, max(rows, middle, below + 2 * joined, columns))


def _again(rank: RankSizes, width: _Widths, pairs: int, forming: int) -> tuple[int, int]:
    """Return what attention takes beyond what it keeps where it is computed again: in its backward, and before it."""
    result = rank.wide(width.result)
    if rank.kernels.fused_attention:
        return forming + result + rank.wide(width.keys) * (width.rotary > 0), 0
    scores = pairs * rank.batch.sequence_length * rank.batch.element_bytes
    return forming + 2 * result, scores + 2 * result + rank.square


def _scores(rank: RankSizes, scores: int, repeated: int) -> tuple[int, int]:
    """Return what attention keeps where it forms scores, and the most that its backward takes beyond."""
    size, masks = rank.batch.element_bytes, rank.kernels.attention_dropout
    if not rank.kernels.engine:  # a softmax in fp32, and a buffer for products that is there from step to step
        return repeated + scores * (4 + size + masks), (12 - size - masks) * scores
    retained = repeated + scores * size + masks * scores * (size + 1)
    return retained, (2 - masks) * scores * size


def _inside_kernels(rank: RankSizes, heads: int, width: int, length: int, keys: int) -> int:
    """Return what attention allocates while it runs: blocks of other context ranks, and at most partial sums of its backward.

    Formula:
        of ``c > 1`` context ranks two blocks of keys and values and their gradients, and results of each of them; at most besides fp32
        sums of gradients of queries, keys and values, one for each of the card's parts where they are summed in a fixed order
    """
    # Source: Transformer Engine 2.20.2, attention/dot_product_attention/context_parallel.py
    # (``AttnFuncWithCPAndKVP2P``); flash-attention's ``mha_bwd`` (``dq_accum``, with ``deterministic``); read, not run
    batch, size = rank.batch.micro_batch_size, rank.batch.element_bytes
    sums = batch * heads * length * width
    around = 0
    if rank.grid.context > 1:
        around = 4 * keys + sums * (rank.grid.context * size + 4)
    if not rank.kernels.most:
        return around
    return 2 * around + 4 * length * width * (MULTIPROCESSORS + 3 * batch * heads)
