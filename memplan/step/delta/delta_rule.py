"""The gated delta rule on a tape, as transformers' own code computes it: in fp32, pairs within chunks, a state between them.

Source: ``torch_chunk_gated_delta_rule`` and ``l2norm`` in transformers 5.23.0, models/qwen3_next/modeling_qwen3_next.py.
"""

from typing import NamedTuple

from memplan.model.gated_delta_net import CHUNK_TOKENS, GatedDeltaNet
from memplan.step.blocks.builder import Builder
from memplan.step.tapes.linear_forms import LATE_CHUNKS, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, VIEW, Traits, Value

CHUNKS, SEQUENCES, EARLIER = Quantity.DELTA_CHUNKS, Quantity.SEQUENCES, Quantity.EARLIER_DELTA_CHUNKS


class DeltaInputs(NamedTuple):
    """What the rule is given for each token: query, key, value, the decay's logarithm and the correction of each head."""

    query: Value
    key: Value
    value: Value
    decay: Value
    beta: Value


class _Chunked(NamedTuple):
    """What the scan over chunks reads: values and keys of the solved system, query, scores, key, and decay of whole chunks."""

    values: Value
    keys: Value
    query: Value
    scores: Value
    key: Value
    decay: Value
    apart: bool  # Whether a chunk of query and key lies apart, sequence by sequence and head by head, as a product does not take it

    @property
    def tensors(self) -> tuple[Value, ...]:
        """All of them."""
        return self[:-1]


def chunked_rule(builder: Builder, given: DeltaInputs, part: GatedDeltaNet) -> tuple[Value, tuple[Value, ...]]:
    """Return what the rule reads off its state for each token, in the dtype of the query, and its last state where a cache is given it."""
    tape, times = builder.tape, part.num_value_heads // part.num_key_heads
    query, key, value, beta = _widened(builder, given, times)
    query, key = _unit(builder, query, part), _unit(builder, key, part)
    with tape.alive(key, value, beta):
        query = builder.pointwise("scale", query)
    apart = (
        given.query.element_bytes == 4 and not builder.settings.regime.pads_delta
    )  # what is cast or padded lies in order
    query, key, value = _padded(builder, query, key, value)
    query.apart = key.apart = apart and _lies_apart(builder, part)
    beta, decay = _padded(builder, beta, given.decay)
    with tape.alive(value, beta, decay):
        parts, named = _within_chunks(builder, DeltaInputs(query, key, value, decay, beta), part)
        parts = parts._replace(apart=query.apart and times > 1 and not builder.settings.regime.one_sequence)
        with tape.alive(*named, *parts.tensors):
            out, last = _scan(builder, parts, part)
            flat = _chunks(builder, part.value_size, 4)
            with tape.alive(*last):
                tape.apply("flatten", [(out, SAME)], flat, traits=SAVES_NOTHING)
            cut = Value(flat.storage, given.value.quantity, part.value_size * 4, 4)
            with tape.alive(*last):
                way = NEW if builder.settings.regime.pads_delta else SAME
                tape.apply("slice", [(flat, way)], cut, traits=SAVES_NOTHING)
                read = builder.cast(cut, given.query.element_bytes, foreign=given.query.foreign)
                return read, last[-1:] if builder.settings.cache != "none" else ()


def _lies_apart(builder: Builder, part: GatedDeltaNet) -> bool:
    """Tell whether chunks of query and key are no stack of matrices where heads lie between tokens, or tokens within a head's dimensions."""
    several, chunks = not builder.settings.regime.one_sequence, builder.settings.regime.delta_chunks > 1
    heads = part.num_value_heads > 1
    return heads and (several or chunks) if part.num_key_heads < part.num_value_heads else chunks and (several or heads)


def _chunks(builder: Builder, width: int, element_bytes: int) -> Value:
    """Return a tensor of so many elements for each token, padded to whole chunks."""
    return builder.tape.value(CHUNKS, CHUNK_TOKENS * width, element_bytes)


