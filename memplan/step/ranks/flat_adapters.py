"""One rank under FullyShardedDataParallel (FSDP1) with adapters: each of their matrices is a unit alone, inside the layer's.

A layer's frozen weights are gathered from before its forward, or backward, to its end; an adapter's matrix as it runs, and as
backward reaches its result. Each gradient of an adapter is reduced as soon as it is formed, and the rank's piece stays.

Source:
    ``_pre_forward``, ``_post_forward``, ``_pre_backward_hook``, ``_post_backward_hook``,
    ``_register_post_backward_reshard_only_hook`` and ``_prefetch_handle`` in torch/distributed/fsdp/_runtime_utils.py,
    ``get_handle_to_backward_prefetch`` in _exec_order_utils.py (v2.13.0); ``fsdp_auto_wrap_policy`` in peft/utils/other.py
    (0.21.2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memplan.step.collectives.gathered_units import Unit
from memplan.step.engines.cut_sections import Segment, Segments
from memplan.step.engines.engine_step import EnginePass, Following, engine_pass
from memplan.step.engines.gathered_step import through_forward
from memplan.step.engines.module_visits import FIRST, SECOND
from memplan.step.engines.reduced_gradients import EngineBytes
from memplan.step.model_on_tape import PlayedModel
from memplan.step.playing.recomputation import ACTIVATION
from memplan.step.ranks.forwards_alone import referred
from memplan.step.ranks.reduced_pass import Pass
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.states.parallel_shards import numbered
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode

ROOT = ""
"""Name of the model itself, whose unit has all that no layer has."""


def adapted_passes(step: ShardedStep, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of the first, or of each later, forward and backward.

    Args:
        base: What is there throughout the first.
        mode: ``again`` for later ones.
    """
    steps, walk = (
        step.inputs.setup.config.gradient_accumulation_steps,
        engine_pass(step.inputs, step.taped, visits=True),
    )
    ahead = step.flat is not None and step.flat.backward_prefetch == "pre"
    layers = tuple(_without_casts(part) if ahead else part for part in walk.layers)
    retained = retained_by_hooks(step)

    def forward(walk: EnginePass, following: Following, played: PlayedModel) -> Iterator[Instant]:
        yield from referred(step, (yield from through_forward(walk, following, played)))

    walk = replace(walk, forward=forward, layers=layers, left=retained * 2, left_gradient=retained)
    if mode != "again":
        passes = [Pass("first", reduces=steps == 1)]
    else:
        passes = [Pass("again", reduces, beside=True) for reduces in ((False, True) if steps > 2 else (True,))]
    for of in passes:
        before, gathered = step.head_instant, ""
        for instant in walk.instants(FlatGathers(step, of)):
            told = [instant]
            if instant.operation == "gather" and instant.name.startswith("layer ") and instant.name != gathered:
                top = before == step.head_instant  # by a hook of what the layer returned, while the one above is there
                told = [replace(instant, name=before), *([] if top else told)]
                before = gathered = instant.name
            yield from told if mode == "again" else (one.around(base) for one in told)


def retained_by_hooks(step: ShardedStep) -> Form:
    """Return what the hook of a layer's frozen weights keeps twice until backward has ended: the leaf that it ran again from, and the gradient of that.

    Source:
        ``_register_post_backward_reshard_only_hook`` and ``_post_backward_final_callback`` in
        torch/distributed/fsdp/_runtime_utils.py, ``register_multi_grad_hook`` in torch/autograd/graph.py (v2.13.0);
        ``LlamaModel.forward`` in transformers/models/llama/modeling_llama.py (4.51.3), whose checkpointing calls wrapped layers.
    """
    inputs = step.inputs
    row = inputs.spec.hidden_size * inputs.setup.residual_bytes
    again = step.reentrant and inputs.setup.stack.checkpointing.calls_units
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, row) if again else ZERO


