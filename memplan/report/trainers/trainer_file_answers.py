"""The answers about a trainer's files: what was used, assumed and refused of them, and a diff that makes the job fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from memplan import __version__
from memplan.documents.frozen_values import dataclass
from memplan.errors import printable
from memplan.importer.imported_job import ImportedJob
from memplan.importer.reading import DEFAULTED, OVERRIDDEN, UsedKey
from memplan.importer.sources.conditions import word
from memplan.report.document import Block, Document, Table
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A trainer's file as it is and as it could be."""

    path: str
    before_text: str
    after_text: str
    before: MemoryPlan
    after: MemoryPlan
    costs: tuple[str, ...]  # What each change costs besides memory, in the order in which they were made

    @property
    def diff(self) -> tuple[str, ...]:
        """The lines of a unified diff."""
        lines = unified_diff(
            self.before_text.splitlines(),
            self.after_text.splitlines(),
            f"a/{self.path.lstrip('/')}",
            f"b/{self.path.lstrip('/')}",
            lineterm="",
            n=1,
        )
        return tuple(lines)


def rewrite_document(rewritten: Rewritten, unit: str, strict: bool) -> Document:
    """Return the answer: what to change in the file's own keys, and what that does."""
    right = ("fits",) if strict else ("fits", "tight")
    fits = rewritten.after.verdict in right
    data = {
        "schema": "memplan/rewrite/1",
        "memplan_version": __version__,
        "file": rewritten.path,
        "diff": "\n".join(rewritten.diff),
        "before": _side(rewritten.before),
        "after": _side(rewritten.after),
        "costs": list(rewritten.costs),
    }
    rows = tuple(_row(name, plan, unit) for name, plan in (("before", rewritten.before), ("after", rewritten.after)))
    blocks: list[Block] = [rewritten.diff] if rewritten.diff else []
    blocks.append(Table(("", "Verdict", ">Expected", ">Worst case", ">Usable"), rows))
    if rewritten.costs:
        blocks.append(tuple(f"costs {cost}" for cost in dict.fromkeys(rewritten.costs)))
    blocks.append(_answer(rewritten, fits))
    return Document(data, tuple(blocks), 0 if fits else 1)


def _answer(rewritten: Rewritten, fits: bool) -> str:
    tight = " (TIGHT: not in the worst case)" if rewritten.after.verdict == "tight" else ""
    if not rewritten.diff:
        return f"It fits as it is{tight}." if fits else "Nothing that keeps what is trained makes it smaller."
    return (
        f"It fits with these changes{tight}; --write makes them."
        if fits
        else "It does not fit even with these changes; --write makes none."
    )


def _side(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "verdict": plan.verdict,
        "device_bytes": plan.device_bytes,
        "least_bytes": plan.least_bytes,
        "upper_bytes": plan.upper_bytes,
        "usable_bytes": plan.usable_bytes,
    }


def _row(name: str, plan: MemoryPlan, unit: str) -> tuple[str, ...]:
    """Return a plan's sizes; where it fits because the allocator gives back what is free, all that is usable is the worst."""
    most = min(plan.upper_bytes, plan.usable_bytes) if plan.verdict == "fits" else plan.upper_bytes
    sizes: Sequence[int] = (plan.needed_bytes, most, plan.usable_bytes)
    return (name, plan.verdict.upper(), *(format_bytes(size, unit) if unit else format_bytes(size) for size in sizes))


HIDDEN = ("let.", "launcher.")
"""Results on the way, which no answer shows."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model's name as a file has it, and what it stands for here."""

    given: str | None
    name: str | None = None  # In the catalog, or the path of a local one; nothing where it stands for none
    how: str = ""  # How it was found
    note: str = ""  # What is worth a line


def import_document(job: ImportedJob, model: KnownModel) -> Document:
    """Return the answer, with what stands in the way of a plan."""
    reason, code = _reason(job)
    shapes = {key: value for key, value in job.section("model").items() if key != "given"}
    data = {
        "schema": "memplan/import/1",
        "memplan_version": __version__,
        "trainer": {"name": job.head.trainer, "version": job.version or None},
        "role": job.role,
        "kind": job.kind or None,
        "model": {"given": model.given, "name": model.name, "how": model.how or None, **shapes},
        "method": job.section("method"),
        "training": {key: value for key, value in job.section("training").items() if value is not None},
        "packing": job.value("packing"),
        "keys": {
            "used": [_used(job, key) for key in _used_keys(job)],
            "unknown": [
                {"key": one.key, "line": one.line or None, "file": one.source, "nearest": one.nearest}
                for one in job.keys.unknown
            ],
            "not_modelled": [
                {"key": one.key, "line": one.line or None, "file": one.source, "value": one.value, "why": one.why}
                for one in job.reading.refusals
            ],
            "irrelevant": job.keys.irrelevant,
        },
        "assumed": _assumed(job),
        "needs": job.reading.needs,
        "files": [keys.name for keys in job.sources],
        "answer": reason or counted(job),
    }
    return Document(data, tuple(_blocks(job, data, model)), code)


