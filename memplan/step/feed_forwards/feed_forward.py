"""Dense feed-forward parts on a tape, gated and plain."""

from memplan.model.inventory import inside
from memplan.model.parameter_tensors import XIELU
from memplan.model.spec import Activation, Mlp
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import Builder
from memplan.step.blocks.fused_adapters import fused_mlp, fuses, mlp_names
from memplan.step.divided.shared_ends_and_rows import row_product
from memplan.step.playing.recomputation import ACTIVATION
from memplan.step.tapes.taped_operations import NEW, OVER, SAME, SAVES_NOTHING, Traits, Value, Weight


def mlp(builder: Builder, x: Value, part: Mlp, prefix: str) -> Value:
    """Return what a dense feed-forward part adds to the residual stream; a layer that runs it itself has one name for all it forms."""
    names, inner, tape = builder.settings.names, part.intermediate_size, builder.tape
    x.flat = x.flat or builder.settings.code.feeds_inside
    with tape.alive(*(() if x.flat else (x,))):
        if not part.gated:
            hidden = linear(builder, x, inside(prefix, names.up), inner)
            if part.activation == "xielu":
                hidden = _xielu(builder, hidden, [builder.weight(inside(prefix, name)) for name in XIELU])
            else:
                hidden = activated(builder, hidden, part.activation)
            builder.named += (
                [hidden] if builder.settings.code.adds_inside or builder.settings.code.projects_behind else []
            )
        elif part.fused_gate_up:
            both = linear(builder, x, inside(prefix, names.gate_up), 2 * inner)
            gate, up = tape.view(both, inner), tape.view(both, inner)
            tape.apply("split", [(both, NEW)], [gate, up], traits=SAVES_NOTHING)
            with tape.alive(both):
                hidden = gated(builder, gate, up)
                return row_product(builder, hidden, inside(prefix, names.down), builder.settings.hidden_size)
        elif fuses(builder, "mlp", mlp_names(builder, prefix)):
            return fused_mlp(builder, x, prefix, inner)
        elif builder.profile.activation != "composite":
            gate = linear(builder, x, inside(prefix, names.gate), inner)
            with tape.alive(gate):
                hidden = gated(builder, gate, linear(builder, x, inside(prefix, names.up), inner))
        elif builder.settings.code.names_all:
            gate = linear(builder, x, inside(prefix, names.gate), inner)
            with tape.alive(gate):
                up = linear(builder, x, inside(prefix, names.up), inner)
            with tape.alive(gate, up):
                hidden = builder.multiply(activated(builder, gate), up)
                return row_product(builder, hidden, inside(prefix, names.down), builder.settings.hidden_size)
        elif builder.settings.code.scales_parts:
            up = linear(builder, x, inside(prefix, names.up), inner)
            with tape.alive(up):
                gate = builder.pointwise("scale", linear(builder, x, inside(prefix, names.gate), inner))
                hidden = builder.multiply(up, activated(builder, gate, part.activation))
            with tape.alive(hidden):
                down = row_product(builder, hidden, inside(prefix, names.down), builder.settings.hidden_size)
                return builder.pointwise("scale", down)
        else:
            gate = activated(builder, linear(builder, x, inside(prefix, names.gate), inner))
            hidden = builder.multiply(gate, linear(builder, x, inside(prefix, names.up), inner))
            tape.touch(*((gate,) if builder.settings.code.names_parts else ()))
        return row_product(builder, hidden, inside(prefix, names.down), builder.settings.hidden_size)


def activated(builder: Builder, x: Value, kind: Activation = "silu") -> Value:
    """Return the activation of ``x``, which saves its input; a ReLU saves its result."""
    if kind == "gelu-new" and builder.settings.code.functions:
        return _gelu_new(builder, x)
    if kind == "gelu-fast" and builder.settings.code.functions:
        return _gelu_fast(builder, x)
    if kind == "relu-squared":
        return _relu_squared(builder, x)
    if kind == "gelu-again":
        return _gelu_again(builder, x)
    if kind == "relu":
        positive = builder.fresh(x)
        return builder.tape.apply(ACTIVATION, [(x, NEW)], positive, [positive])
    return builder.pointwise(ACTIVATION, x, (x,))


def _gelu_again(builder: Builder, x: Value) -> Value:
    """Return a GELU by a function in Python, which saves its input alone and forms all else again for its gradient."""
    # Source: ``bloom_gelu_forward``, with four results of its size at once, and ``bloom_gelu_back``, with five, in
    # transformers/models/bloom/modeling_bloom.py (5.23.0).
    size = (x.quantity, x.coefficient)
    traits = Traits(scratch=[size] * 3, workspace=[size] * 4, custom=True)
    return builder.tape.apply(ACTIVATION, [(x, NEW)], builder.fresh(x), [x], traits=traits)


def _relu_squared(builder: Builder, x: Value) -> Value:
    """Return ``relu(x) ** 2``: the power, which autocast forms in fp32, saves what the other has saved, or a copy of it."""
    tape = builder.tape
    tape.entered[len(tape.operations)] = ACTIVATION
    positive = builder.fresh(x)
    # A function's argument has a name as long as it runs; ``ReLUSquaredActivation`` has one for what it squares too.
    with tape.alive(x, *([positive] if builder.settings.code.functions else [])):
        tape.apply("relu", [(x, NEW)], positive, [positive])
        wide = builder.cast(positive, 4) if builder.settings.under_autocast else positive
        traits = Traits(workspace=[(wide.quantity, wide.coefficient)] * 2, forms_last=True)
        return tape.apply("pow", [(wide, NEW)], builder.fresh(wide), [wide], traits=traits)


