"""Names of state formats, and the codecs that they stand for."""

import torch

from memplan.muon.state_codecs.block_codecs import GaussianCodec, LinearCodec, LogCodec, NotesCodec, TernaryCodec
from memplan.muon.state_codecs.codecs import SCALE_DTYPES, Codec, PlainCodec
from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice

DEFAULT_BLOCK = 128
DIVERGING = frozenset({"int2-notes"})
"""Formats with which training diverges; they are kept to show that."""

MOMENTUM_FORMATS = (
    "fp32", "bf16", "int8", "int4", "int2", "int2-no-zero", "int2-notes", "gauss4", "gauss3", "gauss2", "ternary",
)  # fmt: skip

ADAMW_FORMATS = ("fp32", "bf16", "int8")
ADAMW_BLOCK = 256
ADAMW_EXEMPT_BELOW = 4096
"""Smaller tensors keep fp32 states, as in bitsandbytes (``min_8bit_size``): they cost nothing and matter most."""


def momentum_codec(name: str, block_elements: int = DEFAULT_BLOCK, scale_dtype: str = "fp32") -> Codec:
    """Return the codec of a momentum format.

    Args:
        name: One of ``MOMENTUM_FORMATS``.
        block_elements: Elements that share a scale, a multiple of 8; ignored by fp32 and bf16.
        scale_dtype: ``fp32``, ``bf16`` or ``fp16``; ignored by fp32 and bf16.

    Raises:
        UnknownNameError: If a name is not known.
        OptimizerError: If the block is no positive multiple of 8.
    """
    if name not in MOMENTUM_FORMATS:
        raise unknown_choice("momentum format", name, MOMENTUM_FORMATS)
    if scale_dtype not in SCALE_DTYPES:
        raise unknown_choice("scale dtype", scale_dtype, SCALE_DTYPES)
    if (
        isinstance(block_elements, bool)
        or not isinstance(block_elements, int)
        or block_elements < 8
        or block_elements % 8
    ):
        raise OptimizerError(f"block_elements: expected a positive multiple of 8, got {block_elements!r}")
    if name in ("fp32", "bf16"):
        return PlainCodec(torch.float32 if name == "fp32" else torch.bfloat16)
    if name.startswith("gauss"):
        return GaussianCodec(int(name[-1]), block_elements, scale_dtype)
    if name == "ternary":
        return TernaryCodec(2, block_elements, scale_dtype)
    if name == "int2-notes":
        return NotesCodec(2, block_elements, scale_dtype)
    return LinearCodec(int(name[3]), block_elements, scale_dtype, zero=name != "int2-no-zero")


def adamw_codecs(name: str, elements: int) -> tuple[Codec, Codec]:
    """Return the codecs of AdamW's first and second moment for a tensor of ``elements``.

    In 8 bits both take 1 + 4/256 bytes for each element: linear codes, and powers without a zero.

    Raises:
        UnknownNameError: If ``name`` is not one of ``ADAMW_FORMATS``.
    """
    if name not in ADAMW_FORMATS:
        raise unknown_choice("AdamW format", name, ADAMW_FORMATS)
    if name == "int8" and elements >= ADAMW_EXEMPT_BELOW:
        return LinearCodec(8, ADAMW_BLOCK), LogCodec(8, ADAMW_BLOCK)
    plain = PlainCodec(torch.bfloat16 if name == "bf16" else torch.float32)
    return plain, plain
