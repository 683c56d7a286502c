"""A gated delta network: linear attention whose state decays and is corrected token by token."""

from memplan.documents.frozen_values import dataclass

CHUNK_TOKENS = 64
"""Tokens of a chunk within which all pairs are formed, between which a state is handed on."""

PREFIX = "linear_attn"
"""What layers call the part, as those with attention call theirs ``self_attn``."""


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention with a decay and a correction (https://arxiv.org/abs/2412.06464): Qwen3-Next, Qwen3.5."""

    num_key_heads: int  # Heads of queries and of keys
    num_value_heads: int  # Heads of values; a multiple of ``num_key_heads``
    key_head_dim: int  # Width of a head of queries and keys
    value_head_dim: int  # Width of a head of values
    kernel_size: int  # Tokens that the convolution over queries, keys and values looks at
    joined: bool  # Query, key, value and gate come of one projection, and both numbers per head of another (Qwen3-Next)
    epsilon: float = 1e-6  # What the gated norm adds to the variance

    @property
    def key_size(self) -> int:
        """Width of all key heads together, which is that of the query heads too."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def convolved_size(self) -> int:
        """Width of query, key and value together, which is what is convolved."""
        return 2 * self.key_size + self.value_size

    @property
    def projections(self) -> tuple[tuple[str, int], ...]:
        """Name and width of each projection of the layer's input."""
        if self.joined:
            return (
                ("in_proj_qkvz", self.convolved_size + self.value_size),
                ("in_proj_ba", 2 * self.num_value_heads),
            )
        heads = self.num_value_heads
        return (
            ("in_proj_qkv", self.convolved_size),
            ("in_proj_z", self.value_size),
            ("in_proj_b", heads),
            ("in_proj_a", heads),
        )
