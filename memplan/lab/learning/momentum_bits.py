"""Loss against the bits of Muon's momentum: on the notes' own problem, and on a tiny language model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.lab.experiment_record import Outcome, Progress, Row, interval
from memplan.lab.learning.teacher_student import STEPS, StudentRun, store_of, student_run
from memplan.lab.learning.variants import (
    LIMITS,
    Size,
    Task,
    Variant,
    chosen,
    compared,
    gap_percent,
    lab_setup,
    percent_text,
    step_text,
)
from memplan.lab.training.loop import TrainingOptions, library_text
from memplan.lab.training.optimizer_groups import with_momentum
from memplan.muon.state_codecs.state_formats import DEFAULT_BLOCK, momentum_codec
from memplan.report.experiments import row_of

TEACHER, LANGUAGE = "teacher-student", "language-model"
PROBLEMS = (TEACHER, LANGUAGE)
BASELINE = "fp32"


@dataclass(frozen=True, slots=True)
class Momentum:
    """A way to store momentum in the language model."""

    format: str
    block: int = DEFAULT_BLOCK
    rounding: str = "nearest"


MOMENTA: dict[str, Momentum] = {
    "fp32": Momentum("fp32"),
    "bf16": Momentum("bf16"),
    "int8": Momentum("int8"),
    "int4": Momentum("int4"),
    "int4-b32": Momentum("int4", block=32),
    "int4-b2048": Momentum("int4", block=2048),
    "int4-stochastic": Momentum("int4", rounding="stochastic"),
    "gauss4": Momentum("gauss4"),
    "gauss3": Momentum("gauss3"),
    "gauss2": Momentum("gauss2"),
    "int2": Momentum("int2"),
    "int2-stochastic": Momentum("int2", rounding="stochastic"),
    "int2-no-zero": Momentum("int2-no-zero"),
    "notes-2": Momentum("int2-notes"),
}
"""Of the language model; the notes' quantiser has a range for each block there, not for each tensor."""

STORES = (
    "fp32", "notes-8", "notes-4", "notes-3", "notes-2",
    "int8", "int4", "gauss4", "gauss3", "gauss2", "int2",
)  # fmt: skip
"""Of the teacher and student."""

NAMES = tuple(dict.fromkeys((*STORES, *MOMENTA)))
STUDENT_WEIGHTS = ("q4-0", "fp32")


def momentum_bits(
    catalog: Catalog,
    size: Size,
    seeds: Sequence[int],
    momenta: Sequence[str] = (),
    problems: Sequence[str] = (),
    device: str = "cpu",
) -> Task:
    """Return the experiment.

    Args:
        size: The language model, and its steps; the teacher's test is always the notes'.
        momenta: Names of ``NAMES``; all by default.
        problems: Of ``PROBLEMS``; both by default.

    Raises:
        UnknownNameError: A name is not known.
    """
    names = chosen("momentum", momenta, NAMES, BASELINE)
    problems = problems or PROBLEMS
    chosen("problem", problems, PROBLEMS, problems[0])
    stores = [name for name in STORES if name in names] if TEACHER in problems else []
    variants = [variant_of(name, catalog, size, device) for name in MOMENTA if name in names]
    variants = variants if LANGUAGE in problems else []
    students = len(STUDENT_WEIGHTS) * len(stores) * len(seeds)

    def run(progress: Progress) -> Outcome:
        rows = teacher_rows(stores, seeds, progress)
        if variants:
            rows += [
                {"problem": LANGUAGE, "weights": "fp32", **row}
                for row in compared(variants, size, seeds, progress, students)
            ]
        settings: dict[str, Any] = {"teacher_student_steps": STEPS, "language_model": size.settings(library_text())}
        return Outcome("momentum-bits", settings, seeds, rows, findings(rows), LIMITS)

    return Task(students + len(variants) * len(seeds), run)


def variant_of(name: str, catalog: Catalog, size: Size, device: str) -> Variant:
    """Return the language model with one kind of momentum."""
    momentum = MOMENTA[name]
    codec = momentum_codec(momentum.format, momentum.block)
    plain = codec.block_elements == 1
    keys = {
        "momentum": name,
        "format": momentum.format,
        "block": None if plain else momentum.block,
        "rounding": momentum.rounding,
        "bytes_per_parameter": codec.block_bytes / codec.block_elements,
    }
    setup = with_momentum(lab_setup(catalog, size), momentum.format, momentum.block)
    matrices = {
        "momentum_format": momentum.format,
        "block_elements": momentum.block,
        "momentum_rounding": momentum.rounding,
    }
    return Variant(keys, setup, TrainingOptions(steps=size.steps, matrix_options=matrices, device=device))


def teacher_rows(stores: Sequence[str], seeds: Sequence[int], progress: Progress) -> list[Row]:
    """Return the rows of the notes' own problem, for weights of both kinds."""
    rows: list[Row] = []
    done = 0
    for weights in STUDENT_WEIGHTS:
        baseline: list[StudentRun] = []
        for name in stores:
            runs = []
            for seed in seeds:
                runs.append(student_run(name, weights, seed))
                done += 1
                progress(done, f"{weights} weights, {name}: {runs[-1].loss:.3f}")
            baseline = baseline or runs
            rows.append(_teacher_row(name, weights, runs, baseline))
    return rows


