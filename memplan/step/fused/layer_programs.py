"""The kernels of a decoder layer that torch compiles by itself: forward and backward, as checkpointing divides them.

What the partitioner saves follows from its rules and no size: results of products and of attention, what products read in
backward, and a number per row of each norm; and under checkpointing what the policy saves, and the layer's input. Everything
between is fused into the kernels below, which were read from the programs that Inductor writes for torchtitan's layers
(``memplan trace MODEL --stack torchtitan --set compile=layers``, torch 2.13.0).

Source:
    torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition``; ``_apply_op_sac`` in
    torchtitan/distributed/activation_checkpoint.py (0.2.2), which saves every second product of two matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from memplan.step.layers.attention_kernels import RANDOM_STATE_BYTES, flash_workspace
from memplan.step.playing.recomputation import Checkpointing
from memplan.step.tapes.kernel_order import Kernel, Program
from memplan.step.tapes.linear_forms import Quantity

Size = tuple[Quantity, int]
"""What a tensor's bytes are proportional to, and how many there are for each unit of that."""

STATISTIC = 4
"""An fp32 number for each row: of a norm, or of attention."""

SPLIT_ROWS = 16
"""Rows whose part of a norm's gradient one program of a kernel adds up (``RSPLIT_SIZE``, torch/_inductor/codegen/simd.py)."""


class LayerShape(NamedTuple):
    """What the programs of a layer depend on, its tokens aside; widths are those of all heads together."""

    hidden: int
    inner: int
    query: int
    key: int
    heads: int
    groups: int
    head_dim: int
    fused: bool  # Whether query, key and value are one product, out of which they are copied
    gathers: bool  # Whether the rows of rotary tables are gathered for the layer
    attention: str  # Its kernel
    checkpointing: Checkpointing


class LayerPrograms(NamedTuple):
    """A layer's programs, and the sizes of their tensors; ``x`` is its input, ``y`` its output and ``dy`` the gradient of that."""

    forward: Program
    backward: Program
    saved: tuple[str, ...]  # What forward leaves for backward
    sizes: dict[str, Size]


@lru_cache(maxsize=64)
def layer_programs(shape: LayerShape) -> LayerPrograms:
    """Return the programs of a layer."""
    saved = _saved(shape)
    forward = Program(tuple(_forward(shape)), (), frozenset({*saved, "y"}))
    gradients = [name for kernel in _backward(shape) for name in kernel.makes if name.startswith("d_")]
    views = ("cf",) if shape.checkpointing == "none" and not shape.gathers else ()
    given = ("dy", *(name for name in saved if name != "x"), *views)
    backward = Program(tuple(_backward(shape)), given, frozenset({*gradients, "dx"}))
    return LayerPrograms(forward, backward, saved, _sizes(shape))


LIBRARY = ("attention", "turn query", "turn key", "gather rows", "view")
"""Kernels that are operators of torch; products of matrices write into what they are given."""

WIDE = ("cq", "ck", "dcq", "dck", "r1", "r2", "lse", "partial sums")
"""Tensors in fp32; what is turned is of complex numbers."""


def _kernel(name: str, reads: str, makes: str, over: str = "", inside: tuple[str, ...] = ()) -> Kernel:
    return Kernel(name, tuple(reads.split()), tuple(makes.split()), over, inside, name in LIBRARY, name == "view")


def dtypes(names: Iterable[str]) -> dict[str, str]:
    """Return the dtype of each of a layer's tensors."""
    turned = ("rq", "rk", "drq", "drk", "f", "cf")
    return {name: "fp32" if name in WIDE else "complex" if name in turned else "bf16" for name in names}


def _saved(shape: LayerShape) -> tuple[str, ...]:
    """Return what forward leaves for backward, the layer's input among it."""
    attended = ("o", "lse", "random")
    if shape.checkpointing == "full":
        return ("x",)
    if shape.checkpointing == "selective":
        return ("x", *(("qkv",) if shape.fused else ("q", "v")), *attended, "g")
    value = "vr" if shape.fused else "v"
    rows = ("cf",) if shape.gathers else ()
    return ("x", "r1", "h1", *rows, "qr", "kr", value, *attended, "a", "r2", "h2", "g", "u", "s")


# -------------------------------------------------------------------- forward
def _projected(shape: LayerShape, *, twice: bool = False) -> list[Kernel]:
    """Return projections and rotation, whose results are there twice where backward reads them in another order than forward."""
    again = twice and shape.attention == "cudnn"
    names = [f"{name} {name}2" if again else name for name in ("qr", "kr", "vr")]
    if shape.fused:
        first, parts = [_kernel("query, key and value", "h1", "qkv")], ("qkv", "qkv")
        last = [_kernel("value", "qkv", names[2])]
    else:
        first = [_kernel(name, "h1", made) for name, made in (("query", "q"), ("key", "k"), ("value", "v"))]
        parts, last = ("q", "k"), []
    return [
        *first,
        *_tables(shape),
        _kernel("complex query", parts[0], "cq"),
        _kernel("view", "cq", "cq'"),
        _kernel("complex key", parts[1], "ck"),
        _kernel("view", "ck", "ck'"),
        *_turned("q", "f"),
        *_turned("k", "f"),
        _kernel("turned query", "rq'", names[0]),
        _kernel("turned key", "rk'", names[1]),
        *last,
    ]


