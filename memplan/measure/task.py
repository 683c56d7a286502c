"""What a measurement runs: a model, a setup, a device, and how a record names them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from memplan.catalog.catalog import Catalog
from memplan.catalog.stack_versions import with_stack
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import Document
from memplan.documents.schemas import validate
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.measure.measured import Measurement, Progress
from memplan.model.families import model_spec
from memplan.model.families.config_values import MAXIMUM_DIMENSION, MAXIMUM_LAYERS
from memplan.model.model import Model
from memplan.model.spec import Attention, Layer, LayerRun, Mlp, ModelSpec
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup
from memplan.units import MAXIMUM_BYTES

STEPS = 3
MAXIMUM_STEPS = 100
NARROW = 256
HEADS = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """How far a catalog model is cut down; 0 leaves a size as it is."""

    layers: int = 0  # Layers of each run of equal layers, at most
    hidden: int = 0  # Width of the residual stream; attention then has 8 heads and the MLP three times that width
    vocab: int = 0  # Size of the vocabulary

    @property
    def text(self) -> str:
        """What was cut, in words; nothing where nothing was."""
        parts = [f"{value} {unit}" for value, unit in ((self.layers, "layers"), (self.vocab, "tokens")) if value]
        return ", ".join([*parts, f"width {self.hidden}"] if self.hidden else parts)


SMALL = Scale(layers=2, hidden=NARROW, vocab=8192)
"""What a CPU trains in seconds."""


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement."""

    name: str  # Catalog name of the model, or what it was called
    scale: Scale
    model: Model
    setup: TrainingSetup
    device: str = "cpu"  # ``cpu`` or ``cuda``
    steps: int = STEPS
    alloc_conf: str = ""  # As PYTORCH_CUDA_ALLOC_CONF
    capacity_bytes: int = 0  # Memory that the process may take on a CUDA device; 0 for all
    history: bool = False  # Whether the memory history is recorded and replayed (CUDA)

    def measured(self, progress: Progress) -> Measurement:
        """Return what the bundled loop's steps take of the device's memory."""
        if self.device == "cuda":
            from memplan.measure.measure_cuda import measure_cuda

            return measure_cuda(self, progress)
        from memplan.measure.measure_cpu import measure_cpu

        return measure_cpu(self, progress)


def scaled_model(name: str, scale: Scale, catalog: Catalog) -> Model:
    """Return a model of the catalog, cut down.

    Raises:
        CannotAnswerError: A width is given and the model's layers are not plain attention and MLP.
    """
    entry = catalog.models[name]
    spec = model_spec({**entry.config, "model_type": entry.architecture}, entry.title, f"catalog:{name}")
    runs: list[LayerRun] = []
    for run in spec.runs:
        count = min(run.count, scale.layers or run.count)
        layer = _narrowed(spec, run.layer, scale.hidden) if scale.hidden else run.layer
        runs.append(LayerRun(layer, count, sum(other.count for other in runs)))
    title = f"{spec.name} cut to {scale.text}" if scale.text else spec.name
    spec = replace(
        spec,
        name=title,
        runs=tuple(runs),
        vocab_size=scale.vocab or spec.vocab_size,
        hidden_size=scale.hidden or spec.hidden_size,
    )
    return Model.from_spec(spec, spec.source)


def _narrowed(spec: ModelSpec, layer: Layer, hidden: int) -> Layer:
    attention, mlp = layer.attention, layer.feed_forward
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
        raise CannotAnswerError(f"{spec.name} cannot be narrowed: its layers are more than attention and an MLP")
    groups = max(1, HEADS * attention.num_key_value_heads // attention.num_heads)
    width = hidden // HEADS
    rotary = width if attention.rotary_dim else 0
    attention = replace(attention, num_heads=HEADS, num_key_value_heads=groups, head_dim=width, rotary_dim=rotary)
    return replace(layer, attention=attention, feed_forward=replace(mlp, intermediate_size=3 * hidden))


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A task as a record has it: :class:`Task` by names, and every key of its training config."""

    model: str
    scale: Scale
    config: str
    training: Mapping[str, Any]
    device_kind: Literal["cpu", "cuda"]
    steps: int
    alloc_conf: str
    capacity_bytes: int


def task_data(task: Task) -> dict[str, Any]:
    """Return what a record keeps of a task."""
    training = asdict(task.setup.config)
    return {
        "model": task.name,
        "scale": asdict(task.scale),
        "config": task.setup.name,
        "training": training,
        "device_kind": task.device,
        "steps": task.steps,
        "alloc_conf": task.alloc_conf,
        "capacity_bytes": task.capacity_bytes,
    }


def task_of(data: Mapping[str, Any], catalog: Catalog, where: str) -> Task:
    """Return the task that a record describes, from today's catalog.

    Raises:
        MemplanError: A model or setting that is not known any more.
    """
    document = Document(where, data, {})
    task = validate(RecordedTask, document)
    config = validate(TrainingConfig, document, with_stack(_without_none(task.training)), ("training",))
    problems = [f"{document.where((key,))}: {text}" for key, text in _problems(task)]
    if problems:
        raise InvalidFileError(problems)
    setup = resolve(config, catalog, task.config, lambda path: document.where(("training", *path)))
    model = scaled_model(task.model, task.scale, catalog)
    return Task(
        name=task.model,
        scale=task.scale,
        model=model,
        setup=setup,
        device=task.device_kind,
        steps=task.steps,
        alloc_conf=task.alloc_conf,
        capacity_bytes=task.capacity_bytes,
    )


def _problems(task: RecordedTask) -> Iterator[tuple[str, str]]:
    """Yield what no measurement can have been of, each with its key."""
    scale = task.scale
    for name, value, most in (("layers", scale.layers, MAXIMUM_LAYERS), ("vocab", scale.vocab, MAXIMUM_DIMENSION)):
        if not 0 <= value <= most:
            yield "scale", f"{name}: expected a whole number from 0 to {most:,}, got {value}"
    if not 0 <= scale.hidden <= MAXIMUM_DIMENSION or scale.hidden % (2 * HEADS):
        yield "scale", f"hidden: expected 0 or a multiple of {2 * HEADS} to {MAXIMUM_DIMENSION:,}, got {scale.hidden}"
    if not 1 <= task.steps <= MAXIMUM_STEPS:
        yield "steps", f"expected a whole number from 1 to {MAXIMUM_STEPS}, got {task.steps}"
    if not 0 <= task.capacity_bytes <= (MAXIMUM_BYTES if task.device_kind == "cuda" else 0):
        yield "capacity_bytes", f"expected whole bytes, and 0 on a CPU, got {task.capacity_bytes}"


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    return list(data) if isinstance(data, tuple) else data
