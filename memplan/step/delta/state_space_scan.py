"""The scan of a state space layer on a tape, as transformers' own code computes it: in fp32, pairs within chunks, states between.

Source: ``mamba2_chunk_scan`` and ``segment_sum`` in transformers 5.23.0, models/falcon_h1/modeling_falcon_h1.py, which other families
have copies of; ``sumproduct_pair`` in aten/src/ATen/native/Linear.cpp (v2.13.0), which copies what it multiplies where heads or
tokens of it do not lie as products of matrices want them.
"""

from typing import NamedTuple

from memplan.model.state_space import StateSpace
from memplan.step.blocks.builder import Builder
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, VIEW, Reduction, Traits, Value

CHUNKS, BOUNDS, PAIRS = Quantity.SCAN_CHUNKS, Quantity.SCAN_BOUNDS, Quantity.SCAN_PAIRS


class ScanInputs(NamedTuple):
    """What the scan is given: heads, the step of each, its rate of decay, and what writes and reads its states."""

    heads: Value
    step: Value
    rate: Value
    writes: Value
    reads: Value


class _Chunked(NamedTuple):
    """The same in whole chunks, in fp32: heads times their step, the logarithm of the decay, and what writes and reads, for each head."""

    heads: Value
    decay: Value
    writes: Value
    reads: Value


def chunked_scan(builder: Builder, given: ScanInputs, part: StateSpace) -> tuple[Value, Value]:
    """Return what is read off the states for each token, in fp32, and the states, of which a cache is given the last."""
    tape, size = builder.tape, part.chunk_tokens
    several = not builder.settings.regime.one_scan
    apart = several or not builder.settings.regime.one_sequence
    step = _step(builder, given.step, part)
    residual, chunked = _widened(builder, given, step, part)
    total = tape.apply("cumsum", [(chunked.decay, NEW)], builder.fresh(chunked.decay), traits=_doubled(chunked.decay))
    decay = _segments(builder, chunked.decay, CHUNKS, size, Quantity.ONE, size * size)
    names = [step, residual, *chunked, total, decay]
    scores = _product(builder, chunked.reads, chunked.writes, size * size * part.num_heads, (apart, apart))
    pairs = builder.product(scores, decay)
    within = _product(builder, pairs, chunked.heads, size * part.inner_size, (False, several))
    within = _viewed(builder, within, moves=apart)
    rest = tape.apply("sub", [(total, NEW), (total, NEW)], builder.fresh(total), traits=SAVES_NOTHING)
    left = builder.fresh(total)
    tape.apply("exp", [(rest, NEW)], left, [left])
    decayed = builder.repeated_product(chunked.writes, left)
    names += [scores, pairs, within, left, decayed]
    own = _product(builder, chunked.heads, decayed, part.inner_size * part.state_size, (several, apart))
    own = _viewed(builder, own, moves=several)
    first, states, share = _handed_on(builder, own, total, part)
    power = builder.fresh(total)
    tape.apply("exp", [(total, NEW)], power, [power])
    read = _viewed(
        builder, _product(builder, chunked.reads, states, size * part.inner_size, (apart, several)), moves=apart
    )
    across = builder.repeated_product(read, power)
    summed = builder.add(within, across)
    out = tape.apply("copy", [(summed, SAME)], builder.fresh(summed), traits=SAVES_NOTHING)
    names += [first, states, share, power, read, across, out]
    out = builder.add(out, residual)
    if builder.settings.regime.pads_scan:
        cut = Value(out.storage, given.heads.quantity, part.inner_size * 4, 4)
        out = tape.apply("slice", [(out, NEW)], cut, traits=SAVES_NOTHING)
    else:
        out = tape.apply(
            "look",
            [(out, SAME)],
            Value(out.storage, given.heads.quantity, part.inner_size * 4, 4),
            traits=SAVES_NOTHING,
        )
    tape.touch(*names)
    return out, states


