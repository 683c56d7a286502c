"""Files that inherit from others, as Hydra's ``defaults`` names them, and references between keys of one, as OmegaConf follows them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memplan.documents.opening import is_file, shown_path, whole_path
from memplan.errors import InvalidFileError, printable
from memplan.importer.sources.given_keys import MISSING, GivenKeys

DEEPEST = 12
FILES = (".yaml", ".yml")
DEFAULTS = "defaults"
"""The key that names files to inherit from."""

Read = Callable[[Path], tuple[GivenKeys, str]]
"""A file -> its keys, and the package that its header puts them in (``# @package _global_``), or nothing."""
ITSELF = "_self_"
"""Where a file's own keys stand among those that it includes (hydra 1.3); last where it is not said."""
_NAME = re.compile(r"[\w./-]+")


def with_includes(keys: GivenKeys, path: Path, read: Read, above: tuple[Path, ...] = ()) -> GivenKeys:
    """Return keys with those of the files that ``defaults`` names put in below them; files that are not there are noted.

    Args:
        keys: Of the file at ``path``.
        path: Where relative names start.

    Raises:
        InvalidFileError: A file that includes itself.
    """
    here = whole_path(path)
    above = (*above, here)
    own = {key: value for key, value in keys.data.items() if key != DEFAULTS}
    data: Mapping[str, Any] = {}
    absent: list[str] = []
    for group, name in _names(keys):
        if name == ITSELF:
            data, own = merged(data, own), {}
            continue
        other = (here.parent / name).resolve()
        place = keys.where(DEFAULTS)
        if other in {one.resolve() for one in above} or len(above) > DEEPEST:
            raise InvalidFileError([f"{place}: {printable(name)} includes itself"])
        if not is_file(other):
            absent.append(f"the file {shown_path(other)}, which {place} includes")
            continue
        inner, package = read(other)
        data = merged(data, _packed(with_includes(inner, other, read, above).data, package or group))
    return replace(keys, data=merged(data, own), absent=tuple(absent))


def _packed(data: Mapping[str, Any], package: str) -> Mapping[str, Any]:
    """Return keys below the names of a package."""
    for name in reversed(package.split(".") if package not in ("", "_global_") else []):
        data = {name: data}
    return data


def _names(keys: GivenKeys) -> Iterator[tuple[str, str]]:
    """Yield what ``defaults`` names: a group of Hydra's, or nothing, and the file; :data:`ITSELF` for the keys beside it."""
    given = keys.data.get(DEFAULTS)
    single = [given] if isinstance(given, str) and given.endswith(FILES) else []
    for one in given if isinstance(given, list) else single:
        pairs = one.items() if isinstance(one, Mapping) else [("", one)]
        for group, name in pairs:
            group = group.removeprefix("override ").strip()
            named = isinstance(name, str) and _NAME.fullmatch(name) and (not group or _NAME.fullmatch(group))
            if not named or group.partition("/")[0] == "hydra":
                continue
            file = name if name == ITSELF or name.endswith(FILES) else f"{name}.yaml"
            yield group.replace("/", "."), f"{group}/{file}" if group else file


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested keys with others over them."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[key] = merged(inner, value) if both and isinstance(inner, Mapping) else value
    return result


_WHOLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_.]*)\}")
LONGEST_CHAIN = 20


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
    for _ in range(LONGEST_CHAIN):
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
