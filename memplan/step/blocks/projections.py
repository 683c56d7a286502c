"""Projections on a tape: of floats and of codes, with adapters and without."""

from __future__ import annotations

from typing import NamedTuple

from memplan.step.blocks.builder import ONE, Builder, promoted
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, VIEW, Reduction, Traits, Value
from memplan.step.tapes.taped_weight import Weight


def linear(builder: Builder, x: Value, name: str, rows: int) -> Value:
    """Return the projection of ``x`` by the weight called ``name``, ``rows`` features wide."""
    with builder.tape.alive(x):
        out = plain_linear(builder, x, name, rows)
        down = builder.weights.get(f"{name}.lora_A.weight")
        return out if down is None else _adapted(builder, x, out, name, rows, down)


def plain_linear(builder: Builder, x: Value, name: str, rows: int) -> Value:
    """Return a projection without adapters: saves its input where its weight is trained."""
    weight = builder.weight(f"{name}.weight")
    bias = builder.weights.get(f"{name}.bias")
    with builder.tape.alive(x):
        if weight.integers:
            return _integer_linear(builder, x, name, weight, rows)
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
    saves = [x] if weight.trainable else []
    if copy is not None and x.needs_gradient:
        saves.append(copy)
    width = weight.element_bytes if not builder.settings.autocast else builder.compute
    out = builder.tape.value(x.quantity, rows, width)
    out.foreign = weight.foreign and not builder.settings.autocast
    used = [weight, *([bias] if bias is not None else [])]
    reads = [(x, VIEW)]
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
            reduces=bias_sum(x, bias),
        ),
    )
    builder.tape.touch(*([copy] if copy is not None else []))
    return out


def _coded_linear(builder: Builder, x: Value, name: str, weight: Weight, bias: Weight | None, rows: int) -> Value:
    """Return the product with decoded codes, and the sum with a bias, which is a tensor of its own."""
    out = builder.tape.value(x.quantity, rows, builder.compute)
    saves = [x] if weight.trainable else []
    builder.tape.apply(f"linear {name}", [(x, VIEW)], out, saves, [weight], traits=Traits(custom=True, product=True))
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
    """Return the product of a copy in the compute dtype with frozen codes, cast back; a bias is added inside the product.

    Source:
        ``Linear4bit.forward`` in bitsandbytes/nn/modules.py, ``MatMul4Bit`` in autograd/_functions.py (0.50.2).
    """
    low = builder.cast(x, builder.compute)
    out = builder.tape.value(x.quantity, rows, builder.compute)
    with builder.tape.alive(low):
        builder.tape.apply(
            f"linear {name}", [(low, VIEW)], out, weights=[weight], traits=Traits(custom=True, product=True)
        )
        return builder.cast(out, x.element_bytes, foreign=x.foreign)


def _integer_linear(builder: Builder, x: Value, name: str, weight: Weight, rows: int) -> Value:
    """Return the product of codes of ``x``, row by row, with frozen codes, in the dtype of ``x``; no column has outliers.

    Its node keeps ``x`` as an attribute, and its backward decodes the weight in that dtype.

    Source:
        ``MatMul8bitLt`` in bitsandbytes/autograd/_functions.py; backends/cuda/ops.py, ``int8_vectorwise_quant``,
        ``int8_mm_dequant``; backends/default/ops.py, ``int8_mixed_scaled_mm`` (0.50.2).
    """
    tape, width = builder.tape, x.element_bytes
    half = width == 2 and builder.settings.computes_fp16
    coding = (0 if half else 2 * x.width) + 2 * x.width  # in fp16, and its absolute values
    coded = tape.value(x.quantity, x.width + 4, 1, part=Part.TEMPORARIES)
    tape.make(f"code input of {name}", coded, x, scratch=[(x.quantity, coding + x.width)])
    out = tape.value(x.quantity, rows, width)
    out.foreign = x.foreign
    products = (4 + (0 if half else 2)) * rows
    decoded = (ONE, weight.rows * weight.columns * width)
    traits = Traits(
        packs=False,
        scratch=[(x.quantity, products)],
        workspace=[decoded],
        custom=True,
        product=True,
        escapes=True,
    )
    tape.apply(f"linear {name}", [(x, NEW)], out, [x] if x.needs_gradient else [], traits=traits)
    tape.touch(coded)
    return out


def bias_sum(x: Value, bias: Weight | None) -> Reduction | None:
    """Return the sum over rows that forms a bias's gradient."""
    return Reduction(x.quantity, 1, bias.rows) if bias is not None and bias.trainable else None


