"""``dataclass`` for frozen values, as of the standard library but for when methods are made: where they are first used.

Up to Python 3.12, six methods are compiled for each frozen dataclass, which takes half a millisecond for each of the two
hundred classes that an answer imports. Here the constructor is compiled with the first value, and equality, hashes,
texts and copies are the same functions for all classes. Fields are those of :mod:`dataclasses`, and so are ``fields``,
``replace`` and ``asdict``.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass
    from inspect import Signature
else:

    def dataclass(*, frozen: bool, slots: bool) -> Callable[[type], type]:
        """Return the decorator for a class of frozen values, with slots or, where it caches properties, without."""
        assert frozen

        def made(cls: type) -> type:
            cls.__doc__ = cls.__doc__ or cls.__name__  # else the constructor's signature is written
            return _with_methods(dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls))

        return made


def _with_methods(cls: Any) -> Any:
    """Give a class the methods of a frozen dataclass, but for those that it has itself."""
    cls.__dataclass_params__.frozen = cls.__dataclass_params__.eq = True
    names = tuple(field.name for field in dataclasses.fields(cls))
    compared = tuple(field.name for field in dataclasses.fields(cls) if field.compare)
    key: Any = attrgetter(*compared or ("__class__",))

    def initialise(self: Any, *given: Any, **named: Any) -> None:
        cls.__init__ = _constructor(cls)
        cls.__init__(self, *given, **named)

    def set_state(self: Any, state: tuple[Any, ...]) -> None:
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    methods = {
        "__init__": initialise,
        "__eq__": lambda self, other: key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented,
        "__hash__": lambda self: hash(key(self)),
        "__repr__": _text,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
        "__getstate__": lambda self: tuple(getattr(self, name) for name in names),
        "__setstate__": set_state,
        "__signature__": _ConstructorSignature(),
    }
    for name, method in methods.items():
        if name not in vars(cls) or (name == "__hash__" and vars(cls)[name] is None):
            setattr(cls, name, method)
    return cls


def _constructor(cls: Any) -> Any:
    """Return the constructor that :func:`dataclasses.dataclass` would make."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_absent": _Made()}
    plain: list[str] = []
    keyword_only: list[str] = []
    body: list[str] = []
    for field in dataclasses.fields(cls):
        value, default = field.name, ""
        if field.default is not dataclasses.MISSING:
            known[f"_{field.name}"], default = field.default, f"=_{field.name}"
        elif field.default_factory is not dataclasses.MISSING:
            known[f"_{field.name}"], default = field.default_factory, "=_absent"
            value = f"_{field.name}() if {field.name} is _absent else {field.name}"
        (keyword_only if field.kw_only else plain).append(f"{field.name}{default}")
        body.append(f"_set(self, {field.name!r}, {value})")
    body += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    parameters = ["self", *plain, *(["*", *keyword_only] if keyword_only else [])]
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(body or ["pass"]), known)
    known["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    known["__init__"].__annotations__ = {field.name: field.type for field in dataclasses.fields(cls)} | {"return": None}
    return known["__init__"]


class _Made:
    """What stands for a default that is made anew for each value."""

    def __repr__(self) -> str:
        return "<factory>"


@recursive_repr()
def _text(self: Any) -> str:
    shown = (field.name for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _refuse(_: Any, name: str, *_value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


class _ConstructorSignature:
    """What :func:`inspect.signature` shows of a class, without self."""

    def __get__(self, instance: Any, owner: type) -> Signature:
        from inspect import signature

        whole = signature(_constructor(owner))
        return whole.replace(parameters=list(whole.parameters.values())[1:])
