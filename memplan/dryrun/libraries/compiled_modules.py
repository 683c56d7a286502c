"""``torch.compile`` in a script: torch's own compiler for the card, whose programs run on tensors without memory.

Dynamo, AOTAutograd, the partitioner and Inductor are torch's (:mod:`memplan.trace.compiled.compiler`); no kernel is compiled.
Hooks that watch every module are not there while compiled code runs, as Dynamo would compile them too.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch.nn.modules.module as modules
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memplan.dryrun.machine.device_names import own_names
from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.terms.outcome import RefusedError
from memplan.trace.compiled.compiler import COMPILED_NOTE, pretended_compiler
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.units import format_bytes, round_up

HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")
"""Where torch keeps the hooks of all modules (torch/nn/modules/module.py, v2.13.0)."""
ALIGNED_BYTES = 16
LIKE_DEFAULT = (None, "default", "max-autotune-no-cudagraphs")
"""Modes whose buffers are those of the default; others run in a pool of CUDA's graphs."""


class CompiledModules:
    """Compiles what a script asks for, from the first time that it asks.

    Args:
        values: Forgets what compiled kernels may have written.
        notes: Is told what is not known of compiled code.
    """

    def __init__(self, compute_capability: str, values: KnownValues, notes: list[str]) -> None:
        self._capability, self._values, self._notes = compute_capability, values, notes
        self._stack = ExitStack()
        self._padded_bytes = 0
        self._compile: Callable[..., Any] | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Let what is run inside compile."""
        compiled = nn.Module.compile

        def compile_in_place(module: nn.Module, *args: Any, **options: Any) -> None:
            compiled(module, *args, **options)
            module._compiled_call_impl = _with_hooks(module, module._compiled_call_impl)

        with (
            self._stack,
            replaced(torch, {"compile": self._later}),
            replaced(nn.Module, {"compile": compile_in_place}),
        ):
            try:
                yield
            finally:
                self._conclude()

    def _later(self, what: Any = None, **options: Any) -> Any:
        """Compile a module at once, and a function when it is called: libraries define some that nobody calls."""
        if what is None:
            return lambda function: self._later(function, **options)
        if options.get("disable") or getattr(options.get("backend"), "__name__", options.get("backend")) == "eager":
            return what
        if isinstance(what, nn.Module):
            return self._compiled(what, options)
        made: list[Any] = []

        @wraps(what)
        def compiled(*args: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                return what(*args, **keywords)
            if not made:
                made.append(self._compiled(what, options))
            return made[0](*args, **keywords)

        compiled._torchdynamo_inline = what  # type: ignore[attr-defined]
        return compiled

    def _compiled(self, what: Any, options: dict[str, Any]) -> Any:
        self._check(options)
        retained = {name: value for name, value in options.items() if name in ("fullgraph", "dynamic")}
        return self._compiler()(what, **retained)

    def _check(self, options: dict[str, Any]) -> None:
        """Refuse another backend; note what of the options is not known to change no buffer."""
        backend = options.get("backend") or "inductor"
        if backend != "inductor":
            raise RefusedError(
                f"the script compiles with backend {backend!r}, whose buffers are not modelled; inductor's and eager's are"
            )
        mode = options.get("mode")
        if mode not in LIKE_DEFAULT:
            self._note(f"torch.compile's mode {mode} is run as its default: what its CUDA graphs keep is not counted")
        if options.get("options"):
            self._note("torch.compile's options are left out: the programs are those of Inductor's defaults")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _compiler(self) -> Callable[..., Any]:
        """Return torch's own function, which compiles for the card."""
        if self._compile is None:
            with _own_tensors():
                # This build has no CUDA to import from.
                with replaced(torch.backends.cuda, {"is_built": lambda: False}):
                    import_module("torch._inductor.cudagraph_trees")
                from torch._dynamo import config, trace_rules
                from torch._dynamo.variables.builder import VariableBuilder

                VariableBuilder._type_dispatch()  # keeps the classes that it takes for tensors
                trace_rules.clear_lru_cache()
                with own_names():  # torch's functions by what they are, where libraries have had it look at others
                    trace_rules.get_torch_obj_rule_map()
            enter = self._stack.enter_context
            enter(_with_torch_compile())
            own = torch.cuda.current_device()
            enter(pretended_compiler(self._capability, "cuda", self._values.forget_numbers, self._pads, own))
            enter(_without_watching_hooks())
            # Cuts at the buckets of replicas' gradients run each part as it is compiled, on tensors that are no fakes.
            enter(config.patch(fail_on_recompile_limit_hit=True, optimize_ddp=False))
            warnings.filterwarnings("ignore", message="Using `torch.compile")  # of hooks that are not there
            self._compile = torch.compile
            self._note(COMPILED_NOTE)
            if torch.distributed.is_initialized():
                self._note(WHOLE_NOTE)
        return self._compile

    def _pads(self, _: Any, *matrices: Any, **__: Any) -> bool:
        """Remember what longer rows of a product would take, and tell that they are no faster."""
        sizes = (_padded_bytes(matrix) for matrix in matrices[:2])
        self._padded_bytes = max(self._padded_bytes, sum(sizes))
        return False

    def _conclude(self) -> None:
        """Note what the compiler left to Python, and what is not known of it."""
        if self._compile is None:
            return
        from torch._dynamo.utils import counters

        breaks, graphs = counters["graph_break"], counters["stats"]["unique_graphs"]
        if breaks:
            reason = " ".join(next(iter(breaks)).split())[:120]
            self._note(
                f"the compiler made {graphs} graphs and broke them {sum(breaks.values())} times, first for: {reason}"
            )
        if self._padded_bytes:
            self._note(
                "padding of products, were it faster on the card, is not counted: copies for the largest product take "
                f"{format_bytes(self._padded_bytes)}"
            )


