"""A whole state space layer as one function of mamba-ssm on a tape, from its projected input to the projection of its result.

Source: ``MambaSplitConv1dScanCombinedFn`` in mamba_ssm/ops/triton/ssd_combined.py (2.3.2), lines 815 to 974, and what it calls there, in
ssd_chunk_state.py, ssd_chunk_scan.py, ssd_bmm.py, ssd_state_passing.py and layernorm_gated.py; ``causal_conv1d_fwd_function`` in
causal_conv1d/cpp_functions.py (1.7.0).
"""

from typing import NamedTuple

from memplan.model.spec import ModelSpec
from memplan.model.state_space import MULTIPROCESSORS, StateSpace
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.delta.state_space_scan import CHUNKS
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, Sizes, Traits, Value, Weight
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

ROWS_OF_TILES, STATES_OF_TILES = 32, 64
"""Least rows of a chunk, and numbers of a state, that one program takes, each of which has a sum of its own (``BLOCK_SIZE_min`` in
``_chunk_scan_bwd_ddAcs_stable`` and ``_state_passing_bwd``)."""


class _Sizes(NamedTuple):
    """Bytes of tensors of the function, for each token or for each chunk."""

    heads: int  # Of a token's heads
    convolved: int  # Of what is convolved
    steps: int  # Of a chunk's steps in fp32
    scores: int  # Of a chunk's products of what reads and what writes, in fp32
    wide: int  # Of a chunk's states in fp32
    narrow: int  # Of these in the dtype of products
    groups: int  # Of a token's gradient of what reads, or writes, in fp32


def scan_splits(spec: ModelSpec, setup: TrainingSetup, batch: int, length: int) -> int:
    """Return into how many parts backward splits the heads of a group, each of which has a gradient of what they share; 0 without the kernels.

    Formula:
        ``ceil(h / max(min(ceil(b s H / 132), h), 1))`` for ``b s`` chunks, ``H`` heads, of which ``h`` share a group.
    """
    part = spec.state_space
    if part is None or setup.profile.linear_attention != "mamba":
        return 0
    shared, chunks = part.num_heads // part.num_groups, batch * ceil_div(length, part.chunk_tokens)
    return ceil_div(shared, max(min(ceil_div(chunks * part.num_heads, MULTIPROCESSORS), shared), 1))


