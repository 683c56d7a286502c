"""What the page may ask and the command line of it, and its answers: at once with a share as reserve, then in full."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from shlex import join
from typing import Any, get_args

import memplan
from memplan.catalog.catalog import Catalog, Shelf
from memplan.catalog.training_config import Checkpointing, TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError, match_hint, printable
from memplan.library.answers.notebook import footer_of, quick_sections, slow_sections, step_section
from memplan.library.answers.planned_job import Job, Plan
from memplan.library.job_options import LIMITS
from memplan.library.lookup import open_catalog
from memplan.report.page.plan_sections import title_of
from memplan.report.plans.plan_answer import answer
from memplan.training.rules.half_precision import fp16_settings

MOST_GPUS = 1024
MOST_CHARACTERS = 2048
"""Of a query: names and numbers take a tenth of it."""
PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class Question:
    """A job, by names of the catalog."""

    model: str = "llama-3.1-8b"
    gpu: str = "rtx4090"
    gpus: int = 1
    config: str = "qlora"
    stack: str = ""  # The training library; empty for the config's own
    batch: int = 1
    length: int = 2048
    checkpointing: str = ""  # Of activations; empty for the config's own
    precision: str = ""  # Of products, and of weights in a float; empty for the config's own

    def settings(self, catalog: Catalog) -> tuple[str, ...]:
        """Return what ``--set`` makes of the precision."""
        if not self.precision:
            return ()
        config = catalog.configs[self.config]
        pairs = _in_dtype(config, self.precision) if self.precision != "fp16" else fp16_settings(config, catalog)
        return tuple(f"{key}={str(value).lower()}" for key, value in pairs)

    def command(self, catalog: Catalog) -> str:
        """Return the command line that asks the same."""
        words = ["memplan", "fit", self.model, "--gpu", self.gpu, "--config", self.config]
        words += ["-b", str(self.batch), "-s", str(self.length)]
        words += ["--gpus", str(self.gpus)] if self.gpus > 1 else []
        words += ["--stack", self.stack] if self.stack else []
        words += ["--checkpointing", self.checkpointing] if self.checkpointing else []
        return join([*words, *(word for setting in self.settings(catalog) for word in ("--set", setting))])


def question_of(given: Mapping[str, str], catalog: Catalog) -> Question:
    """Return what a query asks.

    Args:
        given: Names of fields, each with its text.
        catalog: Where names are looked up; no file is ever opened.

    Raises:
        UnknownNameError: A name that the catalog lacks, with the nearest.
        InvalidFileError: A key that there is not, a number out of range, or a word that is none of those offered.
    """
    known = {one.name for one in fields(Question)}
    for key in given:
        if key not in known:
            raise InvalidFileError([f"unknown key {printable(key, 60)!r}{match_hint(key, sorted(known))}"])
    shelves: dict[str, Shelf[Any]] = {
        "model": catalog.models,
        "gpu": catalog.gpus,
        "config": catalog.configs,
        "stack": catalog.stacks,
    }
    names = {key: shelf.name_of(given[key]) for key, shelf in shelves.items() if given.get(key)}
    most = {"gpus": MOST_GPUS, "batch": LIMITS["micro_batch_size"], "length": LIMITS["sequence_length"]}
    numbers = {key: _number(key, given[key], limit) for key, limit in most.items() if key in given}
    words = {"checkpointing": get_args(Checkpointing), "precision": PRECISIONS}
    chosen = {key: _word(key, given[key], offered) for key, offered in words.items() if key in given}
    return Question(**names, **numbers, **chosen)  # type: ignore[arg-type]


def _number(key: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and 1 <= int(text) <= most):
        raise InvalidFileError([f"{key}: expected a whole number from 1 to {most:,}, got {printable(text, 60)!r}"])
    return int(text)


def _word(key: str, text: str, offered: tuple[str, ...]) -> str:
    if text and text not in offered:
        raise InvalidFileError([f"{key}: expected {', '.join(offered)}, got {printable(text, 60)!r}"])
    return text


def _in_dtype(config: TrainingConfig, dtype: str) -> Iterator[tuple[str, str]]:
    """Yield the settings that compute in a dtype, with weights in it where products in it need that."""
    yield "compute_dtype", dtype
    narrow = {"fp16", "bf16"} if dtype == "fp32" else {"fp16"}
    yield from ((f"weights.{role}", dtype) for role, name in config.weights.items() if name in narrow)


MOST_JOBS = 64
"""Models under a config that stay compiled."""
PROMPT = "planned with a share as the allocator's reserve; the simulated one follows"

Answer = dict[str, Any]


@lru_cache(maxsize=1)
def catalog_of(path: Path | None) -> Catalog:
    """Return the catalog that names are looked up in, opened once."""
    return open_catalog(path)


@lru_cache(maxsize=MOST_JOBS)
def _job(question: Question, path: Path | None) -> Job:
    """Return a model under a config; the question has no GPU, batch and length, which each plan has its own."""
    catalog = catalog_of(path)
    return memplan.job(
        question.model,
        config=question.config,
        stack=question.stack or None,
        activation_checkpointing=question.checkpointing or None,
        set=question.settings(catalog),
        gpus=question.gpus if question.gpus > 1 else None,
        catalog=catalog,
    )


def _plan(question: Question, path: Path | None, *, simulated: bool) -> Plan:
    job = _job(replace(question, gpu="", batch=0, length=0), path)
    return job.plan(question.gpu, micro_batch_size=question.batch, sequence_length=question.length, simulated=simulated)


def quick_answer(question: Question, path: Path | None) -> Answer:
    """Return the answer's and the components' sections, and the command that asks the same.

    Raises:
        MemplanError: A job that cannot be, or is not modelled.
    """
    plan = _plan(question, path, simulated=False)
    command = question.command(plan.catalog)
    sections = quick_sections(plan.memory, answer(plan.memory), command, PROMPT)
    return {"title": title_of(plan.memory), "sections": sections, "footer": footer_of(plan)}


def step_answer(question: Question, path: Path | None) -> Answer:
    """Return the section of the step, and what its chart is drawn from.

    Raises:
        MemplanError: A job that cannot be, or is not modelled.
    """
    plan = _plan(question, path, simulated=False)
    step, timeline = step_section(plan.memory)
    return {"title": title_of(plan.memory), "sections": {"step": step}, "timeline": timeline}


def full_answer(question: Question, path: Path | None) -> Answer:
    """Return every section, simulated, and what the chart is drawn from.

    Raises:
        MemplanError: A job that cannot be, or is not modelled.
    """
    plan = _plan(question, path, simulated=True)
    command = question.command(plan.catalog)
    quick = quick_sections(plan.advised, plan.sentence, command)
    step, timeline = step_section(plan.memory)
    sections = quick | {"step": step} | slow_sections(plan)
    return {"title": title_of(plan.memory), "sections": sections, "timeline": timeline}