def _widened(builder: Builder, given: DeltaInputs, times: int) -> tuple[Value, Value, Value, Value]:
    """Return query, key, value and correction in fp32, query and key once for each value head."""
    tape = builder.tape
    query, key, value, _, beta = given
    if times > 1:
        query = tape.apply("repeat", [(query, NEW)], builder.fresh(query, query.width * times), traits=SAVES_NOTHING)
        with tape.alive(query):
            key = tape.apply("repeat", [(key, NEW)], builder.fresh(key, key.width * times), traits=SAVES_NOTHING)
    with tape.alive(query, key):
        wide = [builder.cast(query, 4)]
        for x in (key, value, beta):
            with tape.alive(*wide):
                wide.append(builder.cast(x, 4))
    query, key, value, beta = wide
    return query, key, value, beta


def _unit(builder: Builder, x: Value, part: GatedDeltaNet) -> Value:
    """Return each head of ``x`` divided by its length."""
    tape, full = builder.tape, [(x.quantity, x.coefficient)]
    with tape.alive(x):
        total = tape.value(x.quantity, part.num_value_heads, 4)
        tape.apply("sum of squares", [(x, NEW), (x, NEW)], total, [x], traits=Traits(scratch=full))
        inverse = builder.fresh(total)
        tape.apply("rsqrt", [(total, NEW)], inverse, [inverse])
        ways = [(x, NEW), (inverse, NEW)]
        return tape.apply("mul", ways, builder.fresh(x), [x, inverse], traits=Traits(workspace=full))


def _padded(builder: Builder, *given: Value) -> tuple[Value, ...]:
    """Return tensors padded to whole chunks, copies in any case; the given ones are there until all are made."""
    tape = builder.tape
    with tape.alive(*given):
        made: list[Value] = []
        for x in given:
            with tape.alive(*made):
                made.append(tape.apply("pad", [(x, NEW)], _chunks(builder, x.width, 4), traits=SAVES_NOTHING))
        with tape.alive(*made):
            return tuple(made)


def _scaled(builder: Builder, x: Value, factor: Value) -> Value:
    """Return ``x`` times one number for each of its rows, whose gradient is summed from a whole product."""
    full = [(x.quantity, x.coefficient)] if factor.needs_gradient else []
    saves = builder.factors(x, factor)
    return builder.tape.apply("mul", [(x, NEW), (factor, NEW)], builder.fresh(x), saves, traits=Traits(workspace=full))


def _times(builder: Builder, first: Value, second: Value, out: Value) -> Value:
    """Return a product of matrices."""
    tape = builder.tape
    with tape.alive(first, second):
        low = builder.lowered(first)
        with tape.alive(low):
            other = builder.lowered(second)
        with tape.alive(low, other):
            low = builder.copied(low, moves=first.apart)
            with tape.alive(low):
                other = builder.copied(other, moves=second.apart)
            out = tape.value(out.quantity, out.width, _product_bytes(builder))
            ways, saves = [(low, VIEW), (other, VIEW)], builder.factors(low, other)
            return tape.apply("matmul", ways, out, saves, traits=Traits(product=True))


def _within_chunks(builder: Builder, given: DeltaInputs, part: GatedDeltaNet) -> tuple[_Chunked, tuple[Value, ...]]:
    """Return what the scan reads, and what has names besides until the rule returns."""
    tape, heads = builder.tape, part.num_value_heads
    query, key, value, decay, beta = given
    new_value = _scaled(builder, value, beta)
    with tape.alive(new_value):
        new_key = _scaled(builder, key, beta)
    with tape.alive(new_value, new_key):
        square = CHUNK_TOKENS * CHUNK_TOKENS
        mask = tape.make("mask", builder.constant(square, 1), scratch=[(Quantity.ONE, square)])
        total = tape.apply("cumsum", [(decay, NEW)], builder.fresh(decay), traits=SAVES_NOTHING)
        with tape.alive(mask, total):
            pairs = _pairs(builder, total, mask, heads)
            with tape.alive(pairs):
                system = builder.product(_times(builder, new_key, key, pairs), pairs)
                with tape.alive(system):
                    scores = builder.product(_times(builder, query, key, pairs), pairs)
                    with tape.alive(scores):
                        power = builder.fresh(total)
                        tape.apply("exp", [(total, NEW)], power, [power])
                        decayed = _scaled(builder, new_key, power)
                        with tape.alive(decayed):
                            values = _solved(builder, system, new_value)
                            with tape.alive(values):
                                keys = _solved(builder, system, decayed)
                            named = (new_value, new_key, mask, total, pairs, system, decayed)
                            with tape.alive(values, keys):
                                return _between(builder, given, total, values, keys, scores), named


