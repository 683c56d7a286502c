"""Transformer Engine's Python on tensors without memory: its C++ module is replaced by functions that return what that one allocates.

Its modules, autograd functions and choice of an attention backend are its own (the ``transformer-engine`` wheel, unpacked); a product,
a norm, an attention kernel, a softmax or a rotation returns empty tensors of the shapes that its C++ returns.

Source:
    transformer_engine/pytorch/csrc/extensions of 2.20: gemm.cpp (``getGemmOutputShape``), normalization.cpp, attention.cpp
    (``fused_attn_fwd``: result, logsumexp in fp32, two words of the random state), softmax.cpp (in place on its argument), apply_rope.cpp.
"""

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

WORDS = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")


class _Words(type):
    """The type of an enumeration that has whatever word is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name != "__members__":
            raise AttributeError(name)
        known = cls.__dict__["known"]
        if name == "__members__":
            return known
        if name not in known:
            known[name] = int.__new__(cls, len(known))  # type: ignore[arg-type]
        return known[name]


class _Module(ModuleType):
    """A module that has an enumeration of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Words(name, (int,), {"known": {}}))
        return self.__dict__[name]


def install(folder: str) -> None:  # pragma: no cover - needs Transformer Engine
    """Let the Transformer Engine that is unpacked in a folder be imported, with :data:`FUNCTIONS` as its C++ module."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.path.insert(0, folder)
    import torch

    module: Any = _Module("transformer_engine_torch")
    for word in WORDS:
        getattr(module.DType, word)
    for name, function in FUNCTIONS.items():
        setattr(module, name, function)
    sys.modules["transformer_engine_torch"] = module
    for name in ("", ".pad", ".permutation", ".cross_entropy", ".mhc", ".grouped_dbias_dscales"):
        sys.modules[f"transformer_engine.pytorch.triton{name}"] = (
            MagicMock()
        )  # kernels in Triton's language, none of which runs
    import transformer_engine.common as common

    common.load_framework_extension = lambda *_: None
    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100")
    torch.cuda.get_device_properties = lambda *_: card
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.is_available, torch.cuda.is_current_stream_capturing = lambda: True, lambda: False
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.UntypedStorage.data_ptr = lambda self: self._cdata
    torch.backends.cudnn.version = lambda: 91300
    import transformer_engine.pytorch.utils as utils
    from transformer_engine.pytorch.ops.basic import layer_norm, rmsnorm

    rmsnorm.RMSNorm.pre_first_fuser_forward = layer_norm.LayerNorm.pre_first_fuser_forward = lambda _: None
    utils._empty_tensor = lambda: torch.empty(0, device="meta")
    utils._get_cudnn_version = lambda: (9, 13, 0)


def compiled_functions() -> None:  # pragma: no cover - needs megatron-core
    """Let what Megatron-LM compiles make its results alone, where it says backward itself."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    def fuser(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keys: Any) -> Any:
            if torch.is_grad_enabled():
                return function(*args, **keys)
            with _disable_current_modes():
                made = function(*args, **keys)
            several = made if isinstance(made, tuple) else (made,)
            new = tuple(torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in several)
            return new if isinstance(made, tuple) else new[0]

        return called

    jit: Any = ModuleType("megatron.core.jit")
    jit.jit_fuser, jit.enable_jit_fuser, jit.disable_jit_fuser, jit.noop_decorator = (
        fuser,
        MagicMock(),
        MagicMock(),
        lambda one: one,
    )
    sys.modules["megatron.core.jit"] = jit
    added: Any = ModuleType(
        "fused_weight_gradient_mlp_cuda"
    )  # adds a product to the gradients' buffer, and returns nothing
    added.wgrad_gemm_accum_fp32 = added.wgrad_gemm_accum_fp16 = lambda *_: None
    sys.modules["fused_weight_gradient_mlp_cuda"] = added


def _product(
    left: Any, left_turned: bool, right: Any, right_turned: bool, out: Any, quantizer: Any, dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, *_: Any, **__: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return a product, and the gradient of a bias in backward."""
    import torch

    left_rows, left_columns = left.shape[:-1].numel(), left.shape[-1]
    shape = [right.shape[-1]] if right_turned else list(right.shape[:-1])
    shape.append(left_rows if left_turned else left_columns)
    if out is None:
        out = torch.empty(shape, dtype=left.dtype if dtype is None else _dtype(dtype), device=left.device)
    bias_gradient = (
        torch.empty(right.shape[-1:], dtype=left.dtype, device=left.device) if grad and bias is not None else None
    )
    return out, bias_gradient, None, None


def _dtype(word: Any) -> Any:
    import torch

    return {2: torch.float32, 3: torch.float16, 4: torch.bfloat16}[int(word)]


def _rms(data: Any, weight: Any, eps: float, out: Any, *_: Any) -> tuple[Any, Any, Any]:
    import torch

    out = torch.empty_like(data) if out is None else out
    return out, None, torch.empty(data.shape[:-1].numel(), dtype=torch.float32, device=data.device)


def _layer(data: Any, weight: Any, bias: Any, *rest: Any) -> tuple[Any, Any, Any]:
    import torch

    out, _, deviations = _rms(data, weight, *rest)
    return out, torch.empty_like(deviations), deviations


def _rms_back(gradient: Any, data: Any, deviations: Any, weight: Any, *_: Any) -> tuple[Any, Any]:
    import torch

    return torch.empty_like(data), torch.empty_like(weight)


def _layer_back(gradient: Any, data: Any, means: Any, deviations: Any, weight: Any, *_: Any) -> tuple[Any, Any, Any]:
    import torch

    return torch.empty_like(data), torch.empty_like(weight), torch.empty_like(weight)


def _like_first(data: Any, *_: Any, **__: Any) -> Any:
    import torch

    return torch.empty(data.shape, dtype=data.dtype, device=data.device)


def _same(data: Any, *_: Any, **__: Any) -> Any:
    return data


def _attention(*args: Any) -> list[Any]:
    """Return attention's result, logsumexp and the random state; arguments as ``fused_attn_fwd`` in fused_attn.py hands them on."""
    import torch

    query, value = args[16], args[18]
    out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
    length, batch, heads = query.shape[:3]
    sums = torch.empty((batch, heads, length, 1), dtype=torch.float32, device=query.device)
    return [out, sums, torch.empty(2, dtype=torch.int64, device=query.device)]


def _attention_back(*args: Any) -> list[Any]:
    import torch

    made = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in args[19:22]]
    return [*made, None, None]


FUNCTIONS = {
    "generic_gemm": _product,
    "rmsnorm_fwd": _rms,
    "layernorm_fwd": _layer,
    "rmsnorm_bwd": _rms_back,
    "layernorm_bwd": _layer_back,
    "fused_rope_forward": _like_first,
    "fused_rope_backward": _like_first,
    "fused_attn_fwd": _attention,
    "fused_attn_bwd": _attention_back,
    "get_fused_attn_backend": lambda *_, **__: (
        sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
        "",
    ),
    "scaled_upper_triang_masked_softmax_forward": _same,
    "scaled_upper_triang_masked_softmax_backward": _same,
    "scaled_aligned_causal_masked_softmax_forward": _same,
    "scaled_aligned_causal_masked_softmax_backward": _same,
    "scaled_masked_softmax_forward": _same,
    "scaled_masked_softmax_backward": _same,
    "get_cublasLt_version": lambda: 120000,
    "get_num_cublas_streams": lambda: 4,
    "device_supports_multicast": lambda *_: False,
    "ubuf_built_with_mpi": lambda: False,
}
"""What stands for functions of ``transformer_engine_torch``."""
