"""The ends of an encoder on tape: types and positions added to embedded tokens; one result for each row, of an encoder or not."""

from dataclasses import replace

from memplan.model.parameter_tensors import DISTANCES
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.blocks.norms import normalised
from memplan.step.ends.end_settings import EndSettings
from memplan.step.ends.pooled_rows import pooled
from memplan.step.losses.preference_loss import last_score
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value, Weight
from memplan.units import ceil_div

ID_BYTES = 8


def of_rows(builder: Builder, tokens: Value, settings: EndSettings) -> Value:
    """Record what is made of each row of tokens: its embedding, or the loss over an encoder's scores of it; return that."""
    if settings.encoder is not None and settings.encoder.pools and not settings.encoder.reads_pooled:
        _idle_pooler(builder, tokens)
    if settings.pooling is not None:
        return pooled(builder, tokens, settings.pooling)
    return _class_loss(builder, tokens, settings)


def summed_embeddings(builder: Builder, words: Value, settings: EndSettings) -> Value:
    """Return embedded tokens with their types and positions added, normalised; the module has names for all three.

    Source:
        ``BertEmbeddings.forward`` in transformers/models/bert/modeling_bert.py, ``RobertaEmbeddings.forward`` in models/roberta (5.24.0).
    """
    tape, block, named = builder.tape, settings.block, [words]
    assert settings.encoder is not None
    assert settings.embedding_norm is not None
    numbers = [tape.make("positions", tape.value(TOKENS, 1, ID_BYTES))] if block.code.counts_positions else []
    total = words
    with tape.alive(*numbers):
        if settings.encoder.token_types:
            given = (
                [] if settings.encoder.typed_rows else [tape.make("types", tape.value(TOKENS, 1, ID_BYTES), *numbers)]
            )
            types = builder.weight(f"{block.names.token_types}.weight")
            with tape.alive(*named):
                rows = _rows(builder, "type embedding", types, TOKENS, given, sorts=block.regime.sorts_types)
            total, named = builder.add(total, rows), [*named, rows, *given]
        positions = builder.weight(f"{block.names.positions}.weight")
        places = TOKENS if numbers else Quantity.POSITIONS
        with tape.alive(*named, total):
            rows = _rows(builder, "position embedding", positions, places, numbers, sorts=block.regime.sorts_positions)
            ways = [(total, SAME), (rows, SAME if numbers or block.regime.one_sequence else NEW)]
            total = tape.apply("add", ways, builder.fresh(total), traits=SAVES_NOTHING)
        with tape.alive(*named, rows):
            normed = normalised(builder, total, settings.embedding_norm, block.names.embedding_norm, block.hidden_size)
            return builder.dropped(normed, settings.embedding_dropout)


def shared_bias(builder: Builder, embedded: Value) -> None:
    """Make the bias of scores that layers share, looked up for each pair of positions and copied for each row, beside embedded tokens.

    Source:
        ``compute_position_bias`` in transformers/models/mpnet/modeling_mpnet.py (5.24.0).
    """
    tape = builder.tape
    tape.instant = "layer 1 backward"  # behind the layers' own, and before what is left is the embedding's alone
    table = replace(builder.weight(f"{DISTANCES}.weight"), copy_bytes=0)
    heads, width = table.columns, builder.settings.embedded_bytes
    with tape.alive(embedded):
        apart = tape.make("distances", tape.value(Quantity.SQUARE, 1, ID_BYTES))
        with tape.alive(apart):
            ids = tape.make(
                "buckets",
                tape.value(Quantity.SQUARE, 1, ID_BYTES),
                scratch=[(Quantity.SQUARE, 4 * ID_BYTES + 1), (Quantity.POSITIONS, 2 * ID_BYTES)],
            )
    with tape.alive(embedded, apart, ids):
        rows = tape.value(Quantity.SQUARE, heads, width)
        sums = 8 + 4 * heads
        sorted_ids = [(Quantity.SQUARE, 24 + ceil_div(sums, 10)), (Quantity.ONE, (16 + sums) * table.rows)]
        sizes = sorted_ids if builder.settings.regime.sorts_distances else []
        copied = [(Quantity.SQUARE, heads * width)]  # of what lies with heads before pairs
        saves = [ids] if table.trainable else []
        tape.apply("distance embedding", [], rows, saves, [table], Traits(workspace=[*sizes, *copied]))
        bias = tape.value(Quantity.SCORES, heads, width)
        way = SAME if builder.settings.regime.one_sequence else NEW
        tape.layer_inputs = tape.apply("copy bias", [(rows, way)], bias, traits=SAVES_NOTHING)
    if bias.needs_gradient:
        tape.awaited.append((bias, bias.coefficient))