def _xielu(builder: Builder, x: Value, parts: list[Weight]) -> Value:
    """Return ``a x^2 + x / 2`` above 0 and ``(expm1(min(x, eps)) - x) b + x / 2`` below, of two learned numbers.

    Source:
        ``XIELUActivation._xielu_python`` in transformers/activations.py (5.24.0), which runs where the package xielu is not installed.
    """
    tape = builder.tape
    tape.entered[len(tape.operations)] = ACTIVATION
    whole = (x.quantity, x.coefficient)
    with tape.alive(x):
        above, below = [_softplus(builder, weight) for weight in parts]
        shifted = tape.apply("add", [(below, SAME)], builder.fresh(below), traits=SAVES_NOTHING)
        with tape.alive(above, shifted):
            positive = tape.make("compare", builder.fresh(x, element_bytes=1), x)
            with tape.alive(positive):
                square = builder.product(builder.repeated_product(above, x), x)
                with tape.alive(square):
                    line = builder.pointwise("scale", x)
                upper = builder.add(square, line)
                with tape.alive(upper):
                    bounded = tape.apply("minimum", [(x, NEW)], builder.fresh(x), [x], traits=Traits(workspace=[whole]))
                    wide = builder.cast(bounded, 4) if builder.settings.under_autocast else bounded
                    power = builder.fresh(wide)
                    tape.apply(
                        "expm1",
                        [(wide, NEW)],
                        power,
                        [power],
                        traits=Traits(workspace=[(power.quantity, power.coefficient)]),
                    )
                    bent = builder.fresh(power)
                    tape.apply("sub", [(power, SAME), (x, NEW)], bent, traits=SAVES_NOTHING)
                    scaled = builder.repeated_product(bent, shifted)
                    with tape.alive(scaled):
                        line = builder.pointwise("scale", x)
                    lower = builder.add(scaled, line)
                    out = builder.fresh(upper)
                    return tape.apply("where", [(upper, NEW), (lower, NEW)], out, [positive])


def _softplus(builder: Builder, weight: Weight) -> Value:
    """Return one learned number made positive."""
    size = 4 if builder.settings.under_autocast else weight.element_bytes
    return builder.tape.apply("softplus", [], builder.constant(1, size), weights=[weight], traits=Traits(packs=True))


def _gelu_new(builder: Builder, x: Value) -> Value:
    """Return ``0.5 x (1 + tanh(c (x + 0.044715 x^3)))``, operation by operation (transformers, ``NewGELUActivation``)."""
    tape = builder.tape
    tape.entered[len(tape.operations)] = ACTIVATION
    with tape.alive(x):
        half = builder.pointwise("half", x)
        with tape.alive(half):
            wide = builder.cast(x, 4) if builder.settings.under_autocast else x
            traits = Traits(workspace=[(wide.quantity, wide.coefficient)] * 2, forms_last=True)
            cube = tape.apply("pow", [(wide, NEW)], builder.fresh(wide), [wide], traits=traits)
            inner = builder.pointwise("scale", builder.add(x, builder.pointwise("scale", cube)))
            bounded = builder.fresh(inner)
            tape.apply("tanh", [(inner, NEW)], bounded, [bounded])
            shifted = tape.apply("add one", [(bounded, SAME)], builder.fresh(bounded), traits=SAVES_NOTHING)
            product = builder.product(half, shifted, ACTIVATION)
    tape.touch(half, shifted, x)
    return product


def _gelu_fast(builder: Builder, x: Value) -> Value:
    """Return ``0.5 x (1 + tanh(c x (1 + 0.044715 x x)))``, operation by operation (transformers, ``FastGELUActivation``)."""
    tape = builder.tape
    tape.entered[len(tape.operations)] = ACTIVATION
    with tape.alive(x):
        half = builder.pointwise("half", x)
        with tape.alive(half):
            scaled = builder.pointwise("scale", x)
            with tape.alive(scaled):
                square = builder.product(builder.pointwise("scale", x), x, "square")
                sum_ = tape.apply("add one", [(square, SAME)], builder.fresh(square), traits=SAVES_NOTHING)
                inner = builder.product(scaled, sum_, "mul")
            bounded = builder.fresh(inner)
            tape.apply("tanh", [(inner, NEW)], bounded, [bounded])
            shifted = tape.apply("add one", [(bounded, SAME)], builder.fresh(bounded), traits=SAVES_NOTHING)
            with tape.alive(shifted):
                return builder.product(half, shifted, ACTIVATION)


def gated(builder: Builder, gate: Value, up: Value) -> Value:
    """Return ``activation(gate) * up``: in one kernel, which saves both inputs, or step by step."""
    with builder.tape.alive(gate, up):
        if builder.profile.activation != "composite":
            way = OVER if builder.profile.activation == "in-place" else NEW
            ways = [(gate, way), (up, way)]
            unused = [
                x for x in (gate, up) if not x.needs_gradient and way is NEW
            ]  # whose gradient it forms all the same
            traits = Traits(workspace=[(x.quantity, x.coefficient) for x in unused], custom=True)
            return builder.tape.apply("gated activation", ways, builder.fresh(up), [gate, up], traits=traits)
        return builder.multiply(activated(builder, gate), up)
