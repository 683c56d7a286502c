"""``torch.cuda`` as a named card would answer, from the state of the simulated allocator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memplan.dryrun.machine.card_properties import CardProperties
from memplan.dryrun.machine.device_names import inner_device
from memplan.dryrun.machine.streams_and_graphs import Nothing, Streams, graph_class
from memplan.dryrun.terms.outcome import Ranks
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.step.tapes.reduction_workspaces import MULTIPROCESSORS
from memplan.trace.pretended_cuda.fake_devices import all_replaced

GENERATOR_STATE_BYTES = 16
"""Seed and offset of CUDA's generator, 8 bytes each (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, ``get_state``)."""
CUDA_VERSION = "13.0"
"""CUDA of torch 2.13's default wheels (https://pytorch.org/get-started)."""
NCCL_VERSION = (2, 27, 7)
"""What a script that asks is told, and may log; nothing is sized by it."""
NATIVE = ("bitsandbytes",)
"""Packages that load kernels of their own where there is a GPU, and know how to do without."""


class _Guard(Nothing):
    """Stands for a switch to a device."""

    def __init__(self, device: Any = 0) -> None:
        super().__init__()
        self.idx = device if isinstance(device, int) else torch.device(device or 0).index or 0
        _chosen(device)


def _chosen(device: Any) -> None:
    """Choose a GPU, which can only be the one that is pretended; a negative number chooses none."""
    if not isinstance(device, int) or device >= 0:
        inner_device(torch.device("cuda", device) if isinstance(device, int) else device)


class NoProfile(Nothing):
    """Stands for a profiler, which would time what takes no time."""

    def key_averages(self, *_: Any, **__: Any) -> NoProfile:
        """Return an empty profile."""
        return NoProfile()

    events = total_average = key_averages

    @property
    def profiler(self) -> NoProfile:
        """Return what records, which is nothing either."""
        return self

    def table(self, *_: Any, **__: Any) -> str:
        """Return an empty table."""
        return ""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _PlanCache:
    """Stands for what cuFFT keeps of plans, which have no memory that is counted."""

    size = 0
    max_size = 4096  # "default is 4096 on CUDA 10 and newer" (docs/source/notes/cuda.rst of torch)

    def __getitem__(self, device: Any) -> _PlanCache:
        """Return the cache of a GPU: all are one."""
        return self

    def clear(self) -> None:
        """Forget nothing."""


@contextmanager
def pretended_runtime(recorder: LiveRecorder, ranks: Ranks | None = None) -> Iterator[None]:
    """Let ``torch.cuda`` and ``torch.accelerator`` speak of the recorder's card while what is inside runs.

    Args:
        ranks: Tells how many of it there are, and which one is this process's.
    """
    answers = _answers(recorder, ranks or Ranks(1))
    with all_replaced((owner, {name: _of_its_own(name, value)}) for owner, name, value in answers):
        yield


