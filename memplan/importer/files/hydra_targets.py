"""Hydra's files: classes that ``_target_`` names and what they are given, as a program in Python would call them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.importer.python.calls.called_names import CONFIGS, PLAIN, TRAINERS
from memplan.importer.python.calls.called_trainers import trainer_keys
from memplan.importer.sources.given_keys import Expression, GivenKeys

TARGET = "_target_"
"""The key that names a class or function (hydra 1.3: ``hydra.utils.instantiate``)."""
OBJECTS = ("get_object", "get_class", "get_method", "get_dtype", "getattr")
"""Functions that return what a path names."""
LIBRARIES = ("transformers", "trl", "peft")
DEEPEST = 20


def with_targets(keys: GivenKeys) -> GivenKeys:
    """Return a trainer's keys where a file's targets are its classes; else the keys as they are."""
    data: dict[str, Any] = {}
    lines: dict[tuple[str | int, ...], int] = {}
    for path, called, given in _targets(keys.data, (), 0):
        if called not in data:
            data[called] = {name: _value(value) for name, value in given.items() if not name.startswith("_")}
            lines |= {(called, name): keys.lines.get((*path, name), keys.lines.get(path, 1)) for name in data[called]}
    arguments = next((name for name in CONFIGS if name in data), None)
    if arguments is None:
        return keys
    words = list(data)
    if not any(name in data for name in (*TRAINERS, *PLAIN)):  # the program makes the trainer of those arguments
        own = arguments.replace("Config", "Trainer")
        words.append(own if own in TRAINERS else PLAIN[0])
    result = trainer_keys(replace(keys, data=data, lines=lines, form="python", words=tuple(words)))
    return result if result.form == "file" else keys


def _targets(
    data: Any, path: tuple[str | int, ...], depth: int
) -> Iterator[tuple[tuple[str | int, ...], str, Mapping[str, Any]]]:
    if isinstance(data, Mapping) and depth < DEEPEST:
        if isinstance(target := data.get(TARGET), str) and target.partition(".")[0] in LIBRARIES:
            yield path, _called(target), data
        for key, value in data.items():
            yield from _targets(value, (*path, key), depth + 1)
    elif isinstance(data, list) and depth < DEEPEST:
        for place, value in enumerate(data):
            yield from _targets(value, (*path, place), depth + 1)


def _called(target: str) -> str:
    """Return a target as a call of it is named.

    Example:
        >>> _called("transformers.AutoModelForCausalLM.from_pretrained"), _called("trl.SFTConfig")
        ('AutoModelForCausalLM_from_pretrained', 'SFTConfig')
    """
    parts = target.split(".")
    return "_".join(parts[-1 if parts[-1][:1].isupper() else -2 :])


def _value(value: Any) -> Any:
    """Return what an argument is: an object's name without torch's, and an instance as an expression."""
    if isinstance(value, Mapping) and isinstance(target := value.get(TARGET), str):
        if target.endswith(OBJECTS):
            return str(value.get("path", "")).rpartition(".")[2]
        return Expression(f"{_called(target)}(...)")
    if isinstance(value, Mapping):
        return {key: _value(one) for key, one in value.items()}
    if isinstance(value, str):
        return Expression(value) if value.startswith("${") else value.removeprefix("torch.")
    return value
