"""Names of stacks: their versions, and what took the place of older names."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from memplan.catalog.stacks import OlderVersions, Stack
from memplan.documents.schemas import build
from memplan.errors import CannotAnswerError, InvalidFileError, printable

DEFAULT_STACK = "bundled"


PRESET_STACKS: Mapping[str, str] = {
    "bundled": "bundled",
    "hf-transformers": "transformers",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
}
"""Kernel preset of configs before there were stacks -> the stack that took its place."""


def chosen_stack(stacks: Mapping[str, Stack], name: str, version: str) -> Stack:
    """Return a stack as it is, or was, at a version.

    Args:
        version: What was given behind ``@``; nothing is the version that the file describes.

    Raises:
        InvalidFileError: It is no version.
        CannotAnswerError: That version was not read.
    """
    stack = stacks[name]
    package, newest = next(iter(stack.versions.items()))
    if version in ("", newest):
        return replace(stack, name=name, version=newest)
    given = _parts(version, name)
    if not newest.replace(".", "").isdigit():
        raise CannotAnswerError(f"stack: {name}@{version} is not described; {newest} is")
    if given > _parts(newest, name):
        raise CannotAnswerError(f"stack: {name}@{version} is newer than {newest}, the newest version that was read")
    older = _older(stack, name, given)
    if older is not None:
        data = _merged({k: v for k, v in asdict(stack).items() if k != "history"}, _changes(stacks, older))
        stack = replace(build(Stack, data), history=stack.history)
    else:
        first = min((older.since for older in stack.history), key=lambda text: _parts(text, name), default=newest)
        if given < _parts(first, name):
            raise CannotAnswerError(f"stack: {name}@{version} is older than {first}, the oldest version that was read")
    return replace(stack, name=name, version=version, versions={**stack.versions, package: version})


def _older(stack: Stack, name: str, given: tuple[int, ...]) -> OlderVersions | None:
    """Return what a stack did otherwise at a version, or None where it did nothing so."""
    spans = ((_parts(older.since, name), _parts(older.until, name), older) for older in stack.history)
    return next((older for since, until, older in spans if since <= given and (given[: len(until)] <= until)), None)


def _changes(stacks: Mapping[str, Stack], older: OlderVersions) -> Mapping[str, Any]:
    """Return what older versions did otherwise, with what another stack did then that they are like."""
    if not older.like:
        return older.changes
    name, version = split_name(older.like)
    beneath = _older(stacks[name], name, _parts(version, name))
    return older.changes if beneath is None else _merged(_changes(stacks, beneath), older.changes)


def _parts(version: str, name: str) -> tuple[int, ...]:
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidFileError([f"stack: {name}@{version}: expected a version such as {name}@1.14"])
    return tuple(map(int, parts))


def _merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and values with changes put in, section by section."""
    merged = dict(data)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else value
    return merged


def split_name(given: str) -> tuple[str, str]:
    """Return name and version of ``NAME[@VERSION]``.

    Example:
        >>> split_name("trl@1.6"), split_name("trl")
        (('trl', '1.6'), ('trl', ''))

    Raises:
        InvalidFileError: The @ is its end.
    """
    name, told, version = given.partition("@")
    if told and not version:
        raise InvalidFileError(
            [f"stack: {printable(given)}: expected a version behind the @, such as {printable(name)}@1.14"]
        )
    return name, version


def with_stack(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a record, which is never edited, with a stack where it names the kernel preset of its time."""
    kernels = training.get("kernels")
    if not isinstance(kernels, Mapping):
        return dict(training)
    preset = kernels.get("preset")
    if not isinstance(preset, str) or preset not in PRESET_STACKS:
        return dict(training)
    rest = {key: value for key, value in kernels.items() if key != "preset"}
    return {**training, "kernels": rest, "stack": PRESET_STACKS[preset]}
