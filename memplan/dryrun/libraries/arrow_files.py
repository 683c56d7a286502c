"""Files of Arrow, Parquet, CSV, JSON and ORC, which pyarrow opens below Python: what a script writes goes to its sandbox, and is read from there.

``datasets`` keeps what ``map`` makes of rows beside them where they were loaded from a folder, pandas and TRL's logs of
completions write Parquet.

Source:
    datasets 5.2.0, arrow_writer.py (``ArrowWriter``), table.py (``memory_map``); pandas 3.1.1, io/parquet.py
    (``_get_path_or_handle``); pyarrow 26.0.1, parquet/core.py, feather.py, dataset.py, orc.py, ipc.py, _csv.pyx, _json.pyx, io.pxi.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from inspect import signature
from typing import Any

from memplan.dryrun.files.sandboxed_files import SandboxedFiles
from memplan.trace.pretended_cuda.fake_devices import replaced

_OPENS: dict[str, dict[str, str]] = {
    "pyarrow": {"input_stream": "r", "output_stream": "w"},
    "pyarrow.csv": {"read_csv": "r", "open_csv": "r", "write_csv": "w"},
    "pyarrow.dataset": {"dataset": "r", "write_dataset": "w"},
    "pyarrow.feather": {"read_feather": "r", "read_table": "r", "write_feather": "w"},
    "pyarrow.ipc": {
        "RecordBatchFileReader": "r",
        "RecordBatchStreamReader": "r",
        "RecordBatchFileWriter": "w",
        "RecordBatchStreamWriter": "w",
    },
    "pyarrow.json": {"read_json": "r", "open_json": "r"},
    "pyarrow.orc": {"read_table": "r", "ORCFile": "r", "ORCWriter": "w"},
    "pyarrow.parquet.core": {
        "ParquetWriter": "w",
        "ParquetFile": "r",
        "ParquetDataset": "r",
        "read_metadata": "r",
        "read_schema": "r",
    },
}
"""Functions and classes that open what they are given by its path, and how."""
_PATHS = frozenset({"base_dir", "dest", "input_file", "output_file", "path_or_paths", "sink", "source", "where"})
"""What they call it."""


def arrow_changes(files: SandboxedFiles, stack: ExitStack) -> dict[str, Callable[[Any], None]]:
    """Return what is called with each of pyarrow's modules that is to be changed, by its name."""
    return {name: partial(_in_sandbox, opens, files, stack) for name, opens in _OPENS.items()}


def _in_sandbox(opens: dict[str, str], files: SandboxedFiles, stack: ExitStack, module: Any) -> None:
    """Let what a module opens by its path be opened where the script's files are."""
    for name, mode in opens.items():
        opener = getattr(module, name, None)  # older versions have fewer
        owner, name = (opener, "__init__") if isinstance(opener, type) else (module, name)
        if opener is not None:
            stack.enter_context(replaced(owner, {name: _given_place(getattr(owner, name), files, mode)}))
    if module.__name__ == "pyarrow":
        _mapped_in_sandbox(module, files, stack)


def _mapped_in_sandbox(module: Any, files: SandboxedFiles, stack: ExitStack) -> None:
    """Let ``pyarrow``'s own files and maps be opened likewise, whose mode is an argument."""

    class OSFile(module.OSFile):  # type: ignore[misc]
        def __new__(cls, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            return super().__new__(cls, files.sandboxed_file(path, mode), mode, *args, **options)

    def mapped(path: Any, mode: str = "r") -> Any:
        return memory_map(files.sandboxed_file(path, mode), mode)

    memory_map = module.memory_map
    stack.enter_context(replaced(module, {"OSFile": OSFile, "memory_map": mapped}))


def _given_place(function: Callable[..., Any], files: SandboxedFiles, mode: str) -> Callable[..., Any]:
    form = signature(function)
    place = next(name for name in form.parameters if name in _PATHS)

    @wraps(function)
    def made(*args: Any, **options: Any) -> Any:
        bound = form.bind(*args, **options)
        given = bound.arguments[place]
        several = isinstance(given, list | tuple)
        paths = [files.sandboxed_file(path, mode) for path in (given if several else [given])]
        bound.arguments[place] = paths if several else paths[0]
        return function(*bound.args, **bound.kwargs)

    return made
