"""A budget file's keys, and its jobs with defaults applied and quantities read, each with its place."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import Document, Key, setting_text
from memplan.errors import UnitError, match_hint
from memplan.plan.components import COMPONENTS
from memplan.units import parse_bytes

Level = Literal["error", "warn"]
Basis = Literal["expected", "upper"]
Setting = str | bool | int | float

DEFAULT_FILE = "memplan-budget.yaml"
DEFAULT_BASELINE = "memplan-baseline.json"


@plain(frozen=True, slots=True, kw_only=True)
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


@plain(frozen=True, slots=True, kw_only=True)
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


LONGEST_NAME = 100
TRAINER_FILES = (".yaml", ".yml", ".toml")
"""How files end that are model and config at once: a trainer's own."""
LONGEST_MATRIX = 200

_PERCENTAGE = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Increase:
    """How much more than the baseline a job may need: a share of it, and bytes besides."""

    text: str
    share: Fraction
    extra_bytes: int

    def most(self, before_bytes: int) -> int:
        """Return the most that a job may need now.

        Formula:
            ``before + floor(before * share) + extra``.
        """
        return before_bytes + before_bytes * self.share.numerator // self.share.denominator + self.extra_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands."""

    document: Document  # The file, for messages about single keys
    path: tuple[Key, ...]  # Keys leading to the job
    folder: Path  # Paths in the job are relative to it

    @property
    def file(self) -> str:
        """The file as messages call it."""
        return self.document.name

    @property
    def line(self) -> int:
        """The job's own first line."""
        return self.document.lines.get(self.path, 1)

    def where(self, *keys: Key) -> str:
        """Return ``file:line: budgets.0.key``, at the job itself where a default is meant."""
        return self.document.where((*self.path, *keys))


@dataclass(frozen=True, slots=True)
class Job:
    """A job to check.

    Attributes:
        settings: ``key=value`` for keys of the training config to replace, sorted.
        limit_bytes: Most that the device total may be, as far as the GPU has it; None for all that it has.
        component_limits: Most that components may be, in bytes.
        own: Keys that the job gives itself, rather than by default.
    """

    name: str
    model: str
    config: str
    settings: tuple[str, ...]
    gpus: tuple[str, ...]
    limit_bytes: int | None
    component_limits: Mapping[str, int]
    increase: Increase | None
    level: Level
    basis: Basis
    place: Place
    own: frozenset[str]

    def where(self, *keys: Key) -> str:
        """Return the place of a key, or that of the job where the key's value is a default."""
        return self.place.where(*(keys if keys and keys[0] in self.own else ()))


def merged(outer: Defaults, inner: Defaults) -> Defaults:
    """Return ``inner`` with what it leaves open taken from ``outer``.

    ``gpu`` and ``gpus`` stand in for each other; settings and limits on components add up.
    """
    gpus = inner if inner.gpu is not None or inner.gpus is not None else outer
    return Defaults(
        model=outer.model if inner.model is None else inner.model,
        config=outer.config if inner.config is None else inner.config,
        set={**(outer.set or {}), **(inner.set or {})},
        gpu=gpus.gpu,
        gpus=gpus.gpus,
        limit=outer.limit if inner.limit is None else inner.limit,
        components={**(outer.components or {}), **(inner.components or {})},
        max_increase=outer.max_increase if inner.max_increase is None else inner.max_increase,
        level=inner.level or outer.level,
        basis=inner.basis or outer.basis,
    )


def job_of(entry: JobEntry, defaults: Defaults, place: Place) -> tuple[Job | None, list[str]]:
    """Return the job that an entry describes, and every problem of it.

    There is a job as soon as it can be looked up, so that its names can be found wrong as well.

    Args:
        defaults: Those of its file, with those of including files filled in.
    """
    values = merged(defaults, entry)
    if values.config is None and values.model is not None and values.model.endswith(TRAINER_FILES):
        values = replace(values, config=values.model)
    own = frozenset(field.name for field in fields(Defaults) if getattr(entry, field.name) is not None)
    problems = list(_problems(entry.name, values, place, own))
    limit, limit_problems = _sizes({"limit": values.limit} if values.limit is not None else {}, place, (), own)
    parts, part_problems = _sizes(values.components or {}, place, ("components",), own)
    increase = None
    if values.max_increase is not None:
        try:
            increase = parse_increase(values.max_increase)
        except UnitError as error:
            problems.append(f"{place.where(*(('max_increase',) if 'max_increase' in own else ()))}: {error}")
    problems += [*limit_problems, *part_problems]
    gpus = values.gpus or (values.gpu,)
    if not values.model or not values.config or not gpus[0] or "-" in (values.model, values.config):
        return None, problems
    job = Job(
        name=entry.name,
        model=values.model,
        config=values.config,
        settings=tuple(f"{key}={setting_text(value)}" for key, value in sorted((values.set or {}).items())),
        gpus=tuple(gpu for gpu in gpus if gpu is not None),
        limit_bytes=limit.get("limit"),
        component_limits=parts,
        increase=increase,
        level=values.level or "error",
        basis=values.basis or "expected",
        place=place,
        own=own,
    )
    return job, problems


def _problems(name: str, values: Defaults, place: Place, own: frozenset[str]) -> Iterator[str]:
    if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        yield f"{place.where('name')}: expected a name of 1 to {LONGEST_NAME} printable characters"
    for key in ("model", "config"):
        value = getattr(values, key)
        if not value:
            hint = "; a trainer's file has both and is given as model" if key == "model" else ""
            yield f"{place.where()}: {key}: required key is missing{hint}"
        elif value == "-":
            yield f"{place.where(*((key,) if key in own else ()))}: standard input cannot be named in a budget; give a name or a path"
    if values.gpu is not None and values.gpus is not None:
        yield f"{place.where()}: both gpu and gpus given: give one of them"
    elif not values.gpu and not values.gpus:
        yield f"{place.where()}: gpus: required key is missing; name at least one GPU (see: memplan list gpus)"
    elif len(values.gpus or ()) > LONGEST_MATRIX:
        yield f"{place.where('gpus')}: at most {LONGEST_MATRIX} GPUs for one job"
    for component in values.components or {}:
        if component not in COMPONENTS:
            hint = match_hint(component, COMPONENTS, f"; known: {', '.join(COMPONENTS)}")
            at = ("components", component) if "components" in own else ()
            yield f"{place.where(*at)}: unknown component {component!r}{hint}"


def _sizes(
    texts: Mapping[str, str], place: Place, above: tuple[str, ...], own: frozenset[str]
) -> tuple[dict[str, int], list[str]]:
    """Return the bytes that texts name, and the problems of those that name none."""
    sizes, problems = {}, []
    for key, text in texts.items():
        try:
            sizes[key] = parse_bytes(text)
        except UnitError as error:
            at = (*above, key)
            problems.append(f"{place.where(*(at if at[0] in own else ()))}: {error}")
    return sizes, problems


def parse_increase(text: str) -> Increase:
    """Return the increase that ``text`` allows: a percentage or a size.

    Raises:
        UnitError: Neither of them.

    Example:
        >>> parse_increase("3%").most(1000), parse_increase("1 KiB").most(1000)
        (1030, 2024)
    """
    match = _PERCENTAGE.fullmatch(text)
    if match is not None:
        return Increase(text.strip(), Fraction(match[1]) / 100, 0)
    try:
        return Increase(text.strip(), Fraction(0), parse_bytes(text))
    except UnitError:
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise UnitError(
            f"{shown!r} is not an increase: write a percentage such as '3%', or a size such as '500 MiB'"
        ) from None
