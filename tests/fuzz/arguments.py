"""Command lines drawn at random: real commands with hostile words in the places of names, sizes and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import typer
from hypothesis import strategies as st

from memplan.cli.main import make_app
from memplan.training.config import TrainingConfig

MODELS = (
    "gpt2",
    "llama-8b",
    "smollm2-135m",
    "lama",
    "-",
    "~",
    ".",
    "/dev/zero",
    "x.gguf",
    "x.safetensors",
    "x.json",
    "",
)
GPUS = ("rtx4090", "h100", "local", "LOCAL", "mi325x", "gb300", "rtx")
CONFIGS = ("bf16-adamw", "tier1", "lora", "qlora", "muon", "-", "x.yaml", "./x.json", "fp32-adamw")
NUMBERS = (
    "0", "1", "2", "7", "8", "64", "1024", "16384", "16385", "1000000", "-1", "1.5", "1e3", "nan", "inf", "9" * 30,
    "9" * 5000, "0x10", "", " ", "\u0661", "1_000", "+5", "two",
)  # fmt: skip
SIZES = ("24GiB", "80 GB", "0 GiB", "1 B", "1e30 GiB", "24", "GiB", "24 GiB GiB", "nan GiB", "1048576 TiB", "0.5 GiB")
HOSTILE = (
    "", " ", "\n", "\x1b[31m", "\u2028", "\u202e", "\udcff", "\udc80x", "x" * 300, "x" * 5000, "%s", "{}", "[bold]",
    "--", "-", "'", '"', "\\", "::error::x", "=", "=1", "ﬀ", "\u0661\u0662", "/", "..", "~nobody/x", "$HOME", "a/b/c", "/proc/self/mem",
)  # fmt: skip
SETTINGS = (
    *TrainingConfig.__dataclass_fields__, "kernels.optimizer", "kernels.attention", "kernels.preset", "adapter.rank",
    "adapter.kind", "adapter.targets", "gradients.dtype", "gradients.lifetime", "weights.norm", "optimizer.embedding",
    "parallel.data", "parallel.zero_stage", "offload.optimizer_states", "Kernels", "Kernels.optimizer", "none", "a.b.c",
    ".", "..", "a..b", "\x1b", "\udcff", "",
)  # fmt: skip
SET_VALUES = (
    "bf16", "fp32", "fused", "none", "full", "lora", "true", "0", "1", "8", "-1", "1.5", "9" * 5000, ".nan", ".inf", "~",
    "[]", "{}", "[a, b]", "{a: b}", "{kind: lora, rank: 4}", "*a", "&a [*a]", "[" * 200, "[a: b", "!!x y", "'", "\x00",
    "\udcff", "\u2028", "500 MiB", "q4-0", "tier1", "muon-int4", "adamw-8bit", "x" * 5000, "",
)  # fmt: skip


SECTIONS = ("gpus", "models", "formats", "gradients", "optimizers", "configs")
HOSTILE_WORD = st.sampled_from(HOSTILE) | st.text(max_size=8)


def _words(*known: str) -> st.SearchStrategy[str]:
    """Words of a kind, most of them good ones, so that one bad word is met where all others are taken."""
    good = st.sampled_from(known)
    return st.integers(0, 7).flatmap(lambda draw: good if draw else HOSTILE_WORD)


MODEL, GPU, CONFIG, NUMBER, SIZE = (_words(*known) for known in (MODELS, GPUS, CONFIGS, NUMBERS, SIZES))
SET = st.tuples(_words(*SETTINGS), _words(*SET_VALUES)).map("=".join)

OPTIONS: Mapping[str, st.SearchStrategy[str] | None] = {
    "--gpu": GPU, "--gpu-memory": SIZE, "--gpus": NUMBER, "--config": CONFIG, "--micro-batch-size": NUMBER,
    "--sequence-length": NUMBER, "--set": SET, "--checkpointing": _words("none", "selective", "full", "Full"),
    "--layers": NUMBER, "--hidden": NUMBER, "--heads": NUMBER, "--kv-heads": NUMBER, "--head-dim": NUMBER,
    "--vocab": NUMBER, "--intermediate": NUMBER, "--catalog": _words("x.yaml", ".", "/"), "--most": NUMBER,
    "--format": _words("table", "plain", "json", "csv", "md", "xml"), "--units": _words("GiB", "GB", "gib"),
    "--keep": _words("weights", "optimizer", "batch"), "--min-batch": NUMBER, "--min-step-batch": NUMBER,
    "--min-sequence": NUMBER, "--host-memory": SIZE, "--price": _words("prices.yaml", "-"), "--profile": _words("x.json", "-"),
    "--for": _words("parameters", "batch", "sequence", "lora-rank", "layers"), "--accounting": _words("sum", "notes"),
    "--baseline": _words("x.json", "-"), "--json": None, "--quiet": None, "--strict": None, "--tied": None,
    "--experimental": None, "--no-such-option": NUMBER,
}  # fmt: skip
"""Options and their words; none of them writes a file or starts torch."""

NAMES = _words(*MODELS, *GPUS, *CONFIGS)
COMMANDS: Mapping[str, tuple[st.SearchStrategy[str], ...]] = {
    "fit": (MODEL,), "max": (), "where": (MODEL,), "suggest": (MODEL,), "frontier": (MODEL,), "compare": (MODEL, MODEL),
    "explain": (MODEL,), "recommend": (), "show": (NAMES,), "list": (_words(*SECTIONS),), "doctor": (),
    "tables": (_words("s000", "s004.t1"),), "schema": (_words("plan", "check", "config"),),
    "check": (_words("memplan-budget.yaml", "-", "/dev/stdin"),), "diff": (_words("a.json", "-"), _words("a.json", "-")),
    "lab": (st.just("show"), _words("tier1", "orthogonality")), "no-such-command": (NAMES,),
}  # fmt: skip
"""Commands and their words."""


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """Draw arguments, and what standard input holds."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    arguments = [name, *(draw(word) for word in COMMANDS[name])]
    for option in draw(st.lists(st.sampled_from(_known(name)), max_size=5)):
        words = OPTIONS[option]
        arguments += [option] if words is None else [option, draw(words)]
    if not draw(st.integers(0, 15)):
        arguments.insert(draw(st.integers(0, len(arguments))), draw(HOSTILE_WORD))
    stdin = draw(st.just(b"") | st.binary(max_size=20) | st.sampled_from([b"{}", b"a: 1", b"\xff", b"[" * 10_000]))
    return [word.replace("\x00", "") for word in arguments], stdin


@cache
def _known(name: str) -> list[str]:
    """Return the options of a command that are drawn from, and one that it does not have."""
    command = _COMMANDS.commands.get(name)
    has = {option for parameter in command.params for option in parameter.opts} if command is not None else set()
    return [option for option in OPTIONS if option in has or option == "--no-such-option"]


_COMMANDS = typer.main.get_command(make_app())
