"""ZeRO 3's gathers: which parameters are whole as modules run one after the other, and what their buffers take.

A module's parameters are gathered before it runs, in forward, again where checkpointing has it run again, and in backward.
What comes next in the order of the step before is gathered ahead: each module that runs asks for another bucket of it, as
long as fewer elements than a limit are gathered. A module that has run lets its parameters go, but for those that were
skipped ahead, as they were there, and those that a module within a distance needs again. Parameters that are gathered
together come in one buffer, each is copied out of it when the first of them is waited for, and the buffer stays until all
have been. Where hooks of checkpointing run a layer again, they hold on to what was gathered for that until a module's
backward has run, even where it is let go of and gathered anew.

Source:
    deepspeed/runtime/zero/partitioned_param_coordinator.py (0.19.8), ``_fetch_sub_module_impl``, ``release_sub_module``,
    ``__params_to_release`` and ``release_backward_leftovers``; ``_post_backward_module_hook`` in parameter_offload.py, which
    sets ``ds_grads_remaining`` to 0; partition_parameters.py, ``_all_gather_sequential``,
    ``_all_gather_dtype`` and ``AllGatherCoalescedHandle.wait``.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from memplan.documents.frozen_values import dataclass
from memplan.step.states.parallel_shards import ADAPTER
from memplan.units import ceil_div


class Visit(NamedTuple):
    """A module that begins to run."""

    module: str  # Its name
    parameters: tuple[str, ...]  # Those that it needs whole, in the order in which the model has them
    way: str  # ``forward``, ``again`` where checkpointing runs it again, or ``backward``


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rank gathers by."""

    ranks: int  # Ranks
    width: int  # Bytes of an element
    bucket: int  # Elements that are gathered ahead at once
    live: int  # Elements that are gathered at most before nothing is gathered ahead
    distance: int  # Elements of modules ahead among which one that needs a parameter again keeps it
    moved: bool = False  # Whether a rank's pieces come from host memory


class Buffer:
    """Parameters that are gathered together."""

    def __init__(self, names: Sequence[str], size: int) -> None:
        self.names, self.bytes, self.waiting, self.copied = names, size, len(names), False
        self.piece = 0


class Log(Protocol):
    """Takes down what is gathered and let go of."""

    def begin(self, buffer: Buffer) -> None:
        """Take down that parameters are gathered into a buffer."""

    def copy(self, buffer: Buffer, sizes: Mapping[str, int]) -> None:
        """Take down that they are copied out of it, or are whole in it where one comes alone; their bytes are given."""

    def empty(self, buffer: Buffer) -> None:
        """Take down that the buffer of several goes."""

    def let_go(self, name: str, *, retained: bool) -> None:
        """Take down that a parameter is let go of, or that checkpointing alone holds it."""

    def unhold(self, names: Sequence[str]) -> None:
        """Take down that checkpointing holds parameters no more."""


