"""Which parameters go to Muon and which to AdamW, decided by what their modules are.

Shape alone cannot tell: an embedding, a head and a router are matrices too, and Muon must not be
given them. What no rule knows is refused, with its name, until the caller assigns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memplan.errors import match_hint
from memplan.muon.group_options import ALGORITHMS
from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memplan.model.inventory import Role

MUON_ROLES: frozenset[Role] = frozenset({"hidden_matrix", "expert_matrix"})
HEAD_NAMES = frozenset({"lm_head", "head", "output", "embed_out", "unembed", "output_projection"})
ROUTER_NAMES = frozenset({"router", "gate"})


@dataclass(frozen=True, slots=True)
class RoutedParameter:
    """Where one parameter went, and why."""

    name: str  # First of its names in the model
    shape: tuple[int, ...]  # Its shape
    role: Role | None  # Its role, as in the planner's inventory; None where the caller assigned it
    algorithm: str  # ``muon``, ``adamw``, or ``frozen`` where it needs no gradient
    reason: str  # The rule that applied


class ParameterGroups(list[dict[str, Any]]):
    """Groups for ``Muon``, a plain list, with the report of what went where.

    Attributes:
        report: One entry for each parameter of the model, tied ones once.
    """

    def __init__(self, groups: list[dict[str, Any]], report: tuple[RoutedParameter, ...]) -> None:
        super().__init__(groups)
        self.report = report

    def __str__(self) -> str:
        width = max((len(entry.name) for entry in self.report), default=0)
        return "\n".join(f"{e.name:{width}}  {e.algorithm:6}  {e.reason}" for e in self.report)


def split_parameters(
    model: nn.Module, assign: Mapping[str, str] | None = None, layer_scale: Callable[[int, int], float] | None = None
) -> ParameterGroups:
    """Return groups for ``Muon``: hidden and expert matrices for Muon, all else for AdamW.

    Args:
        model: Any module. Parameters that need no gradient are left out.
        assign: ``muon`` or ``adamw`` by name, or by pattern (``*.lambda``); goes before every rule.
        layer_scale: Factor of the learning rate from a layer's index and the number of layers; each layer
            then has its own groups.

    Raises:
        OptimizerError: If no rule knows a parameter; the message lists all such.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
        >>> groups = split_parameters(model)
        >>> [(group["algorithm"], len(group["params"])) for group in groups]
        [('muon', 1), ('adamw', 3)]
    """
    if not isinstance(model, nn.Module):
        raise OptimizerError(f"expected a module, got {type(model).__name__}; parameters alone go to Muon(params)")
    names = dict(_named(model))
    lazy = [name for name, entry in names.items() if is_lazy(entry)]
    if lazy:
        raise OptimizerError(f"{lazy[0]} has no shape yet: run the model once before its parameters are given away")
    assign = _checked_assignments(assign or {}, names)
    routed: list[tuple[Any, RoutedParameter]] = []
    unknown: list[str] = []
    for name, entry, role, reason in _roles(model):
        shape = tuple(entry.shape)
        chosen = next((value for pattern, value in assign.items() if fnmatchcase(name, pattern)), None)
        trained = entry if isinstance(entry, torch.Tensor) else entry.anchor
        if not trained.requires_grad:
            routed.append((entry, RoutedParameter(name, shape, role, "frozen", "needs no gradient")))
        elif chosen is not None:
            routed.append((entry, RoutedParameter(name, shape, None, chosen, "assigned")))
        elif role is None:
            unknown.append(f"{name} {shape}: {reason}")
        else:
            algorithm = "muon" if role in MUON_ROLES and len(shape) in (2, 3) else "adamw"
            routed.append((entry, RoutedParameter(name, shape, role, algorithm, reason)))
    if unknown:
        listed = "\n  ".join(unknown)
        raise OptimizerError(f"parameters of no known role; assign them 'muon' or 'adamw' by name:\n  {listed}")
    return ParameterGroups(_grouped(routed, layer_scale), tuple(entry for _, entry in routed))


def _checked_assignments(assign: Mapping[str, str], names: Mapping[str, Any]) -> dict[str, str]:
    """Return assignments, each of which is for some parameter."""
    if not isinstance(assign, Mapping):
        raise OptimizerError(f"assign: expected algorithms by names of parameters, got {assign!r}")
    for pattern, algorithm in assign.items():
        if algorithm not in ALGORITHMS:
            raise unknown_choice("algorithm", algorithm, ALGORITHMS)
        if not any(fnmatchcase(name, pattern) for name in names):
            raise OptimizerError(f"assign: no parameter is named {pattern!r}{match_hint(pattern, names)}")
    return dict(assign)


def named_groups(
    model: nn.Module, assign: Mapping[str, str] | None, adamw: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the groups of ``split_parameters``, each parameter with its name, and AdamW's with options of their own.

    Raises:
        OptimizerError: As there, and if no matrix is left for Muon.
    """
    groups = split_parameters(model, assign)
    if all(group["algorithm"] != "muon" for group in groups):
        raise OptimizerError(f"{type(model).__name__} has no hidden matrix to train, so that there is nothing for Muon")
    own = {"muon": {}, "adamw": dict(adamw or {})}
    return [
        {"algorithm": group["algorithm"], "params": list(zip(group["param_names"], group["params"], strict=True))}
        | own[group["algorithm"]]
        for group in groups
    ]


