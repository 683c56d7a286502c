"""A short convolution between two gates on a tape.

Source: ``Lfm2ShortConv.forward`` and ``causal_conv1d_fn`` in transformers/models/lfm2/modeling_lfm2.py (5.23.0).
"""

from memplan.model.short_convolution import ShortConvolution
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import Builder
from memplan.step.delta.delta_layer import fused_convolution
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAVES_NOTHING, Value


def gated_convolution(builder: Builder, x: Value, part: ShortConvolution) -> Value:
    """Return what the part adds to the residual stream."""
    tape, hidden = builder.tape, builder.settings.hidden_size
    with tape.alive(x):
        both = linear(builder, x, f"{part.prefix}.in_proj", 3 * hidden)
        turned = _turned(builder, both, f"{part.prefix}.in_proj")
        given, taken, gated = (tape.view(both, hidden) for _ in range(3))
        tape.apply("chunk", [(turned, NEW)], (given, taken, gated), traits=SAVES_NOTHING)
        with tape.alive(both):
            product = builder.multiply(given, gated)
            with tape.alive(product):
                builder.cache_state(part.kernel_size * product.width, product)
                convolved, more = _convolved(builder, product, part)
            with tape.alive(convolved):
                saves = [*builder.factors(taken, convolved), *(more if taken.needs_gradient else ())]
                out = tape.apply("mul", [(taken, NEW), (convolved, NEW)], builder.fresh(taken), saves)
                with tape.alive(out):
                    return linear(builder, out, f"{part.prefix}.out_proj", hidden)


def _turned(builder: Builder, x: Value, name: str) -> Value:
    """Return a projection with channels before tokens, whose gradient is copied where there are several sequences.

    Of one sequence it lies as it is, and a product of integers copies it, beside what adapters are given of it.
    """
    # Source: ``MatMul8bitLt.backward`` in bitsandbytes/autograd/_functions.py (0.50.2).
    tape = builder.tape
    if not builder.settings.regime.one_sequence:
        return tape.apply("look", [(x, NEW)], tape.view(x), traits=SAVES_NOTHING)
    if builder.weight(f"{name}.weight").integers:
        for node in [node for node in tape.nodes if node.name == f"linear {name}"]:
            node.traits = node.traits._replace(workspace=[*node.traits.workspace, (x.quantity, x.coefficient)])
    return x


def _convolved(builder: Builder, x: Value, part: ShortConvolution) -> tuple[Value, tuple[Value, ...]]:
    """Return the convolution over tokens, and what has been computed of it beyond the last: ``kernel_size - 1`` tokens of each sequence."""
    tape, weight, own = builder.tape, builder.weight(f"{part.prefix}.conv.weight"), x.element_bytes
    if builder.profile.linear_attention == "fla":
        return fused_convolution(builder, x, weight), ()
    wide = builder.cast(x, weight.element_bytes, foreign=weight.foreign)
    x = builder.lowered(wide)
    narrow = builder.settings.autocast and weight.element_bytes != builder.compute
    copies = (
        [tape.make("cast weight", builder.constant(weight.rows * weight.columns, builder.compute))] if narrow else []
    )
    whole = builder.fresh(x)
    beyond = tape.value(Quantity.SEQUENCES, (part.kernel_size - 1) * x.width, x.element_bytes)
    with tape.alive(x, *copies):
        tape.apply("conv1d", [(x, NEW)], (whole, beyond), [x, *copies], [weight])
    cut = tape.apply("slice", [(whole, NEW)], tape.view(whole), traits=SAVES_NOTHING)
    out = builder.last_tokens(builder.cast(cut, own))
    return out, (beyond,) if out.storage == whole.storage else ()