def _without_casts(part: Segments) -> Segments:
    """Return a layer without the moments of its last adapter where that is computed again with its first matrix gathered.

    Backward reaches the result of the second matrix, which gathers the first ahead, before anything is computed again: PEFT
    then sees a weight in the compute dtype, and casts nothing. What is there meanwhile is no more than just before.
    """
    marks = [mark for _, _, mark in part.backward]
    first = next((place for place, mark in enumerate(marks) if mark is not None and mark.kind == "again"), 0)
    reached = marks[first - 1] if first else None
    if reached is None or not reached.name.endswith(SECOND):
        return part
    base, retained, inside = reached.name.removesuffix(SECOND), list[Segment](), False
    for moments, marked, mark in part.backward:
        retained.append(((), None, mark) if inside else (moments, marked, mark))
        if mark is not None and mark.name in (base, reached.name):
            inside = mark.kind == "left again" if mark.name == base else inside and mark.kind != "again"
    return replace(part, backward=tuple(retained))


@dataclass(slots=True)
class _Handle:
    """A unit as FSDP1 follows it through a step."""

    unit: Unit  # What it takes
    place: int = -1  # Its place among the units whose forward has ended; -1 before that
    gathered: bool = False  # Whether it is whole
    ahead: bool = False  # Whether it was gathered before it was asked for
    awaited: bool = False  # Whether a result of it has a hook that backward will reach


def _nobody(name: str) -> None:
    """Take no notice of a unit."""


