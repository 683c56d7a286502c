"""Linear layers of bitsandbytes without memory, and its kernels as its CUDA backend runs them on a card.

A layer is quantised when it is moved to a GPU, which a tensor without memory cannot be: packed codes and quant
states are made by hand, as that move makes them.

Source:
    bitsandbytes 0.50.2, nn/modules.py (``Params4bit``, ``Int8Params``), functional.py (``quantize_4bit``),
    backends/cuda/ops.py (``gemm_4bit``, ``_dequant_linear_fallback``, ``int8_vectorwise_quant``, ``int8_scaled_mm``).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from memplan.step.states.parallel_shards import is_sharded, shards_codes
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.adapters import TOWER_PARTS
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

FOUR_BIT = {"nf4": ("nf4", False), "nf4-dq": ("nf4", True), "fp4": ("fp4", False), "fp4-dq": ("fp4", True)}
"""Weight format -> bitsandbytes' name of it, and whether its scales are quantised again."""

EIGHT_BIT = "llm-int8"
"""Weight format of ``Linear8bitLt``."""

BLOCK, SCALES_IN_A_BLOCK, CODE, NESTED_CODE = 64, 256, 16, 256


def quantises(setup: TrainingSetup) -> bool:
    """Tell whether linear layers are quantised by bitsandbytes."""
    return setup.format_names["hidden_matrix"] in (*FOUR_BIT, EIGHT_BIT)


def bitsandbytes_options(setup: TrainingSetup) -> Any:
    """Return transformers' ``BitsAndBytesConfig`` of the format that a setup's linear layers are quantised to."""
    import transformers

    config: Any = transformers.BitsAndBytesConfig
    name = setup.format_names["hidden_matrix"]
    if name == EIGHT_BIT:
        return config(load_in_8bit=True)
    kind, double = FOUR_BIT[name]
    storage = TORCH_DTYPES[setup.config.compute_dtype] if _flattens(setup) else torch.uint8
    return config(
        load_in_4bit=True,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=TORCH_DTYPES[setup.config.compute_dtype],
    )


def _flattens(setup: TrainingSetup) -> bool:
    """Tell whether codes are stored in the dtype of products, as FSDP1 needs them, and axolotl has them."""
    return is_sharded(setup.config.parallel) and (setup.config.parallel.engine == "fsdp1" or shards_codes(setup))


def quantised(model: Any, setup: TrainingSetup) -> Any:
    """Return ``model`` with its linear layers, the head aside, replaced as transformers' loading does."""
    with mock.patch("torch.cuda.is_available", return_value=True):  # else transformers up to 4.44 imports half of it
        from transformers.integrations import bitsandbytes
    from transformers.quantizers import base

    layers: Any = bitsandbytes
    unquantised: Any = getattr(base, "get_keys_to_not_convert", None) or layers.get_keys_to_not_convert  # before 5.0
    options = bitsandbytes_options(setup)
    retained = [*unquantised(model)]
    retained += [] if setup.stack.quantised_towers else [part.removesuffix(".") for part in TOWER_PARTS]
    biases = {path: module.bias for path, module in model.named_modules() if getattr(module, "bias", None) is not None}
    model = layers.replace_with_bnb_linear(model, retained, quantization_config=options)
    for path, layer in list(model.named_modules()):
        if _is_quantised(layer):
            if setup.format_names["hidden_matrix"] == EIGHT_BIT:
                _fill_eight_bit(layer)
            else:
                storage = TORCH_DTYPES[setup.config.compute_dtype] if _flattens(setup) else torch.uint8
                fill_four_bit(layer, setup.format_names["hidden_matrix"], TORCH_DTYPES[setup.loaded_float], storage)
            if path in biases:
                layer.bias = nn.Parameter(biases[path].detach(), requires_grad=False)
    setattr(model, "is_loaded_in_8bit" if options.load_in_8bit else "is_loaded_in_4bit", True)
    model.config.quantization_config = options
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._is_quantized = True  # as ``_assign_is_quantized`` does, whom flash-attn asks for its dtype
    return model


def _is_quantised(layer: nn.Module) -> bool:
    import bitsandbytes

    return isinstance(layer, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt)


def fill_four_bit(layer: Any, format_name: str, dtype: torch.dtype, storage: torch.dtype = torch.uint8) -> None:
    """Give a layer of 4 bits what quantising its weight from ``dtype`` leaves of it, codes in a dtype of their ``storage``."""
    import bitsandbytes

    kind, double = FOUR_BIT[format_name]
    shape, state = layer.weight.shape, quant_state(layer.weight.shape, format_name, dtype)
    codes = torch.empty((ceil_div(shape.numel(), 2 * storage.itemsize), 1), dtype=storage, device="meta")
    recent = {} if ran_by_pointers() else {"quant_storage": storage, "bnb_quantized": True, "module": layer}
    layer.weight = bitsandbytes.nn.Params4bit(
        codes,
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=double,
        quant_type=kind,
        **recent,
    )
    layer.quant_state = state


def ran_by_pointers() -> bool:
    """Tell whether kernels are functions of a C library that take pointers, as up to 0.42: torch has no operators of theirs."""
    return not hasattr(torch.ops.bitsandbytes, "dequantize_4bit")


