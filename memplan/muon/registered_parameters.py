"""The parameters of an optimizer: how each is updated, where it stands, and what its state was made for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memplan.muon.group_options import DEFAULTS, LAYOUT_KEYS, checked_options
from memplan.muon.parameter_state import memory_problem, parameter_name
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.updates.handles import Handle

Group = dict[str, Any]
STATE_KEYS = (*LAYOUT_KEYS, "offload")
"""Options of a group that decide which state tensors its parameters have, and where."""


@dataclass(slots=True)
class RegisteredParameters:
    """What an optimizer knows of its parameters beside groups and state; plain values, to be copied and pickled."""

    handles: dict[Tensor, Handle] = field(default_factory=dict)  # How each is updated
    # In what order they came, which stochastic rounding depends on.
    places: dict[Tensor, int] = field(default_factory=dict)
    layouts: dict[Tensor, Group] = field(default_factory=dict)  # The options by which their states were made
    shapes: dict[Tensor, torch.Size] = field(default_factory=dict)  # Likewise, of this rank's part
    # The options of each group, by its identity, when they were last found to be sound.
    checked: dict[int, list[Any]] = field(default_factory=dict)

    def add(self, handle: Handle, group: Group) -> None:
        """Remember a new parameter."""
        self.handles[handle.key] = handle
        self.places[handle.key] = len(self.places)
        self.shapes[handle.key] = handle.shape
        self.layouts[handle.key] = {key: group[key] for key in STATE_KEYS}

    def of(self, groups: Sequence[Group]) -> Iterator[tuple[Handle, Group]]:
        """Yield the handle of every parameter that ``groups`` list, with its group.

        Raises:
            OptimizerError: If one was never added.
        """
        for group in groups:
            for key in group["params"]:
                if key not in self.handles:
                    name = parameter_name(groups, key)
                    raise OptimizerError(f"{name} is in a group and has no state: give it to add_param_group")
                if self.handles[key].key is not key:
                    name = parameter_name(groups, key)
                    raise OptimizerError(
                        f"{name}: other codes have taken the place of those that the optimizer was given, as "
                        "load_state_dict(assign=True) puts them: make the optimizer after that"
                    )
                yield self.handles[key], group

    def refuse_changes(self, ready: Sequence[tuple[Handle, Group]], groups: Sequence[Group]) -> None:
        """Raise if a group has options that cannot be run, or that its parameters' states were not made for."""
        for group in {id(group): group for _, group in ready}.values():
            lost = [key for key in DEFAULTS if key not in group]
            if lost:
                raise OptimizerError(f"a group has lost its option {lost[0]!r}: options are changed, and not deleted")
            values = [_value(group[key]) for key in DEFAULTS]
            if self.checked.get(id(group)) != values:
                checked_options(group)
                self.checked[id(group)] = values
        for handle, group in ready:
            problem = memory_problem(handle) or self._changed(handle, group)
            if problem:
                raise OptimizerError(f"{parameter_name(groups, handle.key)} {problem}")

    def _changed(self, handle: Handle, group: Group) -> str:
        """Return in what a parameter or its group no longer fits its state, or ""."""
        if handle.shape != self.shapes[handle.key]:
            return f"has shape {tuple(handle.shape)} now, and its state is for {tuple(self.shapes[handle.key])}"
        for key, value in self.layouts[handle.key].items():
            if group[key] != value:
                return (
                    f"has a state that was made with {key} {value!r}, and its group now says {group[key]!r}; "
                    "a state cannot change its form: make a new optimizer"
                )
        return ""


def _value(option: Any) -> Any:
    """Return an option as it is now: a tensor may be changed in place."""
    return tuple(option.flatten().tolist()) if isinstance(option, Tensor) else option
