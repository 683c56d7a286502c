"""A selective state space layer: a recurrence whose step, input and output depend on the token (Mamba 2)."""

from memplan.documents.frozen_values import dataclass

STATE_SPACE = "mamba"
"""What layers call the part."""


MULTIPROCESSORS = 132
"""Of an H100 SXM or H200, by which mamba-ssm's backward splits heads; other cards split them more or less
(https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/, "H100 SM architecture")."""


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A state space layer of Mamba 2 (https://arxiv.org/abs/2405.21060), as Falcon-H1, Granite 4 and Nemotron-H have it."""

    num_heads: int
    head_dim: int  # Width of a head
    num_groups: int  # Groups of heads that share what reads and writes their states; a divisor of ``num_heads``
    state_size: int  # Numbers that the state of each dimension of a head has
    kernel_size: int  # Tokens that the convolution looks at
    chunk_tokens: int  # Tokens of a chunk within which all pairs are formed, between which a state is handed on
    adapted: bool  # Whether PEFT puts adapters on its ``out_proj`` and ``conv1d``
    convolution_bias: bool = True
    bias: bool = False  # A bias on the projection of the layer's input
    output_bias: bool = False  # The same on that of its result
    normalised: bool = True  # Whether what is read off the states, times its gate, is normalised by groups, in fp32
    # Its input is multiplied by a number, and the projection of that by a vector that is not trained (Falcon-H1).
    multiplied: bool = False
    epsilon: float = 1e-5  # What the norm adds to the variance
    prefix: str = STATE_SPACE

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Width of what writes states, all groups together, which is that of what reads them too."""
        return self.num_groups * self.state_size

    @property
    def convolved_size(self) -> int:
        """Width of heads, and what writes and reads their states, which is what is convolved."""
        return self.inner_size + 2 * self.group_size

    @property
    def projected_size(self) -> int:
        """Width of the projection of the layer's input: the gate, what is convolved, and a step for each head."""
        return self.inner_size + self.convolved_size + self.num_heads