def quant_state(shape: torch.Size, format_name: str, dtype: torch.dtype) -> Any:
    """Return what quantising a weight of this shape from ``dtype`` leaves beside its codes."""
    from bitsandbytes.functional import QuantState

    kind, double = FOUR_BIT[format_name]
    blocks = ceil_div(shape.numel(), BLOCK)
    nested: dict[str, Any] = {}
    if double:
        second = QuantState(
            absmax=_empty(ceil_div(blocks, SCALES_IN_A_BLOCK)),
            blocksize=SCALES_IN_A_BLOCK,
            code=_empty(NESTED_CODE),
            dtype=torch.float32,
        )
        nested = {"offset": torch.empty((), dtype=torch.float32, device="meta"), "state2": second}
    scales = _empty(blocks, torch.uint8 if double else torch.float32)
    return QuantState(
        absmax=scales, shape=shape, dtype=dtype, blocksize=BLOCK, code=_empty(CODE), quant_type=kind, **nested
    )


def _fill_eight_bit(layer: Any) -> None:
    import bitsandbytes

    codes = torch.empty(layer.weight.shape, dtype=torch.int8, device="meta")
    weight: Any = bitsandbytes.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False)
    weight.CB, weight.SCB = weight.data, _empty(layer.weight.shape[0])
    layer.weight = weight


def _empty(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def quantised_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what quantised layers hold beside their codes, each with the name of its weight."""
    for path, layer in model.named_modules():
        for name, chain in getattr(layer, "parametrizations", {}).items():
            if hasattr(type(chain[0]), "quant_state"):  # as axolotl decodes them
                yield from ((f"{path}.parametrizations.{name}.original", tensor) for tensor in chain.buffers())
        if not _is_quantised(layer):
            continue
        state: Any = getattr(layer.weight, "quant_state", None) or getattr(
            layer, "quant_state", None
        )  # of a view of FSDP1
        second = getattr(state, "state2", None)
        resident = [getattr(layer.weight, "SCB", None)]
        resident += [getattr(state, name, None) for name in ("absmax", "code", "offset")]
        resident += [getattr(second, name, None) for name in ("absmax", "code")]
        yield from ((f"{path}.weight", tensor) for tensor in resident if tensor is not None)


@contextmanager
def cuda_backend() -> Iterator[None]:
    """Run bitsandbytes' operators on ``meta`` tensors with the allocations of its CUDA backend."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        yield
        return
    library = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("gemm_4bit", _gemm_4bit, "AutogradMeta")  # type: ignore[no-untyped-call]
    library.impl("dequantize_4bit.out", lambda *_, **__: None, "AutogradMeta")  # type: ignore[no-untyped-call]
    library.impl("int8_vectorwise_quant", _int8_vectorwise_quant, "AutogradMeta")  # type: ignore[no-untyped-call]
    library.impl("int8_mixed_scaled_mm", _int8_mixed_scaled_mm, "AutogradMeta")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def paged_states() -> Iterator[None]:
    """Let bitsandbytes' paged optimizers step without a card, with states in host memory, and its embeddings have no memory.

    Where its kernels take pointers, none of them does anything.
    """
    try:
        from bitsandbytes import functional
        from bitsandbytes import nn as layers
        from bitsandbytes.optim import optimizer
    except ImportError:
        yield
        return

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        del device
        state = torch.empty(shape, dtype=dtype, device="cpu")
        state.is_paged = True  # type: ignore[attr-defined]
        return state

    def made(*shape: int) -> nn.Module:
        with torch.device("meta"):
            return kind(*shape)  # type: ignore[no-any-return]

    kind: Any = layers.StableEmbedding
    idle: Any = lambda *_, **__: None  # noqa: E731
    answers: dict[str, Any] = {"get_paged": paged, "fill": idle, "prefetch_tensor": idle, "is_on_gpu": lambda _: True}
    if ran_by_pointers():
        answers |= {"lib": mock.MagicMock()}
        answers |= dict.fromkeys(("pre_call", "post_call", "get_ptr", "optimizer_update_32bit"), idle)
    optimizer.GlobalOptimManager.get_instance().initialize()  # which has what earlier jobs overrode
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(functional, **answers))
        stack.enter_context(mock.patch.object(optimizer, "sync_gpu", idle, create=True))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", idle))
        stack.enter_context(mock.patch.object(layers, "StableEmbedding", made))
        yield


def _gemm_4bit(
    x: Tensor,
    codes: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Return the product with a dequantised weight, as the CUDA backend forms it for more than 1536 rows."""
    del codes, absmax, blocksize, quant_type, absmax_code
    scales: list[Tensor] = []  # named until the product is there
    if absmax_8bit is not None:
        assert absmax_offset is not None
        scales.append(torch.empty_like(absmax_8bit, dtype=torch.float32))
        scales.append(scales[0] + absmax_offset)
    weight = torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
    product = torch.nn.functional.linear(x, weight, bias)
    del scales
    return product


def _int8_vectorwise_quant(x: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales of rows, and no columns of outliers, as the CUDA backend forms them."""
    scales = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if not threshold:
        return codes, scales, None
    outliers = x.abs() >= threshold
    columns = torch.empty(0, dtype=torch.int64, device=x.device)
    del outliers
    return codes, scales, columns


def _int8_mixed_scaled_mm(
    x: Tensor,
    codes: Tensor,
    weight: Tensor,
    rows: Tensor,
    columns: Tensor,
    outliers: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the product of codes without columns of outliers, as the CUDA backend forms it."""
    del rows, columns, outliers, bias
    nothing = torch.empty(0, dtype=x.dtype, device=x.device)
    sums = torch.empty((*codes.shape[:-1], weight.shape[0]), dtype=torch.int32, device=x.device)
    return torch.empty_like(sums, dtype=torch.float16).to(x.dtype), nothing
