"""Which layers of a decoder have experts, as a number or a pattern of zeros and ones says it.

Source:
    ``moe_freq_type`` in megatron/training/arguments.py (NVIDIA/Megatron-LM 000c4ac2); ``get_gpt_decoder_layer_specs`` in
    megatron/core/models/gpt/gpt_layer_specs.py (megatron-core 0.16.1), lines 579 to 596
"""

from __future__ import annotations

import ast
import re

from memplan.model.families.config_values import MAXIMUM_LAYERS

ALLOWED = re.compile(r"[,\d\[\]()+*\s]*")


def expert_layers(text: str, layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether it has experts; None where the text says it of another number of layers, or not at all.

    Args:
        text: A number, of which every layer whose index is a multiple has experts, or a Python expression of lists.

    Example:
        >>> expert_layers("([0]*1+[1]*2)", 3), expert_layers("2", 3)
        ((False, True, True), (True, False, True))
    """
    text = text.strip()
    if text.isdecimal() and 0 < int(text) <= MAXIMUM_LAYERS:
        return tuple(index % int(text) == 0 for index in range(layers))
    pattern = _evaluated(text)
    if pattern is None or len(pattern) != layers or not {0, 1}.issuperset(pattern):
        return None
    return tuple(map(bool, pattern))


def _evaluated(text: str) -> list[int] | None:
    """Return the list that sums and multiples of lists make; None for anything else."""
    if not ALLOWED.fullmatch(text) or len(text) > MAXIMUM_LAYERS:
        return None
    try:
        return _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        return [_number(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        total = _list(node.left) + _list(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        part, times = (node.left, node.right) if isinstance(node.right, ast.Constant) else (node.right, node.left)
        count = _number(times)
        if count > MAXIMUM_LAYERS:
            raise ValueError
        total = _list(part) * count
    else:
        raise ValueError
    if len(total) > MAXIMUM_LAYERS:
        raise ValueError
    return total


def _number(node: ast.expr) -> int:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        raise ValueError
    return node.value
