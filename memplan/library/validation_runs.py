"""Predicted beside measured: what is measured is chosen, run, compared and recorded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from memplan.catalog.catalog import Catalog
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import read_text, require_folder_of
from memplan.documents.writing import make_folder, say
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.host.this_machine import require_torch
from memplan.library.lookup import Overrides, Shapes, find_model, find_setup, require_one_gpu, require_own_loop
from memplan.library.lookup.trainer_files import is_trainer_file
from memplan.measure.measured import Measurement
from memplan.measure.task import Scale, Task
from memplan.report.document import Document
from memplan.report.validation_answer import (
    Facts,
    calibration_document,
    measured_document,
    plan_document,
    replay_document,
)
from memplan.step.states.parallel_shards import FULLY_SHARDED, is_sharded
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes

DEFAULT_CONFIG = "tier1"
SMALL_BATCH, SMALL_LENGTH = 2, 128
DEFAULT_MODELS = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "qwen3-0.6b", "smollm2-135m")
"""Without MODEL the first of these that fits; on a CPU the third, cut down."""

CPU_SETTINGS = ("kernels.attention=math", "kernels.norm=composite")
"""Kernels that the CPU build has and the formula knows."""


@dataclass(frozen=True, slots=True)
class ValidateRequest:
    """What is measured and how, or the records that are read instead."""

    model: str | None
    shapes: Shapes
    config: str | None
    overrides: Overrides
    device: str | None
    small: bool | None
    steps: int
    processes: int
    patience: int
    record: Path | None
    replay: Path | None
    plan: bool
    calibrate: Path | None
    alloc_conf: str
    command: str
    quiet: bool

    @property
    def planned_config(self) -> str:
        """The config of the run: the one that was named, that of a trainer's file in the place of a model, or tier1."""
        own = self.model is not None and is_trainer_file(self.model)
        return self.config or (str(self.model) if own else DEFAULT_CONFIG)

    def say(self, text: str) -> None:
        """Report progress."""
        if not self.quiet and text:
            say(text)


def validate_document(request: ValidateRequest, catalog: Catalog, unit: str) -> Document:
    """Return the answer of ``memplan validate``.

    Raises:
        CannotAnswerError: torch or the device is missing, or the run failed.
        InvalidFileError: Contradicting options, or records that cannot be read or written.
    """
    chosen = [name for name in ("replay", "plan", "calibrate") if getattr(request, name)]
    if len(chosen) > 1 or (chosen and request.model is not None):
        raise InvalidFileError(["give one of MODEL, --replay, --calibrate and --plan"])
    if chosen and (request.shapes.given() or request.config is not None or request.overrides != Overrides()):
        what = "the device's plan says" if request.plan else "records say"
        raise InvalidFileError([f"--{chosen[0]}: {what} what is trained: leave out shapes and options of training"])
    _refuse_beside_processes(request, chosen)
    if request.calibrate is not None:
        from memplan.measure.records.measurement_records import read_data, record_files

        return calibration_document([read_data(path) for path in record_files(request.calibrate)])
    require_torch("measuring needs")
    if request.replay is not None:
        return _replayed(request, request.replay, catalog)
    device = request.device or ("cuda" if request.processes == 1 and _cuda() else "cpu")
    if device == "cuda" and not _cuda():
        raise CannotAnswerError("no CUDA device that torch can use; --device cpu measures on this machine's CPU")
    if request.plan:
        return _planned(request, device, catalog)
    task = _task(request, device, catalog)
    if request.record is not None and task.model.source != f"catalog:{task.name}":
        raise InvalidFileError(
            [f"--record: {task.name} is not a catalog model, so its record could not be checked later"]
        )
    if request.record is not None:
        require_folder_of(request.record, "--record ")
    measurements = _measure(request, task)
    if request.record is not None and measurements[0].status in ("measured", "out of memory"):
        from memplan.measure.records.measurement_records import write_record

        write_record(request.record, task, measurements[0], request.command)
        request.say(f"recorded in {request.record}")
    return _compared(task, measurements, unit)


