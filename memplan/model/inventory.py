"""Every parameter tensor of a model, exact to the element, each with its role."""

from collections.abc import Iterable, Iterator
from dataclasses import field
from itertools import groupby
from math import prod
from typing import Literal, get_args

from memplan.documents.frozen_values import dataclass

Role = Literal["embedding", "hidden_matrix", "expert_matrix", "router", "norm", "bias", "head"]
ROLES: tuple[Role, ...] = get_args(Role)
Kind = tuple[Role, tuple[int, ...], bool, bool, tuple[int, ...], bool, bool, bool]
"""A tensor's role, its shape, whether it is used, frozen, what it is a shard of, and whether it is multiplied in batches, turned, and stays a float."""


@dataclass(frozen=True, slots=True)
class ParameterTensor:
    """One parameter tensor, or one in each of ``count`` layers."""

    name: str  # Its name in the real implementation, with ``{}`` for the layer's index
    shape: tuple[int, ...]  # Dimensions as stored; linear weights are (out, in) unless the family says else
    role: Role  # What decides its format, its optimizer and its gradient
    count: int = 1  # Layers that have one such tensor
    first: int = 0  # Index of the first of these layers
    experts_per_token: int = 0  # For routed experts: how many of ``shape[0]`` a token uses; else 0
    batched: bool = False  # Whether stacked experts are multiplied in batches, which autocast casts, and not in groups
    alternatives: int = (
        0  # Of an expert with a tensor of its own: experts that there are; 0 where one tensor has them all
    )
    used: bool = True  # Whether rows of tokens pass through it: a vision tower gets no gradients from them
    frozen: bool = False  # Whether it does not train where other parameters of the model do
    divided: tuple[int, ...] = ()  # Of a rank's shard, the shape of what the ranks have together; else nothing
    transposed: bool = False  # Whether a linear weight is (in, out), which libraries turn before they quantise it
    stays_float: bool = field(default=False, repr=False)  # Whether a stack leaves it as it was loaded beside codes

    @property
    def kind(self) -> Kind:
        """What tensors with equal states have in common."""
        return (
            self.role,
            self.shape,
            self.used,
            self.frozen,
            self.divided,
            self.batched,
            self.transposed,
            self.stays_float,
        )

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    @property
    def active_elements(self) -> int:
        """Elements of one tensor that take part in computing one token."""
        if not self.used:
            return 0
        if self.experts_per_token:
            return self.elements * self.experts_per_token // (self.alternatives or self.shape[0])
        return self.elements

    def expanded_names(self) -> tuple[str, ...]:
        """Return the names of all ``count`` tensors."""
        return tuple(self.name.replace("{}", str(index)) for index in range(self.first, self.first + self.count))


Inventory = tuple[ParameterTensor, ...]


def expanded(inventory: Inventory) -> Iterator[tuple[str, ParameterTensor]]:
    """Yield (name, tensor) of every single tensor in the order of the model: layer by layer."""
    for (first, count), group in groupby(inventory, key=lambda tensor: (tensor.first, tensor.count)):
        tensors = list(group)
        for index in range(first, first + count):
            for tensor in tensors:
                yield tensor.name.replace("{}", str(index)), tensor


def merged(inventory: Iterable[ParameterTensor]) -> Inventory:
    """Return one tensor for all that share a role, shapes and whether they are used and frozen, with all their copies: what sums need.

    Example:
        >>> [tensor.count for tensor in merged([ParameterTensor("a", (2,), "norm", 3), ParameterTensor("b", (2,), "norm")])]
        [4]
    """
    counts: dict[Kind, int] = {}
    for tensor in inventory:
        kind = tensor.kind
        counts[kind] = counts.get(kind, 0) + tensor.count
    return tuple(
        ParameterTensor(
            "",
            shape,
            role,
            count,
            used=used,
            frozen=frozen,
            divided=divided,
            batched=batched,
            transposed=turned,
            stays_float=stays,
        )
        for (role, shape, used, frozen, divided, batched, turned, stays), count in counts.items()
    )


def parameter_count(inventory: Iterable[ParameterTensor]) -> int:
    """Return the parameters of a model; tied tensors stand in the inventory once."""
    return sum(tensor.elements * tensor.count for tensor in inventory)


def active_parameter_count(inventory: Iterable[ParameterTensor]) -> int:
    """Return the parameters that one token passes through (all of them, without experts)."""
    return sum(tensor.active_elements * tensor.count for tensor in inventory)


def parameters_by_role(inventory: Iterable[ParameterTensor]) -> dict[Role, int]:
    """Return parameter counts by role, for the roles that occur."""
    counts: dict[Role, int] = {}
    for tensor in inventory:
        counts[tensor.role] = counts.get(tensor.role, 0) + tensor.elements * tensor.count
    return counts


def inside(module: str, name: str) -> str:
    """Return the name of a module's part; the layer's own where ``module`` is empty.

    Example:
        >>> inside("mlp", "fc1"), inside("", "fc1")
        ('mlp.fc1', 'fc1')
    """
    return f"{module}.{name}" if module else name
