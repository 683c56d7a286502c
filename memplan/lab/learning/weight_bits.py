"""Loss against the bits of the weights themselves, without a master copy, by format and rounding."""

from collections.abc import Sequence

from memplan.catalog.catalog import Catalog
from memplan.errors import InvalidFileError
from memplan.lab.experiment_record import Row
from memplan.lab.learning.variants import Size, Task, Variant, chosen, comparison_task, lab_setup, percent_text
from memplan.lab.training.loop import Rounding, TrainingOptions
from memplan.report.experiments import row_of
from memplan.training.resolved import TrainingSetup

WEIGHTS = ("fp32", "bf16", "q8-0", "q4-0", "iq3-xxs", "iq2-xxs")
"""Of the hidden matrices; embedding and head stay fp32 but for bf16, norms always."""

ROUNDINGS = ("nearest", "stochastic")


def weight_bits(
    catalog: Catalog, size: Size, seeds: Sequence[int], weights: Sequence[str] = (), device: str = "cpu"
) -> Task:
    """Return the experiment.

    Args:
        size: The model, whose widths are multiples of 256 for formats with such blocks.
        weights: Of ``WEIGHTS``; all by default.

    Raises:
        UnknownNameError: A format is not known.
        InvalidFileError: Rows of the model do not divide into its blocks.
    """
    names = chosen("weight format", weights, WEIGHTS, WEIGHTS[0])
    variants = [
        variant_of(name, rounding, catalog, size, device)
        for name in names
        for rounding in (ROUNDINGS if name != WEIGHTS[0] else ("none",))
    ]
    settings = {
        "momentum": "fp32",
        "gradients": "bf16",
        "master_weights": "none",
        "formats_apply_to": "hidden matrices; bf16 to embedding and head too",
    }
    return comparison_task("weight-bits", variants, size, seeds, settings, findings)


def variant_of(name: str, rounding: str, catalog: Catalog, size: Size, device: str) -> Variant:
    """Return the model with its matrices in one format."""
    setup = lab_setup(catalog, size, weights=name, gradient="bf16")
    _refuse_parted_blocks(name, setup, size)
    stored = setup.formats["hidden_matrix"]
    keys = {"weights": name, "rounding": rounding, "bytes_per_parameter": stored.block_bytes / stored.block_elements}
    kind: Rounding = "stochastic" if rounding == "stochastic" else "nearest"
    return Variant(keys, setup, TrainingOptions(steps=size.steps, rounding=kind, device=device))


def _refuse_parted_blocks(name: str, setup: TrainingSetup, size: Size) -> None:
    """Raise where a format's blocks do not fill the rows: such matrices would be stored as something else."""
    block = setup.formats["hidden_matrix"].block_elements
    for tensor in size.model.inventory:
        if tensor.role == "hidden_matrix" and tensor.shape[-1] % block:
            raise InvalidFileError(
                [f"{name}: rows of {tensor.shape[-1]} do not divide into blocks of {block} elements"]
            )


def findings(rows: Sequence[Row]) -> list[str]:
    """Return what follows from the rows that are there."""
    sentences = []
    for name in WEIGHTS[1:]:
        nearest, random = (row_of(rows, weights=name, rounding=rounding) for rounding in ROUNDINGS)
        if nearest and random:
            sentences.append(
                f"{name}, {nearest['bytes_per_parameter']:.4g} bytes for each weight: {percent_text(nearest['gap_percent'])} "
                f"rounded to nearest, {percent_text(random['gap_percent'])} rounded stochastically."
            )
    coded = [row for row in rows if row["weights"] not in ("fp32", "bf16") and row["loss"] is not None]
    worst = [row for row in coded if row["rounding"] == "nearest"]
    better = [
        row
        for row in worst
        if (other := row_of(coded, weights=row["weights"], rounding="stochastic"))
        and other["loss"]["mean"] < row["loss"]["mean"]
    ]
    if worst:
        sentences.append(f"Stochastic rounding is better than nearest for {len(better)} of {len(worst)} block formats.")
    few = [row["loss"]["mean"] for row in worst if row["bytes_per_parameter"] < 1]
    if len(few) > 1 and (apart := 100 * (max(few) / min(few) - 1)) < 1:
        sentences.append(
            f"Rounded to nearest, the {len(few)} formats below 8 bits end within {apart:.1f} % of one another: most "
            "updates are lost, whatever the format."
        )
    return sentences