def _refuse_beside_processes(request: ValidateRequest, chosen: Sequence[str]) -> None:
    """Raise on options that several processes do not go with."""
    if request.processes == 1:
        return
    options = [f"--{name}" for name in chosen] + ["--record"] * (request.record is not None)
    if options:
        raise InvalidFileError(
            [f"--processes {request.processes} cannot be combined with {options[0]}: records are of one process"]
        )
    if request.device == "cuda":
        raise InvalidFileError([f"--processes {request.processes} runs on the CPU: leave out --device cuda"])


def _cuda() -> bool:
    """Tell whether torch can use a CUDA device, without making a context in this process."""
    from memplan.host.this_machine import nvidia_devices

    if not nvidia_devices():
        return False
    from memplan.measure.process import cuda_is_usable

    return cuda_is_usable()


# ------------------------------------------------------------------ one measurement
def _task(request: ValidateRequest, device: str, catalog: Catalog) -> Task:
    """Return what is to be measured."""
    from memplan.measure.task import SMALL, Scale, Task, scaled_model

    small = (device == "cpu") if request.small is None else request.small
    scale = SMALL if small else Scale()
    named = request.model is None and not request.shapes.given()
    if named:
        name = _default_model(request, device, scale, catalog)
        model = scaled_model(name, scale, catalog)
    elif request.model is not None and request.model in catalog.models:
        name = catalog.models.name_of(request.model)
        model = scaled_model(name, scale, catalog)
    else:
        if request.small:
            raise InvalidFileError(["--small: only models of the catalog can be cut down"])
        model, scale = find_model(request.model, request.shapes, catalog), Scale()
        name = model.spec.name
    setup = find_setup(request.planned_config, _overrides(request, device, scale), catalog, model)
    if request.processes > 1:
        _require_shards(setup, request.processes)
    else:
        require_one_gpu(setup, "memplan validate")
    require_own_loop(setup, "memplan validate")
    conf = request.alloc_conf or ("expandable_segments:True" if setup.config.allocator == "expandable" else "")
    return Task(
        name, scale, model, setup, device, request.steps, conf if device == "cuda" else "", history=device == "cuda"
    )


def _overrides(request: ValidateRequest, device: str, scale: Scale) -> Overrides:
    """Return the command line's changes, with memplan's own loop and what suits a CPU and a small model put below them."""
    given = replace(request.overrides, stack=request.overrides.stack or DEFAULT_STACK)
    if scale.text:
        given = replace(given, batch=given.batch or SMALL_BATCH, length=given.length or SMALL_LENGTH)
    if device == "cpu" and not any(setting.startswith("kernels") for setting in given.settings):
        given = replace(given, settings=(*CPU_SETTINGS, *given.settings))
    if request.processes > 1:
        shards = (f"parallel.data={request.processes}", f"parallel.zero_stage={FULLY_SHARDED}")
        given = replace(given, settings=(*shards, *given.settings))
    return given


def _require_shards(setup: TrainingSetup, processes: int) -> None:
    """Raise unless torch's fully_shard divides the model among so many processes, and nothing else does."""
    parallel = setup.config.parallel
    if not is_sharded(parallel) or not parallel.gpus == parallel.shards == processes:
        raise CannotAnswerError(
            f"parallel: memplan validate --processes {processes} divides the model by fully_shard among that many processes "
            "alone; leave parallel out of config and settings"
        )


def _default_model(request: ValidateRequest, device: str, scale: Scale, catalog: Catalog) -> str:
    if device == "cpu":
        return DEFAULT_MODELS[2]
    from memplan.library.lookup import local_gpu
    from memplan.measure.task import scaled_model
    from memplan.plan.memory_plan import Device
    from memplan.plan.planner import CompiledPlan

    card = Device(*local_gpu(catalog))
    for name in DEFAULT_MODELS:
        model = scaled_model(name, scale, catalog)
        setup = find_setup(request.planned_config, _overrides(request, device, scale), catalog, model)
        if CompiledPlan(model, setup).evaluate(card).verdict == "fits":
            return name
    return DEFAULT_MODELS[-1]


