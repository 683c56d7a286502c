"""The process that measures: ``python -m memplan.measure.child``, started by ``process``.

Its task comes pickled through standard input, from the process that started it; its results go
out as lines of JSON. When its standard input ends, its parent is gone or has heard enough, and it ends too: not earlier, as
others may still need it.
"""

import json
import os
import pickle
import sys
import threading
from dataclasses import asdict
from typing import Any

from memplan.errors import MemplanError
from memplan.measure.measured import Measurable, Measurement


def main() -> None:
    """Measure the task from standard input, and report progress and result."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(kind: str, value: Any) -> None:
        out.write(json.dumps({kind: value}) + "\n")
        out.flush()

    task: Measurable = pickle.load(sys.stdin.buffer)
    parent = threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True)
    parent.start()
    send("progress", "loading torch")
    send("measurement", asdict(_measured(task, lambda text: send("progress", text))))
    parent.join()


def _end_with_parent(descriptor: int) -> None:
    """End this process when there is no more to read; a lock on a file object would outlive the interpreter."""
    while os.read(descriptor, 1):
        pass
    os._exit(1)


def _measured(task: Measurable, progress: Any) -> Measurement:
    import torch

    try:
        return task.measured(progress)
    except MemplanError as error:
        return Measurement("failed", str(error))
    except torch.OutOfMemoryError as error:
        return _out_of_memory(str(error))
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "not enough memory" in str(error) or "can't allocate" in str(error):
            return _out_of_memory(str(error) or "out of memory")
        return Measurement("failed", f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")


def _out_of_memory(text: str) -> Measurement:
    """Return a failed run with what the allocator held then."""
    import torch

    counters: dict[str, Any] = {}
    device = ""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stats = torch.cuda.memory_stats()
        keys = ("requested_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_ooms")
        properties = torch.cuda.get_device_properties(0)
        capability = {"compute_capability": f"{properties.major}.{properties.minor}"}
        counters = {**{key: int(stats[key]) for key in keys}, **capability}
        device = properties.name
    reason = text.splitlines()[0][:300]
    return Measurement("out of memory", reason, device, torch.__version__, counters=counters)


if __name__ == "__main__":
    main()
