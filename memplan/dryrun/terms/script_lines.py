"""Which line of the user's own code is running, and whether it asks a condition only in order to raise an error."""

import ast
import linecache
import os
import site
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

import memplan

_SEARCHES = "/torch/optim/lbfgs.py"
"""Where torch leaves a loop, or returns, when it has converged."""
_SATISFIED = "done = True"
"""Ends a search along a line there: the first step that is tried meets Wolfe's conditions, as most do once there is a history."""


def harmless_answer(frame: FrameType | None) -> bool | None:
    """Return the answer by which the condition that a frame asks raises nothing, or nothing where it decides something else.

    A search of torch's own (L-BFGS) goes on by it until it has taken the iterations that it may.
    """
    return None if frame is None else _answer(frame.f_code.co_filename, frame.f_lineno)


@cache
def _answer(file: str, line: int) -> bool | None:
    for node in _checks(file):
        if node.test.lineno <= line <= (node.test.end_lineno or 0):
            if isinstance(node, ast.If) and file.endswith(_SEARCHES) and _SATISFIED in map(ast.unparse, node.body):
                return True
            return isinstance(node, ast.Assert) is not isinstance(node.test, ast.UnaryOp)
    return None


@cache
def _checks(file: str) -> tuple[ast.If | ast.Assert, ...]:
    """Return the assertions of a file, and the conditions behind which an error is raised and nothing else done."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    ends = (ast.Raise, ast.Break, ast.Return) if file.endswith(_SEARCHES) else ast.Raise
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert)]
    return tuple(node for node in nodes if isinstance(node, ast.Assert) or isinstance(node.body[-1], ends))


_LIBRARIES = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
)
_PACKAGES = {"site-packages", "dist-packages"}
"""Folders of packages in whichever environment they are."""
_BELOW_PYTHON = (".pyx", ".pxi")
"""Ends the files that Cython names in tracebacks, such as pyarrow's; they are nowhere."""
_COMPILED = "torchinductor_"
"""Begins the folder of what torch's compiler writes (``default_cache_dir`` in torch/_inductor/runtime/cache_dir_utils.py)."""
_INSIDE = tuple(
    f"{torch.__path__[0]}/{name}"
    for name in (
        *("_subclasses/", "_ops.py", "_refs/", "_prims", "_decomp/", "_meta_registrations.py", "_library/", "utils/_"),
        *("_compile.py", "_dynamo/", "__init__.py"),
    )
)
"""Where torch works out what an operator returns, which a real run does in C++."""
_STANDARD = sysconfig.get_path("stdlib")
_OWN = str(Path(memplan.__file__).parent)


class ScriptLines:
    """Finds the innermost line of the script, or of a module beside it; code of installed packages is nobody's own.

    Args:
        script: Path of the script, which counts wherever it lies.
        folder: That of a package which is run as a script is, and counts likewise; or nothing.
    """

    def __init__(self, script: str, folder: str = "") -> None:
        self._script, self._folder = script, f"{folder}{os.sep}" if folder else ""
        self._own: dict[CodeType, bool] = {}

    def current(self) -> str:
        """Return the line as ``folder/file:line``; inside autograd's thread, that of what started it."""
        place = self.place()
        if place is None:
            return ""
        code, number = place
        path = Path(code.co_filename)
        return f"{path.parent.name}/{path.name}:{number}"

    def place(self) -> tuple[CodeType, int] | None:
        """Return the line as code and number, or nothing where none of the script is running."""
        result = self._innermost(sys._getframe(1))
        main = threading.main_thread().ident
        if result is None and threading.get_ident() != main and main is not None:
            result = self._innermost(sys._current_frames().get(main))
        return result

    def caller(self) -> str:
        """Return the line that calls a function of Python's own modules, where it is the script's; else nothing."""
        frame: FrameType | None = sys._getframe(1)
        while (
            frame is not None
            and frame.f_code.co_filename.startswith((_STANDARD, _OWN))
            and "site-packages" not in frame.f_code.co_filename
        ):
            frame = frame.f_back
        if frame is None or not self.is_own(frame.f_code.co_filename, packages=False):
            return ""
        path = Path(frame.f_code.co_filename)
        return f"{path.parent.name}/{path.name}:{frame.f_lineno}"

    def asking(self) -> FrameType | None:
        """Return the frame, anybody's, that asks for a value: the innermost outside of what answers it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((_OWN, *_INSIDE)):
            frame = frame.f_back
        return frame

    def innermost_of(self, trace: TracebackType | None) -> str:
        """Return the innermost own line of a traceback, or nothing."""
        line = ""
        while trace is not None:
            code = trace.tb_frame.f_code
            if self.is_own(code.co_filename):
                path = Path(code.co_filename)
                line = f"{path.parent.name}/{path.name}:{trace.tb_lineno}"
            trace = trace.tb_next
        return line

    def is_shown(self, file: str) -> bool:
        """Tell whether a traceback of the script's own would have a line of that file."""
        return file == self._script or not file.startswith((_OWN, "<frozen", *_INSIDE))

    def _innermost(self, frame: FrameType | None) -> tuple[CodeType, int] | None:
        while frame is not None:
            code = frame.f_code
            own = self._own.get(code)
            if own is None:
                own = self._own[code] = self.is_own(code.co_filename)
            if own:
                return code, frame.f_lineno
            frame = frame.f_back
        return None

    def is_own(self, file: str, *, packages: bool = True) -> bool:
        """Tell whether a file is the script, or one of its own.

        Args:
            packages: Whether the files of a package that is run as a script is count.
        """
        if file == self._script or (packages and self._folder and file.startswith(self._folder)):
            return True
        if file.startswith((*_LIBRARIES, _OWN, "<")) or file.endswith(_BELOW_PYTHON):
            return False
        return not any(part in _PACKAGES or part.startswith(_COMPILED) for part in Path(file).parts)
