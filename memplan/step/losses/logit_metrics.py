"""What loops have names for of whole logits, and the copies of them that metrics are made of."""

from collections.abc import Iterator

from memplan.catalog.stacks import Metrics
from memplan.documents.frozen_values import dataclass
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.units.collated_rows import MASK_BYTES
from memplan.training.resolved import TrainingSetup

ENTROPY_BYTES = 4
"""Of a token: its entropy."""


@dataclass(frozen=True, slots=True)
class WholeLogits:
    """Logits in fp32, which Accelerate casts them to, behind a forward."""

    setup: TrainingSetup
    vocabulary: int  # Columns
    metrics: Metrics  # What the loop computes of them besides the loss
    one_sequence: bool  # Of one row, all but its last token lie in order, so that no copy is made of them

    def form(self, quantity: Quantity) -> Form:
        """Return the logits of all tokens, or of some."""
        return single_form(Part.LOGITS, quantity, 4 * self.vocabulary)

    def named(self, *, graph: bool) -> Form:
        """Return those that a loss over log-probabilities has names for, but for those that its graph keeps."""
        if self.setup.profile.loss != "log-probabilities" or self.setup.answer_length:
            return ZERO
        whole, rows = self.form(Quantity.TOKENS), self.form(Quantity.PREDICTED_TOKENS)
        named = single_form(Part.LOGITS, Quantity.PREDICTED_TOKENS, 4)  # log-probabilities
        if self.metrics == "softmax":
            return whole
        if self.metrics in ("entropy", "fused", "rows"):
            return named if graph else named + whole
        return named + whole if graph else named + whole + rows

    def measured(self, around: Form, *, graph: bool) -> Iterator[Form]:
        """Yield what is there while metrics are made: copies of the logits, and a piece for the entropy.

        Source:
            ``compute_loss`` in trl/trainer/sft_trainer.py (0.19.1, 0.29.0, 1.3.0, 1.6.0), ``_compute_loss`` in trl/trainer/dpo_trainer.py
            (0.29.0, lines 1345 to 1365) and ``entropy_from_logits`` in trl/trainer/utils.py.
        """
        if not self.setup.copies_logits:
            return
        whole, rows = self.form(Quantity.TOKENS), self.form(Quantity.PREDICTED_TOKENS)
        piece = self.form(Quantity.CHUNK) * 3
        if self.setup.answer_length:
            yield around + piece + single_form(Part.TEMPORARIES, Quantity.ANSWER_TOKENS, ENTROPY_BYTES)
            return
        copy = ZERO if self.one_sequence else rows
        if self.setup.profile.loss == "log-probabilities":
            yield from self._compared(around, piece, copy, graph=graph)
            return
        around += whole + single_form(Part.TEMPORARIES, Quantity.PREDICTED_TOKENS, ENTROPY_BYTES)
        if self.metrics != "accuracy-alone":
            yield around + piece + (ZERO if self.metrics == "accuracy" else copy)
        yield around + (copy * 2 if self.metrics == "both" else copy)

    def _compared(self, around: Form, piece: Form, copy: Form, *, graph: bool) -> Iterator[Form]:
        """Yield the same of a loss that compares answers."""
        method = self.setup.config.method
        around += self.named(graph=graph)
        if method.reference_model != "precomputed":
            around += self.named(graph=False)
        mask = 0 if self.metrics in ("entropy", "fused") else MASK_BYTES
        around += single_form(Part.TEMPORARIES, Quantity.PREDICTED_TOKENS, mask + ENTROPY_BYTES)
        if self.metrics != "fused":
            yield around + piece + (copy if self.metrics == "entropy" else ZERO)
        # logits of the chosen answers, which half of the rows are, and their means; KTO's may all be, and are copied twice
        own = 4 * (2 * self.vocabulary + 1) if method.stage == "kto" else 2 * (self.vocabulary + 1)
        yield around + single_form(Part.LOGITS, Quantity.PREDICTED_TOKENS, own)
