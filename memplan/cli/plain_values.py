"""Values of options that are plain: they become what typer would make of them, without the import that it does so with.

typer (0.26 and later) has pydantic judge every value, which takes as long to import as a quarter of an answer. What is not
plain here, and all that is wrong, is left to it. Where typer has no such judge, nothing here is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

_DIGITS = re.compile(r"\d{1,15}", re.ASCII)
_UNSURE: Any = object()


class PlainValue:
    """What stands in an option's place of typer's judge."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value of what was typed."""
        known = _plain(value, param)
        if known is not _UNSURE:
            return known
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def read_plainly(parameters: Iterable[Any]) -> None:
    """Have plain values of options read here."""
    for one in parameters:
        if hasattr(one, "_runtime_param") and hasattr(one, "type_descriptor"):
            one._runtime_param = PlainValue()


def _plain(value: Any, param: Any) -> Any:
    """Return the value of a text or of several, or that it is not plain."""
    if value is None:
        return () if param.multiple else None
    about, kind = param.type_descriptor.parameter_info, param.type_descriptor.annotation
    if param.multiple:
        texts = kind == list[str] and all(isinstance(one, str) for one in value)
        return [*value] if texts and about.parser is None else _UNSURE
    if not isinstance(value, str):
        return _UNSURE
    if about.parser is not None:
        try:
            return about.parser(value)
        except (ValueError, AssertionError):
            return _UNSURE
    if kind is str:
        return value
    if kind is int and _DIGITS.fullmatch(value) and not about.clamp:
        number, least, most = int(value), about.min, about.max
        return number if (least is None or least <= number) and (most is None or number <= most) else _UNSURE
    choices = {one.value: one for one in kind} if isinstance(kind, type) and issubclass(kind, StrEnum) else {}
    return choices.get(value, _UNSURE)
