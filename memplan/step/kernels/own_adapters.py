"""Adapters and codes that a library has layers of its own for: what these layers cannot be put on."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.spec import Attention
from memplan.step.kernels.family_code import family_code
from memplan.training.resolved import TrainingSetup

FEED_FORWARD = frozenset(("gate_proj", "up_proj", "down_proj"))


def refuse_own_adapters(model: Model, setup: TrainingSetup) -> None:
    """Raise for what the builders of a stack's own models have no words for, or its codes no layout.

    Raises:
        CannotAnswerError: The stack cannot build that.

    Source:
        ``lora_*`` in torchtune/models/*/_component_builders.py (0.6.1); ``NF4Tensor.from_tensor`` in
        torchao/dtypes/nf4tensor.py (0.13.0).
    """
    _refuse_codes(model, setup)
    stack, adapter = setup.stack, setup.config.adapter
    if stack.model_code == "unsloth":
        for key, what, instead in _unfollowed(setup):
            raise CannotAnswerError(f"{setup.name}: {key}: {what} is not modelled for {stack.label}; {instead}")
    if stack.model_code != "torchtune":
        return
    heads = model.spec.runs[0].layer.attention
    code = family_code(stack, model.spec.architecture)
    if isinstance(heads, Attention) and heads.query_size != model.spec.hidden_size and not code.own_head_width:
        raise CannotAnswerError(
            f"stack: {stack.label} builds {model.spec.architecture} of heads that together are as wide as the model, "
            f"which those of {model.spec.name} are not"
        )
    if adapter is None or "all-linear" in adapter.targets:
        return
    where = f"{setup.name}: adapter.targets: {stack.label}"
    if 0 < len(FEED_FORWARD & set(adapter.targets)) < len(FEED_FORWARD):
        names = ", ".join(sorted(FEED_FORWARD))
        raise CannotAnswerError(f"{where} puts adapters on all of {names} or on none of them (apply_lora_to_mlp)")
    if FEED_FORWARD.issuperset(adapter.targets):
        raise CannotAnswerError(f"{where} has no adapters without one on a projection of attention")


def _unfollowed(setup: TrainingSetup) -> Iterator[tuple[str, str, str]]:
    """Yield what of a job has another path through unsloth's code than has been followed: the key, what it is, and what to do.

    Source:
        ``FastLanguageModel.from_pretrained`` in unsloth/models/loader.py, ``patch_peft_model`` in models/llama.py,
        ``_dropout_forward`` in kernels/fast_lora.py, ``run_attention`` in utils/attention_dispatch.py (2026.10.9).
    """
    config, adapter = setup.config, setup.config.adapter
    if adapter is None:
        yield "adapter", "training all weights, which runs on FastModel's path,", "use lora or qlora"
        return
    if adapter.kind == "dora":
        yield "adapter.kind", f"{adapter.kind}, which PEFT's own code runs,", "use lora"
    if adapter.dropout:
        yield "adapter.dropout", "dropout before adapters, whose masks are kept,", "use 0 (lora_dropout = 0)"
    if config.compute_dtype != "bf16":
        yield "compute_dtype", config.compute_dtype, "use bf16, on a card of compute capability 8.0 or above"
    if setup.profile.attention not in ("flash", "cudnn") or config.kernels.attention not in (None, "auto"):
        able = "use auto, on a card of compute capability 8.0 to 9.0, or of 12.0"
        yield (
            "kernels.attention",
            f"another attention than torch's own choice of flash or cuDNN ({setup.profile.attention})",
            able,
        )
    if setup.checkpointing == "selective":
        yield "activation_checkpointing", "selective", "use full or none"
    if config.parallel.gpus > 1:
        yield "parallel", "a job on several GPUs", "use one"
    if config.evaluation or config.weight_average != "none" or config.zero_gradients == "fill":
        yield "evaluation", "evaluation, an average of weights, or gradients filled with zeros", "leave it out"


def _refuse_codes(model: Model, setup: TrainingSetup) -> None:
    """Raise for codes of another library than the stack's, and for matrices that they do not cover in whole blocks."""
    stack, adapter = setup.stack, setup.config.adapter
    name = setup.format_names["hidden_matrix"]
    stored = setup.formats["hidden_matrix"]
    where = f"{setup.name}: weights.hidden_matrix: {name}"
    for role, other in setup.formats.items():
        if other.decoding_temporaries and (role != "hidden_matrix" or not stack.projections.codes_saved):
            told = f"{setup.name}: weights.{role}: {setup.format_names[role]}"
            raise CannotAnswerError(f"{told} is decoded by operators of torch, which is not modelled for {stack.label}")
    if adapter is None or not stored.decoding_temporaries:
        return
    if setup.config.compute_dtype != "bf16":
        raise CannotAnswerError(f"{where} is modelled over bf16, and not over {setup.config.compute_dtype}")
    code = family_code(stack, model.spec.architecture)
    matrices = [tensor for tensor in model.inventory if tensor.role == "hidden_matrix"]
    if odd := [tensor for tensor in matrices if tensor.elements % stored.block_elements]:
        raise CannotAnswerError(
            f"{where}: torchao quantises matrices of a multiple of {stored.block_elements} numbers, and "
            f"{odd[0].name} has {odd[0].elements}"
        )
    names = {tensor.name.removesuffix(".weight").rsplit(".", 1)[-1] for tensor in matrices}
    rest = names.difference(adapter.targets) if "all-linear" not in adapter.targets else set()
    if rest and code.quantises_adapted:
        raise CannotAnswerError(
            f"{where}: {stack.label} leaves projections of {model.spec.architecture} without adapters as floats "
            f"({', '.join(sorted(rest))}): not modelled; target all-linear"
        )
