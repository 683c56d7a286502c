"""The kernels of a decoder layer that torch compiles by itself: forward and backward, as checkpointing divides them.

What the partitioner saves follows from its rules and no size: results of products and of attention, what products read in
backward, and a number per row of each norm; and under checkpointing what the policy saves, and the layer's input. Everything
between is fused into the kernels below, which were read from the programs that Inductor writes for torchtitan's layers
(``memplan trace MODEL --stack torchtitan --set compile=layers``, torch 2.13.0).

Source:
    torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition``; ``_apply_op_sac`` in
    torchtitan/distributed/activation_checkpoint.py (0.2.2), which saves every second product of two matrices.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from memplan.step.compiled_layers.layer_sizes import LayerShape, Size, attention_workspace, tensor_sizes
from memplan.step.compiled_layers.normed_heads import (
    HEADS_WIDE,
    KEPT,
    heads_again,
    heads_backward,
    heads_gradients,
    normed_heads,
)
from memplan.step.layers.attention_kernels import RANDOM_STATE_BYTES
from memplan.step.tapes.kernel_order import Kernel, Program, called, parts, viewed, written
from memplan.step.tapes.linear_forms import Quantity


class LayerPrograms(NamedTuple):
    """A layer's programs, and the sizes of their tensors; ``x`` is its input, ``y`` its output and ``dy`` the gradient of that."""

    forward: Program
    backward: Program
    saved: tuple[str, ...]  # What forward leaves for backward
    sizes: dict[str, Size]
    counted: dict[str, Size]  # Of what Inductor counts with other sizes in backward


@lru_cache(maxsize=256)
def layer_programs(shape: LayerShape) -> LayerPrograms:
    """Return the programs of a layer."""
    saved = _saved(shape)
    forward = Program(tuple(_forward(shape)), (), frozenset({*saved, *_shared(shape), "y"}))
    backward = _backward(shape)
    gradients = [name for kernel in backward for name in kernel.makes if name.startswith("d_")]
    given = tuple(name for name in (*saved, *_shared(shape)) if name != "x")
    counted: dict[str, Size] = dict.fromkeys(("n1", "n2"), (Quantity.ONE, 4 * shape.hidden * shape.sums.parts))
    if "qkv" in given:  # what is read of it last
        queries = shape.head_sums and shape.head_sums[0].way != "mixed"
        counted["qkv"] = (Quantity.TOKENS, 2 * (shape.query if queries else shape.key))
    return LayerPrograms(
        forward, Program(tuple(backward), given, frozenset({*gradients, "dx"})), saved, tensor_sizes(shape), counted
    )


WIDE = ("cq", "ck", "dcq", "dck", "r1", "r2", "t1", "lse", "n1", "n2", *HEADS_WIDE)
"""Tensors in fp32; what is turned is of complex numbers."""
TURNED = ("rq", "rk", "drq", "drk", "f", "f1", "f2", "f3", "cf")


def dtypes(names: Iterable[str]) -> dict[str, str]:
    """Return the dtype of each of a layer's tensors, views aside, whose memory is another's."""
    own = (name for name in names if not name.endswith("'"))
    return {name: "fp32" if name in WIDE else "complex" if name in TURNED else "bf16" for name in own}


def _saved(shape: LayerShape) -> tuple[str, ...]:
    """Return what forward leaves for backward, the layer's input among it."""
    attended = ("o", "lse", *_random(shape))
    if shape.checkpointing == "full":
        return ("x",)
    if shape.checkpointing == "selective":
        return ("x", *(("qkv",) if shape.fused else ("q", "v")), *attended, "g")
    value = "vr" if shape.fused else "v"
    rows = KEPT if shape.head_sums else ("cf",) if shape.gathers else ()
    return ("x", "r1", "h1", *rows, "qr", "kr", value, *attended, "a", "r2", "h2", "g", "u", "s")


def _shared(shape: LayerShape) -> tuple[str, ...]:
    """Return what backward is given besides that is memory of the model's own: rows of its tables."""
    return ("cf",) if shape.checkpointing == "none" and not (shape.gathers or shape.head_sums) else ()


def _random(shape: LayerShape) -> tuple[str, ...]:
    """Return the state of the generator that attention returns, in two tensors."""
    return ("seed", "offset") if RANDOM_STATE_BYTES[shape.attention] else ()


