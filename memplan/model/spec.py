"""The shape of a transformer without a second stack, in the parts that move memory: a decoder or an encoder.

A model is runs of equal layers, a layer is attention and a feed-forward part joined by norms. Inventory, activation
tape and the lab's reference model are derived from these values and from nothing else.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Literal, NamedTuple

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.encoder import Encoder
from memplan.model.gated_delta_net import GatedDeltaNet
from memplan.model.short_convolution import ShortConvolution
from memplan.model.state_space import StateSpace
from memplan.model.tower import Tower, TowerTensor

Activation = Literal[
    "silu",
    "gelu",
    "gelu-tanh",
    "gelu-new",
    "gelu-fast",
    "gelu-again",  # Formed again in backward, all but what it is given (BLOOM)
    "relu",
    "relu-squared",
    "clamped-swiglu",
    "xielu",  # Of two halves, each of which a learned number scales (Apertus)
    "quick-gelu",
]
Placement = Literal["pre", "post", "summed", "sandwich", "parallel", "alone"]


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last dimension."""

    kind: Literal["rms", "layer", "none"] = (
        "rms"  # ``rms`` or ``layer`` (subtracts the mean); ``none`` where none stands
    )
    weight: bool = True  # Whether it has a learned scale; OLMo 1 has none
    bias: bool = False  # Whether it has a learned shift
    unit_offset: bool = False  # Scale is ``1 + weight``, computed in fp32, as in Gemma
    epsilon: float = 1e-5  # What is added to the variance


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention."""

    num_heads: int  # Query heads
    num_key_value_heads: int  # Key and value heads; a divisor of ``num_heads``
    head_dim: int  # Width of one head
    rotary_dim: int  # How many of a head's dimensions are rotated; 0 for none
    qkv_bias: bool = False  # Biases on query, key and value projections
    output_bias: bool = False  # Bias on the output projection
    fused_qkv: bool = False  # One projection yields query, key and value, whose views share storage
    query_key_norm: Norm | None = None  # Norm of queries and keys, or None
    # ``head`` normalises each head, ``each`` does so by a scale of its own for each (Command R), ``full`` all heads
    # together.
    query_key_norm_scope: Literal["head", "each", "full"] = "head"
    norms_rotated: bool = False  # Queries and keys are normalised after they are rotated (Hunyuan)
    clip: float = 0.0  # Bound that queries, keys and values are clipped to in place, before anything else (OLMo 1.7)
    sinks: bool = False  # One learned logit per head that takes part in the softmax (gpt-oss)
    # Cap of a scaled tanh that scores pass through, which flash kernels of torch lack; 0.0 for none.
    logit_softcap: float = 0.0
    scale: float | None = None  # Factor of the scores; None for ``1 / sqrt(head_dim)``
    # The query's projection yields a gate of the same width besides, whose sigmoid scales what is attended.
    output_gate: bool = False
    value_norm: bool = False  # Values are normalised too, without a scale (Gemma 4)
    keys_as_values: bool = False  # One projection yields keys and values (Gemma 4's layers of full attention)
    scales_query: bool = False  # Rotated queries are multiplied by a factor for each position (Ministral 3)
    alibi: bool = False  # Scores get a bias that grows with distance, other for each head (BLOOM)
    position_rows: int = 0  # Rows of a table of sines and cosines that the released code keeps (GPT-J); 0 for none
    windowed: bool = False  # Its layer makes a mask of a window of its own
    reuses: bool = False  # Keys and values are those of an earlier layer, within a window as it is (Gemma 4 E2B)

    def norm_shape(self, heads: int) -> tuple[int, ...]:
        """Return the shape of the scale that normalises this many heads."""
        shapes = {"head": (self.head_dim,), "each": (heads, self.head_dim), "full": (heads * self.head_dim,)}
        return shapes[self.query_key_norm_scope]

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, which is that of the value heads too."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""

    num_heads: int
    q_lora_rank: int  # Width of the compressed query; 0 projects queries directly
    kv_lora_rank: int  # Width of the compressed key and value
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm: Norm | None = Norm()  # Of what queries, and keys and values, are compressed to
    bias: bool = False  # Biases on the projections down and on that of its result
    output_bias: bool = False  # A bias on the latter alone, as Megatron-LM has it
    scale: float | None = None  # Factor of the scores; None for ``1 / sqrt(qk_head_dim)``
    scales_query: bool = False  # Queries are multiplied by a factor for each position (Mistral 4)

    @property
    def compressed_norm(self) -> Norm:
        """The norm of what is compressed.

        Raises:
            CannotAnswerError: There is none, which is modelled under Megatron-LM alone.
        """
        if self.norm is None:
            raise CannotAnswerError(
                "latent attention without norms of what it compresses is modelled under Megatron-LM alone"
            )
        return self.norm

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, rotated part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward part."""

    intermediate_size: int  # Width between the projections
    activation: Activation = "silu"
    gated: bool = True  # Two projections up, one through the activation (SwiGLU, GeGLU); else one
    fused_gate_up: bool = False  # Both projections up are one matrix
    bias: bool = False  # Biases on every projection


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts, with or without shared ones."""

    num_experts: int
    experts_per_token: int  # Experts that each token passes through
    intermediate_size: int  # Width inside one routed expert
    activation: Activation = "silu"
    shared_intermediate_size: int = 0  # Width of all shared experts together; 0 for none
    shared_fused: bool = False  # Projections up of shared experts are one matrix (Granite 4)
    shared_gate: bool = False  # A learned gate scales the shared experts' output (Qwen2-MoE)
    transposed: bool = False  # Stacked experts are stored (experts, in, out), as in gpt-oss, and not (experts, out, in)
    latent_size: int = 0  # Width that tokens are projected to for routed experts (Nemotron 3 Super); 0 for the model's
    router_bias: bool = False  # Bias on the router's projection
    expert_bias: bool = False  # Biases inside the experts (gpt-oss)
    # One offset per expert, a buffer, that only steers the choice (DeepSeek-V3); scores are sigmoids then.
    score_correction: bool = False
    # Scores are as wide as the router's product, and a masked copy of them decides the choice (Mistral 4).
    scores_as_routed: bool = False
    softmax_of_chosen: bool = False  # Scores are a softmax over the chosen experts' logits alone (gpt-oss)
    fp32_choice: bool = False  # The router's product is cast to fp32 before experts are chosen (GraniteMoE)
    normalised: bool = True  # The chosen experts' scores are divided by their sum
    score_scale: float = 1.0  # Factor of the chosen experts' scores (DeepSeek)
    groups: int = 1  # Groups of experts, of which only some take part in the choice (DeepSeek); 1 for no groups
    groups_per_token: int = 1  # Groups that take part
    fp32_router: bool = False  # The router's product is formed in fp32 (DeepSeek)
    fp32_scores: bool = False  # Scores stay in fp32, and what they scale is formed in fp32 (Mixtral, DeepSeek)
    # Every expert is given every token, times a score that is 0 where it was not chosen, in batched products (Llama 4).
    every_expert: bool = False
    gated: bool = True  # Experts have two projections up, as in :class:`Mlp`; else one
    fused_gate_up: bool = True  # These two are one tensor
    modules: bool = False  # Each expert has linear layers of its own, and the router is one (transformers before 5.0)
    ranks: int = 1  # GPUs that share the experts, of which this one has the first
    flooded: bool = False  # Whether all of them send as many rows as they can to this one's

    @property
    def own_experts(self) -> int:
        """Experts whose matrices are here."""
        return self.num_experts // self.ranks

    @property
    def rows_per_token(self) -> int:
        """Rows that experts here are given for each of this rank's tokens; other ranks have as many of these."""
        return self.ranks * min(self.experts_per_token, self.own_experts) if self.flooded else self.experts_per_token


