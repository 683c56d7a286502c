"""Tensors in host memory beside a device without any: all are on ``meta``, and some stand for the CPU's.

torch says of these that they are on the CPU; moving one to the device makes a new tensor there, and the other way round.
What operators make of such tensors alone stands for host memory too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _make_grads
from torch.autograd.graph import _engine_run_backward
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.overrides import TorchFunctionMode

from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.ranks.fully_shard import META, ShardedRecorder, local

CPU = torch.device("cpu")

_OF_TENSORS: Any = Tensor
_ANSWERS: dict[Any, Any] = {_OF_TENSORS.device.__get__: CPU, _OF_TENSORS.is_cpu.__get__: True, Tensor.is_pinned: True}
"""What is asked of a tensor that stands for the CPU's -> the answer."""


_FACTORIES = (torch.empty, torch.zeros, torch.full, torch.zeros_like, torch.empty_like)


class HostTensors(TorchFunctionMode):
    """Lets tensors that a recorder has set apart be the CPU's.

    Args:
        recorder: Sets tensors apart, and books none of them.
        engine: Whether an engine makes tensors there by itself, as DeepSpeed's does.
    """

    def __init__(self, recorder: ShardedRecorder, *, engine: bool = False) -> None:
        super().__init__()
        self.recorder, self.engine = recorder, engine

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer as for a tensor of the CPU, move tensors, or do as torch does."""
        del types
        options = dict(kwargs or {})
        if func is Tensor.backward or func is torch.autograd.backward:
            return self._backward(*args, **options)
        if func in _FACTORIES and str(options.get("device")) == "cpu" and self._stands(func, args):
            with self.recorder.setting_apart(True):
                return func(*args, **{**options, "device": META})
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **options)
        apart = self.recorder.is_apart(args[0])
        if apart and func in _ANSWERS:
            return _ANSWERS[func]
        if apart and func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cpu or func is Tensor.to:
            return self._moved(func, apart, args, options)
        if apart and (device := options.get("device")) is not None:
            with self.recorder.setting_apart(str(device) == "cpu"):
                return func(*args, **{**options, "device": META})
        return func(*args, **options)

    def _stands(self, func: Callable[..., Any], args: Any) -> bool:
        """Tell whether what is made on the CPU stands for what an engine keeps there."""
        if self.engine:
            return True
        return func is torch.empty and args == (0,)  # what FSDP1 lets parameters point to that a rank has nothing of

    def _backward(
        self, tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, *_: Any, **options: Any
    ) -> None:
        """Run backward with this mode, which torch leaves while it runs a function that it was told of."""
        # Source: ``backward`` in torch/autograd/__init__.py (v2.13.0).
        outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = options.get("gradient") if grad_tensors is None else grad_tensors
        gradients = (given,) if given is None or isinstance(given, Tensor) else tuple(given)
        gradients = gradients if len(gradients) == len(outputs) else (None,) * len(outputs)
        with self:
            made = _make_grads(outputs, gradients, is_grads_batched=False)
            _engine_run_backward(
                outputs, made, bool(retain_graph), False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _moved(self, func: Callable[..., Any], apart: bool, args: Any, options: dict[str, Any]) -> Any:
        """Return a tensor where it was asked for."""
        tensor, *given = args
        named = [*given, *options.values()]
        device = CPU if func is Tensor.cpu else next((torch.device(d) for d in named if _is_device(d)), None)
        if device is None or not local(tensor).is_meta:
            return func(*args, **options)
        dtype = next((d for d in named if isinstance(d, torch.dtype)), tensor.dtype)
        if apart == (device.type == "cpu"):
            return tensor.to(dtype)
        with self.recorder.setting_apart(device.type == "cpu"):
            return torch.empty(tensor.shape, dtype=dtype, device=META)


def _is_device(given: Any) -> bool:
    return isinstance(given, torch.device) or (isinstance(given, str) and given in ("cpu", "meta"))


@contextmanager
def host_tensors(recorder: ShardedRecorder) -> Iterator[None]:
    """Let what FSDP offloads lie in host memory that a recorder tells from the device's."""
    init = FSDPParam._init_sharded_param

    def sharded(parameter: FSDPParam, *args: Any, **options: Any) -> None:
        init(parameter, *args, **options)
        if parameter.offload_to_cpu:  # which torch leaves to who fills parameters on ``meta``
            recorder.set_apart(parameter._sharded_param_data)

    with replaced(FSDPParam, {"_init_sharded_param": sharded}), HostTensors(recorder):
        yield
