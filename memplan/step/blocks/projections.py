"""Projections on a tape: of floats and of codes."""

from collections.abc import Sequence
from dataclasses import replace

from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, SAME, VIEW, Reduction, Traits, Value, Weight


def plain_linear(builder: Builder, x: Value, name: str, rows: int) -> Value:
    """Return a projection without adapters: saves its input where its weight is trained."""
    weight = builder.weight(f"{name}.weight")
    bias = builder.weights.get(f"{name}.bias")
    with builder.tape.alive(x):
        if weight.integers:
            return _integer_linear(builder, x, name, weight, rows)
        if weight.parametrised:
            return _checkpointed_linear(builder, x, name, weight, rows)
        if weight.coded and builder.settings.projections.codes_result == "input":
            return _recast_linear(builder, x, name, weight, rows)
        x = builder.lowered(x)
        with builder.tape.alive(x):
            if weight.coded:
                return _coded_linear(builder, x, name, weight, bias, rows)
            return _float_linear(builder, x, name, weight, bias, rows)


def _float_linear(builder: Builder, x: Value, name: str, weight: Weight, bias: Weight | None, rows: int) -> Value:
    scratch = 0 if bias is None else builder.cast_bias(bias, rows)
    copy = builder.cast_weight(weight)
    factor = name.endswith((".lora_A", ".lora_B"))
    keeps = builder.settings.keeps_inputs and (factor or not builder.settings.code.own_products)
    saves = [copy] if copy is not None and x.needs_gradient else []
    saves += [x] if weight.trainable or (keeps and x.needs_gradient) else []
    width = weight.element_bytes if not builder.settings.autocast else builder.compute
    out = builder.tape.value(x.quantity, rows, width)
    out.foreign, out.flat = weight.foreign and not builder.settings.autocast, x.flat
    weight = replace(weight, cast_as_view=True) if builder.is_view(weight) else weight
    used = [weight, *([bias] if bias is not None else [])]
    reads = [(x, NEW if keeps or x.flat else VIEW)]
    builder.tape.apply(
        f"linear {name}",
        reads,
        out,
        saves,
        used,
        traits=Traits(
            scratch=[(ONE, scratch)] if scratch else [],
            packs=x.needs_gradient or weight.trainable,
            product=True,
            matrices=bias is None,
            stores_weights_first=bias is not None and copy is None and not keeps,
            custom=keeps,
            reduces=bias_sum(x, bias),
        ),
    )
    builder.tape.touch(*([copy] if copy is not None else []))
    return out


def _checkpointed_linear(builder: Builder, x: Value, name: str, weight: Weight, rows: int) -> Value:
    """Return a projection under a checkpoint of its own, which has its input and decodes its weight once more for backward."""
    # Source: ``checkpoint_nf4_linear`` in axolotl/utils/nf4.py (0.21.0).
    out = builder.tape.value(x.quantity, rows, builder.compute)
    bias = f"{name}.bias" in builder.weights
    traits = Traits(packs=x.needs_gradient, product=True, matrices=not bias, adds_bias=bias)
    return builder.tape.apply(f"linear {name}", [(x, VIEW)], out, [x] if x.needs_gradient else [], [weight], traits)


def _coded_linear(builder: Builder, x: Value, name: str, weight: Weight, bias: Weight | None, rows: int) -> Value:
    """Return the product with decoded codes, and the sum with a bias, which is a tensor of its own."""
    out = builder.tape.value(x.quantity, rows, builder.compute)
    saves = [x] if weight.trainable else []
    packs = True if builder.settings.projections.codes_saved else None
    traits = Traits(packs=packs, custom=True, product=True, attributes=() if saves else _node_inputs(builder, x))
    builder.tape.apply(f"linear {name}", [(x, NEW)], out, saves, [weight], traits=traits)
    if bias is None:
        return out
    scratch = [] if bias.element_bytes == builder.compute else [(ONE, rows * builder.compute)]
    return builder.tape.apply(
        "add bias",
        [(out, SAME)],
        builder.fresh(out),
        weights=[bias],
        traits=Traits(scratch=scratch, packs=False, reduces=bias_sum(x, bias)),
    )


