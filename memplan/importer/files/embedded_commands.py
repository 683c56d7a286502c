"""Files of schedulers that hold the command which starts a job: SkyPilot, Kubernetes, Compose, dstack and the like."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from memplan.importer.files.script_commands import command_of
from memplan.importer.shell.shell_commands import shell_commands
from memplan.importer.sources.argument_vectors import CommandLine
from memplan.importer.sources.given_keys import GivenKeys
from memplan.importer.sources.started_processes import GIVEN_GPUS

WORDS = ("command", "entrypoint", "args", "arguments", "cmd")
"""Keys whose lists are the words of one command, in this order; whose texts are a script."""
SCRIPTS = ("run", "script", "commands", "source", "startup_script")
"""Keys of a script, or of a list of its lines."""
VARIABLES = ("env", "envs", "environment", "environment_variables", "env_variables", "envVars")
"""Keys of variables: a mapping, or a list of pairs."""
DEEPEST = 20
MOST = 100
"""Scripts of a file that is one job's; of more none is read."""


def embedded_commands(keys: GivenKeys) -> tuple[CommandLine, ...]:
    """Return the commands that scripts and containers of a file start, none of which is run; none where it has no such keys.

    Raises:
        InvalidFileError: A script in it cannot be read.
    """
    scripts = list(islice(_scripts(keys, keys.data, (), {}, 0), MOST + 1))
    if len(scripts) > MOST:
        return ()
    given_values = _inputs(keys.data)
    scripts = [_INPUT.sub(lambda one: given_values.get(one[1], one[0]), script) for script in scripts]
    counted = max(_counts(keys.data, 0), default=0)
    given = {GIVEN_GPUS: ",".join(map(str, range(counted)))} if counted else {}
    commands = [one for script in scripts for one in shell_commands(script, keys.name)]
    return tuple(_with_gpus(command_of(one, keys.name), given) for one in commands)


def _with_gpus(command: CommandLine, given: Mapping[str, str]) -> CommandLine:
    return replace(command, job=replace(command.job, environment={**given, **(command.job.environment or {})}))


def _scripts(
    keys: GivenKeys, data: Any, path: tuple[str | int, ...], outer: Mapping[str, str], depth: int
) -> Iterator[str]:
    """Yield the scripts of a file, each on the lines where it stands there, behind the variables that are set for it."""
    if depth > DEEPEST:
        return
    if isinstance(data, list):
        for place, inner in enumerate(data):
            yield from _scripts(keys, inner, (*path, place), outer, depth + 1)
    elif isinstance(data, Mapping):
        variables = {**outer, **_variables(data)}
        for key, text in _texts(data, variables):
            line = keys.lines.get((*path, key), 1)
            yield "\n" * (line - 1) + _exports(variables) + text
        for key, inner in data.items():
            yield from _scripts(keys, inner, (*path, key), variables, depth + 1)


_INPUT = re.compile(r"\$\{\{\s*(?:inputs|parameters|params|env|vars)\.([\w-]+)\s*\}\}")
"""What Azure's jobs and GitHub's workflows put a value in for, with what the file gives by default."""


def _inputs(data: Mapping[str, Any]) -> dict[str, str]:
    """Return what a file's own inputs and variables are, or are by default."""
    values: dict[str, str] = {}
    for key in ("inputs", "parameters", "params", "env", "vars"):
        section = data.get(key)
        for name, value in section.items() if isinstance(section, Mapping) else ():
            plain = value.get("default", value.get("value")) if isinstance(value, Mapping) else value
            values |= {str(name): str(plain)} if isinstance(plain, str | int | float) else {}
    return values


_REFERENCE = re.compile(r"\$\(([A-Za-z_]\w*)\)")
"""What Kubernetes puts a container's variable in for, in ``command`` and ``args``."""


def _texts(data: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the scripts of a mapping with their keys: behind the line of a key where they have several lines."""
    words: list[str] = []
    first = ""
    for key in WORDS:
        value = data.get(key)
        if isinstance(value, list) and value and all(isinstance(word, str | int | float) for word in value):
            first = first or key
            words += [_REFERENCE.sub(lambda one: variables.get(one[1], one[0]), str(word)) for word in value]
        elif isinstance(value, str):
            if words:
                words += value.split()
            else:
                yield key, _placed(_with_program(value, data))
    if words:
        yield first, _with_program(shlex.join(words), data)
    for key in SCRIPTS:
        value = data.get(key)
        given = value if isinstance(value, list) else [value]
        lines = [line for line in given if isinstance(line, str)]
        if lines and len(lines) == len(given):
            yield key, _placed("\n".join(lines))


def _with_program(text: str, data: Mapping[str, Any]) -> str:
    """Return a container's words behind the name of its image where they are flags for the program that it starts."""
    image = data.get("image")
    return f"{image} {text.lstrip()}" if isinstance(image, str) and text.lstrip().startswith("-") else text


def _placed(text: str) -> str:
    """Return a script of several lines as it stands below its key, and one of a single line as it stands beside it."""
    return f"\n{text}" if "\n" in text.strip() else text


def _variables(data: Mapping[str, Any]) -> dict[str, str]:
    result: dict[str, str] = {}
    for key in VARIABLES:
        value = data.get(key)
        if isinstance(value, Mapping):
            result |= {str(name): str(one) for name, one in value.items() if isinstance(one, str | int | float)}
        for one in value if isinstance(value, list) else ():
            if isinstance(one, Mapping) and "name" in one and "value" in one:
                result[str(one["name"])] = str(one["value"])
            elif isinstance(one, str) and "=" in one:
                name, _, text = one.partition("=")
                result[name] = text
    result |= {"SKYPILOT_NUM_NODES": str(data["num_nodes"])} if "num_nodes" in data else {}
    if counts := list(_counts(data.get("resources"), 0)):
        result["SKYPILOT_NUM_GPUS_PER_NODE"] = str(counts[0])
    return result


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items() if name.isidentifier())


_ACCELERATORS = re.compile(r"[\w-]+:(\d{1,4})")


def _counts(data: Any, depth: int) -> Iterator[int]:
    """Yield the numbers of GPUs that a file asks for, each for one machine."""
    if isinstance(data, Mapping) and depth < DEEPEST:
        for key, value in data.items():
            if key in ("nvidia.com/gpu", "gpus", "gpu_count", "accelerators", "gpu"):
                told = _ACCELERATORS.fullmatch(value) if isinstance(value, str) else None
                plain = [value, *(value.values() if isinstance(value, Mapping) else ())]
                yield from (
                    [int(told[1])] if told else [int(one) for one in plain if str(one).isdigit() and int(one) <= 1024]
                )
            else:
                yield from _counts(value, depth + 1)
    elif isinstance(data, list) and depth < DEEPEST:
        for value in data:
            yield from _counts(value, depth + 1)
