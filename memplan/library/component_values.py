"""The bytes of each component, as numbers that say how they come about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memplan.catalog.entries import Kind
from memplan.errors import unknown_name
from memplan.plan.components import COMPONENTS, Component


class ComponentBytes(int):
    """The bytes of a component, and how they come about."""

    name: str  # What the component is called, in every answer
    formula: str  # How the bytes come about, in symbols
    values: Mapping[str, int | str]  # What the symbols stand for
    source: str  # Who says so
    kind: Kind  # ``exact`` integers, ``derived`` by a rule, ``stated`` or ``measured`` allowances

    def __new__(cls, line: Component) -> ComponentBytes:
        """Return the bytes of a line of the sum."""
        self = super().__new__(cls, line.bytes)
        self.name, self.formula, self.values = line.name, line.formula, line.values
        self.source, self.kind = line.source, line.kind
        return self

    def __reduce__(self) -> tuple[type[ComponentBytes], tuple[Component]]:
        """Return what a copy is made from."""
        line = Component(self.name, int(self), self.formula, self.values, self.source, self.kind)
        return ComponentBytes, (line,)


class Components(Mapping[str, ComponentBytes]):
    """Bytes by component; they add up to the expected bytes. A component that a job has none of has 0 bytes."""

    def __init__(self, lines: Mapping[str, Component]) -> None:
        self._sizes = {
            name: ComponentBytes(lines.get(name) or Component(name, 0, "0", {}, "not part of this job", "exact"))
            for name in COMPONENTS
        }

    def __getitem__(self, name: str) -> ComponentBytes:
        try:
            return self._sizes[name]
        except KeyError:
            raise unknown_name("component", str(name), COMPONENTS) from None

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __repr__(self) -> str:
        return f"Components({', '.join(f'{name}={int(size)}' for name, size in self._sizes.items() if size)})"
