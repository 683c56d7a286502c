"""What methods other than plain training form of whole logits, on a tape: log-probabilities, values, weighed losses."""

from memplan.catalog.stacks import Metrics, PairKernel
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.blocks.projections import plain_linear
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value
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


LABEL_BYTES = 8
"""Of a token: its label in 64 bits."""


def log_probabilities(builder: Builder, logits: Value, metrics: Metrics, *, answers: bool = False) -> Value:
    """Record the log-probabilities of the tokens that follow, and a loss that compares those of rows; return the loss.

    The exponentials of one row at a time are never more than what is formed for all rows, but where there is one row.

    Args:
        logits: In fp32, as the model returns them.
        metrics: Says whether they are copied without each row's last token, or looked at where they are, by one kernel
            or by several.
        answers: Whether they are those of generated tokens, and are divided by the temperature in place of being copied.

    Source:
        ``_get_per_token_logps_and_entropies`` in trl/trainer/grpo_trainer.py (0.29.0);
        ``_compute_loss`` in trl/trainer/dpo_trainer.py (0.29.0, line 1121; 1.6.0) and ``selective_log_softmax`` in
        trl/trainer/utils.py; ``_LogProbEntropyFunction`` in trl/kernels/logprob_entropy.py (1.14.1); ``gather_backward`` in aten/src/ATen/native/TensorAdvancedIndexing.cpp (v2.13.0).
    """
    builder.tape.named = () if answers else (logits,)
    if metrics == "softmax":
        return pair_log_probabilities(builder, logits, "softmax", nll=False)
    if metrics == "rows":
        return _of_all_tokens(builder.tape, logits)
    tape, predicted = builder.tape, Quantity.ANSWER_TOKENS if answers else Quantity.PREDICTED_TOKENS
    rows = Value(logits.storage, predicted, logits.coefficient, 4)
    tape.apply("slice", [(logits, NEW)], rows, traits=SAVES_NOTHING)
    if answers:
        last, rows = rows, Value(logits.storage, predicted, logits.coefficient, 4)
        tape.apply("slice", [(last, NEW)], rows, traits=SAVES_NOTHING)
    if metrics == "fused":
        result, statistics = tape.value(predicted, 2, 4), tape.value(predicted, 2, 4)
        tape.apply(
            "log-probabilities", [(rows, NEW)], (result, statistics), [rows, statistics], traits=Traits(custom=True)
        )
        return _compared(tape, result)
    copied = metrics != "entropy"
    if copied:
        cut, rows = rows, tape.value(predicted, logits.width, 4, part=Part.LOGITS)
        name, way = ("divide", NEW) if answers else ("copy", SAME)
        tape.apply(name, [(cut, way)], rows, traits=SAVES_NOTHING)
        tape.named += () if answers else (rows,)
    labels = [tape.make("shift labels", tape.value(predicted, 1, 8))] if copied and not answers else []
    with tape.alive(rows, *labels):
        chosen, sums = tape.value(predicted, 1, 4), tape.value(predicted, 1, 4)
        tape.apply("gather", [(rows, NEW)], chosen, [rows, *labels])
        parts = Value(rows.storage, predicted, logits.coefficient, 4)
        tape.apply("unbind", [(rows, NEW)], parts, traits=SAVES_NOTHING)
        alone = [(predicted, 2 * 4 * logits.width)] if answers and builder.settings.regime.one_sequence else []
        tape.apply("logsumexp", [(parts, NEW)], sums, [rows, sums], traits=Traits(workspace=alone))
        return _compared(tape, chosen, sums, tape.value(predicted, 1, 1))


def _compared(tape: Tape, result: Value, sums: Value | None = None, prompts: Value | None = None) -> Value:
    """Record a loss of a few numbers over log-probabilities, which saves what of them is of prompts; return it."""
    inputs = [(value, NEW) for value in (result, sums) if value is not None]
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("compare", inputs, loss, [] if prompts is None else [prompts])


def pair_log_probabilities(builder: Builder, logits: Value, kernel: PairKernel, *, nll: bool) -> Value:
    """Record log-probabilities of chosen and rejected answers, compared with each other; return the loss.

    Args:
        logits: In fp32, as the model returns them: of the chosen answers, then of the rejected ones.
        kernel: How it looks at them where they are.
        nll: Whether the likelihood of the chosen answers is a second loss.

    Source:
        ``concatenated_forward`` and ``get_batch_logps`` in trl/experimental/orpo/orpo_trainer.py and cpo/cpo_trainer.py
        (0.29.0, 1.16.0); ``selective_log_softmax`` in trl/trainer/utils.py.
    """
    tape, predicted = builder.tape, Quantity.PREDICTED_TOKENS
    with tape.alive(logits):
        losses = []
        if kernel != "softmax":
            labels = tape.make("labels", tape.value(Quantity.TOKENS, 1, LABEL_BYTES))
            losses = [_chosen_likelihood(builder, logits, labels)] if nll else []
        rows = Value(logits.storage, predicted, logits.coefficient, 4)
        tape.apply("slice", [(logits, NEW)], rows, traits=SAVES_NOTHING)
        targets = tape.make("shift labels", tape.value(predicted, 1, LABEL_BYTES))
        mask = tape.make("mask", tape.value(predicted, 1, 1))
        if kernel == "fused":
            result, statistics = tape.value(predicted, 2, 4), tape.value(predicted, 2, 4)
            saved = [rows, targets, statistics]
            tape.apply("log-probabilities", [(rows, NEW)], (result, statistics), saved, traits=Traits(custom=True))
            losses.append(result)
        elif kernel == "softmax":
            losses.append(_of_softmax(tape, rows, targets))
        else:
            losses += _row_by_row(tape, rows, targets)
        loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
        return tape.apply("compare", [(value, NEW) for value in losses], loss, [mask])


