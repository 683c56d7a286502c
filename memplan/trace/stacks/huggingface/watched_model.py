"""Where a model is in its step, and what its tensors are, told to a recorder."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memplan.model.tower import TEXTS
from memplan.trace.jobs.training_job import tensor_of
from memplan.trace.pretended_cuda.bitsandbytes_layers import quantised_tensors
from memplan.trace.pretended_cuda.chosen_rows import EvenlyRouted
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.stacks.watched_parts import finished_gradient


class _AnyValues(AnyNumber):  # type: ignore[no-untyped-call]
    """Lets also a copy on the CPU be ones; two tensors without memory are not equal."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and args[0].is_meta:
            return False
        options = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and str(options.get("device")) == "cpu":
            return torch.ones(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def watched_by(recorder: Recorder) -> Iterator[None]:
    """Let a recorder see every operator; what only marks instants of a real run needs nothing for it."""
    if not isinstance(recorder, Recorder):
        yield
        return
    with _AnyValues(), EvenlyRouted(), recorder:  # type: ignore[no-untyped-call]
        yield


def watch(model: nn.Module, recorder: Recorder, *, gradients: bool = True) -> None:
    """Let ``recorder`` see a model's tensors, gradients when they are finished unless told not to, and where backward is."""
    mark_weights(model, recorder)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and gradients:
            parameter.register_post_accumulate_grad_hook(finished_gradient(recorder, name))  # type: ignore[no-untyped-call]
    beside_codes = {id(tensor) for _, tensor in quantised_tensors(model)}
    for name, tensor in model.named_buffers():
        if id(tensor) not in beside_codes:
            recorder.mark(tensor, "buffers", name)
    for name, part in model.named_modules():
        # No buffer before transformers 5: ``GPTJAttention._get_embed_positions`` moves it to the device, and keeps it.
        if isinstance(table := vars(part).get("embed_positions"), Tensor):
            recorder.mark(table, "buffers", f"{name}.embed_positions")
    layers = _layers(model)
    for number, layer in enumerate(layers, start=1):
        _watch_layer(layer, number, recorder)
    _watch_checkpointing(model, layers, recorder)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    head = head or next((part for name, part in model.named_modules() if name.endswith("score")), None)
    if isinstance(head, nn.Module):
        head.register_forward_hook(lambda _m, _i, out: recorder.backward_reaches(out, "head backward"))


def mark_weights(model: nn.Module, recorder: Recorder) -> None:
    """Book a model's parameters, whose data a first forward may have cast, with what codes have beside them; adapters come later."""
    beside = defaultdict[str, list[Tensor]](list)
    for name, tensor in quantised_tensors(model):
        beside[name].append(tensor)
    for name, parameter in sorted(model.named_parameters(), key=lambda named: ".lora_" in named[0]):
        for tensor in (parameter, *beside[name]):
            recorder.mark(tensor, "weights", name)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the longest list of modules of one class, or of any inside a text model, which are taken for the layers.

    A vision tower has none of them, nor has a list of experts in a layer; Llama 3.2 Vision's are of two classes. A module in
    a sequence of modules is named by its number there.
    """
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    named = [(name, part) for name, part in lists if not any(word.isdigit() for word in name.split(".")[1:])]
    inside = [list(part) for name, part in named if any(text.strip(".") in name for text in TEXTS)]
    alike = [list(part) for _, part in named if len({type(layer) for layer in part}) == 1]
    return max(inside or alike, key=len, default=[])


def _watch_layer(layer: Any, number: int, recorder: Recorder) -> None:
    """Note when backward reaches a layer's result; checkpointing hides it inside, and hands it out once more."""
    instant = f"layer {number} backward"

    def entering(_module: nn.Module, inputs: Any, named: Any) -> None:
        recorder.recomputing(True)
        first = tensor_of(inputs) if inputs else named.get("hidden_states")  # which GPT-J names up to 4.51
        if number == 1 and first is not None and torch.is_grad_enabled():
            recorder.backward_reaches(first, "end of backward")

    def leaving(_module: nn.Module, _inputs: Any, output: Any) -> None:
        recorder.recomputing(False)
        tensor = tensor_of(output)
        if tensor is not None and torch.is_grad_enabled():
            recorder.backward_reaches(tensor, instant)

    layer.register_forward_pre_hook(entering, with_kwargs=True)
    layer.register_forward_hook(leaving, always_call=True)
    if (inner := _checkpoints(layer)) is not None:
        layer._gradient_checkpointing_func = _told(inner, number, instant, recorder)


def _watch_checkpointing(model: Any, layers: list[nn.Module], recorder: Recorder) -> None:
    """Do for layers that their model checkpoints, as before transformers 4.53, what is done for those that do it themselves."""
    numbers = {id(layer): number for number, layer in enumerate(layers, start=1)}
    watched = {id(part) for layer in layers for part in layer.modules()}  # with layers that FSDP1 has wrapped
    for part in model.modules():
        if id(part) in watched or (inner := _checkpoints(part)) is None:
            continue

        def checkpointed(function: Any, *args: Any, _inner: Any = inner, **options: Any) -> Any:
            called = getattr(function, "func", function)
            # a bound method, or since transformers 5.23 a plain function that is given its module
            number = numbers.get(id(getattr(called, "__self__", None) or function.args[0]))
            told = _told(_inner, number, f"layer {number} backward", recorder) if number else _inner
            return told(function, *args, **options)

        part._gradient_checkpointing_func = checkpointed


def _checkpoints(part: Any) -> Any:
    """Return the function by which a module checkpoints, where it does."""
    return (
        getattr(part, "_gradient_checkpointing_func", None) if getattr(part, "gradient_checkpointing", False) else None
    )


def _told(inner: Any, number: int, instant: str, recorder: Recorder) -> Any:
    """Return a function that checkpoints a layer and tells when backward reaches its result, and of the first layer what it is given."""

    def checkpointed(function: Any, *args: Any, **options: Any) -> Any:
        first = tensor_of(args)
        if number == 1 and first is not None:
            recorder.backward_reaches(first, "end of backward")
        output = inner(function, *args, **options)
        tensor = tensor_of(output)
        if tensor is not None and bool(getattr(inner, "keywords", {}).get("use_reentrant", False)):
            recorder.backward_reaches(tensor, instant)
        return output

    return checkpointed
