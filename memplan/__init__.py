"""Will this training job fit on that GPU, and if not, what to change.

Example:
    >>> import memplan
    >>> plan = memplan.plan("llama-3.1-8b", gpu="rtx4090", config="qlora", micro_batch_size=2, sequence_length=1024)
    >>> plan.verdict
    'fits'
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.errors import CannotAnswerError as CannotAnswerError
    from memplan.errors import CatalogError as CatalogError
    from memplan.errors import InvalidFileError as InvalidFileError
    from memplan.errors import MemplanError as MemplanError
    from memplan.errors import UnitError as UnitError
    from memplan.errors import UnknownNameError as UnknownNameError
    from memplan.library.answers.budget_check import Check as Check
    from memplan.library.answers.budget_check import check as check
    from memplan.library.answers.planned_job import Job as Job
    from memplan.library.answers.planned_job import Plan as Plan
    from memplan.library.answers.planned_job import job as job
    from memplan.library.answers.planned_job import plan as plan
    from memplan.library.answers.traced_step import Traced as Traced
    from memplan.library.answers.traced_step import TraceOptions as TraceOptions
    from memplan.library.answers.traced_step import trace as trace
    from memplan.library.component_values import Components as Components
    from memplan.library.job_options import JobOptions as JobOptions
    from memplan.library.lookup import Shapes as Shapes
    from memplan.library.runs.dry_run import DryRun as DryRun
    from memplan.library.runs.dry_run import RunOptions as RunOptions
    from memplan.library.runs.dry_run import run as run
    from memplan.library.runs.gridded_model import Gridded as Gridded
    from memplan.library.runs.gridded_model import plan_grid as plan_grid
    from memplan.library.runs.real_runs import Replay as Replay
    from memplan.library.runs.real_runs import Why as Why
    from memplan.library.runs.real_runs import replay as replay
    from memplan.library.runs.real_runs import why as why
    from memplan.library.runs.searched_layouts import Layouts as Layouts
    from memplan.library.runs.searched_layouts import suggest_layouts as suggest_layouts
    from memplan.library.runs.shared_ranks import Ranks as Ranks
    from memplan.library.runs.shared_ranks import plan_ranks as plan_ranks
    from memplan.library.several.batch_grid import Grid as Grid
    from memplan.library.several.batch_grid import frontier as frontier
    from memplan.library.several.capacity import LargestModels as LargestModels
    from memplan.library.several.capacity import LargestValues as LargestValues
    from memplan.library.several.capacity import Where as Where
    from memplan.library.several.capacity import largest as largest
    from memplan.library.several.capacity import where as where
    from memplan.library.several.comparison import Comparison as Comparison
    from memplan.library.several.comparison import compare as compare
    from memplan.library.several.config_rows import Fit as Fit
    from memplan.library.several.config_rows import fit as fit
    from memplan.library.several.suggested_plans import ConfigSuggestions as ConfigSuggestions
    from memplan.library.several.suggested_plans import SearchOptions as SearchOptions
    from memplan.library.several.suggested_plans import Suggested as Suggested
    from memplan.library.several.suggested_plans import suggest as suggest
    from memplan.library.several.suggested_plans import suggest_configs as suggest_configs
    from memplan.library.trainers.emitted_file import emit as emit
    from memplan.library.trainers.imported_file import Imported as Imported
    from memplan.library.trainers.imported_file import import_file as import_file
    from memplan.library.trainers.written_back import Rewrite as Rewrite
    from memplan.library.trainers.written_back import rewrite as rewrite
    from memplan.plan.memory_plan import Device as Device
    from memplan.plan.memory_plan import Suggestion as Suggestion
    from memplan.plan.memory_plan import Verdict as Verdict

__version__ = "0.1.0"

_NAMES = {
    "errors": "CannotAnswerError CatalogError InvalidFileError MemplanError UnitError UnknownNameError",
    "library.answers.budget_check": "Check check",
    "library.several.batch_grid": "Grid frontier",
    "library.several.capacity": "LargestModels LargestValues Where largest where",
    "library.several.comparison": "Comparison compare",
    "library.several.config_rows": "Fit fit",
    "library.component_values": "Components",
    "library.answers.planned_job": "Job Plan job plan",
    "library.several.suggested_plans": "ConfigSuggestions SearchOptions Suggested suggest suggest_configs",
    "library.answers.traced_step": "TraceOptions Traced trace",
    "library.runs.dry_run": "DryRun RunOptions run",
    "library.runs.real_runs": "Replay Why replay why",
    "library.runs.gridded_model": "Gridded plan_grid",
    "library.runs.searched_layouts": "Layouts suggest_layouts",
    "library.runs.shared_ranks": "Ranks plan_ranks",
    "library.job_options": "JobOptions",
    "library.lookup": "Shapes",
    "library.trainers.emitted_file": "emit",
    "library.trainers.imported_file": "Imported import_file",
    "library.trainers.written_back": "Rewrite rewrite",
    "plan.memory_plan": "Device Suggestion Verdict",
}
"""Module -> the public names that it has, for which it is imported when the first of them is used."""

_MODULES = {name: f"memplan.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_MODULES)]


if not TYPE_CHECKING:  # a type checker knows the names from above, and is to miss any other

    def __getattr__(name: str) -> object:
        """Return a public name, importing what it stands in."""
        if name not in _MODULES:
            raise AttributeError(f"module 'memplan' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


class _Library(ModuleType):
    """The package as a module on which importing a folder does not hide the function of the same name.

    ``memplan/plan/`` and ``memplan/trace/`` are imported with ``from memplan.plan.planner import ...``, after which
    Python would set ``memplan.plan`` to the folder.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Library