class GatheredParameters:
    """Follows what is gathered through one forward and backward.

    Args:
        visits: All modules that run, in order.
        elements: Of each parameter, in the order in which the model has them.
        frozen: Those that are not trained.
        limits: What the rank gathers by.
        log: Is told of all of it.
        stays: Parameters that stay once they have been gathered.
        anew: What is there as it begins, and counted elsewhere, where another forward of the same modules without adapters lies
            before backward: it has each begin to count its inputs anew, so that backward of none ends that does not run again.

    Attributes:
        bytes: Whole parameters and buffers that are there.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        elements: Mapping[str, int],
        whole: Collection[str],
        frozen: Collection[str],
        limits: Limits,
        log: Log | None = None,
        stays: Collection[str] = (),
        anew: Collection[str] | None = None,
    ) -> None:
        self.bytes, self._log, self._stays = 0, log, stays
        self._elements, self._whole, self._frozen, self._limits = elements, whole, frozen, limits
        self._order = {name: place for place, name in enumerate(elements)}
        own = [
            tuple(sorted({name for name in v.parameters if name not in whole}, key=self._order.__getitem__))
            for v in visits
        ]
        self._visits = [visit._replace(parameters=names) for visit, names in zip(visits, own, strict=True)]
        sizes = (sum(elements[name] for name in visit.parameters) for visit in visits)
        self._passed = list(accumulate(sizes, initial=0))
        self._uses: dict[str, list[int]] = {}
        for step, names in enumerate(own):
            for name in names:
                self._uses.setdefault(name, []).append(step)
        self._queue = deque((name, step) for step, names in enumerate(own) for name in names)
        self._step = self._live = 0
        self._asked: dict[str, int] = {}
        width, ranks = limits.width * limits.ranks, limits.ranks
        self._there = {name: width * ceil_div(elements[name], ranks) for name in anew or ()}
        self._again: set[str] | None = None if anew is None else set()  # Modules that have run again
        self._flying: dict[str, Buffer] = {}
        self._held: dict[str, int] = {}
        self._active: dict[str, set[str]] = {}
        self._backward: dict[str, dict[str, None]] = {}  # names in order, each once

    def fetch(self) -> int:
        """Let the next module begin; return the most that is there meanwhile."""
        visit = self._visits[self._step]
        if visit.way == "again" and self._again is not None:
            self._again.add(visit.module)
        if visit.way == "backward":
            self._backward[visit.module] = dict.fromkeys(visit.parameters)
        most = self._gather([name for name in visit.parameters if self._is_apart(name)])
        for name in visit.parameters:
            self._active.setdefault(name, set()).add(visit.module)
            if visit.way == "again" and self._backward and name in self._frozen:
                owner = next(reversed(self._backward))
                self._backward[owner][name] = None
                self._active[name].add(owner)
            most = max(most, self._wait(name))
        self._pass_over(visit)
        most = max(most, self._gather_ahead())
        self._step += 1
        return max(most, self.bytes)

    def release(self, module: str, parameters: Sequence[str], *, backward: bool) -> None:
        """Let a module end."""
        if backward and self._again is not None and module not in self._again and ADAPTER not in module:
            return
        retained = self._backward.pop(module, {}) if backward else {}
        for name in [name for name in (*parameters, *retained) if name not in self._whole]:
            self._active.get(name, set()).discard(module)
            if name not in parameters or not self._is_needed_soon(name):
                self._let_go(name)

    def hold(self, names: Sequence[str]) -> None:
        """Let checkpointing hold parameters as they are gathered now, whatever becomes of them; frozen ones it saves as they are.

        Source:
            ``pack_hook`` of ``_recomputation_hook`` in torch/utils/checkpoint.py (v2.13.0), which detaches what needs a gradient.
        """
        trained = (name for name in names if name in self._there and name not in self._frozen)
        self._held.update(dict.fromkeys(trained, 0))

    def unhold(self, names: Sequence[str]) -> None:
        """Let go of what checkpointing holds."""
        self.bytes -= sum(self._held.pop(name, 0) for name in names)
        if self._log is not None:
            self._log.unhold(names)

    def end(self) -> None:
        """Let go of what modules hold whose backward has had no end."""
        while self._backward:
            module, names = self._backward.popitem()
            for name in names:
                self._active.get(name, set()).discard(module)
                self._let_go(name)

    def _is_apart(self, name: str) -> bool:
        return name not in self._there and name not in self._flying

    def _is_needed_soon(self, name: str) -> bool:
        """Tell whether a parameter was skipped ahead, or a module that comes soon needs it."""
        if self._asked.get(name, -1) > self._step:
            return True
        uses = self._uses[name]
        following = bisect_left(uses, self._step)
        if following == len(uses):
            return False
        return self._passed[uses[following]] - self._passed[self._step] < self._limits.distance

    def _let_go(self, name: str) -> None:
        if name in self._there and name not in self._stays and not self._active.get(name):
            size = self._there.pop(name)
            if self._held.get(name) == 0:
                self._held[name] = size
            else:
                self.bytes -= size
            self._live -= self._elements[name]
            if self._log is not None:
                self._log.let_go(name, retained=bool(self._held.get(name)))

    def _gather(self, names: Sequence[str]) -> int:
        """Begin to gather parameters, in one buffer; return the most that is there meanwhile.

        The piece of one that comes alone from host memory is there until it is waited for, those of several while they are copied.
        """
        if not names:
            return self.bytes
        limits = self._limits
        piece = limits.width * sum(ceil_div(self._elements[name], limits.ranks) for name in names)
        buffer = Buffer(names, piece * limits.ranks)
        self._flying.update(dict.fromkeys(names, buffer))
        self.bytes += buffer.bytes
        most = self.bytes + piece * limits.moved
        if limits.moved and len(names) == 1:
            buffer.piece = piece
            self.bytes += piece
        self._live += sum(self._elements[name] for name in names)
        if self._log is not None:
            self._log.begin(buffer)
        return most

    def _wait(self, name: str) -> int:
        """Wait for a parameter; return the most that is there meanwhile."""
        buffer = self._flying.pop(name, None)
        if buffer is None:
            return self.bytes
        alone = len(buffer.names) == 1
        if not buffer.copied:
            buffer.copied = True
            for other in buffer.names:
                self._there[other] = buffer.bytes if alone else self._limits.width * self._elements[other]
            self.bytes += 0 if alone else sum(self._there[other] for other in buffer.names)
            if self._log is not None:
                self._log.copy(buffer, self._there)
        most = self.bytes
        self.bytes -= buffer.piece
        buffer.piece = 0
        buffer.waiting -= 1
        if not buffer.waiting and not alone:
            self.bytes -= buffer.bytes
            if self._log is not None:
                self._log.empty(buffer)
        return most

    def _pass_over(self, visit: Visit) -> None:
        """Take a module's parameters, and those before them, off what is to be gathered ahead."""
        missing = {name for name in visit.parameters if self._asked.get(name, -1) < self._step}
        taken: set[str] = set()
        while self._queue and len(taken) < len(missing):
            name, step = self._queue.popleft()
            self._asked[name] = step
            taken.add(name)

    def _gather_ahead(self) -> int:
        room = min(self._limits.live - self._live, self._limits.bucket)
        names: set[str] = set()
        ahead = 0
        while self._queue and ahead < room:
            name, step = self._queue.popleft()
            self._asked[name] = max(self._asked.get(name, -1), step)
            if self._is_apart(name) and name not in names:
                names.add(name)
                ahead += self._elements[name]
        return self._gather(sorted(names, key=self._order.__getitem__))