def _doubled(x: Value) -> Traits:
    """Return what the backward of a running sum takes besides: the gradient turned round, and its running sum."""
    # Source: ``cumsum_backward`` in torch/csrc/autograd/FunctionsManual.cpp (v2.13.0).
    return Traits(packs=False, workspace=[(x.quantity, 2 * x.coefficient)])


def _chunks(builder: Builder, width: int, part: StateSpace) -> Value:
    """Return a tensor of so many elements for each token, padded to whole chunks."""
    return builder.tape.value(CHUNKS, part.chunk_tokens * width, 4)


def _step(builder: Builder, x: Value, part: StateSpace) -> Value:
    """Return the step of each head, above 0 and within bounds, in the dtype of what it is made of, or fp32 under autocast."""
    tape, bias = builder.tape, builder.weight(f"{part.prefix}.dt_bias")
    with tape.alive(x):
        shifted = builder.fresh(x)
        reduces = Reduction(x.quantity, 1, part.num_heads) if bias.trainable else None
        tape.apply("add", [(x, SAME)], shifted, weights=[bias], traits=Traits(packs=False, reduces=reduces))
        with tape.alive(shifted):
            wide = builder.cast(shifted, 4) if builder.settings.under_autocast else shifted
            soft = builder.pointwise("softplus", wide, (wide,))
        return builder.clamp(soft, 2)


def _widened(builder: Builder, given: ScanInputs, step: Value, part: StateSpace) -> tuple[Value, _Chunked]:
    """Return heads times a number of each, and what the scan reads, in whole chunks."""
    tape = builder.tape
    heads = builder.cast(given.heads, 4)
    with tape.alive(heads, step):
        writes = _repeated(builder, given.writes, part)
        with tape.alive(writes):
            reads = _repeated(builder, given.reads, part)
        with tape.alive(writes, reads):
            residual = _residual(builder, heads, part)
            with tape.alive(residual):
                scaled = builder.repeated_product(heads, builder.cast(step, 4))
                with tape.alive(scaled):
                    decay = builder.repeated_product(given.rate, builder.cast(step, 4))
                tape.touch(heads)  # its name is given to what is scaled
            whole: list[Value] = []
            for x in (scaled, decay, writes, reads):
                with tape.alive(*whole, residual):
                    padded = _padded(builder, x, part)
                    moves = x is not decay and not builder.settings.regime.one_scan
                    whole.append(_viewed(builder, padded, moves=moves))
            tape.touch(scaled, decay)
    return residual, _Chunked(*whole)


def _repeated(builder: Builder, x: Value, part: StateSpace) -> Value:
    """Return what a group shares once for each of its heads, in fp32."""
    wide = builder.cast(x, 4)
    way = SAME if part.num_groups == part.num_heads else NEW
    out = builder.fresh(wide, part.num_heads * part.state_size)
    return builder.tape.apply("repeat", [(wide, way)], out, traits=SAVES_NOTHING)


def _padded(builder: Builder, x: Value, part: StateSpace) -> Value:
    """Return a tensor padded to whole chunks, a copy in any case."""
    return builder.tape.apply("pad", [(x, NEW)], _chunks(builder, x.width, part), traits=SAVES_NOTHING)


def _viewed(builder: Builder, x: Value, *, moves: bool) -> Value:
    """Return another look at a tensor, into whose order of dimensions its gradient is copied where that is another."""
    return builder.tape.apply("look", [(x, NEW if moves else SAME)], builder.tape.view(x), traits=SAVES_NOTHING)


def _residual(builder: Builder, heads: Value, part: StateSpace) -> Value:
    """Return heads, in whole chunks, times a parameter of each."""
    tape, weight = builder.tape, builder.weight(f"{part.prefix}.D")
    padded = _padded(builder, heads, part)
    with tape.alive(padded):
        full = [(padded.quantity, padded.coefficient)] if weight.trainable else []
        saves = [padded] if weight.trainable else []
        traits = Traits(packs=True, workspace=full)
        return tape.apply("mul", [(padded, NEW)], builder.fresh(padded), saves, [weight], traits=traits)


