"""Parameters and their state: what is refused, what is fresh, and checkpoints copied to the bit."""

import copy
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.muon.group_options import LAYOUT_KEYS, adamw_options, checked_options, muon_options
from memplan.muon.sharded.divisions import (
    is_divided,
    local_state,
    refuse_placements,
    shards_have_whole_blocks,
    shared_state,
)
from memplan.muon.state_codecs.codecs import BlockCodec
from memplan.muon.stores.gradient_stores import GradientStore
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.updates.handles import FloatHandle, Handle, SplitHandle, coded_elements
from memplan.muon.updates.low_rank import low_rank_state
from memplan.muon.updates.offload import home_of, pinned
from memplan.muon.updates.projection import projection_state
from memplan.muon.updates.steps import FIRST, MOMENTUM, SECOND

Group = dict[str, Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What parameters that are no codes may be."""


def checked_handles(group: Group, gradient_format: str | None) -> tuple[list[Handle], list[str]]:
    """Return how an optimizer updates what a group lists, and the names given with it, "" where there is none.

    Args:
        group: A group with all its options; ``params`` is one entry or several, each maybe with its name before it.
        gradient_format: Of a store for each gradient; None for none.

    Raises:
        OptimizerError: If the group's algorithm cannot update an entry.
    """
    entries = group["params"]
    if isinstance(entries, set):
        raise OptimizerError("a set of parameters has no order, which rounding and checkpoints go by: give a list")
    single = isinstance(entries, Tensor) or hasattr(entries, "as_handle")
    named = [entry if isinstance(entry, tuple) else ("", entry) for entry in ([entries] if single else entries)]
    handles = [_handle_of(entry, gradient_format) for _, entry in named]
    if len({handle.key for handle in handles}) < len(handles):
        raise OptimizerError("a group lists a parameter twice, which would be updated twice in a step")
    for handle, (name, _) in zip(handles, named, strict=True):
        checked_parameter(handle, group, name)
        if is_divided(handle.key):
            refuse_beside_shards(handle, group, gradient_format, name or "a parameter")
        elif group["share_replicas"] and group["algorithm"] == "muon":
            refuse_beside_replicas(handle, group, gradient_format, name or "a parameter")
    return handles, [name for name, _ in named]


def _handle_of(entry: Any, gradient_format: str | None) -> Handle:
    if hasattr(entry, "as_handle"):
        handle: Handle = entry.as_handle()
        if gradient_format:
            handle.store = GradientStore(gradient_format, handle.shape)
        return handle
    if is_lazy(entry):
        raise OptimizerError("a parameter has no shape yet: run the model once before its parameters are given away")
    if not isinstance(entry, Tensor):
        raise OptimizerError(
            f"a parameter must be a tensor or a quantised weight, got {type(entry).__name__}; of a model Muon.from_model takes all"
        )
    store = GradientStore(gradient_format, entry.shape) if gradient_format else None
    return FloatHandle(entry, store)


def _refuse_device(label: str, device: torch.device) -> None:
    from memplan.muon.state_codecs.triton_codecs import runs_on

    if not runs_on(device):
        raise OptimizerError(f"{label} on {device.type}: codec_kernels 'triton' takes a CUDA device; use torch")


def checked_parameter(handle: Handle, group: Group, name: str = "") -> None:
    """Raise ``OptimizerError`` unless the group's algorithm can update the parameter."""
    shape, label = tuple(handle.key.shape if is_divided(handle.key) else handle.shape), name or "a parameter"
    if is_traceable_wrapper_subclass(handle.key) and not is_divided(handle.key):
        kind = type(handle.key).__name__
        raise OptimizerError(
            f"{label} is a {kind}, a tensor that wraps others, whose memory cannot be updated in place"
        )
    if handle.key.layout != torch.strided:
        raise OptimizerError(f"{label} of layout {handle.key.layout}: expected dense numbers")
    problem = memory_problem(handle)
    if problem:
        raise OptimizerError(f"{label} {problem}")
    if group["algorithm"] == "muon" and len(shape) not in (2, 3):
        raise OptimizerError(
            f"{label} of shape {shape}: Muon takes matrices, or stacks of them; give it algorithm 'adamw', or use Muon.from_model"
        )
    if group["master"] == "split" and handle.key.dtype != torch.bfloat16:
        raise OptimizerError(f"{label} of dtype {handle.key.dtype}: master 'split' takes bf16 parameters")
    if group["algorithm"] == "muon" and group["codec_kernels"] == "triton" and not handle.key.is_meta:
        _refuse_device(label, handle.key.device)
    for key, done in {
        "low_rank": "its momentum cannot be split at",
        "projection_rank": "cannot be projected to",
    }.items():
        rank = group[key] if group["algorithm"] == "muon" else 0
        both = group["low_rank"] and group["projection_rank"]
        if rank and (len(shape) != 2 or rank > min(shape) or group["offload"] or both):
            raise OptimizerError(f"{label} of shape {shape}: {done} rank {rank}")


def memory_problem(handle: Handle) -> str:
    """Return why a parameter's memory cannot be updated in place, or ""."""
    if handle.key.dtype == torch.float64:
        return "of dtype torch.float64: updates are computed in fp32, and would lose half of its bits"
    if isinstance(handle, SplitHandle) and handle.key.dtype != torch.bfloat16:
        return f"of dtype {handle.key.dtype}: master 'split' keeps the other half of bf16 parameters"
    if isinstance(handle, FloatHandle) and handle.key.dtype not in FLOATS:
        return (
            f"of dtype {handle.key.dtype}: expected fp32, bf16 or fp16, or a model whose weights are codes (quantise_)"
        )
    if isinstance(handle, FloatHandle) and not handle.parameter.is_contiguous():
        return f"of shape {tuple(handle.shape)} is not contiguous in memory"
    return ""


def refuse_beside_shards(handle: Handle, group: Group, gradient_format: str | None, label: str) -> None:
    """Raise ``OptimizerError`` if a DTensor's shards cannot be updated as a group asks for."""
    refuse_placements(handle.key, label)
    if group["share_replicas"]:
        raise OptimizerError(f"{label} is a DTensor, which ranks share already: leave share_replicas out")
    given = {key: group[key] for key in ("projection_rank", "low_rank") if group[key]}
    given |= {"gradient_format": gradient_format} if gradient_format else {}
    if given:
        options = ", ".join(f"{key} {value!r}" for key, value in given.items())
        raise OptimizerError(f"{label} is a DTensor: {options} takes whole matrices, which no rank has")
    block = muon_options(group).codec.block_elements if group["algorithm"] == "muon" else 1
    if not shards_have_whole_blocks(handle.key, block):
        raise OptimizerError(
            f"{label} of shape {tuple(handle.key.shape)} is a DTensor whose shards' rows are no whole blocks of {block}, so that "
            "their codes could not be loaded by other numbers of ranks: give block_elements that divide them, or "
            "momentum_format 'bf16'"
        )


def refuse_beside_replicas(handle: Handle, group: Group, gradient_format: str | None, label: str) -> None:
    """Raise ``OptimizerError`` if ranks that all have a matrix cannot share the work on it as a group asks for."""
    given = [key for key in ("projection_rank", "low_rank") if group[key]] + ["gradient_format"] * bool(gradient_format)
    if given:
        raise OptimizerError(f"{label}: {', '.join(given)} with share_replicas is not offered; leave one of them out")
    if not isinstance(handle, FloatHandle):
        raise OptimizerError(f"{label} is codes, whose gradients no replica sums: leave share_replicas out")


def begins_anew(handle: Handle, state: dict[str, Tensor]) -> bool:
    """Tell whether a parameter needs a fresh state: who clears states begins anew, and on meta there was none."""
    return not state or (not handle.key.is_meta and any(tensor.is_meta for tensor in state.values()))


def follow_parameter(handle: Handle, group: Group, state: dict[str, Tensor]) -> None:
    """Move the state of a parameter that has moved to another device since; ``step`` stays on the CPU."""
    device = handle.key.device
    for name, tensor in state.items():
        home = home_of(device) if group["offload"] and name != "mantissa" else device
        if name != "step" and tensor.device != home:
            state[name] = pinned(tensor.to(home), device) if group["offload"] else tensor.to(home)
    if isinstance(handle, SplitHandle):
        handle.mantissa = state["mantissa"]


def parameter_name(groups: Sequence[Group], key: Tensor) -> str:
    """Return the name of a parameter for messages, or its place in the groups."""
    for position, group in enumerate(groups):
        for index, other in enumerate(group["params"]):
            if other is key:
                names: Sequence[str] | None = group.get("param_names")
                return names[index] if names else f"parameter {index} of group {position}, shape {tuple(key.shape)}"
    return "a parameter"


def first_not_finite(handles: Iterable[Handle]) -> Handle | None:
    """Return a parameter whose gradient is not finite, or None; the host waits once for each device."""
    largest: dict[torch.device, list[tuple[Handle, Tensor]]] = {}
    for handle in handles:
        gradient = handle.gradient(False)
        assert gradient is not None
        if not handle.shape.numel():
            continue
        largest.setdefault(handle.key.device, []).append((handle, gradient.largest().float()))
    for magnitudes in largest.values():
        if not torch.stack([value for _, value in magnitudes]).isfinite().all():
            return next(handle for handle, value in magnitudes if not isfinite(value.item()))
    return None


@torch.inference_mode(False)
def initial_state(handle: Handle, group: Group) -> dict[str, Tensor]:
    """Return the state of a fresh parameter: momentum or moments, and ``step``, one fp32 number on the CPU."""
    elements, parameters = handle.shape.numel(), handle.key.device
    device = home_of(parameters) if group["offload"] else parameters
    if group["algorithm"] == "adamw":
        first, second = adamw_options(group, coded_elements(handle)).codecs
        state = {**first.empty(FIRST, elements, device), **second.empty(SECOND, elements, device)}
    elif group["low_rank"]:
        state = low_rank_state(handle.shape, group["low_rank"], muon_options(group).codec, device)
    elif group["projection_rank"]:
        state = projection_state(handle.shape, group, muon_options(group).codec, device)
    else:
        state = muon_options(group).codec.empty(MOMENTUM, elements, device)
    if group["offload"]:
        state = {name: pinned(tensor, parameters) for name, tensor in state.items()}
    shaped = {name: t.view(handle.shape) if name in (MOMENTUM, FIRST, SECOND) and t.numel() == elements else t
              for name, t in state.items()}  # fmt: skip
    if group["master"] == "split":
        shaped["mantissa"] = torch.zeros(handle.shape, dtype=torch.int16, device=parameters)
    return {**shaped, "step": torch.zeros((), dtype=torch.float32, device="cpu")}


def share_states(content: Group, handles: Iterable[tuple[Handle, Group]]) -> None:
    """Replace the states of DTensors in what ``state_dict`` returned by DTensors, whose local parts they are."""
    saved = [key for group in content["param_groups"] for key in group["params"]]
    for key, (handle, group) in zip(saved, handles, strict=True):
        if is_divided(handle.key):
            content["state"][key] = shared_state(content["state"][key], handle.key, entries_per_element(handle, group))


def entries_per_element(handle: Handle, group: Group) -> dict[str, Fraction]:
    """Return, of each state tensor that holds codes or scales, how many entries stand for an element."""
    if group["algorithm"] == "adamw":
        slots = zip((FIRST, SECOND), adamw_options(group, coded_elements(handle)).codecs, strict=True)
    else:
        slots = zip((MOMENTUM,), (muon_options(group).codec,), strict=True)
    entries: dict[str, Fraction] = {}
    for slot, codec in slots:
        if isinstance(codec, BlockCodec):
            codes, scales = codec.keys(slot)
            entries[codes] = Fraction(codec.code_bytes, codec.block_elements)
            entries[scales] = Fraction(1, codec.block_elements)
    return entries


def restore(saved: Group, groups: Sequence[Group], states: Sequence[dict[str, Tensor]]) -> None:
    """Copy a checkpoint into states, tensor by tensor, and its options into groups.

    Args:
        saved: What ``state_dict`` returned, or ``torch.distributed.checkpoint`` with names in the place of numbers.
        groups: The optimizer's groups.
        states: The states of their parameters, in order.

    Raises:
        OptimizerError: Unless it has the same groups, parameters and state tensors; nothing has changed then.
    """
    theirs = _saved_states(saved, groups, states)
    for copied, state in zip(theirs, states, strict=True):
        for name, tensor in state.items():
            tensor.copy_(copied[name])
    for group, options in zip(groups, saved["param_groups"], strict=True):
        group.update(_live_options(options))


def _saved_states(saved: Group, groups: Sequence[Group], states: Sequence[dict[str, Tensor]]) -> list[Any]:
    """Return the states of a sound checkpoint in the order of ``states``."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        raise OptimizerError("not a checkpoint of this optimizer: it has no 'state' and 'param_groups'")
    if len(saved["param_groups"]) != len(groups):
        raise OptimizerError(f"checkpoint with {len(saved['param_groups'])} groups for {len(groups)}")
    for index, (theirs, ours) in enumerate(zip(saved["param_groups"], groups, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            raise OptimizerError(
                f"group {index}: checkpoint with {len(theirs['params'])} parameters for {len(ours['params'])}"
            )
        for key in LAYOUT_KEYS:
            if key not in theirs:
                raise OptimizerError(f"group {index}: the checkpoint has no {key!r}; another optimizer wrote it")
            if theirs[key] != ours[key]:
                raise OptimizerError(f"group {index}: checkpoint with {key} {theirs[key]!r} for {ours[key]!r}")
        checked_options({**ours, **_live_options(theirs)})
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    theirs = [local_state(saved["state"].get(key), state) for key, state in zip(keys, states, strict=True)]
    for key, copied, state in zip(keys, theirs, states, strict=True):
        _checked_tensors(key, copied, state)
    return theirs


def _checked_tensors(index: Any, theirs: Any, ours: dict[str, Tensor]) -> None:
    if theirs is None and isinstance(index, str):
        raise OptimizerError(
            f"{index}: checkpoint without its state. torch.distributed.checkpoint.state_dict leaves out the state of "
            "parameters that need no gradient, as codes: save and load the optimizer itself, {'optimizer': optimizer}"
        )
    if not isinstance(theirs, dict) or theirs.keys() != ours.keys():
        given = sorted(theirs) if isinstance(theirs, dict) else "nothing"
        raise OptimizerError(f"parameter {index}: checkpoint with state {given} for {sorted(ours)}")
    for name, tensor in ours.items():
        other = theirs[name]
        if not isinstance(other, Tensor) or other.shape != tensor.shape or other.dtype != tensor.dtype:
            given = f"{other.dtype} {tuple(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
            raise OptimizerError(
                f"parameter {index}: {name} is {given} in the checkpoint, {tensor.dtype} {tuple(tensor.shape)} here"
            )


def _live_options(saved: Group) -> Group:
    """Return the options of a saved group, which replace those of the live one; parameters and states stay."""
    options = {key: copy.deepcopy(value) for key, value in saved.items() if key not in ("params", "offload")}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return options
