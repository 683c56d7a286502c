"""Options of degrees of parallelism, each a key of ``parallel``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS
from memplan.cli.option_groups import PARALLEL, CountedGpus, DeviceOptions, option
from memplan.cli.training_options import TrainingOptions
from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import opened, usable_path
from memplan.errors import InvalidFileError

if TYPE_CHECKING:
    from memplan.library.job_options import JobOptions

DEFAULT_GPUS_PER_NODE = 8
FILES = (".yaml", ".yml", ".json", ".toml", ".sh")
"""Ends of the names of files that may say how a model is divided."""
MOST_READ = 2**20
WORDS = (b"parallel", b"megatron", b"MODEL_ARGS", b"num-layers", b"num_layers")
"""What stands in files that divide a model, and in Megatron-LM's launch scripts of replicas alone."""
KEYS: Mapping[str, str] = {
    "tp": "tensor",
    "pp": "pipeline",
    "vp": "virtual",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "zero": "zero_stage",
    "hsdp": "replicate",
    "sequence_parallel": "sequence",
    "schedule": "schedule",
    "micro_batches": "micro_batches",
}
"""Option -> the key of ``parallel`` that it sets."""

DEGREES = "Degrees: tensor, pipeline, virtual, context, expert, expert tensor; replicas of what data ranks divide."
NODES = f"Machines, and GPUs of each ({DEFAULT_GPUS_PER_NODE} where nothing is said)."


def _number(name: str, text: str = DEGREES) -> Any:
    return option(PARALLEL, f"{name} N", text, min=1)


def _may_divide(file: str) -> bool:
    """Tell whether a file has a word that one has which divides a model, so that others are not read twice."""
    try:
        with opened(usable_path(file)) as content:
            text = content.read(MOST_READ)
    except InvalidFileError:  # said where the file is read
        return False
    return any(word in text for word in WORDS)


@dataclass(frozen=True, slots=True)
class GridOptions:
    """How many GPUs share the job, and how."""

    tp: Annotated[int | None, _number("--tp")] = None
    pp: Annotated[int | None, _number("--pp")] = None
    vp: Annotated[int | None, _number("--vp")] = None
    cp: Annotated[int | None, _number("--cp")] = None
    ep: Annotated[int | None, _number("--ep")] = None
    etp: Annotated[int | None, _number("--etp")] = None
    hsdp: Annotated[int | None, _number("--hsdp")] = None
    zero: Annotated[int | None, option(PARALLEL, "--zero STAGE", "What data ranks divide: 0 to 3.", min=0, max=3)] = (
        None
    )
    sequence_parallel: Annotated[
        bool, option(PARALLEL, "--sequence-parallel", "Divide what is between the matrices too.")
    ] = False
    schedule: Annotated[str | None, option(PARALLEL, "--schedule NAME", "Of a pipeline: gpipe, 1f1b, interleaved.")] = (
        None
    )
    micro_batches: Annotated[
        int | None, _number("--micro-batches", "Micro-batches that pass a pipeline in a step.")
    ] = None
    nodes: Annotated[int | None, _number("--nodes", NODES)] = None
    gpus_per_node: Annotated[int | None, _number("--gpus-per-node", NODES)] = None
    rank: Annotated[str, option(PARALLEL, "--rank RANK", "Which is shown: worst, all or a number.")] = "worst"

    def __post_init__(self) -> None:
        """Refuse a schedule without a name, which would be none.

        Raises:
            InvalidFileError: There is nothing but spaces.
        """
        if self.schedule is not None and not self.schedule.strip():
            raise InvalidFileError([f"--schedule: expected a name, got {self.schedule!r}"])

    @property
    def settings(self) -> tuple[str, ...]:
        """What was given, as ``--set`` takes it."""
        values = {key: getattr(self, name) for name, key in KEYS.items()}
        given = {key: value for key, value in values.items() if value is not None and value is not False}
        return tuple(f"parallel.{key}={str(value).lower()}" for key, value in given.items())

    def over(self, training: TrainingOptions) -> TrainingOptions:
        """Return a training config's options with these degrees among what is set.

        Raises:
            InvalidFileError: A degree is given here and by ``--set``.
        """
        return replace(training, settings=[*self.settings, *(training.settings or ())]) if self.settings else training

    def divides(self, model: str | None, options: JobOptions) -> bool:
        """Tell whether the model itself is divided."""
        told = any(setting.startswith("parallel") for setting in options["set"] or ())
        files = any(_may_divide(str(name)) for name in (options["config"], model) if str(name).endswith(FILES))
        if told or files or (options["stack"] or "").startswith("megatron"):
            from memplan.library.runs.gridded_model import is_grid

            if is_grid(model, options):
                return True
        return False

    def counted(self, device: DeviceOptions) -> DeviceOptions:
        """Return a device's options with the number of GPUs that ``--nodes`` and ``--gpus-per-node`` make.

        Raises:
            InvalidFileError: ``--gpus`` is another number.
        """
        if self.nodes is None and self.gpus_per_node is None:
            return device
        given = device.gpus if isinstance(device.gpus, CountedGpus) else None
        per = self.gpus_per_node or (given // self.nodes if given and self.nodes else DEFAULT_GPUS_PER_NODE)
        nodes = self.nodes or max(1, round((given or 1) / per))
        if given is not None and (per < 1 or nodes * per != given):
            size = self.gpus_per_node
            near = nodes * (size or max(1, round(given / nodes)))
            what = f"{nodes} node{'s' * (nodes > 1)} of {size} GPUs" if size else f"{nodes} nodes of equally many GPUs"
            raise InvalidFileError([f"--gpus {given} is not {what}; the nearest that is: {near}"])
        if nodes * per > MAXIMUM_GPUS:
            raise InvalidFileError(
                [f"--nodes {nodes}: {nodes * per:,} GPUs are more than {MAXIMUM_GPUS:,}, the most that are planned"]
            )
        count = CountedGpus(nodes * per)
        count.per_node = per
        return replace(device, gpus=count)