def fused_state_space(builder: Builder, projected: Value, rate: Value, part: StateSpace) -> Value:
    """Return the projection of what a layer reads off its states; saved are what it is given and what it reads off them."""
    tape, names = builder.tape, _names(builder, part)
    sizes = _sizes_of(part, projected.element_bytes)
    mixed = tape.make("conv1d", builder.fresh(projected, part.convolved_size), projected)
    with tape.alive(mixed):
        step, total = (tape.value(CHUNKS, sizes.steps // 4, 4) for _ in range(2))
        tape.make("cumsum", total, mixed)
        with tape.alive(total):
            tape.make("step", step, mixed)
        with tape.alive(step, total):
            out = _scanned(builder, projected, mixed, part, sizes)
        with tape.alive(out):
            gated = builder.fresh(projected, part.inner_size)
            saved = [projected, out]
            if part.normalised:
                lengths = tape.value(TOKENS, part.num_groups, 4)
                tape.make("lengths", lengths, out)
                saved.append(lengths)
            tape.make("gated", gated, out)
            with tape.alive(*saved, gated):
                result = builder.fresh(projected, builder.settings.hidden_size)
                *others, fullest = _fullest_last(part, _moments(builder, names, part, sizes))
                late = [weight for name, weight in names if name.startswith(("out_proj", "conv1d"))]
                formed = sum(weight.formed_bytes for weight in late if weight.trainable)
                ways, traits = (
                    [(projected, NEW), (rate, NEW)],
                    Traits(custom=True, workspace=[*fullest, (ONE, -formed)]),
                )
                weights = [weight for _, weight in names]
                result = tape.apply("state space", ways, result, [*saved, rate], weights, traits=traits)
                return _passed_back(builder, result, projected, others)


def _names(builder: Builder, part: StateSpace) -> list[tuple[str, Weight]]:
    """Return the parameters that the function reads, those first whose gradients come with the scan's."""
    names = ["dt_bias", "D", *(["norm.weight"] if part.normalised else [])]
    late = ["out_proj.weight", *(["out_proj.bias"] if part.output_bias else []), "conv1d.weight"]
    late += ["conv1d.bias"] if part.convolution_bias else []
    return [(name, builder.weight(f"{part.prefix}.{name}")) for name in (*names, *late)]


def _sizes_of(part: StateSpace, element_bytes: int) -> _Sizes:
    chunk, numbers = part.chunk_tokens, part.inner_size * part.state_size
    return _Sizes(
        heads=part.inner_size * element_bytes,
        convolved=part.convolved_size * element_bytes,
        steps=part.num_heads * chunk * 4,
        scores=part.num_groups * chunk * chunk * 4,
        wide=numbers * 4,
        narrow=numbers * element_bytes,
        groups=part.group_size * 4,
    )


def _scanned(builder: Builder, like: Value, mixed: Value, part: StateSpace, sizes: _Sizes) -> Value:
    """Return what is read off the states, which are formed in fp32 for each chunk and then passed on."""
    tape, numbers = builder.tape, part.inner_size * part.state_size
    own = tape.make("states", tape.value(CHUNKS, numbers, 4), mixed)
    with tape.alive(own):
        passed = tape.make("passed", tape.value(CHUNKS, numbers, like.element_bytes), own)
        with tape.alive(passed):
            last = tape.make("last", tape.value(Quantity.SEQUENCES, numbers, 4), own)
    with tape.alive(passed, last):
        scores = tape.make("scores", tape.value(CHUNKS, sizes.scores // 4, 4), mixed)
        with tape.alive(scores):
            out = tape.make("scan", builder.fresh(like, part.inner_size), scores)
            if not part.normalised:
                return tape.make("scan", builder.fresh(like, part.inner_size), out)
    return out


def _passed_back(builder: Builder, x: Value, projected: Value, moments: list[Sizes]) -> Value:
    """Return ``x`` behind steps that do nothing but have, on their way back, what the function's backward has at other moments."""
    given = (projected.quantity, projected.coefficient)
    for moment in moments:
        traits = Traits(packs=False, workspace=[given, *moment])
        x = builder.tape.apply("state space", [(x, SAME)], builder.tape.view(x), traits=traits)
    return x


def _fullest_last(part: StateSpace, moments: list[Sizes]) -> list[Sizes]:
    """Return moments with that behind all others which is the fullest where chunks are full."""

    def total(moment: Sizes) -> int:
        chunk = {CHUNKS: 1, TOKENS: part.chunk_tokens}
        return sum(size * chunk.get(quantity, 0) for quantity, size in moment)

    return sorted(moments, key=total)


def _moments(builder: Builder, names: list[tuple[str, Weight]], part: StateSpace, sizes: _Sizes) -> list[Sizes]:
    """Return what is there as states are passed back, as heads share gradients, as pairs do, and as the last product's weight has its own."""
    number, step = part.num_heads * 4, sizes.heads // part.head_dim
    splits, rows = builder.settings.regime.scan_splits, ceil_div(part.chunk_tokens, ROWS_OF_TILES)
    given = [(TOKENS, (3 if part.normalised else 4) * sizes.heads + 2 * sizes.convolved + step)]
    scan = [*given, (CHUNKS, 2 * sizes.steps + sizes.scores), (Quantity.SEQUENCES, sizes.wide)]
    converted = sizes.narrow if sizes.narrow < sizes.wide else 0
    tiles = number * (ceil_div(part.head_dim * part.state_size, STATES_OF_TILES) + 1)
    passed = [*scan, (CHUNKS, 2 * sizes.narrow + number)]
    shared = [*passed, (TOKENS, 2 * sizes.groups)]
    last = next(weight for name, weight in names if name == "out_proj.weight")
    product = (ONE, last.rows * last.columns * step // part.num_heads)
    return [
        [*scan, (CHUNKS, 2 * sizes.wide + sizes.narrow + converted + tiles)],
        [*passed, (CHUNKS, 3 * sizes.steps), (TOKENS, (splits + 2) * sizes.groups)],
        [*shared, (CHUNKS, 3 * sizes.steps + (splits + 1) * sizes.scores)],
        [*shared, (CHUNKS, (rows + 5) * sizes.steps + sizes.scores)],
        [(TOKENS, 3 * sizes.heads + 2 * sizes.convolved), product],
    ]