# -------------------------------------------------------------------- forward
def _projected(shape: LayerShape, *, twice: bool = False) -> list[Kernel]:
    """Return projections and rotation, whose results are there twice where backward reads them beside forward."""
    if shape.head_sums:
        return normed_heads(shape, twice=twice)
    names = [f"{name} {name}2" if twice else name for name in ("qr", "kr", "vr")]
    if shape.fused:
        first, parts = [written("query, key and value", "h1", "qkv"), *_tables(shape)], ("qkv", "qkv")
        tables, last = [], [written("value", "qkv", names[2])]
    else:
        first = [written(name, "h1", made) for name, made in (("query", "q"), ("key", "k"), ("value", "v"))]
        parts, tables, last = ("q", "k"), _tables(shape), []
    return [
        *first,
        written("complex query", parts[0], "cq"),
        *viewed("cq", "cq'"),
        written("complex key", parts[1], "ck"),
        *viewed("ck", "ck'"),
        *tables,
        *_turned("q", "f"),
        *_turned("k", "f"),
        written("turned query", "rq'", names[0]),
        written("turned key", "rk'", names[1]),
        *last,
    ]


def _tables(shape: LayerShape) -> list[Kernel]:
    """Return what forms the rows of rotary tables: views, and a copy of them where they are gathered."""
    if not shape.gathers:
        return viewed("", "f")
    if shape.alone:
        return [*called("gather rows", "", "f1"), *viewed("f1", "f")]
    views = [kernel for names in (("", "f1"), ("f1", "f2"), ("f2", "f3")) for kernel in viewed(*names)]
    return [*views, *called("gather rows", "f3", "f")]


def _turned(part: str, rows: str) -> list[Kernel]:
    """Return the product of complex queries or keys and rows of tables, as real numbers.

    torch's product forms the conjugate of rows that are only marked so (``ConjugateFallback.cpp``, v2.13.0).
    """
    name = "turn query" if part.endswith("q") else "turn key"
    made, inside = f"{part[:-1]}r{part[-1]}", ("conjugate",) if rows == "cf" else ()
    return [*called(name, f"{part[:-1]}c{part[-1]}' {rows}", made, inside=inside), *viewed(made, f"{made}'")]


def _attended(shape: LayerShape, *, saves: bool) -> list[Kernel]:
    """Return attention, of whose results only those that are needed are taken."""
    reads = "qr kr vr" if shape.fused else "qr kr v"
    inside = ("row maxima",) if shape.attention == "flex" else ()
    made = " ".join(("o", "lse", *_random(shape)))
    return called("attention", reads, made, made if saves else "o", inside)


def _forward(shape: LayerShape) -> list[Kernel]:
    """Return the kernels of forward."""
    keeps = shape.checkpointing == "none"
    fed = written("activation", "g u", "s", "" if keeps else "u")
    return [
        written("input norm", "x", "r1 h1" if keeps else "h1", fused="row_sums"),
        *_projected(shape),
        *_attended(shape, saves=shape.checkpointing != "full"),
        written("output", "o", "a"),
        written("attention norm", "x a", "r2 h2" if keeps else "h2", fused="row_sums"),
        written("gate", "h2", "g"),
        written("up", "h2", "u"),
        fed,
        written("down", "s", "d"),
        written("sum", "x a d", "y", "d"),
        *(viewed("f", "cf") if keeps and not shape.head_sums else ()),
    ]


# -------------------------------------------------------------------- backward
def _backward(shape: LayerShape) -> list[Kernel]:
    """Return the kernels of backward, and of what it computes again."""
    again = shape.checkpointing == "selective"
    given = "" if shape.checkpointing == "none" else "2"
    value = f"vr{given if shape.checkpointing == 'full' else ''}" if shape.fused else "v"
    twice = shape.checkpointing == "full" and not shape.head_sums
    query, key = ("qr2", "kr2") if twice else ("qr", "kr")
    inside = tuple(f"workspace {number}" for number in range(len(attention_workspace(shape))))
    reads = " ".join(("do", query, key, value, "o", "lse", *_random(shape)))
    attended = called("attention", reads, "dqr dkr dv", "", inside)
    early = again and not shape.fused  # forms the input norm again
    made = "r1 da h1" if early else "da"
    return [
        *_fed(shape),
        written("attention norm", "x a r2 dhu dhg dy", made, fused="row_sums"),
        *(_turned_again(shape) if again else (_through_output(),)),
        *attended,
        *_projections_backward(shape, attended[0]),
        *_ends(shape),
    ]