def _recast_linear(builder: Builder, x: Value, name: str, weight: Weight, rows: int) -> Value:
    """Return the product of a copy in the compute dtype with frozen codes, cast back; a bias is added inside the product."""
    # Source: ``Linear4bit.forward`` in bitsandbytes/nn/modules.py, ``MatMul4Bit`` in autograd/_functions.py (0.50.2).
    low = builder.cast(x, builder.compute)
    out = builder.tape.value(x.quantity, rows, builder.compute)
    traits = Traits(
        custom=True, product=True, adds_bias=f"{name}.bias" in builder.weights, attributes=_node_inputs(builder, x)
    )
    with builder.tape.alive(low):
        builder.tape.apply(f"linear {name}", [(low, NEW)], out, weights=[weight], traits=traits)
        return builder.cast(out, x.element_bytes, foreign=x.foreign)


def _node_inputs(builder: Builder, x: Value) -> tuple[Value, ...]:
    """Return what the node of a product with frozen codes has as an attribute."""
    # Source: ``ctx.tensors`` of ``MatMul4Bit`` in bitsandbytes/autograd/_functions.py: input and codes up to 0.43.1, and
    # codes alone from 0.43.2 on.
    return (x,) if builder.settings.projections.codes_keep_input and x.needs_gradient else ()


def _integer_linear(builder: Builder, x: Value, name: str, weight: Weight, rows: int) -> Value:
    """Return the product of codes of ``x``, row by row, with frozen codes, in the dtype of ``x``; no column has outliers.

    Its node keeps ``x`` as an attribute, and its backward decodes the weight in that dtype. A bias takes the dtype of ``x`` for good.
    """
    # Source: ``MatMul8bitLt`` in bitsandbytes/autograd/_functions.py; backends/cuda/ops.py, ``int8_vectorwise_quant``,
    # ``int8_mm_dequant``; backends/default/ops.py, ``int8_mixed_scaled_mm`` (0.50.2).
    tape, width = builder.tape, x.element_bytes
    bias = builder.weights.get(f"{name}.bias")
    if bias is not None:
        tape.cast_biases[bias.name] = width
    half = width == 2 and builder.settings.computes_fp16
    coded = _coded_rows(builder, x if half else tape.make("cast", _scratch(builder, x, 2 * x.width), x))
    sums = tape.make("multiply codes", _scratch(builder, x, 4 * rows), *coded)
    formed = [sums] if half else [sums, tape.make("decode product", _scratch(builder, x, 2 * rows), sums)]
    out = tape.value(x.quantity, rows, width)
    out.foreign = x.foreign
    workspace = [(ONE, weight.rows * weight.columns * width)]
    resident = (x,) if x.needs_gradient else ()
    traits = Traits(
        packs=False,
        workspace=workspace,
        product=True,
        custom=True,
        forms_last=True,
        own_workspace=True,
        attributes=resident,
    )
    tape.apply(f"linear {name}", [(x, NEW)], out, traits=traits)
    tape.touch(*formed, *coded)
    return out


def _coded_rows(builder: Builder, x: Value) -> tuple[Value, Value]:
    """Return the scales and codes of the rows of ``x``, in which outliers have been looked for."""
    tape = builder.tape
    scales = tape.make("scales of rows", _scratch(builder, x, 4), x)
    codes = tape.make("code rows", _scratch(builder, x, x.coefficient // 2), x)
    sizes = tape.make("absolute values", _scratch(builder, x, x.coefficient), x)
    tape.make("outliers", _scratch(builder, x, x.coefficient // 2), sizes)
    tape.touch(x)
    return scales, codes


def _scratch(builder: Builder, like: Value, row_bytes: int) -> Value:
    """Return a temporary of so many bytes for each row of ``like``."""
    return builder.tape.value(like.quantity, row_bytes, 1, part=Part.TEMPORARIES)


def bias_sum(x: Value, bias: Weight | None) -> Reduction | None:
    """Return the sum over rows that forms a bias's gradient."""
    return Reduction(x.quantity, 1, bias.rows) if bias is not None and bias.trainable else None


def clipped(builder: Builder, *projected: Value) -> Sequence[Value]:
    """Return what projections yield, clipped in place, of which backward needs a copy as it was before."""
    # Source: ``OlmoAttention.forward`` in transformers/models/olmo/modeling_olmo.py (5.23.0); ``clamp`` in
    # derivatives.yaml (v2.13.0).
    with builder.tape.alive(*projected):
        clipped = []
        for x in projected:
            out = builder.tape.view(x)
            out.apart = True
            masks = [(x.quantity, x.width)] * 2  # ``where(self >= min and self <= max)``
            flags = Traits(workspace=masks, forms_last=True)
            clipped.append(builder.tape.apply("clamp in place", [(x, NEW)], out, [builder.fresh(x)], traits=flags))
        return clipped
