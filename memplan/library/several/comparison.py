"""Plans of a model side by side: ``memplan.compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from memplan.catalog.catalog import Catalog
from memplan.errors import InvalidFileError
from memplan.library.answers.answer import Answer
from memplan.library.answers.planned_job import Plan
from memplan.library.argument_kinds import checked
from memplan.library.job_options import JobOptions, ModelGiven, job_inputs
from memplan.library.lookup import find_setup
from memplan.library.lookup.config_lookup import ConfigGiven
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.report.document import Document

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COMPARED = ("qlora", "lora", "bf16-adamw")
MOST_PLANS = 32
"""Plans that are put side by side at most: each is simulated, which takes a tenth of a second."""


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Answer):
    """Plans side by side.

    Attributes:
        rows: A plan for each column: configs first, then GPUs.
        catalog: What names were looked up in.
        several: Whether more than one GPU was named.
    """

    rows: tuple[Plan, ...]
    catalog: Catalog
    several: bool

    @property
    def differences(self) -> dict[str, list[object]]:
        """Keys of the training configs in which the plans differ, each with every plan's value."""
        return {item["key"]: item["values"] for item in self.to_dict()["differences"]}

    def figure(self) -> Figure:
        """Return a bar for each plan."""
        from memplan.report.pictures.plan_bars import plan_bars

        return plan_bars([row.memory for row in self.rows])

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer of ``memplan compare``."""
        from memplan.report.plans.compare_answer import compare_document
        from memplan.report.screens.size_screens import compare_screen

        plans = [row.memory for row in self.rows]
        catalog_hash = self.catalog.hash if full else ""
        document = compare_document(plans, catalog_hash, unit, several=self.several, strict=strict)
        blocks, several = document.blocks, self.several
        return replace(document, screen=lambda canvas: compare_screen(plans, canvas, unit, blocks, several=several))


@checked
def compare(
    model: ModelGiven = None,
    configs: Sequence[ConfigGiven] = COMPARED,
    *,
    on: Sequence[str | Device] = (),
    **options: Unpack[JobOptions],
) -> Comparison:
    """Return plans of a model side by side: every config on every GPU.

    Args:
        model: As :func:`memplan.plan` takes it.
        configs: Training configs, by name, by file, or as keys and values.
        on: GPUs, where there is more than the one that ``gpu`` names.
        options: Keywords of :class:`memplan.JobOptions`, but for ``config``.

    Raises:
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> answer = memplan.compare("llama-3.2-1b", ["lora", "qlora"], gpu="rtx4090")
        >>> [plan.verdict for plan in answer.rows], answer.differences["weights.hidden_matrix"]
        (['fits', 'fits'], ['bf16', 'nf4-dq'])
    """
    inputs = job_inputs("compare", model, options, refused={"config": "name all of them in configs"})
    if not configs:
        raise InvalidFileError(["configs: expected at least one training config"])
    if (count := len(configs) * max(1, len(on))) > MOST_PLANS:
        raise InvalidFileError(
            [f"configs: expected at most {MOST_PLANS} plans, of a config on a GPU each, got {count:,}"]
        )
    known = inputs.model()
    setups = [find_setup(config, inputs.overrides(inputs.gpus), inputs.catalog, known) for config in configs]
    devices = inputs.devices_named(on)
    compiled = [CompiledPlan(known, setup) for setup in setups]
    rows = tuple(Plan(simulated(plan.evaluate(device)), inputs.catalog) for device in devices for plan in compiled)
    return Comparison(rows, inputs.catalog, several=len(devices) > 1)
