"""What distillation forms of whole logits, a student's and its teacher's, on a tape: their divergence."""

from collections.abc import Sequence

from memplan.catalog.config_keys.method_keys import Divergence
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value

MASK_BYTES = 1
"""Of a token: whether it counts."""


def whole_divergence(builder: Builder, logits: Value, kind: Divergence, cached: Sequence[tuple[int, int]]) -> Value:
    """Record the divergence of a student's logits from its teacher's, of all tokens but each row's last; return the loss.

    Args:
        logits: The student's, as its model returns them.
        kind: What they are compared by.
        cached: Quantities, and the bytes for each unit of them of keys and values that the teacher returns beside its own.

    Formula:
        ``kl_div(input, target) = exp(target) * (target - input)``, of log-softmaxes of logits that are divided by the temperature.

    Source:
        ``compute_loss`` and ``generalized_jsd_loss`` in trl/experimental/gkd/gkd_trainer.py (1.16.0); ``kl_div`` in
        aten/src/ATen/native/Loss.cpp and ``logsumexp`` in ReduceOps.cpp (v2.13.0).
    """
    tape, tokens, predicted = builder.tape, Quantity.TOKENS, Quantity.PREDICTED_TOKENS
    width, size = logits.width, logits.element_bytes
    with tape.alive(logits):
        teachers = tape.make("teacher's logits", tape.value(tokens, width, size, part=Part.LOGITS))
        named = "teacher's keys and values"
        cache = [tape.make(named, tape.value(Quantity(quantity), bytes_, 1)) for quantity, bytes_ in cached]
        with tape.alive(teachers, *cache):
            rows = Value(logits.storage, predicted, logits.coefficient, size)
            tape.apply("slice", [(logits, NEW)], rows, traits=SAVES_NOTHING)

            def new(times: int = 1) -> Value:
                return tape.value(predicted, times * width, size, part=Part.LOGITS)

            own = tape.apply("divide", [(rows, NEW)], new(), traits=SAVES_NOTHING)
            others = tape.make("divide", new(), teachers)
            with tape.alive(own, others):
                logs = new()
                tape.apply("log_softmax", [(own, NEW)], logs, [logs])
                theirs = tape.make("log_softmax", new(), others)
                with tape.alive(logs, theirs):
                    return _compared(builder, logs, theirs, kind)


def _compared(builder: Builder, logs: Value, theirs: Value, kind: Divergence) -> Value:
    """Record the loss of two log-softmaxes; return it."""
    tape = builder.tape
    if kind == "forward-kl":
        return _mean(tape, _kl_to_teacher(builder, logs, theirs))
    if kind == "reverse-kl":
        return _mean(tape, _kl_of_student(builder, theirs, logs))
    mixture = _mixture(builder, logs, theirs)
    with tape.alive(mixture):
        of_teacher = _kl_to_teacher(builder, mixture, theirs)
        with tape.alive(of_teacher):
            of_student = _kl_of_student(builder, mixture, logs)
            with tape.alive(of_student):
                parts = [builder.pointwise("weigh", part) for part in (of_teacher, of_student)]
                total = builder.fresh(logs)
                tape.apply("add", [(part, SAME) for part in parts], total, traits=SAVES_NOTHING)
                return _mean(tape, total)


def _mixture(builder: Builder, logs: Value, theirs: Value) -> Value:
    """Record the log of a mixture of both distributions; return it."""
    tape, size = builder.tape, logs.element_bytes
    own, other = builder.pointwise("add", logs), builder.fresh(logs)
    with tape.alive(own):
        tape.make("add", other, theirs)
        both = tape.value(logs.quantity, 2 * logs.width, size, part=Part.LOGITS)
        tape.apply("stack", [(own, SAME)], both, traits=SAVES_NOTHING)
        tape.touch(other)
    mixture, whole = builder.fresh(logs), (both.quantity, both.coefficient)
    # backward: differences from the result and their exponentials, beside the gradient that it forms of them
    traits = Traits(workspace=[whole, whole])
    return tape.apply("logsumexp", [(both, NEW)], mixture, [both, mixture], traits=traits)


def _kl_to_teacher(builder: Builder, logs: Value, theirs: Value) -> Value:
    """Record the divergence of the teacher's distribution, whose exponentials are saved, from one that is learnt."""
    tape = builder.tape
    shares = tape.make("exp", builder.fresh(logs), theirs)
    with tape.alive(shares):
        gap = builder.pointwise("sub", logs)
        return builder.pointwise("mul", gap, (shares,))


def _kl_of_student(builder: Builder, other: Value, logs: Value) -> Value:
    """Record the divergence of the student's own distribution from another."""
    tape, shares, gap, result = builder.tape, *(builder.fresh(logs) for _ in range(3))
    tape.apply("exp", [(logs, NEW)], shares, [shares])
    tape.apply("sub", [(logs, SAME), (other, NEW)], gap, traits=SAVES_NOTHING)
    return tape.apply("mul", [(shares, NEW), (gap, NEW)], result, [shares, gap])


def _mean(tape: Tape, losses: Value) -> Value:
    """Record the mean over those that a mask chooses, as though each had a label; return it."""
    predicted = losses.quantity
    mask = tape.make("mask", tape.value(predicted, 1, MASK_BYTES))
    chosen = tape.value(predicted, losses.width, losses.element_bytes, part=Part.LOGITS)
    seen = tape.value(predicted, 0, losses.element_bytes)  # its gradient is one number, looked at for each element
    tape.apply("choose rows", [(losses, NEW)], (seen, chosen), [mask], traits=Traits(scratch=[(predicted, 16)]))
    with tape.alive(chosen):
        loss = tape.value(ONE, 0, losses.element_bytes, part=Part.LOGITS)
        return tape.apply("sum", [(seen, SAME)], loss, traits=SAVES_NOTHING)
