"""From the jobs of a budget to what they need: every name looked up, every problem collected."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from memplan.budget.baseline import Baseline
from memplan.budget.budget_files import BudgetFile, in_reading_order
from memplan.budget.budget_jobs import LONGEST_MATRIX, Job
from memplan.budget.evaluation import Figures, Result, evaluated, not_evaluated
from memplan.catalog.catalog import Catalog
from memplan.documents.loading import load_document
from memplan.documents.opening import path_kind, usable_path
from memplan.errors import MOST_EXPLAINED, CannotAnswerError, InvalidFileError, MemplanError, normalised_name
from memplan.library.lookup import Overrides, Shapes, find_model, find_setup
from memplan.model.model import Model
from memplan.model.readers import is_model_file
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import Runs, simulated
from memplan.training.resolved import TrainingSetup

T = TypeVar("T")
Variant = tuple[int | str, ...]
"""What a config depends on besides its name: a model's learned positions, and settings."""

UNCOUNTED = ("description", "status", "evidence")
"""Keys of a training config that change no figure."""
CONFIG_FILES = (".json", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class _Named:
    """A value, and what the user wrote for it: a catalog name, or a hash."""

    value: Any
    written: str


@dataclass(slots=True)
class Workshop:
    """Resolves jobs and evaluates them; what several jobs share is read and compiled once."""

    catalog: Catalog  # Where names are looked up
    problems: list[str] = field(default_factory=list)  # Bad input, as it is met
    _values: dict[tuple[str, str, Variant], _Named | MemplanError] = field(default_factory=dict)
    _plans: dict[tuple[str, str], CompiledPlan] = field(default_factory=dict)
    _figures: dict[tuple[str, str, str, str], Figures | MemplanError] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)
    _runs: Runs = field(default_factory=Runs)

    def results(self, budget: BudgetFile, baseline: Baseline | None) -> list[Result]:
        """Return a result for every job on every GPU of it.

        Raises:
            InvalidFileError: Every problem of the budget, every unknown name and unreadable file of every job.
        """
        self.problems = list(budget.problems)
        results = []
        for job in budget.jobs:
            results += self._job(job, baseline) if len(self.problems) < MOST_EXPLAINED else []
        if self.problems:
            raise InvalidFileError(in_reading_order(self.problems))
        return results

    def _job(self, job: Job, baseline: Baseline | None) -> list[Result]:
        self._runs = Runs()  # of a job on several devices; those of all jobs would take megabytes each
        devices = self._devices(job)
        model = self._named("model", model_path(job, self.catalog), job, self._model)
        known = model.value if isinstance(model, _Named) else None
        positions = known.spec.learned_positions if known is not None else 0
        variant = (positions, *job.settings)
        setup = self._named("config", config_path(job), job, lambda text: self._setup(text, job, known), variant)
        refusal = next((item for item in (model, setup) if isinstance(item, CannotAnswerError)), None)
        if refusal is not None:
            return [not_evaluated(job, device.name, str(refusal)) for device in devices]
        if not isinstance(model, _Named) or not isinstance(setup, _Named):
            return []
        return [result for device in devices for result in self._result(job, model, setup, device, baseline)]

    def _devices(self, job: Job) -> list[Device]:
        """Return the GPUs of a job, noting those that are unknown or named twice."""
        devices: dict[str, Device] = {}
        for index, name in enumerate(job.gpus[:LONGEST_MATRIX]):
            where = job.where("gpus", index) if "gpus" in job.own else job.where("gpu")
            try:
                if normalised_name(name) == "local":
                    raise InvalidFileError(["local is another GPU on every machine; name one (see: memplan list gpus)"])
                device = Device(self.catalog.gpus[name], self.catalog.gpus.name_of(name))
                if device.name in devices:
                    raise InvalidFileError([f"{name!r} is given twice: it is {device.name}"])
                devices[device.name] = device
            except MemplanError as error:
                self.problems.append(f"{where}: {error}")
        return list(devices.values())

    def _named(
        self, key: str, text: str, job: Job, find: Callable[[str], _Named], variant: Variant = ()
    ) -> _Named | MemplanError:
        """Return what a name stands for, or its error, which is noted where it is bad input."""
        if (key, text, variant) not in self._values:
            try:
                self._values[key, text, variant] = find(text)
            except MemplanError as error:
                self._values[key, text, variant] = error
        known = self._values[key, text, variant]
        if isinstance(known, MemplanError) and not isinstance(known, CannotAnswerError):
            lines = str(known).replace("--set ", "set: ").splitlines()
            self.problems += (f"{job.where(key)}: {line}" for line in lines)
        return known

    def _model(self, text: str) -> _Named:
        model = find_model(text, Shapes(), self.catalog)
        own = model.source if model.source.startswith("catalog:") else model_key(model)
        return _Named(model, own)

    def _setup(self, text: str, job: Job, model: Model | None) -> _Named:
        """Return a training setup; a shipped one may shorten its sequences to a model's learned positions."""
        setup = find_setup(text, Overrides(settings=job.settings), self.catalog, model)
        if text.endswith(CONFIG_FILES) or "/" in text:
            written = _hash(load_document(usable_path(text)).data)
        else:
            written = self.catalog.configs.name_of(text)
        return _Named(setup, _hash([written, job.settings]) if job.settings else written)

    def _result(
        self, job: Job, model: _Named, setup: _Named, device: Device, baseline: Baseline | None
    ) -> list[Result]:
        """Return the result on one GPU, or none where model and config contradict each other."""
        written = _hash([model.written, setup.written, device.name])
        keys = (self._key(model.value, model_key), self._key(setup.value, _setup_key))
        known = (*keys, device.name, written)
        if known not in self._figures:
            try:
                if keys not in self._plans:
                    self._plans[keys] = CompiledPlan(model.value, setup.value)
                plan = simulated(self._plans[keys].evaluate(device), least=None, runs=self._runs)
                self._figures[known] = figures(plan, written, keys[0])
            except MemplanError as error:
                self._figures[known] = error
        needed = self._figures[known]
        if isinstance(needed, CannotAnswerError):
            return [not_evaluated(job, device.name, str(needed))]
        if isinstance(needed, MemplanError):
            self.problems += (f"{job.where()}: {line}" for line in str(needed).splitlines())
            return []
        return [evaluated(job, needed, baseline)]

    def _key(self, value: T, key: Callable[[T], str]) -> str:
        """Return the hash of a value, which is kept alive by the values themselves."""
        if id(value) not in self._keys:
            self._keys[id(value)] = key(value)
        return self._keys[id(value)]


