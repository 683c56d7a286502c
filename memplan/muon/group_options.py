"""The keys of a parameter group: their defaults, their checks, and the options that they become."""

from collections.abc import Mapping
from math import inf
from numbers import Real
from typing import Any

import torch

from memplan.errors import unknown_name
from memplan.muon.orthogonalisation.newton_schulz import DEFAULT_CHUNK_COLUMNS, DEFAULT_EPSILON, checked_workspace
from memplan.muon.orthogonalisation.products import quantised_products
from memplan.muon.orthogonalisation.schedules import resolved_schedule
from memplan.muon.state_codecs.codecs import Codec
from memplan.muon.state_codecs.state_formats import ADAMW_FORMATS, DIVERGING, adamw_codecs, momentum_codec
from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice
from memplan.muon.updates.steps import AdamwOptions, MuonOptions

ALGORITHMS = ("muon", "adamw")
ROUNDINGS = ("nearest", "stochastic")
WEIGHT_ROUNDINGS = (*ROUNDINGS, "golden")
CODEC_KERNELS = ("torch", "triton")
MASTERS = ("none", "split")
ADJUSTMENTS = ("original", "match_rms_adamw", "none")
NS_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

DEFAULTS: dict[str, Any] = {
    "algorithm": "muon",
    "lr": 1e-3,
    "lr_scale": 1.0,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "momentum_format": "fp32",
    "block_elements": 128,
    "scale_dtype": "fp32",
    "momentum_rounding": "nearest",
    "codec_kernels": "torch",
    "adjust_lr_fn": None,
    "ns_coefficients": "keller-jordan",
    "ns_steps": 5,
    "ns_dtype": "bf16",
    "ns_workspace": "fast",
    "ns_chunk_columns": DEFAULT_CHUNK_COLUMNS,
    "ns_batch": 1,
    "ns_gram_format": None,
    "eps": DEFAULT_EPSILON,
    "betas": (0.9, 0.999),
    "adamw_eps": 1e-8,
    "adamw_format": "fp32",
    "rounding": "nearest",
    "master": "none",
    "reuse_gradient": True,
    "chunk_elements": 1 << 20,
    "batch_bytes": 0,
    "offload": False,
    "share_replicas": False,
    "projection_rank": 0,
    "projection_interval": 200,
    "low_rank": 0,
}
LAYOUT_KEYS = (
    "algorithm", "momentum_format", "block_elements", "scale_dtype", "adamw_format", "master", "projection_rank",
    "low_rank",
)  # fmt: skip
"""Keys that decide which state tensors there are: a checkpoint must agree in them."""

_TORCH_KEYS = {"params", "name", "param_names", "initial_lr", "role"}
NOT_OFFERED = {
    "amsgrad": "AdamW here has no maximum of its second moment; leave it out",
    "capturable": "a step reads its counters and its gradients' largest magnitude on the host, and cannot be captured "
    "in a CUDA graph; leave it out",
    "differentiable": "a step runs without autograd; leave it out",
    "foreach": "matrices of one shape are updated together in batch_bytes of scratch, which is planned to the byte; give that",
    "fused": "updates choose their kernels themselves; leave it out",
    "maximize": "a step always descends; negate the loss",
}
"""Options of ``torch.optim`` that are refused in words where they are asked for, and accepted where they are off."""

_POSITIVE = ("ns_chunk_columns", "ns_batch", "chunk_elements", "projection_interval")
_CHOICES = {
    "algorithm": ALGORITHMS,
    "momentum_rounding": ROUNDINGS,
    "codec_kernels": CODEC_KERNELS,
    "rounding": WEIGHT_ROUNDINGS,
    "master": MASTERS,
    "ns_dtype": tuple(NS_DTYPES),
    "adamw_format": ADAMW_FORMATS,
}


def checked_keys(group: Mapping[str, Any]) -> None:
    """Raise on a key that means nothing, naming the nearest one that does."""
    for key, value in group.items():
        if key in NOT_OFFERED:
            if value:
                raise OptimizerError(f"{key}: {NOT_OFFERED[key]}")
        elif key not in DEFAULTS and key not in _TORCH_KEYS:
            raise unknown_name("key of a parameter group", str(key), DEFAULTS)


