"""The ``quantization_config`` of a released model, as one short format name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.errors import InvalidFileError

Answer = tuple[str | None, tuple[str, ...]]


def quantization_format(config: Mapping[str, Any], source: str) -> Answer:
    """Return the format that released weights are stored in, or None, and notes about it.

    Formats are named ``nf4``, ``fp4``, ``int8``, ``fp8-e4m3``, ``mxfp4``, ``nvfp4``, and
    ``gptq-int4``, ``awq-int4`` and so on where groups of weights share a scale.

    Args:
        config: All keys of ``config.json``.
        source: The file, for messages.

    Raises:
        InvalidFileError: ``quantization_config`` is no object.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None, ()
    if not isinstance(quantization, dict):
        raise InvalidFileError([f"{source}: quantization_config: expected an object, got {quantization!r:.60}"])
    name = _format_name(quantization)
    if name is None:
        method = quantization.get("quant_method")
        note = f"quantization_config {method!r:.60} is not known: weights are taken as the training config says"
        return None, (note,)
    return name, (f"released weights are quantised: {name}",)


def _format_name(quantization: Mapping[str, Any]) -> str | None:
    method = quantization.get("quant_method")
    if method == "bitsandbytes" or (
        method is None and ("load_in_4bit" in quantization or "load_in_8bit" in quantization)
    ):
        return _bitsandbytes(quantization)
    if method in ("gptq", "awq"):
        bits = quantization.get("bits", quantization.get("w_bit"))
        return f"{method}-int{bits}" if type(bits) is int and 2 <= bits <= 8 else None
    if method in ("fp8", "fbgemm_fp8"):
        return f"fp8-{_text(quantization.get('fmt')) or 'e4m3'}"
    if method == "mxfp4":
        return "mxfp4"
    if method == "compressed-tensors":
        return _compressed_tensors(quantization)
    return None


def _bitsandbytes(quantization: Mapping[str, Any]) -> str | None:
    if quantization.get("load_in_4bit") is True:
        kind = quantization.get("bnb_4bit_quant_type", "fp4")
        return kind if kind in ("nf4", "fp4") else None
    return "int8" if quantization.get("load_in_8bit") is True else None


def _compressed_tensors(quantization: Mapping[str, Any]) -> str | None:
    """Return the format of the weights if all groups of a compressed-tensors config share one."""
    if quantization.get("format") == "nvfp4-pack-quantized":
        return "nvfp4"
    groups = quantization.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    schemes = [group.get("weights") for group in listed if isinstance(group, dict)]
    names = {_scheme(weights) for weights in schemes if isinstance(weights, dict)}
    return names.pop() if len(names) == 1 else None


def _scheme(weights: Mapping[str, Any]) -> str | None:
    bits, kind = weights.get("num_bits"), weights.get("type")
    if type(bits) is not int or not 2 <= bits <= 8:
        return None
    if kind == "float":
        return "fp8-e4m3" if bits == 8 else None
    return f"int{bits}" if kind == "int" else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value in ("e4m3", "e5m2") else None