def _adapted(builder: Builder, x: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
    """Return a projection with what its adapter adds."""
    rules, coded = builder.settings.projections, builder.weight(f"{name}.weight").coded
    if coded and rules.codes_cloned and not builder.weight(f"{name}.weight").integers:
        with builder.tape.alive(out):
            out = builder.tape.apply("clone", [(out, SAME)], builder.fresh(out), traits=SAVES_NOTHING)
    wide = rules.adapter_sum == "wide"
    uncast = coded and wide and builder.settings.autocast
    own = x if uncast else builder.cast(x, down.element_bytes, foreign=down.foreign)
    with builder.tape.alive(own, out):
        if f"{name}.lora_magnitude_vector.weight" in builder.weights:
            return _with_magnitude(builder, own, out, name, rows, down)
        low = builder.pointwise(
            "scale", _low_rank(builder, builder.dropped(own, builder.settings.adapter_dropout), name, rows, down)
        )
        if wide and not coded:
            return builder.cast(builder.add(out, low), out.element_bytes, foreign=out.foreign)
        return builder.add(out, low if uncast else builder.cast(low, out.element_bytes, foreign=out.foreign))


def _low_rank(builder: Builder, x: Value, name: str, rows: int, down: Weight) -> Value:
    return plain_linear(builder, plain_linear(builder, x, f"{name}.lora_A", down.rows), f"{name}.lora_B", rows)


def _with_magnitude(builder: Builder, own: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
    """Return DoRA's projection: the norm of the adapted weight is a constant of each step."""
    tape = builder.tape
    magnitude = builder.weights[f"{name}.lora_magnitude_vector.weight"]
    formed = _magnitude_norm(builder, own, name, rows, down)
    norm = formed.norm
    scale = tape.value(ONE, rows, max(down.element_bytes, norm.element_bytes))
    scale.foreign = norm.foreign
    tape.apply("magnitude / norm", [], scale, [norm], [magnitude])
    if builder.settings.adapter_dropout:
        return _with_magnitude_and_dropout(builder, own, out, name, scale, formed)
    with tape.alive(scale):
        base = _without_bias(builder, out, name)
        first = _scaled_rows(builder, builder.pointwise("scale - 1", scale), base)
    with tape.alive(scale, first, base):
        low = _low_rank(builder, own, name, rows, down)
        with tape.alive(*((low,) if builder.settings.projections.adapter_sum == "wide" else ())):
            whole = builder.add(first, builder.pointwise("scale", _scaled_rows(builder, scale, low)))
    _function_ends(builder, formed)
    with tape.alive(base):
        return _joined(builder, out, whole, name)


def _joined(builder: Builder, out: Value, whole: Value, name: str) -> Value:
    """Return a projection and what DoRA adds to it, in the projection's dtype but for codes under autocast."""
    if builder.settings.projections.adapter_sum == "narrow":
        return builder.add(out, builder.cast(whole, out.element_bytes, foreign=out.foreign))
    total = builder.add(out, whole)
    if builder.weight(f"{name}.weight").coded and builder.settings.autocast:
        return total
    return builder.cast(total, out.element_bytes, foreign=out.foreign)


class _AdaptedWeight(NamedTuple):
    """What is formed of an adapted weight.

    Attributes:
        down: The adapter's first matrix.
        norm: The norm of each row.
        product: The product of the adapter's matrices.
        base: A copy of the base weight; None where it is read as it is.
        saved: What the graph of ``product`` holds, for a backward that never comes.
    """

    down: Weight
    norm: Value
    product: Value
    base: Value | None
    saved: tuple[Value, ...]


def _function_ends(builder: Builder, formed: _AdaptedWeight) -> None:
    """Note that the function returns that has names for the product, its graph with it, and for the weight's copy."""
    if builder.settings.projections.adapter_sum == "wide":
        tape = builder.tape
        tape.touch(formed.product, *([] if formed.base is None else [formed.base]))
        tape.graph_use |= {value.storage: len(tape.operations) - 1 for value in formed.saved}


def _with_magnitude_and_dropout(
    builder: Builder, own: Value, out: Value, name: str, scale: Value, formed: _AdaptedWeight
) -> Value:
    """Return DoRA's projection of a dropped input, which is multiplied by the whole weight once more.

    Source:
        ``DoraLinearVariant.forward`` in peft/tuners/lora/variants.py, ``DoraLinearLayer.forward`` in dora.py (0.21.2).
    """
    tape, down, rows = builder.tape, formed.down, formed.norm.width
    x = builder.dropped(own, builder.settings.adapter_dropout)
    frozen = builder.constant(rows * down.columns, down.element_bytes) if formed.base is None else formed.base
    with tape.alive(x, scale):
        low = _low_rank(builder, x, name, rows, down)
        with tape.alive(low):
            base = _by_whole_weight(builder, x, rows, frozen, kept=formed.base is not None)
        first = _scaled_rows(builder, builder.pointwise("scale - 1", scale), base)
        with tape.alive(first, base, low):
            whole = builder.add(first, builder.pointwise("scale", _scaled_rows(builder, scale, low)))
        _function_ends(builder, formed)
        return _joined(builder, out, whole, name)


def _by_whole_weight(builder: Builder, x: Value, rows: int, frozen: Value, *, kept: bool) -> Value:
    """Return the product with a frozen weight that is no parameter, and that is saved where it is a copy."""
    tape, low = builder.tape, builder.lowered(x)
    width = low.element_bytes
    if builder.settings.autocast and frozen.element_bytes != width:
        frozen = tape.make("cast weight", builder.constant(frozen.width, width), frozen)
        kept = True
    out = tape.value(x.quantity, rows, width)
    return tape.apply("linear", [(low, VIEW)], out, [frozen] if kept else [], traits=Traits(packs=True, product=True))


def _scaled_rows(builder: Builder, scale: Value, x: Value) -> Value:
    """Return ``scale * x``, a number for each feature, in the wider dtype."""
    wide = promoted(scale, x)
    saves = [x, *([scale] if x.needs_gradient else [])]
    # Both products of backward are wide; that of ``x`` is cast when the other has been summed.
    cast = wide != x.element_bytes
    workspace = [(x.quantity, 2 * x.width * wide - x.coefficient if cast else x.coefficient)]
    out = builder.fresh(x, element_bytes=wide)
    out.foreign = x.foreign and wide == 2
    ways = [(scale, NEW), (x, NEW)]
    reduces = Reduction(x.quantity, 1, x.width)
    return builder.tape.apply("mul", ways, out, saves, traits=Traits(workspace=workspace, reduces=reduces))


def _magnitude_norm(builder: Builder, x: Value, name: str, rows: int, down: Weight) -> _AdaptedWeight:
    """Return the norm of each row of the adapted weight, which is formed whole for it in the dtype of ``x`` (PEFT, ``DoraLinearLayer``)."""
    tape, columns, own = builder.tape, down.columns, down.element_bytes
    width = builder.compute if builder.settings.autocast else own
    eye = tape.make("eye", builder.constant(columns * columns, own))
    same = width == own and not (builder.settings.autocast and down.foreign)
    read = eye if same else tape.make("cast", builder.constant(columns * columns, width), eye)
    for part in ("lora_A", "lora_B"):
        builder.cast_weight(builder.weight(f"{name}.{part}.weight"))
    low = tape.make("linear", builder.constant(columns * down.rows, width), read, product=True)
    product = tape.make("linear", builder.constant(columns * rows, width), low, product=True)
    if builder.settings.projections.adapter_sum == "wide":
        tape.touch(eye)  # a name of PEFT's function that multiplies
    if read is not eye:  # saved for a backward that never comes, until the product is cut off from it
        tape.graph_use[read.storage] = len(tape.operations) - 1
    product.foreign = down.foreign and not builder.settings.autocast
    if product.element_bytes != x.element_bytes and builder.settings.projections.adapter_sum == "wide":
        product = tape.make("cast", builder.constant(columns * rows, x.element_bytes), product)
    norm, base = _norm_of_sum(builder, product, builder.weight(f"{name}.weight"), rows * columns, rows, x)
    wide = builder.settings.projections.adapter_sum == "wide"
    tape.touch(product, *(() if wide else (eye,)))  # PEFT's function that makes it has returned
    return _AdaptedWeight(down, norm, product, base, (read, low))


def _norm_of_sum(
    builder: Builder, product: Value, base: Weight, size: int, rows: int, x: Value
) -> tuple[Value, Value | None]:
    """Return the norm of each row of a base weight and of ``product`` together, ``size`` elements each, and the weight's copy."""
    tape, own = builder.tape, x.element_bytes
    frozen: list[Value] = []
    if base.coded:
        scratch = [(ONE, base.decoding_bytes)]
        frozen = [tape.make("decode", builder.constant(size, builder.compute), scratch=scratch)]
    read = list(frozen)
    if base.element_bytes != own or base.foreign != x.foreign:
        read = [tape.make("cast", builder.constant(size, own), *frozen)]
    scaled = tape.make("scale", builder.constant(size, product.element_bytes), product)
    term = Value(-1, ONE, 0, own, foreign=x.foreign)
    whole = tape.make("add", builder.constant(size, promoted(term, product)), scaled, *read)
    whole.foreign = product.foreign and x.foreign
    norm = tape.make("norm", builder.fresh(whole, rows), whole)
    # PEFT's function has one name for the base weight, that of its cast in the end.
    tape.touch(*(read if builder.settings.projections.adapter_sum == "wide" else frozen), whole)
    return norm, read[-1] if read else None


def _without_bias(builder: Builder, out: Value, name: str) -> Value:
    """Return a projection less its bias, which DoRA does not scale; autocast leaves the bias in its own dtype."""
    bias = builder.weights.get(f"{name}.bias")
    if bias is None:
        return out
    term = Value(-1, ONE, 0, bias.element_bytes, foreign=bias.foreign)
    rest = builder.fresh(out, element_bytes=promoted(out, term))
    way = SAME if rest.element_bytes == out.element_bytes else NEW
    return builder.tape.apply("less bias", [(out, way)], rest, traits=SAVES_NOTHING)
