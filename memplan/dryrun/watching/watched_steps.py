"""Where a script is in its training step, told by what it calls: modules, backward, optimizers."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memplan.dryrun.terms.outcome import RefusedError, StepsDoneError
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.trace.jobs.training_job import tensor_of
from memplan.trace.pretended_cuda.bitsandbytes_layers import quantised_tensors
from memplan.trace.pretended_cuda.fake_devices import all_replaced
from memplan.trace.recording.trace_result import LATER_MICRO_STEP

EVALUATION = "evaluation"
HOOKED = "_tells_of_its_gradient"
"""Attribute of parameters that have a hook; sets of tensors compare their values."""
MOST_CAPTURES, MOST_WARM_UP = 64, 16
"""Captures of graphs that make a run longer, and steps beside the main stream that do: ``DistributedDataParallel`` needs 11."""
COPIES_SOUGHT = 2
"""Steps after which modules that were not called are looked for, such as an average of the weights."""
MOST_ENDS = 3
"""Times that a script is ended before the process is: handlers of all exceptions go on."""


def _not_yet() -> None:
    """Let the script go on."""


class WatchedSteps:
    """Tells a recorder of a script's steps, and ends the script after the last."""

    def __init__(self, recorder: LiveRecorder, steps: int) -> None:
        self.recorder, self.steps = recorder, steps
        self.done = 0
        self._until, self._captures = steps, 0
        self._ends, self.finish = 0, _not_yet
        self._on_card = False  # Whether a step that has ended had tensors on the card
        self.vocab_size = 0
        self.model, self._trained = "", -1
        self.recurrent = False
        self._stepped = True
        self._began = self._has_gradients = False
        self._depth = self._left = 0
        self._in_forward = self._engine_runs = False
        self._layers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is run inside."""
        again = torch.utils.checkpoint.CheckpointFunction
        step = self._around_step
        handles: list[Any] = [
            register_module_forward_pre_hook(self._entering),
            register_module_forward_hook(self._leaving, always_call=True),
            register_optimizer_step_pre_hook(lambda optimizer, _a, _o: step(optimizer, begins=True)),
            register_optimizer_step_post_hook(lambda optimizer, _a, _o: step(optimizer, begins=False)),
        ]
        clips = {"clip_grad_norm_": self._announced(torch.nn.utils.clip_grad_norm_, self._clipping)}
        own = {name: self._in_backward(getattr(torch.autograd, name)) for name in ("backward", "grad")}
        announced: list[tuple[Any, dict[str, Any]]] = [
            (torch.autograd, own),
            (again, {"apply": self.computing_again(again.apply)}),
            (torch.nn.utils, clips),
            (torch.nn.utils.clip_grad, clips),
            (nn.Module, {"zero_grad": self._announced(nn.Module.zero_grad, self._updated_by_hand)}),
        ]
        self.recorder.on_replay, self.recorder.on_failure = self._replayed, self._begin_again
        try:
            with all_replaced(announced):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _in_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def announced(*args: Any, **options: Any) -> Any:
            # The compiler's own, of a graph of backward; or one inside of another, of what is computed again.
            if TracingContext.try_get() is not None or self._engine_runs:
                return function(*args, **options)
            self._backward_begins()
            self._engine_runs = True
            try:
                return function(*args, **options)
            finally:
                self._engine_runs = False

        return announced

    def computing_again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a layer without a graph, and again in backward, so that it tells where that layer's backward begins."""

        def checkpointed(*args: Any, **options: Any) -> Any:
            self._left = 0
            output = function(*args, **options)
            given = next((value for value in args if isinstance(value, Tensor)), None)
            if self._left == 1 and given is not None and torch.is_grad_enabled():
                self.recorder.backward_reaches(given, "end of backward")
            if self._left and (tensor := tensor_of(output)) is not None:
                self.recorder.backward_reaches(tensor, f"layer {self._left} backward")
            return output

        return checkpointed

    def _announced(self, function: Callable[..., Any], announce: Callable[[], None]) -> Callable[..., Any]:
        def announced(*args: Any, **options: Any) -> Any:
            announce()
            return function(*args, **options)

        return announced

    # Forward.

    def _entering(self, module: nn.Module, inputs: Any) -> None:
        if not self._depth and not self._engine_runs:
            trains = torch.is_grad_enabled()
            if trains:
                self._step_begins()
            elif self.recorder.marks[-1][1] != EVALUATION:
                self.recorder.instant(EVALUATION)
            if module not in self._seen:
                self._look_at(module)
            self._mark_weights()
        self._depth += 1
        number = self._layers.get(module)
        if number is None:
            return
        self.recorder.recomputing(True)
        first = tensor_of(inputs)
        if number == 1 and first is not None and torch.is_grad_enabled():
            self.recorder.backward_reaches(first, "end of backward")

    def _leaving(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        number = self._layers.get(module)
        if number is None and module not in self._heads:
            return
        if number is not None:
            self._left = number
            self.recorder.recomputing(False)
        tensor = tensor_of(output)
        if tensor is not None and torch.is_grad_enabled():
            self.recorder.backward_reaches(tensor, "head backward" if number is None else f"layer {number} backward")

    def _step_begins(self) -> None:
        """Begin forward: of a new step after an update, else of a further micro-step."""
        if self._stepped:
            captures = self.recorder.captures
            if captures != self._captures:
                self._captures = captures
                self._until = self.done + self.steps if captures <= MOST_CAPTURES else self._until
            if self.done and not self._on_card and self._has_seen_card():  # the steps before were the CPU's
                self._until = self.done + self.steps
            warms_up = self.recorder.current_stream() != 0 and self.done < self._until + MOST_WARM_UP
            is_done = self.done >= self._until and not warms_up
            if is_done:
                self._ends += 1
                if self._ends > MOST_ENDS:
                    self.finish()
                raise StepsDoneError
            self._stepped = False
            self.recorder.next_step()
            self._forward("forward")
        elif self._began:
            self._forward(LATER_MICRO_STEP)
        elif self.recorder.marks[-1][1] == EVALUATION:
            self.recorder.instant("forward")
        self._began = False

    def _replayed(self, updates: bool) -> None:
        """Note that a graph is launched: a step, where an optimizer's is in it."""
        if self._depth or self._engine_runs or not (updates or self._stepped):
            return
        self._step_begins()
        if self._in_forward:
            self.recorder.forward_ends()
            self._in_forward = False
        if updates:
            self._step_ends()

    def _begin_again(self) -> None:
        """Begin a step's forward once more, after it ran out of memory in a script that handles that."""
        self._began = self._engine_runs = False
        self._depth = 0
        if self._in_forward:
            self.recorder.forward_ends()
            self._in_forward = False
        self.recorder.instant("forward")

    def _forward(self, instant: str) -> None:
        self.recorder.instant(instant)
        if not self._in_forward:
            self.recorder.forward_begins()
            self._in_forward = True

    def _look_at(self, module: nn.Module) -> None:
        """Learn a model's layers, its head and the width of its logits."""
        if next(module.parameters(), None) is not None and not any(
            module is part for known in self._models for part in known.modules()
        ):
            self._models.add(module)
            trained = sum(part.numel() for part in module.parameters() if part.requires_grad)
            if trained > self._trained:  # what is trained names the run, not an encoder that is called before it
                self.model, self._trained = type(module).__name__, trained
        self._seen.add(module)
        self.recurrent = self.recurrent or any(isinstance(part, nn.RNNBase) for part in module.modules())
        lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
        alike: list[list[nn.Module]] = [
            layers for layers in lists if len(layers) > 1 and len({type(layer) for layer in layers}) == 1
        ]
        longest: list[nn.Module] = []
        for layers in alike:
            longest = max(longest, layers, key=len)
        for number, layer in enumerate(longest, start=1):
            self._layers.setdefault(layer, number)
        sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
        self.vocab_size = max([self.vocab_size, *sizes])
        for part in module.modules():
            if isinstance(part, nn.Linear) and part.out_features == self.vocab_size > 0:
                self._heads.add(part)

    def _mark_weights(self) -> None:
        for model in self._models:
            for name, parameter in model.named_parameters():
                if is_lazy(parameter) or not parameter.is_leaf:  # what stands for it while a function is called with it
                    continue
                self.recorder.mark(parameter, "weights", name)
                if parameter.requires_grad and not hasattr(parameter, HOOKED):
                    setattr(parameter, HOOKED, True)
                    parameter.register_post_accumulate_grad_hook(self._finished(name))  # type: ignore[no-untyped-call]
            for name, tensor in model.named_buffers():
                self.recorder.mark(tensor, "buffers", name)
            for name, tensor in quantised_tensors(model) if "bitsandbytes" in sys.modules else ():
                self.recorder.mark(tensor, "weights", name)

    def _mark_copies(self) -> None:
        """Mark parameters of modules that were never called: a teacher's, or an average's that is only updated."""
        owned = {id(parameter) for model in self._models for parameter in model.parameters()}
        for module in (one for one in gc.get_objects() if issubclass(type(one), nn.Module)):
            for name, parameter in vars(module).get("_parameters", {}).items():
                if parameter is None or is_lazy(parameter) or id(parameter) in owned:
                    continue
                if parameter.layout is torch.strided and self.recorder.has_seen(parameter):
                    self.recorder.mark(parameter, "weights", name)

    def _finished(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.recorder.mark(parameter.grad, "gradients", name)

        return hook

    # Backward and update.

    def _backward_begins(self) -> None:
        if self._stepped:
            self._step_begins()
        if self._in_forward:
            self.recorder.forward_ends()
            self._in_forward = False
        later = self.recorder.now == LATER_MICRO_STEP
        self.recorder.instant("loss backward", backward=True, later=later)
        self._began = self._has_gradients = True

    def _clipping(self) -> None:
        self.recorder.instant("gradient clipping")

    def _around_step(self, optimizer: torch.optim.Optimizer, *, begins: bool) -> None:
        if begins:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    if parameter.grad.is_sparse:  # torch keeps no rows of one that has no memory
                        raise RefusedError("sparse gradients (an embedding's sparse=True) are not known here")
                    self.recorder.mark(parameter.grad, "gradients")
            if self.recorder.marks[-1][1] != "optimizer step":
                self.recorder.instant("optimizer step")
            return
        self.recorder.captured_update = self.recorder.captured_update or bool(self.recorder.capturing)
        if not self._stepped:
            self._step_ends()
        self._has_gradients = False
        self._mark_states(optimizer)
        self._mark_weights()
        if self.done <= COPIES_SOUGHT:
            self._mark_copies()

    def _updated_by_hand(self) -> None:
        """Take gradients that are zeroed, where they came from backward and the script has no optimizer, for the end of an update."""
        if self._has_gradients and not any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects()):
            self._step_ends()
            self._has_gradients = False

    def _step_ends(self) -> None:
        self._stepped, self._began = True, False
        self._on_card = self._on_card or self._has_seen_card()
        self.done += 1

    def _has_seen_card(self) -> bool:
        return any(record.component != "library_workspaces" for record in self.recorder.records)

    def ended(self) -> bool:
        """Note that the script has ended; tell whether backward ran and nothing told where an update was, so that it is all one step."""
        whole = self._has_gradients and not self.done
        self.done += whole
        return whole

    def _mark_states(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self.recorder.mark(value, "optimizer_states", key)
        owned = {id(parameter) for model in self._models for parameter in model.parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in owned:
                    self.recorder.mark(parameter, "master_weights" if self._models else "weights")