def _tables(shape: LayerShape) -> list[Kernel]:
    """Return what forms the rows of rotary tables: views, and a copy of them where they are gathered."""
    if not shape.gathers:
        return [_kernel("view", "", "f")]
    views = [_kernel("view", *names) for names in (("", "f1"), ("f1", "f2"), ("f2", "f3"))]
    return [*views, _kernel("gather rows", "f3", "f")]


def _turned(part: str, rows: str) -> list[Kernel]:
    """Return the product of complex queries or keys and rows of tables, as real numbers."""
    name = "turn query" if part.endswith("q") else "turn key"
    made = f"{part[:-1]}r{part[-1]}"
    return [_kernel(name, f"{part[:-1]}c{part[-1]}' {rows}", made), _kernel("view", made, f"{made}'")]


def _attended(shape: LayerShape) -> Kernel:
    reads = "qr kr vr" if shape.fused else "qr kr v"
    inside = ("row maxima",) if shape.attention == "flex" else ()
    return _kernel("attention", reads, "o lse random", inside=inside)


def _forward(shape: LayerShape) -> list[Kernel]:
    """Return the kernels of forward."""
    keeps = shape.checkpointing == "none"
    fed = _kernel("activation", "g u", "s", "" if keeps else "u")
    return [
        _kernel("input norm", "x", "r1 h1" if keeps else "h1"),
        *_projected(shape),
        _attended(shape),
        _kernel("output", "o", "a"),
        _kernel("attention norm", "x a", "r2 h2" if keeps else "h2"),
        _kernel("gate", "h2", "g"),
        _kernel("up", "h2", "u"),
        fed,
        _kernel("down", "s", "d"),
        _kernel("sum", "x a d", "y", "d"),
        *([_kernel("view", "f", "cf")] if keeps else ()),
    ]


# -------------------------------------------------------------------- backward
def _backward(shape: LayerShape) -> list[Kernel]:
    """Return the kernels of backward, and of what it computes again."""
    value = ("vr" if shape.fused else "v") + ("2" if shape.fused and _doubled(shape) else "")
    query, key = ("qr2", "kr2") if _doubled(shape) else ("qr", "kr")
    inside = tuple(f"workspace {number}" for number in range(len(_workspace(shape))))
    attended = _kernel("attention", f"do {query} {key} {value} o lse random", "dqr dkr dv", inside=inside)
    sums = ("partial sums",)
    again = shape.checkpointing == "selective"
    late, early = again and shape.fused, again and not shape.fused  # which kernel forms the input norm again
    gradient = _kernel("attention norm", "x a r2 dhu dhg dy", "da r1 h1" if early else "da")
    parts = "dhqkv" if shape.fused else "dhq dhk dhv"
    total = _kernel("sum", f"x {parts} da", "r1 h1 dx") if late else _kernel("sum", f"x r1 {parts} da", "dx", "da")
    norms = _kernel("norms' gradients", f"x a r1 r2 dhu dhg {parts}", "d_norms", inside=sums)
    weights = [_kernel("gradient of the output", "da o", "d_o")]
    if shape.fused:
        weights.append(_kernel("gradient of the projection", "dqkv h1", "d_qkv"))
    else:
        for name, given in (("v", "dv"), ("k", "dk"), ("q", "dq")):
            weights.append(_kernel(f"gradient of {name}", f"{given} h1", f"d_{name}"))
    return [
        *_fed(shape),
        gradient,
        _kernel("gradient of attention", "da", "do"),
        *(_turned_again(shape) if again else ()),
        attended,
        *_projections_backward(shape),
        *((total, norms, *weights) if late else (norms, *weights, total)),
    ]


def _doubled(shape: LayerShape) -> bool:
    return shape.checkpointing == "full" and shape.attention == "cudnn"


def _fed(shape: LayerShape) -> list[Kernel]:
    """Return what is computed again up to the feed-forward part, and that part's backward."""
    formed = [_kernel("gradient of down", "dy s", "d_down")]
    gradient = [_kernel("gradient of the activation", "dy", "ds")]
    below = [
        _kernel("gradient of up", "du h2", "d_up"),
        _kernel("gradient through up", "du", "dhu"),
        _kernel("gradient of gate", "dg h2", "d_gate"),
        _kernel("gradient through gate", "dg", "dhg"),
    ]
    if shape.checkpointing == "none":
        return [*formed, *gradient, _kernel("activation", "g u ds", "dg du", "u"), *below]
    whole = [_kernel("input norm", "x", "r1 h1"), *_projected(shape, twice=True), _attended(shape)]
    first = [_kernel("output", "o", "a"), _kernel("attention norm", "x a", "r2 h2")]
    gate = [_kernel("gate", "h2", "g")] if shape.checkpointing == "full" else []
    fed = [*gate, _kernel("up", "h2", "u"), *gradient, _kernel("activation", "g u ds", "s du dg"), *formed, *below]
    return [*(whole if shape.checkpointing == "full" else ()), *first, *fed]


