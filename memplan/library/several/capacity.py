"""How much fits: ``memplan.largest`` on each GPU, and ``memplan.where``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, overload

from memplan.catalog.catalog import Catalog
from memplan.errors import InvalidFileError, MemplanError, match_hint, shown_value
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.job_options import FilePath, JobInputs, JobOptions, ModelGiven, job_inputs, refuse_set
from memplan.model.model import Model
from memplan.plan.sizes.largest_model import LargestModel
from memplan.report.document import Document
from memplan.training.resolved import TrainingSetup

if TYPE_CHECKING:  # each question imports what it alone needs
    from matplotlib.figure import Figure

    from memplan.library.lookup import Shapes
    from memplan.plan.memory_plan import Device, MemoryPlan
    from memplan.plan.sizes.placements import Placements
    from memplan.report.largest.largest_model_answer import Prices
    from memplan.solver.largest_per_device import Largest, Quantity

Sizes = Literal["parameters", "batch", "sequence", "lora-rank", "layers"]
SIZES: tuple[Sizes, ...] = ("parameters", "batch", "sequence", "lora-rank", "layers")
SOUGHT = {"batch": "micro_batch_size", "sequence": "sequence_length", "lora-rank": "adapter.rank"}
"""What is sought -> its key of a training config, which is not to be set then."""
BEGINS = {"grpo": ("batch", "sequence"), "kto": ("batch",)}
"""Stages that configs may not begin with: they compare two rows of a micro-batch, or a row holds a completion, so that those sizes may be set."""
CONFIGS = ("qlora", "lora", "bf16-adamw", "tier3")
"""Configs that the largest model is sought under where none is named."""
MOST_SIMULATED = 4
"""Devices, times configs, for which the largest is sought with the reserve simulated, up to two seconds each."""
PLAYS = 20
"""Runs that are simulated for the largest value on a device, mostly."""


# ------------------------------------------------------------------ the largest
@dataclass(frozen=True, repr=False, eq=False)
class LargestModels(Answer):
    """The largest model on each GPU under each config.

    Attributes:
        rows: For one config after the other, every GPU.
        catalog: What names were looked up in.
    """

    rows: tuple[LargestModel, ...]
    catalog: Catalog

    def figure(self) -> Figure:
        """Return a panel for each config, a line for each GPU."""
        from memplan.report.largest.largest_figure import largest_figure

        return largest_figure(self.document().data["rows"])

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan max``."""
        from memplan.published.judged_tables import printed_maxima
        from memplan.published.table_schema import Library
        from memplan.report.largest.largest_model_answer import max_document
        from memplan.report.screens.size_screens import max_screen

        document = max_document(self.rows, printed_maxima(Library(self.catalog.root)), unit)
        head, sentence = str(document.blocks[0]), str(document.blocks[-1])
        return replace(document, screen=lambda canvas: max_screen(self.rows, canvas, unit, head, sentence))


