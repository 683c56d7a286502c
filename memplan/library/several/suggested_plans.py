"""Which settings to use: ``memplan.suggest`` for a model, ``memplan.suggest_configs`` for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Unpack

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.library.answers.answer import Answer
from memplan.library.answers.planned_job import Plan
from memplan.library.argument_kinds import checked
from memplan.library.job_options import (
    JobInputs,
    JobOptions,
    ModelGiven,
    job_inputs,
    keys_set,
    number_problems,
    settings_of,
)
from memplan.library.lookup import parallels
from memplan.library.several.capacity import noting
from memplan.library.several.played_search import played_suggestions
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.report.document import Block, Document
from memplan.report.plans.suggest_answer import suggest_document
from memplan.solver.search.cluster import Cluster, cluster_of
from memplan.solver.search.suggested_settings import Request, Suggestions, axes_of
from memplan.solver.search.timing import rated_gpu
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.ppo_rules import BESIDE_VALUES
from memplan.units import parse_bytes

if TYPE_CHECKING:
    from memplan.plan.suggested.suggested_configs import SuggestedConfigs
    from memplan.report.canvas import Canvas

ADAPTERS = ("qlora", "lora")
"""Configs that train adapters alone, on weights of 4 bits and of 16."""
SEARCH_LIMITS = {
    "min_batch": 2**24,
    "min_step_batch": 2**20,
    "min_sequence": 2**30,
    "most": 100,
    "gpus_per_node": 2**14,
}
"""Keywords of a search that are numbers, each with the most that it may be."""


class SearchOptions(JobOptions, total=False):
    """Keywords of a search for settings, besides those of every job; None means that it is not given.

    Attributes:
        keep: What stays as the config has it: ``weights``, ``master``, ``gradients``, ``lifetime``, ``optimizer``,
            ``offload``, ``checkpointing``, ``kernels``, ``batch`` or ``accumulation``. A key that is set is kept anyway.
        min_batch: Least micro-batch.
        min_step_batch: Least sequences of an optimizer step; the config's own where one is given.
        min_sequence: Least tokens per sequence.
        experimental: Whether experimental settings may be used.
        strict: Whether settings that only fit as expected are no answer.
        most: How many answers at most.
        network: What joins nodes, such as ``"infiniband-400g"``, a port for each GPU; else that of the GPU's own systems.
    """

    keep: Sequence[str] | None
    min_batch: int | None
    min_step_batch: int | None
    min_sequence: int | None
    experimental: bool
    strict: bool
    most: int | None
    network: str | None


@dataclass(frozen=True, repr=False, eq=False)
class Suggested(Answer):
    """Settings that fit, ranked.

    Attributes:
        search: Every answer with what it gives up, or the nearest miss.
        catalog: What names were looked up in.
    """

    search: Suggestions
    catalog: Catalog

    @cached_property
    def rows(self) -> tuple[Plan, ...]:
        """The plans, best first; the ``training`` of each can be given back as ``config``."""
        return tuple(Plan(row.plan, self.catalog) for row in self.search.rows)

    @property
    def gives_up(self) -> tuple[str, ...]:
        """What each answer gives up against fp32 everywhere and nothing computed twice."""
        return tuple(row.gives_up for row in self.search.rows)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the best answer, or ``no`` where there is none."""
        return self.rows[0].verdict if self.rows else "no"

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan suggest``; ``strict`` was the search's."""
        return suggest_document(self.search, self.catalog.hash if full else "", unit)