Mixer = Attention | LatentAttention | GatedDeltaNet | StateSpace | ShortConvolution
"""What mixes tokens of a sequence in a layer."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

    attention: Mixer | None  # None where the feed-forward part is ``alone``
    feed_forward: Mlp | MixtureOfExperts | None  # None where what mixes tokens is
    norm: Norm
    # ``pre``: a norm before each part; ``post``: after each (OLMo 2); ``summed``: after what each has been added to (BERT);
    # ``sandwich``: before and after (Gemma 2, 3);
    # ``parallel``: both read the same input and are added together (NeoX, Phi); ``alone``: one part behind one norm (Nemotron-H).
    placement: Placement = "pre"
    bare: bool = False  # Nothing normalises what attention is given (the first of ModernBERT's)
    parallel_norms: int = 1  # With ``parallel``: norms in front, one shared or one for each
    residual_scale: float = 0.0  # Factor of what attention and feed-forward add (Granite); 0.0 for none
    beside: StateSpace | None = None  # What reads the same input as attention, whose results are added (Falcon-H1)
    # Routed experts beside a dense feed-forward part, which read the residual stream behind a norm of their own (Gemma 4).
    experts: MixtureOfExperts | None = None

    @property
    def mixture(self) -> MixtureOfExperts | None:
        """Its routed experts, instead of a dense feed-forward part or beside it; None for none."""
        return self.feed_forward if isinstance(self.feed_forward, MixtureOfExperts) else self.experts


@dataclass(frozen=True, slots=True)
class LayerRun:
    """``count`` equal layers in a row, of which the first has index ``first``."""

    layer: Layer
    count: int
    first: int = 0


def layer_runs(layers: Iterable[Layer]) -> tuple[LayerRun, ...]:
    """Return ``layers`` as runs of equal neighbours."""
    runs: list[LayerRun] = []
    first = 0
    for layer, group in groupby(layers):
        count = len(list(group))
        runs.append(LayerRun(layer, count, first))
        first += count
    return tuple(runs)


class TensorNames(NamedTuple):
    """Names of the modules that hold parameters, as the family's real implementation has them.

    ``layer`` holds ``{}`` for the layer's index; the names below it are relative to a layer, which holds the feed-forward
    part's projections itself where ``mlp`` is empty. Names of norms depend on the placement: a family fills in those that
    it has.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str = "transformer.word_embeddings_layernorm"
    positions: str = "transformer.wpe"
    token_types: str = "embeddings.token_type_embeddings"
    pooler: str = "pooler.dense"
    layer: str = "model.layers.{}"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    qkv: str = "qkv_proj"
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    query_down: str = "q_a_proj"
    query_down_norm: str = "q_a_layernorm"
    query_up: str = "q_b_proj"
    key_value_down: str = "kv_a_proj_with_mqa"
    key_value_down_norm: str = "kv_a_layernorm"
    key_value_up: str = "kv_b_proj"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    router: str = "gate"
    experts: str = "experts"
    layer_embedding: str = "model.embed_tokens_per_layer"
    layer_projection: str = "model.per_layer_model_projection"
    layer_projection_norm: str = "model.per_layer_projection_norm"
    shared_experts: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    input_norm: str = "input_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    pre_feed_forward_norm: str = "pre_feedforward_layernorm"
    post_feed_forward_norm: str = "post_feedforward_layernorm"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder, with a vision tower in front or without, or an encoder."""

    name: str  # What people call it
    architecture: str  # Name of the family, which is that of its function in ``model/families/kinds``
    vocab_size: int  # Rows of the embedding, padding included
    hidden_size: int  # Width of the residual stream
    runs: tuple[LayerRun, ...]  # Layers, in order
    final_norm: Norm  # Norm before the head
    names: TensorNames = TensorNames()
    embedding_norm: Norm | None = None  # Norm behind the embedding (BLOOM); None for none
    tie_word_embeddings: bool = False  # Head and embedding are one tensor
    head_bias: bool = False  # Bias on the head
    cut_words: int = 0  # Rows of the head that stand for no word, whose logits are cut off (nanochat)
    unsaid_words: int = 0  # Rows of the embedding for what the head has none for (Llama 3.2 Vision)
    learned_positions: int = 0  # Positions that a learned embedding has rows for; 0 for none
    reserved_positions: int = 0  # Rows of it that stand for no position (OPT)
    max_position_embeddings: int = 0  # Longest sequence the model is made for; 0 if unknown
    embedding_scale: float = 0.0  # Factor of the embeddings (Gemma); 0.0 for none
    final_logit_softcap: float = 0.0  # Cap of a scaled tanh that logits pass through (Gemma 2); 0.0 for none
    logit_scale: float = 0.0  # Factor of the logits (Command R, Granite); 0.0 for none
    rotary_tables: int = 1  # Pairs of rotary tables that are built (Gemma 3 has two bases)
    buffers: tuple[int, ...] = ()  # Bytes of each that the released code keeps: causal masks, tables of sines
    # Tokens of a window that attention is within; 0 where there is none. ``full_layers`` are within none.
    window: int = 0
    full_layers: tuple[int, ...] = ()
    transposed_linear: bool = False  # Weights stored (in, out), as GPT-2's Conv1D does
    layer_input: int = 0  # Width of what each layer is given of embeddings of its own (Gemma 4 E2B); 0 for none
    layer_vocab: int = 0  # Rows of the table of these
    dropout: float = 0.0  # Dropout probability of the released config, of what is added to the residual stream
    attention_dropout: float = 0.0  # The same, of attention's weights
    use_cache: bool = True  # Whether a forward returns keys and values where nothing is said
    encoder: Encoder | None = None  # What an encoder has besides; None for a decoder, whose tokens see those before
    tower: Tower | None = None  # Vision tower and projector; None for a text model
    beside: tuple[TowerTensor, ...] = ()  # Parameters of no part above: embeddings of values, gates, scalars (nanochat)
    source: str = ""  # Where the shapes were read

    @property
    def num_hidden_layers(self) -> int:
        """Layers in all runs together."""
        return sum(run.count for run in self.runs)

    @property
    def alibi(self) -> bool:
        """Whether scores get a bias that grows with distance."""
        return any(getattr(run.layer.attention, "alibi", False) for run in self.runs)

    @property
    def convolves(self) -> bool:
        """Whether layers are short convolutions."""
        return any(isinstance(run.layer.attention, ShortConvolution) for run in self.runs)

    @property
    def linear_attention(self) -> bool:
        """Whether layers are gated delta networks, or attention that is gated as it is beside them."""
        parts = [run.layer.attention for run in self.runs]
        return any(isinstance(part, GatedDeltaNet) or getattr(part, "output_gate", False) for part in parts)

    @property
    def state_space(self) -> StateSpace | None:
        """The state space part of its layers, which are alike; None where there is none."""
        parts = (part for run in self.runs for part in (run.layer.attention, run.layer.beside))
        return next((part for part in parts if isinstance(part, StateSpace)), None)
