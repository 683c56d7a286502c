"""Options that several commands share, declared once: in frozen groups, whose fields are the options."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.catalog.training_config import MAXIMUM_GPUS
from memplan.errors import InvalidFileError, printable

if TYPE_CHECKING:
    from memplan.catalog.catalog import Catalog
    from memplan.library.job_options import JobOptions
    from memplan.library.lookup import Overrides, Shapes

MODEL, DEVICE, TRAINING, OUTPUT = "Model", "Device", "Training", "Output"
"""Headings of help."""

PRESETS = {"qlora": "qlora", "lora": "lora", "full": "bf16-adamw"}
"""Flag -> the shipped config that it means."""


class OutputFormat(StrEnum):
    """How an answer is written."""

    table = "table"
    plain = "plain"
    json = "json"
    csv = "csv"
    md = "md"


class Unit(StrEnum):
    """Unit of bytes in tables; without it each figure has the unit that suits it."""

    GiB = "GiB"
    GB = "GB"
    MiB = "MiB"
    bytes = "bytes"


class CheckpointingChoice(StrEnum):
    """What a layer keeps for backward."""

    none = "none"
    selective = "selective"
    full = "full"


def option(heading: str, *names: str, help: str, **settings: Any) -> Any:
    """Return an option that stands under a heading of help."""
    return typer.Option(*names, help=help, rich_help_panel=heading, **settings)


# ------------------------------------------------------------------ models
def _shape(name: str) -> Any:
    return option(MODEL, name, metavar="N", help="A model by its shapes, in place of MODEL.")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """MODEL, or shapes in its place."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Catalog name, directory, config.json, GGUF or safetensors file, or - for a config.json on standard input.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None
    layers: Annotated[int | None, _shape("--layers")] = None
    hidden: Annotated[int | None, _shape("--hidden")] = None
    intermediate: Annotated[int | None, _shape("--intermediate")] = None
    heads: Annotated[int | None, _shape("--heads")] = None
    kv_heads: Annotated[int | None, _shape("--kv-heads")] = None
    head_dim: Annotated[int | None, _shape("--head-dim")] = None
    vocab: Annotated[int | None, _shape("--vocab")] = None
    tied: Annotated[
        bool | None, option(MODEL, "--tied/--untied", help="Head and embedding share their weights, or not.")
    ] = None

    @property
    def shapes(self) -> "Shapes":
        """The shapes that were given."""
        from memplan.library.lookup import Shapes

        return Shapes(**{name: getattr(self, name) for name in SHAPES})


SHAPES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "tied")
"""Options of a model that are its shapes."""