def _grouped(
    routed: list[tuple[Any, RoutedParameter]], layer_scale: Callable[[int, int], float] | None
) -> list[dict[str, Any]]:
    layers = [_layer_of(entry.name) for _, entry in routed]
    count = max((layer for layer in layers if layer is not None), default=-1) + 1
    groups: dict[tuple[str, int | None], dict[str, Any]] = {}
    for algorithm in ALGORITHMS:
        for (parameter, entry), layer in zip(routed, layers, strict=True):
            if entry.algorithm != algorithm:
                continue
            where = layer if layer_scale is not None else None
            fresh: dict[str, Any] = {"params": [], "algorithm": algorithm, "param_names": []}
            group = groups.setdefault((algorithm, where), fresh)
            group["params"].append(parameter)
            group["param_names"].append(entry.name)
            if layer_scale is not None and where is not None:
                group["lr_scale"] = layer_scale(where, count)
    return list(groups.values())


def _layer_of(name: str) -> int | None:
    """Return the index of the layer that a parameter is in: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _roles(model: nn.Module) -> Iterator[tuple[str, Any, Role | None, str]]:
    """Yield name, parameter or quantised weight, role and reason, each parameter once."""
    modules = dict(model.named_modules())
    embeddings = {id(weight) for module in modules.values() if _is_embedding(module) for weight in _weights(module)}
    heads = _head_modules(model, modules, embeddings)
    seen: set[int] = set()
    for path, module in modules.items():
        for leaf, entry in _entries(module):
            key = id(entry.as_handle().key) if hasattr(entry, "as_handle") else id(entry)
            if key in seen:
                continue
            seen.add(key)
            name = f"{path}.{leaf}" if path else leaf
            role, reason = _role(module, path, leaf, entry, modules, heads, key in embeddings)
            yield name, entry, role, reason


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every name of every parameter or quantised weight."""
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, entry in _entries(module):
            yield (f"{path}.{leaf}" if path else leaf), entry


def _entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own parameters; a quantised weight stands for its codes."""
    for name, child in module.named_children():
        if hasattr(child, "as_handle"):
            yield name, child
    if not hasattr(module, "as_handle"):
        yield from module.named_parameters(recurse=False)


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    for _, entry in _entries(module):
        yield entry.as_handle().key if hasattr(entry, "as_handle") else entry


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "QuantisedLinear")


def _head_modules(model: nn.Module, modules: Mapping[str, nn.Module], embeddings: set[int]) -> dict[int, str]:
    """Return ids of the modules that produce logits, with how that is known."""
    heads: dict[int, str] = {}
    output = getattr(model, "get_output_embeddings", None)
    named = output() if callable(output) else None
    for path, module in modules.items():
        if not _is_linear(module):
            continue
        leaf = path.rsplit(".", 1)[-1]
        if module is named:
            heads[id(module)] = "output embedding of the model"
        elif any(id(weight) in embeddings for weight in _weights(module)):
            heads[id(module)] = "tied to an embedding"
        elif leaf in HEAD_NAMES and _layer_of(path) is None:
            heads[id(module)] = f"a head by its name, {leaf!r}"
    return heads


def _role(
    module: nn.Module,
    path: str,
    leaf: str,
    entry: Any,
    modules: Mapping[str, nn.Module],
    heads: Mapping[int, str],
    in_embedding: bool,
) -> tuple[Role | None, str]:
    kind = type(module).__name__
    if in_embedding:
        return "embedding", f"weight of {kind}"
    if len(entry.shape) < 2:
        is_norm = "norm" in kind.lower() and leaf == "weight"
        return ("norm" if is_norm else "bias"), f"vector of {kind}"
    if "bias" in leaf:
        return "bias", f"biases of {kind}"
    if id(module) in heads:
        return "head", heads[id(module)]
    if "Router" in kind:
        return "router", f"weight of {kind}"
    expert = "experts" in path.split(".") or "Experts" in kind
    if _is_linear(module) and leaf == "weight":
        if _is_router(path, modules):
            return "router", f"a router by its name, {path!r}"
        if not heads and _could_be_head(module, path, modules):
            return None, "a matrix as wide as the vocabulary that may be the head"
        return ("expert_matrix" if expert else "hidden_matrix"), f"weight of {kind}"
    if isinstance(module, nn.MultiheadAttention):
        return "hidden_matrix", f"projection of {kind}"
    if expert and len(entry.shape) == 3:
        return "expert_matrix", f"stacked experts of {kind}"
    return None, f"{leaf!r} of {kind}"


def _is_router(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Tell whether a matrix is the router beside ``experts``, or is inside of one (torchtitan's ``TokenChoiceTopKRouter``)."""
    parent, _, leaf = path.rpartition(".")
    around = modules.get(parent)
    siblings = dict(around.named_children()) if around is not None else {}
    inside = "experts" in siblings or "Router" in type(around).__name__
    return leaf == "shared_expert_gate" or (leaf in ROUTER_NAMES and inside)


def _could_be_head(module: nn.Module, path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a matrix outside the layers has as many outputs as an embedding has rows."""
    rows = {m.num_embeddings for m in modules.values() if isinstance(m, nn.Embedding)}
    width: Any = getattr(module, "out_features", None)
    repeated = _layer_of(path) is not None and len(path.split(".")) > 1
    return width in rows and width != getattr(module, "in_features", None) and not repeated
