"""An embedding with an adapter on a tape: rows of its first matrix, times its second, are added to rows of the table."""

from collections.abc import Container
from dataclasses import replace

from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.blocks.projections import plain_linear
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value


def row_sums(width: int) -> list[tuple[Quantity, int]]:
    """Return what sorting tokens and summing their gradients takes in a table of ``width`` features."""
    return [
        *[(Quantity.SORTED_TOKENS, 8)] * 3,
        *[(Quantity.TOUCHED_ROWS, 8)] * 2,
        (Quantity.PARTIAL_SUMS, 8),
        (Quantity.PARTIAL_SUMS, 4 * width),
    ]


def has_adapter(name: str, weights: Container[str]) -> bool:
    """Tell whether an embedding of this name has an adapter among some parameters."""
    return f"{name}.lora_embedding_A.weight" in weights


def adapted_embedding(builder: Builder, x: Value, name: str, *, scales: bool, asks: bool) -> Value:
    """Return rows of a table with what its adapter adds, in their own dtype.

    The first matrix is looked up in as it stands, transposed: its gradient has another layout, and is copied to be stored.

    Args:
        x: Rows of the table.
        scales: Whether the module scales its rows by a tensor, and what is added likewise.
        asks: Whether scaled rows are made to need a gradient.

    Source:
        ``Embedding.forward`` in peft/tuners/lora/layer.py (0.21.2).
    """
    tape = builder.tape
    if scales:
        x = builder.pointwise("scale", x)
        x.needs_gradient = asks
    down = builder.weight(f"{name}.lora_embedding_A.weight")
    down = replace(down, copy_bytes=0, converted=True)
    with tape.alive(x):
        rows = tape.value(TOKENS, down.rows, down.element_bytes)
        tape.apply("adapter's embedding", [], rows, weights=[down], traits=Traits(workspace=row_sums(down.rows)))
        with tape.alive(rows):
            product = plain_linear(builder, rows, f"{name}.lora_embedding_B", x.width)
            added = builder.pointwise("scale", product)
            added = builder.pointwise("scale", added) if scales else added
    with tape.alive(rows, added):
        if (
            tape.leaf is x and x.element_bytes == added.element_bytes
        ):  # which keeps a copy, as the other term has the same
            total = tape.apply("add", [(x, NEW), (added, SAME)], builder.fresh(x), traits=SAVES_NOTHING)
        else:
            total = builder.add(x, added)
        return builder.cast(total, x.element_bytes, foreign=x.foreign)