def _answers(recorder: LiveRecorder, ranks: Ranks) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, what it is replaced with)."""
    cuda: Any = torch.cuda
    streams = Streams(recorder)
    for owner, answers in (
        (cuda, _device_answers(recorder, ranks)),
        (cuda, _memory_answers(recorder)),
        (cuda.memory, _memory_answers(recorder)),
        (cuda, _stream_answers(streams)),
        (cuda, _graph_answers(recorder, streams)),
        (cuda.graphs, _graph_answers(recorder, streams)),
        (cuda.graphs.graph, {"default_capture_stream": None}),
        (cuda, _idle_answers()),
        (cuda.random, _idle_answers()),
        (cuda.nvtx, {"_nvtx": Nothing()}),
        (cuda.nccl, {"version": lambda: NCCL_VERSION}),
        (torch.profiler, {"profile": NoProfile}),
        (torch.autograd.profiler, {"profile": NoProfile}),
        (
            torch._C,
            {"_scatter": _scattered, "_cuda_getCurrentRawStream": lambda _: 0, "_host_emptyCache": _nothing},
        ),
        (torch.accelerator, _accelerator_answers(recorder, ranks, streams)),
    ):
        yield from ((owner, name, value) for name, value in answers.items())
    yield torch._C, "_get_accelerator", lambda *_: torch.device("cuda")
    yield torch.version, "cuda", CUDA_VERSION
    yield cuda, "default_generators", tuple(_GENERATOR() for _ in range((ranks or Ranks(1)).per_node))
    yield torch, "Generator", _Generator
    yield torch, "Stream", streams.stream_class
    yield torch, "Event", Nothing
    yield torch.backends.cuda, "is_built", lambda: True
    yield torch.backends.cuda, "cufft_plan_cache", _PlanCache()
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.backends.cuda, "is_flash_attention_available", lambda: True
    for kind in ("linalg", "blas"):  # all that builds for CUDA have, and what they take is not counted
        yield torch._C, f"_set_{kind}_preferred_backend", _nothing
    yield (
        torch.backends.cudnn,
        "is_acceptable",
        lambda _: False,
    )  # by which a build for CUDA joins a recurrent layer's weights


def _of_its_own(name: str, value: Any) -> Any:
    """Return what does nothing as a function or class that stands for one name alone: torch's compiler tells them apart."""
    if value is Nothing:
        return type(name, (Nothing,), {})
    return (lambda *_, **__: None) if value is _nothing else value


class _AnyGenerator(type):
    """Takes every generator for one of its class."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(metaclass=_AnyGenerator):
    """Makes generators: all are the CPU's, as no random number of the GPU's is ever drawn."""

    def __new__(cls, device: Any = "cpu") -> Any:
        del device
        return _GENERATOR()


_GENERATOR = torch.Generator


def _is_available() -> bool:
    """Tell that there is a GPU, but to libraries that would load their own code for it."""
    return not str(sys._getframe(1).f_globals.get("__name__")).startswith(NATIVE)


def _device_answers(recorder: LiveRecorder, ranks: Ranks) -> dict[str, Any]:
    card = recorder.card
    major, minor = (int(part) for part in card.compute_capability.split("."))
    properties = CardProperties(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.total_bytes,
        multi_processor_count=MULTIPROCESSORS,
        warp_size=32,
        regs_per_multiprocessor=65536,  # of every architecture since Maxwell (CUDA C++ Programming Guide, compute capabilities)
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    return {
        "is_available": _is_available,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": _nothing,
        "device_count": lambda: ranks.per_node,
        "_device_count_nvml": lambda: ranks.per_node,
        "current_device": lambda: ranks.local_rank,
        "set_device": _chosen,
        "_exchange_device": lambda _device: ranks.local_rank,
        "_maybe_exchange_device": lambda _device: ranks.local_rank,
        "get_device_name": lambda *_: card.name,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": lambda *_, **__: major >= 8,
        "can_device_access_peer": lambda *_: True,
        "_get_device": lambda device: torch.device(device),
    }


def _memory_answers(recorder: LiveRecorder) -> dict[str, Any]:
    allocator = recorder.allocator
    driver = allocator.driver

    def free(*_: Any) -> tuple[int, int]:
        return max(0, recorder.card.capacity_bytes - driver.reserved_bytes), recorder.card.total_bytes

    def fraction(share: float, *_: Any, **__: Any) -> None:
        # torch/cuda/memory.py (v2.13.0): "the total visible memory multiplied fraction"
        if recorder.runs_out is None:
            allocator.allow(int(share * recorder.card.total_bytes))

    return {
        "memory_allocated": lambda *_: allocator.allocated_bytes,
        "max_memory_allocated": lambda *_: allocator.allocated_peak_bytes,
        "memory_reserved": lambda *_: driver.reserved_bytes,
        "max_memory_reserved": lambda *_: driver.reserved_peak_bytes,
        "memory_cached": lambda *_: driver.reserved_bytes,
        "max_memory_cached": lambda *_: driver.reserved_peak_bytes,
        "memory_stats_as_nested_dict": lambda *_, **__: allocator.statistics(),
        "reset_peak_memory_stats": lambda *_, **__: allocator.reset_peaks(),
        "reset_max_memory_allocated": lambda *_, **__: allocator.reset_peaks(),
        "reset_max_memory_cached": lambda *_, **__: allocator.reset_peaks(),
        "reset_accumulated_memory_stats": lambda *_, **__: allocator.reset_totals(),
        "mem_get_info": free,
        "empty_cache": recorder.release_cached,
        "set_per_process_memory_fraction": fraction,
        "get_allocator_backend": lambda: "native",
        "device_memory_used": lambda *_: recorder.card.total_bytes - free()[0],
        **dict.fromkeys(("memory_usage", "utilization", "temperature", "power_draw", "clock_rate"), lambda *_: 0),
        "list_gpu_processes": lambda *_: "GPU:0\nno processes are running",
        "memory_snapshot": lambda *_, **__: allocator.segments(),
        "_snapshot": lambda *_, **__: {"segments": allocator.segments(), "device_traces": [[]]},
        "_record_memory_history": _nothing,
    }


def _idle_answers() -> dict[str, Any]:
    """Return what has nothing to do without a GPU: waiting, seeds, streams."""

    def state(*_: Any) -> torch.Tensor:
        return torch.zeros(GENERATOR_STATE_BYTES, dtype=torch.uint8)

    idle = dict.fromkeys(
        ("synchronize", "manual_seed", "manual_seed_all", "seed", "seed_all", "ipc_collect", "set_sync_debug_mode",
         "set_rng_state", "set_rng_state_all"),
        _nothing,
    )  # fmt: skip
    return {
        **idle,
        "initial_seed": lambda: 0,
        "get_sync_debug_mode": lambda: 0,
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "Event": Nothing,
        "device": _Guard,
        "device_of": Nothing,
        "_DeviceGuard": Nothing,
    }


def _stream_answers(streams: Streams) -> dict[str, Any]:
    """Return streams, and which one is current."""
    return {
        "Stream": streams.stream_class,
        "ExternalStream": streams.stream_class,
        "stream": lambda stream: streams.context_class(stream),
        "StreamContext": streams.context_class,
        "set_stream": lambda stream: streams.set(stream),
        "current_stream": lambda *_: streams.current(),
        "default_stream": lambda *_: streams.default,
    }


def _graph_answers(recorder: LiveRecorder, streams: Streams) -> dict[str, Any]:
    """Return what captures graphs; torch's own ``graph`` and ``make_graphed_callables`` call it."""
    return {
        "CUDAGraph": graph_class(recorder, streams),
        "graph_pool_handle": lambda: (0, recorder.new_pool()),
        "is_current_stream_capturing": lambda: bool(recorder.capturing),
    }


