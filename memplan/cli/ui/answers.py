"""Answers for the page: at once with a share as the allocator's reserve, then in full, as ``memplan.plan`` gives them."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import memplan
from memplan.catalog.catalog import Catalog
from memplan.cli.ui.question import Question
from memplan.library.answers.notebook import footer_of, quick_sections, slow_sections, step_section
from memplan.library.answers.planned_job import Job, Plan
from memplan.library.lookup import open_catalog
from memplan.report.page.plan_sections import title_of
from memplan.report.plans.plan_answer import answer

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
