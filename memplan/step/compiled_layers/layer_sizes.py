"""What the programs of a layer that torch compiles by itself depend on, and the sizes of their tensors."""

from typing import NamedTuple

from memplan.step.layers.attention_kernels import RANDOM_STATE_BYTES, flash_workspace
from memplan.step.playing.recomputation import Checkpointing
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.reduction_workspaces import Sums

Size = tuple[Quantity, int]
"""What a tensor's bytes are proportional to, and how many there are for each unit of that."""

STATISTIC = 4
"""An fp32 number for each row: of a norm, or of attention."""


class LayerShape(NamedTuple):
    """What the programs of a layer depend on; widths are those of all heads together."""

    hidden: int
    inner: int
    query: int
    key: int
    heads: int
    groups: int
    head_dim: int
    fused: bool  # Whether query, key and value are one product, out of which they are copied
    gathers: bool  # Whether the rows of rotary tables are gathered for the layer
    alone: bool  # Whether they are those of one sequence
    attention: str  # Its kernel
    checkpointing: Checkpointing
    sums: Sums
    head_sums: tuple[Sums, ...] = ()  # Where each head's queries and keys are normed: of the rows of all of theirs


def attention_workspace(shape: LayerShape) -> tuple[Size, ...]:
    """Return what attention's backward allocates inside itself."""
    if shape.attention == "flex":
        return ((Quantity.TOKENS, STATISTIC * shape.heads),)
    if shape.attention != "flash":
        return ()
    return tuple(flash_workspace(shape.heads, shape.groups, shape.head_dim, 2))


def tensor_sizes(shape: LayerShape) -> dict[str, Size]:
    """Return the sizes of all tensors; floats have 16 bits, but for statistics and what is turned."""
    hidden, inner, query, key = shape.hidden, shape.inner, shape.query, shape.key
    rows = (
        (hidden, "x h1 a h2 d y dy dhu dhg da dhq dhk dhv dhqkv dx"),
        (query, "q qr qr2 o do dqr dq qc"),
        (key, "k kr kr2 v vr vr2 dkr dk dv kc dvr"),
        (inner, "g u s ds du dg"),
        (2 * query, "cq cq' rq rq' dcq dcq' drq drq' wq dwq"),
        (2 * key, "ck ck' rk rk' dck dck' drk drk' wk dwk"),
        (query + 2 * key, "qkv dqkv"),
    )
    sizes: dict[str, Size] = {}
    for width, names in rows:
        sizes |= dict.fromkeys(names.split(), (Quantity.TOKENS, 2 * width))
    sizes |= dict.fromkeys(("r1", "r2", "t1", "row_sums"), (Quantity.TOKENS, STATISTIC))
    for name in ("lse", "row maxima"):
        sizes[name] = (Quantity.TOKENS, STATISTIC * shape.heads)
    sizes |= dict.fromkeys(
        ("f", "f1", "f3", "cf", "conjugate"),
        (Quantity.TOKENS if shape.gathers else Quantity.POSITIONS, 4 * shape.head_dim),
    )
    rows_given = ("f2",) if shape.alone else ("f1", "f2")
    sizes |= dict.fromkeys(rows_given, (Quantity.POSITIONS, 4 * shape.head_dim))
    state = RANDOM_STATE_BYTES[shape.attention]
    sizes |= {"seed": (Quantity.ONE, max(0, state - 8)), "offset": (Quantity.ONE, min(8, state))}
    parts = 1 if shape.sums.way == "mixed" else shape.sums.parts
    sizes |= dict.fromkeys(("n1", "n2"), (Quantity.ONE, 4 * hidden * parts))
    sizes["partial sums"] = (Quantity.ONE, 2 * 4 * hidden * shape.sums.tiles)
    sizes["column_sum"] = (Quantity.ONE, 4 * hidden)
    matrices = {"o": query, "qkv": query + 2 * key, "q": query, "k": key, "v": key, "gate": inner, "up": inner}
    for name, columns in {**matrices, "down": inner, "norm1": 1, "norm2": 1}.items():
        sizes[f"d_{name}"] = (Quantity.ONE, 2 * hidden * columns)
    sizes |= _head_norms(shape)
    sizes |= {f"workspace {number}": size for number, size in enumerate(attention_workspace(shape))}
    return sizes


def _head_norms(shape: LayerShape) -> dict[str, Size]:
    """Return the sizes of what the norms of each head's queries and keys form besides."""
    sizes: dict[str, Size] = {"head_sum": (Quantity.ONE, STATISTIC * shape.head_dim)}
    for part, heads, sums in zip("qk", (shape.heads, shape.groups), shape.head_sums, strict=False):
        sizes |= dict.fromkeys((f"s{part}", f"t{part}"), (Quantity.TOKENS, STATISTIC * heads))
        sizes[f"p{part}"] = (Quantity.ONE, STATISTIC * shape.head_dim * sums.parts)
        sizes[f"partial sums {part}"] = (Quantity.ONE, STATISTIC * shape.head_dim * sums.tiles)
        sizes[f"d_{part}norm"] = (Quantity.ONE, 2 * shape.head_dim)
    return sizes