# ------------------------------------------------------------------ devices
@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """A GPU, and how many."""

    gpu: Annotated[
        str | None,
        option(
            DEVICE,
            "--gpu",
            "-g",
            metavar="NAME",
            help="A GPU of the catalog, nvidia-smi's name of one, or local.",
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        option(DEVICE, "--gpu-memory", metavar="SIZE", help="Memory of a GPU that is in no catalog, such as 24GiB."),
    ] = None
    gpus: Annotated[
        int,
        option(
            DEVICE,
            "--gpus",
            "-n",
            min=1,
            max=MAXIMUM_GPUS,
            metavar="N",
            help="How many of them share the job.",
        ),
    ] = 1
    profile: Annotated[
        Path | None,
        option(
            DEVICE,
            "--profile",
            envvar="MEMPLAN_PROFILE",
            metavar="FILE",
            help="Measured workspaces and context, from memplan validate --calibrate.",
        ),
    ] = None


# ------------------------------------------------------------------ training configs
_NUMBER = re.compile(r"(\d{1,12})(k?)", re.ASCII | re.IGNORECASE)


def whole_number(text: str) -> int:
    """Return a number that may be counted in k, which is 1024; 0 for what is none.

    Example:
        >>> whole_number("4k"), whole_number("512"), whole_number("many")
        (4096, 512, 0)
    """
    number = _NUMBER.fullmatch(text.strip())
    return int(number[1]) * (1024 if number[2] else 1) if number else 0


def _tokens(text: str) -> int:
    """Return a length in tokens, at least one."""
    length = whole_number(text)
    if not length:
        raise typer.BadParameter(f"expected tokens, such as 4096 or 4k, got {printable(text)!r}")
    return length


_SHORTHANDS = {
    "batch": ("--micro-batch-size", "micro_batch_size"),
    "length": ("--sequence-length", "sequence_length"),
    "checkpointing": ("--checkpointing", "activation_checkpointing"),
    "lora_rank": ("--lora-rank", "adapter.rank"),
    "optimizer": ("--optimizer", "optimizer"),
}
"""Field -> its option, and the key of a training config that it sets."""


def _preset(name: str) -> Any:
    return option(TRAINING, f"--{name}", help="For --config qlora, lora or bf16-adamw.")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """A training config, and what the command line changes in it."""

    config: Annotated[
        str | None,
        option(
            TRAINING,
            "--config",
            "-c",
            metavar="NAME|FILE",
            help="A catalog name, a YAML or JSON file, or -.",
        ),
    ] = None
    qlora: Annotated[bool, _preset("qlora")] = False
    lora: Annotated[bool, _preset("lora")] = False
    full: Annotated[bool, _preset("full")] = False
    batch: Annotated[
        int | None,
        option(
            TRAINING,
            "--micro-batch-size",
            "--batch-size",
            "-b",
            min=1,
            metavar="N",
            help="Sequences per device and pass.",
        ),
    ] = None
    length: Annotated[
        int | None,
        option(
            TRAINING,
            "--sequence-length",
            "--seq-len",
            "-s",
            parser=_tokens,
            metavar="N",
            help="Tokens per sequence; 4k is 4096.",
        ),
    ] = None
    checkpointing: Annotated[
        CheckpointingChoice | None,
        option(TRAINING, "--checkpointing", metavar="KIND", help="Of activations: none, selective or full."),
    ] = None
    lora_rank: Annotated[
        int | None, option(TRAINING, "--lora-rank", min=1, metavar="N", help="Rank of a config's adapter.")
    ] = None
    optimizer: Annotated[
        str | None,
        option(TRAINING, "--optimizer", metavar="NAME", help="Of all parameters; see memplan list optimizers."),
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            TRAINING,
            "--set",
            metavar="KEY=VALUE",
            help="Any key of a training config, such as kernels.optimizer=fused; repeatable.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            InvalidFileError: Two configs, or one key set twice.
        """
        configs = [f"--{name}" for name in PRESETS if getattr(self, name)]
        configs += ["--config"] if self.config is not None else []
        if len(configs) > 1:
            raise InvalidFileError([f"{' and '.join(configs)}: give one of them"])
        given = [(key, name) for name, key in self._shorthands()]
        for setting in self.settings or ():
            key, option_name = _key(setting), f"--set {_key(setting)}"
            for other, other_name in given:
                if key == other or other.startswith(f"{key}."):
                    raise InvalidFileError([_contradiction(option_name, other_name, other)])
            given.append((key, option_name))

    def _shorthands(self) -> list[tuple[str, str]]:
        """Return the options that stand for keys and were given, each with its key."""
        return [pair for name, pair in _SHORTHANDS.items() if getattr(self, name) is not None]

    @property
    def chosen(self) -> str | None:
        """The config that was named, by ``--config`` or by a flag of its own."""
        return next((config for flag, config in PRESETS.items() if getattr(self, flag)), self.config)

    @property
    def given(self) -> tuple[str, ...]:
        """What was set by ``--set``, and by shorthands that are written in a config in more than one way."""
        rank = () if self.lora_rank is None else (f"adapter.rank={self.lora_rank}",)
        optimizer = () if self.optimizer is None else (f"optimizer={self.optimizer}",)
        return (*rank, *optimizer, *(self.settings or ()))

    def refuse_rank_without_adapter(self, config: str | None, catalog: "Catalog") -> None:
        """Refuse ``--lora-rank`` for a config that has no adapter.

        Raises:
            InvalidFileError: It has none.
        """
        if self.lora_rank is None or any(_key(setting).startswith("adapter") for setting in self.settings or ()):
            return
        from memplan.library.lookup import Overrides, find_setup

        if config is None or find_setup(config, Overrides(), catalog).config.adapter is None:
            what = "no config with an adapter is named" if config is None else f"{printable(config)} has no adapter"
            raise InvalidFileError([f"--lora-rank: {what}; give --lora, --qlora or a config that has one"])

    def overrides(self) -> "Overrides":
        """Return what the command line changes in a config."""
        from memplan.library.lookup import Overrides

        return Overrides(self.batch, self.length, self.checkpointing, self.given)


def _key(setting: str) -> str:
    """Return the key that ``--set`` names."""
    return ".".join(part.strip() for part in setting.partition("=")[0].split("."))


def _contradiction(name: str, other_name: str, other_key: str) -> str:
    if name == other_name:
        return f"{printable(name)}: given more than once, and only one counts"
    return f"{printable(name)} contradicts {printable(other_name)}: both set {printable(other_key)}; give one of them"


# ------------------------------------------------------------------ output
@dataclass(frozen=True, slots=True)
class VerdictOptions:
    """What counts as fitting."""

    strict: Annotated[bool, option(OUTPUT, "--strict", help="Treat TIGHT as NO.")] = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How an answer is written, and where to."""

    as_json: Annotated[bool, option(OUTPUT, "--json", help="Same as --format json.")] = False
    form: Annotated[
        OutputFormat | None,
        option(OUTPUT, "--format", "-f", metavar="FORMAT", help="table (default), plain, json, csv or md."),
    ] = None
    file: Annotated[
        Path | None, option(OUTPUT, "--output", "-o", metavar="FILE", help="Write the answer to a file.")
    ] = None
    units: Annotated[
        Unit | None, option(OUTPUT, "--units", metavar="UNIT", help="Of bytes in tables: GiB, GB, MiB or bytes.")
    ] = None
    quiet: Annotated[
        bool, option(OUTPUT, "--quiet", "-q", help="Only the last line, or nothing besides the exit code.")
    ] = False
    catalog_path: Annotated[
        Path | None,
        option(
            OUTPUT,
            "--catalog",
            envvar="MEMPLAN_CATALOG",
            metavar="PATH",
            help="Your own catalog file or folder, added to ours.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse two formats."""
        self.format_name(self.form)

    def format_name(self, form: StrEnum | None) -> str:
        """Return the name of the format that was asked for.

        Raises:
            InvalidFileError: ``--json`` beside another format.
        """
        if self.as_json and form is not None and form.value != "json":
            raise InvalidFileError([f"--json contradicts --format {form.value}: give one of them"])
        return "json" if self.as_json else "table" if form is None else form.value

    @property
    def whole(self) -> bool:
        """Whether the answer is JSON."""
        return self.format_name(self.form) == "json"

    @property
    def unit(self) -> str:
        """The unit of bytes, or nothing for the one that suits each figure."""
        return "" if self.units is None else self.units.value

    def catalog(self) -> "Catalog":
        """Return the shipped catalog with the user's own added."""
        from memplan.library.lookup import open_catalog

        return open_catalog(self.catalog_path)


def job_options(
    output: OutputOptions,
    training: TrainingOptions,
    model: ModelOptions | None = None,
    device: DeviceOptions | None = None,
    configs: tuple[str | None, ...] = (),
) -> "JobOptions":
    """Return groups of options as keywords of the library.

    Args:
        output: Whose catalog counts.
        training: The training config, and what is changed in it.
        model: Whose shapes count.
        device: The GPU, or none.
        configs: The configs in question, where ``training`` has no option for one.

    Raises:
        InvalidFileError: ``--lora-rank`` for a config without adapter.
    """
    catalog = output.catalog()
    for config in configs or (training.chosen,):
        training.refuse_rank_without_adapter(config, catalog)
    options: JobOptions = {
        "config": training.chosen,
        "micro_batch_size": training.batch,
        "sequence_length": training.length,
        "activation_checkpointing": training.checkpointing and training.checkpointing.value,
        "set": training.given,
        "catalog": catalog,
    }
    if model is not None:
        options["shapes"] = model.shapes
    if device is not None:
        options |= {"gpu": device.gpu, "gpu_memory": device.gpu_memory, "profile": device.profile}
        options["gpus"] = device.gpus if device.gpus > 1 else None
    return options
