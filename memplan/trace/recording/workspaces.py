"""Workspaces of CUDA's kernels and libraries, which no tensor shows."""

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from memplan.step.tapes.reduction_workspaces import column_sum_bytes
from memplan.units import MIB, ceil_div, round_up

if TYPE_CHECKING:
    from torch import Tensor

MATRIX_PRODUCTS = frozenset(
    {"mm.default", "mm.out", "addmm.default", "addmm_.default", "bmm.default", "baddbmm.default"}
)
"""Operators that run in cuBLAS."""

LAST_RESULT_FIRST = frozenset({"native_dropout.default"})
"""Operators that allocate their results in reverse: the mask before what is masked (memory history of an H200)."""

LIBRARIES = ("cublas", "cublasLt")
"""What workspaces that last are called in a trace."""

CUBLASLT_WORKSPACE_BYTES = MIB
"""Workspace of cuBLASLt, one for each thread that runs it: seen in the memory history of an H200 (torch 2.11)."""

EMBEDDING_DIRECT_INDICES = 3072
EMBEDDING_ROWS_PER_PART = 10
FOREACH_CHUNK_ELEMENTS = 2**16


def cublas_workspace_bytes(compute_capability: str) -> int:
    """Return the size of one cuBLAS workspace, of which a training process has two.

    Source:
        aten/src/ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``: 4096 KiB x 8 on
        Hopper and datacentre Blackwell, else ``:4096:2:16:8``. One per handle and stream; the
        forward thread and autograd's thread have a handle each.
    """
    return 32 * MIB if compute_capability.split(".")[0] in ("9", "10", "12") else 4096 * 1024 * 2 + 16 * 1024 * 8


