"""What a repository's name says of the weights in it."""

from __future__ import annotations

import re

_WEIGHTS: tuple[tuple[re.Pattern[str], str, str | None], ...] = tuple(
    (re.compile(rf"(?:^|[-_.]){pattern}(?:[-_.]|$)"), name, frozen)
    for pattern, name, frozen in (
        (r"bnb-4bit|nf4|qlora-4bit", "nf4", "nf4"),
        (r"bnb-8bit", "int8", "llm-int8"),
        (r"gptq-(?:int)?4(?:bit)?|gptq-4bit.*", "gptq-int4", None),
        (r"gptq-(?:int)?8(?:bit)?|gptq-8bit.*", "gptq-int8", None),
        (r"awq(?:-int4|-4bit)?", "awq-int4", None),
        (r"fp8", "fp8-e4m3", None),
        (r"nvfp4", "nvfp4", None),
        (r"mxfp4", "mxfp4", None),
    )
)
"""Endings of repositories' names -> the format of the weights, as ``quantization_config`` would name it, and the one
that they are frozen in below adapters, where that is modelled. bitsandbytes' 4-bit uploads are NF4, AWQ's kernels take
4 bits alone; a GPTQ without a number says nothing.

Source:
    https://github.com/unslothai/unsloth/blob/main/unsloth/models/mapper.py;
    https://github.com/casper-hansen/AutoAWQ/blob/main/awq/models/base.py (w_bit: 4)
"""


def weights_by_name(text: str) -> str | None:
    """Return the format of released weights that a repository's name states, or None.

    Example:
        >>> weights_by_name("unsloth/Llama-3.2-3B-bnb-4bit"), weights_by_name("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4")
        ('nf4', 'gptq-int4')
    """
    name = text.rsplit("/", 1)[-1].lower()
    return next((weights for pattern, weights, _ in _WEIGHTS if pattern.search(name)), None)


def frozen_format(text: str) -> str | None:
    """Return the format below adapters of weights whose format a repository's name states, or None.

    Example:
        >>> frozen_format("a/Llama-3.2-3B-bnb-8bit"), frozen_format("a/Llama-3.2-3B-AWQ")
        ('llm-int8', None)
    """
    name = text.rsplit("/", 1)[-1].lower()
    return next((frozen for pattern, _, frozen in _WEIGHTS if pattern.search(name)), None)


_CODED = re.compile(
    r"(?:^|[-_.])(?:gptq|awq|aqlm|hqq|eetq|exl[23]|gguf|mlx|[2-8]-?bits?|int[48]|w[48]a(?:8|16))(?:[-_.]|$)"
)


def is_coded_by_name(text: str) -> bool:
    """Tell whether a repository's name states that its weights are quantised, in a known format or not.

    Example:
        >>> [is_coded_by_name(name) for name in ("TechxGenus/Meta-Llama-3-8B-GPTQ", "Qwen/Qwen2.5-7B", "a/b-AWQ")]
        [True, False, True]
    """
    return weights_by_name(text) is not None or bool(_CODED.search(text.rsplit("/", 1)[-1].lower()))
