"""The group of options for a training config, and what the groups of a command ask the library with."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memplan.catalog.training_config import Checkpointing
from memplan.cli.option_groups import (
    INFERENCE,
    TRAINING,
    CountedGpus,
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    option,
)
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError, printable

if TYPE_CHECKING:
    from memplan.catalog.catalog import Catalog
    from memplan.library.job_options import JobOptions
    from memplan.library.lookup import Overrides

PRESETS = {"qlora": "qlora", "lora": "lora", "full": "bf16-adamw"}
"""Flag -> the shipped config that it means."""


_NUMBER = re.compile(r"(\d{1,3}(?:,\d{3})+|\d{1,30})([km]?)", re.ASCII | re.IGNORECASE)


def whole_number(text: str) -> int:
    """Return a number that may be counted in k, which is 1024, or M, and have the commas of our answers; 0 for what is none.

    Example:
        >>> whole_number("4k"), whole_number("1M"), whole_number("28,712"), whole_number("many")
        (4096, 1048576, 28712, 0)
    """
    number = _NUMBER.fullmatch(text.strip())
    return int(number[1].replace(",", "")) * {"": 1, "k": 2**10, "m": 2**20}[number[2].lower()] if number else 0


def _tokens(text: str) -> int:
    """Return a length in tokens, at least one."""
    length = whole_number(text)
    if not length:
        raise typer.BadParameter(f"expected tokens, such as 4096 or 4k, got {printable(text)!r}")
    return length


_SHORTHANDS = {
    "stack": ("--stack", "stack"),
    "batch": ("--micro-batch-size", "micro_batch_size"),
    "length": ("--sequence-length", "sequence_length"),
    "checkpointing": ("--checkpointing", "activation_checkpointing"),
    "lora_rank": ("--lora-rank", "adapter.rank"),
    "optimizer": ("--optimizer", "optimizer"),
}
"""Field -> its option, and the key of a training config that it sets."""


def _preset(name: str) -> Any:
    return option(TRAINING, f"--{name}", "For --config qlora, lora or bf16-adamw.")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """A training config, and what the command line changes in it."""

    config: Annotated[
        str | None, option(TRAINING, "--config -c NAME|FILE", "A catalog name, a YAML or JSON file, or -.")
    ] = None
    qlora: Annotated[bool, _preset("qlora")] = False
    lora: Annotated[bool, _preset("lora")] = False
    full: Annotated[bool, _preset("full")] = False
    stack: Annotated[
        str | None, option(TRAINING, "--stack NAME[@VERSION]", "Whose training loop; see memplan list stacks.")
    ] = None
    batch: Annotated[
        int | None, option(TRAINING, "--micro-batch-size --batch-size -b N", "Sequences per device and pass.", min=1)
    ] = None
    length: Annotated[
        int | None,
        option(TRAINING, "--sequence-length --seq-len -s N", "Tokens per sequence; 4k is 4096.", parser=_tokens),
    ] = None
    checkpointing: Annotated[
        Checkpointing | None, option(TRAINING, "--checkpointing KIND", "Of activations: none, selective or full.")
    ] = None
    lora_rank: Annotated[int | None, option(TRAINING, "--lora-rank N", "Rank of a config's adapter.", min=1)] = None
    optimizer: Annotated[
        str | None, option(TRAINING, "--optimizer NAME", "Of all parameters; see memplan list optimizers.")
    ] = None
    settings: Annotated[
        list[str] | None, option(TRAINING, "--set KEY=VALUE", "Any key: kernels.optimizer=fused; repeatable.")
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

        return Overrides(self.batch, self.length, self.checkpointing, self.given, stack=self.stack)


def _key(setting: str) -> str:
    """Return the key that ``--set`` names."""
    return ".".join(part.strip() for part in setting.partition("=")[0].split("."))


def _contradiction(name: str, other_name: str, other_key: str) -> str:
    if name == other_name:
        return f"{printable(name)}: given more than once; give it once"
    return f"{printable(name)} contradicts {printable(other_name)}: both set {printable(other_key)}; give one of them"


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """What is done with the model: trained, or served."""

    method: Annotated[
        str | None,
        option(
            TRAINING,
            "--method NAME",
            "Such as sft, dpo, classification, embedding or inference. Others are pretrain, kto, orpo, cpo, simpo and "
            "reward; those of preferences run as TRL has them.",
        ),
    ] = None
    context: Annotated[
        int | None, option(INFERENCE, "--context N", "Tokens of prompt and answer: 4,096 else.", parser=_tokens)
    ] = None
    concurrency: Annotated[int | None, option(INFERENCE, "--concurrency N", "Sequences at once: 1 else.", min=1)] = None
    kv_dtype: Annotated[str | None, option(INFERENCE, "--kv-dtype NAME", "Of the cache: bf16, fp16, fp8-e4m3, ...")] = (
        None
    )
    weights: Annotated[
        str | None, option(INFERENCE, "--weights FORMAT", "Of the matrices, or by role: expert_matrix=mxfp4.")
    ] = None
    engine: Annotated[
        Literal["serving", "transformers"] | None,
        option(INFERENCE, "--engine NAME", "serving (paged, chunked), the default, or transformers."),
    ] = None


def job_options(
    output: OutputOptions,
    training: TrainingOptions,
    model: ModelOptions | None = None,
    device: DeviceOptions | None = None,
    configs: tuple[str | None, ...] = (),
) -> "JobOptions":
    """Return groups of options as keywords of the library.

    Args:
        configs: The configs in question, where ``training`` has no option for one.

    Raises:
        InvalidFileError: ``--lora-rank`` for a config without adapter.
    """
    from memplan.library.lookup.trainer_files import is_trainer_file

    catalog = output.catalog()
    for config in configs or (training.chosen,):
        training.refuse_rank_without_adapter(config, catalog)
    chosen = training.chosen
    if not (chosen or configs) and model is not None and model.model is not None and is_trainer_file(model.model):
        chosen = model.model
    options: JobOptions = {
        "config": chosen,
        "stack": training.stack,
        "micro_batch_size": training.batch,
        "sequence_length": training.length,
        "activation_checkpointing": training.checkpointing,
        "set": training.given,
        "catalog": catalog,
    }
    if model is not None:
        options["shapes"] = model.shapes
        options["beside"] = tuple(model.beside or ())
        options["trainer_version"] = model.trainer_version
    if device is not None:
        options |= {"gpu": device.gpu, "gpu_memory": device.gpu_memory, "profile": device.profile}
        options["host_memory"] = device.host_memory
        counted = device.gpus if isinstance(device.gpus, CountedGpus) else None
        options["gpus"] = None if counted is None else int(counted)
        options["gpus_per_node"] = None if counted is None else counted.per_node
    return options
