"""What memplan holds true of a printed figure: layouts, real models, planned jobs, records of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, cast

from memplan.catalog.catalog import Catalog
from memplan.catalog.recorded_rows import Records, Select
from memplan.documents.printed_numbers import Interval, Value
from memplan.plan.largest_model import max_parameters
from memplan.plan.planner import CompiledPlan, Device, bytes_per_parameter
from memplan.published import planned
from memplan.published.notes_accounting import BUFFER_SIDE
from memplan.published.planned import LLAMAS, Planned, shape_plan
from memplan.published.printed_cell import Asked
from memplan.step.states.optimizer_scratch import tensor_temporaries
from memplan.step.tapes.linear_forms import Part, part_bytes
from memplan.training.resolved import resolve
from memplan.units import format_count

Checkpointing = Literal["none", "full"]

LLAMA_7B = "llama-2-7b"


class Corrections:
    """The corrections by name, each a method that takes a cell.

    A method returns the value in the cell's own terms, text, or None where memplan has nothing to say.

    Args:
        catalog: Where models, configs and GPUs come from.
        records: Committed records of experiments.
    """

    def __init__(self, catalog: Catalog, records: Records) -> None:
        self.catalog = catalog
        self.records = records
        self.planned = Planned(catalog)
        self._activations: dict[str, CompiledPlan] = {}
        self._shapes: dict[tuple[str, str], CompiledPlan] = {}

    @cached_property
    def by_name(self) -> dict[str, Callable[[Asked], Value | None]]:
        """Name -> correction."""
        return {
            "bytes-per-parameter": self.bytes_per_parameter,
            "max-parameters": self.max_parameters,
            "max-parameters-ratio": self.max_parameters_ratio,
            "smallest-card": self.smallest_card,
            "largest-llama": self.largest_llama,
            "fewest-gpus": self.fewest_gpus,
            "model-states": self.model_states,
            "activations": self.activations,
            "newton-schulz": self.newton_schulz,
            "shape": self.shape,
            "traffic": self.traffic,
            "experiment": self.experiment,
            "range": self.range,
            "decades": self.decades,
            "norm-cv": self.norm_cv,
            "gap": self.gap,
            "status": self.status,
            "training": self.training,
            "recommendation": self.recommendation,
        }

    def value(self, asked: Asked) -> Value | None:
        """Return what is so in place of a cell, or None where memplan has nothing to say.

        Raises:
            KeyError: The cell names no correction that there is.
        """
        if asked.origin.says is not None:
            return asked.origin.says
        if asked.origin.truth is None:
            return None
        return self.by_name[asked.origin.truth](asked)

    def recommendation(self, asked: Asked) -> None:
        """Return nothing: a recommendation is a remark, worked out where it is shown."""

    def remark(self, asked: Asked) -> str:
        """Return what to say beside a correction, or in place of one: a model that fits, a recommendation."""
        if asked.origin.truth == "recommendation":
            return self.planned.recommended(asked.named("gpu"), asked.named("quantity"), self.records.verdict)
        if asked.origin.truth != "max-parameters":
            return ""
        found = self.planned.largest_fitting(asked.named("config"), self._device(asked))
        return "no catalog model" if found is None else f"{found[0]} ({format_count(found[1])})"

    # ---------------------------------------------------------------- layouts
    def bytes_per_parameter(self, asked: Asked) -> Value:
        """Return bytes per parameter with blocks as they are stored, and what they save against 12."""
        found = bytes_per_parameter(self.planned.setup(asked.named("config")))
        baseline = bytes_per_parameter(self.planned.setup("fp16-adam")).total
        return (
            {
                "weights": found.weights,
                "gradients": found.gradients,
                "states": found.optimizer_states,
                "total": found.total,
                "improvement": baseline / found.total,
            }[asked.named("quantity")],
        )

    def _device(self, asked: Asked) -> Device:
        return self.planned.device(asked.named("gpu"), asked.origin.count or 1)

    def max_parameters(self, asked: Asked) -> Value:
        """Return the uniform bound: what CUDA offers over true bytes per parameter."""
        return (max_parameters(self.planned.setup(asked.named("config")), self._device(asked)),)

    def max_parameters_ratio(self, asked: Asked) -> Value:
        """Return the bound of tier 1 over that of fp16-adam."""
        device = self._device(asked)
        tier, baseline = (max_parameters(self.planned.setup(name), device) for name in ("tier1", "fp16-adam"))
        return (Fraction(tier, baseline),)

    # ---------------------------------------------------------------- planned jobs
    def smallest_card(self, asked: Asked) -> Value:
        """Return the notes' card with the least memory that holds the real model."""
        return self.planned.smallest_card(asked.named("model"), asked.named("config")) or ">640GB"

    def largest_llama(self, asked: Asked) -> Value:
        """Return the largest of the five real Llamas that fits."""
        config, device = asked.named("config"), self._device(asked)
        fitting = [size for size, model in LLAMAS.items() if self.planned.fits(model, config, device)]
        return fitting[-1] if fitting else "< 1B"

    def fewest_gpus(self, asked: Asked) -> Value:
        """Return one RTX 4090 where it holds the real job, else the fewest H100."""
        model, config = asked.named("model"), asked.named("config")
        if self.planned.fits(model, config, self.planned.device("rtx4090")):
            return "1x RTX 4090"
        count = self.planned.fewest(model, config, "h100-sxm-80gb")
        return "no number of H100" if count is None else f"{count}x H100"

    def model_states(self, asked: Asked) -> Value:
        """Return weights, gradients and optimizer states of the real model, in bytes."""
        return (self.planned.plan(asked.named("model"), asked.named("config")).persistent_bytes,)

    def activations(self, asked: Asked) -> Value:
        """Return the most bytes of activations that Llama-2-7B holds at once, without logits."""
        kind = asked.named("quantity")
        if kind not in self._activations:
            setup = self.planned.setup("fp16-adam")
            config = replace(setup.config, activation_checkpointing=cast("Checkpointing", kind))
            changed = resolve(config, self.catalog, "fp16-adam")
            self._activations[kind] = CompiledPlan(self.planned.model(LLAMA_7B), changed)
        plan = self._activations[kind]
        values = plan.values(asked.counted("batch"), asked.counted("sequence"))
        return (max(part_bytes(candidate.form, values)[Part.ACTIVATIONS] for candidate in plan.candidates),)

    def shape(self, asked: Asked) -> Value | None:
        """Return a figure of one of the notes' shapes, planned to the byte."""
        if asked.origin.quantity is None:
            return None
        int8, fp32 = (self._shape(asked.named("shape"), name) for name in ("muon-int8", "muon-fp32"))
        states, before = int8.states.state_bytes, fp32.states.state_bytes
        figures: dict[str, tuple[Fraction | int, ...]] = {
            "parameters": (planned.parameters(fp32),),
            "weights": (fp32.states.weight_bytes,),
            "gradients": (fp32.states.gradient_bytes,),
            "fp32-states": (before,),
            "int8-states": (states,),
            "states-saving": (before - states, 1 - Fraction(states, before)),
            "saving": (before - states,),
            "reduction": (1 - Fraction(states, before),),
        }
        return figures[asked.origin.quantity]

    def _shape(self, name: str, optimizer: str) -> CompiledPlan:
        if (name, optimizer) not in self._shapes:
            from memplan.published.table_schema import Library

            shape = Library(self.catalog.root).shapes[name]
            self._shapes[name, optimizer] = shape_plan(name, shape, optimizer, self.catalog)
        return self._shapes[name, optimizer]

    # ---------------------------------------------------------------- Newton-Schulz
    def newton_schulz(self, asked: Asked) -> Value | None:
        """Return what torch.optim.Muon takes for a matrix of 4096 x 4096; nothing for dtypes that nothing runs."""
        dtype = asked.named("dtype")
        if dtype not in ("fp32", "bf16"):
            return None
        size = self._workspace(dtype)
        return (Fraction(self._workspace("fp32"), size) if asked.named("quantity") == "ratio" else size,)

    def _workspace(self, dtype: str) -> int:
        setup = planned.newton_schulz_setup(dtype, self.catalog)
        states = CompiledPlan(self.planned.model(LLAMA_7B), setup).states
        square = next(entry for entry in states.tensors if entry.tensor.shape == (BUFFER_SIDE, BUFFER_SIDE))
        return tensor_temporaries(setup, square).bytes

    # ---------------------------------------------------------------- records
    def traffic(self, asked: Asked) -> Value | None:
        """Return what the products of an iteration move with their additions fused."""
        if asked.origin.quantity != "total":
            return None
        found = self.records.interval(asked.named("record"), asked.origin.select or {}, asked.named("measure"))
        return None if found is None else (_middle(found),)

    def range(self, asked: Asked) -> Value | None:
        """Return from where to where the elements of a quantity lie, over steps and seeds."""
        selects = [{"quantity": name} for name in asked.named("quantity").split()]
        found = self.records.spread(asked.named("record"), selects, ("lowest", "largest"))
        if found is None:
            return None
        if asked.named("quantity").startswith("newton-schulz"):
            largest = 10 ** float(found.high)
            return f"-{largest:.1f} to {largest:.1f}, measured"
        return f"1e{round(found.low)} to 1e{round(found.high)}, measured"

    def decades(self, asked: Asked) -> Value | None:
        """Return how many powers of ten the elements of a quantity span, over steps and seeds."""
        selects = [{"quantity": name} for name in asked.named("quantity").split()]
        found = self.records.spread(asked.named("record"), selects, ("decades",))
        return None if found is None else f"{round(found.low)} to {round(found.high)}, measured"

    def experiment(self, asked: Asked) -> Value | None:
        """Return our own measurement of what a cell claims to have measured."""
        select = asked.origin.settled or asked.origin.select or {}
        found = self.records.interval(asked.named("record"), select, asked.named("measure"))
        return None if found is None else (_middle(found),)

    def norm_cv(self, asked: Asked) -> Value | None:
        """Return the coefficient of variation of update norms, the standard deviation over the mean."""
        found = self.records.interval(asked.named("record"), asked.origin.select or {}, "norm_cv")
        return None if found is None else (_middle(found),)

    def gap(self, asked: Asked) -> Value | None:
        """Return by how much the loss of a settled run exceeds that of fp32 momentum."""
        found = self.records.interval(asked.named("record"), asked.origin.settled or {}, "gap_percent")
        if found is None:
            return None
        return f"{float(found.low):+.1f} to {float(found.high):+.1f} % loss, {_run(asked.origin.settled or {})}"

    def training(self, asked: Asked) -> Value | None:
        """Return what our record of training says, with its gap in validation loss."""
        record = self.records.record(asked.named("record"))
        if not record:
            return None
        gap = record.get("gap_percent")
        if gap is None:
            return str(record["verdict"])
        return f"{record['verdict']}: {gap['low']:+.1f} to {gap['high']:+.1f} % loss"

    def status(self, asked: Asked) -> Value:
        """Return the status of memplan's config of that name."""
        return self.planned.setup(asked.named("config")).config.status


def _middle(interval: Interval) -> Fraction:
    return (interval.low + interval.high) / 2


def _run(select: Select) -> str:
    """Return the row of a record in words: its values, without the problem they were tried on."""
    return ", ".join(key if value is True else f"{key} {value}" for key, value in select.items() if key != "problem")
