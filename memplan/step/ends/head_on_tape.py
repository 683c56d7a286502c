"""The end of a model on tape: its final norm, head and loss. Equal ones share theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from memplan.step.blocks.adapted_projections import adapted, linear
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.blocks.norms import normalised
from memplan.step.blocks.projections import bias_sum
from memplan.step.divided.shared_ends_and_rows import divided_cross_entropy, whole_rows
from memplan.step.ends.encoder_ends import of_rows
from memplan.step.ends.end_settings import EndSettings, head_weights
from memplan.step.kernels.loss_pieces import TILED
from memplan.step.losses.cross_entropy import (
    compiled_cross_entropy,
    cross_entropy,
    cross_entropy_in_pieces,
    tiled_cross_entropy,
)
from memplan.step.losses.divergence_loss import tiled_divergence, whole_divergence
from memplan.step.losses.fused_linear_loss import cut_cross_entropy, linear_cross_entropy, tiled_linear_cross_entropy
from memplan.step.losses.policy_loss import COMPARED, OF_A_PHASE, phase_loss
from memplan.step.losses.preference_loss import (
    answered,
    last_score,
    log_probabilities,
    model_loss,
    pair_log_probabilities,
    token_values,
    weighted_cross_entropy,
)
from memplan.step.losses.token_chunk_loss import (
    IN_PIECES,
    TOKEN_CHUNKS,
    stretched_cross_entropy,
    stretched_logits,
    token_chunk_cross_entropy,
)
from memplan.step.playing.section import Section
from memplan.step.tapes.event_recorder import NO_STORAGE
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value, Weight
from memplan.training.adapted_ends import VALUE_HEAD

MOST_ENDS = 128  # Kinds of ends that are remembered, as many as of layers

FUSED_LOSSES = ("fused-head", "fused-divergence", "fused-linear", "cut-cross-entropy", *TILED, *TOKEN_CHUNKS)
"""Losses that multiply by the head themselves and have no whole logits."""

NAMED = ((Quantity.TOKENS, 0),)  # For what names stand until the norm is done, where layers are given nothing besides

Named = tuple[tuple[str, Weight], ...]  # Parameters by name


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Final norm, head and loss on tape."""

    section: Section  # All of them; where the loss is chunked, the norm alone
    normed: Value  # What the head is given
    weights: tuple[Weight, ...]  # The head's weight, and its bias where it has one
    chunk: Section | None  # Head and loss of one chunk of tokens; None where the loss is not chunked
    logits: Value | None  # What the model returns beside the loss; None where it forms them chunk by chunk
    stretches: tuple[Value, ...] = ()  # The same where it returns several, one for each stretch of tokens

    @property
    def returned(self) -> tuple[Value, ...]:
        """What the model returns beside the loss, tensor by tensor; a list of several lets go of its last item first."""
        return self.stretches[::-1] or (() if self.logits is None else (self.logits,))

    @property
    def delayed_bytes(self) -> int:
        """The gradient of a tied head, which stands by until that of the embedding is there."""
        return sum(weight.gradient_bytes for weight in self.weights if weight.delayed)


@lru_cache(maxsize=MOST_ENDS)
def head_on_tape(settings: EndSettings, weights: Named, needs_gradient: bool, element_bytes: int) -> Head:
    """Return final norm, head and loss on tape, the same ones each time, of weights that no layer has.

    Args:
        needs_gradient: Whether the last layer's result needs a gradient.
        element_bytes: Bytes of an element of it.
    """
    builder, block = Builder(settings.block, dict(weights)), settings.block
    builder.tape.instant = "loss backward" if _alone(settings) else "head backward"
    entry, normed = _final_norm(builder, settings, needs_gradient, element_bytes)
    if settings.yields_rows:
        return Head(Section(builder.tape, entry, of_rows(builder, normed, settings)), normed, (), None, None)
    if settings.loss == "hidden-states":
        return Head(Section(builder.tape, entry, normed), normed, (), None, None)
    if settings.value_head:
        values = tuple([builder.weight(f"{VALUE_HEAD}.{part}") for part in ("weight", "bias")])
        return Head(Section(builder.tape, entry, _valued(builder, settings, normed)), normed, values, None, None)
    own = head_weights(settings, builder.weights)
    if settings.loss in FUSED_LOSSES:
        return Head(Section(builder.tape, entry, _fused_loss(builder, settings, normed, own)), normed, own, None, None)
    if settings.loss in ("chunked", "chunked-backward", "chunked-logits"):
        if block.code.returns_logits:
            builder.tape.ends(entry)
        chunk = _chunk(settings, builder.weights, normed)
        return Head(Section(builder.tape, entry, normed), normed, own, chunk, None)
    if settings.loss == "fp32-stretches":
        stretched = replace(settings, bounded_logits=settings.bounded_stretches)
        parts = stretched_logits(builder, normed, block.names.head, partial(_adapted_logits, builder, stretched))
        loss, stretches = stretched_cross_entropy(builder, parts)
        whole = Value(NO_STORAGE, Quantity.TOKENS, 4 * settings.vocab_size, 4)
        return Head(Section(builder.tape, entry, loss), normed, own, None, whole, tuple(stretches))
    loss, logits = _whole_logits(builder, settings, entry, normed)
    return Head(Section(builder.tape, entry, loss), normed, own, None, None if block.names_hidden else logits)


