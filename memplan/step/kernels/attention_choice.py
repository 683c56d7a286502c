"""Which kernel torch's scaled-dot-product attention takes on a card: restated, since it cannot be asked without one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from memplan.catalog.entries import Gpu
from memplan.catalog.hardware.hardware_tables import HardwareTables, is_native
from memplan.documents.frozen_values import dataclass
from memplan.model.spec import Attention

ChosenKernel = Literal["cudnn", "flash", "efficient", "math"]

FLASH_LARGEST_WIDTH = 256
CUDNN_LARGEST_WIDTH = 128


def is_wide(part: object) -> bool:
    """Tell whether attention has heads that flash does not take."""
    return isinstance(part, Attention) and part.head_dim > FLASH_LARGEST_WIDTH


CUDNN_SINCE = 8
"""Major compute capability from which on cuDNN has attention (``check_cudnn_hardware_support``)."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the choice depends on."""

    dtype: str  # Of query, key and value: ``fp32``, ``bf16`` or ``fp16``
    width: int  # Of a head of query and key
    value_width: int  # Of a head of the value
    masked: bool = False  # Whether a mask is given, and not only the flag of causal attention
    grouped: bool = False  # Whether key and value have fewer heads than the query, which is asked for by ``enable_gqa``
    # Whether they have fewer and it is not asked for, which only cuDNN and the steps of math put up with.
    unequal: bool = False
    dropout: float = 0.0  # Probability
    tokens: int = 2  # Keys of a sequence
    trained: bool = True  # Whether any of the three needs a gradient


def chosen_kernel(call: AttentionCall, compute_capability: str, order: Sequence[str] = ()) -> ChosenKernel:
    """Return the kernel that torch takes on a card of NVIDIA.

    In an ``order`` that is given, as ``sdpa_kernel(order, set_priority=True)`` does, it is the first that can; cuDNN can from
    compute capability 8.0 on. Else cuDNN comes first on compute capability 9.0 and 10.x, where wheels carry one newer than 9.15; elsewhere flash,
    efficient, math, in this order, the first that can. What pads heads to a multiple of 8 for flash comes after.

    Source:
        aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, ``select_sdp_backend``, ``check_prefer_cudnn_attention``,
        ``can_use_flash_attention``, ``can_use_mem_efficient_attention``, ``can_use_cudnn_attention``,
        ``check_cudnn_hardware_support`` (v2.13.0).
    """
    major, minor = (int(part) for part in compute_capability.split("."))
    if order:
        can: dict[ChosenKernel, bool] = {
            "cudnn": major >= CUDNN_SINCE and _takes_cudnn(call),
            "flash": _takes_flash(call, major, minor),
            "efficient": _takes_efficient(call, major),
            "math": True,
        }
        return min((name for name in can if can[name] and name in order), key=order.index)
    if major in (9, 10) and _takes_cudnn(call):
        return "cudnn"
    if _takes_flash(call, major, minor):
        return "flash"
    if _takes_efficient(call, major):
        return "efficient"
    return "math"


def kernel_on(call: AttentionCall, gpu: Gpu, tables: HardwareTables, order: Sequence[str] = ()) -> ChosenKernel:
    """Return the kernel that torch takes on a card of any vendor.

    Args:
        gpu: The card; of one of NVIDIA, the compute capability has to be known.
        order: Kernels among which a card of NVIDIA chooses, the one that comes first first; nothing is torch's own order.

    Source:
        sdp_utils.cpp for ROCm, where flash and efficient are AOTriton's and take heads of one width, at most 512, on gfx11
        256; on Metal derivatives.yaml has none for a fused kernel, so that attention that is trained is composed (v2.13.0).
    """
    if gpu.vendor == "nvidia":
        return chosen_kernel(call, gpu.compute_capability or "", order)
    most = 256 if gpu.architecture.startswith("rdna") else 512
    if call.width != call.value_width or call.width > most or not runs_on("efficient", gpu, tables):
        return "math"
    if call.dtype != "fp32" and not call.masked and runs_on("flash", gpu, tables):
        return "flash"
    return "math" if call.grouped or call.width % (4 if call.dtype == "fp32" else 8) else "efficient"


def widened_later(call: AttentionCall, gpu: Gpu, tables: HardwareTables) -> bool:
    """Tell whether torch 2.14 has a fused kernel where 2.13 takes the steps of math: for key and value with fewer heads.

    Source:
        ``can_use_mem_efficient_attention`` and ``check_batch_size_and_num_heads_dense`` (sdp_utils_cpp.h, v2.14.1), and the
        docstring of ``scaled_dot_product_attention``; not on ROCm (github.com/pytorch/pytorch/pull/191085).
    """
    if gpu.vendor != "nvidia" or kernel_on(call, gpu, tables) != "math":
        return False
    return kernel_on(replace(call, grouped=False, unequal=False), gpu, tables) != "math"


def runs_on(kernel: ChosenKernel, gpu: Gpu, tables: HardwareTables) -> bool:
    """Tell whether a card has a kernel of attention at all, for whatever it is asked for."""
    return kernel == "math" or is_native(gpu, f"{kernel}-attention", tables)


def _takes_cudnn(call: AttentionCall) -> bool:
    sixteenths = call.dropout * 16 == int(call.dropout * 16)
    widths = max(call.width, call.value_width) <= CUDNN_LARGEST_WIDTH or (call.width, call.value_width) == (192, 128)
    aligned = call.width % 8 == 0 and call.value_width % 8 == 0
    return call.dtype != "fp32" and widths and aligned and sixteenths and call.tokens > 1


def _takes_flash(call: AttentionCall, major: int, minor: int) -> bool:
    if major < 8 or call.dtype == "fp32" or call.masked or call.unequal:
        return False
    if call.width != call.value_width or call.width > FLASH_LARGEST_WIDTH:
        return False
    consumer = (major == 8 and 6 <= minor <= 9) or major == 12
    return not (consumer and call.trained) or call.width <= 192 or (call.width > 224 and not call.dropout)


def _takes_efficient(call: AttentionCall, major: int) -> bool:
    if call.grouped or call.unequal or (major < 8 and call.dtype == "bf16"):
        return False
    alignment = 8 if call.dtype != "fp32" else 4
    if major < 8:
        alignment = 8 if major == 7 and call.dtype != "fp32" else 1
    return call.width % alignment == 0 and call.value_width % alignment == 0
