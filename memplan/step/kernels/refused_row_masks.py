"""Rows of a micro-batch that a collator joins to one, or pads: where no job of that kind was traced, they are refused."""

from collections.abc import Iterator

from memplan.errors import CannotAnswerError
from memplan.model.spec import ModelSpec
from memplan.step.kernels.layer_arguments import steps_through_scores
from memplan.training.resolved import TrainingSetup

JOINED_FAMILIES = (
    "gemma", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip
"""Families whose rows, joined to one, were traced under transformers' mask for packed sequences."""

JOINED_SINCE = (1, 15)
"""The first version of TRL whose collator was read, and traced, as it joins rows."""


def refuse_joined_rows(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for rows joined to one wherever no job of that kind was traced.

    Raises:
        CannotAnswerError: The key of a training config, and what to do.

    Source:
        ``DataCollatorForLanguageModeling`` in trl/trainer/sft_trainer.py (1.16.0); ``create_causal_mask`` in
        transformers/masking_utils.py (5.24.0).
    """
    if not setup.config.joined_rows:
        return
    if not (setup.stack.name == "trl" and tuple(map(int, setup.stack.version.split(".")[:2])) >= JOINED_SINCE):
        raise CannotAnswerError(
            f"joined_rows: rows joined to one are not modelled for {setup.stack.label}; use stack: trl"
        )
    if spec.architecture not in JOINED_FAMILIES:
        families = ", ".join(JOINED_FAMILIES)
        raise CannotAnswerError(f"joined_rows: is modelled for {families}, and not for {spec.architecture}")
    for key, what, instead in _unjoined(spec, setup):
        raise CannotAnswerError(f"joined_rows: rows joined to one are not modelled with {key}: {what}; {instead}")


def _unjoined(spec: ModelSpec, setup: TrainingSetup) -> Iterator[tuple[str, str, str]]:
    """Yield what of a job was not traced with joined rows: the key, its value, and what to do."""
    config, attention = setup.config, setup.attention_choice
    if setup.runs_flash_attn:
        yield "kernels.attention", "flash", "flash-attn is given no mask: leave joined_rows out"
    if attention not in ("auto", "eager"):
        yield "kernels.attention", attention, "use auto or eager"
    if setup.profile.loss != "fused-head":
        yield "kernels.loss", setup.profile.loss, "use fused-head"
    if config.method.stage != "sft":
        yield "method.stage", config.method.stage, "use sft"
    if setup.checkpointing == "selective":
        yield "activation_checkpointing", "selective", "use full or none"
    if config.images.per_row:
        yield "images.per_row", str(config.images.per_row), "use rows of text"
    if config.parallel.gpus > config.parallel.data:
        yield "parallel", "a model, or rows, that GPUs share", "use parallel.data and zero_stage"
    if config.parallel.engine == "deepspeed":
        yield "parallel.engine", "deepspeed", "use torch or fsdp1"
    if config.compile != "none":
        yield "compile", config.compile, "leave it out"
    if steps_through_scores(spec, setup):
        yield "model", "soft caps or sinks", "leave joined_rows out"


PADDED_SINCE = (4, 53)
"""The first version of transformers whose masks of booleans were read, and traced, for rows with padding."""


OWN_MASKS, OWN_MASKS_UNTIL = (
    ("falcon", "mllama", "nemotron", "olmoe", "opt", "persimmon", "phimoe", "qwen2_moe", "stablelm"),
    5,
)
"""Families whose models make a mask of floats themselves, by an ``_update_causal_mask`` of their own, and the version since which none does.

Source: transformers/models/*/modeling_*.py (4.53.3 and 4.57.6; none in 5.24.0).
"""


def refuse_padded_rows(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for rows with padding wherever attention is given no mask of it, or another one than was traced.

    Raises:
        CannotAnswerError: ``padded_rows``, and what to do.
    """
    if not setup.config.padded_rows:
        return
    if reason := unpadded(setup):
        raise CannotAnswerError(f"padded_rows: {reason}")
    version = setup.stack.versions["transformers"]
    older = int(version.split(".")[0]) < OWN_MASKS_UNTIL
    if older and spec.architecture in OWN_MASKS and setup.profile.attention != "eager":
        raise CannotAnswerError(
            f"padded_rows: {spec.architecture} of transformers {version} makes a mask of floats, which is not modelled; "
            f"say padded_rows: false if no row has padding, or use kernels.attention: eager, or a version from {OWN_MASKS_UNTIL}.0 on"
        )


def may_pad(setup: TrainingSetup, batch: int) -> bool:
    """Whether rows of a micro-batch, or of an evaluation, may have padding that takes memory, and nobody said whether they do.

    Attention step by step is given a mask in any case.
    """
    config = setup.config
    if config.padded_rows is not None or setup.attention_choice == "eager" or unpadded(setup):
        return False
    evaluated = config.evaluation_batch_size if setup.evaluates_apart else None
    return max(batch, evaluated or 0) * setup.rows_per_sample > 1


def unpadded(setup: TrainingSetup) -> str:
    """Return why rows with padding are not planned for a job; nothing where they are.

    Source:
        ``_ignore_causal_mask_sdpa`` in transformers/masking_utils.py (5.24.0); ``_upad_input`` in modeling_flash_attention_utils.py.
    """
    config, stack = setup.config, setup.stack
    if config.joined_rows:
        return "rows that are joined to one have no padding; leave one of the two out"
    if stack.model_code != "transformers":
        return f"{stack.label} gives attention no mask of padding; leave it out"
    version, since = stack.versions["transformers"], ".".join(map(str, PADDED_SINCE))
    if tuple(map(int, version.split(".")[:2])) < PADDED_SINCE:
        return f"masks of transformers {version} are not modelled; leave it out, or use a version from {since} on"
    if setup.runs_flash_attn:
        return (
            "flash-attn takes padding out of query, key and value, as many tokens as the rows really have: not modelled; "
            "use kernels.attention: auto, or eager"
        )
    if setup.attention_choice not in ("auto", "eager"):
        return f"kernels.attention: {setup.attention_choice} is not modelled with a mask; use auto, or eager"
    if config.compile != "none":
        return "rows with padding are not modelled with compile; leave one of the two out"
    return ""
