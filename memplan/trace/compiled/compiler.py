"""torch's compiler on a machine without its GPU: its own passes, and the program that Inductor writes, run on tensors without memory."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memplan.step.tapes.reduction_workspaces import MULTIPROCESSORS
from memplan.trace.pretended_cuda.fake_devices import all_replaced, fake_cuda, replaced

Program = Callable[[list[Any]], Any]
"""Takes the inputs of a graph in a list that it empties, as Inductor's own do, and returns its outputs."""

_KERNEL = re.compile(r"\b(\w+)\.run\(")
"""A launch, of a kernel that Inductor has written (``triton_poi_fused_0``), or of a script's own."""


class _Kernel:
    """Stands for a Triton kernel: it writes into what it is given, and takes nothing for itself."""

    def __init__(self, launched: Callable[..., None]) -> None:
        self.run = launched


class _Guard:
    """Stands for ``torch.cuda._DeviceGuard``."""

    def __init__(self, _: int) -> None:
        """Take a device's number."""

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class _Torch:
    """``torch`` as programs name it, without a GPU to choose."""

    cuda = SimpleNamespace(_DeviceGuard=_Guard, set_device=lambda _: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _IntoGiven:
    """Kernels of libraries, such as matrix products, that write into a tensor which they are given."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch, name)
        return lambda *args, out, **options: operator(*args, out=out, **options)


def program(source: str, device: str, launched: Callable[..., None]) -> Program:
    """Return the function that ``source`` defines, whose kernels do nothing and whose tensors have no memory.

    Buffers are made, used again and let go of where Inductor's wrapper does: its text is what runs. A matrix product
    is torch's own, so that a recorder sees it.

    Args:
        source: What ``GraphLowering.codegen`` returns (torch/_inductor/codegen/wrapper.py, v2.13.0).
    """
    text = source[source.index("class Runner:") : source.index("runner = Runner(")]

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    names: dict[str, Any] = {name: _Kernel(launched) for name in _KERNEL.findall(text)}
    names |= {
        "torch": _Torch(),
        "device": lambda **_: torch.device(device),
        "aten": torch.ops.aten,
        "inductor_ops": SimpleNamespace(seeds=lambda count, _: empty((count,), (1,), torch.int64)),
        "extern_kernels": _IntoGiven(),
        "get_raw_stream": lambda _: 0,
        "empty_strided_cuda": empty,
        "assert_size_stride": lambda *_: None,
        "assert_size_stride_grouped": lambda *_: None,  # of torch 2.14
        "assert_alignment": lambda *_: None,
        "reinterpret_tensor": torch.as_strided,
    }
    exec(compile(text, "<compiled>", "exec"), names)
    runner = names["Runner"](partitions=[])

    def call(inputs: list[Any]) -> Any:
        return runner.call(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


COMPILED_NOTE = (
    "compiled: the programs are those that Inductor writes for a Hopper card, with its defaults; what it times on a card "
    "before it decides, such as padding of matrices, it is told to be no faster"
)
_STEPS = ("partition_fn", "_recursive_joint_graph_passes")
"""What Inductor does with a graph before it is lowered: with gradients, and in front of a forward without."""
_MODE_CHECKS = ("any_torch_dispatch_mode_on_stack", "is_in_any_mode_without_ignore_compile_internals")
"""What Dynamo asks before it compiles: under a mode, such as a recorder, it would run a module as it is."""


def _never(*_: Any, **__: Any) -> bool:
    return False


def _compiled_for(
    answers: Callable[[], AbstractContextManager[None]], card: torch.device, step: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a step of the compiler that takes a graph for one of that card."""

    def on_cuda(graph: Any, *args: Any, **options: Any) -> Any:
        with answers():
            return step(_on_cuda(graph, card), *args, **options)

    return on_cuda


@contextmanager
def pretended_compiler(
    compute_capability: str,
    device: str = "meta",
    launched: Callable[..., None] = lambda *_, **__: None,
    pads: Callable[..., bool] = _never,
    index: int = 0,
) -> Iterator[None]:
    """Let ``torch.compile`` compile for a card that is not there, and its programs run without memory.

    Args:
        compute_capability: Of the card, such as ``9.0``.
        device: Where the tensors are that modules are called with: ``meta``, or ``cuda`` for fake ones that Python finds there.
        launched: Is called in the place of each launch of a kernel, with what the kernel is given.
        pads: Tells whether a product is faster with longer rows, of which the compiler gives the match and both matrices.
        index: Of the card among those of its machine.
    """
    import torch._dynamo.convert_frame as frames
    import torch._functorch.partitioners as partitioners

    inductor: Any = import_module("torch._inductor.compile_fx")
    torch._dynamo.reset()
    card, answers = torch.device("cuda", index), partial(_of_cuda, compute_capability, pads, index)

    def lowered(graph: Any, inputs: Sequence[Any], **options: Any) -> Program:
        del inputs
        with _disable_current_modes(), answers():
            return program(_source(_on_cuda(graph, card), **options), device, launched)

    def backend(graph: Any, inputs: Sequence[Any], **_: Any) -> Any:
        return inductor.compile_fx(graph, inputs, inner_compile=lowered)

    own: Any = torch.compile

    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        if device == "cuda":
            stack.enter_context(answers())
        changes: list[tuple[Any, dict[str, Any]]] = [
            (inductor, {name: _compiled_for(answers, card, getattr(inductor, name)) for name in _STEPS}),
            (frames, dict.fromkeys(_MODE_CHECKS, lambda: False)),
            # of kernels that are run again: generators, which are not there and have nothing on a card
            (partitioners, {"functionalize_rng_ops": lambda _joint, forward, backward, _: (forward, backward)}),
            (torch, {"compile": lambda model=None, **given: own(model, **{**given, "backend": backend, "mode": None})}),
        ]
        stack.enter_context(all_replaced(changes))
        stack.enter_context(_composite_losses())
        stack.enter_context(_guards_under_modes())
        yield


class _Through(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **(kwargs or {}))


@contextmanager
def _guards_under_modes() -> Iterator[None]:
    """Let guards expect the dispatch keys that a mode adds, under which modules are called: else each call compiles again."""
    from torch._dynamo.guards import CheckFunctionManager

    build = CheckFunctionManager.__init__

    def built(*args: Any, **options: Any) -> None:
        with _Through():  # type: ignore[no-untyped-call]
            build(*args, **options)

    with replaced(CheckFunctionManager, {"__init__": built}):
        yield


@contextmanager
def _composite_losses() -> Iterator[None]:
    """Let the gradient of ``nll_loss`` reach its input on ``meta``, where Python's own form of it has none."""
    loss, key = torch.ops.aten.nll_loss.default, torch._C.DispatchKey.Meta
    from torch._inductor import decomposition  # noqa: F401  (it imports what registers that form)

    own = loss.py_kernels.pop(key, None)
    loss._dispatch_cache.clear()
    try:
        yield
    finally:
        if own is not None:
            loss.py_kernels[key] = own
            loss._dispatch_cache.clear()


def _on_cuda(graph: Any, card: torch.device) -> Any:
    """Return a graph of tensors on ``meta`` as the same of tensors on a card."""
    from torch.fx.node import map_aggregate
    from torch.utils._pytree import tree_map

    def moved(value: Any) -> Any:
        return card if isinstance(value, torch.device) and value.type == "meta" else value

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(partial(_moved, card), node.meta["val"])
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
    graph.recompile()
    return graph


def _moved(card: torch.device, value: Any) -> Any:
    if not isinstance(value, FakeTensor) or value.fake_device.type != "meta":
        return value
    with _disable_current_modes():
        bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, bare, card)