def _reason(job: ImportedJob) -> tuple[str, int]:
    """Return why no plan can be made of a file, and the exit code that says so; neither where one can."""
    name = job.sources[-1].name if job.sources else job.head.trainer
    if job.role == "not_training":
        return f"{name}: {job.other}", 2
    if job.head.missing:
        return f"{name}: a file of {job.head.title}, which is recognised and not read: {job.head.missing}", 3
    if job.reading.problems:
        return job.reading.problems[0], 2
    if job.role == "job" and job.reading.needs:
        return f"{name}: cannot be planned without {'; '.join(job.reading.needs)}", 3
    return "", 0


def counted(job: ImportedJob) -> str:
    """Return how many keys were understood, irrelevant and unknown, in one line."""
    understood = len(_used_keys(job)) + len({(one.source, one.key) for one in job.reading.refusals} - {*_places(job)})
    refused = len(job.reading.refusals)
    last = f", {refused} not modelled" if refused else ""
    return f"{understood} keys understood, {len(job.keys.irrelevant)} irrelevant, {len(job.keys.unknown)} unknown{last}"


def _places(job: ImportedJob) -> list[tuple[str, str]]:
    return [(one.source, one.key) for one in _used_keys(job)]


def _used_keys(job: ImportedJob) -> list[UsedKey]:
    """Return the keys that were understood, but for sections whose inner keys were."""
    used = list(job.reading.used.values())
    inner = {(one.source, one.key) for one in used}
    return [
        one
        for one in used
        if not (
            isinstance(one.value, Mapping) and any(s == one.source and k.startswith(f"{one.key}.") for s, k in inner)
        )
    ]


def _used(job: ImportedJob, key: UsedKey) -> dict[str, Any]:
    shown = [effect for effect in key.effects if not effect.startswith(HIDDEN)]
    name = job.renamed.get(key.key, key.key)
    effect = "; ".join(shown) or ("read; counts with other keys" if key.effects else "")
    return {"key": name, "line": key.line or None, "file": key.source, "value": key.value, "effect": effect}


def _assumed(job: ImportedJob) -> list[dict[str, Any]]:
    """Return what no key says, with the key that would, and what is done whatever keys say."""
    rows = []
    for name, result in job.reading.results.items():
        unsaid = result.rank in (DEFAULTED, OVERRIDDEN) or (result.why and not result.key)
        if unsaid and not name.startswith(HIDDEN) and result.value is not None:
            short = name.removeprefix("training.")
            flag = result.key or (f"--set {short}=..." if name.startswith("training.") else "")
            rows.append({"key": short, "value": result.value, "why": result.why, "change": flag})
    for text in (text for keys in job.sources for text in keys.repeated):
        rows.append({"key": "-", "value": "the last one", "why": text, "change": ""})
    if (shipped := job.reading.results.get("let.shipped")) is not None:
        rows.append({"key": "launcher's file", "value": shipped.value, "why": shipped.why, "change": "--with FILE"})
    rows += [{"key": key, "value": value, "why": why, "change": ""} for key, value, why in job.reading.notes]
    version = job.reading.results.get("let.version")
    if version is not None:
        rows.append({"key": "trainer", "value": version.value, "why": version.why, "change": "--trainer-version V"})
    return rows


def _blocks(job: ImportedJob, data: Mapping[str, Any], model: KnownModel) -> list[Block]:
    blocks: list[Block] = [tuple(_head(job, data, model))]
    used = [
        (one["key"], str(one["line"] or "-"), one["effect"] or "read; changes nothing here")
        for one in data["keys"]["used"]
    ]
    if used:
        blocks.append(Table(("Key", ">Line", "Effect"), tuple(used), "Used"))
    assumed = [(one["key"], _short(one["value"]), _because(one)) for one in data["assumed"]]
    if assumed:
        blocks.append(Table(("Key", "Value", "Why"), tuple(assumed), "Assumed"))
    refused = [(one.key or "-", str(one.line or "-"), one.why) for one in job.reading.refusals]
    if refused:
        blocks.append(Table(("Key", ">Line", "Not modelled"), tuple(refused), "Refused"))
    if job.keys.unknown:
        rows = tuple(
            (one.key, str(one.line or "-"), one.nearest.removeprefix("; ") or "no key like it")
            for one in job.keys.unknown
        )
        blocks.append(Table(("Key", ">Line", "Nearest"), rows, "Unknown"))
    if job.reading.needs:
        blocks.append(tuple(f"needs {need}" for need in job.reading.needs))
    if job.role != "not_training" and not job.head.missing:
        blocks.append(counted(job))
    return blocks


def _head(job: ImportedJob, data: Mapping[str, Any], model: KnownModel) -> list[str]:
    name = job.sources[-1].name if job.sources else ""
    version = f" {job.version}" if job.version else ""
    if job.role != "job" or job.head.missing:
        return [f"{name}: {job.kind or f'a {job.role}'}, {job.head.title}{version}"]
    method = data["method"]
    kind = ", ".join(str(method[key]) for key in ("stage", "tuning") if key in method)
    lines = [f"{name}: a training job, {job.head.title}{version}: {model.given or 'a model without a name'}, {kind}"]
    return [*lines, model.note] if model.note else lines


def _short(value: Any) -> str:
    return printable(
        ", ".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else word(value), 40
    )


def _because(row: Mapping[str, Any]) -> str:
    return f"{row['why'] or 'follows from the above'}" + (f" ({row['change']})" if row["change"] else "")
