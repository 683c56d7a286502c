"""What memplan holds true of a printed figure: layouts, real models, planned jobs, records of runs."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Literal, cast

from memplan.catalog.catalog import Catalog
from memplan.documents.printed_numbers import Records, Select, Value
from memplan.plan.bytes_per_parameter import bytes_per_parameter
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.sizes.largest_model import max_parameters
from memplan.published import planned
from memplan.published.judged_tables import CellInputs
from memplan.published.notes_accounting import BUFFER_SIDE, notes_rules
from memplan.published.planned import Planned, shape_plan
from memplan.step.states.optimizer_scratch import tensor_temporaries
from memplan.step.tapes.linear_forms import Part
from memplan.training.resolution.resolve_config import resolve
from memplan.units import format_count

Checkpointing = Literal["none", "full"]

LLAMA_7B = "llama-2-7b"


class Corrections:
    """The corrections by name, each a method that takes a cell.

    A method returns the value in the cell's own terms, text, or None where memplan has nothing to say.
    """

    def __init__(self, catalog: Catalog, records: Records) -> None:
        self.catalog = catalog
        self.records = records
        self.planned = Planned(catalog)
        self._activations: dict[str, CompiledPlan] = {}
        self._shapes: dict[tuple[str, str], CompiledPlan] = {}

    def value(self, inputs: CellInputs) -> Value | None:
        """Return what is so in place of a cell, or None where memplan has nothing to say.

        Raises:
            AttributeError: The cell names no correction that there is.
        """
        if inputs.origin.says is not None:
            return inputs.origin.says
        if inputs.origin.truth is None:
            return None
        return self.correction(inputs.origin.truth)(inputs)

    def correction(self, name: str) -> Callable[[CellInputs], Value | None]:
        """Return the method that a cell names, such as ``max-parameters``."""
        method: Callable[[CellInputs], Value | None] = getattr(self, name.replace("-", "_"))
        return method

    def recommendation(self, inputs: CellInputs) -> None:
        """Return nothing: a suggestion is a remark, computed where it is shown."""

    def remark(self, inputs: CellInputs) -> str:
        """Return what to say beside a correction, or in place of one: the largest model that fits, or a suggestion."""
        if inputs.origin.truth == "recommendation":
            return self.planned.suggested(inputs.named("gpu"), inputs.named("quantity"), self.records.verdict)
        if inputs.origin.truth != "max-parameters":
            return ""
        largest = self.planned.largest_fitting(inputs.named("config"), self._device(inputs))
        return "no catalog model" if largest is None else f"{largest[0]} ({format_count(largest[1])})"

    # ---------------------------------------------------------------- layouts
    def bytes_per_parameter(self, inputs: CellInputs) -> Value:
        """Return bytes per parameter with blocks as they are stored, and what they save against 12."""
        per_parameter = bytes_per_parameter(self.planned.setup(inputs.named("config")))
        baseline = bytes_per_parameter(self.planned.setup("fp16-adam")).total
        return (
            {
                "weights": per_parameter.weights,
                "gradients": per_parameter.gradients,
                "states": per_parameter.optimizer_states,
                "total": per_parameter.total,
                "improvement": baseline / per_parameter.total,
            }[inputs.named("quantity")],
        )

    def _device(self, inputs: CellInputs) -> Device:
        return self.planned.device(inputs.named("gpu"), inputs.origin.count or 1)

    def max_parameters(self, inputs: CellInputs) -> Value:
        """Return the uniform bound: what CUDA offers over true bytes per parameter."""
        return (max_parameters(self.planned.setup(inputs.named("config")), self._device(inputs)),)

    def max_parameters_ratio(self, inputs: CellInputs) -> Value:
        """Return the bound of tier 1 over that of fp16-adam."""
        device = self._device(inputs)
        tier, baseline = (max_parameters(self.planned.setup(name), device) for name in ("tier1", "fp16-adam"))
        return (Fraction(tier, baseline),)

    # ---------------------------------------------------------------- planned jobs
    def smallest_card(self, inputs: CellInputs) -> Value:
        """Return the notes' card with the least memory that holds the real model."""
        return self.planned.smallest_card(inputs.named("model"), inputs.named("config")) or ">640GB"

    def largest_llama(self, inputs: CellInputs) -> Value:
        """Return the largest of the five real Llamas that fits."""
        config, device = inputs.named("config"), self._device(inputs)
        fitting = [size for size, model in notes_rules().models.items() if self.planned.fits(model, config, device)]
        return fitting[-1] if fitting else "< 1B"

    def fewest_gpus(self, inputs: CellInputs) -> Value:
        """Return one RTX 4090 where it holds the real job, else the fewest H100."""
        model, config = inputs.named("model"), inputs.named("config")
        if self.planned.fits(model, config, self.planned.device("rtx4090")):
            return "1x RTX 4090"
        count = self.planned.fewest(model, config, "h100-sxm-80gb")
        return "no number of H100" if count is None else f"{count}x H100"

    def model_states(self, inputs: CellInputs) -> Value:
        """Return weights, gradients and optimizer states of the real model, in bytes."""
        return (self.planned.plan(inputs.named("model"), inputs.named("config")).persistent_bytes,)

    def activations(self, inputs: CellInputs) -> Value:
        """Return the most bytes of activations that Llama-2-7B holds at once, without logits."""
        kind = inputs.named("quantity")
        if kind not in self._activations:
            setup = self.planned.setup("fp16-adam")
            config = replace(setup.config, activation_checkpointing=cast("Checkpointing", kind))
            changed = resolve(config, self.catalog, "fp16-adam")
            self._activations[kind] = CompiledPlan(self.planned.model(LLAMA_7B), changed)
        plan = self._activations[kind]
        values = plan.values(inputs.counted("batch"), inputs.counted("sequence"))
        return (max(candidate.form.bytes(Part.ACTIVATIONS, values) for candidate in plan.candidates),)

    def shape(self, inputs: CellInputs) -> Value | None:
        """Return a figure of one of the notes' shapes, planned to the byte."""
        if inputs.origin.quantity is None:
            return None
        int8, fp32 = (self._shape(inputs.named("shape"), name) for name in ("muon-int8", "muon-fp32"))
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
        return figures[inputs.origin.quantity]

    def _shape(self, name: str, optimizer: str) -> CompiledPlan:
        if (name, optimizer) not in self._shapes:
            from memplan.published.table_schema import Library

            shape = Library(self.catalog.root).shapes[name]
            self._shapes[name, optimizer] = shape_plan(name, shape, optimizer, self.catalog)
        return self._shapes[name, optimizer]

    # ---------------------------------------------------------------- Newton-Schulz
    def newton_schulz(self, inputs: CellInputs) -> Value | None:
        """Return what torch.optim.Muon takes for a matrix of 4096 x 4096; nothing for dtypes that nothing runs."""
        dtype = inputs.named("dtype")
        if dtype not in ("fp32", "bf16"):
            return None
        size = self._workspace(dtype)
        return (Fraction(self._workspace("fp32"), size) if inputs.named("quantity") == "ratio" else size,)

    def _workspace(self, dtype: str) -> int:
        setup = planned.newton_schulz_setup(dtype, self.catalog)
        states = CompiledPlan(self.planned.model(LLAMA_7B), setup).states
        square = next(entry for entry in states.tensors if entry.tensor.shape == (BUFFER_SIDE, BUFFER_SIDE))
        return tensor_temporaries(setup, square).bytes

    # ---------------------------------------------------------------- records
    def traffic(self, inputs: CellInputs) -> Value | None:
        """Return what the products of an iteration move with their additions fused."""
        if inputs.origin.quantity != "total":
            return None
        return self._middle(inputs, inputs.origin.select, inputs.named("measure"))

    def _middle(self, inputs: CellInputs, select: Select | None, measure: str) -> Value | None:
        """Return the middle of what a row of a cell's record measured."""
        interval = self.records.interval(inputs.named("record"), select or {}, measure)
        return None if interval is None else ((interval.low + interval.high) / 2,)

    def range(self, inputs: CellInputs) -> Value | None:
        """Return from where to where the elements of a quantity lie, over steps and seeds."""
        selects = [{"quantity": name} for name in inputs.named("quantity").split()]
        spread = self.records.spread(inputs.named("record"), selects, ("lowest", "largest"))
        if spread is None:
            return None
        if inputs.named("quantity").startswith("newton-schulz"):
            largest = 10 ** float(spread.high)
            return f"-{largest:.1f} to {largest:.1f}, measured"
        return f"1e{round(spread.low)} to 1e{round(spread.high)}, measured"

    def decades(self, inputs: CellInputs) -> Value | None:
        """Return how many powers of ten the elements of a quantity span, over steps and seeds."""
        selects = [{"quantity": name} for name in inputs.named("quantity").split()]
        spread = self.records.spread(inputs.named("record"), selects, ("decades",))
        return None if spread is None else f"{round(spread.low)} to {round(spread.high)}, measured"

    def experiment(self, inputs: CellInputs) -> Value | None:
        """Return our own measurement of what a cell claims to have measured."""
        return self._middle(inputs, inputs.origin.settled or inputs.origin.select, inputs.named("measure"))

    def norm_cv(self, inputs: CellInputs) -> Value | None:
        """Return the coefficient of variation of update norms, the standard deviation over the mean."""
        return self._middle(inputs, inputs.origin.select, "norm_cv")

    def gap(self, inputs: CellInputs) -> Value | None:
        """Return by how much the loss of a settled run exceeds that of fp32 momentum."""
        interval = self.records.interval(inputs.named("record"), inputs.origin.settled or {}, "gap_percent")
        if interval is None:
            return None
        return f"{float(interval.low):+.1f} to {float(interval.high):+.1f} % loss, {_run(inputs.origin.settled or {})}"

    def training(self, inputs: CellInputs) -> Value | None:
        """Return what our record of training says, with its gap in validation loss."""
        record = self.records.record(inputs.named("record"))
        if not record:
            return None
        gap = record.get("gap_percent")
        if gap is None:
            return str(record["verdict"])
        return f"{record['verdict']}: {gap['low']:+.1f} to {gap['high']:+.1f} % loss"

    def status(self, inputs: CellInputs) -> Value:
        """Return the status of memplan's config of that name."""
        return self.planned.setup(inputs.named("config")).config.status


def _run(select: Select) -> str:
    """Return the row of a record in words: its values, without the problem they were tried on."""
    return ", ".join(key if value is True else f"{key} {value}" for key, value in select.items() if key != "problem")
