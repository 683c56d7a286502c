"""Kernels of a compiled layer that norm each head's queries and keys, and turn the halves of each: Qwen3's.

Tables of cosines and sines are read inside the kernels. All that one product projects is copied out of its result, and the
gradients of the parts are written where they are joined. Read, as all others, from Inductor's programs for torchtitan's layers.
"""

from memplan.step.compiled_layers.layer_sizes import LayerShape
from memplan.step.tapes.kernel_order import Kernel, joined, parts, written

KEPT = ("qc", "kc", "sq", "sk")
"""What forward leaves besides: queries and keys before their norms, and the statistics of these."""
HEADS_WIDE = ("dwq", "dwk", "sq", "sk", "tq", "tk", "pq", "pk")
"""Tensors in fp32."""


def normed_heads(shape: LayerShape, *, twice: bool) -> list[Kernel]:
    """Return the projection, norms and rotation; under ``twice`` statistics stay and the values are there twice."""
    project = written("query, key and value", "h1", "qkv")
    if shape.checkpointing != "none":
        return [project, *_heads(*(("sq", "sk", "vr vr2") if twice else ("", "", "vr")))]
    return [
        project,
        written("query", "qkv", "qc"),
        written("key norm", "qkv", "kc sk", fused="tk"),
        written("query norm", "qc", "sq qr", fused="tq wq"),
        written("turned key", "kc sk", "kr", fused="wk"),
        written("value", "qkv", "vr"),
    ]


def _heads(query: str, key: str, value: str) -> list[Kernel]:
    """Return the norms and rotation of what is projected, and the copy of values.

    Args:
        query: What stays of the queries' norm.
        key: The same of the keys'.
        value: What values are copied to.
    """
    return [
        written("query norm", "qkv", f"{query} qr", fused="wq" if query else "sq wq"),
        written("key norm", "qkv", f"{key} kr", fused="wk" if key else "sk wk"),
        written("value", "qkv", value),
    ]


def heads_again(gradient: Kernel) -> list[Kernel]:
    """Return norms and rotation of what was saved before them, and among them the gradient that attention is given."""
    query, *others = _heads("sq", "sk", "vr")
    return [query, gradient, *others]


def heads_backward(shape: LayerShape, attended: Kernel) -> list[Kernel]:
    """Return the backward of rotation and norms as far as the gradient of the projection, which the parts are written into."""
    query, key = ("qkv", "qkv") if shape.checkpointing != "none" else ("qc", "kc")
    queries, keys = shape.head_sums
    kernels = parts(attended, "dqr")
    if queries.way == "mixed":
        kernels += [
            written("turned query", "dqr", "dwq"),
            written("query norm", f"dwq sq {query}", "tq pq", inside=("partial sums q",)),
            written("query", f"dwq tq sq {query}", "dq"),
        ]
    else:
        kernels.append(written("query norm", f"dqr sq {query}", "dwq dq", fused="tq"))
    kernels += parts(attended, "dkr")
    if keys.way == "mixed":
        kernels += [
            written("turned key", "dkr", "dwk"),
            written("key norm", f"dwk sk {key}", "dk pk", fused="tk", inside=("partial sums k",)),
        ]
    else:
        kernels.append(written("key norm", f"dkr sk {key}", "dwk dk", fused="tk"))
    return [*kernels, *parts(attended, "dv"), written("value", "dv", "dvr"), joined("join", "dq dk dvr", "dqkv")]


def heads_gradients(shape: LayerShape) -> list[Kernel]:
    """Return the gradients of the weights of both norms."""
    kernels = []
    for part, sums in zip("kq", reversed(shape.head_sums), strict=False):
        read = part if shape.checkpointing == "none" else "qkv"
        name = f"{part}c" if read == part else read
        given, last = f"dw{part} s{part} {name}", f"p{part}"
        if sums.way == "split":
            kernels.append(written("sums of a head's norm", given, last))
        kernels.append(
            written("norm's gradient", given if sums.way == "whole" else last, f"d_{part}norm", fused="head_sum")
        )
    return kernels