def _padded_bytes(matrix: Any) -> int:
    """Return what a copy takes whose rows and columns are a multiple of 16 bytes, or nothing where they are already."""
    # Source: torch/_inductor/fx_passes/pad_mm.py, ``get_alignment_size_dtype`` and ``pad_dim`` (v2.13.0).
    aligned = ALIGNED_BYTES // matrix.element_size()
    shape = [int(size) for size in matrix.shape]
    padded = [*shape[:-2], *(round_up(size, aligned) for size in shape[-2:])]
    return 0 if padded == shape else prod(padded) * matrix.element_size()


_OWN = torch.compile
WHOLE_NOTE = "replicas are compiled as one graph: cuts at DistributedDataParallel's buckets (torch._dynamo.config.optimize_ddp) are left out"


@contextmanager
def _with_torch_compile() -> Iterator[None]:
    with replaced(torch, {"compile": _OWN}):
        yield


def _own_tensors() -> AbstractContextManager[None]:
    """Let the compiler take fake tensors for such: what it writes into is one where it makes a graph of buffers that change."""
    return replaced(torch._subclasses, {"FakeTensor": FakeTensor})


@contextmanager
def _without_watching_hooks() -> Iterator[None]:
    """Run what Dynamo has compiled, or compiles when it is called, without hooks of all modules."""
    from torch._dynamo.eval_frame import OptimizeContext

    call: Any = OptimizeContext.__call__

    def called(context: Any, function: Any) -> Any:
        made = call(context, function)
        if isinstance(made, nn.Module | type):
            return made

        @wraps(made)
        def without(*args: Any, **options: Any) -> Any:
            with _no_hooks(), own_names(), _own_tensors():
                return made(*args, **options)

        return without

    with replaced(OptimizeContext, {"__call__": called}):
        yield


@contextmanager
def _no_hooks() -> Iterator[None]:
    saved = {name: dict(getattr(modules, name)) for name in HOOKS}
    for name in HOOKS:
        getattr(modules, name).clear()
    try:
        yield
    finally:
        for name, hooks in saved.items():
            getattr(modules, name).update(hooks)


def _with_hooks(module: nn.Module, compiled: Any) -> Any:
    """Return a module's compiled call between the hooks of all modules, which it does not run itself."""

    @wraps(compiled)
    def called(*args: Any, **options: Any) -> Any:
        before, after = (list(getattr(modules, name).values()) for name in HOOKS[:2])
        for hook in before:
            hook(module, args)
        output = None
        try:
            output = compiled(*args, **options)
        finally:
            for hook in after:
                hook(module, args, output)
        return output

    return called
