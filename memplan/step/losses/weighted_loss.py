"""Values and weighed losses of each token, beside the loss that a model has formed of the same logits."""

from memplan.step.blocks.builder import ONE, Builder
from memplan.step.blocks.projections import plain_linear
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Value
from memplan.training.adapted_ends import VALUE_HEAD

DROPOUT = 0.1
"""Probability that a model's config says nothing of (``summary_dropout_prob``)."""


def token_values(builder: Builder, hidden: Value) -> Value:
    """Record dropout, a cast to the head's fp32 and its product; return a value of each token.

    Source:
        ``ValueHead`` in trl/models/modeling_value_head.py (0.24.0).
    """
    dropped = builder.dropped(hidden, DROPOUT)
    return plain_linear(builder, builder.cast(dropped, 4), VALUE_HEAD, 1)


FLOAT_BYTES, LABEL_BYTES = 4, 8
ROW_BYTES = 8 + 8 + 4 + 8
"""Of a token: mask, labels twice and weights, which the trainer has names for until its loss is there."""


def model_loss(builder: Builder, logits: Value) -> tuple[Value, ...]:
    """Record the loss that the model forms itself, which nothing runs backward; return what is kept of it.

    Its graph, with the log-softmax that it saves, is there until the trainer has formed its own loss.

    Source:
        ``ForCausalLMLoss`` in transformers/loss/loss_utils.py (5.23.0).
    """
    tape, tokens = builder.tape, logits.quantity
    row = logits.width * FLOAT_BYTES
    copied = [(tokens, row)] if logits.element_bytes != FLOAT_BYTES else []
    given = tape.make("rows", tape.value(tokens, ROW_BYTES, 1))
    targets = tape.make("shift labels", tape.value(tokens, 1, LABEL_BYTES))
    logs = tape.value(tokens, logits.width, FLOAT_BYTES, part=Part.LOGITS)
    tape.make("log_softmax of the model's loss", logs, logits, targets, scratch=copied)
    return given, targets, logs


def weighted_cross_entropy(builder: Builder, logits: Value, retained: tuple[Value, ...]) -> Value:
    """Record the trainer's loss over whole logits; return it.

    Source:
        ``compute_log_probs`` in llamafactory/v1/core/base_trainer.py and ``compute_loss`` in v1/trainers/sft_trainer.py (0.9.5).
    """
    tape, predicted = builder.tape, Quantity.PREDICTED_TOKENS
    tape.leaves_region()  # the model's forward has ended
    wide = builder.cast(logits, FLOAT_BYTES)
    with tape.alive(*retained, logits, wide):
        labels = tape.make("shift labels", tape.value(predicted, 1, LABEL_BYTES))
        rows = Value(wide.storage, predicted, wide.coefficient, FLOAT_BYTES, wide.needs_gradient)
        tape.apply("slice", [(wide, NEW)], rows, traits=SAVES_NOTHING)
        if not builder.settings.regime.one_sequence:
            cut, rows = rows, tape.value(predicted, logits.width, FLOAT_BYTES, part=Part.LOGITS)
            tape.apply("copy", [(cut, SAME)], rows, traits=SAVES_NOTHING)
        with tape.alive(rows):
            logs, losses = builder.fresh(rows), tape.value(predicted, 1, FLOAT_BYTES)
            tape.apply("log_softmax", [(rows, NEW)], logs, [logs])
            tape.apply("nll_loss", [(logs, NEW)], losses, [logs, labels])
            result = tape.apply("neg", [(losses, NEW)], builder.fresh(losses), traits=SAVES_NOTHING)
    loss = tape.value(ONE, 0, FLOAT_BYTES, part=Part.LOGITS)
    return tape.apply("weigh", [(result, NEW)], loss, traits=SAVES_NOTHING)
