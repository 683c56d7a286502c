"""A job on a card: what the card cannot do is refused, or done as torch does it there, and attention as torch chooses it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memplan.catalog.entries import Gpu
from memplan.catalog.hardware.hardware_tables import HardwareTables, capability_of, is_native
from memplan.catalog.kernel_profiles import AttentionKernel
from memplan.catalog.stacks import Stack
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention
from memplan.step.kernels.attention_choice import (
    FLASH_LARGEST_WIDTH,
    AttentionCall,
    ChosenKernel,
    is_wide,
    kernel_on,
    runs_on,
    widened_later,
)
from memplan.step.kernels.family_code import dropouts, family_code
from memplan.step.kernels.image_rows import has_images
from memplan.step.kernels.loss_pieces import LARGE_CARD_BYTES
from memplan.step.kernels.refused_code import refuse_masked_windows
from memplan.training.resolved import TrainingSetup

TORCH_CHOOSES = "auto"
"""Attention of a config or stack that leaves the kernel to torch."""

Need = tuple[str, str, str]
"""Key of a training config, its value, and what a card has to be able to do for it."""

TRITON = {
    "norm": ("in-place",),
    "rotary": ("in-place",),
    "activation": ("in-place",),
    "loss": ("fused-linear", "cut-cross-entropy"),
    "linear_attention": ("fla", "mamba"),
}
"""Kernels of libraries around transformers' models that are Triton's; so are all adapters' functions but ``composite``."""
ALWAYS: tuple[Need, ...] = (("torch", "2.13", "torch-wheels"),)
"""What every job needs."""


def on_card(setup: TrainingSetup, model: Model, gpu: Gpu) -> TrainingSetup:
    """Return a setup as it runs on a card: the kernels that torch takes there, and what is done in another way.

    Raises:
        CannotAnswerError: The card cannot do something that the setup says; the message has what to set instead.

    Source:
        configs/hardware/capabilities.yaml; aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (v2.13.0); ``_training_sdpa``
        in unsloth/utils/attention_dispatch.py (2026.10.9).
    """
    notes = tuple(_notes(setup, gpu))
    if setup.config.allocator == "expandable" and (why := without_expandable(setup.stack, gpu, setup.hardware)):
        setup = replace(setup, config=replace(setup.config, allocator="native"))
        notes = (*notes, f"allocator: native on {card_label(gpu)}: {why}")
    refuse_masked_windows(model.spec, setup, gpu)
    kernel, reason = _attention(setup, model, gpu)
    if (
        setup.stack.model_code == "unsloth"
        and kernel == "cudnn"
        and not (gpu.compute_capability or "").startswith("9.")
    ):
        raise CannotAnswerError(
            f"kernels.attention: what unsloth takes instead of cuDNN on {card_label(gpu)} is not modelled"
        )
    wide = _wide_kernel(setup, model, gpu)
    masked, tower = _masked_kernel(setup, model, gpu), _tower_kernel(setup, model, gpu)
    if reason:
        notes = (
            *notes,
            reason + f"; {masked} under the mask of padded rows" * bool(setup.config.padded_rows and masked),
        )
    profile = setup.profile if kernel == setup.profile.attention else replace(setup.profile, attention=kernel)
    if profile.loss == "tiled-linear" and gpu.cuda_total_bytes > LARGE_CARD_BYTES:
        profile = replace(profile, loss="pieced-linear")
    if not notes and profile is setup.profile and masked is None and tower is None and wide is None:
        return setup
    return replace(
        setup,
        profile=profile,
        masked_attention=masked,
        wide_attention=wide,
        tower_attention=tower,
        card_notes=notes,
    )


def emulated_dtype(setup: TrainingSetup, gpu: Gpu) -> bool:
    """Tell whether products of a setup run in a dtype that a card only emulates."""
    return any(not is_native(gpu, feature, setup.hardware) for _, _, feature in _dtype_needs(setup))


def refuse_unable(setup: TrainingSetup, gpu: Gpu) -> None:
    """Raise where a card cannot do something that a setup says.

    Raises:
        CannotAnswerError: With what to set instead.
    """
    for _ in _notes(setup, gpu):
        pass


