"""Projections with adapters on a tape: LoRA's sum of products, and DoRA's scaled rows."""

from __future__ import annotations

from typing import NamedTuple

from memplan.step.blocks.builder import ONE, Builder, promoted
from memplan.step.blocks.projections import plain_linear
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, VIEW, Reduction, Traits, Value, Weight

INDEX_BYTES = 8
"""Of a row that has an adapter, where others have none: its number."""


def linear(builder: Builder, x: Value, name: str, rows: int) -> Value:
    """Return the projection of ``x`` by the weight called ``name``, ``rows`` features wide."""
    with builder.tape.alive(x):
        out = plain_linear(builder, x, name, rows)
        down = builder.weights.get(f"{name}.lora_A.weight")
        return out if down is None else adapted(builder, x, out, name, rows, down)


def adapted(builder: Builder, x: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
    """Return a projection with what its adapter adds."""
    rules, coded = builder.settings.projections, builder.weight(f"{name}.weight").coded
    if coded and rules.codes_cloned and not builder.weight(f"{name}.weight").integers:
        with builder.tape.alive(out):
            out = builder.tape.apply("clone", [(out, SAME)], builder.fresh(out), traits=SAVES_NOTHING)
    wide = rules.adapter_sum == "wide"
    uncast = rules.adapter_sum == "uncast" or (coded and wide and builder.settings.autocast)
    seen = 0 if coded else rules.adapter_input_bytes
    own = x if uncast else builder.cast(x, seen or down.element_bytes, foreign=down.foreign)
    scaled = f"{name}.lora_magnitude_vector.weight" in builder.weights
    if scaled and builder.settings.code.names_magnitude:
        return _scaled_by_magnitude(builder, own, out, name, rows, down)
    with builder.tape.alive(out, own):
        if scaled:
            return _with_magnitude(builder, own, out, name, rows, down)
        dropped = builder.dropped(own, builder.settings.adapter_dropout)
        given = builder.cast(dropped, down.element_bytes, foreign=down.foreign) if seen else dropped
        given = _stretch_copied(builder, given) if given is x else given
        first = plain_linear(builder, given, f"{name}.lora_A", down.rows)
        with builder.tape.alive(*((first,) if builder.settings.code.names_magnitude else ())):
            low = builder.pointwise("scale", plain_linear(builder, first, f"{name}.lora_B", rows))
        cast = wide and not coded  # the sum, and not what is added
        low = low if uncast or cast else builder.cast(low, out.element_bytes, foreign=out.foreign)
        total = builder.add(out, low)
    if cast:  # the sum has the name that the projection had
        with builder.tape.alive(own):
            return builder.cast(total, out.element_bytes, foreign=out.foreign)
    builder.tape.touch(*((low,) if coded and rules.codes_cloned else ()))  # a name, which the sum does not take
    return total


def _stretch_copied(builder: Builder, x: Value) -> Value:
    """Return a stretch of several sequences in a copy, as a product with a weight that trains reads rows; others are as they are.

    Source:
        ``should_fold`` in aten/src/ATen/native/LinearAlgebra.cpp (v2.13.0). What autocast casts lies in order then, and so
        does a stretch of one token.
    """
    regime = builder.settings.regime
    stretch = x.quantity is Quantity.ROW_CHUNK or (x.quantity is Quantity.LAST_ROW_CHUNK and not regime.empty_stretch)
    cast = builder.settings.under_autocast and x.element_bytes != builder.compute
    return builder.copied(x, moves=stretch and regime.stretches > 1 and not regime.one_sequence and not cast)


def _low_rank(builder: Builder, x: Value, name: str, rows: int, down: Weight) -> Value:
    return plain_linear(builder, plain_linear(builder, x, f"{name}.lora_A", down.rows), f"{name}.lora_B", rows)


def _with_magnitude(builder: Builder, own: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
    """Return DoRA's projection: the norm of the adapted weight is a constant of each step.

    A dropped input is multiplied by the whole weight once more.
    """
    # Source: ``DoraLinearVariant.forward`` in peft/tuners/lora/variants.py, ``DoraLinearLayer.forward`` in dora.py
    # (0.21.2).
    tape, named = builder.tape, builder.settings.projections.adapter_sum == "wide"
    magnitude = builder.weights[f"{name}.lora_magnitude_vector.weight"]
    x = builder.dropped(own, builder.settings.adapter_dropout)
    with tape.alive(x):
        formed = _magnitude_norm(builder, own, name, rows, down)
        norm = formed.norm
        scale = tape.value(ONE, rows, max(down.element_bytes, norm.element_bytes))
        scale.foreign = norm.foreign
        tape.apply("magnitude / norm", [], scale, [norm], [magnitude])
        with tape.alive(scale):
            low = _low_rank(builder, x, name, rows, down) if named else None
            base = _base_result(builder, x, out, name, formed)
            first = _scaled_rows(builder, builder.pointwise("scale - 1", scale), base)
            low = low or _low_rank(builder, x, name, rows, down)
            whole = builder.add(first, builder.pointwise("scale", _scaled_rows(builder, scale, low)))
        if named:
            _function_ends(builder, formed, low, *(() if base is out else (base,)))
    with tape.alive(*(() if named else (base,))):
        return _joined(builder, out, whole, name)


def _base_result(builder: Builder, x: Value, out: Value, name: str, formed: _AdaptedWeight) -> Value:
    """Return what DoRA scales by rows: the projection less its bias, or a product of its own with a dropped input.

    A copy of the base weight has a name from its norm until then.
    """
    if builder.settings.adapter_dropout:
        rows, down = formed.norm.width, formed.down
        frozen = builder.constant(rows * down.columns, down.element_bytes) if formed.base is None else formed.base
        base = _by_whole_weight(builder, x, rows, frozen, retained=formed.base is not None)
    else:
        base = _without_bias(builder, out, name)
    builder.tape.touch(*(() if formed.base is None else (formed.base,)))
    return base


def _joined(builder: Builder, out: Value, whole: Value, name: str) -> Value:
    """Return a projection and what DoRA adds to it, in the projection's dtype but for codes under autocast."""
    if builder.settings.projections.adapter_sum == "narrow":
        return builder.add(out, builder.cast(whole, out.element_bytes, foreign=out.foreign))
    total = builder.add(out, whole)
    if builder.weight(f"{name}.weight").coded and builder.settings.autocast:
        return total
    return builder.cast(total, out.element_bytes, foreign=out.foreign)


class _AdaptedWeight(NamedTuple):
    """What is formed of an adapted weight."""

    down: Weight  # The adapter's first matrix
    norm: Value  # The norm of each row
    product: Value  # The product of the adapter's matrices
    base: Value | None  # A copy of the base weight; None where it is read as it is
    saved: tuple[Value, ...]  # What the graph of ``product`` holds, for a backward that never comes


def _function_ends(builder: Builder, formed: _AdaptedWeight, low: Value, *base: Value) -> None:
    """Note that PEFT's function returns, which has names for what it was given and the product, its graph with it."""
    tape = builder.tape
    tape.touch(*base)
    for value in reversed(formed.saved):  # its graph goes with the product, the last node first
        tape.last_use[value.storage] = tape.last_use.pop(value.storage)
    tape.touch(formed.product, *([] if formed.base is None else [formed.base]), low)
    tape.graph_use |= {value.storage: len(tape.operations) - 1 for value in formed.saved}


def _by_whole_weight(builder: Builder, x: Value, rows: int, frozen: Value, *, retained: bool) -> Value:
    """Return the product with a frozen weight that is no parameter, and that is saved where it is a copy."""
    tape, low = builder.tape, builder.lowered(x)
    width = low.element_bytes
    if builder.settings.autocast and frozen.element_bytes != width:
        frozen = tape.make("cast weight", builder.constant(frozen.width, width), frozen)
        retained = True
    out = tape.value(x.quantity, rows, width)
    out.foreign = x.foreign and not builder.settings.autocast
    return tape.apply(
        "linear",
        [(low, NEW if low.flat else VIEW)],
        out,
        [frozen] if retained else [],
        traits=Traits(packs=True, product=True),
    )


def _scaled_rows(builder: Builder, scale: Value, x: Value) -> Value:
    """Return ``scale * x``, a number for each feature, in the wider dtype."""
    wide = promoted(scale, x)
    saves = [x, *([scale] if x.needs_gradient else [])]
    # Both products of backward are wide; that of ``x`` is cast when the other has been summed, and lies within it till then.
    cast = wide != x.element_bytes
    size = x.width * wide
    workspace = [(x.quantity, size), (x.quantity, size - x.coefficient)] if cast else [(x.quantity, size)]
    out = builder.fresh(x, element_bytes=wide)
    out.foreign = x.foreign and wide == 2
    ways = [(scale, NEW), (x, NEW)]
    reduces = Reduction(x.quantity, 1, x.width)
    return builder.tape.apply(
        "mul", ways, out, saves, traits=Traits(workspace=workspace, reduces=reduces, forms_last=cast)
    )


def _magnitude_norm(builder: Builder, x: Value, name: str, rows: int, down: Weight) -> _AdaptedWeight:
    """Return the norm of each row of the adapted weight, which is formed whole for it in the dtype of ``x`` (PEFT, ``DoraLinearLayer``)."""
    tape, columns, own = builder.tape, down.columns, down.element_bytes
    width = builder.compute if builder.settings.autocast else own
    eye = tape.make("eye", builder.constant(columns * columns, own))
    same = width == own and not (builder.settings.autocast and down.foreign)
    read = eye if same else tape.make("cast", builder.constant(columns * columns, width), eye)
    builder.cast_weight(builder.weight(f"{name}.lora_A.weight"))
    low = tape.make("linear", builder.constant(columns * down.rows, width), read, product=True)
    builder.cast_weight(builder.weight(f"{name}.lora_B.weight"))
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
    """Return the norm of each row of a base weight and of ``product`` together, ``size`` elements each, and the weight's copy.

    Codes that are multiplied as integers are decoded to fp32 (``int8_vectorwise_dequant`` in bitsandbytes/backends/default/ops.py,
    0.50.2).
    """
    tape, own = builder.tape, x.element_bytes
    frozen, width = list[Value](), 4 if base.integers else base.element_bytes
    if base.coded:
        decoded = builder.constant(size, 4 if base.integers else builder.compute)
        scratch = [(ONE, sum(base.decoding_sizes))]
        frozen = [tape.make("decode", decoded, scratch=scratch, decoding=base.decoding_parts)]
    read = list(frozen)
    if width != own or base.foreign != x.foreign:
        read = [tape.make("cast", builder.constant(size, own), *frozen)]
    scaled = tape.make("scale", builder.constant(size, product.element_bytes), product)
    whole = tape.make("add", builder.constant(size, promoted(x, product)), scaled, *read)
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
    if builder.weight(f"{name}.weight").integers:
        term = out  # whose dtype the bias has taken
    else:
        term = Value(-1, ONE, 0, bias.element_bytes, foreign=bias.foreign)
    rest = builder.fresh(out, element_bytes=promoted(out, term))
    way = SAME if rest.element_bytes == out.element_bytes else NEW
    return builder.tape.apply("less bias", [(out, way)], rest, traits=SAVES_NOTHING)


def _scaled_by_magnitude(builder: Builder, x: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
    """Return DoRA's projection by a layer that has names for all it forms until it returns, the decoded weight among them."""
    # Source: ``DoRALinear.forward`` in torchtune/modules/peft/dora.py (0.6.1).
    tape, own = builder.tape, down.element_bytes
    with tape.alive(out):
        x = builder.dropped(x, builder.settings.adapter_dropout)
        low = _low_rank(builder, x, name, rows, down)
    with tape.alive(x, out, low):
        eye = tape.make("eye", builder.constant(down.columns**2, own))
        inner = tape.make("linear", builder.constant(down.columns * down.rows, own), eye, product=True)
        product = tape.make("linear", builder.constant(down.columns * rows, own), inner, product=True)
        norm, decoded = _norm_of_sum(builder, product, builder.weight(f"{name}.weight"), rows * down.columns, rows, x)
        magnitude = builder.weights[f"{name}.lora_magnitude_vector.weight"]
        scale = tape.apply("magnitude / norm", [], tape.value(ONE, rows, own), [norm], [magnitude])
        with tape.alive(eye, product, norm, scale, *(() if decoded is None else (decoded,))):
            first = _scaled_rows(builder, builder.pointwise("scale - 1", scale), out)
            with tape.alive(first):
                second = builder.pointwise("scale", _scaled_rows(builder, scale, low))
            whole = builder.add(first, second)
            with tape.alive(whole):
                total = builder.add(whole, out)
    tape.touch(
        x, out, low, eye, product, *(() if decoded is None else (decoded,)), norm, scale, whole
    )  # as it names them
    tape.graph_use[inner.storage] = len(tape.operations) - 1  # of a graph that no backward runs
    return total


def linear_of_parts(builder: Builder, x: Value, name: str, sizes: tuple[int, int, int]) -> Value:
    """Return the projection of ``x`` to query, key and value of ``sizes`` features, whose adapter is made of one for each part.

    Source:
        ``LoRAQKVLinear`` in litgpt/lora.py (0.5.13), lines 183 to 426.
    """
    tape, rows = builder.tape, sum(sizes)
    with tape.alive(x):
        out = plain_linear(builder, x, name, rows)
        if f"{name}.lora_A.weight" not in builder.weights:
            return out
        down, up = (builder.weight(f"{name}.{part}.weight") for part in ("lora_A", "lora_B"))
        with tape.alive(out):
            low = plain_linear(
                builder, builder.dropped(x, builder.settings.adapter_dropout), f"{name}.lora_A", down.rows
            )
            with tape.alive(low):
                added = _convolved(builder, low, name, up.rows, joins=sizes[0] != sizes[1])
                with tape.alive(added):
                    scaled = builder.pointwise("scale", _filled_up(builder, added, rows))
                    total = builder.add(out, scaled)
    tape.touch(out, low, added, scaled)  # as its function names them
    return total


def _convolved(builder: Builder, low: Value, name: str, rows: int, *, joins: bool) -> Value:
    """Return the product with each part's second matrix: one grouped convolution, or one for each part, joined."""
    tape, up = builder.tape, builder.weight(f"{name}.lora_B.weight")
    low = builder.lowered(low)
    copy = builder.cast_weight(up)
    saves = [low, *([copy] if copy is not None else [])]
    out = builder.fresh(low, rows)
    workspace = [(low.quantity, low.coefficient), (ONE, up.formed_bytes)] if joins else []
    tape.apply(f"convolve {name}.lora_B", [(low, NEW)], out, saves, [up], Traits(workspace=workspace))
    tape.touch(*saves[1:])
    return tape.apply("cat", [(out, SAME)], builder.fresh(out), traits=SAVES_NOTHING) if joins else out


def _filled_up(builder: Builder, x: Value, rows: int) -> Value:
    """Return ``x`` among zeros, where not all features have an adapter; its shape is all that backward reads of what it saves."""
    if x.width == rows:
        return x
    index = builder.tape.value(ONE, INDEX_BYTES * x.width, 1)
    return builder.tape.apply("index_copy", [(x, NEW)], builder.fresh(x, rows), [x, index])
