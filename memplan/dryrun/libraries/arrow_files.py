"""Arrow and Parquet files, which pyarrow opens below Python: what a script writes goes to its sandbox, and is read from there.

``datasets`` keeps what ``map`` makes of rows beside them where they were loaded from a folder, pandas and TRL's logs of
completions write Parquet.

Source:
    datasets 5.2.0, arrow_writer.py (``ArrowWriter``), table.py (``memory_map``); pandas 3.1.1, io/parquet.py
    (``_get_path_or_handle``); pyarrow 26.0.1, parquet/core.py.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import Any

from memplan.dryrun.machine.sandboxed_files import SandboxedFiles
from memplan.trace.pretended_cuda.fake_devices import replaced


def arrow_changes(files: SandboxedFiles, stack: ExitStack) -> dict[str, Callable[[Any], None]]:
    """Return what is called with each of pyarrow's modules that is to be changed, by its name."""
    return {
        "pyarrow": lambda module: _arrow_in_sandbox(module, files, stack),
        "pyarrow.parquet.core": lambda module: _parquet_in_sandbox(module, files, stack),
    }


def _arrow_in_sandbox(module: Any, files: SandboxedFiles, stack: ExitStack) -> None:
    """Let what ``pyarrow`` opens by its path be opened where the script's files are."""

    class OSFile(module.OSFile):  # type: ignore[misc]
        def __new__(cls, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            return super().__new__(cls, files.sandboxed_file(path, mode), mode, *args, **options)

    def mapped(path: Any, mode: str = "r") -> Any:
        return memory_map(files.sandboxed_file(path, mode), mode)

    memory_map = module.memory_map
    stack.enter_context(replaced(module, {"OSFile": OSFile, "memory_map": mapped}))


def _parquet_in_sandbox(module: Any, files: SandboxedFiles, stack: ExitStack) -> None:
    """Let ``pyarrow.parquet`` write and read likewise."""
    for name, mode in {"ParquetWriter": "w", "ParquetFile": "r", "ParquetDataset": "r"}.items():
        owner = getattr(module, name)
        stack.enter_context(replaced(owner, {"__init__": _given_place(owner.__init__, files, mode)}))


def _given_place(function: Callable[..., None], files: SandboxedFiles, mode: str) -> Callable[..., None]:
    form = signature(function)
    place = list(form.parameters)[1]

    @wraps(function)
    def made(*args: Any, **options: Any) -> None:
        bound = form.bind(*args, **options)
        bound.arguments[place] = files.sandboxed_file(bound.arguments[place], mode)
        function(*bound.args, **bound.kwargs)

    return made