def _measure(request: ValidateRequest, task: Task) -> list[Measurement]:
    from memplan.measure.process import measure, measure_together
    from memplan.measure.records.prediction import planned

    needed = planned(task).requested_bytes * request.processes
    if task.device == "cpu" and needed > (there := _available_bytes()):
        raise CannotAnswerError(
            f"{task.model.spec.name} under {task.setup.name} needs {format_bytes(needed)} and this machine has "
            f"{format_bytes(there)} available; cut it down with --small, or take a smaller one"
        )
    request.say(
        f"measuring {task.model.spec.name}, {task.setup.name}, on {task.device}; {format_bytes(needed)} predicted"
    )
    if request.processes == 1:
        return [measure(task, request.say, request.patience)]
    from memplan.measure.measure_ranks import RankTask

    with TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        ranks = [RankTask(task, rank, meeting) for rank in range(request.processes)]
        return measure_together(ranks, request.say, request.patience)


def _available_bytes() -> int:
    """Return the memory that this machine can still give, or a great deal where it does not say."""
    try:
        lines = read_text(Path("/proc/meminfo")).splitlines()
    except InvalidFileError:
        return 2**62
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 2**62)


def _facts(task: Task, measurement: Measurement) -> Facts:
    config = task.setup.config
    return Facts(
        model=task.model.spec.name,
        config=task.setup.label,
        device=measurement.device or task.device,
        torch_version=measurement.torch_version,
        driver_version=measurement.driver_version if task.device == "cuda" else "",
        micro_batch_size=config.micro_batch_size,
        sequence_length=config.sequence_length,
        attention=task.setup.profile.attention,
        steps=task.steps,
        status=measurement.status,
        reason=measurement.reason,
        processes=config.parallel.shards if task.device == "cpu" else 1,
    )


def _compared(task: Task, measurements: Sequence[Measurement], unit: str) -> Document:
    """Return the comparison of one measurement, or of those of several processes."""
    from memplan.measure.records.comparison_rows import rows_of_ranks
    from memplan.measure.records.prediction import planned, predict

    facts = _facts(task, measurements[0])
    if facts.status != "measured":
        return measured_document(facts, [], planned(task).requested_bytes, (), unit)
    predictions = [predict(task, measurement, rank) for rank, measurement in enumerate(measurements)]
    rows = rows_of_ranks(task, predictions, measurements)
    return measured_document(facts, rows, predictions[0].totals["requested"], predictions[0].notes, unit)


# ------------------------------------------------------------------ many
def _replayed(request: ValidateRequest, place: Path, catalog: Catalog) -> Document:
    from memplan.measure.records.measurement_records import record_files, replay_records

    rows = [
        (_facts(item.record.task, item.record.measurement), Path(item.record.name).stem, item.rows)
        for item in replay_records(record_files(place), catalog, request.say)
    ]
    return replay_document(rows)


def _planned(request: ValidateRequest, device: str, catalog: Catalog) -> Document:
    """Run the measurement plan; what has a record already is not run again."""
    from memplan.measure.process import measure
    from memplan.measure.records.measurement_plans import cpu_tasks, cuda_tasks, task_label
    from memplan.measure.records.measurement_records import write_record

    if request.record is None:
        raise InvalidFileError(["--plan needs a folder for its records: --record DIR"])
    folder = request.record
    make_folder(folder)
    tasks = list(cpu_tasks(catalog) if device == "cpu" else cuda_tasks(catalog, _card_bytes(catalog)))
    failed: list[tuple[str, str]] = []
    for index, task in enumerate(tasks):
        label = task_label(task)
        path = folder / f"{label}.json"
        if path.exists():
            request.say(f"{index + 1} of {len(tasks)}: {label} is recorded")
            continue
        request.say(f"{index + 1} of {len(tasks)}: {label}")
        measurement = measure(task, lambda _: None, request.patience)
        if measurement.status in ("measured", "out of memory"):
            write_record(path, task, measurement, request.command)
        else:
            failed.append((label, f"{measurement.status}: {measurement.reason}"))
    answer = _replayed(request, folder, catalog) if any(folder.glob("*.json")) else None
    return plan_document(len(tasks), failed, answer)


def _card_bytes(catalog: Catalog) -> int:
    from memplan.library.lookup import local_gpu

    return local_gpu(catalog)[0].cuda_total_bytes
