"""Normalisation on a tape: by one kernel, or as Python code writes it."""

from memplan.model.parameter_tensors import norm_names
from memplan.model.spec import Layer, Norm
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Reduction, Traits, Value, Weight


def normalised(
    builder: Builder, x: Value, norm: Norm, name: str, size: int, *, copied: tuple[int, int] = (0, 0)
) -> Value:
    """Return ``x`` normalised in groups of ``size`` elements.

    Args:
        copied: Tensors like ``x`` that a kernel copies since they are not contiguous, forward and backward.
    """
    tape = builder.tape
    if norm.kind == "none":
        return x
    with tape.alive(x):
        used = [builder.weights[f"{name}.{part}"] for part in ("weight", "bias") if f"{name}.{part}" in builder.weights]
        if used:
            tape.entered[len(tape.operations)] = used[0].name.rpartition(".")[0]
        by_kernel = builder.settings.code.fused_wide_norms and all(weight.element_bytes == 4 for weight in used)
        composite = norm.kind == "rms" and builder.profile.norm == "composite" and not by_kernel
        promotes = composite and builder.settings.code.promotes
        if builder.profile.norm == "in-place" and norm.kind == "rms":
            return _norm_in_place(builder, x, norm, name, used, x.width // size)
        if builder.settings.code.centred_norms:
            return _centred_norm(builder, x, used, x.width // size)
        own = x.element_bytes
        x = builder.cast(x, 4) if builder.settings.autocast and not promotes else x
        casts = [
            tape.make("cast weight", tape.value(ONE, size, x.element_bytes))
            for weight in used
            if (weight.element_bytes != x.element_bytes or weight.foreign) and not promotes
        ]
        if norm.unit_offset and builder.profile.norm == "fused":
            casts = [tape.make("1 + weight", tape.value(ONE, size, x.element_bytes), *casts)]
        with tape.alive(x, *casts):
            if composite:
                narrow = own if builder.settings.code.casts_scale else x.element_bytes
                return _composite_norm(builder, x, norm, used, casts, x.width // size, narrow)
            if builder.settings.code.wide_layer_norm:
                wide = builder.cast(x, 4)
                return builder.cast(_fused_norm(builder, wide, norm, name, used, casts, x.width // size), own)
            return _fused_norm(builder, x, norm, name, used, casts, x.width // size, copied)


def joined(builder: Builder, x: Value, part: Value, layer: Layer, index: int) -> Value:
    """Return the residual stream with a part added that is normalised behind it, or with their sum normalised, beside what both are named by.

    Source:
        ``BertSelfOutput.forward``, ``BertOutput.forward`` in transformers/models/bert/modeling_bert.py (5.24.0).
    """
    tape, size = builder.tape, builder.settings.hidden_size
    name = norm_names(builder.settings.names, layer)[index]
    if layer.placement == "post":
        return builder.add(x, builder.dropped(normalised(builder, part, layer.norm, name, size)))
    part = builder.dropped(part) if index else builder.dropped_behind(part)
    with tape.alive(x, part):
        out = normalised(builder, builder.add(part, x), layer.norm, name, size)
    tape.touch(*builder.named)  # what attention, or the feed-forward part, has yielded
    builder.named.clear()
    return out


def _norm_in_place(builder: Builder, x: Value, norm: Norm, name: str, used: list[Weight], rows: int) -> Value:
    """Return the norm by one kernel, whose backward works in the gradient that comes in but for weights with an offset."""
    # Source: ``LigerRMSNormFunction`` in liger_kernel/ops/rms_norm.py; gemma's patches in transformers/monkey_patch.py
    # (0.8.5).
    statistics = builder.tape.value(x.quantity, rows, 4)
    way = NEW if norm.unit_offset else SAME
    traits = Traits(custom=True)
    return builder.tape.apply(f"norm {name}", [(x, way)], builder.fresh(x), [x, statistics], used, traits=traits)


def _fused_norm(
    builder: Builder,
    x: Value,
    norm: Norm,
    name: str,
    used: list[Weight],
    casts: list[Value],
    rows: int,
    copied: tuple[int, int] = (0, 0),
) -> Value:
    """Return the norm by one kernel, which saves its input and one or two numbers a row."""
    # Source: ``expect_contiguous`` in aten/src/ATen/native/cuda/layer_norm_kernel.cu (v2.13.0), for what is copied.
    rms = norm.kind == "rms"
    statistics = [builder.tape.value(x.quantity, rows, 4) for _ in range(1 if rms else 2)]
    saves = [x, *statistics, *casts]
    forward, backward = copied
    workspace = [(x.quantity, x.coefficient)] * backward
    traits = Traits(custom=rms, workspace=workspace, forms_last=bool(workspace))
    like = (x.quantity, x.width, x.element_bytes)
    read = [builder.tape.make("copy", builder.tape.value(*like, part=Part.TEMPORARIES), x) for _ in range(forward)]
    with builder.tape.alive(*read):
        return builder.tape.apply(f"norm {name}", [(x, NEW)], builder.fresh(x), saves, used, traits=traits)


def _composite_norm(
    builder: Builder, x: Value, norm: Norm, used: list[Weight], casts: list[Value], rows: int, width: int
) -> Value:
    """Return the norm as Python code writes it: squares in fp32, then the weight, in elements of a ``width``."""
    tape = builder.tape
    wide = builder.cast(x, 4)
    full = [(wide.quantity, wide.coefficient)]
    with tape.alive(wide):
        if builder.settings.code.casts_scale:
            squares = builder.multiply(wide, wide)
        else:
            traits = Traits(workspace=full * 2, forms_last=True)
            squares = tape.apply("pow", [(wide, NEW)], builder.fresh(wide), [wide], traits=traits)
        means = tape.apply("mean", [(squares, NEW)], tape.value(x.quantity, rows, 4), traits=SAVES_NOTHING)
        if builder.settings.code.fused_wide_norms:  # one expression of F.rms_norm, which adds in place
            with tape.alive(squares):
                inverse = _inverse_root(builder, means)
        else:
            shifted = tape.apply("add", [(means, SAME)], builder.fresh(means), traits=SAVES_NOTHING)
            root = _inverse_power if builder.settings.code.powered_norms else _inverse_root
            inverse = root(builder, shifted)
    traits = Traits(workspace=full, forms_last=True)
    normal = tape.apply("mul", [(wide, NEW), (inverse, NEW)], builder.fresh(wide), [inverse, wide], traits=traits)
    if not used:
        return builder.cast(normal, width)
    if builder.settings.code.fused_wide_norms:
        with tape.alive(inverse, wide):  # until F.rms_norm returns
            scaled = times_weight(builder, normal, used)
        return builder.cast(scaled, width)
    code = builder.settings.code
    with tape.alive(*((wide, means, normal) if code.names_all else ())):
        out = _scaled(builder, x, normal, norm, used, casts, rows)
        out = builder.cast(out, width) if code.casts_scale else out
    tape.touch(
        *((means,) if code.promotes and not (norm.unit_offset or code.powered_norms or code.unnamed_norms) else ())
    )  # ``variance`` in ``LlamaRMSNorm.forward``
    return out


def _inverse_root(builder: Builder, x: Value) -> Value:
    """Return 1 over the root, whose gradient is a product of two factors that are formed first (``rsqrt`` in derivatives.yaml, v2.13.0)."""
    inverse, factor = builder.fresh(x), (x.quantity, x.coefficient)
    traits = Traits(workspace=[factor] * 2, forms_last=True)
    return builder.tape.apply("rsqrt", [(x, NEW)], inverse, [inverse], traits=traits)


def _inverse_power(builder: Builder, x: Value) -> Value:
    """Return the same as a power, of which backward needs what it was taken of (``pow`` in derivatives.yaml, v2.13.0)."""
    traits = Traits(workspace=[(x.quantity, x.coefficient)] * 2, forms_last=True)
    return builder.tape.apply("pow", [(x, NEW)], builder.fresh(x), [x], traits=traits)


def _scaled(
    builder: Builder, x: Value, normal: Value, norm: Norm, used: list[Weight], casts: list[Value], rows: int
) -> Value:
    """Return what has been divided, times the weight, in the dtype of what was given."""
    tape = builder.tape
    if norm.unit_offset:
        narrow = used[0].element_bytes != 4
        read = [tape.make("cast weight", builder.constant(normal.width // rows, 4))] if narrow else []
        shift = tape.make("1 + weight", tape.value(ONE, normal.width // rows, 4), *read)
        scaled = times_weight(builder, normal, used, (shift,), offset=True)
        tape.touch(normal)
        return builder.cast(scaled, x.element_bytes)
    if builder.settings.code.powered_norms:
        read = [tape.make("cast weight", builder.constant(used[0].rows, 4))] if used[0].element_bytes != 4 else []
        return builder.cast(times_weight(builder, normal, used, tuple(read)), x.element_bytes)
    with tape.alive(*(() if builder.settings.code.unnamed_norms else (normal,))):
        if builder.settings.code.wide_scale:
            code = builder.settings.code
            copies = (code.casts_scale or code.widens_scale) and used[0].element_bytes != 4
            wide_weight = (tape.make("cast weight", builder.constant(used[0].rows, 4)),) if copies else ()
            return builder.cast(times_weight(builder, normal, used, wide_weight), x.element_bytes)
        return times_weight(builder, builder.cast(normal, x.element_bytes), used, tuple(casts))


def _centred_norm(builder: Builder, x: Value, used: list[Weight], rows: int) -> Value:
    """Return a layer norm as Python code writes it, in fp32: the mean is taken away twice."""
    # Source: ``CohereLayerNorm.forward`` in transformers/models/cohere/modeling_cohere.py (5.23.0).
    tape, wide = builder.tape, builder.cast(x, 4)
    full = [(wide.quantity, wide.coefficient)]

    def mean(value: Value) -> Value:
        return tape.apply("mean", [(value, NEW)], tape.value(x.quantity, rows, 4), traits=SAVES_NOTHING)

    def centred() -> Value:
        traits = Traits(packs=False, workspace=full)
        return tape.apply("sub", [(wide, SAME), (means, NEW)], builder.fresh(wide), traits=traits)

    with tape.alive(wide):
        means = mean(wide)
        with tape.alive(means):
            traits = Traits(workspace=full * 2, forms_last=True)
            apart = centred()
            variance = mean(tape.apply("pow", [(apart, NEW)], builder.fresh(wide), [apart], traits=traits))
            with tape.alive(variance):
                apart = centred()
                with tape.alive(apart):
                    shifted = tape.apply("add", [(variance, SAME)], builder.fresh(variance), traits=SAVES_NOTHING)
                    inverse = _inverse_root(builder, shifted)
                ways, traits = [(apart, NEW), (inverse, NEW)], Traits(workspace=full, forms_last=True)
                normal = tape.apply("mul", ways, builder.fresh(wide), [inverse, apart], traits=traits)
    narrow, elements = used[0].element_bytes != 4, used[0].own_bytes // used[0].element_bytes
    with tape.alive(normal):
        copies = (tape.make("cast weight", builder.constant(elements, 4)),) if narrow else ()
        scaled = times_weight(builder, normal, used, copies)
    return builder.cast(scaled, x.element_bytes)


def times_weight(
    builder: Builder, x: Value, used: list[Weight], shifted: tuple[Value, ...] = (), *, offset: bool = False
) -> Value:
    """Return ``weight * x``, or ``x * (1 + weight)`` with an ``offset``, whose weight gradient is summed from a full product."""
    trained = used[0].trainable
    scratch = [(x.quantity, x.coefficient)] if trained else []
    factors = shifted if x.needs_gradient else ()
    product = (x,) if trained else ()
    saves = (*factors, *product) if offset else (*product, *factors)
    columns, width = used[0].rows, x.element_bytes
    if builder.settings.code.promotes and not shifted:
        width = max(width, used[0].element_bytes)
    reduces = Reduction(x.quantity, x.width // columns, columns) if trained else None
    builder.tape.apply(
        "mul weight",
        [(x, NEW)],
        out := builder.fresh(x, element_bytes=width),
        saves,
        used,
        traits=Traits(workspace=scratch, reduces=reduces),
    )
    builder.tape.touch(*shifted)
    return out