@checked
def suggest(
    model: ModelGiven = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[SearchOptions],
) -> Suggested:
    """Return the best settings that fit a model on a GPU, ranked, each as a plan whose config can be saved.

    Args:
        model: As :func:`memplan.plan` takes it.
        progress: Is told how many parts of the search are done, and of how many: two for each layout, and one for each answer.
        options: Keywords of :class:`memplan.SearchOptions`, and of :class:`memplan.JobOptions`.

    Raises:
        CannotAnswerError: What is fixed leaves nothing to search.
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> answer = memplan.suggest("llama-3.2-1b", gpu="rtx4090", most=2)
        >>> best = answer.rows[0]
        >>> memplan.plan("llama-3.2-1b", gpu="rtx4090", config=best.training).upper_bytes == best.upper_bytes
        True
    """
    inputs = job_inputs("suggest", model, options, SearchOptions)
    problems = number_problems(options, SEARCH_LIMITS)
    if problems:
        raise InvalidFileError(problems)
    known = inputs.model()
    device = inputs.device()
    request = _request(known, device, inputs, options)
    note = noting(progress, 2 * max(1, len(request.parallels)) + request.most)
    return Suggested(played_suggestions(known, request, device, inputs.catalog, note), inputs.catalog)


def _request(model: Model, device: Device, inputs: JobInputs, options: SearchOptions) -> Request:
    """Return what is searched for: the keys that are set stay, and the others are open."""
    fixed = keys_set(inputs)
    divided = any(path[0] == "parallel" for path in fixed)
    setup = inputs.setup(model, gpus=inputs.gpus if divided else 1)
    _refuse_unsearched(setup)
    base = setup.config
    own = 1 if inputs.config is None else base.micro_batch_size * base.gradient_accumulation_steps * base.parallel.data
    host = options.get("host_memory")
    return Request(
        base=base,
        keep=tuple(dict.fromkeys((*(options.get("keep") or ()), *axes_of(fixed)))),
        min_batch=options.get("min_batch") or 1,
        step_batch=options.get("min_step_batch") or own,
        min_sequence=options.get("min_sequence") or 1,
        experimental=options.get("experimental", False),
        strict=options.get("strict", False),
        most=options.get("most") or 5,
        host_bytes=None if host is None else parse_bytes(host),
        cluster=requested_cluster(device, inputs.catalog, options),
        parallels=parallels(base.parallel, inputs.gpus, fixed=divided, coded=_shards_codes(model, setup, inputs)),
    )


def _shards_codes(model: Model, setup: TrainingSetup, inputs: JobInputs) -> bool:
    """Tell whether frozen weights are quantised, and the model is one that FSDP1, which shards them, is planned with."""
    if setup.config.adapter is None or setup.format_names["hidden_matrix"] in FLOAT_BYTES or inputs.gpus == 1:
        return False
    parallel = replace(setup.config.parallel, data=inputs.gpus, zero_stage=3, engine="fsdp1")
    with suppress(MemplanError):
        config = replace(setup.config, parallel=parallel)
        return bool(CompiledPlan(model, resolve(config, inputs.catalog, setup.name, beside=setup.beside)))
    return False


def _refuse_unsearched(setup: TrainingSetup) -> None:
    """Raise for a setup among whose settings nothing is searched."""
    base = setup.config
    if setup.stack.not_modelled:
        raise CannotAnswerError(setup.unmodelled[0])
    if base.parallel.tensor > 1 or base.parallel.pipeline > 1:
        raise CannotAnswerError("parallel: suggest does not search divided models yet; memplan fit plans one")
    if base.parallel.engine == "deepspeed":
        raise CannotAnswerError(
            "parallel.engine: suggest does not search settings under DeepSpeed yet; memplan fit plans one, and without --stack "
            "and --config its stages are among the layouts"
        )
    refuse_unsearched_steps(base)


def refuse_unsearched_steps(config: TrainingConfig) -> None:
    """Raise for a step of which no search knows what it has, whether for settings or for layouts.

    Raises:
        CannotAnswerError: A compiled step, or one beside another model: a teacher, or what PPO trains and is judged by.
    """
    if config.compile != "none":
        raise CannotAnswerError("compile: suggest does not search compiled steps yet; memplan fit plans one")
    if config.method.stage in BESIDE_VALUES:
        raise CannotAnswerError(
            "method.stage: suggest does not search settings of ppo yet; memplan fit plans one, and says what would help"
        )
    if config.method.teacher is not None:
        raise CannotAnswerError(
            "method.teacher: suggest does not search settings beside a teacher yet; memplan fit plans one, and says what would help"
        )