def is_fused_bias(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Tell whether an operator adds a bias in the kernel of its product, which cuBLASLt has.

    Source:
        ``addmm_out_cuda_impl`` in aten/src/ATen/native/cuda/Blas.cpp: a row, taken as it is.
    """
    return name == "addmm.default" and args[0].dim() == 1 and options.get("beta", 1) == 1


def flash_backward_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return what the backward kernel of flash attention allocates besides its results.

    Formula:
        ``4bh * up(t, 128)`` for the row sums, ``4b * up(t, 128) * h * up(d, 32)`` for the
        query gradient in fp32 (64 beyond width 128), and with grouped queries the gradients of
        the repeated keys and values, ``e * b * t * h * d`` each.

    Source:
        aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``.
    """
    query: Tensor = args[1]
    key: Tensor = args[2]
    batch, heads, tokens, width = query.shape
    rows = round_up(tokens, 128)
    sizes = [4 * batch * heads * rows, 4 * batch * rows * heads * round_up(width, 32 if width <= 128 else 64)]
    if key.shape[1] != heads:
        sizes += [key.element_size() * batch * key.shape[2] * heads * width] * 2
    return sizes


def flash_3_backward_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return what the backward kernel of FlashAttention-3 allocates besides its results.

    Formula:
        ``4bh * up(t, 128)`` for the statistics in another base, and that times the width, up to 64, 96, 128, 192 or 256, for
        the query gradient in fp32.

    Source:
        hopper/flash_api.cpp of https://github.com/Dao-AILab/flash-attention, ``mha_bwd``: ``softmax_lse_log2``, ``dq_accum``.
    """
    batch, tokens, heads, width = args[1].shape
    rows = 4 * batch * heads * round_up(tokens, 128)
    return [rows, rows * next(size for size in (64, 96, 128, 192, 256) if width <= size)]


def embedding_backward_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return what the backward kernel of an embedding allocates besides the gradient.

    Up to 3072 indices there is nothing. Beyond, indices are sorted and rows summed in two steps, the
    first into fp32 partial sums of 10 rows each. What sorting itself takes is left out.

    Formula:
        with ``s = min(n, rows)`` and ``p = n // 10 + s``: three times ``8n``, two times ``8s``, ``8p``, ``4pd``.

    Source:
        aten/src/ATen/native/cuda/Embedding.cu, ``embedding_dense_backward_cuda``, and
        EmbeddingBackwardKernel.cu, ``embedding_backward_cuda_kernel``.
    """
    gradient, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    if count <= EMBEDDING_DIRECT_INDICES:
        return []
    segments = min(count, rows)
    partial = count // EMBEDDING_ROWS_PER_PART + segments
    return [8 * count] * 3 + [8 * segments] * 2 + [8 * partial, 4 * partial * gradient.shape[-1]]


def foreach_norm_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return the partial norms that ``_foreach_norm`` allocates.

    Formula:
        4 bytes for each tensor times the chunks of ``2^16`` elements of the largest.

    Source:
        aten/src/ATen/native/cuda/ForeachReduceOp.cu; ``kChunkSize`` in MultiTensorApply.cuh.
    """
    tensors = args[0]
    chunks = max(ceil_div(tensor.numel(), FOREACH_CHUNK_ELEMENTS) for tensor in tensors)
    return [4 * len(tensors) * chunks]


def softmax_backward_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return the product of gradient and result that the backward kernel of softmax forms first.

    Source:
        ``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu; log-softmax has none.
    """
    gradient, result = args[0], args[1]
    return [gradient.numel() * max(gradient.element_size(), result.element_size())]


def log_softmax_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return the copy that log-softmax makes first of rows that do not lie in order.

    Source:
        ``host_softmax`` in aten/src/ATen/native/cuda/SoftMax.cu (v2.13.0): ``input_.contiguous()``.
    """
    given: Tensor = args[0]
    return [] if given.is_contiguous() else [given.numel() * given.element_size()]


def column_sum_blocks(args: tuple[Any, ...]) -> list[int]:
    """Return what a sum over all dimensions but the last allocates: gradients of biases, and of norms step by step."""
    tensor: Tensor = args[0]
    reduced = {dim % tensor.dim() for dim in args[1] or ()}
    if tensor.dim() == 0 or not tensor.is_contiguous() or reduced != set(range(tensor.dim() - 1)):
        return []
    size = column_sum_bytes(tensor.numel() // max(tensor.shape[-1], 1), tensor.shape[-1])
    return [size] if size else []


def flex_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return one fp32 number for each row of scores: the highest score, and in backward the sum of result times gradient.

    Source:
        torch/_inductor/kernel/flex/flex_attention.py (v2.13.0), ``max_scores`` and ``delta``.
    """
    query: Tensor = args[0]
    return [4 * (query.numel() // query.shape[-1])]


def scatter_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return the sums of 64 bits, and the mask as wide as what it is scattered into, that ``masked_scatter`` forms.

    Source:
        ``masked_scatter__cuda`` in aten/src/ATen/native/cuda/IndexKernel.cpp, ``launch_masked_scatter_kernel`` in IndexKernel.cu (v2.13.0).
    """
    numbers = args[0].numel()
    return [8 * numbers, numbers]


def scatter_backward_bytes(args: tuple[Any, ...]) -> list[int]:
    """Return what choosing a gradient's numbers by a mask takes beside the result: the mask's width, and an index for each dimension.

    The mask is gone when the result is formed.

    Source:
        ``masked_select_out_cuda_impl`` in aten/src/ATen/native/cuda/IndexKernel.cpp, ``expandTensors`` in IndexingUtils.h,
        ``nonzero_cuda_out_impl`` in Nonzero.cu (v2.13.0).
    """
    gradient, numbers = args[0], prod(args[2])
    indices = 8 * gradient.dim() * numbers
    return [indices + max(0, gradient.numel() - numbers * gradient.element_size())]


_RULES: Mapping[str, Callable[[tuple[Any, ...]], list[int]]] = {
    "_scaled_dot_product_flash_attention_backward.default": flash_backward_bytes,
    "flash_3_backward.default": flash_3_backward_bytes,
    "embedding_dense_backward.default": embedding_backward_bytes,
    "_foreach_norm.Scalar": foreach_norm_bytes,
    "sum.dim_IntList": column_sum_blocks,
    "_softmax_backward_data.default": softmax_backward_bytes,
    "_log_softmax.default": log_softmax_bytes,
    "flex_attention.default": flex_bytes,
    "masked_scatter.default": scatter_bytes,
    "masked_scatter_backward.default": scatter_backward_bytes,
    "flex_attention_backward.default": flex_bytes,
}


def kernel_workspaces(operation: str, args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each block that ``operation`` allocates inside itself and frees again."""
    rule = _RULES.get(operation)
    return rule(args) if rule else []