def _accelerator_answers(recorder: LiveRecorder, ranks: Ranks, streams: Streams) -> dict[str, Any]:
    memory = _memory_answers(recorder)
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_count": lambda: ranks.per_node,
        "current_device_index": lambda: ranks.local_rank,
        "current_device_idx": lambda: ranks.local_rank,
        "device_index": Nothing,
        "set_device_index": _chosen,
        "set_device_idx": _chosen,
        "synchronize": _nothing,
        "current_stream": lambda *_: streams.current(),  # torch's compiler tells functions apart by what they are
        "set_stream": lambda stream: streams.set(stream),
        "empty_cache": memory["empty_cache"],
        "memory_allocated": memory["memory_allocated"],
        "max_memory_allocated": memory["max_memory_allocated"],
        "memory_reserved": memory["memory_reserved"],
        "max_memory_reserved": memory["max_memory_reserved"],
        "memory_stats": lambda *_: torch.cuda.memory_stats(),
        "reset_peak_memory_stats": memory["reset_peak_memory_stats"],
        "get_memory_info": memory["mem_get_info"],
    }


def _scattered(tensor: torch.Tensor, devices: list[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """Return a tensor on the one GPU that ``DataParallel`` finds (torch/csrc/cuda/comm.cpp, ``scatter``)."""
    return (tensor.to(torch.device("cuda", devices[0])),)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