def _source(graph: Any, **options: Any) -> str:
    """Return the program that Inductor writes for a graph: what ``_InProcessFxCompile.codegen_and_compile`` does up to there."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inductor: Any = import_module("torch._inductor.compile_fx")
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    inference, backward = options.get("is_inference", False), options.get("is_backward", False)
    inductor.view_to_reshape(graph)
    with torch.no_grad():
        mode = inductor.fake_tensor_prop(graph, inputs)
    inductor._recursive_record_original_output_strides(graph)
    with V.set_fake_mode(mode), DebugContext():
        inductor._recursive_post_grad_passes(graph, is_inference=inference)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=inductor.shape_env_from_inputs(inputs),
            graph_id=options.get("graph_id"),
            cpp_wrapper=False,
            aot_mode=False,
            is_inference=inference,
            is_backward=backward,
            inputs_to_check=(),
            get_decomp_fn=options["get_decomp_fn"],
        )
        lowering.freeze_runtime_asserts()
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            wrapper, _ = lowering.codegen()
    return str(getattr(wrapper, "value", wrapper))


@contextmanager
def _of_cuda(compute_capability: str, pads: Callable[..., bool], index: int) -> Iterator[None]:
    """Let tensors without memory be on ``cuda``, and answer what the compiler asks of the card."""
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.pad_mm as padding
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton
    from torch._dynamo.device_interface import CudaInterface

    major, minor = (int(part) for part in compute_capability.split("."))
    properties = _properties(major, minor)
    patterns, constant = joint.lazy_init, joint.UniformValueConstantFolder._deduce_value

    def folded(folder: Any, node: Any) -> Any:
        own = node.kwargs
        if "device" not in own:
            return constant(folder, node)
        node.kwargs = {**own, "device": torch.device("cpu")}
        try:
            return constant(folder, node)
        finally:
            node.kwargs = own

    answers = {
        "get_device_properties": staticmethod(lambda _=None: properties),
        "current_device": staticmethod(lambda: index),
    }
    requested: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, {"get_device_properties": lambda _=None: properties, "current_device": lambda: index}),
        (torch.cuda, {"get_device_capability": lambda _=None: (major, minor)}),
        (CudaInterface, answers),
        (CudaInterface.Worker, answers),
        (scheduler, {"has_triton": lambda *_: True}),
        (triton, {"triton_hash_with_backend": lambda: ""}),
        (joint, {"lazy_init": lambda *_: patterns(torch.device("cpu"))}),
        (joint.UniformValueConstantFolder, {"_deduce_value": folded}),
        (padding, {"_should_pad": pads}),
    ]
    with fake_cuda(index), all_replaced(requested):
        yield


def _properties(major: int, minor: int) -> SimpleNamespace:
    """Return what the compiler asks of a card, which decides how a reduction is split: here counts that are assumed."""
    # Source: Registers and threads: torch/_inductor/runtime/triton_heuristics.py, v2.13.0 (of an A100: 2,048 share
    # 65,536).
    return SimpleNamespace(
        name="NVIDIA",
        gcnArchName="NVIDIA",  # the name again, on CUDA
        major=major,
        minor=minor,
        multi_processor_count=MULTIPROCESSORS,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        total_memory=80 * 2**30,
    )