@dataclass(frozen=True, repr=False, eq=False)
class LargestValues(Answer):
    """The largest batch, sequence length, adapter rank or number of layers on each GPU.

    Attributes:
        of: What was sought.
        model: The model.
        setup: The training setup.
        rows: One for each GPU.
        instead: Configs of adapters that fit, where no config was given and all weights do not.
    """

    of: Quantity
    model: Model
    setup: TrainingSetup
    rows: tuple[Largest, ...]
    instead: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, int]:
        """The largest value that fits, by GPU; 0 where none does."""
        return {row.device.name: row.fits.value for row in self.rows}

    def figure(self) -> Figure:
        """Return a bar for each GPU."""
        from memplan.report.largest.largest_figure import values_figure

        return values_figure(self.of, f"{self.model.spec.name} with {self.setup.name}", self.rows)

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan max --for``."""
        from memplan.report.largest.largest_value_answer import largest_document
        from memplan.report.screens.size_screens import values_screen

        document = largest_document(
            self.of, self.model, self.setup, self.rows, unit, strict=strict, instead=self.instead
        )
        head, sentence = str(document.blocks[0]), str(document.blocks[-1])
        return replace(
            document, screen=lambda canvas: values_screen(self.rows, self.setup, canvas, self.of, head, sentence)
        )


@overload
def largest(
    model: None = None,
    of: Literal["parameters"] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[JobOptions],
) -> LargestModels: ...
@overload
def largest(model: ModelGiven, of: Quantity, **options: Unpack[JobOptions]) -> LargestValues: ...
@overload
def largest(model: FilePath | Shapes | Model, of: None = None, **options: Unpack[JobOptions]) -> LargestValues: ...
@overload
def largest(
    model: ModelGiven, of: Sizes, *, progress: Callable[[int, int], None] | None = None, **options: Unpack[JobOptions]
) -> LargestModels | LargestValues: ...
@checked
def largest(
    model: ModelGiven = None,
    of: Sizes | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[JobOptions],
) -> LargestModels | LargestValues:
    """Return the largest that each GPU holds: what is answered fits, and one more does not; by a share where no GPU is named.

    Args:
        model: As :func:`memplan.plan` takes it; none where the largest model is sought.
        of: ``parameters`` for a model, the default without one, or its ``batch``, the default with one, ``sequence``,
            ``lora-rank`` or ``layers``.
        progress: Is told how many answers there are, of how many: one for each GPU and config, or run that is simulated.
        options: Keywords of :class:`memplan.JobOptions`. Without ``gpu``: every GPU of the catalog; ``gpus`` share
            the job, as :func:`memplan.plan` has it, and pool their memory where a model is sought. Without ``config``: qlora, lora, bf16-adamw and tier3 for a model, lora for a rank, else
            bf16-adamw.

    Raises:
        InvalidFileError: A model where none is taken, or a rank for a config without adapters.
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> answer = memplan.largest("llama-3.1-8b", of="batch", gpu="rtx4090", config="qlora")
        >>> answer.values["rtx4090"]
        14
    """
    if of is None:
        of = "parameters" if model is None and options.get("shapes") is None else "batch"
    if of not in SIZES:
        hint = match_hint(str(of), SIZES, f"; known: {', '.join(SIZES)}")
        raise InvalidFileError([f"of: cannot maximise {shown_value(of)}{hint}"])
    inputs = job_inputs("largest", model, options)
    devices = inputs.devices(inputs.gpus if of == "parameters" else 1)
    if of != "parameters":
        from memplan.solver.largest_per_device import largest_values

        known = inputs.model()
        setup = _setup_seeking(of, known, inputs)
        played = _told_of(_simulated_on(devices), progress, PLAYS * len(devices))
        rows = tuple(largest_values(of, known, setup, devices, simulate=played))
        fitting = setup.config.adapter is not None or any(row.fits.value or row.tight.value for row in rows)
        instead = () if fitting or inputs.config is not None else _fitting_adapters(of, known, inputs, devices)
        return LargestValues(of, known, setup, rows, instead)
    if model is not None or inputs.shapes is not None:
        raise InvalidFileError([f"--for parameters searches the catalog for a model: leave out {model!r}, or --for"])
    return _largest_models(inputs, devices, progress)


def _setup_seeking(of: Quantity, model: Model, inputs: JobInputs) -> TrainingSetup:
    """Return the setup of a job; the key of what is sought is not to be set, unless the stage has no such size to begin with."""
    setup = inputs.setup(model, "lora" if of == "lora-rank" else "bf16-adamw", inputs.gpus)
    if of in SOUGHT and of not in BEGINS.get(setup.config.method.stage, ()):
        refuse_set(inputs, {SOUGHT[of]: "it is what is sought"})
    return setup


def _fitting_adapters(of: Quantity, model: Model, inputs: JobInputs, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the configs of adapters under which a model fits on any of some devices, by the allocator's share."""
    from memplan.solver.largest_per_device import largest_values

    fitting = []
    for name in ("qlora", "lora"):
        with suppress(MemplanError):
            setup = inputs.setup(model, name, inputs.gpus)
            if any(row.fits.value for row in largest_values(of, model, setup, devices)):
                fitting.append(name)
    return tuple(fitting)


def _largest_models(
    inputs: JobInputs, devices: Sequence[Device], progress: Callable[[int, int], None] | None
) -> LargestModels:
    """Return the largest model of the catalog for each device under each config."""
    from memplan.library.lookup import catalog_model
    from memplan.plan.sizes.largest_model import largest_models, told
    from memplan.step.kernels.card_support import refuse_unable

    setups = [inputs.setup(None, name) for name in (CONFIGS if inputs.config is None else (inputs.config,))]
    models = [(name, catalog_model(name, inputs.catalog)) for name in inputs.catalog.models]
    if len(setups) == len(devices) == 1:
        refuse_unable(setups[0], devices[0].gpu)
    played = _simulated_on([*devices] * len(setups))
    answered = told(progress, len(setups) * len(devices))
    rows = tuple(row for setup in setups for row in largest_models(models, setup, devices, played, answered))
    return LargestModels(rows, inputs.catalog)


