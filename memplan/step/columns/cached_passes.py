"""The instants of a cached loss over embeddings: all texts are embedded mini-batch by mini-batch without gradients, compared, and embedded again.

The second time each mini-batch has a backward of its own, from the gradients of its embeddings that the loss has left.

Source:
    ``forward_cached`` and ``_backward_hook`` in sentence_transformers/base/losses/gradcache.py, ``calculate_loss`` in
    sentence_transformers/sentence_transformer/losses/cached_multiple_negatives_ranking.py (6.2.0).
"""

from collections.abc import Iterator
from itertools import chain

from memplan.step.alive_around_layers import graph_of_loss
from memplan.step.columns.column_passes import WIDE, embeddings, named_by_features, scores, widened_features
from memplan.step.instants import backward_instants, forward_instants
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import forward_alone, forward_arguments
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode


def cached_pass(inputs: StepInputs, taped: ModelOnTape, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of all forwards and backwards of a micro-batch.

    Args:
        taped: The model on tape for the rows of a mini-batch.
        base: What is there throughout.
        mode: What becomes of weight gradients in the first backward.
    """
    texts = inputs.setup.config.method.embedding
    assert texts is not None
    columns, narrow = texts.columns, _embedding_bytes(inputs, taped)
    width = narrow * inputs.spec.hidden_size
    embedded = single_form(Part.ACTIVATIONS, Quantity.EXAMPLES, width * columns)
    before = base + embedded - single_form(Part.ACTIVATIONS, Quantity.SEQUENCES, width)
    yield from forward_alone(inputs, taped, before, "forward", forward_arguments(inputs))
    copied = before + named_by_features(taped) + widened_features(inputs, taped)
    yield Instant("forward", "fp32 copies of features", copied)
    yield Instant("forward", "scores of a mini-batch", base + _compared(inputs, columns, narrow) + scores(inputs))
    # what is left are the gradients of all embeddings, and those that a mini-batch's are multiplied by
    base += embedded + single_form(Part.ACTIVATIONS, Quantity.SEQUENCES, WIDE * inputs.spec.hidden_size)
    stored = base + constant_form(Part.GRADIENTS, inputs.gradient_bytes)
    passes = [_mini_batch(inputs, taped, base, mode)]
    passes += [_mini_batch(inputs, taped, stored, "again")] if mode != "again" else []
    for instant in chain(*passes):  # all of them within the backward of the loss
        yield instant.around(ZERO, "loss backward", f"{instant.operation} ({instant.name})")


def _embedding_bytes(inputs: StepInputs, taped: ModelOnTape) -> int:
    """Return the bytes of an element of an embedding, which accelerate casts to fp32 where the forward was under autocast."""
    return WIDE if inputs.setup.autocast else taped.head.normed.element_bytes


def _compared(inputs: StepInputs, columns: int, narrow: int) -> Form:
    """Return all embeddings as anchors of one mini-batch are compared with the others, at the fullest moment of that one's backward.

    Formula:
        those of ``c`` columns and their gradients, the anchors joined, and the ``c - 1`` others joined twice; in fp32 five more of
        these, as the norm that they are divided by runs backward, and another where they were narrower
    """
    others = columns - 1
    wide = 5 * others + (others if narrow < WIDE else 0)
    own = single_form(
        Part.TEMPORARIES, Quantity.EXAMPLES, narrow * inputs.spec.hidden_size * (2 * columns + 1 + 2 * others)
    )
    return own + embeddings(inputs, wide)


def _mini_batch(inputs: StepInputs, taped: ModelOnTape, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of the second forward of a mini-batch, and of its backward."""
    played = taped.played(mode, inputs.recomputation)
    yield from forward_instants(inputs, taped, played, base)
    copied = base + graph_of_loss(inputs, taped) + played.saved + played.head.saved + named_by_features(taped)
    yield Instant("forward", "fp32 copies of features", copied + widened_features(inputs, taped))
    yield from backward_instants(inputs, taped, played, base, mode)
