"""Modules that are changed as soon as a script imports them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

Change = Callable[[Any], None]


class _Changes(MetaPathFinder):
    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes, self._busy = changes, set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that is to be changed, found by the others."""
        del path, target
        if name not in self._changes or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run, change = loader.exec_module, self._changes[name]

        def exec_module(module: Any) -> None:
            run(module)
            change(module)

        loader.exec_module = exec_module
        return spec


@contextmanager
def changed_when_imported(changes: Mapping[str, Change]) -> Iterator[None]:
    """Call a function with each of the modules named, as soon as it is imported.

    Args:
        changes: Name of a module -> what is called with it.
    """
    for name in changes.keys() & sys.modules.keys():
        changes[name](sys.modules[name])
    finder = _Changes(changes)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