def _alone(settings: EndSettings) -> bool:
    """Tell whether no head's backward comes between that of the loss and of the last layer."""
    return settings.loss in FUSED_LOSSES or settings.value_head or settings.yields_rows


def _whole_logits(builder: Builder, settings: EndSettings, entry: Value, normed: Value) -> tuple[Value, Value]:
    """Return the loss of logits that are there all at once, and those that loss backward still has."""
    with builder.tape.alive(normed):
        logits = _logits(builder, settings, answered(builder, normed, some=settings.answers))
        if settings.loss == "weighted-tokens":
            retained = model_loss(builder, logits)
        elif settings.block.code.returns_logits:
            logits = builder.cast(logits, 4)
        elif settings.loss not in ("fp32-pieces", *COMPARED) and not settings.loss_behind:
            loss = _loss(builder, settings, logits, wide=settings.loss != "bf16")
    if settings.loss == "weighted-tokens":
        loss = weighted_cross_entropy(builder, logits, retained)
    elif settings.loss in COMPARED:
        loss = _compared(builder, settings, logits)
    elif settings.block.code.returns_logits:
        builder.tape.ends(entry)
        loss = _loss(builder, settings, logits, wide=False)
    elif settings.loss_behind:
        loss = _loss(builder, settings, logits, wide=settings.loss != "bf16")
    if settings.loss == "fp32-pieces":
        logits = builder.cast(logits, 4)
        loss = cross_entropy_in_pieces(builder, logits, settings.block.regime.stretches)
    return loss, logits


@lru_cache(maxsize=MOST_ENDS)
def evaluated_head(settings: EndSettings, weights: Named, element_bytes: int, *, loss_inside: bool = True) -> Section:
    """Return final norm, head and loss of a forward without gradients, whose loss is over all logits at once.

    One outside the model runs when the model's names are gone. ``skip_logits`` of Liger's ``lce_forward`` is ``self.training`` (0.8.5).
    """
    builder = Builder(settings.block, dict(weights))
    settings = replace(settings, arguments=settings.arguments or NAMED)
    entry, normed = _final_norm(builder, settings, True, element_bytes)
    if settings.yields_rows:
        return Section(builder.tape, entry, of_rows(builder, normed, settings))
    if settings.loss == "hidden-states":
        return Section(builder.tape, entry, normed)
    if settings.loss in FUSED_LOSSES and settings.loss != "fused-linear":
        return Section(
            builder.tape, entry, _fused_loss(builder, settings, normed, head_weights(settings, builder.weights))
        )
    if settings.loss in IN_PIECES:
        has_adapter = f"{settings.block.names.head}.lora_A.weight" in builder.weights
        logits = (_adapted_logits if has_adapter else _logits)(builder, settings, normed)
        builder.tape.leaves_region()
        builder.tape.returned = logits = builder.cast(logits, 4)
        return Section(builder.tape, entry, cross_entropy_in_pieces(builder, logits, 1))  # the loop counts them
    with builder.tape.alive(normed):
        logits = _logits(builder, settings, answered(builder, normed, some=settings.answers))
        if settings.loss not in COMPARED and loss_inside:
            return Section(builder.tape, entry, _loss(builder, settings, logits, wide=settings.loss != "bf16"))
    if settings.loss in OF_A_PHASE:
        return Section(builder.tape, entry, logits)
    if settings.loss not in COMPARED:
        builder.tape.ends(entry)
        return Section(builder.tape, entry, _loss(builder, settings, logits, wide=settings.loss != "bf16"))
    return Section(builder.tape, entry, _compared(builder, settings, logits))


