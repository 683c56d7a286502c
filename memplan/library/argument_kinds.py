"""Arguments of the library's functions, held against their annotations before anything looks into them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from inspect import signature
from os import PathLike
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from memplan.errors import InvalidFileError, shown_value

P = ParamSpec("P")
R = TypeVar("R")

WORDS: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    PathLike: "a path",
    Mapping: "keys and values",
    Sequence: "a list",
    Iterable: "a list",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that refuses arguments of a kind that its annotations do not name, all at once.

    Raises:
        InvalidFileError: What the function raises where an argument is of another kind.
    """
    names = tuple(signature(function).parameters)

    @wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = kinds_of(function)
        problems = [
            f"{name}: expected {' or '.join(dict.fromkeys(_words(kinds[name])))}, got {shown_value(value)}"
            for name, value in (dict(zip(names, args, strict=False)) | kwargs).items()
            if name in kinds and not _is(value, kinds[name])
        ]
        if problems:
            raise InvalidFileError(problems)
        return function(*args, **kwargs)

    return checking


@cache
def kinds_of(annotated: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a function's parameters, and of the keywords that it passes on.

    Of these, numbers are left out: they are held against their limits where keywords are read.
    """
    hints = get_type_hints(annotated)
    hints.pop("return", None)
    passed = hints.pop("options", None)
    keywords = get_type_hints(get_args(passed)[0]) if get_origin(passed) is Unpack else {}
    return {name: hint for name, hint in keywords.items() if int not in (hint, *get_args(hint))} | hints


def _is(value: object, kind: Any) -> bool:
    """Tell whether a value is of an annotated kind; elements of what can be gone through once only are left alone."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str)
    if origin in (Sequence, Iterable):
        listed = isinstance(value, origin) and not isinstance(value, str | bytes | Mapping)
        value = value[:1] if isinstance(value, range) else value  # whose numbers are all of a kind
        return listed and (not isinstance(value, Sequence) or all(_is(element, inner[0]) for element in value))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if kind in (int, bool):
        return type(value) is kind
    if kind is float:  # which a whole number stands for
        return type(value) in (int, float)
    if kind is Any:
        return True
    if kind in (None, type(None)):
        return value is None
    if origin is PathLike:  # some of which stand for bytes
        return isinstance(value, PathLike) and isinstance(value.__fspath__(), str)
    return isinstance(value, origin or kind) if isinstance(origin or kind, type) else callable(value)


def _words(kind: Any) -> Iterable[str]:
    """Yield what messages call the kinds that an annotation allows."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for one in inner:
            yield from _words(one)
    elif kind not in (None, type(None)):
        named = str if origin is Literal else origin or kind
        of = (
            " or ".join(dict.fromkeys(_words(inner[0])))
            if origin in (Sequence, Iterable) and inner[0] is not Any
            else ""
        )
        yield (WORDS.get(named) or f"a {named.__name__}") + (f" of {of}" if of else "")
