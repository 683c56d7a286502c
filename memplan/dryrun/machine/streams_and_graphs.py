"""Streams of CUDA's and graphs of what runs on them: where the allocator takes memory from while they run.

A block that is freed on a stream serves that stream only. While a graph is captured, operators run as ever, and what they
allocate is in a pool of the graph's own, whose segments serve nothing else for as long as the graph is there; a replay
allocates nothing.

Source:
    c10/cuda/CUDAStream.cpp (streams are taken in turn from a pool of 32), aten/src/ATen/cuda/CUDAGraph.cpp and
    c10/cuda/CUDACachingAllocator.cpp (``beginAllocateToPool``, ``releasePool``), v2.13.0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from memplan.dryrun.terms.outcome import RefusedError
from memplan.dryrun.watching.live_recorder import LiveRecorder

STREAMS = 32
"""Streams of one priority that a process has; those that are made after that are the first again."""


class Nothing:
    """Stands for events and contexts: whatever is called, nothing happens."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = torch.device("cuda", 0), 0, 0

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_options: NOTHINGS[name]() if name in NOTHINGS else None


NOTHINGS: dict[str, Callable[[], Any]] = {
    "query": lambda: True,
    "elapsed_time": float,
    "record_event": Nothing,
}
"""What of a stream or an event returns something."""


class Streams:
    """The streams of a process, and which one is current in each of its threads.

    Args:
        recorder: Is told where later requests come from.
    """

    def __init__(self, recorder: LiveRecorder) -> None:
        self._recorder = recorder
        self._numbers = count()
        self._current: dict[int, Any] = {}
        streams = self

        class Stream(Nothing):
            """A stream of CUDA's, and a context in which it is current."""

            def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
                super().__init__()
                self.stream_id = 1 + next(streams._numbers) % STREAMS if number is None else number
                self.cuda_stream = self.stream_id
                self._before: list[Any] = []

            def __enter__(self) -> Stream:
                self._before.append(streams.current())
                streams.set(self)
                return self

            def __exit__(self, *_: object) -> None:
                streams.set(self._before.pop())

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and other.stream_id == self.stream_id

            def __hash__(self) -> int:
                return self.stream_id

        class StreamContext(Nothing):
            """A context in which a stream is current, as ``torch.cuda.stream`` returns it; None is no change."""

            def __init__(self, stream: Any = None) -> None:
                super().__init__()
                self.stream = stream if isinstance(stream, Stream) else None

            def __enter__(self) -> StreamContext:
                if self.stream is not None:
                    self.stream.__enter__()
                return self

            def __exit__(self, *_: object) -> None:
                if self.stream is not None:
                    self.stream.__exit__()

        self.stream_class, self.context_class = Stream, StreamContext
        self.default = Stream(number=0)
        recorder.current_stream = lambda: self.current().stream_id

    def current(self, *_: Any) -> Any:
        """Return the current stream of this thread; autograd's own run on that of what started them."""
        main = self._current.get(threading.main_thread().ident or 0, self.default)
        return self._current.get(threading.get_ident(), main)

    def set(self, stream: Any) -> None:
        """Make a stream the current one of this thread."""
        if stream is not None:
            self._current[threading.get_ident()] = stream


class _Graph:
    """Kernels that are captured once, and launched again."""

    recorder: LiveRecorder
    streams: Streams

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool = 0
        self._captured = self._updates = False
        del keep_graph

    def capture_begin(self, pool: Any = None, *_: Any, **__: Any) -> None:
        """Let what is allocated from now on be the graph's own."""
        if self.streams.current().stream_id == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay "
                "them on the default stream.)"
            )
        self._pool = self.recorder.begin_capture(None if pool is None else int(pool[-1]))

    def capture_end(self) -> None:
        """End the capture."""
        self._updates = self.recorder.end_capture()
        self._captured = True

    def replay(self) -> None:
        """Launch what was captured; nothing is allocated."""
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.recorder.replays(self._updates)

    def reset(self) -> None:
        """Let go of the graph: its pool serves nothing any more, and is given back with what is cached."""
        if self._captured:
            self._captured = False
            self.recorder.drop_pool(self._pool)

    def pool(self) -> tuple[int, int]:
        """Return the name of its pool, which other graphs may share."""
        return (0, self._pool)

    def raw_cuda_graph(self) -> int:
        raise RefusedError("the script asks for a CUDA graph's own handle, and there is none")

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    raw_cuda_graph_exec = raw_cuda_graph
    instantiate = register_generator_state = enable_debug_mode = debug_dump = _nothing

    def __del__(self) -> None:
        with suppress(Exception):
            self.reset()


def graph_class(recorder: LiveRecorder, streams: Streams) -> type:
    """Return what stands for ``torch.cuda.CUDAGraph``."""
    return type("CUDAGraph", (_Graph,), {"recorder": recorder, "streams": streams})