def without_expandable(stack: Stack, gpu: Gpu, tables: HardwareTables) -> str:
    """Return why the expandable segments that a stack asks for are not had on a card; nothing where they are, or it asks for none."""
    if stack.allocator == "native":
        return ""
    if stack.allocator == "expandable-on-nvidia" and gpu.vendor != "nvidia":
        return f"{stack.name} asks for expandable ones on NVIDIA's alone"
    row = capability_of(gpu, "expandable-segments", tables)
    return row.text if row.answer == "absent" else ""


def card_label(gpu: Gpu) -> str:
    """Return a card with what decides what it can do."""
    if gpu.compute_capability:
        return f"{gpu.name} (compute capability {gpu.compute_capability})"
    return f"{gpu.name} ({gpu.architecture})"


# ------------------------------------------------------------------ what a card can do
def _notes(setup: TrainingSetup, gpu: Gpu) -> Iterator[str]:
    """Yield what a card does in another way, each thing once."""
    _refuse_unscalable(setup)
    seen: set[str] = set()
    needs = (*ALWAYS, *_dtype_needs(setup), *_entry_needs(setup), *_kernel_needs(setup))
    rows = {feature: capability_of(gpu, feature, setup.hardware) for feature in {feature for _, _, feature in needs}}
    for key, value, feature in needs:
        row = rows[feature]
        if row.answer == "absent":
            instead = f"; use {row.instead}" if row.instead else ""
            raise CannotAnswerError(f"{key}: {value} does not run on {card_label(gpu)}: {row.text}{instead}")
        if row.answer == "emulated" and feature not in seen:
            seen.add(feature)
            better = f"; better {row.instead}" if row.instead else ""
            yield f"{key} {value} on {card_label(gpu)}: {row.text}{better}"


def _refuse_unscalable(setup: TrainingSetup) -> None:
    """Raise where a step ends in an error, since torch's loss scale takes no gradients in fp16."""
    # Source: torch/amp/grad_scaler.py (v2.13.0), ``_unscale_grads_``: "Attempting to unscale FP16 gradients."; seen
    # with transformers 5.23's Trainer (tests/survey/stacks).
    if not (setup.config.loss_scaling and setup.autocast and setup.config.master_weights == "none"):
        return
    trained = {setup.adapter_dtype} if setup.config.adapter is not None else set(setup.format_names.values())
    if "fp16" in trained:
        raise CannotAnswerError(
            "loss_scaling: torch's GradScaler ends a step with trained weights in fp16 by 'Attempting to unscale FP16 "
            "gradients'; use weights: fp32, which autocast computes in fp16, or compute_dtype: bf16"
        )


def _dtype_needs(setup: TrainingSetup) -> Iterator[Need]:
    """Yield what products need."""
    dtype = setup.config.compute_dtype
    if dtype in setup.hardware.capabilities:
        yield "compute_dtype", dtype, dtype


def _entry_needs(setup: TrainingSetup) -> Iterator[Need]:
    """Yield what formats of weights, gradients and optimizer states need."""
    for role, entry in setup.formats.items():
        yield from (("weights", setup.format_names[role], feature) for feature in entry.needs)
    if setup.gradient is not None:
        name = setup.config.gradients.dtype or ""
        yield from (("gradients.dtype", name, feature) for feature in setup.gradient.needs)
    for role, optimizer in setup.optimizers.items():
        yield from (("optimizer", setup.optimizer_names[role], feature) for feature in optimizer.needs)


def _kernel_needs(setup: TrainingSetup) -> Iterator[Need]:
    """Yield what the allocator and kernels of libraries around transformers' models need; torch's own run everywhere."""
    if setup.config.allocator == "expandable" and setup.stack.allocator == "native":
        yield "allocator", "expandable", "expandable-segments"
    profile = setup.profile
    if setup.stack.model_code != "transformers":
        return
    for key, values in TRITON.items():
        if getattr(profile, key) in values:
            yield f"kernels.{key}", getattr(profile, key), "triton-kernels"
    if setup.config.adapter is not None and profile.adapters != "composite":
        yield "kernels.adapters", profile.adapters, "triton-kernels"
    if profile.loss in ("fused-head", "fused-divergence"):
        yield "kernels.loss", profile.loss, "trl-fused-head"


