"""How several GPUs best share a job: ``memplan.suggest_layouts``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import InvalidFileError
from memplan.library.answers.answer import Answer
from memplan.library.answers.planned_job import Plan
from memplan.library.argument_kinds import checked
from memplan.library.job_options import JobInputs, JobOptions, ModelGiven, job_inputs, keys_set, number_problems
from memplan.library.lookup.config_lookup import read_config
from memplan.library.several.suggested_plans import (
    SEARCH_LIMITS,
    SearchOptions,
    refuse_unsearched_steps,
    requested_cluster,
)
from memplan.model.routed_experts import experts_of
from memplan.plan.memory_plan import Verdict
from memplan.report.document import Document
from memplan.solver.layouts.degrees import AXES, LayoutSpace
from memplan.solver.layouts.layout_search import LayoutFront, LayoutRequest, find_layouts

CONFIG = "mixed-adamw"
"""What several GPUs train with where nothing is said: fp32 weights and states that are divided, products in bf16."""
STACKS = ("torchtitan", "transformers")
"""Whose layouts are searched where no stack is named: torch's own parallelism, and the Trainer's with DeepSpeed's."""
SETTINGS = dict.fromkeys(
    ("keep", "host_memory", "experimental"), "dtypes stay as they are; memplan.suggest searches them"
)
"""Keywords that would change nothing here."""


@dataclass(frozen=True, repr=False, eq=False)
class Layouts(Answer):
    """Layouts that fit, the fastest first; each takes less memory than those before it.

    Attributes:
        front: Every row with its time and traffic, or the nearest miss.
        catalog: What names were looked up in.
    """

    front: LayoutFront
    catalog: Catalog

    @cached_property
    def rows(self) -> tuple[Plan, ...]:
        """The plans; the ``training`` of each can be given back as ``config``."""
        return tuple(Plan(row.plan, self.catalog) for row in self.front.rows)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the fastest, or ``no`` where nothing fits."""
        return self.rows[0].verdict if self.rows else "no"

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan suggest --gpus``; ``strict`` was the search's."""
        from memplan.report.layouts.layouts_answer import layouts_document

        return layouts_document(self.front, self.catalog.hash if full else "", unit)


def searches_layouts(given: ModelGiven, options: JobOptions) -> bool:
    """Tell whether ``memplan suggest`` seeks layouts: on several GPUs, of a stack that divides models or of none."""
    inputs = job_inputs("suggest", given, options)
    if inputs.gpus == 1:
        return False
    if inputs.config is None and inputs.options.get("stack") is None:
        return True
    return "tensor" in inputs.catalog.stack(_config(inputs).stack).divides


@checked
def suggest_layouts(
    model: ModelGiven = None, *, progress: Callable[[int, int], None] | None = None, **options: Unpack[SearchOptions]
) -> Layouts:
    """Return how several GPUs best share a job: every layout that can be planned, with the front of time and memory.

    Args:
        model: As :func:`memplan.plan` takes it.
        progress: Is told how many parts of the search are done, and of how many: one for each layout, and one for each answer.
        options: Keywords of :class:`memplan.SearchOptions`, and of :class:`memplan.JobOptions`; dtypes and optimizer stay
            as the config has them, and keys of ``parallel`` that are set.

    Raises:
        InvalidFileError: A number out of range, an unknown network, or nothing to share.
        CannotAnswerError: No layout can be planned, or a link's bandwidth is not known.
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> answer = memplan.suggest_layouts("llama-3.1-8b", gpu="h100", gpus=8, most=1)
        >>> answer.rows[0].verdict
        'fits'
    """
    inputs = job_inputs("suggest_layouts", model, options, SearchOptions, refused=SETTINGS)
    if problems := number_problems(options, SEARCH_LIMITS):
        raise InvalidFileError(problems)
    if inputs.gpus == 1:
        raise InvalidFileError(["gpus: several GPUs share a job; give their number"])
    device, catalog = inputs.device(), inputs.catalog
    bases = tuple(_bases(inputs, options.get("min_sequence") or 1))
    cluster, known = requested_cluster(device, catalog, options), inputs.model()
    requested = LayoutSpace(
        gpus=inputs.gpus,
        per_node=cluster.per_node,
        fixed=_fixed_degrees(inputs, bases[0]),
        experts=experts_of(known.spec),
        own_precision=inputs.config is not None,
    )
    request = LayoutRequest(
        bases=bases,
        space=requested,
        cluster=cluster,
        fixed=tuple(path[0] for path in keys_set(inputs)),
        min_batch=options.get("min_batch") or 1,
        step_batch=options.get("min_step_batch") or 1,
        strict=options.get("strict", False),
        most=options.get("most") or 5,
    )
    return Layouts(find_layouts(known, request, device, catalog, progress), catalog)


def _config(inputs: JobInputs) -> TrainingConfig:
    return read_config(CONFIG if inputs.config is None else inputs.config, inputs.overrides(), inputs.catalog)


def _bases(inputs: JobInputs, min_sequence: int) -> Iterator[TrainingConfig]:
    """Yield the configs to share out: that of the stack that is named, else one of each stack."""
    config = _config(inputs)
    refuse_unsearched_steps(config)
    config = replace(config, sequence_length=max(config.sequence_length, min_sequence))
    named = inputs.config is not None or inputs.options.get("stack") is not None
    for stack in (config.stack,) if named else STACKS:
        yield replace(config, stack=stack)


def _fixed_degrees(inputs: JobInputs, config: TrainingConfig) -> tuple[str, ...]:
    """Return the keys of ``parallel`` that are set, or that a config says itself."""
    said = {path[1] for path in keys_set(inputs) if path[0] == "parallel" and len(path) > 1}
    own = config.parallel
    said |= {key for key in AXES if key != "zero_stage" and getattr(own, key) not in (1, False)}
    return tuple(said | ({"zero_stage"} if "engine" in said or own.engine != "torch" else set()))
