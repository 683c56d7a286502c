"""A state space layer on a tape: a projection, a convolution, the scan, a gate.

Source: ``FalconH1Mixer.forward``, ``GraniteMoeHybridMambaLayer.forward``, ``causal_conv1d_fn`` and ``FalconH1RMSNormGated`` in
transformers 5.23.0, models/falcon_h1/modeling_falcon_h1.py and models/granitemoehybrid/modeling_granitemoehybrid.py.
"""

from memplan.model.state_space import StateSpace
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.delta.state_space_kernels import fused_state_space
from memplan.step.delta.state_space_scan import ScanInputs, chunked_scan
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAVES_NOTHING, Reduction, Traits, Value


def state_space(builder: Builder, x: Value, part: StateSpace) -> Value:
    """Return what a state space layer adds to the residual stream; its caller has a name for ``x`` until it returns."""
    tape, prefix = builder.tape, part.prefix
    with tape.alive(x):
        given = builder.pointwise("scale", x) if part.multiplied else x
        projected = linear(builder, given, f"{prefix}.in_proj", part.projected_size)
        projected = _by_vector(builder, projected) if part.multiplied else projected
        with tape.alive(projected):
            rate = _rate(builder, part)
            if builder.profile.linear_attention == "mamba":
                with tape.alive(rate, given):
                    return fused_state_space(builder, projected, rate, part)
            gate, mixed, step = (
                tape.view(projected, width) for width in (part.inner_size, part.convolved_size, part.num_heads)
            )
            tape.apply("split", [(projected, NEW)], (gate, mixed, step), traits=SAVES_NOTHING)
            builder.cache_state(part.convolved_size * part.kernel_size, mixed)
            mixed = _convolved(builder, mixed, part)
            tape.touch(given)  # its name is given to a part of that
            with tape.alive(rate, mixed):
                sizes = (part.inner_size, part.group_size, part.group_size)
                heads, writes, reads = (tape.view(mixed, width) for width in sizes)
                tape.apply("split", [(mixed, NEW)], (heads, writes, reads), traits=SAVES_NOTHING)
                read, states = chunked_scan(builder, ScanInputs(heads, step, rate, writes, reads), part)
                with tape.alive(read):
                    builder.cache_state(part.inner_size * part.state_size, states)
                out = (_gated_norm if part.normalised else _gated)(builder, read, gate, part)
                with tape.alive(out):
                    narrow = builder.cast(out, x.element_bytes, foreign=x.foreign)
                    return linear(builder, narrow, f"{prefix}.out_proj", builder.settings.hidden_size)


def _by_vector(builder: Builder, x: Value) -> Value:
    """Return ``x`` times a buffer in the dtype that the model was loaded in, which widens what autocast has narrowed."""
    wide = builder.settings.residual_bytes if builder.settings.autocast else x.element_bytes
    out = builder.fresh(x, element_bytes=max(x.element_bytes, wide))
    narrow = out.element_bytes != x.element_bytes
    formed = [(out.quantity, out.coefficient)] if narrow else []
    casts = [(x.quantity, x.coefficient)] if narrow else []
    traits = Traits(packs=True, workspace=formed, casts=casts)
    return builder.tape.apply("mul", [(x, NEW)], out, traits=traits)


def _rate(builder: Builder, part: StateSpace) -> Value:
    """Return the rate at which each head's states decay, less than 0."""
    tape, weight = builder.tape, builder.weight(f"{part.prefix}.A_log")
    power, rate = (tape.value(ONE, part.num_heads, 4, part=Part.ACTIVATIONS) for _ in range(2))
    tape.apply("exp", [], power, [power], [weight])
    return tape.apply("neg", [(power, NEW)], rate, traits=SAVES_NOTHING)


def _convolved(builder: Builder, x: Value, part: StateSpace) -> Value:
    """Return the convolution over tokens and its activation; the result has ``kernel_size - 1`` tokens more, which are cut off."""
    tape, own = builder.tape, x.element_bytes
    weights = [builder.weight(f"{part.prefix}.conv1d.weight")]
    weights += [builder.weight(f"{part.prefix}.conv1d.bias")] if part.convolution_bias else []
    weight = weights[0]
    with tape.alive(x):
        x = builder.lowered(builder.cast(x, weight.element_bytes, foreign=weight.foreign))
        narrow = builder.settings.autocast and weight.element_bytes != builder.compute
        elements = part.convolved_size * part.kernel_size
        copies = [tape.make("cast weight", builder.constant(elements, builder.compute))] if narrow else []
        for bias in weights[1:]:
            builder.cast_bias(bias, part.convolved_size)
        whole = builder.fresh(x)
        beyond = tape.value(Quantity.SEQUENCES, (part.kernel_size - 1) * part.convolved_size, x.element_bytes)
        with tape.alive(x, *copies):
            tape.apply("conv1d", [(x, NEW)], (whole, beyond), [x, *copies], weights)
        cut = tape.apply("slice", [(whole, NEW)], tape.view(whole), traits=SAVES_NOTHING)
        out = builder.pointwise("activation", cut, (cut, beyond))
        return builder.cast(out, own)


def _gated(builder: Builder, x: Value, gate: Value, part: StateSpace) -> Value:
    """Return ``x * silu(gate)``, in the wider dtype."""
    del part
    with builder.tape.alive(x):
        return builder.product(x, builder.pointwise("silu", gate, (gate,)))


def _gated_norm(builder: Builder, x: Value, gate: Value, part: StateSpace) -> Value:
    """Return ``weight * norm(x * silu(gate))``, the norm of each group, all in fp32."""
    tape, weight = builder.tape, builder.weight(f"{part.prefix}.norm.weight")
    with tape.alive(x):
        open_ = builder.cast(gate, 4)
        product = builder.product(x, builder.pointwise("silu", open_, (open_,)))
        twice = [(product.quantity, 2 * product.coefficient)]
        with tape.alive(product):
            squares = tape.apply(
                "pow", [(product, NEW)], builder.fresh(product), [product], traits=Traits(workspace=twice)
            )
            means = tape.apply("mean", [(squares, NEW)], builder.fresh(product, part.num_groups), traits=SAVES_NOTHING)
            inverse = builder.fresh(means)
            tape.apply("rsqrt", [(means, NEW)], inverse, [inverse])
            full = [(product.quantity, product.coefficient)]
            ways = [(inverse, NEW), (product, NEW)]
            normal = tape.apply("mul", ways, builder.fresh(product), [product, inverse], traits=Traits(workspace=full))
        with tape.alive(means, normal):
            reduces = Reduction(normal.quantity, 1, part.inner_size)
            traits = Traits(workspace=full if weight.trainable else [], reduces=reduces)
            saves = [normal] if weight.trainable else []
            return tape.apply("mul weight", [(normal, NEW)], builder.fresh(normal), saves, [weight], traits=traits)
