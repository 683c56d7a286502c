"""Command lines drawn at random: real commands with hostile words in the places of names, sizes and numbers."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

import typer

from memplan.catalog.training_config import TrainingConfig
from memplan.cli.main import make_app

from .hostile import some_text

MODELS = (
    "gpt2", "llama-8b", "smollm2-135m", "lama", "-", "~", ".", "/dev/zero", "x.gguf", "x.safetensors", "x.json", "",
)  # fmt: skip
GPUS = ("rtx4090", "h100", "local", "LOCAL", "mi325x", "gb300", "rtx")
CONFIGS = ("bf16-adamw", "tier1", "lora", "qlora", "muon", "-", "x.yaml", "./x.json", "fp32-adamw")
NUMBERS = (
    "0", "1", "2", "7", "8", "64", "1024", "16384", "16385", "1000000", "16777216", "1073741824", "-1", "1.5", "1e3", "nan", "inf", "9" * 30,
    "9" * 5000, "0x10", "", " ", "\u0661", "1_000", "+5", "two",
)  # fmt: skip
SIZES = ("24GiB", "80 GB", "0 GiB", "1 B", "1e30 GiB", "24", "GiB", "24 GiB GiB", "nan GiB", "1048576 TiB", "0.5 GiB")
HOSTILE = (
    "", " ", "\n", "\x1b[31m", "\u2028", "\u202e", "\udcff", "\udc80x", "x" * 300, "x" * 5000, "%s", "{}", "[bold]",
    "--", "-", "'", '"', "\\", "::error::x", "=", "=1", "ﬀ", "\u0661\u0662", "/", "..", "~nobody/x", "$HOME", "a/b/c", "/proc/self/mem",
)  # fmt: skip
SETTINGS = (
    *TrainingConfig.__dataclass_fields__, "kernels.optimizer", "kernels.attention", "adapter.rank",
    "adapter.kind", "adapter.targets", "gradients.dtype", "gradients.lifetime", "weights.norm", "optimizer.embedding",
    "parallel.data", "parallel.zero_stage", "parallel.replicate", "offload.optimizer_states", "offload.weights", "freeze.parameters",
    "freeze.train", "freeze.last_layers", "Kernels", "Kernels.optimizer", "none", "a.b.c",
    ".", "..", "a..b", "\x1b", "\udcff", "",
)  # fmt: skip
SET_VALUES = (
    "bf16", "fp32", "fused", "none", "full", "lora", "true", "0", "1", "8", "-1", "1.5", "9" * 5000, ".nan", ".inf", "~",
    "[]", "{}", "[a, b]", "{a: b}", "{kind: lora, rank: 4}", "*a", "&a [*a]", "[" * 200, "[a: b", "!!x y", "'", "\x00",
    "\udcff", "\u2028", "500 MiB", "q4-0", "tier1", "muon-int4", "adamw-8bit", "cpu",
    f"['{'.?' * 100}x']", "['(.*)*x', '[[a]]']", f"[{'.*.*x, ' * 1000}x]", f"[{'q_proj, ' * 20_000}x]", "x" * 5000, "",
)  # fmt: skip


SECTIONS = ("gpus", "models", "formats", "gradients", "optimizers", "configs", "stacks")
Words = tuple[str, ...]
EXAMPLES = tuple(map(str, sorted((Path(__file__).parent.parent / "trainers" / "examples").glob("*"))))
LAUNCHERS = (
    "torchrun", "accelerate", "launch", "deepspeed", "python", "-m", "train.py", "--nproc_per_node", "8", "trl", "dpo", "tune", "run",
    "--model_name_or_path", "gpt2", "--bf16", "true", "litgpt", "finetune_lora", "swift", "sft", "--seq-length", "&&", "|", "$X", "A=1",
    "--a=", "=", "--config", "x.yaml", "pretrain_gpt.py", "--num-layers", "2", "nan", "--hidden-size", "64",
)  # fmt: skip
BAD_PORTS = ("-1", "65536", "nan", "", "1.5", "9" * 30, "x")
OPTIONS: Mapping[str, Words] = {
    "--gpu": GPUS, "--gpu-memory": SIZES, "--gpus": NUMBERS, "--config": CONFIGS, "--micro-batch-size": NUMBERS,
    "--sequence-length": NUMBERS, "--set": SETTINGS, "--checkpointing": ("none", "selective", "full", "Full"),
    "--layers": NUMBERS, "--hidden": NUMBERS, "--heads": NUMBERS, "--kv-heads": NUMBERS, "--head-dim": NUMBERS,
    "--vocab": NUMBERS, "--intermediate": NUMBERS, "--catalog": ("x.yaml", ".", "/"), "--most": NUMBERS,
    "--format": ("table", "plain", "json", "csv", "md", "xml"), "--units": ("GiB", "GB", "gib"),
    "--keep": ("weights", "optimizer", "batch"), "--min-batch": NUMBERS, "--min-step-batch": NUMBERS,
    "--min-sequence": NUMBERS, "--host-memory": SIZES, "--price": ("prices.yaml", "-"), "--profile": ("x.json", "-"),
    "--for": ("parameters", "batch", "sequence", "lora-rank", "layers"), "--accounting": ("sum", "notes"),
    "--baseline": ("x.json", "-"), "--json": (), "--quiet": (), "--strict": (), "--tied": (), "--experimental": (),
    "--qlora": (), "--lora": (), "--full": (), "--lora-rank": NUMBERS, "--optimizer": SET_VALUES,
    "--batch-size": NUMBERS, "--seq-len": (*NUMBERS, "4k", "128K", "k"), "--no-such-option": NUMBERS,
    "--as": ("trl", "axolotl", "llama-factory", "torchtitan", "deepspeed", "unsloth"), "--with": (*EXAMPLES, "-", "x"),
    "--from": ("trl", "axolotl", "megatron", "torchtune", "litgpt", "accelerate"), "--trainer-version": ("0.29", "1.16.0", *NUMBERS),
    "--schedule": ("gpipe", "1f1b", "interleaved", "dualpipev", "", " ", "x"), "--sequence-parallel": (),
    "--method": ("inference", "sft", "dpo", "grpo", "classification", "x", ""), "--engine": ("serving", "x"),
    "--context": NUMBERS, "--concurrency": NUMBERS, "--kv-dtype": ("bf16", "fp8-e4m3", "x", ""), "--weights": ("bf16", "q4-k", "x"),
    "--gpus-per-node": NUMBERS, "--micro-batches": NUMBERS, "--network": ("infiniband-400g", "x", ""), "--output": ("/dev/full", "/", "", "x/y/z"),
    "--batches": ("1,2", ",", "1,,2", "-1", "9" * 30), "--lengths": ("512,4k", "k", "4k4k", ","), "--only": ("wrong", "x"),
    "--plot": ("-h", "no/such/x.svg", f"{'x' * 300}/x.svg", "x.gif", ""), "--message": ("-", "x.log", "/dev/null"), "--steps": NUMBERS, "--largest": NUMBERS, "--timeout": NUMBERS,
    **dict.fromkeys(("--tp", "--pp", "--vp", "--cp", "--ep", "--etp", "--zero", "--hsdp", "--nodes", "--rank"), NUMBERS),
}  # fmt: skip
"""Options and their words; none of them writes a file or starts torch."""

NAMES = (*MODELS, *GPUS, *CONFIGS)
COMMANDS: Mapping[str, tuple[Words, ...]] = {
    "fit": (MODELS,), "max": (), "where": (MODELS,), "suggest": (MODELS,), "frontier": (MODELS,), "compare": (MODELS,),
    "explain": (MODELS,), "recommend": (), "show": (NAMES,), "list": (SECTIONS,), "doctor": (),
    "tables": (("s000", "s004.t1"),), "schema": (("plan", "check", "config"),),
    "check": (("memplan-budget.yaml", "-", "/dev/stdin"),), "diff": (("a.json", "-"), ("a.json", "-")),
    "import": (EXAMPLES,), "emit": (MODELS,), "why": (MODELS,), "report": (MODELS,), "ui": (), "run": (("x.py", "x", "-h", ""),),
    "lab": (("show",), ("tier1", "orthogonality")), "no-such-command": (NAMES,),
}  # fmt: skip
"""Commands and their words."""

STDIN = (b"", b"CUDA out of memory. Tried to allocate 2.00 GiB", b"{}", b"a: 1", b"\xff", b"[" * 10_000)


OF_EVERY_GPU = ("max", "recommend")
"""Commands that without a GPU plan every model for every card, for seconds, and more where each line is traced."""
LONG = ("max", "tables")
"""Commands that take a second where others take ten milliseconds; they are drawn once for eight times that others are."""
DRAWN = [*8 * sorted(set(COMMANDS) - set(LONG)), *LONG]


def command_line(random: Random) -> tuple[list[str], bytes]:
    """Return arguments, most of them good, and what standard input holds."""
    name = random.choice(DRAWN)
    arguments = [name, *(_word(random, words) for words in COMMANDS[name])]
    if name == "ui":
        arguments += ["--port", random.choice(BAD_PORTS)]
    if name == "import" and random.randrange(2):
        arguments[1:] = ["--", *random.choices(LAUNCHERS, k=random.randint(1, 12))]
    if name in OF_EVERY_GPU:
        arguments += ["--gpu", _option_word(random, "--gpu")]
    for _ in range(random.randrange(5)):
        option = random.choice(_options(name))
        times = 1 if random.randrange(64) else random.choice((2, 40, 400))
        arguments += times * ([option, _option_word(random, option)] if OPTIONS[option] else [option])
    if not random.randrange(16):
        arguments.insert(random.randint(0, len(arguments)), _word(random, HOSTILE))
    return [word.replace("\x00", "") for word in arguments], random.choice(STDIN)


def _option_word(random: Random, option: str) -> str:
    if option == "--set":
        return f"{_word(random, SETTINGS)}={_word(random, SET_VALUES)}"
    return _word(random, OPTIONS[option])


def _word(random: Random, known: Words) -> str:
    """Return a word of a kind, most often one of its own, so that one bad word is met where all others are taken."""
    if random.randrange(8):
        return random.choice(known)
    return random.choice(HOSTILE) if random.randrange(2) else some_text(random)


@cache
def _options(name: str) -> list[str]:
    """Return the options of a command, and one that it does not have."""
    command = _COMMANDS.commands.get(name)
    has = {option for parameter in command.params for option in parameter.opts} if command is not None else set()
    return [option for option in OPTIONS if option in has or option == "--no-such-option"]


_COMMANDS = typer.main.get_command(make_app())
