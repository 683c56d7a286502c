"""``dataclass`` for frozen values, as of the standard library but for when methods are made: where they are first used.

Up to Python 3.12, six methods are compiled for each frozen dataclass, which takes half a millisecond for each of the two
hundred classes that an answer imports. Here the constructor is compiled once there are some values, and equality, hashes,
texts and copies are the same functions for all classes. Fields are those of :mod:`dataclasses`, and so are ``fields``,
``replace`` and ``asdict``.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

UNCOMPILED = 8
"""Values of a class that are made before its constructor is compiled, which takes as long as thirty of them."""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from dataclasses import Field
    from dataclasses import dataclass as dataclass
    from inspect import Signature
else:

    def dataclass(*, frozen: bool, slots: bool) -> Callable[[type], type]:
        """Return the decorator for a class of frozen values, with slots or, where it caches properties, without."""
        assert frozen

        def made(cls: type) -> type:
            cls.__doc__ = cls.__doc__ or cls.__name__  # else the constructor's signature is written
            annotations = vars(cls).get("__annotations__", {})
            read = any("Var" in str(one) or "KW_ONLY" in str(one) for one in annotations.values())
            if not read:  # the standard library matches every text against ClassVar, InitVar and KW_ONLY
                cls.__annotations__ = dict.fromkeys(annotations, object)
            result = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
            if not read:
                result.__annotations__ = annotations
                for field in dataclasses.fields(result):
                    field.type = annotations.get(field.name, field.type)
            return _with_methods(result)

        return made


def _with_methods(cls: Any) -> Any:
    """Give a class the methods of a frozen dataclass, but for those that it has itself."""
    cls.__dataclass_params__.frozen = cls.__dataclass_params__.eq = True
    fields = dataclasses.fields(cls)
    names = tuple([field.name for field in fields])
    compared = tuple([field.name for field in fields if field.compare])
    key: Any = attrgetter(*compared or ("__class__",))
    made = 0

    def initialise(self: Any, *given: Any, **named: Any) -> None:
        nonlocal made
        made += 1
        if made > UNCOMPILED or not _is_filled(self, fields, given, named):
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


def _is_filled(self: Any, fields: Sequence[Field[Any]], given: Sequence[Any], named: dict[str, Any]) -> bool:
    """Give a value its fields as a constructor would; return whether it can be called so, else nothing is done."""
    plain = [field.name for field in fields if not field.kw_only]
    values = dict(zip(plain, given, strict=False))
    if len(given) > len(plain) or not values.keys().isdisjoint(named):
        return False
    values |= named
    for field in fields:
        if field.name in values:
            continue
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        else:
            return False
    if len(values) > len(fields):
        return False
    for field in fields:
        object.__setattr__(self, field.name, values[field.name])
    if hasattr(self, "__post_init__"):
        self.__post_init__()
    return True


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
