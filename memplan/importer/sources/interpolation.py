"""References between keys of one file, as OmegaConf follows them: ``${a.b}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.errors import InvalidFileError
from memplan.importer.sources.given_keys import MISSING, GivenKeys

_WHOLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_.]*)\}")
DEEPEST = 20


def interpolated(keys: GivenKeys) -> GivenKeys:
    """Return keys in which references to other keys are replaced; those to anything else stay as they are.

    Raises:
        InvalidFileError: References that lead back to themselves.
    """
    return replace(keys, data=_filled(keys.data, keys, ()), variables=frozenset(_named(keys.data)))


def _named(value: Any) -> Iterator[str]:
    """Yield the names of keys that references name."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _named(item)
    elif isinstance(value, str) and "${" in value:
        yield from _WHOLE.findall(value)


def _filled(value: Any, keys: GivenKeys, path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item, keys, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, keys, path) for item in value]
    return _followed(value, keys, ".".join(path)) if isinstance(value, str) and "${" in value else value


def _followed(text: str, keys: GivenKeys, path: str) -> Any:
    value: Any = text
    for _ in range(DEEPEST):
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := _WHOLE.fullmatch(value.strip()):
            result = keys.value(whole[1])
            if result is MISSING or isinstance(result, Mapping | list):
                return value
            value = result
            continue
        replaced = _WHOLE.sub(lambda match: _text(keys, match), value)
        if replaced == value:
            return value
        value = replaced
        if len(value) > 10_000:
            break
    raise InvalidFileError([f"{keys.where(path)}: a reference that leads back to itself"])


def _text(keys: GivenKeys, match: re.Match[str]) -> str:
    result = keys.value(match[1])
    return match[0] if result is MISSING or isinstance(result, Mapping | list) else str(result)
