"""Files that a script writes go to a folder that is thrown away, and its checkpoints nowhere."""

import builtins
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from memplan.dryrun.files.run_checkpoints import RunCheckpoints
from memplan.dryrun.files.sandboxed_paths import SandboxedPaths, make_folders
from memplan.dryrun.terms.other_programs import harmless_program
from memplan.dryrun.terms.outcome import RefusedError
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.trace.pretended_cuda.fake_devices import all_replaced, replaced

_FORKS = ("fork", "forkpty", "execv", "execve")
"""What makes another process of this one; all else that does goes by these."""
_PROGRAMS = {"system": 0, "posix_spawn": 1, "posix_spawnp": 1}
"""What starts another program, and where it is told which."""
_INNER = frozenset({"_io", __name__})
"""Modules whose own use of ``open`` stays as it is."""


PARTS = ".metadata"
"""What ``torch.distributed.checkpoint`` writes last into a checkpoint's folder, by which scripts tell that it is whole."""


class SandboxedFiles:
    """A sandbox for what a script writes, and the checkpoints that it would have written.

    Args:
        lines: Tells which line of the script is running.
        allow_writes: Whether it may write where it wants to.
    """

    def __init__(self, scratch: str, lines: ScriptLines, *, allow_writes: bool) -> None:
        self._lines, self._allowed = lines, allow_writes
        self.skipped: dict[str, int] = {}
        self._paths = SandboxedPaths(scratch, ("/dev", prepared_rows()), self.skipped)
        self.checkpoints = RunCheckpoints()

    @contextmanager
    def sandbox(self) -> Iterator[None]:
        """Run what is inside with files in a sandbox."""
        with ExitStack() as stack:
            stack.enter_context(replaced(BaseProcess, {"start": self._refused_process}))
            stack.enter_context(replaced(os, {name: self._refused_process for name in _FORKS if hasattr(os, name)}))
            stack.enter_context(
                replaced(os, {name: self._started(getattr(os, name), at) for name, at in _PROGRAMS.items()})
            )
            stack.enter_context(replaced(subprocess.Popen, {"__init__": self._started(subprocess.Popen.__init__, 1)}))
            stack.enter_context(replaced(torch, {"save": self._saved, "load": self.checkpoints.load}))
            if find_spec("safetensors") is not None:
                tensors = import_module("safetensors.torch")
                read = self.checkpoints.load_tensors(tensors.load_file)
                stack.enter_context(
                    replaced(tensors, {"save_file": self._saved, "save_model": self._saved_model, "load_file": read})
                )
            if not self._allowed:
                stack.enter_context(replaced(shutil, {"_use_fd_functions": False}))  # a descriptor has no path to keep
                stack.enter_context(all_replaced(self._file_calls()))
            yield

    def _file_calls(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        opened = self._opened(_OPEN)
        for module in list(sys.modules.values()):  # builtins, io, and those that took it from there: tarfile, bz2
            own = getattr(module, "__dict__", {})
            if names := [name for name, value in own.items() if value is _OPEN and module.__name__ not in _INNER]:
                yield module, dict.fromkeys(names, opened)
        if numpys := sys.modules.get("numpy.lib._datasource"):  # by which its savetxt and loadtxt open files
            yield numpys._file_openers, {"_file_openers": {**numpys._file_openers._file_openers, None: opened}}
        yield os, self._paths.replacements()

    def _opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            return function(self.sandboxed_file(file, mode), mode, *args, **options)

        return opened

    def _started(self, function: Callable[..., Any], at: int) -> Callable[..., Any]:
        """Refuse processes that the script starts, but for those that tell something; what libraries ask other programs is no training."""

        def started(*args: Any, **options: Any) -> Any:
            if "args" in options:
                args = (*args, options.pop("args"))
            harmless = harmless_program(args[at])
            if harmless is None:
                return self._refused_process() if self._lines.caller() else function(*args, **options)
            return function(*args[:at], harmless, *args[at + 1 :], **options)

        return started

    def _saved(self, thing: Any, file: Any, *_: Any, **__: Any) -> None:
        """Save all but the bytes of a checkpoint's tensors, which are counted."""
        written, size = self.checkpoints.written(thing)
        if isinstance(file, str | os.PathLike):
            name = os.fsdecode(file)
            with open(file, "wb") as stream:
                stream.write(written)
        else:
            name = "a stream"
            file.write(written)
        self.skipped[name] = size

    def _saved_model(self, model: torch.nn.Module, filename: Any, *_: Any, **__: Any) -> None:
        self._saved(model.state_dict(), filename)

    def sandboxed_file(self, path: Any, mode: str = "r") -> Any:
        """Return where a file lies that is opened in a mode, in place of its path; what is no path is returned as it is."""
        is_path = isinstance(path, str | bytes | os.PathLike) and not self._allowed
        return self._paths.place(path, mode) if is_path else path

    def sandboxed_folder(self, path: Any) -> str:
        """Return the folder where what is written below Python is to go, in place of one that the script names; it is made."""
        apart = None if self._allowed else self._paths.apart(path)
        if apart is None:
            return os.fsdecode(path)
        make_folders(self._paths.written(path, apart))
        return apart

    def of_parts(self, module: Any) -> dict[str, Callable[..., Any]]:
        """Return what stands for the functions of ``torch.distributed.checkpoint``."""
        return {
            "save": self.saved_parts,
            "async_save": self.saved_parts_later,
            "load": self.loaded_parts(module.load),
        }

    def saved_parts(
        self, state_dict: Any, *_: Any, checkpoint_id: Any = None, storage_writer: Any = None, **__: Any
    ) -> None:
        """Save what ``torch.distributed.checkpoint`` is given as :meth:`_saved` does: this rank's part of it."""
        parts = {name: value.state_dict() if _has_parts(value) else value for name, value in state_dict.items()}
        folder = checkpoint_id or getattr(storage_writer, "path", None)
        if folder is None:
            self._saved(parts, BytesIO())
            return
        file = os.path.join(os.fsdecode(folder), PARTS)
        os.makedirs(folder, exist_ok=True)
        self._saved(parts, file)
        self.skipped[os.fsdecode(folder)] = self.skipped.pop(file)

    def loaded_parts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what loads such parts into the tensors that they are for: those of this run have no values, all else has."""

        def loaded(
            state_dict: Any, *args: Any, checkpoint_id: Any = None, storage_reader: Any = None, **options: Any
        ) -> None:
            folder = checkpoint_id or getattr(storage_reader, "path", None)
            saved = None if folder is None else self.checkpoints.without_tensors(os.path.join(folder, PARTS))
            if saved is None:
                original(state_dict, *args, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **options)
            else:
                _fill(state_dict, saved)

        return loaded

    def saved_parts_later(self, *args: Any, **options: Any) -> Future[None]:
        """Save nothing, as :meth:`saved_parts`, and return what ``async_save`` does: what tells when it is done."""
        self.saved_parts(*args, **options)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _refused_process(self, *_: Any, **__: Any) -> Any:
        line = self._lines.current()
        raise RefusedError(
            f"the script starts a process of its own{f' at {line}' if line else ''}, whose tensors would not be seen; "
            "run the one process that is to be judged"
        )


def prepared_rows() -> str:
    """Return where ``datasets`` keeps the rows that it has read, which it writes below Python (datasets/config.py, 5.2.0)."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return os.path.expanduser(os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets"))


def _has_parts(value: Any) -> bool:
    """Tell whether something gives and takes a ``state_dict`` of its own, as ``torch.distributed.checkpoint.Stateful`` does."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _fill(target: dict[str, Any], saved: dict[str, Any]) -> None:
    """Put what was saved where it is for, but for tensors, which stay."""
    for name, value in target.items():
        if name not in saved:
            raise RuntimeError(f"Missing key in checkpoint state_dict: {name}.")
        if _has_parts(value):
            parts = value.state_dict()
            _fill(parts, saved[name])
            value.load_state_dict(parts)
        elif isinstance(value, dict) and isinstance(saved[name], dict):
            _fill(value, saved[name])
        elif saved[name] is not None and not isinstance(value, Tensor):
            target[name] = saved[name]


_OPEN = builtins.open