def _rows(builder: Builder, name: str, table: Weight, places: Quantity, ids: list[Value], *, sorts: bool) -> Value:
    """Return rows of a small table, whose gradient is formed by sorting where there are many tokens."""
    rows = builder.tape.value(places, table.columns, builder.settings.embedded_bytes)
    table = replace(table, copy_bytes=0, decoding_sizes=(), decoded_bytes=0, scales_bytes=0)
    traits = Traits(workspace=_sums(table) if sorts else [])
    return builder.tape.apply(name, [], rows, ids if table.trainable else [], [table], traits)


def _sums(table: Weight) -> Sizes:
    """Return what sorting the tokens of a small table takes, each row of which many have."""
    sums = 8 + 4 * table.columns
    return [(TOKENS, 24 + ceil_div(sums, 10)), (Quantity.ONE, (16 + sums) * table.rows)]


def _idle_pooler(builder: Builder, tokens: Value) -> None:
    """Record the projection of the first token of a row, whose graph goes with what the model has returned.

    Source:
        ``BertPooler.forward`` in transformers/models/bert/modeling_bert.py (5.24.0).
    """
    tape, name, own = builder.tape, builder.settings.names.pooler, builder.weights
    trains = builder.weight(f"{builder.settings.names.embedding}.weight").trainable
    nodes, operations = len(tape.nodes), len(tape.operations)
    builder.weights = {
        key: replace(weight, trainable=trains or ".lora_" in key) if key.startswith(f"{name}.") else weight
        for key, weight in own.items()
    }
    with tape.alive(tokens):
        projected = linear(builder, _first_tokens(tokens), name, tokens.width)
        tape.apply("tanh", [(projected, NEW)], builder.fresh(projected))
    tape.graph_use |= dict.fromkeys(tape.cut(nodes, operations), len(tape.operations) - 1)
    builder.weights = own


def _class_loss(builder: Builder, tokens: Value, settings: EndSettings) -> Value:
    """Record the scores of a row, of a projection of its first token, and the loss over them; return that.

    Source:
        ``BertForSequenceClassification.forward`` in transformers/models/bert/modeling_bert.py, ``RobertaClassificationHead.forward`` in
        models/roberta/modeling_roberta.py (5.24.0).
    """
    tape, names = builder.tape, settings.block.names
    assert settings.encoder is not None
    scorer = settings.encoder.scorer
    with tape.alive(tokens):
        first = _averaged(builder, tokens) if scorer.mean else _selected(builder, tokens)
        first = builder.dropped(first) if scorer.drops_first else first
        projected = linear(builder, first, names.pooler, tokens.width)
        if scorer.activation == "gelu":
            pooled = builder.pointwise("gelu", projected, (projected,))
        else:
            pooled = builder.fresh(projected)
            tape.apply(scorer.activation, [(projected, NEW)], pooled, [pooled])
        if scorer.norm:
            pooled = normalised(builder, pooled, settings.final_norm, scorer.norm, tokens.width)
        with tape.alive(pooled):
            dropped = builder.dropped(pooled, scorer.dropout)
            return last_score(builder, linear(builder, dropped, names.head, settings.vocab_size))


def _selected(builder: Builder, tokens: Value) -> Value:
    return builder.tape.apply("select", [(tokens, NEW)], _first_tokens(tokens), traits=SAVES_NOTHING)


def _averaged(builder: Builder, tokens: Value) -> Value:
    """Return the mean of a row's tokens, each times the number that a mask has for it.

    Source:
        ``ModernBertForSequenceClassification.forward`` in transformers/models/modernbert/modeling_modernbert.py (5.24.0).
    """
    tape, width = builder.tape, 4 if builder.settings.under_autocast else tokens.element_bytes
    masked = builder.pointwise("mul mask", tokens, packs=True)
    total = tape.value(Quantity.SEQUENCES, tokens.width, width)
    tape.apply("sum tokens", [(masked, SAME)], total, traits=SAVES_NOTHING)
    return builder.pointwise("div", total, packs=True)


def _first_tokens(tokens: Value) -> Value:
    """Return another look at the first token of each row."""
    return Value(
        tokens.storage,
        Quantity.SEQUENCES,
        tokens.coefficient,
        tokens.element_bytes,
        tokens.needs_gradient,
        tokens.foreign,
    )