def _of_all_tokens(tape: Tape, logits: Value) -> Value:
    """Record log-probabilities of all tokens, whose labels are turned by one, and a loss that compares them; return the loss."""
    # Source: ``concatenated_forward`` in swift/rlhf_trainers/dpo_trainer.py and ``get_per_token_logps`` in
    # rlhf_mixin.py (4.6.0); ``selective_log_softmax`` in trl/trainer/utils.py (0.29.0).
    tokens = logits.quantity
    with tape.alive(logits):
        turned = tape.make("turn labels", tape.value(tokens, 1, LABEL_BYTES))
        mask = tape.make("mask", tape.value(tokens, 1, 1))
        targets = tape.make("labels", tape.value(tokens, 1, LABEL_BYTES))
        mean = tape.make("mean of logits", tape.value(tokens, 1, 4))
        with tape.alive(turned, mask, targets, mean):
            result = _row_by_row(tape, logits, targets)
            loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
            return tape.apply(
                "compare", [(value, NEW) for value in result], loss, [tape.make("mask", tape.value(tokens, 1, 1))]
            )


def _of_softmax(tape: Tape, rows: Value, targets: Value) -> Value:
    """Record the log-softmax of rows that lie apart, which its kernel copies first, and what targets choose of it; return that."""
    # Source: ``get_batch_logps`` in llamafactory/train/trainer_utils.py (0.9.5), lines 592 to 640; ``host_softmax`` in
    # aten/src/ATen/native/cuda/SoftMax.cu (v2.13.0).
    logs = tape.value(rows.quantity, rows.width, 4, part=Part.LOGITS)
    tape.apply("log_softmax", [(rows, NEW)], logs, [logs], traits=Traits(scratch=[(rows.quantity, rows.coefficient)]))
    chosen = tape.value(rows.quantity, 1, 4)
    tape.apply("gather", [(logs, NEW)], chosen, [logs, targets])
    return chosen


def _row_by_row(tape: Tape, rows: Value, targets: Value) -> list[Value]:
    """Record chosen logits, and a sum of exponentials for each row in turn; return both."""
    predicted = rows.quantity
    chosen, sums = tape.value(predicted, 1, 4), tape.value(predicted, 1, 4)
    tape.apply("gather", [(rows, NEW)], chosen, [rows, targets])
    parts = Value(rows.storage, predicted, rows.coefficient, 4)
    tape.apply("unbind", [(rows, NEW)], parts, traits=SAVES_NOTHING)
    tape.apply("logsumexp", [(parts, NEW)], sums, [rows, sums])
    return [chosen, sums]


def _chosen_likelihood(builder: Builder, logits: Value, labels: Value) -> Value:
    """Record cross-entropy of the chosen answers, whose rows come first; copied where there are several; return the loss."""
    tape, predicted, one = builder.tape, Quantity.PREDICTED_TOKENS, builder.settings.regime.one_pair
    half = logits.coefficient // 2
    chosen = Value(logits.storage, logits.quantity, half, 4)
    tape.apply("rows of chosen answers", [(logits, NEW)], chosen, traits=SAVES_NOTHING)
    rows = Value(logits.storage, predicted, half, 4)
    tape.apply("slice", [(chosen, NEW)], rows, traits=SAVES_NOTHING)
    if not one:
        cut, rows = rows, _half_of(tape, predicted, half)
        tape.apply("copy", [(cut, SAME)], rows, traits=SAVES_NOTHING)
    targets = labels if one else tape.make("shift chosen labels", tape.value(predicted, 1, LABEL_BYTES // 2))
    logs, loss = _half_of(tape, predicted, half), tape.value(ONE, 0, 4, part=Part.LOGITS)
    tape.apply("log_softmax", [(rows, NEW)], logs, [logs])
    return tape.apply("nll_loss", [(logs, NEW)], loss, [logs, tape.value(ONE, 1, 4), targets])


def _half_of(tape: Tape, quantity: Quantity, coefficient: int) -> Value:
    """Return a new tensor of logits in fp32 of half of the rows."""
    value = tape.value(quantity, coefficient, 1, part=Part.LOGITS)
    value.element_bytes = 4
    return value


def answered(builder: Builder, x: Value, *, some: bool) -> Value:
    """Return what the head is given of tokens that a generated one follows, where it forms whole logits of them alone."""
    if not some:
        return x
    cut = Value(x.storage, Quantity.ANSWERED_TOKENS, x.coefficient, x.element_bytes)
    builder.tape.apply("slice", [(x, NEW)], cut, traits=SAVES_NOTHING)
    if builder.settings.regime.one_sequence:
        return cut  # its rows lie in order
    rows = builder.tape.value(Quantity.ANSWERED_TOKENS, x.width, x.element_bytes)
    return builder.tape.apply("copy", [(cut, SAME)], rows, traits=SAVES_NOTHING)


def last_score(builder: Builder, scores: Value) -> Value:
    """Record the loss over the scores of rows' last tokens, a few numbers; return it."""
    # Source: ``compute_loss`` in trl/trainer/reward_trainer.py (1.16.0).
    loss = builder.tape.value(ONE, 0, 4, part=Part.LOGITS)
    return builder.tape.apply("score of the last token", [(scores, NEW)], loss, traits=SAVES_NOTHING)