def own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without the keys of ``torch.optim`` that are not offered and are off, as they always are."""
    return {key: value for key, value in group.items() if key not in NOT_OFFERED}


def checked_options(group: Mapping[str, Any]) -> None:
    """Raise unless every option of a group, defaults filled in, is one that can be run.

    Raises:
        UnknownNameError: If a format, schedule or other name is not known.
        OptimizerError: If a number is out of range.
    """
    for key, choices in _CHOICES.items():
        if group[key] not in choices:
            raise unknown_choice(key, group[key], choices)
    if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in ADJUSTMENTS:
        raise unknown_choice("adjust_lr_fn", group["adjust_lr_fn"], ADJUSTMENTS)
    for key, default in DEFAULTS.items():
        expected = _mismatch(key, group[key], default)
        if expected:
            raise OptimizerError(f"{key}: expected {expected}, got {group[key]!r}")
    codec_of(group)
    resolved_schedule(group["ns_coefficients"], group["ns_steps"])
    checked_workspace(group["ns_workspace"], group["ns_chunk_columns"])


def _mismatch(key: str, value: Any, default: Any) -> str:
    """Return what a value should have been by its option's default, or "" where it is that."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(default, int):
        least = 1 if key in _POSITIVE else 0
        whole = isinstance(value, int) and not isinstance(value, bool)
        return "" if whole and value >= least else f"an integer of at least {least}"
    if key == "betas":
        pair = isinstance(value, list | tuple) and len(value) == len(default)
        return "" if pair and all(_is_number(one, 1.0) for one in value) else "two numbers in [0, 1)"
    if isinstance(default, float):
        below = 1.0 if key == "momentum" else inf
        return (
            "" if _is_number(value, below) else "a number in [0, 1)" if below == 1 else "a finite number of at least 0"
        )
    return ""


def _is_number(value: Any, limit: float) -> bool:
    """Tell whether a value is a number, or a tensor of one, that is at least 0 and below ``limit``."""
    number = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return number and not isinstance(value, bool) and 0 <= float(value) < limit


def codec_of(group: Mapping[str, Any]) -> Codec:
    """Return the codec of a group's momentum, by the kernels that it asks for."""
    codec = momentum_codec(group["momentum_format"], group["block_elements"], group["scale_dtype"])
    if group["algorithm"] != "muon" or group["codec_kernels"] == "torch":
        return codec
    from memplan.muon.state_codecs.triton_codecs import in_one_kernel

    return in_one_kernel(codec)


def diverges(group: Mapping[str, Any]) -> bool:
    """Whether training with the group's momentum format is known to diverge."""
    return group["algorithm"] == "muon" and group["momentum_format"] in DIVERGING


def muon_options(group: Mapping[str, Any]) -> MuonOptions:
    """Return the options of a group whose algorithm is ``muon``."""
    gram = group["ns_gram_format"]
    return MuonOptions(
        lr=float(group["lr"]) * group["lr_scale"],
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
        adjust=group["adjust_lr_fn"] or "original",
        codec=codec_of(group),
        schedule=resolved_schedule(group["ns_coefficients"], group["ns_steps"]),
        dtype=NS_DTYPES[group["ns_dtype"]],
        epsilon=group["eps"],
        workspace=group["ns_workspace"],
        chunk_columns=group["ns_chunk_columns"],
        batch=group["ns_batch"],
        chunk_elements=group["chunk_elements"],
        reuse_gradient=group["reuse_gradient"],
        stochastic_momentum=group["momentum_rounding"] == "stochastic",
        stochastic_weights=group["rounding"] != "nearest",
        low_rank=group["low_rank"],
        products=None if gram is None else quantised_products(gram),
    )


def adamw_options(group: Mapping[str, Any], elements: int) -> AdamwOptions:
    """Return the options of a group whose algorithm is ``adamw``, for a tensor of ``elements``."""
    return AdamwOptions(
        lr=float(group["lr"]) * group["lr_scale"],
        betas=tuple(group["betas"]),
        epsilon=group["adamw_eps"],
        weight_decay=group["weight_decay"],
        codecs=adamw_codecs(group["adamw_format"], elements),
        chunk_elements=group["chunk_elements"],
        stochastic_weights=group["rounding"] != "nearest",
    )
