"""What job a trainer of transformers or TRL runs, in the words of a command that would start the same."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import MISSING, fields
from typing import Any

from memplan.dryrun.terms.outcome import CalledJob
from memplan.trace.pretended_cuda.fake_devices import replaced

PROGRAMS = {
    "SFTTrainer": ("trl", "sft"),
    "DPOTrainer": ("trl", "dpo"),
    "KTOTrainer": ("trl", "kto"),
    "RewardTrainer": ("trl", "reward"),
    "Trainer": ("python", "run_clm.py", "--do_train"),
}
"""Class of a trainer -> the program that trains by it."""
NAMES_ONLY = frozenset({"output_dir", "hub_model_id", "run_name", "logging_dir", "max_length"})
"""Arguments whose value is a name, of which a program's files are told; and the length, which rows have themselves."""


class TrainerCalls:
    """Notes the job of the trainer that a script calls.

    Attributes:
        told: The job, or nothing where no such trainer was called.
    """

    def __init__(self) -> None:
        self.told: CalledJob | None = None

    def watch(self, module: Any, stack: ExitStack) -> None:
        """Watch ``transformers.trainer``."""
        owner = module.Trainer
        step = owner.training_step

        def stepped(trainer: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            rows = inputs.get("input_ids") if hasattr(inputs, "get") else None
            if rows is not None and (self.told is None or rows.shape[-1] > self.told.tokens):
                self.told = _job(trainer, rows.shape[-1])
            return step(trainer, model, inputs, *args, **options)

        stack.enter_context(replaced(owner, {"training_step": stepped}))


def _job(trainer: Any, tokens: int) -> CalledJob | None:
    names = [kind.__name__ for kind in type(trainer).__mro__]
    program = next((PROGRAMS[name] for name in names if name in PROGRAMS), None)
    own = any(
        kind.__module__.startswith("trl.") and kind.__name__.endswith("Trainer") for kind in type(trainer).__mro__
    )
    if program is None or (own and program[0] != "trl"):
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    words = [word for pair in (*_arguments(trainer.args), *_weights(model), *_adapters(model)) for word in pair]
    return CalledJob((*program, *words), model.config.to_json_string(use_diff=False), tokens)


def _arguments(given: Any) -> Iterator[tuple[str, ...]]:
    """Yield the arguments that have another value than their default."""
    for field in fields(given):
        value, default = getattr(given, field.name), field.default
        if default is MISSING or value == default or field.name in NAMES_ONLY or field.name.startswith("_"):
            continue
        if isinstance(value, bool | int | float | str) and value != "":
            yield f"--{field.name}", _word(getattr(value, "value", value))


def _weights(model: Any) -> Iterator[tuple[str, ...]]:
    yield "--dtype", str(model.dtype).removeprefix("torch.")
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in (None, "sdpa"):
        yield "--attn_implementation", str(attention)
    given = getattr(model.config, "quantization_config", None)
    for name, flag in QUANTISING.items() if given is not None else ():
        if getattr(given, name, False):
            yield (flag,)


QUANTISING = {
    "load_in_4bit": "--load_in_4bit",
    "load_in_8bit": "--load_in_8bit",
    "bnb_4bit_use_double_quant": "--use_bnb_nested_quant",
}


def _adapters(model: Any) -> Iterator[tuple[str, ...]]:
    for adapter in list(getattr(model, "peft_config", {}).values())[:1]:
        yield ("--use_peft",)
        yield "--lora_r", str(adapter.r)
        yield "--lora_dropout", str(adapter.lora_dropout)
        targets = adapter.target_modules
        if targets:
            yield "--lora_target_modules", *([targets] if isinstance(targets, str) else sorted(targets))
        if getattr(adapter, "use_dora", False):
            yield ("--use_dora",)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
