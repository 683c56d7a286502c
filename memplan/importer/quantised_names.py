"""What a repository's name says of the weights in it."""

from __future__ import annotations

import re

_WEIGHTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"(?:^|[-_.]){pattern}(?:[-_.]|$)"), name)
    for pattern, name in (
        (r"bnb-4bit|nf4|qlora-4bit", "nf4"),
        (r"bnb-8bit", "int8"),
        (r"gptq-(?:int)?4(?:bit)?|gptq-4bit.*", "gptq-int4"),
        (r"gptq-(?:int)?8(?:bit)?|gptq-8bit.*", "gptq-int8"),
        (r"awq(?:-int4|-4bit)?", "awq-int4"),
        (r"fp8", "fp8-e4m3"),
        (r"nvfp4", "nvfp4"),
        (r"mxfp4", "mxfp4"),
    )
)
"""Endings of repositories' names -> the format of the weights, as ``quantization_config`` would name it. bitsandbytes'
4-bit uploads are NF4, AWQ's kernels take 4 bits alone; a GPTQ without a number says nothing.

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
    return next((weights for pattern, weights in _WEIGHTS if pattern.search(name)), None)


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
