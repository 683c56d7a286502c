"""A budget file: every key of ``memplan-budget.yaml``, with its default."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warn"]
Basis = Literal["expected", "upper"]
Setting = str | bool | int | float

DEFAULT_FILE = "memplan-budget.yaml"
DEFAULT_BASELINE = "memplan-baseline.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the jobs of a file, and of the files it includes, take where they say nothing themselves.

    Attributes:
        model: Catalog name, or a path relative to the budget file.
        config: Training config: catalog name, or a path relative to the budget file.
        set: Keys of the training config to replace, as ``--set`` does, such as ``micro_batch_size: 2``.
        gpu: One GPU of the catalog.
        gpus: Several, each checked by itself.
        limit: Most that the device total may be; the GPU's usable memory where that is less, or none is given.
        components: Most that single components may be.
        max_increase: Most that the device total may grow over the baseline: ``3%`` or ``500 MiB``.
        level: ``error`` fails the check, ``warn`` only tells.
        basis: Whether the expected device total is compared with limits, or the upper end of its interval.
    """

    model: str | None = None
    config: str | None = None
    set: Mapping[str, Setting] | None = None
    gpu: str | None = None
    gpus: tuple[str, ...] | None = None
    limit: str | None = None
    components: Mapping[str, str] | None = None
    max_increase: str | None = None
    level: Level | None = None
    basis: Basis | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry(Defaults):
    """One job as the file gives it: the keys of :class:`Defaults`, and a name of its own."""

    name: str


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget file as it is written.

    Attributes:
        version: Of this schema.
        budgets: The jobs.
        defaults: For its jobs and those of included files.
        include: Further budget files, relative to this one.
        baseline: File of the baseline, relative to this one; only in the file that is checked itself.
    """

    version: Literal[1]
    budgets: tuple[JobEntry, ...] = ()
    defaults: Defaults = Defaults()
    include: tuple[str, ...] = ()
    baseline: str | None = None