def _turned_again(shape: LayerShape) -> list[Kernel]:
    """Return the rotation of what selective checkpointing has saved before it."""
    kernels = [
        *_tables(shape),
        _kernel("complex query", "qkv" if shape.fused else "q", "cq"),
        _kernel("view", "cq", "cq'"),
    ]
    kernels += [*_turned("q", "f"), _kernel("turned query", "rq'", "qr")]
    kernels += [] if shape.fused else [_kernel("key", "h1", "k")]
    kernels += [_kernel("complex key", "qkv" if shape.fused else "k", "ck"), _kernel("view", "ck", "ck'")]
    kernels += [*_turned("k", "f"), _kernel("turned key", "rk'", "kr")]
    return [*kernels, _kernel("value", "qkv", "vr")] if shape.fused else kernels


def _projections_backward(shape: LayerShape) -> list[Kernel]:
    """Return the backward of rotation and projections as far as the gradient of their input."""
    conjugate = [] if shape.checkpointing == "none" else [_kernel("view", "f", "cf")]
    key = [_kernel("complex key", "dkr", "dck"), _kernel("view", "dck", "dck'"), *conjugate, *_turned("dk", "cf")]
    query = [_kernel("complex query", "dqr", "dcq"), _kernel("view", "dcq", "dcq'"), *_turned("dq", "cf")]
    if shape.fused:
        joined = [_kernel("join", "drq' drk' dv", "dqkv"), _kernel("gradient through the projection", "dqkv", "dhqkv")]
        return [*key, *query, *joined]
    return [
        _kernel("gradient through value", "dv", "dhv"),
        *key,
        _kernel("turned key", "drk'", "dk"),
        _kernel("gradient through key", "dk", "dhk"),
        *query,
        _kernel("turned query", "drq'", "dq"),
        _kernel("gradient through query", "dq", "dhq"),
    ]


# -------------------------------------------------------------------- sizes
def _workspace(shape: LayerShape) -> tuple[Size, ...]:
    """Return what attention's backward allocates inside itself."""
    if shape.attention == "flex":
        return ((Quantity.TOKENS, STATISTIC * shape.heads),)
    if shape.attention != "flash":
        return ()
    return tuple(flash_workspace(shape.heads, shape.groups, shape.head_dim, 2))


def _sizes(shape: LayerShape) -> dict[str, Size]:
    """Return the sizes of all tensors; floats have 16 bits, but for statistics and what is turned."""
    hidden, inner, query, key = shape.hidden, shape.inner, shape.query, shape.key
    rows = (
        (hidden, "x h1 a h2 d y dy dhu dhg da dhq dhk dhv dhqkv dx"),
        (query, "q qr qr2 o do dqr dq"),
        (key, "k kr kr2 v vr vr2 dkr dk dv"),
        (inner, "g u s ds du dg"),
        (2 * query, "cq cq' rq rq' dcq dcq' drq drq'"),
        (2 * key, "ck ck' rk rk' dck dck' drk drk'"),
        (query + 2 * key, "qkv dqkv"),
    )
    sizes: dict[str, Size] = {}
    for width, names in rows:
        sizes |= dict.fromkeys(names.split(), (Quantity.TOKENS, 2 * width))
    sizes |= dict.fromkeys(("r1", "r2"), (Quantity.TOKENS, STATISTIC))
    for name in ("lse", "row maxima"):
        sizes[name] = (Quantity.TOKENS, STATISTIC * shape.heads)
    sizes |= dict.fromkeys(
        ("f", "f3", "cf"), (Quantity.TOKENS if shape.gathers else Quantity.POSITIONS, 4 * shape.head_dim)
    )
    sizes |= dict.fromkeys(("f1", "f2"), (Quantity.POSITIONS, 4 * shape.head_dim))
    sizes["partial sums"] = (Quantity.TOKENS, 2 * 4 * hidden // SPLIT_ROWS)
    sizes["random"] = (Quantity.ONE, RANDOM_STATE_BYTES[shape.attention])
    matrices = {"o": query, "qkv": query + 2 * key, "q": query, "k": key, "v": key, "gate": inner, "up": inner}
    for name, columns in {**matrices, "down": inner, "norms": 2}.items():
        sizes[f"d_{name}"] = (Quantity.ONE, 2 * hidden * columns)
    sizes |= {f"workspace {number}": size for number, size in enumerate(_workspace(shape))}
    return sizes
