"""Command lines of launch scripts: environment, launcher, program and flags, told apart without running anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.documents.loading import parse_document
from memplan.errors import InvalidFileError
from memplan.importer.sources.given_keys import GivenKeys

NAME = "command line"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_DEFAULTED = re.compile(r"\$\{[A-Za-z_0-9]+:-([^${}]*)\}")
_ARITHMETIC = re.compile(r"\$\((?:\(|expr )\s*(\d{1,9})\s*(\\?[*+/-])\s*(\d{1,9})\s*\)?\)")
_ENDS = frozenset(("|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "<"))
_ASSIGNED = re.compile(r"\+{0,2}[A-Za-z_][A-Za-z0-9_./@]*=")
_SEVERAL_ASSIGNED = re.compile(rf"{_ASSIGNED.pattern}\S*(\s+{_ASSIGNED.pattern}\S*)+")
_CHOSEN = re.compile(r"[a-z_-]+[-_]checkpoint:\S+")
"""A word that chooses a part of a configuration, as torchtitan 0.3 takes it behind its flags."""
_CONFIG_SCRIPT = re.compile(r"(?:.*/)?config/[^/]+\.py")
"""A file of settings in Python, as nanoGPT takes it."""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
STARTERS = ("accelerate", "axolotl", "deepspeed", "llamafactory-cli", "lmf", "trl")
"""Commands that start a process for each GPU that they see, where nothing says how many."""
CONFIG_FLAGS = ("config", "config_file", "job.config_file", "config_path")
FILES = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command, taken apart."""

    job: GivenKeys  # The flags of the program
    launcher: str  # The launcher's name, or nothing
    launched: GivenKeys  # The launcher's own flags
    config: tuple[str, ...]  # Files that the flags or words name


def command_line(words: Sequence[str], name: str = NAME) -> CommandLine:
    """Return a command taken apart."""
    texts = _texts(words)
    environment, start = _environment(texts)
    texts = texts[: next((at for at, word in enumerate(texts) if word in _ENDS), len(texts))]
    launcher, script = _launcher(texts, start)
    launched, _, launched_lines, _ = _flags(texts, start, script)
    flags, places, lines, inner = _flags(texts, script, len(texts))
    program = tuple(word for word in (*texts[start:script], *places) if not word.startswith("-"))
    config = [str(flags[flag]) for flag in CONFIG_FLAGS if isinstance(flags.get(flag), str)]
    config = [text for text in (*config, *places) if text.endswith(FILES) or _CONFIG_SCRIPT.fullmatch(text)]
    data = {key: value for key, value in flags.items() if not (key in CONFIG_FLAGS and str(value) in config)}
    return CommandLine(
        GivenKeys(name, {**data, **inner}, lines, "argv", program, environment),
        launcher,
        GivenKeys(name, launched, launched_lines, "argv", (launcher,), environment),
        tuple(dict.fromkeys(config)),
    )


def _texts(words: Sequence[str]) -> list[str]:
    """Return words with flags split from values in the same word, and shell defaults and arithmetic put in."""
    texts: list[str] = []
    for word in _computed(words):
        word = _DEFAULTED.sub(lambda match: match[1], str(word)).strip()
        split = word.startswith("--") and " " in word and "=" not in word.split(" ")[0]
        several = _SEVERAL_ASSIGNED.fullmatch(word)
        texts.extend(word.split(None, 1) if split else word.split() if several else [word])
    return [text for text in texts if text and text != "\\"]


def _computed(words: Sequence[str]) -> list[str]:
    """Return words in which ``$((8*1))`` and ``$(expr 16 / 4)`` of whole numbers are replaced by what they come to."""
    whole: list[str] = []
    for word in words:
        open_one = bool(whole) and whole[-1].startswith("$(expr") and not whole[-1].endswith(")")
        whole[-1:] = [f"{whole[-1]} {word}"] if open_one else [*whole[-1:], str(word)]
    return [_ARITHMETIC.sub(_result, word) for word in whole]


