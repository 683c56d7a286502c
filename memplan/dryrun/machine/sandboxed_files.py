"""Files that a script writes go to a folder that is thrown away, and its checkpoints nowhere."""

import builtins
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from memplan.dryrun.machine.run_checkpoints import RunCheckpoints
from memplan.dryrun.terms.other_programs import harmless_program
from memplan.dryrun.terms.outcome import RefusedError
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.trace.pretended_cuda.fake_devices import replaced

_FORKS = ("fork", "forkpty", "execv", "execve")
"""What makes another process of this one; all else that does goes by these."""
_PROGRAMS = {"system": 0, "posix_spawn": 1, "posix_spawnp": 1}
"""What starts another program, and where it is told which."""
_WRITES = frozenset("wax+")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class SandboxedFiles:
    """A sandbox for what a script writes, and the checkpoints that it would have written.

    Args:
        lines: Tells which line of the script is running.
        allow_writes: Whether it may write where it wants to.
    """

    def __init__(self, scratch: str, lines: ScriptLines, *, allow_writes: bool) -> None:
        self._scratch, self._lines, self._allowed = scratch, lines, allow_writes
        self._free = tuple({os.path.realpath(path) for path in (scratch, "/dev", prepared_rows())})
        self.skipped: dict[str, int] = {}
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
                for owner, values in self._file_calls():
                    stack.enter_context(replaced(owner, values))
            yield

    def _file_calls(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        opened = self._opened(builtins.open)
        yield builtins, {"open": opened}
        yield io, {"open": opened}
        yield os, {"open": self._descriptor(os.open)}
        names = ("stat", "lstat", "statvfs", "listdir", "scandir", "access", "chmod", "utime")
        yield os, {name: self._looked(getattr(os, name)) for name in names}
        yield os, {name: self._changed(getattr(os, name)) for name in ("mkdir", "rmdir", "remove", "unlink")}
        yield os, {name: self._moved(getattr(os, name)) for name in ("rename", "replace", "link", "symlink")}

    def _apart(self, path: Any) -> str | None:
        """Return where a file lies that the script writes, or nothing where it may write."""
        if isinstance(path, int):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        if whole.startswith(tuple(f"{free}{os.sep}" for free in self._free)) or whole in self._free:
            return None
        return os.path.join(self._scratch, whole.lstrip(os.sep))

    def _opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            return function(self.sandboxed_file(file, mode), mode, *args, **options)

        return opened

    def _descriptor(self, function: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            apart = None if dir_fd is not None else self._apart(path)
            if apart is not None and flags & _WRITING:
                self.skipped.setdefault(os.fsdecode(path), 0)
                make_folders(os.path.dirname(apart))
                return function(apart, flags, mode)
            return function(apart if apart is not None and _exists(apart) else path, flags, mode, dir_fd=dir_fd)

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

    def _looked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def looked(path: Any = ".", *args: Any, **options: Any) -> Any:
            apart = self._apart(path)
            return function(apart if apart is not None and _exists(apart) else path, *args, **options)

        return looked

    def _changed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **options: Any) -> Any:
            apart = self._apart(path)
            if apart is None:
                return function(path, *args, **options)
            if function.__name__ == "mkdir":
                if _exists(os.fsdecode(path)):
                    raise FileExistsError(17, "File exists", os.fsdecode(path))
                self.skipped.setdefault(os.fsdecode(path), 0)
                make_folders(os.path.dirname(apart))
                return function(apart, *args)
            self.skipped.setdefault(os.fsdecode(path), 0)
            return function(apart) if _exists(apart) else None

        return changed

    def _moved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def moved(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            source, apart = self._apart(source) or source, self._apart(target) or target
            if not _exists(source):
                return None
            make_folders(os.path.dirname(os.fsdecode(apart)))
            return function(source, apart, *args, **options)

        return moved

    def _saved(self, thing: Any, file: Any, *_: Any, **__: Any) -> None:
        """Save nothing: the bytes of a checkpoint's tensors are counted, and its file says which it stands for."""
        mark = self.checkpoints.mark(thing)
        if isinstance(file, str | os.PathLike):
            name = os.fsdecode(file)
            with open(file, "wb") as stream:
                stream.write(mark)
        else:
            name = "a stream"
            file.write(mark)
        self.skipped[name] = _bytes_of(thing)

    def _saved_model(self, model: torch.nn.Module, filename: Any, *_: Any, **__: Any) -> None:
        self._saved(model.state_dict(), filename)

    def sandboxed_file(self, path: Any, mode: str = "r") -> Any:
        """Return where a file lies that is opened in a mode, in place of its path; what is no path is returned as it is."""
        apart = self._apart(path) if isinstance(path, str | bytes | os.PathLike) and not self._allowed else None
        if apart is None:
            return path
        if _WRITES & set(mode):
            self.skipped.setdefault(os.fsdecode(path), 0)
            make_folders(os.path.dirname(apart))
            return apart
        return apart if _exists(apart) else path

    def sandboxed_folder(self, path: Any) -> str:
        """Return the folder where what is written below Python is to go, in place of one that the script names; it is made."""
        apart = None if self._allowed else self._apart(path)
        if apart is None:
            return os.fsdecode(path)
        self.skipped.setdefault(os.fsdecode(path), 0)
        make_folders(apart)
        return apart

    def saved_parts(
        self, state_dict: Any, *_: Any, checkpoint_id: Any = None, storage_writer: Any = None, **__: Any
    ) -> None:
        """Save nothing of what ``torch.distributed.checkpoint`` is given: the bytes of this rank's tensors are counted."""
        name = checkpoint_id or getattr(storage_writer, "path", None) or "a distributed checkpoint"
        self.skipped[str(name)] = _bytes_of(state_dict)

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


def _bytes_of(value: Any, seen: set[int] | None = None) -> int:
    """Return the bytes of the tensors in a checkpoint."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        value = getattr(value, "_local_tensor", value)
        storage = value.untyped_storage()
        if storage._cdata in seen:
            return 0
        seen.add(storage._cdata)
        return int(storage.nbytes())
    if isinstance(value, dict):
        return sum(_bytes_of(item, seen) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(item, seen) for item in value)
    if isinstance(value, torch.nn.Module):
        return _bytes_of(value.state_dict(), seen)
    return 0


def _exists(path: str) -> bool:
    try:
        _STAT(path)
    except (OSError, ValueError):
        return False
    return True


def make_folders(path: str) -> None:
    """Make a folder, and those that it lies in, where they are named."""
    if path and not _exists(path):
        make_folders(os.path.dirname(path))
        _MKDIR(path)


_STAT, _MKDIR = os.stat, os.mkdir
