"""Paths that a program computes from where it lies: texts that answer as ``pathlib`` does."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


class PathText(str):
    """A path; of the program itself, ``./`` and a name, since files are looked for beside it.

    Example:
        >>> PathText("./job.py").resolve()["parent"] / "configs" / "a.yaml"
        './configs/a.yaml'
        >>> PathText("./src/job.py")["parents"][1], PathText("./job.py")["parent"]["parent"], PathText("a/b.yaml")["stem"]
        ('.', './..', 'b')
    """

    def __getitem__(self, part: Any) -> Any:
        """Return an attribute by its name; letters otherwise."""
        folder, _, name = self.rpartition("/")
        if part == "parent":
            return PathText(folder or ".") if name not in (".", "..", "") else PathText(f"{self}/..")
        if part == "parents":
            above = [self["parent"]]
            while len(above) < DEEPEST:
                above.append(above[-1]["parent"])
            return above
        if part in ("name", "stem"):
            return name if part == "name" else name.rpartition(".")[0] or name
        return super().__getitem__(part)

    def __truediv__(self, other: str) -> PathText:
        return PathText(other if other.startswith("/") else f"{self}/{other}")

    def joinpath(self, *parts: str) -> PathText:
        """Return the path of what lies below."""
        path = self
        for part in parts:
            path /= part
        return path

    def resolve(self) -> PathText:
        """Return the path itself, as far as a text can tell."""
        return self

    absolute = expanduser = as_posix = resolve


DEEPEST = 8
"""Folders above a program, at most."""
PROGRAM = PathText("./program.py")
"""What ``__file__`` stands for."""


def own_path(node: ast.Name, modules: Mapping[str, int]) -> PathText:
    """Return what ``__file__`` of a program is; nothing of other names, and of its modules, which end before its first line.

    Args:
        modules: Name of each module -> the line at which it ends.
    """
    own = node.id == "__file__" and node.lineno > max(modules.values(), default=0)
    return PROGRAM if own else PathText()


def folder_of(path: str) -> PathText:
    """Return the folder of a path."""
    return PathText(PathText(path)["parent"])
