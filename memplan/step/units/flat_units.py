"""Flat tensors of FullyShardedDataParallel (FSDP1): a unit's parameters one after the other, of which each rank has an equal piece."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.model.inventory import ParameterTensor, Role
from memplan.units import ceil_div, round_up

ALIGNMENT_BYTES = 16
"""What a parameter starts at a multiple of, where parameters stay apart (``_get_aligned_numel`` in _flat_param.py, v2.13.0)."""


_BLOCK: tuple[str | tuple[str, ...], ...] = (
    "input_",
    ("self_att", "attention"),
    "post_attention",
    "pre_feedforward",
    "mlp",
)
"""What names of parameters begin with, in the order of LitGPT's ``Block``; what comes behind is last."""


def flat_elements(tensors: Sequence[ParameterTensor], parallel: Parallel, width: int) -> int:
    """Return the elements of a flat tensor, padding between and behind its parameters included.

    Formula:
        Parameters one after the other; where they stay apart (``use_orig_params``), each at a multiple of 16 bytes, and their end
        at a multiple of the ranks.

    Args:
        tensors: A unit's parameters, in order.
        parallel: Ranks, and whether parameters stay apart.
        width: Bytes of an element as it is gathered.

    Source:
        ``_init_flat_param_and_metadata`` in torch/distributed/fsdp/_flat_param.py (v2.13.0).
    """
    total, apart = 0, parallel.flat.use_orig_params
    for tensor in tensors:
        total = (round_up(total, ALIGNMENT_BYTES // width) if apart else total) + tensor.elements
    return round_up(total, parallel.shards) if apart else total


def as_stored(tensor: ParameterTensor, width: int) -> ParameterTensor:
    """Return the codes of four bits of a matrix as one tensor of the dtype that they are stored in, ``width`` bytes an element.

    Source:
        ``quantize_4bit`` in bitsandbytes/functional.py (0.50.2): ``quant_storage``.
    """
    return replace(tensor, shape=(ceil_div(tensor.elements, 2 * width),), role="bias")


def adapter_pieces(adapters: Iterable[ParameterTensor], parallel: Parallel, width: int) -> Iterator[ParameterTensor]:
    """Yield what the first rank holds of adapters, each matrix of which is a unit alone.

    Args:
        parallel: Ranks, and whether parameters stay apart.
        width: Bytes of an element as it is gathered.

    Source:
        ``fsdp_auto_wrap_policy`` in peft/utils/other.py (0.21.2).
    """
    for tensor in adapters:
        yield replace(tensor, shape=(ceil_div(flat_elements([tensor], parallel, width), parallel.shards),))


def flat_pieces(
    inventory: Iterable[ParameterTensor],
    parallel: Parallel,
    width: int,
    role: Role = "hidden_matrix",
    order: Callable[[ParameterTensor], int] | None = None,
) -> Iterator[ParameterTensor]:
    """Yield what the first rank holds of a model: of each unit one tensor, or pieces of those parameters that lie in it.

    A layer is a unit; embedding, final norm and head are another. Padding between parameters counts to the one before it.

    Args:
        parallel: Ranks, and whether parameters stay apart.
        width: Bytes of an element as it is gathered.
        role: Of the tensors that units are where parameters do not stay apart.
        order: The place of a parameter in its unit; without, norms that a layer has itself come last.
    """
    tensors = sorted(inventory, key=lambda tensor: (*_unit(tensor), (order or _is_last)(tensor)))
    for _, group in groupby(tensors, key=_unit):
        unit = list(group)
        left = ceil_div(flat_elements(unit, parallel, width), parallel.shards)
        if not parallel.flat.use_orig_params:
            yield ParameterTensor(
                "flat.{}" * ("{}" in unit[0].name) or "flat", (left,), role, unit[0].count, unit[0].first
            )
            continue
        for place, tensor in enumerate(unit):
            last = place == len(unit) - 1
            taken = left if last else min(left, round_up(tensor.elements, ALIGNMENT_BYTES // width))
            if taken:
                yield replace(tensor, shape=(taken,))
            left -= taken


def place_in_block(tensor: ParameterTensor) -> int:
    """Return the place of a parameter in a unit of LitGPT, whose head comes first.

    Source:
        ``GPT`` and ``Block`` in litgpt/model.py (0.5.13).
    """
    name = tensor.name.partition("{}.")[2]
    if not name:
        return 0 if tensor.role == "head" or tensor.name.startswith("lm_head") else 1
    return next((place for place, part in enumerate(_BLOCK) if name.startswith(part)), len(_BLOCK))


def _is_last(tensor: ParameterTensor) -> bool:
    """Tell whether a parameter comes behind those of attention and feed-forward part: norms that layers have themselves."""
    return tensor.role == "norm" and tensor.name.partition("{}.")[2].count(".") == 1


def _unit(tensor: ParameterTensor) -> tuple[bool, int]:
    return "{}" in tensor.name, tensor.first
