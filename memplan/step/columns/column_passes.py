"""The instants of a loss that compares the embeddings of several texts: a forward for each column, and one backward through all of them.

Autograd comes to the last forward first. A parameter's gradient waits until all forwards have formed theirs, and is stored then: beside what
earlier micro-steps have stored, gradients are there twice meanwhile.

Source:
    ``embed_columns`` in sentence_transformers/base/losses/merged_forward.py (6.2.0); ``InputBuffer::accumulate`` in
    torch/csrc/autograd/input_buffer.cpp, ``AccumulateGrad`` in torch/csrc/autograd/functions/accumulate_grad.h (v2.13.0).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.documents.frozen_values import dataclass
from memplan.step.alive_around_layers import graph_of_loss
from memplan.step.instants import backward_base, backward_instants, forward_instants
from memplan.step.model_on_tape import ModelOnTape, PlayedModel
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, fixed_form, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode
from memplan.training.resolved import TrainingSetup

WIDE = 4
"""Bytes of an element in fp32, which embeddings are compared in (``_convert_to_float_tensor`` in sentence_transformers/util/tensor.py, 6.2.0)."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """The first column where it has fewer rows than the others, which pass through the model together."""

    inputs: StepInputs  # What its tapes were made of
    taped: ModelOnTape  # The model on tape for so many rows
    values: Sequence[int]  # Values of the quantities for these

    def fixed(self, instant: Instant, around: Form) -> Instant:
        """Return an instant as it is whatever rows the others have, beside what is proportional to theirs."""
        partial = constant_form(Part.TEMPORARIES, instant.partial_bytes(self.values))
        return replace(instant, form=fixed_form(instant.form, self.values) + partial + around, reduces=None)


def merges_columns(setup: TrainingSetup) -> bool:
    """Tell whether columns pass through the model in forwards that have unlike numbers of rows."""
    texts = setup.config.method.embedding
    return texts is not None and len(set(texts.forwards)) > 1


def anchors_alone(setup: TrainingSetup) -> TrainingSetup:
    """Return a setup as the first of such forwards has it, with one column; itself where all have as many rows."""
    texts = setup.config.method.embedding
    if texts is None or not merges_columns(setup):
        return setup
    method = replace(setup.config.method, embedding=replace(texts, merges=False))
    return replace(setup, config=replace(setup.config, method=method))


def column_pass(
    inputs: StepInputs, taped: ModelOnTape, anchors: Anchors | None, base: Form, mode: Mode
) -> Iterator[Instant]:
    """Yield the instants of the forwards of all columns and of their backward.

    Args:
        taped: The model on tape for the rows of the last forward.
        anchors: The first forward, where it has other rows.
        base: What is there throughout.
        mode: What becomes of weight gradients.
    """
    count = len(_forwards(inputs))
    played = taped.played("first", inputs.recomputation)
    saved = saved_by_forward(inputs, taped, played)
    named = named_by_features(taped)
    before, beside = saved * (count - 1), named * (count - 1)
    if anchors is not None:
        own = anchors.taped.played("first", anchors.inputs.recomputation)
        before = fixed_form(saved_by_forward(anchors.inputs, anchors.taped, own), anchors.values)
        beside = fixed_form(named_by_features(anchors.taped), anchors.values)
    yield from forward_instants(inputs, taped, played, base + before + beside)
    yield Instant(
        "forward", "fp32 copies of features", base + before + beside + saved + named + widened_features(inputs, taped)
    )
    columns, others = sum(_forwards(inputs)), sum(_forwards(inputs)[:-1])
    compared = embeddings(inputs, 2 * columns) + scores(inputs)
    yield Instant("loss backward", "scores of all pairs", base + before + saved + compared)
    yield from backward_instants(inputs, taped, played, base + before + embeddings(inputs, others), "first")
    joins: Mode = "joins" if mode == "first" or count > 2 else "joins-again"
    waiting = constant_form(Part.GRADIENTS, inputs.gradient_bytes) + graph_of_loss(inputs, taped)
    if anchors is None:
        played = taped.played(joins, inputs.recomputation)
        yield from backward_instants(inputs, taped, played, base + waiting + saved * (count - 2), joins)
        return
    own = anchors.taped.played(joins, anchors.inputs.recomputation)
    for instant in backward_instants(anchors.inputs, anchors.taped, own, ZERO, joins):
        yield anchors.fixed(instant, base + waiting)


def widened_features(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return what accelerate casts to fp32 of the features that a forward under autocast returns: token embeddings.

    Source:
        ``ConvertOutputsToFp32`` in accelerate/utils/operations.py (1.15.0).
    """
    normed = taped.head.normed
    if not inputs.setup.autocast or normed.element_bytes == WIDE:
        return ZERO
    return single_form(Part.TEMPORARIES, normed.quantity, WIDE * normed.width)


def embeddings(inputs: StepInputs, count: int) -> Form:
    """Return so many embeddings in fp32 of each example: as a loss compares them, or their gradients."""
    return single_form(Part.TEMPORARIES, Quantity.EXAMPLES, WIDE * inputs.spec.hidden_size * count)


def scores(inputs: StepInputs) -> Form:
    """Return the scores of anchors with all other texts of the micro-batch as their loss runs backward: saved, and three of their size.

    Source:
        ``compute_loss_from_embeddings`` in sentence_transformers/sentence_transformer/losses/multiple_negatives_ranking.py (6.2.0);
        ``logsumexp_backward`` in torch/csrc/autograd/FunctionsManual.cpp (v2.13.0).
    """
    texts = inputs.setup.config.method.embedding
    assert texts is not None
    if texts.loss != "in-batch-negatives":
        return ZERO
    return single_form(Part.TEMPORARIES, Quantity.COMPARED, 4 * WIDE * (texts.columns - 1))


def _forwards(inputs: StepInputs) -> tuple[int, ...]:
    texts = inputs.setup.config.method.embedding
    assert texts is not None
    return texts.forwards


def saved_by_forward(inputs: StepInputs, taped: ModelOnTape, played: PlayedModel) -> Form:
    """Return what a forward leaves until its backward begins."""
    return backward_base(inputs, taped, ZERO)[0] + played.saved + played.head.saved


def named_by_features(taped: ModelOnTape) -> Form:
    """Return the token embeddings that features have a name for until the loss is formed, and no graph has."""
    normed = taped.head.normed
    if normed.storage in taped.head.section.tape.saved_storages():
        return ZERO
    return single_form(Part.ACTIVATIONS, normed.quantity, normed.coefficient)
