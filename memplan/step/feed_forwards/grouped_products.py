"""Products of rows with the matrices of their experts on a tape, all in one call."""

from dataclasses import replace

from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.blocks.fused_adapters import folded_weight
from memplan.step.tapes.taped_operations import NEW, SAME, Traits, Value, Weight
from memplan.units import round_up

GROUPED_ROW_BYTES = 16
"""Rows of a grouped product's result begin at multiples of this."""


def grouped(
    builder: Builder,
    rows: Value,
    name: str,
    width: int,
    experts: Value,
    offsets: Value,
    resident: dict[str, list[Value]],
    *,
    direct: bool,
) -> Value:
    """Return each row times the matrix of its expert, stored (in, out) where ``direct``; what adapters fold into it is added to its factors.

    Autocast has no rule for grouped products; transformers casts rows to the dtype of the weights, which stay as they are.
    """
    # Source: ``_grouped_mm`` in transformers/integrations/moe.py (5.23.0), lines 373 to 379;
    # aten/src/ATen/autocast_mode.h (v2.13.0).
    tape, weight = builder.tape, builder.weight(name)
    uncast = builder.settings.code.grouped_uncast and not weight.coded
    weight = replace(weight, direct=True) if direct else weight
    weight = formed_in_rows(weight) if weight.trainable and not weight.coded else weight
    rows = builder.cast(rows, weight.element_bytes, foreign=weight.foreign) if uncast else rows
    copy = None if uncast else builder.cast_weight(weight)
    # A product with codes has offsets as an attribute (``_CodedProduct`` in memplan/trace/reference/weight_storage.py).
    saves = [*([] if weight.coded else [offsets]), *([rows] if weight.trainable else [])]
    if copy is not None and rows.needs_gradient:
        saves.append(copy)
    used = experts.width
    out = aligned(builder, tape.value(TOKENS, width, weight.element_bytes if uncast else builder.compute), used)
    rows.gradient_coefficient = used * row_bytes(rows, used)
    reads = [(rows, NEW)]
    if f"{name}.lora_A.weight" in builder.weights:
        with tape.alive(rows, experts, offsets):
            folded = folded_weight(builder, name, weight, resident[name])
        resident[name].append(folded)
        reads, saves = [(folded, NEW), *reads], [offsets, folded, rows]
    traits = Traits(custom=weight.coded, product=True, attributes=(offsets,) if weight.coded else ())
    tape.apply(f"grouped {name}", reads, out, saves, [weight], traits=traits)
    tape.touch(*([copy] if copy is not None else []))
    bias = builder.weights.get(f"{name}_bias")
    return out if bias is None else _with_bias(builder, out, bias, experts, uncast=uncast)


def _with_bias(builder: Builder, out: Value, bias: Weight, experts: Value, *, uncast: bool) -> Value:
    """Return a product with the bias of each row's expert, whose rows are gathered before they are added."""
    tape = builder.tape
    with tape.alive(out):
        if builder.settings.autocast and not uncast:
            builder.cast_weight(bias)
        in_place = not builder.settings.selective
        biased = tape.view(out) if in_place else builder.fresh(out)
        gathered = [] if builder.settings.code.gathers_ahead else [(out.quantity, out.coefficient)]
        saves = [experts] if bias.trainable else []
        traits = Traits(scratch=gathered, makes_last=bool(gathered))
        return tape.apply("add bias", [(out, SAME)], biased, saves, [bias], traits=traits)


def aligned(builder: Builder, rows: Value, used: int) -> Value:
    """Return the result of a grouped product, whose rows begin at multiples of 16 bytes.

    Source:
        ``create_grouped_gemm_output_tensor`` in aten/src/ATen/native/GroupedMMUtils.h (v2.13.0).
    """
    part, quantity, _ = builder.tape.storages[rows.storage]
    builder.tape.storages[rows.storage] = (part, quantity, used * row_bytes(rows, used))
    return rows


def formed_in_rows(weight: Weight) -> Weight:
    """Return a weight whose gradient is formed in rows that begin at multiples of 16 bytes, and copied where these are no whole rows.

    Source:
        ``create_grouped_gemm_output_tensor`` in aten/src/ATen/native/GroupedMMUtils.h; ``AccumulateGrad::accumulateGrad``
        in torch/csrc/autograd/functions/accumulate_grad.h, which keeps no gradient of other strides than its parameter's (v2.13.0).
    """
    elements = weight.own_bytes // weight.element_bytes
    if not (apart := -weight.columns * weight.formed_bytes // elements % GROUPED_ROW_BYTES):
        return weight
    formed = weight.formed_bytes + (elements // weight.columns - 1) * apart
    return replace(weight, formed_bytes=formed, spaced=True)


def row_bytes(rows: Value, used: int) -> int:
    """Return the bytes of one of ``used`` rows for each token as a grouped product lays it out."""
    return round_up(rows.coefficient // used, GROUPED_ROW_BYTES)
