"""Command lines of launch scripts: environment, launcher, program and flags, told apart without running anything."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.documents.loading import parse_document
from memplan.errors import InvalidFileError
from memplan.importer.shell.expansions import REFERENCE, Scope, filled
from memplan.importer.sources.given_keys import GivenKeys

NAME = "command line"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_ENDS = frozenset(("|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "<"))
_ASSIGNED = re.compile(r"\+{0,2}[A-Za-z_][A-Za-z0-9_./@]*=")
_SEVERAL_ASSIGNED = re.compile(rf"{_ASSIGNED.pattern}\S*(\s+{_ASSIGNED.pattern}\S*)+")
_CHOSEN = re.compile(r"[a-z_-]+[-_]checkpoint:\S+")
"""A word that chooses a part of a configuration, as torchtitan 0.3 takes it behind its flags."""
_UNREAD = re.compile(r"\$(?:\w+|\{[^{}]*\}|\(.*\))|`.*`", re.DOTALL)
"""A word that is nothing but a variable, or what a command prints, and so may be several words."""
_CONFIG_SCRIPT = re.compile(r"(?:.*/)?config/[^/]+\.py")
"""A file of settings in Python, as nanoGPT takes it."""
SWITCHED = ("true", "false", "yes", "no")
"""Values behind which a flag has no others."""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
OUTER = ("srun", "mpirun", "mpiexec")
"""Launchers that may stand in front of another, which then counts."""
SHORT = {
    "-np": "--num_processes",
    "-n": "--num_processes",
    "--ntasks": "--num_processes",
    "-N": "--nnodes",
    "--nodes": "--nnodes",
    "--ntasks-per-node": "--nproc_per_node",
    "-npernode": "--npernode",
}
"""Their flags for processes and machines -> torchrun's and accelerate's (manuals of srun and of Open MPI's mpirun)."""
HOST_FLAGS = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude"}
"""Flags of deepspeed's launcher for machines -> their long names (deepspeed/launcher/runner.py, 0.19.8)."""
STARTED = ("swift", "megatron", "llamafactory-cli", "axolotl", "trl", "litgpt", "openrlhf")
"""Commands that a launcher may be given in place of a Python program, since they are one."""
CONFIG_VARIABLE = "CONFIG_FILE"
"""The variable that names a configuration to torchtitan's ``run_train.sh``, as NGPU says how many processes it starts."""
RUN_VARIABLES = {"MODULE": "module", "CONFIG": "config"}
"""Variables of that script from torchtitan 0.3 on -> the flags for a model's module and an entry of its registry."""
CONFIG_FLAGS = ("config", "config_file", "job.config_file", "config_path")
FILES = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command, taken apart."""

    job: GivenKeys  # The flags of the program
    launcher: str  # The launcher's name, or nothing
    launched: GivenKeys  # The launcher's own flags
    config: tuple[str, ...]  # Files that the flags or words name
    unread: tuple[tuple[str, int], ...] = ()  # Words that stand for others that nobody can tell, and where
    unset: tuple[tuple[str, int], ...] = ()  # Words that are nothing, since nobody sets their variable, and where
    line: int = 1  # Where it begins in a script
    written: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # Files that its script writes before, by path
    folder: str = ""  # Where its script runs it, from where that runs itself
    short: Mapping[str, Any] = field(
        default_factory=dict
    )  # Flags of one letter, with their dash, whose values are words of the program


def command_line(
    words: Sequence[str],
    name: str = NAME,
    lines: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> CommandLine:
    """Return a command taken apart.

    Args:
        lines: Where each word stands in a script; nothing where words are counted instead.
        environment: Variables that it is given besides those in front of it.
    """
    texts, places = _texts(words, lines)
    variables, start = _environment(texts)
    texts = texts[: next((at for at, word in enumerate(texts) if word in _ENDS), len(texts))]
    launcher, script = _launcher(texts, start)
    if short := SHORT if launcher in OUTER else HOST_FLAGS if launcher == "deepspeed" else {}:
        texts[start:script] = [_spelled(text, short) for text in texts[start:script]]
    own, single = _own_end(texts, script), _takes_one(texts[script:])
    launched = _flags(texts, start, script) if own == len(texts) else _flags(texts, own, len(texts))
    job = _flags(texts, script, own, single=single)
    program = tuple(word for word in (*texts[start:script], *job.places) if not word.startswith("-"))
    config = [str(job.flags[flag]) for flag in CONFIG_FLAGS if isinstance(job.flags.get(flag), str)]
    given = {**(environment or {}), **variables}
    titan = {}
    if any(text.endswith("run_train.sh") for text in job.places):
        config += [given[CONFIG_VARIABLE]] if CONFIG_VARIABLE in given else []
        titan = {flag: given[name] for name, flag in RUN_VARIABLES.items() if name in given and flag not in job.flags}
    config = [text for text in (*config, *job.places) if text.endswith(FILES) or _CONFIG_SCRIPT.fullmatch(text)]
    dropped = [key for key in CONFIG_FLAGS if "." not in key and str(job.flags.get(key)) in config]
    data = {key: value for key, value in job.flags.items() if key not in dropped}
    counted = "line" if lines else "word"
    return CommandLine(
        GivenKeys(name, {**titan, **data, **job.assigned}, job.where(places), "argv", program, given, counted=counted),
        launcher,
        GivenKeys(name, launched.flags, launched.where(places), "argv", (launcher,), given, counted=counted),
        tuple(dict.fromkeys(config)),
        tuple((texts[at], places[at]) for at in job.unread),
        line=min(places[start : start + 1], default=1),
        short=_short_flags(texts[script:]),
    )


def _own_end(texts: Sequence[str], script: int) -> int:
    """Return where a program's own words end: axolotl's command hands its launcher what stands behind ``--`` (cli/main.py, 0.21.0)."""
    end = texts.index("--", script) if "--" in texts[script:] else len(texts)
    return end if any(text.rsplit("/", 1)[-1] == "axolotl" for text in texts[script:end]) else len(texts)


def _short_flags(texts: Sequence[str]) -> dict[str, Any]:
    """Return flags of one letter with the word behind each, or as switches where that is a flag too."""
    pairs = zip(texts, [*texts[1:], "-"], strict=False)
    return {flag: True if value.startswith("-") else _value([value]) for flag, value in pairs if _is_short(flag)}


def _spelled(text: str, short: Mapping[str, str]) -> str:
    """Return a flag of a launcher for processes or machines by its other name."""
    flag, equals, value = text.partition("=")
    return short.get(flag, flag) + equals + value


def _texts(words: Sequence[str], lines: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return words with flags split from values in the same word, and shell defaults and arithmetic put in; and where each stands."""
    texts: list[str] = []
    places: list[int] = []
    for at, word in enumerate(words if lines else _whole_expressions(words)):
        text = (str(word) if lines else _without_half_a_quote(filled(str(word), Scope()))).strip()
        text = _LOCATED.sub(r"\1", text)
        split = text.startswith("--") and " " in text and "=" not in text.split(" ")[0]
        several = _SEVERAL_ASSIGNED.fullmatch(text)
        parts = text.split(None, 1) if split else text.split() if several else [text]
        parts = [part for part in parts if part and part != "\\"]
        texts += parts
        places += [lines[at]] * len(parts) if lines else range(len(places) + 1, len(places) + len(parts) + 1)
    return texts, places


_LOCATED = re.compile(r"\$\((?:which|command -v|type -P) ([\w.-]+)\)")
"""A program that a shell is asked to find, as in ``torchrun $(which trl) sft``."""


def _without_half_a_quote(text: str) -> str:
    """Return a word without a quote that only begins or only ends it, as it is left where a script was cut at its blanks."""
    return text.strip('"') if text.count('"') == 1 else text


def _whole_expressions(words: Sequence[str]) -> list[str]:
    """Return words in which ``$(expr 16 / 4)`` is one."""
    whole: list[str] = []
    for word in words:
        open_one = bool(whole) and whole[-1].startswith("$(expr") and not whole[-1].endswith(")")
        whole[-1:] = [f"{whole[-1]} {word}"] if open_one else [*whole[-1:], str(word)]
    return whole


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
        return _outer_launcher(names, start)
    at += 1 + (names[at] == "accelerate" and names[at + 1 : at + 2] == ["launch"])
    for place in range(at, len(texts)):
        before = texts[place - 1] if place else ""
        named = REFERENCE.match(texts[place]) and not (before.startswith("-") and "=" not in before)
        if names[place].endswith(".py") or names[place] in STARTED or before in ("-m", "--module") or named:
            return names[at - 1] if names[at - 1] != "launch" else "accelerate", place
    return names[at - 1] if names[at - 1] != "launch" else "accelerate", len(texts)


def _outer_launcher(names: Sequence[str], start: int) -> tuple[str, int]:
    """Return the launcher of a Python program that starts one process for each GPU, and where that program stands."""
    outer = next((name for name in names[start:] if name in OUTER), "")
    ran = (at for at in range(start, len(names)) if names[at].endswith(".py") or names[at - 1] == "-m")
    script = next(ran, None) if outer else None
    return ("", start) if script is None else (outer, script)


@dataclass(slots=True)
class _Flags:
    """Flags of a part of a command."""

    flags: dict[str, Any] = field(default_factory=dict)  # With their values
    places: list[str] = field(default_factory=list)  # Other words
    at: dict[str, int] = field(default_factory=dict)  # Where each flag stands among the words, from 0
    assigned: dict[str, Any] = field(default_factory=dict)  # Keys given as ``a.b=c``
    unread: list[int] = field(default_factory=list)  # Words behind flags that stand for others that are not known

    def where(self, places: Sequence[int]) -> dict[tuple[Any, ...], int]:
        """Return the line, or the place, of each flag."""
        return {(name,): places[at] for name, at in self.at.items()}


def _takes_one(texts: Sequence[str]) -> bool:
    """Tell whether each flag of a program has one value at most, as LitGPT's have, which jsonargparse reads."""
    return any(text.rpartition("/")[2] == "litgpt" for text in texts)


def _flags(texts: Sequence[str], start: int, end: int, *, single: bool = False) -> _Flags:
    result = _Flags()
    at = start
    while at < end:
        text, here = texts[at], at
        at += 1
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text[2:].partition("=")
            name = name.replace("-", "_")
            values = [value] if equals else []
            while not equals and at < end and not (single and values) and _goes_on(values, texts[at]):
                values.append(texts[at])
                at += 1
            result.flags[name], result.at[name] = _value(values), here
        elif _ASSIGNED.match(text) and result.places:
            name, _, value = text.lstrip("+").partition("=")
            result.assigned[name], result.at[name] = _value([value]), here
        elif result.at and _UNREAD.fullmatch(text):
            result.unread.append(here)
        elif not text.startswith("-"):
            result.places.append(text)
    return result


def _goes_on(values: Sequence[str], text: str) -> bool:
    """Tell whether a word is a further value of a flag: no flag, nothing but a number behind one, and no assignment behind any."""
    if text.startswith("--") or _is_short(text) or _CHOSEN.fullmatch(text):
        return False
    number = bool(values) and values[-1].isdigit()
    single = number or (bool(values) and values[-1].lower() in SWITCHED)
    others = bool(values) and (_ASSIGNED.match(text) or (single and _UNREAD.fullmatch(text)))
    return not ((number and text[0].isalpha()) or others)


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
