"""A budget file and the files that it includes, read into one list of jobs."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memplan.budget.budget_jobs import DEFAULT_BASELINE, Budget, Defaults, Job, Place, job_of, merged
from memplan.documents.loading import Document, Key, load_document
from memplan.documents.opening import require_file
from memplan.documents.schemas import validate
from memplan.errors import InvalidFileError

MOST_FILES = 200


@dataclass(frozen=True, slots=True)
class BudgetFile:
    """All that a budget asks for."""

    name: str  # The file as messages call it
    jobs: tuple[Job, ...]  # Jobs of it and of included files, in reading order
    baseline: Path  # Where its baseline lies, whether or not it is there
    problems: tuple[str, ...]  # What is wrong with it, apart from names that are yet to be looked up


def read_budget(path: Path) -> BudgetFile:
    """Return the jobs of a budget file and of those that it includes, and all that is wrong with them.

    Raises:
        InvalidFileError: The file itself cannot be read or is not a budget.
    """
    reader = _Reader()
    top = reader.read(path, Defaults(), ())
    if top is not None and not reader.jobs and not reader.problems:
        reader.problems.append(f"{top.name}:1: budgets: no jobs to check")
    if top is None:
        raise InvalidFileError(reader.problems)
    baseline = _folder(path) / (top.data.get("baseline") or DEFAULT_BASELINE)
    return BudgetFile(top.name, tuple(reader.jobs), Path(os.path.normpath(baseline)), tuple(reader.problems))


def in_reading_order(problems: Sequence[str]) -> list[str]:
    """Return problems by file, in the order that files are first met, then by line."""
    places = [(match[1], int(match[2])) if (match := _PLACE.match(text)) else ("", 0) for text in problems]
    files = list(dict.fromkeys(file for file, _ in places))
    pairs = sorted(zip(places, problems, strict=True), key=lambda pair: (files.index(pair[0][0]), pair[0][1]))
    return list(dict.fromkeys(text for _, text in pairs))


_PLACE = re.compile(r"(.*?):([0-9]+): ")


def _folder(path: Path) -> Path:
    return Path() if str(path) == "-" else path.parent


def _real(path: Path) -> str:
    """Return a path with its links followed, or as it is where no file can have it."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return str(path)


@dataclass(slots=True)
class _Reader:
    """Jobs and problems as they are met."""

    jobs: list[Job] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)

    def read(self, path: Path, outer: Defaults, chain: tuple[Path, ...]) -> Document | None:
        """Read a file and those that it includes; its problems are noted, not raised."""
        try:
            document = load_document(path)
            budget = validate(Budget, document, document.data if document.data is not None else {})
        except InvalidFileError as error:
            self.problems += error.problems
            return None
        self.seen[_real(path)] = document.name
        if chain and budget.baseline is not None:
            self.problems.append(
                f"{document.where(('baseline',))}: belongs in {chain[0]}, which includes this file, not here"
            )
        defaults = merged(outer, budget.defaults)
        for index, entry in enumerate(budget.budgets):
            place = Place(document, ("budgets", index), _folder(path))
            job, problems = job_of(entry, defaults, place)
            self.problems += problems
            self._unique(entry.name, place)
            if job is not None:
                self.jobs.append(job)
        for index, name in enumerate(budget.include):
            self._include(document, ("include", index), name, path, defaults, chain)
        return document

    def _unique(self, name: str, place: Place) -> None:
        here = place.where("name")
        first = self.named.setdefault(name, here)
        if first != here:
            self.problems.append(f"{here}: {name!r} is already the name of {first}")

    def _include(
        self,
        document: Document,
        at: tuple[Key, ...],
        name: str,
        path: Path,
        defaults: Defaults,
        chain: tuple[Path, ...],
    ) -> None:
        where = document.where(at)
        inner = Path(os.path.normpath(_folder(path) / name))
        here = (*chain, path)
        if name == "-" or not name.strip():
            self.problems.append(f"{where}: expected the path of a budget file")
        elif _real(inner) in map(_real, here):
            circle = " -> ".join(str(file) for file in (*here, inner))
            self.problems.append(f"{where}: includes itself: {circle}")
        elif _real(inner) in self.seen:
            self.problems.append(f"{where}: {inner} is included twice")
        elif len(self.seen) >= MOST_FILES:
            self.problems.append(f"{where}: more than {MOST_FILES} files")
        else:
            try:
                require_file(inner)
            except InvalidFileError as error:
                self.problems += (f"{where}: {problem}" for problem in error.problems)
            else:
                self.read(inner, defaults, here)