def _result(match: re.Match[str]) -> str:
    left, sign, right = int(match[1]), match[2], int(match[3])
    if sign == "/":
        return str(left // right) if right else match[0]
    return str(left * right if sign.endswith("*") else left + right if sign == "+" else left - right)


def _environment(texts: Sequence[str]) -> tuple[dict[str, str], int]:
    variables: dict[str, str] = {}
    for at, text in enumerate(texts):
        if _VARIABLE.match(text):
            name, _, value = text.partition("=")
            variables[name] = value
        elif text not in ("export", "env"):
            return variables, at
    return variables, len(texts)


def _launcher(texts: Sequence[str], start: int) -> tuple[str, int]:
    """Return the launcher and where the program that it starts stands."""
    names = [text.rsplit("/", 1)[-1] for text in texts]
    if (
        names[start : start + 2] == ["tune", "run"] and "--config" in texts
    ):  # torchrun's flags stand in front of the recipe
        return "tune", texts.index("--config") - 1
    chosen = (at for at in range(start, len(texts)) if names[at] in LAUNCHERS and texts[at - 1] != "--launcher")
    at = next(chosen, None)
    if at is None:
        return "", start
    at += 1 + (names[at] == "accelerate" and names[at + 1 : at + 2] == ["launch"])
    for place in range(at, len(texts)):
        if names[place].endswith(".py") or (place and texts[place - 1] in ("-m", "--module")):
            return names[at - 1] if names[at - 1] != "launch" else "accelerate", place
    return names[at - 1] if names[at - 1] != "launch" else "accelerate", len(texts)


def _flags(
    texts: Sequence[str], start: int, end: int
) -> tuple[dict[str, Any], list[str], dict[tuple[Any, ...], int], dict[str, Any]]:
    """Return flags with their values, other words, where each flag stands, and keys given as ``a.b=c``."""
    flags: dict[str, Any] = {}
    places: list[str] = []
    lines: dict[tuple[Any, ...], int] = {}
    assigned: dict[str, Any] = {}
    at = start
    while at < end:
        text = texts[at]
        here = at + 1
        at += 1
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text[2:].partition("=")
            name = name.replace("-", "_")
            values = [value] if equals else []
            while not equals and at < end and _goes_on(values, texts[at]):
                values.append(texts[at])
                at += 1
            flags[name], lines[(name,)] = _value(values), here
        elif _ASSIGNED.match(text) and places:
            name, _, value = text.lstrip("+").partition("=")
            assigned[name], lines[(name,)] = _value([value]), here
        elif not text.startswith("-"):
            places.append(text)
    return flags, places, lines, assigned


def _goes_on(values: Sequence[str], text: str) -> bool:
    """Tell whether a word is a further value of a flag: no flag, nothing but a number behind one, and no assignment behind any."""
    if text.startswith("--") or _is_short(text) or _CHOSEN.fullmatch(text):
        return False
    number = bool(values) and values[-1].isdigit()
    return not ((number and text[0].isalpha()) or (values and _ASSIGNED.match(text)))


def _is_short(text: str) -> bool:
    return len(text) == 2 and text[0] == "-" and text[1].isalpha()


def _value(values: Sequence[str]) -> Any:
    if not values:
        return True
    plain = [_scalar(value) for value in values]
    return plain[0] if len(plain) == 1 else plain


def _scalar(text: str) -> Any:
    """Return a flag's value as YAML reads it, but for what YAML would take for structure."""
    text = text.strip("'\"")
    if not re.fullmatch(r"[-+A-Za-z0-9_.]{1,40}", text):
        return _mapping(text)
    value = parse_document(text, NAME).data
    return text if value is None or isinstance(value, dict | list) else value


def _mapping(text: str) -> Any:
    """Return keys and values that a flag gives as JSON, or the text."""
    if not (text.startswith("{") and text.endswith("}")) or "${" in text:
        return text
    try:
        return parse_document(text, NAME).data
    except InvalidFileError:
        return text


def processes(keys: GivenKeys, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return how many processes a launcher starts, and the flag or variable that says so."""
    pairs = (("nproc_per_node", "nnodes"), ("num_processes", ""), ("num_gpus", "num_nodes"))
    for per_node, nodes in pairs:
        count = _whole(keys.data.get(per_node))
        if count:
            return per_node, count * ((_whole(keys.data.get(nodes)) or 1) if nodes else 1)
    count = _whole(environment.get("NPROC_PER_NODE"))
    if count:
        return "NPROC_PER_NODE", count * (_whole(environment.get("NNODES")) or 1)
    return None


def visible_gpus(command: CommandLine) -> int | None:
    """Return how many GPUs a command that starts a process for each is shown; None for another, and where nothing shows them.

    Source:
        accelerate/commands/launch.py (1.15.0); llamafactory/launcher.py (0.9.5); deepspeed/launcher/runner.py (0.19.8).
    """
    environment = command.job.environment or {}
    shown = str(environment.get("CUDA_VISIBLE_DEVICES", "")).strip("'\"").split(",")
    first = command.job.words[0].rsplit("/", 1)[-1] if command.job.words else ""
    each = first in STARTERS or command.launched.data.get("nproc_per_node") in ("gpu", "auto")
    nodes = _whole(environment.get("NNODES")) if first in ("llamafactory-cli", "lmf") else 1
    return len([part for part in shown if part.strip()]) * (nodes or 1) or None if each else None


def _whole(value: Any) -> int:
    text = str(value).strip("'\"")
    return int(text) if text.isascii() and text.isdigit() else 0