def figures(plan: MemoryPlan, written: str, shapes: str) -> Figures:
    """Return what a plan says, as far as budgets need it.

    Args:
        written: Hash of what the user wrote.
        shapes: Hash of the model's shapes.
    """
    training = {key: value for key, value in plan.training.items() if key not in UNCOUNTED}
    return Figures(
        device=plan.device.name,
        verdict=plan.verdict,
        device_bytes=plan.device_bytes,
        upper_bytes=plan.upper_bytes,
        needed_bytes=plan.needed_bytes,
        usable_bytes=plan.usable_bytes,
        by_share=bool(plan.reserve_by_share),
        components={component.name: component.bytes for component in plan.components},
        asked=written,
        inputs=_hash([shapes, training, plan.device.name]),
    )


def model_path(job: Job, catalog: Catalog) -> str:
    """Return a job's model as ``find_model`` takes it: a path is relative to the budget file."""
    text = job.model
    released = text in catalog.models and not text.startswith((".", "/", "~"))
    path = job.place.folder / text
    if released or text.startswith("~"):
        return text
    try:
        there = path_kind(path) != "nothing"
    except InvalidFileError:
        there = True  # whoever opens it says what is wrong with the name, and the job where it stands
    return str(path) if there or text.startswith((".", "/")) or is_model_file(path.name) else text


def config_path(job: Job) -> str:
    """Return a job's training config as ``find_setup`` takes it: a path is relative to the budget file."""
    text = job.config
    if text.startswith("~") or not (text.endswith(CONFIG_FILES) or "/" in text):
        return text
    path = str(job.place.folder / text)
    return path if path.endswith(CONFIG_FILES) or "/" in path else f"./{path}"


def model_key(model: Model) -> str:
    """Return a hash of a model's shapes, whatever it is called and wherever it was read."""
    shapes = {key: value for key, value in asdict(model.spec).items() if key not in ("name", "source")}
    tensors = [asdict(tensor) for tensor in model.inventory]
    return _hash([shapes, [{key: value for key, value in one.items() if key != "frozen"} for one in tensors]])


def _setup_key(setup: TrainingSetup) -> str:
    return _hash({key: value for key, value in asdict(setup.config).items() if key not in UNCOUNTED})


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
