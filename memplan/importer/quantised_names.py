"""What a repository's name says of the weights in it."""

import re

_WEIGHTS: tuple[tuple[re.Pattern[str], str, str | None], ...] = tuple(
    (re.compile(rf"(?:^|[-_./]){pattern}(?:[-_.]|$)"), name, frozen)
    for pattern, name, frozen in (
        (r"mlx(?:-community/.*)?", "mlx", None),
        (r"gguf|i?q[1-8][-_](?:[01]|k|xxs|xs|s|m)(?:[-_][sml])?", "gguf", None),
        (r"bnb-4bit|nf4|qlora-4bit", "nf4", "nf4"),
        (r"bnb-8bit", "int8", "llm-int8"),
        (r"gptq-(?:int)?8(?:bit)?|gptq-8bit.*", "gptq-int8", None),
        (r"gptq-(?:int)?3(?:bit)?|gptq-3bit.*", "gptq-int3", None),
        (r"gptq(?:-(?:int)?4(?:bit)?|-4bit.*)?", "gptq-int4", None),
        (r"awq(?:-int4|-4bit)?", "awq-int4", None),
        (r"fp8", "fp8-e4m3", None),
        (r"nvfp4", "nvfp4", None),
        (r"mxfp4", "mxfp4", None),
        *((word, word, None) for word in ("aqlm", "hqq", "eetq", "exl2", "exl3")),
        (r"[2-8]-?bits?|int[48]|w[48]a(?:8|16)", "quantised", None),
    )
)
"""Words of repositories' names -> the format of the weights, as ``quantization_config`` would name it, and the one
that they are frozen in below adapters, where that is modelled. bitsandbytes' 4-bit uploads are NF4, AWQ's kernels take
4 bits alone, and so do GPTQ's releases whose name has no number; in whose formats MLX and GGUF are, a name does not say.

Source:
    https://github.com/unslothai/unsloth/blob/main/unsloth/models/mapper.py;
    https://github.com/casper-hansen/AutoAWQ/blob/main/awq/models/base.py (w_bit: 4);
    https://github.com/AutoGPTQ/AutoGPTQ/blob/main/README.md (bits=4: quantize model to 4-bit)
"""
_WIDE = re.compile(r"unquantized$")
"""The end of names of weights that were trained to be quantised and are not."""


def _said(text: str) -> tuple[str | None, str | None]:
    name = text.lower()
    if _WIDE.search(name):
        return None, None
    name = name if name.startswith("mlx-community/") else name.rsplit("/", 1)[-1]
    return next(((weights, frozen) for pattern, weights, frozen in _WEIGHTS if pattern.search(name)), (None, None))


def weights_by_name(text: str) -> str | None:
    """Return the format of released weights that a repository's name states, or None where it says nothing of any.

    Example:
        >>> weights_by_name("unsloth/Llama-3.2-3B-bnb-4bit"), weights_by_name("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4")
        ('nf4', 'gptq-int4')
    """
    return _said(text)[0]


def frozen_format(text: str) -> str | None:
    """Return the format below adapters of weights whose format a repository's name states, or None.

    Example:
        >>> frozen_format("a/Llama-3.2-3B-bnb-8bit"), frozen_format("a/Llama-3.2-3B-AWQ")
        ('llm-int8', None)
    """
    return _said(text)[1]