def _ends(shape: LayerShape) -> list[Kernel]:
    """Return the gradients of norms, of the weights of attention, and of the layer's input."""
    parts = "dhqkv" if shape.fused else "dhq dhk dhv"
    weights = [written("gradient of the output", "da o", "d_o")]
    weights += heads_gradients(shape)
    if shape.fused:
        weights.append(written("gradient of the projection", "dqkv h1", "d_qkv"))
    else:
        for name, given in (("v", "dv"), ("k", "dk"), ("q", "dq")):
            weights.append(written(f"gradient of {name}", f"{given} h1", f"d_{name}"))
    norms, reads, at_once = f"x a r1 r2 dhu dhg {parts}", f"x r1 {parts} da", shape.sums.way == "whole"
    second, first = ([], []) if at_once else ([_norm("2")], [_norm("1")])
    both = written("norms' gradients", norms, "n2 n1")
    if at_once:
        both = written("norms' gradients", norms, "d_norm2 d_norm1", fused="column_sum column_sum")
    if shape.checkpointing == "selective" and shape.fused:  # forms the input norm again
        total = written("sum", f"x {parts} da", "r1 dx h1", "da", fused="row_sums")
        return [total, both, *second, *weights, *first]
    if shape.sums.way != "mixed":
        total = written("sum", reads, "dx", "da", fused="row_sums")
        return [both, *second, *weights, total, *first]
    inside = ("partial sums",)
    if shape.fused:
        both = written("norms' gradients", f"{norms} da", "dx n2 n1", fused="row_sums", inside=inside)
        return [both, *second, *weights, *first]
    both = written("norms' gradients", norms, "t1 n2 n1", inside=inside)
    return [both, *second, *weights, *first, written("sum", f"{reads} t1", "dx", "da")]


def _norm(number: str) -> Kernel:
    """Return what adds up the parts of a norm's gradient."""
    return written("norm's gradient", f"n{number}", f"d_norm{number}", fused="column_sum")


def _fed(shape: LayerShape) -> list[Kernel]:
    """Return what is computed again up to the feed-forward part, and that part's backward."""
    formed = [written("gradient of down", "dy s", "d_down")]
    gradient = [written("gradient of the activation", "dy", "ds")]
    below = [
        written("gradient of up", "du h2", "d_up"),
        written("gradient through up", "du", "dhu"),
        written("gradient of gate", "dg h2", "d_gate"),
        written("gradient through gate", "dg", "dhg"),
    ]
    if shape.checkpointing == "none":
        return [*formed, *gradient, written("activation", "g u ds", "dg du", "u"), *below]
    whole = [
        written("input norm", "x", "r1 h1"),
        *_projected(shape, twice=True),
        *_attended(shape, saves=True),
    ]
    first = [written("output", "o", "a"), written("attention norm", "x a", "r2 h2")]
    gate = [written("gate", "h2", "g")] if shape.checkpointing == "full" else []
    fed = [*gate, written("up", "h2", "u"), *gradient, written("activation", "g u ds", "s du dg"), *formed, *below]
    return [*(whole if shape.checkpointing == "full" else ()), *first, *fed]


def _through_output() -> Kernel:
    return written("gradient of attention", "da", "do")


def _turned_again(shape: LayerShape) -> list[Kernel]:
    """Return the rotation of what selective checkpointing has saved before it, and the gradient that attention is given."""
    if shape.head_sums:
        return heads_again(_through_output())
    given = "qkv" if shape.fused else "q"
    complex_query = [written("complex query", given, "cq"), *viewed("cq", "cq'")]
    kernels = [_through_output()]
    kernels += [*_tables(shape), *complex_query] if shape.fused else [*complex_query, *_tables(shape)]
    kernels += [*_turned("q", "f"), written("turned query", "rq'", "qr")]
    kernels += [] if shape.fused else [written("key", "h1", "k")]
    kernels += [written("complex key", "qkv" if shape.fused else "k", "ck"), *viewed("ck", "ck'")]
    kernels += [*_turned("k", "f"), written("turned key", "rk'", "kr")]
    return [*kernels, written("value", "qkv", "vr")] if shape.fused else kernels


def _projections_backward(shape: LayerShape, attended: Kernel) -> list[Kernel]:
    """Return the backward of rotation and projections as far as the gradient of their input."""
    if shape.head_sums:
        return [*heads_backward(shape, attended), written("gradient through the projection", "dqkv", "dhqkv")]
    conjugate: list[Kernel] = [] if shape.checkpointing == "none" else viewed("f", "cf")
    key = [
        *parts(attended, "dkr"),
        written("complex key", "dkr", "dck"),
        *viewed("dck", "dck'"),
        *conjugate,
        *_turned("dk", "cf"),
    ]
    query = [
        *parts(attended, "dqr"),
        written("complex query", "dqr", "dcq"),
        *viewed("dcq", "dcq'"),
        *_turned("dq", "cf"),
    ]
    value = parts(attended, "dv")
    if shape.fused:
        joined = [written("join", "drq' drk' dv", "dqkv"), written("gradient through the projection", "dqkv", "dhqkv")]
        return [*value, *key, *query, *joined]
    return [
        *value,
        written("gradient through value", "dv", "dhv"),
        *key,
        written("turned key", "drk'", "dk"),
        written("gradient through key", "dk", "dhk"),
        *query,
        written("turned query", "drq'", "dq"),
        written("gradient through query", "dq", "dhq"),
    ]
