"""Adapters of parameters that are no linear layers: their product is added to the weight, in a tensor as large as it."""

from __future__ import annotations

from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import Traits, Value
from memplan.step.tapes.taped_weight import Weight


def folded_weight(builder: Builder, name: str, weight: Weight) -> tuple[Value, list[Value]]:
    """Record the sum of a weight and its adapter's product, in the weight's dtype; return it, and the factors where they are cast.

    Backward saves these, and the module has names for all until it returns.

    Source:
        ``ParamWrapper`` and ``_LoraFactorsProxy`` in peft/tuners/lora/layer.py (0.21.2), lines 2305 to 2601.
    """
    tape, factors = builder.tape, [builder.weight(f"{name}.{part}.weight") for part in ("lora_A", "lora_B")]
    copies: list[Value] = []
    for factor in factors:
        if factor.element_bytes != weight.element_bytes:
            with tape.alive(*copies):
                size = factor.rows * factor.columns * weight.element_bytes
                copies.append(tape.make("cast adapter", builder.constant(size, 1)))
    folded = tape.value(ONE, weight.own_bytes, 1, part=Part.ACTIVATIONS)
    return tape.apply(f"fold {name}", [], folded, copies, factors, Traits(custom=True)), copies
