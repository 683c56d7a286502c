"""The requested peak of one family as a sum that fits on a page, written apart from the planner.

A Llama with an untied head in bf16 under the kernels of the ``bundled`` profile: flash attention,
fused norms, rotary embedding and SwiGLU as separate operations. All sizes in bytes. What each
layer keeps for backward, in rows of ``b * t`` tokens:

    2 bytes each   input, its norm, second input, its norm (4 hidden); queries and the attention's
                   output (2 query widths); keys and values (2 key widths); gate, activated gate, up
                   and their product (4 intermediate)
    4 bytes each   two reciprocal norms; the logarithm of each head's softmax sum
    24 bytes       seed and offset of the attention's random state

Beside live tensors stands what CUDA's embedding backward takes inside itself: see embedding_sums.
"""

from dataclasses import dataclass

BF16 = 2


@dataclass(frozen=True)
class Shape:
    """A Llama-like model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (query, self.hidden), (key, self.hidden), (key, self.hidden), (self.hidden, query),
            (self.intermediate, self.hidden), (self.intermediate, self.hidden), (self.hidden, self.intermediate),
        ]  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return 2 * self.vocab * self.hidden + self.layers * self.layer_parameters + self.hidden


def state_bytes(shape: Shape, optimizer: str) -> int:
    matrices = shape.layers * sum(rows * columns for rows, columns in shape.matrices)
    numbers = {"sgd": 0, "adamw": 2 * shape.parameters, "muon": matrices + 2 * (shape.parameters - matrices)}
    return BF16 * numbers[optimizer]


def step_scratch(shape: Shape, optimizer: str, kernel: str) -> int:
    """What the update allocates: nothing, all square roots at once, or Newton-Schulz on the largest matrix."""
    if optimizer == "muon":
        rows, columns = max(shape.matrices, key=lambda matrix: matrix[0] * matrix[1])
        product = BF16 * 3 * rows * columns + 4 * min(rows, columns) ** 2
        rest = shape.parameters - shape.layers * sum(r * c for r, c in shape.matrices)
        return max(product, BF16 * rest)
    if optimizer == "adamw":
        return {"foreach": BF16 * shape.parameters, "for-loop": 2 * BF16 * shape.vocab * shape.hidden, "fused": 0}[
            kernel
        ]
    return 0


def saved_by_layer(shape: Shape, tokens: int) -> int:
    widths = 4 * shape.hidden + 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    halves = widths + 4 * shape.intermediate
    return BF16 * tokens * halves + 4 * tokens * (2 + shape.heads) + 24


def embedding_sums(shape: Shape, tokens: int) -> int:
    """What CUDA's embedding backward allocates to add up the gradients of equal tokens.

    Beyond 3072 tokens they are sorted (tokens and two orders of 8 bytes), each run of equal tokens
    has an offset and a count (8 bytes each), and every part of at most ten rows has an offset and
    a sum in fp32. Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu (v2.13.0).
    """
    if tokens <= 3072:
        return 0
    runs = min(tokens, shape.vocab)
    parts = tokens // 10 + runs
    return 3 * 8 * tokens + 2 * 8 * runs + parts * (8 + 4 * shape.hidden)


def requested_peak(
    shape: Shape, batch: int, length: int, optimizer: str, kernel: str, checkpointing: bool, fp32_loss: bool
) -> int:
    """Return the largest of the instants of a steady-state step."""
    tokens = batch * length
    hidden, vocab = shape.hidden, shape.vocab
    always = BF16 * shape.parameters + state_bytes(shape, optimizer)
    always += 2 * 8 * tokens + 2 * BF16 * length * shape.head_dim
    layer = saved_by_layer(shape, tokens)
    stream = BF16 * tokens * hidden
    saved = shape.layers * (stream if checkpointing else layer)
    last_norm = 2 * stream + 4 * tokens
    logits = (4 if fp32_loss else BF16) * tokens * vocab
    head_gradient = BF16 * vocab * hidden
    instants = [
        always + saved + last_norm + 2 * logits,
        always + saved + last_norm + 3 * logits,
        always + saved + last_norm + BF16 * tokens * vocab + head_gradient + stream,
        always + BF16 * shape.parameters + stream + embedding_sums(shape, tokens),
        always + BF16 * shape.parameters + step_scratch(shape, optimizer, kernel),
    ]
    feed_forward = BF16 * tokens * (2 * shape.intermediate + hidden) + BF16 * hidden * shape.intermediate
    for index in (shape.layers, 1):
        gradients = head_gradient + BF16 * hidden + (shape.layers - index) * BF16 * shape.layer_parameters
        below = (index - 1) * stream + layer if checkpointing else index * layer
        instants.append(always + gradients + below + feed_forward)
    return max(instants)