# ------------------------------------------------------------------ attention
LATER_KERNEL = (
    " with torch 2.13; from 2.14 on it takes grouped heads by a kernel that needs less: kernels.attention: efficient"
)


def _attention(setup: TrainingSetup, model: Model, gpu: Gpu) -> tuple[AttentionKernel, str]:
    """Return the kernel of attention on a card, and why it is another than the setup's own."""
    own = setup.profile.attention
    code = family_code(setup.stack, model.spec.architecture)
    if code.steps_alone:
        return _steps_alone(setup, model)
    if setup.runs_flash_attn and not code.takes_flash_attn:
        raise CannotAnswerError(
            f"kernels.attention: transformers does not run family {model.spec.architecture} with the package flash-attn "
            "(_supports_flash_attn); leave it out, for torch's own attention, or use eager"
        )
    if setup.runs_flash_attn and setup.config.compute_dtype == "fp32":
        raise CannotAnswerError(
            "kernels.attention: flash-attn takes fp16 and bf16 alone; use eager, or compute_dtype: bf16"
        )
    if setup.runs_flash_attn and any(
        isinstance(p, Attention) and p.sinks for p in (r.layer.attention for r in model.spec.runs)
    ):
        raise CannotAnswerError(
            "kernels.attention: transformers runs attention sinks by a kernel of its hub (kernels-community/vllm-flash-attn3), "
            "which is not modelled; use eager"
        )
    calls = _narrow_calls(setup, model)
    unknown = gpu.vendor == "nvidia" and gpu.compute_capability is None
    if setup.config.joined_rows and unknown and own != "eager":
        return "efficient", ""  # flash takes no mask
    if own == "auto" or own == "eager" or own == "flex" or not calls or unknown:
        return own, ""
    if setup.attention_choice != TORCH_CHOOSES and runs_on(own, gpu, setup.hardware):
        return own, ""
    order = setup.stack.attention_order if setup.attention_choice == TORCH_CHOOSES else ()
    kernel = _least_able(kernel_on(call, gpu, setup.hardware, order) for call in calls)
    if setup.attention_choice == TORCH_CHOOSES:
        later = kernel == "math" and all(widened_later(call, gpu, setup.hardware) for call in calls)
        why = f"attention {kernel}: what torch's scaled_dot_product_attention takes on {card_label(gpu)}"
        return kernel, why + LATER_KERNEL * later
    if setup.config.kernels.attention is not None:
        raise CannotAnswerError(
            f"kernels.attention: there is no {own} attention on {card_label(gpu)}; torch takes {kernel} there: "
            f"use kernels.attention: auto, or {kernel}"
        )
    return kernel, f"attention {kernel}, as torch chooses on {card_label(gpu)}, where there is no {own} kernel"


def _narrow_calls(setup: TrainingSetup, model: Model) -> list[AttentionCall]:
    """Return what attention asks of torch, that of wide heads only where there are no others."""
    calls = list(attention_calls(setup, model))
    return [call for call in calls if call.width <= FLASH_LARGEST_WIDTH] or calls


def _wide_kernel(setup: TrainingSetup, model: Model, gpu: Gpu) -> AttentionKernel | None:
    """Return the kernel of heads that flash does not take, where layers have both kinds and torch chooses."""
    calls = list(attention_calls(setup, model))
    wide = [call for call in calls if call.width > FLASH_LARGEST_WIDTH]
    unknown = gpu.vendor == "nvidia" and gpu.compute_capability is None
    if len(wide) in (0, len(calls)) or unknown or setup.attention_choice != TORCH_CHOOSES:
        return None
    return _least_able(kernel_on(call, gpu, setup.hardware, setup.stack.attention_order) for call in wide)


def _steps_alone(setup: TrainingSetup, model: Model) -> tuple[AttentionKernel, str]:
    """Return attention step by step of a family whose code has no other."""
    where = f"{setup.stack.model_code}'s code of family {model.spec.architecture}"
    if setup.attention_choice not in (TORCH_CHOOSES, "eager") or setup.runs_flash_attn:
        raise CannotAnswerError(
            f"kernels.attention: {where} is modelled with attention step by step alone, which loading takes where nothing "
            "is asked for; use eager"
        )
    return "eager", f"attention eager: {where} has no other for torch to choose"


