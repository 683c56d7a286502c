"""What to give where a trainer's files do not say something that a plan needs."""

SECTIONS = ("method", "model", "launcher", "let")
"""Results that are no keys of a training config."""

MODEL = "model.given"
"""The result that names a model, by its id, path or entry."""

NEEDED = {MODEL: "the model", "micro_batch_size": "--micro-batch-size N", "sequence_length": "--sequence-length N"}
"""Results that have an argument of their own."""


def need_of(name: str) -> str:
    """Return what to give where a result is missing.

    Example:
        >>> need_of("micro_batch_size"), need_of("adapter.rank")
        ('--micro-batch-size N', '--set adapter.rank=VALUE')
    """
    key = name.removeprefix("training.")
    return NEEDED.get(key) or (f"the value of {key}" if key.partition(".")[0] in SECTIONS else f"--set {key}=VALUE")