def _compared(builder: Builder, settings: EndSettings, logits: Value) -> Value:
    """Record a loss that compares whole logits, which the loop has a name for in fp32; return it, or logits that another model's are compared with."""
    builder.tape.leaves_region()
    if settings.loss in OF_A_PHASE:
        return phase_loss(builder, logits, settings.loss)
    wide = builder.cast(logits, 4) if settings.loss == "log-probabilities" or settings.block.autocast else logits
    if settings.loss == "logits":
        return wide
    if settings.divergence is not None:
        return whole_divergence(builder, wide, settings.divergence, settings.cached)
    if settings.pairs is not None:
        return pair_log_probabilities(builder, wide, settings.pairs, nll=settings.chosen_nll)
    with builder.tape.alive(*(() if settings.answers else (wide,))):
        return log_probabilities(builder, wide, settings.metrics, answers=settings.answers)


def _fused_loss(builder: Builder, settings: EndSettings, x: Value, weights: Sequence[Weight]) -> Value:
    """Record a loss that multiplies by the head itself; return it."""
    if settings.loss in TOKEN_CHUNKS:
        how = {"wide": settings.loss == "token-chunks-fp32", "bounded": settings.bounded_logits}
        return token_chunk_cross_entropy(builder, x, weights, settings.vocab_size, **how)
    if settings.loss == "fused-head":
        return tiled_cross_entropy(builder, x, weights, settings.vocab_size, answers=settings.answers)
    if settings.loss == "fused-divergence":
        return tiled_divergence(builder, x, weights, settings.vocab_size, settings.compared)
    if settings.loss == "cut-cross-entropy":
        return cut_cross_entropy(builder, x, weights, settings.vocab_size)
    if settings.loss in TILED:
        return tiled_linear_cross_entropy(builder, x, settings.vocab_size)
    return linear_cross_entropy(builder, x, weights, settings.vocab_size)


def _final_norm(
    builder: Builder, settings: EndSettings, needs_gradient: bool, element_bytes: int
) -> tuple[Value, Value]:
    """Return the residual stream after the last layer, and its norm."""
    block = settings.block
    entry = builder.tape.given(block.stream, block.hidden_size, element_bytes, needs_gradient)
    arguments = [builder.tape.given(quantity, size, 1, needs_gradient=False) for quantity, size in settings.arguments]
    normed = normalised(builder, entry, settings.final_norm, block.names.final_norm, block.hidden_size)
    builder.tape.stays(*([normed] if block.names_hidden else []))
    if block.code.caps_hidden:
        with builder.tape.alive(normed):
            # ``TanhSoftCapping`` in torchtune/models/gemma2/_component_builders.py (0.6.1).
            normed = _bounded(builder, normed, named=False)
    normed = whole_rows(builder, normed)
    builder.tape.ends(*arguments)
    if settings.names_logits or settings.loss in IN_PIECES:
        builder.tape.ends(entry)
    return entry, normed


def _chunk(settings: EndSettings, weights: Mapping[str, Weight], normed: Value) -> Section:
    """Return head and loss of one chunk of tokens.

    Chunks add up their gradients, and the sum is stored at the end; where each runs backward at once, each stores them.
    """
    builder = Builder(settings.block, weights)
    tape = builder.tape
    tape.instant = "head backward"
    x = tape.part_of(Quantity.CHUNK, settings.block.hidden_size, normed.element_bytes, normed.needs_gradient)
    loss = _loss(builder, settings, _logits(builder, settings, x), wide=True)
    for node in tape.nodes if not settings.backward_at_once else ():
        node.weights = tuple(
            w if w.coded else replace(w, own_bytes=0, add_bytes=0, converted=False, delayed=False, summed=True)
            for w in node.weights
        )
    return Section(tape, x, loss)


def _loss(builder: Builder, settings: EndSettings, given: Value, *, wide: bool) -> Value:
    """Record cross-entropy, of logits that are cast to fp32 first where it is ``wide``; return the loss."""
    if settings.scores:
        return last_score(builder, given)
    if settings.compiled_loss:
        with builder.tape.alive(given):
            return compiled_cross_entropy(builder, given, named=settings.backward_at_once)
    logits = builder.cast(given, 4) if wide else given
    with builder.tape.alive(logits, *((given,) if settings.names_logits else ())):
        if settings.block.divided:
            return divided_cross_entropy(builder, logits, settings.loss_bytes)
        how = {"shifted": settings.shifts_labels, "cut": settings.cuts_logits, "padded": settings.pads_labels}
        return cross_entropy(builder, logits, **how, loss_bytes=settings.loss_bytes)