def _masked_kernel(setup: TrainingSetup, model: Model, gpu: Gpu) -> AttentionKernel | None:
    """Return the kernel of attention within a window, or of rows with padding, which takes a mask; None where there is none to see to."""
    unknown = gpu.vendor == "nvidia" and gpu.compute_capability is None
    code, padded = family_code(setup.stack, model.spec.architecture), bool(setup.config.padded_rows)
    masks = (code.added_mask or code.masks_layers) and (model.spec.window or padded)
    if not masks or setup.attention_choice != TORCH_CHOOSES or unknown:
        return "efficient" if masks and padded and unknown else None  # flash takes no mask
    calls = [replace(call, masked=True, grouped=False) for call in _narrow_calls(setup, model)]
    kernels = [kernel_on(call, gpu, setup.hardware) for call in calls]
    if code.masks_jointly and len(set(kernels)) > 1:
        raise CannotAnswerError(
            f"model: heads of {model.spec.name} have widths for which torch takes different kernels under a mask on {card_label(gpu)}, which "
            "is not modelled; use kernels.attention: eager"
        )
    return _least_able(kernels) if kernels else None


def _tower_kernel(setup: TrainingSetup, model: Model, gpu: Gpu) -> AttentionKernel | None:
    """Return the kernel of attention of images' patches, whose heads have a width of their own; None for rows of text."""
    tower = model.spec.tower
    unknown = gpu.vendor == "nvidia" and gpu.compute_capability is None
    if not has_images(model.spec, setup) or tower is None or tower.shape is None or unknown:
        return None
    if setup.attention_choice != TORCH_CHOOSES:
        return None
    width = tower.shape.hidden_size // tower.shape.heads
    kernel = kernel_on(AttentionCall(_attended_dtype(setup), width, width), gpu, setup.hardware)
    if kernel == "math":
        narrow = kernel_on(AttentionCall("fp16", width, width), gpu, setup.hardware)
        instead = "compute_dtype: fp16, or " if narrow != "math" else ""
        raise CannotAnswerError(
            f"{setup.name}: kernels.attention: torch has no kernel for patches in {setup.config.compute_dtype} on {card_label(gpu)}, "
            f"and attention of images step by step is not modelled; use {instead}rows of text (images.per_row: 0)"
        )
    return kernel


def _attended_dtype(setup: TrainingSetup) -> str:
    """Return the dtype of query, key and value."""
    wide = setup.wide_floats and setup.stack.projections.codes_result == "input"
    return "fp32" if wide else setup.config.compute_dtype


ABILITY: tuple[ChosenKernel, ...] = ("math", "efficient", "flash", "cudnn")
"""Kernels, the one that takes the most first: where layers differ, the plan is that of the first."""


def _least_able(kernels: Iterable[ChosenKernel]) -> ChosenKernel:
    return min(kernels, key=ABILITY.index)


def attention_calls(setup: TrainingSetup, model: Model) -> Iterator[AttentionCall]:
    """Yield what each kind of attention of a model asks of scaled-dot-product attention; soft caps and sinks ask nothing."""
    _, dropout = dropouts(model.spec, setup)
    dtype = _attended_dtype(setup)
    for part in dict.fromkeys(run.layer.attention for run in model.spec.runs):
        widths = _widths(part)
        if widths is not None:
            grouped = (
                setup.stack.name != "bundled"
                and isinstance(part, Attention)
                and part.num_heads > part.num_key_value_heads
            )
            code = family_code(setup.stack, model.spec.architecture)
            asks = code.asks_for_groups and not is_wide(part)
            one = isinstance(part, Attention) and part.num_key_value_heads == 1
            yield AttentionCall(
                dtype,
                *widths,
                grouped=grouped and asks and not setup.config.joined_rows,
                unequal=grouped and one and not (asks or code.repeats_keys or is_wide(part)),
                dropout=dropout,
                masked=code.masks_always or setup.config.joined_rows,
            )


def _widths(part: object) -> tuple[int, int] | None:
    if isinstance(part, LatentAttention):
        return part.qk_head_dim, part.v_head_dim
    if isinstance(part, Attention) and not (part.sinks or part.logit_softcap):
        return part.head_dim, part.head_dim
    return None
