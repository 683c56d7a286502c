"""The README's table of stacks, put together from the rows of docs/accuracy.md: ``python tests/docs/readme_table.py`` rewrites it."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "accuracy.md"
REPORTED = ROOT / "tests" / "published" / "reported_runs.yaml"
T4 = REPORTED.with_name("t4_runs.yaml")
HEAD = "| whose loop | jobs | peaks in 0.1 % | worst | measured on a GPU |"
GROUPS = {
    "DeepSpeed": "DeepSpeed's ZeRO 1 to 3",
    "torchtitan": "torchtitan, one to 1,024 GPUs",
    "FSDP1": "FSDP1",
    "FSDP2": "FSDP2 and HSDP",
    "HSDP": "FSDP2 and HSDP",
    "torchtune": "torchtune",
    "LitGPT": "LitGPT",
    "unsloth": "unsloth",
    "axolotl": "axolotl",
    "LLaMA-Factory": "LLaMA-Factory",
    "ms-swift": "ms-swift",
    "TRL": "TRL: SFT, preferences, reward, GRPO",
    "plain loop": "a plain loop on transformers",
    "Trainer": "transformers' Trainer",
}
"""What a row's name has in it, the first that it has -> the group that it counts in; a row that begins with "the same" is the one before's."""
STACKS = {
    "torchtitan": "torchtitan, one to 1,024 GPUs",
    "litgpt": "LitGPT",
    "trl": "TRL: SFT, preferences, reward, GRPO",
    "transformers": "transformers' Trainer",
}
"""Stack of a run that others measured -> the group that it counts in, on one GPU."""
OWN = "memplan's own (`bundled`)"


def cells(line: str) -> list[str]:
    """Return the cells of a table's row."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def table() -> list[str]:
    """Return the lines of the table."""
    page = PAGE.read_text(encoding="utf-8")
    seeds = [cells(line) for line in re.findall(r"^\| \d+ \| .*$", page, re.MULTILINE)]
    records = page[page.index("| stack | jobs |") :].split("\n\n", 1)[0].splitlines()[2:]
    counts: dict[str, list[tuple[int, float, float]]] = {OWN: []}
    for _, answered, _, _, within, worst, _ in seeds:
        counts[OWN].append((int(answered), _number(within), _number(worst)))
    group = ""
    for name, jobs, within, worst, *_ in map(cells, records):
        same = name.startswith("the same") or ", the same," in name
        group = group if same else next(title for word, title in GROUPS.items() if word in name)
        counts.setdefault(group, []).append((int(jobs), _number(within), _number(worst)))
    return [
        HEAD,
        "|---|---:|---:|---:|---|",
        *(_row(name, counts[name]) for name in dict.fromkeys((OWN, *GROUPS.values()))),
    ]


@cache
def measured() -> Counter[str]:
    """Return how many runs that others measured and published are planned, by group (reported_runs.yaml and t4_runs.yaml in tests/published)."""
    jobs = [entry["job"] for entry in yaml.safe_load(REPORTED.read_text(encoding="utf-8")).values()]
    stacks = [(job["stack"].partition("@")[0], job.get("gpus", 1)) for job in jobs]
    groups = Counter("FSDP1" if gpus > 1 and stack != "torchtitan" else STACKS[stack] for stack, gpus in stacks)
    groups[GROUPS["plain loop"]] += len(yaml.safe_load(T4.read_text(encoding="utf-8"))["runs"])
    return groups


def _row(name: str, rows: list[tuple[int, float, float]]) -> str:
    jobs = sum(row[0] for row in rows)
    within = sum(round(row[0] * row[1] / 100) for row in rows)
    others = measured()[name]
    measured_on = "94 runs on an H200" if name == OWN else f"{others} runs of others" if others else "no"
    share = "all" if within == jobs else f"{100 * within / jobs:.1f} %"
    return f"| {name} | {jobs:,} | {share} | {max(row[2] for row in rows):.2f} % | {measured_on} |"


def _number(cell: str) -> float:
    return float(cell.removesuffix(" %"))


def readme_rows(text: str) -> list[str]:
    """Return the lines of the table as a text has it."""
    return text[text.index(HEAD) :].split("\n\n", 1)[0].splitlines()


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(text.replace("\n".join(readme_rows(text)), "\n".join(table())), encoding="utf-8")
