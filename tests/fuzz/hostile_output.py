"""Commands that print text of others: names of files, keys, descriptions, titles, records."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from memplan.catalog.catalog import data_directory

PIECES = (
    *(
        "\x1b[31m",
        "\x1b]8;;http://x\x07",
        "\x9b2J",
        "\b",
        "\r",
        "\t",
        "\n",
        "\x00",
        "\x7f",
        "\x85",
        "\u2028",
        "\u202e",
        "\u200f",
    ),
    *(
        "\n::error::x",
        "\n ::warning file=a,line=1::x",
        "::add-mask::x",
        "##[error]x",
        "##vso[task.complete]",
        "::",
        "##",
    ),
    *(
        "=1+1",
        "+1",
        "-1+1",
        "-2",
        "@SUM(1)",
        "\uff1d1",
        "|",
        "||",
        "`",
        "**",
        "_x_",
        "~~",
        "# x",
        "---",
        "<b>",
        "<!--",
        "&lt;",
    ),
    *(
        "]]>", "&", "[x](y)", "[bold]", "[/]", "@user", "'", '"', ",", ";", "\\", "%0A", "%s", "{0}", "$x$", "$(id)",
        "$\\frac$",
    ),
    *("\ud800", "\udc80", "\ufffe", "\ufeff", "😀", "é", "漢", " ", "  ", "a", "model", "x" * 90),
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.characters()), min_size=1, max_size=6).map("".join)

CONFIG = '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}'
FORMATS = ("table", "plain", "json", "csv", "md")
CHECKS = (*FORMATS, "github", "gitlab", "junit", "sarif")
CARD = {
    "vendor": "nvidia", "architecture": "custom", "memory_bytes": 17179869184, "memory_kind": "measured",
    "cuda_total_bytes": 17000000000, "cuda_total_kind": "measured", "bandwidth_bytes_per_second": 10**12,
    "dense_flops": {"bf16": 10**14}, "interconnect": {"kind": "pcie-4-x16", "bytes_per_second": 32 * 10**9},
    "unified_memory": False,
}  # fmt: skip

Ask = tuple[object, ...]
Case = Callable[[str, Path], Ask]


def file_name(text: str, ending: str = "") -> str:
    """Return a text as the name of a file: without what no name can have."""
    kept = "".join(one for one in text if one not in "/\0" and (one.isprintable() or ord(one) < 0xD800))
    while len(os.fsencode(kept + ending)) > 200:
        kept = kept[:-1]
    return (kept if kept.strip(". ") else f"m{kept}") + ending


def model(text: str, folder: Path) -> Path:
    """Return a model in a folder of that name."""
    path = folder / file_name(text)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(CONFIG)
    return path


def saved(folder: Path, name: str, data: object) -> Path:
    """Return a file of JSON, which YAML includes."""
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def config(text: str, folder: Path) -> Path:
    """Return a training config that says so, in a file that is called so."""
    return saved(folder, file_name(text, ".json"), {"description": text, "micro_batch_size": 2, "sequence_length": 32})


def catalog(text: str, folder: Path) -> Path:
    """Return a catalog with a card of that title."""
    sources = [{"url": "https://example.org/" + text, "checked": "2026-01-31"}]
    return saved(folder, "mine.json", {"gpus": {"my-card": CARD | {"name": text, "sources": sources}}})


def budget(text: str, folder: Path) -> Path:
    """Return a budget with jobs of that name, which has to be printable: one fits, one does not, one cannot be told."""
    name = "".join(filter(str.isprintable, text))[:90] or "job"
    jobs = [
        {"name": name + ending, "model": f"./{model(text, folder).name}", "config": "fp32-adamw", "gpu": "t4", **more}
        for ending, more in (
            ("", {}), ("1", {"limit": "1 MiB"}), ("2", {"limit": "1 MiB", "level": "warn"}),
            ("3", {"set": {"parallel.tensor": 2}}),
        )
    ]  # fmt: skip
    return saved(folder, file_name(text, ".json"), {"version": 1, "budgets": jobs})


def baseline(text: str, folder: Path, moved: int) -> Path:
    """Return a baseline with a job of that name."""
    row = {
        "name": text, "gpu": text + "g", "model": text, "config": text, "asked": text, "inputs": text,
        "device_bytes": 2**30 + moved, "upper_bytes": 2**31, "components": {"weights": 2**30 + moved},
    }  # fmt: skip
    data = {"schema": "memplan/baseline/1", "memplan_version": text, "catalog_hash": text, "rows": [row]}
    return saved(folder, f"base{moved}.json", data)


def record(text: str, folder: Path, name: str) -> Path:
    """Return a record whose words are that text."""
    data = json.loads((data_directory() / "configs" / "evidence" / f"{name}.json").read_text())
    data |= {key: text for key in ("limits", "machine", "torch", "date", "command", "verdict") if key in data}
    data |= {"findings": [text, text]} if "findings" in data else {}
    return saved(folder, file_name(text, ".json"), data)


def planned(command: str, *more: object) -> Case:
    """Return a question about a model and a config of that name."""
    return lambda text, folder: (command, model(text, folder), "--config", config(text, folder), *more)


ANSWERED: dict[str, tuple[Case, tuple[str, ...]]] = {
    "fit": (planned("fit", "--gpu", "t4"), FORMATS),
    "fit-all": (lambda text, folder: ("fit", model(text, folder), "--gpu", "t4"), FORMATS),
    "fit-no": (planned("fit", "--gpu-memory", "1GiB", "--set", "micro_batch_size=60000"), FORMATS),
    "explain": (planned("explain"), FORMATS),
    "frontier": (planned("frontier", "--gpu", "t4"), (*FORMATS, "svg")),
    "where": (planned("where"), FORMATS),
    "max-for": (planned("max", "--for", "batch", "--gpu", "t4"), FORMATS),
    "suggest": (lambda text, folder: ("suggest", model(text, folder), "--gpu", "t4"), FORMATS),
    "compare": (
        lambda text, folder: (
            "compare",
            model(text, folder),
            "--gpu",
            "t4",
            "--gpu",
            "h100",
            "--config",
            config(text, folder),
        ),
        FORMATS,
    ),
    "show": (lambda text, folder: ("show", model(text, folder)), FORMATS),
    "show-gpu": (lambda text, folder: ("show", "my-card", "--catalog", catalog(text, folder)), FORMATS),
    "list": (lambda text, folder: ("list", "gpus", "--catalog", catalog(text, folder)), FORMATS),
    "doctor": (lambda text, folder: ("doctor", "--catalog", catalog(text, folder)), FORMATS),
    "check": (lambda text, folder: ("check", budget(text, folder)), CHECKS),
    "diff": (lambda text, folder: ("diff", baseline(text, folder, 0), baseline(text, folder, 10**8)), FORMATS),
    "lab-show": (lambda text, folder: ("lab", "show", record(text, folder, "lab-orthogonality")), FORMATS),
    "lab-show-training": (lambda text, folder: ("lab", "show", record(text, folder, "train-muon")), FORMATS),
}
"""A command that answers about such a text, and the formats it has."""

REFUSED: dict[str, Case] = {
    "model": lambda text, folder: ("fit", text, "--gpu", "t4"),
    "gpu": lambda text, folder: ("fit", "gpt2", "--gpu", text),
    "memory": lambda text, folder: ("fit", "gpt2", "--gpu-memory", text),
    "config": lambda text, folder: ("fit", "gpt2", "--gpu", "t4", "--config", text),
    "set": lambda text, folder: ("fit", "gpt2", "--gpu", "t4", "--set", f"{text}=1"),
    "value": lambda text, folder: ("fit", "gpt2", "--gpu", "t4", "--set", f"optimizer={text}"),
    "choice": lambda text, folder: ("list", text),
    "command": lambda text, folder: (text,),
    "option": lambda text, folder: ("fit", f"--{text}"),
    "extra": lambda text, folder: ("list", "gpus", text),
    "show": lambda text, folder: ("show", text),
    "table": lambda text, folder: ("tables", text),
    "record": lambda text, folder: ("lab", "show", text),
    "baseline": lambda text, folder: ("diff", folder / file_name(text), folder / file_name(text)),
    "output": lambda text, folder: ("list", "gpus", "-o", folder / "no" / file_name(text)),
    "key": lambda text, folder: ("fit", "gpt2", "--config", saved(folder, "key.json", {text: text})),
    "entry": lambda text, folder: ("list", "gpus", "--catalog", saved(folder, "c.json", {"gpus": {text: {text: 1}}})),
    "budget": lambda text, folder: (
        *("check", "-f", "github"),
        saved(folder, file_name(text, ".json"), {"version": 1, "budgets": [{"name": text, "model": text, text: 1}]}),
    ),
}
"""A command that has to name the text in refusing it (or, by chance, takes it)."""