def _pairs(builder: Builder, total: Value, mask: Value, heads: int) -> Value:
    """Return the decay between any two tokens of a chunk."""
    tape = builder.tape
    differences = tape.value(CHUNKS, CHUNK_TOKENS * CHUNK_TOKENS * heads, 4)
    full = [(CHUNKS, differences.coefficient)]
    tape.apply("sub", [(total, NEW), (total, NEW)], differences, traits=Traits(packs=False, workspace=full))
    masked = builder.pointwise("masked fill", differences, (mask,))
    pairs = builder.fresh(masked)
    return tape.apply("exp", [(masked, NEW)], pairs, [pairs])


def _solved(builder: Builder, system: Value, right: Value) -> Value:
    """Return the solution of triangular systems; the gradient of the matrix passes through three more of its size."""
    # Source: ``linalg_solve_triangular_backward`` in torch/csrc/autograd/FunctionsManual.cpp (v2.13.0).
    out = builder.fresh(right)
    out.apart = False
    full = [(system.quantity, system.coefficient)]
    ways = [(system, NEW), (right, NEW)]
    return builder.tape.apply("solve triangular", ways, out, [system, out], traits=Traits(workspace=full))


def _between(builder: Builder, given: DeltaInputs, total: Value, values: Value, keys: Value, scores: Value) -> _Chunked:
    """Return what the scan reads, the decay to the ends of chunks multiplied into queries and keys."""
    tape = builder.tape
    power = builder.fresh(total)
    tape.apply("exp", [(total, NEW)], power, [power])
    query = _scaled(builder, given.query, power)
    with tape.alive(query):
        before = len(tape.nodes)
        rest = tape.apply("sub", [(total, NEW)], builder.fresh(total), traits=SAVES_NOTHING)
        power = builder.fresh(total)
        tape.apply("exp", [(rest, NEW)], power, [power])
        key = _scaled(builder, given.key, power)
        with tape.alive(key):
            whole = tape.value(CHUNKS, total.width // CHUNK_TOKENS, 4)
            tape.apply("exp", [(total, NEW)], whole, [whole])
            if builder.settings.regime.delta_chunks == 1:  # of which only the last state is made
                _keep_graph(builder, before)
            return _Chunked(values, keys, query, scores, key, whole, apart=False)


def _keep_graph(builder: Builder, before: int) -> None:
    """Note that what nodes have saved from one on, by number, stays as long as a cache: its copy of the last state has their graph,
    and backward does not come to them.
    """
    if builder.settings.cache != "none":
        builder.tape.cached.update(own for node in builder.tape.nodes[before:] for own in node.saved)


# -------------------------------------------------------------------- from chunk to chunk
def _scan(builder: Builder, parts: _Chunked, part: GatedDeltaNet) -> tuple[Value, tuple[Value, ...]]:
    """Return the results of all chunks, and what has names of the last; those between the first and the last few are one operation."""
    tape, chunks = builder.tape, builder.settings.regime.delta_chunks
    state = tape.value(SEQUENCES, part.num_value_heads * part.key_head_dim * part.value_head_dim, 4)
    tape.make("zeros", state)
    with tape.alive(state):
        out = tape.make("zeros", _chunks(builder, part.value_size, 4))
    named: tuple[Value, ...] = ()
    explicit = min(chunks, LATE_CHUNKS + 1)
    for number in range(explicit):
        if number == 1 and chunks > explicit:
            with tape.alive(out, state, *named):
                out, state = _between_first_and_last(builder, parts, out, state)
        with tape.alive(out, state):
            out, state, named = _chunk(builder, parts, out, state, named, ends=number + 1 == explicit)
    return out, (*named, state)


def _selected(builder: Builder, x: Value, *, apart: bool = False) -> Value:
    """Return one chunk of ``x``, whose gradient is a whole tensor."""
    chunk = Value(x.storage, SEQUENCES, x.coefficient, x.element_bytes)
    chunk.apart = apart
    return builder.tape.apply("select", [(x, NEW)], chunk, traits=SAVES_NOTHING)


def _chunk(
    builder: Builder, parts: _Chunked, out: Value, state: Value, named: tuple[Value, ...], *, ends: bool
) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return results and state after one chunk, and what has names until the next; nothing reads the state after the last.

    Args:
        named: What the chunk before has left names for.
    """
    tape = builder.tape
    value = _selected(builder, parts.values)
    known = _times(builder, _selected(builder, parts.keys), state, value)
    new = builder.fresh(value)
    wide = [(value.quantity, value.coefficient)] if known.element_bytes < 4 else []
    ways = [(value, SAME), (known, NEW)]
    tape.apply("sub", ways, new, traits=Traits(packs=False, workspace=wide))
    tape.touch(*named)
    with tape.alive(new):
        read = _times(builder, _selected(builder, parts.query, apart=parts.apart), state, value)
        tape.touch(*named[1:])
        with tape.alive(read):
            within = _times(builder, _selected(builder, parts.scores), new, value)
            out = _put(builder, out, builder.add(read, within))
            state = _handed_on(builder, parts, state, new, ends=ends)
            return out, state, (new, read)


def _put(builder: Builder, out: Value, chunk: Value) -> Value:
    """Return results with those of one chunk put in: backward copies the whole gradient, and the chunk's out of it; where others were
    in it before, zeros take the chunk's place.
    """
    # Source: ``CopySlices::apply_impl`` and ``CopyBackwards::apply`` in torch/csrc/autograd/functions/tensor.cpp (v2.13.0).
    size = chunk.width * 4
    scratch = [(chunk.quantity, size)] if chunk.element_bytes < 4 else []
    scratch += [(chunk.quantity, size) if out.needs_gradient else (out.quantity, out.coefficient)]
    ways, traits = [(out, NEW), (chunk, NEW)], Traits(packs=False, workspace=scratch)
    return builder.tape.apply("copy into", ways, builder.tape.view(out), traits=traits)


def _handed_on(builder: Builder, parts: _Chunked, state: Value, new: Value, *, ends: bool) -> Value:
    """Return the state after a chunk; of the last one the graph goes with it, unless a cache has a copy of it."""
    tape = builder.tape
    nodes, operations = len(tape.nodes), len(tape.operations)
    retained = _scaled(builder, state, _selected(builder, parts.decay))
    with tape.alive(state, retained):
        handed = builder.add(retained, _times(builder, _selected(builder, parts.key, apart=parts.apart), new, state))
    if ends:
        _keep_graph(builder, nodes)
    if ends and builder.settings.cache == "none":
        handed.needs_gradient = False
        tape.graph_use |= dict.fromkeys(tape.cut(nodes, operations), len(tape.operations) - 1)
    return handed


def _product_bytes(builder: Builder) -> int:
    return builder.compute if builder.settings.autocast else 4


def _between_first_and_last(builder: Builder, parts: _Chunked, out: Value, state: Value) -> tuple[Value, Value]:
    """Return results and state after the chunks between the first and the last few, which are alike.

    Each saves its state and its new values, or under autocast a copy of each factor of its products, and its state where the decay
    has a gradient. In backward the gradients of what all chunks read are there already, and are added to.
    """
    tape, narrow = builder.tape, builder.compute
    autocast = builder.settings.under_autocast
    saved = [tape.value(EARLIER, state.width, 4)] if parts.decay.needs_gradient or not autocast else []
    if autocast:
        factors = (state, state, parts.keys, parts.query, parts.key, parts.scores, parts.values, parts.values)
        saved += [tape.value(EARLIER, x.width, narrow) for x in factors]
    else:
        saved.append(tape.value(EARLIER, parts.values.width, 4))
        saved += [tape.value(EARLIER, x.width, 4) for x in (parts.query, parts.key) if parts.apart]
    whole, later = tape.view(out), builder.fresh(state)
    ways = [(x, SAME) for x in (out, *parts.tensors)]
    tape.apply("chunks between", [*ways, (state, NEW)], (whole, later))
    if node := tape.operations[-1].node:  # where no graph is built, each chunk's are gone before the next
        node.saved, node.packs = tuple(x.storage for x in saved), True
    return whole, later