def _teacher_row(name: str, weights: str, runs: Sequence[StudentRun], baseline: Sequence[StudentRun]) -> Row:
    losses = [run.loss for run in runs]
    bad = [run.first_bad_step for run in runs if run.first_bad_step is not None]
    return {
        "problem": TEACHER,
        "weights": weights,
        "momentum": name,
        "format": name,
        "block": None if name.startswith("notes-") or name == BASELINE else DEFAULT_BLOCK,
        "rounding": "nearest",
        "bytes_per_parameter": store_of(name).bytes_per_parameter,
        "loss": interval(losses),
        "gap_percent": gap_percent(losses, [run.loss for run in baseline]),
        "diverged": len(bad),
        "first_bad_step": interval(bad),
    }


# ------------------------------------------------------------------ sentences
def findings(rows: Sequence[Row]) -> list[str]:
    """Return what follows from the rows that are there."""
    parts = (_divergence(rows), _four_bits(rows), _language(rows), _codebooks(rows), _rounding(rows), _blocks(rows))
    return [sentence for sentence in parts if sentence]


def _divergence(rows: Sequence[Row]) -> str:
    theirs = row_of(rows, problem=TEACHER, weights="q4-0", momentum="notes-2")
    if theirs is None:
        return ""
    ours = [
        row
        for name in ("gauss2", "int2")
        if (row := row_of(rows, problem=TEACHER, weights="q4-0", momentum=name)) is not None
    ]
    gaps = [f"{row['momentum']} {percent_text(row['gap_percent'])}" for row in ours]
    sound = f"; with a scale for each block: {', '.join(gaps)}" if gaps else ""
    return (
        f"The notes' 2-bit quantiser diverges on their own problem: {theirs['diverged']} of "
        f"{_runs(theirs) + theirs['diverged']} runs are not finite, from {step_text(theirs['first_bad_step'])} on "
        f"(the notes: after about 100 steps){sound}."
    )


def _runs(row: Row) -> int:
    """Return the runs behind a finite loss, 0 where one was not finite."""
    return 0 if row["loss"] is None else len(row["loss"]["values"])


def _four_bits(rows: Sequence[Row]) -> str:
    coded, exact = (row_of(rows, problem=TEACHER, weights=kind, momentum="notes-4") for kind in STUDENT_WEIGHTS)
    if coded is None or exact is None:
        return ""
    block = row_of(rows, problem=TEACHER, weights="fp32", momentum="int4")
    sound = f"; with a scale for each block {percent_text(block['gap_percent'])}" if block else ""
    return (
        f"The notes' 4-bit quantiser costs {percent_text(coded['gap_percent'])} on Q4_0 weights (the notes: +4 %), "
        f"where the weights hold the loss back, and {percent_text(exact['gap_percent'])} on fp32 weights{sound}."
    )


def _language(rows: Sequence[Row]) -> str:
    by_format = [(name, row_of(rows, problem=LANGUAGE, momentum=name)) for name in ("int8", "int4", "int2", "notes-2")]
    there = [f"{name} {percent_text(row['gap_percent'])}" for name, row in by_format if row]
    theirs = row_of(rows, problem=LANGUAGE, momentum="notes-2")
    calm = (
        " Muon gives every update the same size, and so keeps even the notes' 2-bit codes finite."
        if theirs and not theirs["diverged"]
        else ""
    )
    return f"The language model against fp32 momentum: {', '.join(there)}.{calm}" if there else ""


def _codebooks(rows: Sequence[Row]) -> str:
    pairs = []
    for bits in (4, 2):
        linear, gauss = (row_of(rows, problem=LANGUAGE, momentum=f"{kind}{bits}") for kind in ("int", "gauss"))
        if linear and gauss:
            pairs.append(
                f"in {bits} bits {percent_text(linear['gap_percent'])} linear and "
                f"{percent_text(gauss['gap_percent'])} Gaussian"
            )
    exact = [row_of(rows, problem=TEACHER, weights="fp32", momentum=name) for name in ("int4", "gauss4")]
    gaps = [percent_text(row["gap_percent"]) for row in exact if row is not None]
    other = ""
    if len(gaps) == 2:
        other = (
            f" On the notes' problem with fp32 weights, where momentum itself is the update, 4 bits cost {gaps[0]} "
            f"linear and {gaps[1]} Gaussian."
        )
    return f"The language model by codebook, at equal bytes: {'; '.join(pairs)}.{other}" if pairs else ""


def _rounding(rows: Sequence[Row]) -> str:
    nearest, random = (row_of(rows, problem=LANGUAGE, momentum=name) for name in ("int4", "int4-stochastic"))
    if not nearest or not random or not nearest["loss"] or not random["loss"]:
        return ""
    helps = random["loss"]["mean"] < nearest["loss"]["mean"]
    return (
        f"Stochastic rounding {'helps' if helps else 'does not help'} 4-bit momentum: "
        f"{percent_text(random['gap_percent'])} against {percent_text(nearest['gap_percent'])} to nearest."
    )


def _blocks(rows: Sequence[Row]) -> str:
    by_block = [
        (block, row_of(rows, problem=LANGUAGE, format="int4", block=block, rounding="nearest"))
        for block in (32, 128, 2048)
    ]
    there = [f"{block}: {percent_text(row['gap_percent'])}" for block, row in by_block if row]
    return f"Linear 4-bit momentum by the elements that share a scale: {', '.join(there)}." if len(there) > 1 else ""
