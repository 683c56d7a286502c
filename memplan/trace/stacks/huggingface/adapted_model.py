"""PEFT's adapters on a model of transformers, put on as each stack puts them."""

from __future__ import annotations

from typing import Any

import peft

from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.huggingface.built_model import made_on
from memplan.trace.stacks.stack_inputs import StackInputs
from memplan.training.adapters import projections

ALPHA_PER_RANK = 2
TOWER = r".*\b(visual|vision_tower|multi_modal_projector)\b.*"
"""Modules of a vision tower and its projector."""


def lora_config(inputs: StackInputs, chosen: list[str] | str | None = None) -> Any:
    """Return PEFT's config of the adapters that a setup asks for, on the modules that a library has chosen by a rule of its own."""
    adapter, details = inputs.setup.config.adapter, inputs.details
    assert adapter is not None
    targets: Any = list(adapter.targets)
    if chosen is not None:
        targets = chosen
    elif (
        len(targets) > 1 and "all-linear" in targets
    ):  # PEFT takes these words alone; trainers list what they stand for
        targets = sorted({*targets, *projections(inputs.model)} - {"all-linear"})
    elif "all-linear" in targets:
        targets = "all-linear"
    tower = {"exclude_modules": TOWER} if chosen is None and not adapter.vision else {}
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=ALPHA_PER_RANK * adapter.rank,
        lora_dropout=details.adapter_dropout,
        target_modules=targets,
        use_dora=adapter.kind == "dora",
        modules_to_save=list(details.modules_to_save) or None,
        fan_in_fan_out=inputs.model.spec.transposed_linear,
        bias="none",
        task_type="SEQ_CLS" if inputs.setup.scores else "CAUSAL_LM",
        **tower,
    )


def adapted(model: Any, inputs: StackInputs) -> Any:
    """Return the model as PEFT's documentation prepares it: for training of few bits, then with adapters."""
    setup = inputs.setup
    checkpoints = setup.checkpointing != "none"
    kwargs = {"use_reentrant": inputs.details.reentrant}
    if setup.kbit_floats:
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=checkpoints, gradient_checkpointing_kwargs=kwargs
        )
    elif checkpoints:
        model.gradient_checkpointing_enable(kwargs)
        model.enable_input_require_grads()
    return with_adapters(model, inputs)


def with_adapters(model: Any, inputs: StackInputs, chosen: list[str] | str | None = None) -> Any:
    """Return the model with adapters, in the dtype that the setup says, on the modules that a library has chosen, or its targets name.

    PEFT gives adapters the dtype of the weights beside them and casts 16 bits to fp32, or not
    (``autocast_adapter_dtype``); both are left out on ``meta`` (tuners_utils.py, ``_move_adapter_to_device_of_base_layer``).
    """
    with made_on(inputs.device):
        model = peft.get_peft_model(model, lora_config(inputs, chosen))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.data = parameter.data.to(TORCH_DTYPES[inputs.setup.adapter_dtype])
    return model
