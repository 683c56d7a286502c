"""Options that several commands share, declared once: in frozen groups, whose fields are the options."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError, printable
from memplan.report.document import Format

if TYPE_CHECKING:
    from memplan.catalog.catalog import Catalog
    from memplan.library.lookup import Shapes

MODEL, DEVICE, TRAINING, OUTPUT = "Model", "Device", "Training", "Output"
SHAPES_ALONE, INFERENCE, PARALLEL, WRITING = "Shapes", "Inference", "Several GPUs", "Writing"
"""Headings of help."""
SELDOM_USED = (SHAPES_ALONE, INFERENCE, PARALLEL, WRITING)
"""Headings of options that ``--help`` names alone; what they do is in ``--help-all``."""


TorchDevice = Literal["cuda", "cpu"]
Unit = Literal["GiB", "GB", "MiB", "bytes"]

LARGEST_NUMBER = 2**30
"""Of steps, tokens, seconds: beyond any that is meant."""


def option(heading: str, flags: str, help: str, **settings: Any) -> Any:
    """Return an option that stands under a heading of help; a number from somewhere has an end, which infinity is beyond.

    Args:
        flags: As it is typed: its names, and what stands for its value, such as ``--gpu -g NAME``.
    """
    words = flags.split()
    names = [word for word in words if word.startswith("-")]
    if value := " ".join(words[len(names) :]):
        settings["metavar"] = value
    if "min" in settings:
        settings.setdefault("max", LARGEST_NUMBER)
    return typer.Option(*names, help=help, rich_help_panel=heading, **settings)


def argument(heading: str, name: str, help: str) -> Any:
    """Return an argument that may be left out, under a heading of help."""
    return typer.Argument(metavar=name, help=help, show_default=False, rich_help_panel=heading)


# ------------------------------------------------------------------ models
def _shape(name: str) -> Any:
    return option(SHAPES_ALONE, f"{name} N", "A model by its shapes, in place of MODEL.")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """MODEL, or shapes in its place."""

    model: Annotated[str | None, argument(MODEL, "MODEL", "A name, folder, config.json, GGUF or trainer's file.")] = (
        None
    )
    layers: Annotated[int | None, _shape("--layers")] = None
    hidden: Annotated[int | None, _shape("--hidden")] = None
    intermediate: Annotated[int | None, _shape("--intermediate")] = None
    heads: Annotated[int | None, _shape("--heads")] = None
    kv_heads: Annotated[int | None, _shape("--kv-heads")] = None
    head_dim: Annotated[int | None, _shape("--head-dim")] = None
    vocab: Annotated[int | None, _shape("--vocab")] = None
    tied: Annotated[
        bool | None, option(SHAPES_ALONE, "--tied/--untied", "Head and embedding share their weights, or not.")
    ] = None

    beside: Annotated[
        list[str] | None, option(MODEL, "--with FILE", "A launcher's file beside a trainer's; repeatable.")
    ] = None

    trainer_version: Annotated[
        str | None, option(MODEL, "--trainer-version V", "Of the trainer whose file it is; else the newest read.")
    ] = None

    online: Annotated[bool, option(MODEL, "--online", "Fetch an unknown model's config.json from Hugging Face.")] = (
        False
    )

    def __post_init__(self) -> None:
        """Fetch a config that is asked for."""
        if self.online and self.model is not None:
            from memplan.library.lookup import open_catalog
            from memplan.library.lookup.model_names import is_known
            from memplan.library.lookup.online_config import fetched_config

            if not is_known(self.model, open_catalog(None)):
                object.__setattr__(self, "model", str(fetched_config(self.model)))

    @property
    def shapes(self) -> "Shapes":
        """The shapes that were given."""
        from memplan.library.lookup import Shapes

        return Shapes(**{name: getattr(self, name) for name in SHAPES})


SHAPES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "tied")
"""Options of a model that are its shapes."""


# ------------------------------------------------------------------ devices
class CountedGpus(int):
    """How many GPUs, and which where it was said with them.

    Example:
        >>> count = CountedGpus.parsed("64x h100")
        >>> int(count), count.gpu, CountedGpus.parsed("8").gpu
        (64, 'h100', None)
    """

    gpu: str | None = None
    per_node: int | None = None  # Of how many a node is, where that was said

    @classmethod
    def parsed(cls, text: str) -> "CountedGpus":
        """Return the number and the GPU of ``64``, ``64x h100``, ``64 h100`` or a name alone."""
        match = _COUNTED.fullmatch(f"1x {text}" if text[:1].isalpha() else text)
        if match is None or not 1 <= int(match[1]) <= MAXIMUM_GPUS:
            raise typer.BadParameter(f"expected 1 to {MAXIMUM_GPUS}, or such as '64x h100', got {printable(text)!r}")
        count = cls(match[1])
        count.gpu = match[2]
        return count


_COUNTED = re.compile(r"\s*(\d{1,9})(?:(?:\s*[x*]|\s)\s*(\S.*?))?\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """A GPU, and how many."""

    gpu: Annotated[str | None, option(DEVICE, "--gpu -g NAME", "A catalog name, nvidia-smi's name, or local.")] = None
    gpu_memory: Annotated[
        str | None, option(DEVICE, "--gpu-memory SIZE", "Memory of a GPU that is in no catalog, such as 24GiB.")
    ] = None
    gpus: Annotated[
        int, option(DEVICE, "--gpus -n N", "How many share the job, or '64x h100'.", parser=CountedGpus.parsed)
    ] = 1
    host_memory: Annotated[
        str | None, option(DEVICE, "--host-memory SIZE", "Memory of a node's host, such as 512GiB.")
    ] = None
    profile: Annotated[
        Path | None, option(DEVICE, "--profile FILE", "Measured by validate --calibrate.", envvar="MEMPLAN_PROFILE")
    ] = None

    def __post_init__(self) -> None:
        """Take the GPU that is named with its number.

        Raises:
            InvalidFileError: Another one is named too.
        """
        named = getattr(self.gpus, "gpu", None)
        if named is not None and (self.gpu is not None or self.gpu_memory is not None):
            raise InvalidFileError(
                [f"--gpus names a GPU, {printable(named)}, and so does another option: give one of them"]
            )
        if named is not None:
            object.__setattr__(self, "gpu", named)
            object.__setattr__(self, "gpus", CountedGpus(self.gpus))


# ------------------------------------------------------------------ output
@dataclass(frozen=True, slots=True)
class VerdictOptions:
    """What counts as fitting."""

    strict: Annotated[bool, option(OUTPUT, "--strict", "Treat TIGHT as NO.")] = False


@dataclass(frozen=True, slots=True)
class PlotOptions:
    """A picture of the answer."""

    plot: Annotated[Path | None, option(OUTPUT, "--plot FILE", "Draw the answer too, as .svg or .png.")] = None

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn, before the work and not after it."""
        if self.plot is not None:
            from memplan.report.figures import check_drawable

            check_drawable(self.plot)


