"""What plans take for granted of their models, in a sentence or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.step.beside.second_forward import second_bytes
from memplan.step.blocks.fused_adapters import decoded_weight_bytes
from memplan.training.image_models import plans_images
from memplan.training.own_settings import own_settings
from memplan.training.rules.distillation_rules import on_policy
from memplan.training.second_models import VALUES, BesideModel
from memplan.training.stack_models import TEXT_ALONE, UNCHECKPOINTED
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan


LINEAR_ALONE = "transformers stacks them in one tensor, and bitsandbytes quantises linear layers alone"


IN_SHORT = {
    "torch": "Linear attention by transformers' own torch code; with flash-linear-attention and causal-conv1d installed: "
    "--set kernels.linear_attention=fla.",
    "fla": "Linear attention by flash-linear-attention and causal-conv1d (kernels.linear_attention: fla).",
    "torch-scan": "State space layers by transformers' own torch code; with mamba-ssm and causal-conv1d installed: "
    "--set kernels.linear_attention=mamba.",
    "mamba": "State space layers by mamba-ssm and causal-conv1d (kernels.linear_attention: mamba).",
}
"""Kernels of linear attention, or of state space layers -> the same in a screen that has no list of assumptions."""


def recurrent_kernels(plan: MemoryPlan) -> str:
    """Return what runs gated delta networks or state space layers; nothing for a model of attention alone."""
    kernels: str = plan.setup.profile.linear_attention
    if plan.model.spec.state_space is not None:
        return "torch-scan" if kernels == "torch" else kernels
    return kernels if plan.model.spec.linear_attention else ""


def runs_text_alone(plan: MemoryPlan) -> bool:
    """Tell whether the stack leaves out the vision tower that the model was released with."""
    return any(TEXT_ALONE in note for note in plan.model.notes)


def experts_format(plan: MemoryPlan) -> str:
    """Return the format of experts that stay as they are where other matrices are codes; else nothing."""
    names = plan.setup.format_names
    stacked = any(tensor.role == "expert_matrix" for tensor in plan.model.inventory)
    apart = (
        stacked and plan.setup.stack.model_code == "transformers" and names["expert_matrix"] != names["hidden_matrix"]
    )
    return names["expert_matrix"] if apart else ""


def rows_alone(plan: MemoryPlan) -> str:
    """Return that rows hold text alone, where the model could see images; else nothing."""
    images, tower = plan.setup.config.images, plan.model.spec.tower
    if images.per_row or not (tower is not None or runs_text_alone(plan)):
        return ""
    given = "" if images.pixels is None else f", here of up to {images.pixels:,} pixels each,"
    counted = plans_images(plan.model.spec, plan.setup.stack)
    how = "; images.per_row and images.pixels count them" if counted else ""
    return f"Rows hold text alone: rows with images{given} need more{how}."


def decoded_weights_note(plan: MemoryPlan) -> str:
    """Return what functions keep decoded of every layer, and the key that costs it; nothing where they do not."""
    setup = plan.setup
    size = decoded_weight_bytes(plan.model, setup)
    if not size or (setup.checkpointing != "none" and setup.stack.checkpointing.reentrant):
        return ""
    own = ", ".join(item.text for item in own_settings(setup.stack, [("kernels.adapters", "composite")]))
    return (
        f"4-bit weights staged on the CPU are decoded for {setup.stack.label}'s functions of adapters, which keep {format_bytes(size)} "
        f"of them, those of every layer, until backward is done; kernels.adapters: composite keeps none ({own})"
    )


def notes_on_models(plans: Sequence[MemoryPlan]) -> tuple[str, ...]:
    """Return what plans take for granted of their model, in a sentence or two; nothing for a text model of attention alone."""
    told = [note for plan in plans for note in plan.model.notes if note.endswith((TEXT_ALONE, UNCHECKPOINTED))]
    return (
        *dict.fromkeys(filter(None, map(rows_alone, plans))),
        *(f"{note}." for note in dict.fromkeys(told)),
        *(IN_SHORT[kernel] for kernel in dict.fromkeys(filter(None, map(recurrent_kernels, plans)))),
        *(f"Experts stay in {name}: {LINEAR_ALONE}." for name in dict.fromkeys(map(experts_format, plans)) if name),
    )


def teacher_note(plan: MemoryPlan, teacher: BesideModel) -> str:
    """Return what a student learns from."""
    names, size = teacher.setup.format_names, second_bytes(plan.states.tensors)
    matrices, rest = names["hidden_matrix"], names["embedding"]
    formats = matrices if matrices == rest else f"{matrices} with {rest} beside"
    method = plan.setup.config.method
    said, results = method.teacher, "hidden states" if on_policy(method) else "logits"
    dtype = "" if said is not None and said.dtype else ", the dtype of most checkpoints"
    return (
        f"teacher: {teacher.model.spec.name}, frozen, {size:,} B of weights in {formats}{dtype}; its forward runs beside all that the "
        f"student's has left, and its {results} stay until the loss is there ({method.divergence})"
    )


def phase_notes(plan: MemoryPlan) -> Iterator[str]:
    """Yield what a phase of PPO has on the card besides its policy."""
    for role, second in plan.setup.seconds.items():
        size, trained = second_bytes(plan.states.tensors, role), "trained whole" if role == VALUES else "frozen"
        words, all_words = second.model.spec.vocab_size, plan.model.spec.vocab_size
        fewer = (
            f", {words:,} words of the policy's {all_words:,}: ids beyond them end a run" if words < all_words else ""
        )
        yield f"{role}: {second.model.spec.name}, {trained}, {size:,} B of weights{fewer}"
    rows = plan.micro_batch_size * plan.setup.config.gradient_accumulation_steps
    yield (
        f"method ppo: {rows} answers of {plan.setup.completion_length:,} tokens, none of which ends earlier; the logits that all were sampled "
        "from stay in fp32 until the next are there; no autocast, no checkpointing and no clipping, which its loop never switches on"
    )
