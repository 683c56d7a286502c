"""A model's embedding on tape. Equal ones share theirs."""

from dataclasses import replace
from functools import lru_cache

from memplan.model.spec import Norm
from memplan.step.blocks.adapted_embedding import adapted_embedding, has_adapter, row_sums
from memplan.step.blocks.block_settings import BlockSettings
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.blocks.norms import normalised
from memplan.step.divided.shared_ends_and_rows import divided_embedding
from memplan.step.ends.encoder_ends import shared_bias, summed_embeddings
from memplan.step.ends.end_settings import EndSettings
from memplan.step.ends.head_on_tape import MOST_ENDS, Named
from memplan.step.kernels.layer_arguments import position_quantity
from memplan.step.layers.handed_down import layer_inputs
from memplan.step.playing.section import Section
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value, Weight
from memplan.units import ceil_div


@lru_cache(maxsize=MOST_ENDS)
def embedding_section(settings: EndSettings, weights: Named) -> Section:
    """Return the embedding on tape, the same one each time.

    Args:
        weights: The parameters that no layer has, by name.
    """
    builder = Builder(settings.block, dict(weights))
    tape, names, block = builder.tape, settings.block.names, settings.block
    tape.instant = "end of backward"
    weight = replace(builder.weight(f"{names.embedding}.weight"), copy_bytes=0)
    if settings.tied and weight.trainable and not settings.value_head:
        # What becomes of the sum of both gradients is in tied_sum; coded ones are stored one by one.
        formed = weight.formed_bytes
        waits = replace(weight, delayed=True, converted=False, gradient_bytes=formed, gradient_scale_bytes=0)
        weight = replace(weight, shared=True) if weight.coded or settings.backward_at_once else waits
    entry = tape.part_of(TOKENS, 1, 8, needs_gradient=False)
    sums = row_sums(block.hidden_size)
    if block.divided:
        return Section(tape, entry, divided_embedding(builder, weight, Traits(workspace=sums)))
    x = tape.value(TOKENS, block.hidden_size, block.embedded_bytes)
    table, decoding = _looked_up(weight, TOKENS)
    with tape.alive(*_gathered_codes(builder, weight, TOKENS)):
        tape.apply("embedding", [], x, weights=[table], traits=Traits(scratch=decoding, workspace=sums))
    # A library that asks for a gradient asks for that of what its module returns, which may scale where there is a scale.
    scales = settings.embedding_scale and not block.code.scales_embedded
    adapter = has_adapter(names.embedding, builder.weights)
    asks = settings.input_gradients and (settings.table_gradients or not adapter)
    if asks and not scales and not x.needs_gradient:
        x.needs_gradient, tape.leaf = True, x
    if adapter:
        x = adapted_embedding(builder, x, names.embedding, scales=scales, asks=asks)
    if f"{names.embedding}.norm.weight" in builder.weights:
        x = normalised(builder, x, Norm("layer"), f"{names.embedding}.norm", block.hidden_size)
    if settings.encoder is not None and settings.learned_positions:
        x = summed_embeddings(builder, x, settings)
        if settings.encoder.distance_buckets:
            shared_bias(builder, x)
        return Section(tape, entry, x)
    if settings.embedding_norm is not None:
        x = normalised(builder, x, settings.embedding_norm, names.embedding_norm, block.hidden_size)
    if settings.learned_positions:
        x = _with_positions(builder, x)
    if settings.embedding_scale and not (scales and adapter):
        x = builder.pointwise("scale", x)
        if settings.input_gradients and not x.needs_gradient:
            x.needs_gradient = x.leaf = True
    if settings.layer_input:
        _embed_layers(builder, x, settings)
    return Section(tape, entry, builder.dropped(x, settings.embedding_dropout))


def _embed_layers(builder: Builder, x: Value, settings: EndSettings) -> None:
    """Make the embeddings of every layer, beside the embedded tokens ``x``."""
    tape, name = builder.tape, builder.settings.names.layer_embedding
    tape.instant = "layer 1 backward"  # behind the layers' own, and before what is left is the embedding's alone
    table, decoding = _looked_up(builder.weight(f"{name}.weight"), TOKENS)
    rows = tape.value(TOKENS, table.columns, builder.settings.embedded_bytes)
    with tape.alive(x):
        tape.apply(
            "embedding of layers",
            [],
            rows,
            weights=[table],
            traits=Traits(scratch=decoding, workspace=row_sums(table.columns)),
        )
        rows = builder.pointwise("scale", rows)
        tape.layer_inputs = layer_inputs(builder, x, rows, settings.layer_input, settings.final_norm)
    if tape.layer_inputs.needs_gradient:
        tape.awaited.append((tape.layer_inputs, tape.layer_inputs.coefficient))


def _looked_up(table: Weight, places: Quantity) -> tuple[Weight, list[tuple[Quantity, int]]]:
    """Return a table whose rows alone are decoded, and what that takes, in forward alone."""
    each, once = table.row_decoding
    at_once = Quantity.DECODED_TOKENS if places is TOKENS else Quantity.DECODED_POSITIONS
    sizes = [*[(at_once, size) for size in each], *([(Quantity.ONE, once)] if once else [])]
    return replace(table, copy_bytes=0, decoding_sizes=(), decoded_bytes=0, scales_bytes=0), sizes


def _gathered_codes(builder: Builder, table: Weight, places: Quantity) -> list[Value]:
    """Gather the codes of the rows that are looked up; return them where decoding reads them, and they stay until it is done.

    Source:
        ``rows`` in memplan/muon/weights/quantised.py.
    """
    if not table.coded or table.own_bytes % table.rows:
        return []
    codes = builder.tape.value(places, table.own_bytes // table.rows, 1, Part.TEMPORARIES)
    builder.tape.make("look-up", codes)
    return [codes] if table.decoding_sizes else []


def _with_positions(builder: Builder, x: Value) -> Value:
    """Return the embedding with that of learned positions added."""
    tape, block, places = builder.tape, builder.settings, position_quantity(builder.settings.code)
    weight = builder.weight(f"{block.names.positions}.weight")
    table, decoding = _looked_up(weight, places)
    rows = tape.value(places, block.hidden_size, block.residual_bytes)
    ids = [tape.value(places, 1, 8)] if block.code.forms_tables else []
    with tape.alive(x):
        sums = _position_sums(block, 0 if places is Quantity.POSITIONS else table.rows)
        traits = Traits(scratch=decoding, workspace=sums)
        with tape.alive(*_gathered_codes(builder, weight, places)):
            tape.apply("position embedding", [], rows, ids if table.trainable else [], [table], traits)
        ways = [(x, SAME), (rows, SAME if block.regime.one_sequence or places is TOKENS else NEW)]
        tape.named = tuple([value for value in (x, rows) if block.code.forms_tables and value is not tape.leaf])
        return tape.apply("add", ways, builder.fresh(x), traits=SAVES_NOTHING)


def _position_sums(block: BlockSettings, rows: int) -> list[tuple[Quantity, int]]:
    """Return what sorting positions takes: partial sums are one for each position that occurs, and for ten.

    Args:
        rows: Of the table, each of which many tokens have; 0 where every position occurs once.
    """
    if not block.regime.sorts_positions:
        return []
    sums = 8 + 4 * block.hidden_size
    if not rows:
        return [(Quantity.POSITIONS, 24 + 16 + sums + ceil_div(sums, 10))]
    return [(TOKENS, 24 + ceil_div(sums, 10)), (Quantity.ONE, (16 + sums) * rows)]