@dataclass(frozen=True, slots=True)
class DetailOptions:
    """How much of an answer is shown."""

    whole: Annotated[bool, option(OUTPUT, "--verbose -v --all", "Every row, instant and formula.")] = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How an answer is written, and where to."""

    as_json: Annotated[bool, option(OUTPUT, "--json", "Same as --format json.")] = False
    form: Annotated[Format | None, option(OUTPUT, "--format -f FORMAT", "table (default), plain, json, csv or md.")] = (
        None
    )
    file: Annotated[Path | None, option(OUTPUT, "--output -o FILE", "Write the answer to a file.")] = None
    units: Annotated[Unit | None, option(WRITING, "--units UNIT", "Of bytes in tables: GiB, GB, MiB or bytes.")] = None
    quiet: Annotated[bool, option(WRITING, "--quiet -q", "Only the last line, or nothing besides the exit code.")] = (
        False
    )
    catalog_path: Annotated[
        Path | None, option(WRITING, "--catalog PATH", "Your own catalog file or folder.", envvar="MEMPLAN_CATALOG")
    ] = None

    def __post_init__(self) -> None:
        """Refuse two formats."""
        self.format_name(self.form)

    def format_name(self, form: str | None) -> str:
        """Return the name of the format that was asked for.

        Raises:
            InvalidFileError: ``--json`` beside another format.
        """
        if self.as_json and form not in (None, "json"):
            raise InvalidFileError([f"--json contradicts --format {form}: give one of them"])
        return "json" if self.as_json else form or "table"

    @property
    def whole(self) -> bool:
        """Whether the answer is JSON."""
        return self.format_name(self.form) == "json"

    @property
    def unit(self) -> str:
        """The unit of bytes, or nothing for the one that suits each figure."""
        return self.units or ""

    def catalog(self) -> "Catalog":
        """Return the shipped catalog with the user's own added."""
        from memplan.library.lookup import open_catalog

        return open_catalog(self.catalog_path)
