"""Which modules begin and end as the operations of a tape run: those of its weights, and those around them.

What stands around modules with weights asks for parameters too, as it begins: a model, its layers, their parts, activations,
and what PEFT puts around and beside an adapted projection. The projection that PEFT has wrapped reads the dtype of its first
factor, whose parameter is thus its own as well.

Source:
    deepspeed/runtime/zero/parameter_offload.py (0.19.8), ``_register_deepspeed_module`` and ``ZeROOrderedDict``;
    ``LoraModel`` and ``Linear.forward`` in peft/tuners/lora (0.21.2).
"""

from collections.abc import Iterable, Iterator, Sequence

from memplan.model.spec import TensorNames
from memplan.step.engines.gathered_parameters import GatheredParameters, Visit
from memplan.step.engines.reduced_gradients import EngineBytes
from memplan.step.playing.recomputation import ACTIVATION

BEGINNINGS = ("forward", "again", "backward")
"""Kinds of marks at which modules begin."""

HEAD = "head"
"""Stands for a head whose parameter is the embedding's."""

FIRST, SECOND = ".lora_A", ".lora_B"
"""What PEFT calls the factors of an adapter."""


class Modules:
    """The modules of a model, followed through one forward and backward.

    Args:
        parameters: Names of all parameters, with the numbers of layers, in the order in which the model has them.
        names: What a layer and the embedding are called; a list of layers is no module that runs.
        head: The head's parameter where no module reads it, but the whole model's code.
        dropouts: Modules that one of dropout stands behind.
        scored: Module that one of attention's probabilities stands before; empty for none.
        tied: Whether the head's parameter is the embedding's.
        wrapped: Whether PEFT stands around the model.
        tables: How often rotary tables are formed, by a module of their own.
    """

    def __init__(
        self,
        parameters: Sequence[str],
        names: TensorNames,
        head: str,
        dropouts: tuple[str, ...],
        scored: str,
        *,
        tied: bool,
        wrapped: bool,
        tables: int,
    ) -> None:
        self._list, self._table, self.head = names.layer.partition(".{}")[0], names.embedding, head
        self._own: dict[str, tuple[str, ...]] = {}
        for name in parameters:
            module = name.rpartition(".")[0]
            self._own[module] = (*self._own.get(module, ()), name)
        self._adapted = {module.removesuffix(FIRST) for module in self._own if module.endswith(FIRST)}
        self._around = ("", "peft", "peft.model") if wrapped else ("",)
        self._tables = tables
        self._open: dict[str, set[str]] = {}
        self._way = self._last = ""
        self._tied, self._dropouts, self._scored = tied, dropouts, scored
        self._embedded = False
        self._was_head = False

    def begins(self, way: str, module: str) -> Iterator[Visit]:
        """Yield the modules that begin where one does.

        Args:
            way: ``forward``, ``again`` or ``backward``.
            module: Its name; that of an activation is its own alone.
        """
        if (way, module) == (self._way, self._last):
            return
        if self._reads_head(way, module):
            if self.head:
                return
            module = HEAD
        if module == ACTIVATION:
            module = f"{self._base(self._last).rpartition('.')[0]}.{ACTIVATION}"
            if (way, module) == (self._way, self._last):
                return
        yield from self._tables_formed(way, module)
        yield from self._opened(way, self._outer(module))
        yield from self._itself(way, module)
        self._way, self._last = way, module

    def runs(self, module: str) -> bool:
        """Tell whether a module has parameters of its own, or is an activation."""
        return module in self._own or module == ACTIVATION

    def enters(self, module: str) -> Iterator[Visit]:
        """Yield what begins as backward reaches the result of a part: all around it, and itself."""
        around = [*self._outer(module), module]
        self._open["again"] = set(around)
        yield from self._opened("backward", around)

    def _opened(self, way: str, modules: Iterable[str]) -> Iterator[Visit]:
        open_ = self._open.setdefault(way, set())
        for module in modules:
            if module not in open_:
                open_.add(module)
                yield Visit(module, self.external(module), way)

    def _tables_formed(self, way: str, module: str) -> Iterator[Visit]:
        if way == "forward" and not self._embedded and module.startswith(f"{self._list}."):
            self._embedded = True
            for number in range(self._tables):
                yield Visit(f"tables {number}", (), way)

    def _itself(self, way: str, module: str) -> Iterator[Visit]:
        if (way != "backward" and module.endswith(FIRST)) or (way == "backward" and module in self._adapted):
            yield Visit(f"{self._base(module)}.dropout", (), way)
        if way == "backward":
            yield from self._behind(way, module)
        elif self._scored and module.endswith(self._scored):
            yield Visit(f"{module}.scores", (), way)
        name = f"{module}.base" if module in self._adapted else module
        yield Visit(name, self.parameters(module), way)

    def follows(self, way: str, module: str) -> Iterator[Visit]:
        """Yield what begins as a module has ended: in forward the dropout behind it, in backward the one before it."""
        if self._scored and way == "backward" and module.endswith(self._scored):
            yield Visit(f"{module}.scores", (), way)
        if way != "backward" and self._last != HEAD:
            yield from self._behind(way, module)

    def _behind(self, way: str, module: str) -> Iterator[Visit]:
        base = self._base(module)
        if base.endswith(self._dropouts) and (module.endswith(SECOND) or base not in self._adapted):
            yield Visit(f"{base}.behind", (), way)

    def _reads_head(self, way: str, module: str) -> bool:
        """Tell whether a module is the head, or the embedding read as one: behind layers in forward, first in backward."""
        if self.head and module == self.head.rpartition(".")[0] != self._table:
            return True
        tied = self._tied and module == self._table and (self._embedded if way == "forward" else not self._was_head)
        self._was_head |= tied and way == "backward"
        return tied

    def is_head_read(self, module: str) -> bool:
        """Tell whether forward comes to where the whole model's code reads the head, which no module is asked for."""
        return bool(self.head) and self._reads_head("forward", module)

    def parameters(self, module: str) -> tuple[str, ...]:
        """Return the parameters of a module."""
        return self._own.get(self._table if module == HEAD else module, ())

    def ends(self, way: str, module: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the modules that end where one does, with their parameters."""
        module = HEAD if self._last == HEAD and module == self._table else module
        adapted, base = module in self._adapted, self._base(module)
        own = (way, module) == (self._way, self._last)  # an embedding that is the head's too has begun itself
        if self.head and not own and module in (HEAD, self.head.rpartition(".")[0]):
            if way == "forward":
                yield self._around[-1], (self.head,)
            return
        yield f"{module}.base" if adapted else module, self.parameters(module)
        if (way == "backward" and adapted) or (way != "backward" and module.endswith(SECOND)):
            yield base, self.external(base)

    def external(self, module: str) -> tuple[str, ...]:
        """Return what a module reads of parameters that are another's, once the engine has seen it do so."""
        if self.head and module == self._around[-1]:
            return (self.head,)
        return self._own[f"{module}{FIRST}"] if module in self._adapted else ()

    def _base(self, module: str) -> str:
        return module.removesuffix(FIRST).removesuffix(SECOND)

    def _outer(self, module: str) -> Iterator[str]:
        """Yield what stands around a module, from the outside."""
        yield from self._around
        parts = module.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            if name != self._list:
                yield name
        if module in self._adapted:
            yield module


class Listed:
    """Takes down the modules that begin, in order."""

    def __init__(self, modules: Modules) -> None:
        self.visits: list[Visit] = []
        self.resident = EngineBytes(0, 0)
        self._modules = modules

    def arrive(self, name: str, kind: str = "gradient") -> EngineBytes:
        """Take down what begins."""
        self.visits += begun(self._modules, name, kind)
        return self.resident

    def end(self) -> EngineBytes:
        """Return nothing."""
        return self.resident


def begun(modules: Modules, name: str, kind: str) -> Sequence[Visit]:
    """Return the modules that begin with a mark of a tape."""
    if kind.startswith("left") and name:
        return [*modules.follows(kind.removeprefix("left "), name)]
    if kind not in BEGINNINGS:
        return ()
    return [*(modules.begins(kind, name) if kind != "backward" or modules.runs(name) else modules.enters(name))]


def followed(modules: Modules, gathered: GatheredParameters, name: str, kind: str) -> int:
    """Gather and let go of what a mark of a tape tells, which is no gradient; return the most that is there as modules begin."""
    if kind == "saved":
        gathered.hold(modules.parameters(name))
        return 0
    if kind == "unsaved":
        gathered.unhold(modules.parameters(name))
        return 0
    if kind.startswith("left") and name:
        way = kind.removeprefix("left ")
        for module, parameters in modules.ends(way, name):
            gathered.release(module, parameters, backward=way == "backward")
    return max((gathered.fetch() for _ in begun(modules, name, kind)), default=0)