def _segments(builder: Builder, x: Value, quantity: Quantity, size: int, mask: Quantity, masked: int) -> Value:
    """Return the exponential of sums between any two places of ``x``.

    Args:
        quantity: What pairs are proportional to.
        size: Places that each place is paired with, for each unit of that.
        mask: What a mask of pairs is proportional to.
        masked: Its bytes for each unit.
    """
    tape = builder.tape
    expanded = Value(x.storage, quantity, size * x.coefficient if quantity is x.quantity else x.coefficient, 4)

    def masks() -> tuple[Value, Value]:
        one = tape.make("mask", tape.value(mask, masked, 1), scratch=[(mask, masked)])
        return one, tape.make("not", tape.value(mask, masked, 1), one)

    tape.apply("expand", [(x, NEW)], expanded, traits=SAVES_NOTHING)
    lower, other = masks()
    with tape.alive(lower):
        first = builder.pointwise("masked fill", expanded, (other,))
        with tape.alive(first):
            total = tape.apply("cumsum", [(first, NEW)], builder.fresh(first), traits=_doubled(first))
            with tape.alive(total):
                second, other = masks()
                tape.touch(lower)
                with tape.alive(second):
                    last = builder.pointwise("masked fill", total, (other,))
    out = builder.fresh(last)
    return tape.apply("exp", [(last, NEW)], out, [out])


def _product(
    builder: Builder,
    left: Value,
    right: Value,
    width: int,
    copies: tuple[bool, bool],
    quantity: Quantity = CHUNKS,
) -> Value:
    """Return products of stacked matrices, which copy what does not lie as they want it.

    Args:
        width: Elements of the result for each unit of ``quantity``.
    """
    tape = builder.tape
    with tape.alive(left, right):
        low = builder.lowered(left)
        with tape.alive(low):
            other = builder.lowered(right)
        with tape.alive(low, other):
            first = builder.copied(low, moves=copies[0])
            with tape.alive(first):
                second = builder.copied(other, moves=copies[1])
                out = tape.value(quantity, width, builder.compute if builder.settings.autocast else 4)
                ways, saves = [(second, VIEW), (first, VIEW)], builder.factors(first, second)
                return tape.apply("matmul", ways, out, saves, traits=Traits(product=True, batched=True))


def _handed_on(builder: Builder, own: Value, total: Value, part: StateSpace) -> tuple[Value, Value, Value]:
    """Return the states before the first chunk and before each, and the share of earlier ones that is left at each.

    Args:
        own: What each chunk adds to the states.
        total: The logarithm of the decay, summed up within chunks.
    """
    tape, numbers = builder.tape, part.inner_size * part.state_size
    with tape.alive(own):
        first = tape.make("zeros", tape.value(Quantity.SEQUENCES, numbers, own.element_bytes), own)
        joined = tape.value(BOUNDS, numbers, own.element_bytes)
        tape.apply("cat", [(own, SAME)], joined, traits=SAVES_NOTHING)
    with tape.alive(joined):
        ends = Value(total.storage, CHUNKS, part.num_heads * 4, 4)
        tape.apply("select", [(total, NEW)], ends, traits=SAVES_NOTHING)
        padded = tape.apply("pad", [(ends, NEW)], tape.value(BOUNDS, part.num_heads, 4), traits=SAVES_NOTHING)
        share = _segments(builder, padded, PAIRS, 1, Quantity.SCAN_SQUARE, 1)
        with tape.alive(share):
            several = not builder.settings.regime.one_sequence
            states = _product(builder, share, joined, numbers, (False, several), BOUNDS)
            states = _viewed(builder, states, moves=several)
    before = Value(states.storage, CHUNKS, numbers * states.element_bytes, states.element_bytes)
    tape.apply("slice", [(states, NEW)], before, traits=SAVES_NOTHING)
    return first, before, share