class FlatGathers:
    """Units that are gathered and let go of through one forward and backward, and the gradients of adapters.

    Args:
        gathers: Is told the name of each unit that has to be whole, as it is asked for.
        lets_go: Is told the name of each, but of the root, that no longer has to be.
    """

    def __init__(
        self,
        step: ShardedStep,
        of: Pass,
        gathers: Callable[[str], None] = _nobody,
        lets_go: Callable[[str], None] = _nobody,
    ) -> None:
        assert step.flat is not None
        self._gathers, self._lets_go = gathers, lets_go
        self._of, self._prefetch = of, step.flat.backward_prefetch
        self._layer = step.inputs.spec.names.layer
        self._hidden = step.reentrant  # forward runs without gradients, so that no result has a hook
        self._handles = {name.rpartition(".")[0]: _Handle(unit) for name, unit in step.adapters.items()}
        for run, unit in zip(step.taped.runs, step.units, strict=True):
            for number in range(run.first, run.first + run.count):
                self._handles[numbered(self._layer, number)] = _Handle(unit)
        self._handles[ROOT] = _Handle(step.first, gathered=True)
        self._order: list[str] = []
        self._open, self._backward = "", False
        self._leaving = ""  # a layer whose gradients are formed, which is let go of behind the hook of the next one
        self._communication = step.first.gathered_bytes
        whole = sum(unit.reduced_bytes for unit in step.adapters.values())
        self._gradients = whole if of.beside else 0
        self._root_narrow = step.first.copying_bytes

    @property
    def resident(self) -> EngineBytes:
        """What is there between two marks."""
        return EngineBytes(self._communication, self._gradients)

    def arrive(self, name: str, kind: str = "gradient") -> EngineBytes:
        """Take in what is marked; return the most that is there besides meanwhile."""
        most = self._communication + self._root_narrow
        self._root_narrow = 0
        if kind == "gradient":
            return self._reduce(name)
        if kind == "forward" and name != ACTIVATION:
            most = max(most, self._enter(name))
        if kind in ("forward", "again") and self._is_adapter(name):
            most = max(most, self._unshard(name))
        elif kind in ("left forward", "left again") and self._is_adapter(name):
            self._left(name, hooked=kind == "left again" or not self._hidden)
        elif kind == "backward":
            most = max(most, self._reach(name))
        elif kind == "left backward" and name in self._handles and not self._is_adapter(name):
            self._leaving = name
        return EngineBytes(most, self._gradients)

    def end(self) -> EngineBytes:
        """Let go of all that is gathered still."""
        most = self.resident
        self._communication = 0
        return most

    def _is_adapter(self, name: str) -> bool:
        return name in self._handles and name.endswith((FIRST, SECOND))

    def _enter(self, name: str) -> int:
        """Leave a layer that ends before a module, and gather the one that the module begins; return the most meanwhile."""
        layer = next((own for own in self._layers_of(name)), ROOT)
        if layer == self._open:
            return self._communication
        if self._open:
            self._left(self._open, hooked=True)
        self._open = layer
        return self._unshard(layer) if layer else self._communication

    def _layers_of(self, name: str) -> Iterator[str]:
        """Yield the layer that a module is in, or nothing."""
        before, _, behind = self._layer.partition("{}")
        if name.startswith(before):
            own = numbered(self._layer, name.removeprefix(before).partition(".")[0])
            if own + behind in self._handles:
                yield own + behind

    def _unshard(self, name: str) -> int:
        """Gather a unit that is not whole; return the most that is there meanwhile."""
        self._gathers(name)
        handle = self._handles[name]
        if handle.gathered:
            return self._communication
        handle.gathered = True
        most = self._communication + handle.unit.copied_bytes
        self._communication += handle.unit.gathered_bytes
        return most

    def _reshard(self, name: str) -> None:
        if name != ROOT:
            self._lets_go(name)
        handle = self._handles[name]
        if handle.gathered and name != ROOT:
            self._communication -= handle.unit.gathered_bytes
            handle.gathered = False
        handle.ahead = False

    def _left(self, name: str, *, hooked: bool) -> None:
        """Note that a unit's forward has ended, and let go of it; ``hooked`` where its results need gradients."""
        handle = self._handles[name]
        if handle.place < 0:
            handle.place = len(self._order)
            self._order.append(name)
        self._reshard(name)
        handle.awaited |= hooked

    def _reach(self, name: str) -> int:
        """Gather the unit whose result backward reaches, and the next one ahead; return the most meanwhile."""
        most = self._communication
        if not self._backward:
            most += self._handles[ROOT].unit.moved_bytes
            self._backward, self._open = True, ROOT
            self._left(ROOT, hooked=True)
            name = name if name in self._handles else ROOT
        if name not in self._handles or not self._handles[name].awaited:
            return most
        most = max(most, self._unshard(name))
        self._handles[name].awaited = False
        most = max(most, self._gather_ahead(name)) if self._prefetch == "pre" else most
        if self._leaving:
            most, self._leaving = max(most, self.let_go(self._leaving)), ""
        return most

    def _gather_ahead(self, name: str) -> int:
        place = self._handles[name].place - 1
        following = self._order[place] if place >= 0 else ROOT
        handle = self._handles[following]
        if place < 0 or not handle.awaited or handle.ahead:
            return self._communication
        most = self._unshard(following)
        handle.ahead = True
        return most

    def let_go(self, name: str) -> int:
        """Let go of a unit that backward is done with; return the most bytes as the next one is gathered."""
        most = self._communication
        self._reshard(name)
        return max(most, self._gather_ahead(name)) if self._prefetch == "post" else most

    def _reduce(self, name: str) -> EngineBytes:
        """Take in the gradient of an adapter's matrix, which is copied into a flat tensor and reduced; return the most meanwhile."""
        module = name.rpartition(".")[0]
        unit, of = self._handles[module].unit, self._of
        before = self._gradients
        copied = EngineBytes(self._communication, before + unit.reduced_bytes * (not of.beside))
        most = self.let_go(module)
        if not of.reduces:
            self._gradients += unit.reduced_bytes * (not of.beside)
            return max(copied, EngineBytes(most, self._gradients), key=lambda resident: resident.bytes)
        self._gradients += unit.kept_bytes - unit.reduced_bytes * of.beside
        reduced = EngineBytes(self._communication, before + unit.kept_bytes + unit.narrow_bytes)
        return max(copied, EngineBytes(most, before), reduced, key=lambda resident: resident.bytes)