def _valued(builder: Builder, settings: EndSettings, normed: Value) -> Value:
    """Record the model's own head and loss, whose graph is cut off as the loop's function returns, and values of tokens; return the loss over these."""
    # Source: ``AutoModelForCausalLMWithValueHead.forward`` in trl/models/modeling_value_head.py (0.24.0);
    # ``compute_loss`` in llamafactory/train/rm/trainer.py (0.9.5).
    tape, own = builder.tape, builder.weights
    nodes, operations = len(tape.nodes), len(tape.operations)
    head, trains = f"{settings.block.names.head}.", settings.own_head_trains
    builder.weights = {name: replace(w, trainable=trains) if name.startswith(head) else w for name, w in own.items()}
    with tape.alive(normed):
        logits = _logits(builder, settings, normed)
        with tape.alive(logits):
            _loss(builder, settings, logits, wide=True)
            cut, builder.weights = tape.cut(nodes, operations), own
            tape.instant = "loss backward"
            values = token_values(builder, normed)
            wide = builder.fresh(logits, element_bytes=4)
            if logits.element_bytes < 4:
                tape.make("cast", wide, logits)
    tape.graph_use |= dict.fromkeys(cut, len(tape.operations) - 1)
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("compare", [(builder.cast(values, 4), NEW)], loss, traits=SAVES_NOTHING)


def _adapted_logits(builder: Builder, settings: EndSettings, x: Value) -> Value:
    """Record a head's product as that of any other projection with an adapter, and the cap on its result."""
    logits = linear(builder, x, settings.block.names.head, settings.vocab_size)
    builder.tape.instant = "loss backward"
    return _bounded(builder, logits) if settings.bounded_logits else logits


def _logits(builder: Builder, settings: EndSettings, x: Value) -> Value:
    """Record the head's product and the cap on its result."""
    tape = builder.tape
    weight, *biases = head_weights(settings, builder.weights)
    with tape.alive(x):
        x = builder.lowered(x)
        width = builder.compute if weight.coded or settings.block.autocast else weight.element_bytes
        logits = tape.value(x.quantity, settings.vocab_size, width, part=Part.LOGITS)
        copy = builder.cast_weight(weight)
        keeps = builder.settings.keeps_inputs
        retained = weight.trainable or (keeps and x.needs_gradient)
        saves = [copy] if copy is not None and x.needs_gradient else []  # as torch lets go of them
        saves += [x] if retained else []
        bias = biases if not weight.coded else []
        tape.apply(
            "head",
            [(x, NEW)],
            logits,
            saves,
            [weight, *bias],
            traits=Traits(
                scratch=[(ONE, builder.cast_bias(b, settings.vocab_size)) for b in bias],
                custom=weight.coded or keeps,
                packs=not weight.coded or weight.trainable,
                reduces=bias_sum(x, bias[0] if bias else None),
                product=True,
                stores_weights_first=bool(bias) and copy is None and not keeps,
            ),
        )
        if weight.coded and biases:
            logits = _with_bias(builder, logits, biases, x)
        head = settings.block.names.head
        if (down := builder.weights.get(f"{head}.lora_A.weight")) is not None:
            builder.weights = {f"{head}.weight": weight, **builder.weights}  # a tied one has no other name
            logits = adapted(builder, x, logits, head, settings.vocab_size, down)
        tape.touch(*([copy] if copy is not None else []))
    tape.instant = "loss backward"
    logits = builder.pointwise("scale", logits) if settings.scaled_logits else logits
    if settings.bounded_logits:
        logits = _bounded(builder, logits, named=not settings.block.code.forms_tables)
    return builder.cast(logits, 4) if settings.casts_logits else logits


def _with_bias(builder: Builder, logits: Value, biases: Sequence[Weight], x: Value) -> Value:
    """Return the sum of coded weights' product and a bias, which is a tensor of its own."""
    total, traits = builder.fresh(logits), Traits(packs=False, reduces=bias_sum(x, biases[0]))
    return builder.tape.apply("add bias", [(logits, SAME)], total, weights=biases, traits=traits)


def _bounded(builder: Builder, logits: Value, *, named: bool = True) -> Value:
    """Record the scaled tanh that some models bound their logits with; transformers' give each result the name of the last."""
    with builder.tape.alive(*((logits,) if named else ())):
        scaled = builder.pointwise("scale", logits)
        bounded = builder.fresh(scaled)
        builder.tape.apply("tanh", [(scaled, NEW)], bounded, [bounded])
        return builder.pointwise("scale", bounded)