def requested_cluster(device: Device, catalog: Catalog, options: SearchOptions) -> Cluster:
    """Return where several GPUs are: the nodes and the network that were named, else eight GPUs of the vendor's own.

    Raises:
        InvalidFileError: No network has the name.
    """
    _, gpu = rated_gpu(device.gpu, device.name, catalog.gpus.entries)
    return cluster_of(gpu, catalog.tables.networks, options.get("gpus_per_node"), options.get("network") or "")


# ------------------------------------------------------------------ configs for a GPU
@dataclass(frozen=True, repr=False, eq=False)
class ConfigSuggestions(Answer):
    """What to train with on each GPU.

    Attributes:
        rows: One for each GPU.
        setup: One of the setups that were weighed: its batch, sequence and checkpointing are those of all.
        catalog: What names were looked up in.
        since: The month since when models are recent enough to be recommended; empty where none has a date.
    """

    rows: tuple[SuggestedConfigs, ...]
    setup: TrainingSetup
    catalog: Catalog
    since: str = ""

    @property
    def established(self) -> dict[str, str | None]:
        """The config whose status is works or better that holds the largest model, by GPU; None where none does."""
        return {row.device.name: None if row.established is None else row.established.setup.name for row in self.rows}

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan recommend``."""
        from memplan.report.experiments import shipped_record
        from memplan.report.plans.recommend_answer import recommend_document, which

        evidence = self.catalog.root / "configs" / "evidence"
        precision, on_gpu = (shipped_record(name, evidence) for name in ("precision", "precision-h200"))
        released = {name: entry.released for name, entry in self.catalog.models.entries.items()}
        recent = (self.since, released)
        document = recommend_document(self.rows, self.setup, precision, on_gpu, unit, recent)
        words = [which(self.since), str(document.blocks[-1])]

        def screen(canvas: Canvas) -> tuple[Block, ...]:
            from memplan.report.screens.size_screens import recommend_screen

            return recommend_screen(self.rows, canvas, unit, released, words)

        return replace(document, screen=screen)


@checked
def suggest_configs(
    *, progress: Callable[[int, int], None] | None = None, **options: Unpack[JobOptions]
) -> ConfigSuggestions:
    """Return what to train with on a GPU: the config that holds the largest model, and Newton-Schulz's precision.

    Args:
        progress: Is told how many answers there are, and of how many: one for each GPU under each config.
        options: Keywords of :class:`memplan.JobOptions`, but for the model, the config and its keys. Without ``gpu``:
            every GPU of the catalog; ``gpus`` pool their memory.

    Raises:
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> memplan.suggest_configs(gpu="rtx4090").established["rtx4090"] in memplan.fit("gpt2", gpu="rtx4090").configs
        True
    """
    from memplan.library.lookup import catalog_model, find_setup
    from memplan.plan.suggested.recent_models import recent_models
    from memplan.plan.suggested.suggested_configs import suggested_configs
    from memplan.training.learning import records_of
    from memplan.training.rules.half_precision import fp16_settings

    every = "every shipped config that trains all weights is weighed"
    refused = {"config": every, "set": every, "shapes": "every model of the catalog is weighed"}
    inputs = job_inputs("suggest_configs", None, options, refused=refused)
    catalog = inputs.catalog
    devices = inputs.devices(inputs.gpus)
    names = [name for name, config in catalog.configs.entries.items() if config.adapter is None]
    setups = [find_setup(name, inputs.overrides(), catalog) for name in names]
    recent, since = recent_models(catalog.release_months())
    models = [(name, catalog_model(name, catalog)) for name in recent]
    given, adapters = inputs.overrides(), []
    for name in ADAPTERS:
        setup = find_setup(name, given, catalog)
        fp16 = replace(given, settings=(*given.settings, *settings_of(dict(fp16_settings(setup.config, catalog)))))
        adapters.append((setup, find_setup(name, fp16, catalog)))
    rows = suggested_configs(models, setups, devices, records_of(catalog).verdict, adapters, progress)
    return ConfigSuggestions(tuple(rows), setups[0], catalog, since)
