"""Files that a script writes go to a folder that is thrown away, and its checkpoints nowhere."""

import builtins
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
from memplan.trace.pretended_cuda.fake_devices import all_replaced, replaced

_FORKS = ("fork", "forkpty", "execv", "execve")
"""What makes another process of this one; all else that does goes by these."""
_PROGRAMS = {"system": 0, "posix_spawn": 1, "posix_spawnp": 1}
"""What starts another program, and where it is told which."""
_INNER = frozenset({"_io", __name__})
"""Modules whose own use of ``open`` stays as it is."""
_WRITES = frozenset("wax+")
_ANEW = frozenset("wx")
"""Of modes that write: those that begin an empty file."""
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
        self._removed = set[str]()  # What is there still, though the script has removed it
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
        yield os, {"open": self._descriptor(os.open)}
        looks = ("stat", "lstat", "statvfs", "access", "chmod", "utime")
        yield os, {name: self._looked(getattr(os, name)) for name in looks}
        yield (
            os,
            {
                "listdir": self._listed(os.listdir, lambda one: one),
                "scandir": self._listed(os.scandir, lambda one: one.name),
            },
        )
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

    def _seen(self, path: Any, apart: str | None) -> Any:
        """Return where a file lies that the script looks at: among what it has written, or where it says, unless it has removed it."""
        if apart is None:
            return path
        return apart if _exists(apart) or os.path.abspath(os.fsdecode(path)) in self._removed else path

    def _written(self, path: Any, apart: str) -> str:
        """Return where a file goes that the script writes; the folder for it is made."""
        self.skipped.setdefault(os.fsdecode(path), 0)
        self._removed.discard(os.path.abspath(os.fsdecode(path)))
        make_folders(os.path.dirname(apart))
        return apart

    def _copied(self, path: Any, apart: str) -> None:
        """Copy a file that is there and that the script changes or moves, once, to where it does so."""
        if self._seen(path, apart) is path and _exists(os.fsdecode(path)):
            make_folders(os.path.dirname(apart))
            if os.path.isdir(path):
                shutil.copytree(path, apart)
            else:
                shutil.copyfile(path, apart)

    def _opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            return function(self.sandboxed_file(file, mode), mode, *args, **options)

        return opened

    def _descriptor(self, function: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            apart = None if dir_fd is not None else self._apart(path)
            if apart is not None and flags & _WRITING:
                return function(self._written(path, apart), flags, mode)
            return function(self._seen(path, apart), flags, mode, dir_fd=dir_fd)

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
            return function(self._seen(path, self._apart(path)), *args, **options)

        return looked

    def _listed(self, function: Callable[..., Any], name_of: Callable[[Any], Any]) -> Callable[..., Any]:
        """List what is in a folder, and what the script has written there."""

        def listed(path: Any = ".") -> Any:
            apart = None if path is None else self._apart(path)
            written = apart is not None and _exists(apart)
            if apart is None or not (written or self._removed):
                return function(path)
            folder = os.path.abspath(os.fsdecode(path))
            names: dict[str, Any] = {}
            if folder not in self._removed:
                with suppress(*[FileNotFoundError] if written else []):  # it may be the script's alone
                    names = {name_of(one): one for one in function(path)}
            names = {
                name: one for name, one in names.items() if os.path.join(folder, os.fsdecode(name)) not in self._removed
            }
            if written or folder in self._removed:
                names |= {
                    name_of(one): one for one in function(os.fsencode(apart) if isinstance(path, bytes) else apart)
                }
            return list(names.values()) if function.__name__ == "listdir" else _Entries(names.values())

        return listed

    def _changed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **options: Any) -> Any:
            apart = self._apart(path)
            if apart is None:
                return function(path, *args, **options)
            if function.__name__ == "mkdir":
                if _exists(os.fsdecode(self._seen(path, apart))):
                    raise FileExistsError(17, "File exists", os.fsdecode(path))
                return function(self._written(path, apart), *args)
            if not _exists(os.fsdecode(self._seen(path, apart))):
                raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
            self.skipped.setdefault(os.fsdecode(path), 0)
            self._removed.add(os.path.abspath(os.fsdecode(path)))
            return function(apart) if _exists(apart) else None

        return changed

    def _moved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        moves = function.__name__ in ("rename", "replace")

        def moved(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            place, apart = self._apart(source), self._apart(target)
            if moves and place is not None:
                self._copied(source, place)
                self._removed.add(os.path.abspath(os.fsdecode(source)))
            if not _exists(place or source):
                return None
            return function(
                place or source, target if apart is None else self._written(target, apart), *args, **options
            )

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
        if not _WRITES & set(mode):
            return self._seen(path, apart)
        if not _ANEW & set(mode):
            self._copied(path, apart)
        return self._written(path, apart)

    def sandboxed_folder(self, path: Any) -> str:
        """Return the folder where what is written below Python is to go, in place of one that the script names; it is made."""
        apart = None if self._allowed else self._apart(path)
        if apart is None:
            return os.fsdecode(path)
        make_folders(self._written(path, apart))
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


class _Entries(AbstractContextManager[Any], Iterator[Any]):
    """What ``os.scandir`` returns, of entries that are known."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def close(self) -> None:
        """Close nothing."""


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


_OPEN, _STAT, _MKDIR = builtins.open, os.stat, os.mkdir
