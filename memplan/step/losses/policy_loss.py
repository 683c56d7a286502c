"""What PPO learns by, on a tape: log-probabilities of a policy's answers, and a number of another model for each of their tokens."""

from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAVES_NOTHING, Traits, Value

FP32 = 4
NUMBERS_BYTES = 12
"""Of a generated token: what a loss of either saves of numbers that have no names besides."""

OF_A_PHASE = ("policy", "values")
"""Losses of a phase: of logits of tokens that were generated, and of numbers of these."""

COMPARED = ("log-probabilities", "divergence", "logits", *OF_A_PHASE)
"""Losses that a trainer forms of whole logits when the model's forward has ended, those logits alone, and those of a phase."""

COMPARING = frozenset(("divide", "log_softmax", "gather", "logsumexp", "compare"))
"""Operations of the loop, which run when the forward of both models has returned."""


def phase_loss(builder: Builder, results: Value, kind: str) -> Value:
    """Record a loss of what a model has returned, which is named on if it is a policy's logits; return it."""
    if kind == "values":
        return _of_values(builder, results)
    builder.tape.stays(*([results] if builder.settings.names_hidden else []))
    return _of_policy(builder, results)


def _of_policy(builder: Builder, logits: Value) -> Value:
    """Record the log-probabilities of generated tokens, whose logits are divided in place, and a loss of them; return it.

    The division is of a view: its backward copies the gradient of all logits, cuts out a copy of those of the answers and divides it.
    Rows are gone over one by one, whose gradients never take as much.

    Source:
        ``PPOTrainer.train`` in trl/experimental/ppo/ppo_trainer.py and ``selective_log_softmax`` in trl/trainer/utils.py (1.12.0);
        ``CopySlices::apply`` in torch/csrc/autograd/functions/tensor.cpp (v2.13.0).
    """
    tape, answers, size = builder.tape, Quantity.ANSWER_TOKENS, logits.element_bytes
    row = (answers, logits.width * size)
    rows = Value(logits.storage, answers, logits.coefficient, size)
    whole = (logits.quantity, logits.coefficient)
    with tape.alive(logits):
        tape.apply("divide", [(logits, NEW)], rows, traits=Traits(packs=False, workspace=[whole, row]))
        chosen = tape.value(answers, 1, size)
        if size == FP32:
            sums = tape.value(answers, 1, size)
            tape.apply("gather", [(rows, NEW)], chosen, [])
            tape.apply("logsumexp", [(rows, NEW)], sums, [rows, sums])
            return _compared(builder, chosen, sums)
        logs = tape.value(answers, logits.width, size, part=Part.LOGITS)
        tape.apply("log_softmax", [(rows, NEW)], logs, [logs])
        tape.apply("gather", [(logs, NEW)], chosen, [])
        return _compared(builder, chosen)


def _of_values(builder: Builder, values: Value) -> Value:
    """Record a loss of the numbers of tokens that have been generated; return it."""
    rows = Value(values.storage, Quantity.ANSWER_TOKENS, values.coefficient, values.element_bytes)
    builder.tape.apply("slice", [(values, NEW)], rows, traits=SAVES_NOTHING)
    return _compared(builder, rows)


def _compared(builder: Builder, *numbers: Value) -> Value:
    loss = builder.tape.value(ONE, 0, FP32, part=Part.LOGITS)
    saved = builder.tape.value(Quantity.ANSWER_TOKENS, NUMBERS_BYTES, 1)
    return builder.tape.apply("compare", [(value, NEW) for value in numbers], (loss, saved), [saved])