def _simulated_on(devices: Sequence[Device]) -> Callable[..., MemoryPlan] | None:
    """Return what simulates the reserve of a plan, or none on more devices than anyone waits for."""
    if len(devices) > MOST_SIMULATED:
        return None
    from memplan.plan.reserve.simulation import simulated

    return partial(simulated, least=False)


def _told_of(
    played: Callable[..., MemoryPlan] | None, progress: Callable[[int, int], None] | None, parts: int
) -> Callable[..., MemoryPlan] | None:
    """Return what simulates a plan and tells of each that is done, of so many parts, which it never says are all done."""
    if played is None or progress is None:
        return played
    note = noting(progress, parts)

    def telling(plan: MemoryPlan, **options: bool) -> MemoryPlan:
        result = played(plan, **options)
        note()
        return result

    return telling


def noting(progress: Callable[[int, int], None] | None, parts: int) -> Callable[[], None]:
    """Return what tells of each part that is done, of about so many, and never that all are."""
    done = count(1)
    return lambda: None if progress is None else progress(min(next(done), parts - 1), parts)


# ------------------------------------------------------------------ where
@dataclass(frozen=True, repr=False, eq=False)
class Where(Answer):
    """The fewest GPUs of each kind for a job.

    Attributes:
        model: The model.
        setup: The training setup on one GPU.
        placements: Where the job fits.
        prices: What an hour of each GPU costs, where that was said.
    """

    model: Model
    setup: TrainingSetup
    placements: Placements
    prices: Prices | None

    @property
    def counts(self) -> dict[str, int]:
        """How many GPUs of each kind it takes; a bound, where ``placements.refusal`` says why it is only that."""
        return {row.device.name: row.count for row in self.placements.rows}

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan where``."""
        from memplan.report.largest.largest_model_answer import places_in_order, where_document
        from memplan.report.screens.size_screens import where_screen

        document = where_document(self.model, self.setup, self.placements, unit, self.prices)
        head, words = str(document.blocks[0]), [str(block) for block in document.blocks[2:]]
        ordered = places_in_order(self.placements, self.prices)
        return replace(document, screen=lambda canvas: where_screen(ordered, canvas, unit, head, words, self.prices))


@checked
def where(
    model: ModelGiven = None,
    *,
    price: FilePath | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[JobOptions],
) -> Where:
    """Return the fewest GPUs of each kind that a job takes.

    Args:
        model: As :func:`memplan.plan` takes it.
        price: Your own prices, GPU: price of an hour, a YAML or JSON file; the cheapest comes first.
        progress: Is told how many kinds of GPU are answered, and of how many.
        options: Keywords of :class:`memplan.JobOptions`, but for ``gpus``, which is the question.

    Raises:
        MemplanError: As :func:`memplan.plan` raises it, and for a price of an unknown GPU.

    Example:
        >>> import memplan
        >>> memplan.where("llama-3.1-8b", config="qlora", gpu="rtx4090").counts
        {'rtx4090': 1}
    """
    inputs = job_inputs("where", model, options, refused={"gpus": "how many GPUs it takes is the question"})
    from memplan.library.lookup.prices import load_prices
    from memplan.plan.reserve.simulation import Runs, simulated
    from memplan.plan.sizes.placements import placements

    known = inputs.model()
    devices = inputs.devices()
    prices = None if price is None else load_prices(Path(price), inputs.catalog)
    played = partial(simulated, least=False, runs=Runs(), tight=False, fitting=True)
    rows = placements(known, lambda count: _ways(inputs, known, count), devices, played, progress)
    setup = rows.rows[0].plan.setup if rows.rows else inputs.setup(known)
    return Where(known, setup, rows, prices)


def _ways(inputs: JobInputs, model: Model, count: int) -> list[TrainingSetup]:
    """Return the ways in which so many GPUs may share a job: as ``fit --gpus`` has it, and by each layer's matrices too."""
    setup = inputs.setup(model, gpus=count)
    if count == 1 or "tensor" not in setup.stack.divides:
        return [setup]
    from memplan.solver.layouts.degrees import AXES, LayoutSpace, layouts
    from memplan.solver.search.cluster import GPUS_PER_NODE
    from memplan.training.resolution.resolve_config import resolve

    requested = LayoutSpace(count, GPUS_PER_NODE, fixed=set(AXES) - {"tensor", "sequence"})
    rest = (config for config in layouts(setup.config, setup.stack, requested) if config.parallel.tensor > 1)
    return [setup, *(resolve(config, inputs.catalog, setup.name, beside=setup.beside) for config in rest)]


# ------------------------------------------------------------------ batch and sequence length
