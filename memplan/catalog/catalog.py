"""The catalog: entries by name and alias, ours first, then a user's additions and overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from memplan.catalog.entries import Gpu, GradientDtype, ModelEntry, Optimizer, StorageFormat
from memplan.catalog.shipped_entries import BuiltEntries, aliases_of, all_names, indexed, shipped_texts, yaml_files
from memplan.catalog.shipped_tables import TABLES, ShippedTables
from memplan.catalog.update_classes import codec_problems, entry_problems, link_problems
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import Document, load_document
from memplan.documents.opening import is_file, path_kind, read_bytes, shown_path
from memplan.documents.schemas import validate
from memplan.errors import (
    MOST_EXPLAINED,
    InvalidFileError,
    UnknownNameError,
    match_hint,
    normalised_name,
    same_numbers,
    unknown_name,
)

if TYPE_CHECKING:
    from memplan.catalog.stacks import Stack
    from memplan.catalog.training_config import TrainingConfig

T = TypeVar("T")

MOST_MEANT = 6  # an unknown name that begins more names than this is not called ambiguous

SECTIONS: dict[str, tuple[str, str]] = {
    "gpus": ("gpu_catalog.yaml", "GPU"),
    "formats": ("configs/weight_formats.yaml", "weight format"),
    "gradients": ("configs/gradient_dtypes.yaml", "gradient dtype"),
    "optimizers": ("configs/optimizers.yaml", "optimizer"),
    "models": ("configs/models", "model"),
    "configs": ("configs/training", "training config"),
    "stacks": ("configs/stacks", "stack"),
}
"""Section -> (its file, or its folder with one file per entry; what messages call an entry)."""


def data_directory() -> Path:
    """Return the folder of the shipped data: packaged, or beside a source tree."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "data"
    return packaged if (packaged / "gpu_catalog.yaml").is_file() else package.parent


@dataclass(frozen=True, slots=False)
class Shelf(Generic[T]):
    """Entries of one kind, found by name or alias, whatever case and separators."""

    kind: str  # What messages call an entry
    section: str
    entries: Mapping[str, T]  # Entries by name, sorted
    origins: Mapping[str, str]  # File that each entry stands in
    index: Callable[[], Mapping[str, str]] = field(repr=False, compare=False)  # What makes ``names``

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The name that each spelling means; it needs the texts of all entries, so that an entry's own name does without."""
        return self.index()

    def name_of(self, given: str) -> str:
        """Return the catalog name that ``given`` means.

        Raises:
            UnknownNameError: With the nearest name or alias.
        """
        if given in self.entries:
            return given
        key = normalised_name(given)
        name = self.names.get(key)
        if name is None or not self._has_its_numbers(given, name):
            meant = sorted({name for spelling, name in self.names.items() if spelling.startswith(key) and len(key) > 1})
            if 1 < len(meant) <= MOST_MEANT:
                raise UnknownNameError(
                    f"{self.kind} {given!r} may be {', '.join(meant[:-1])} or {meant[-1]}: say which"
                )
            known = [*self.entries]
            for entry in self.entries.values():
                known += [*getattr(entry, "aliases", ()), *([entry.name] if isinstance(entry, Gpu) else ())]
            unlisted = _unlisted(key) if self.section == "gpus" else ""
            raise unknown_name(self.kind, given, known, f"memplan list {self.section}{unlisted}")
        return name

    def __getitem__(self, given: str) -> T:
        return self.entries[self.name_of(given)]

    def __contains__(self, given: str) -> bool:
        if given in self.entries:
            return True
        name = self.names.get(normalised_name(given))
        return name is not None and self._has_its_numbers(given, name)

    def _has_its_numbers(self, given: str, name: str) -> bool:
        """Tell whether a name that has an entry's letters and digits divides them into the same numbers."""
        key = normalised_name(given)
        spellings = [one for one in (name, *getattr(self.entries[name], "aliases", ())) if normalised_name(one) == key]
        return not spellings or any(same_numbers(given, one) for one in spellings)

    def listed(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield what entries list under a key of names, such as ``ids``, each with the entry's name."""
        assert isinstance(self.entries, BuiltEntries)
        return self.entries.listed(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _unlisted(key: str) -> str:
    """Return how a GPU that is in no catalog is asked for: of a Mac by what Metal lets a process have."""
    # As measured on Macs of the catalog: two thirds of 16 and 32 GB, three quarters of 64 and 96 GB.
    share = "of another Mac, two thirds of its memory up to 32 GB, three quarters of more: --gpu-memory 48GiB"
    if re.match(r"colab|kaggle", key):
        return "; a notebook's free GPU is a t4, paid ones an l4 or a100-40gb: nvidia-smi says which"
    return f"; {share}" if re.match(r"apple|mac|mps|m[1-9](?!\d)", key) else "; any other: --gpu-memory 24GiB"


class Catalog:
    """All that memplan knows by name; each section is read when it is first asked for.

    Args:
        root: Folder with ``gpu_catalog.yaml`` and ``configs/``.
        extra: A user's catalog: a file with sections, or a folder laid out like ours.
    """

    def __init__(self, root: Path, extra: Path | None = None) -> None:
        self.root = root
        self.extra = extra
        self._stacks: dict[str, Stack] = {}
        kind = "file" if extra is None else path_kind(extra)
        given = "(given as --catalog or MEMPLAN_CATALOG)"
        if extra is not None and kind == "folder" and not any(map(self._extra_files, SECTIONS)):
            known = ", ".join(location for location, _ in SECTIONS.values())
            raise InvalidFileError([f"{shown_path(extra)}: holds none of {known} {given}"])
        if extra is not None and kind not in ("file", "folder"):
            problem = "no such file or folder" if kind == "nothing" else f"is a {kind}, not a file or folder"
            raise InvalidFileError([f"{shown_path(extra)}: {problem} {given}"])

    @cached_property
    def gpus(self) -> Shelf[Gpu]:
        """GPUs."""
        return self._shelf("gpus", Gpu)

    @cached_property
    def formats(self) -> Shelf[StorageFormat]:
        """Weight formats."""
        return self._shelf("formats", StorageFormat)

    @cached_property
    def gradients(self) -> Shelf[GradientDtype]:
        """Gradient dtypes."""
        return self._shelf("gradients", GradientDtype)

    @cached_property
    def optimizers(self) -> Shelf[Optimizer]:
        """Optimizers."""
        return self._shelf("optimizers", Optimizer)

    @cached_property
    def models(self) -> Shelf[ModelEntry]:
        """Released models."""
        return self._shelf("models", ModelEntry)

    @cached_property
    def configs(self) -> Shelf[Any]:
        """Training configs."""
        from memplan.catalog.training_config import TrainingConfig

        return self._shelf("configs", TrainingConfig)

    @cached_property
    def stacks(self) -> Shelf[Stack]:
        """Stacks, each as its file describes it."""
        from memplan.catalog.stacks import Stack

        return self._shelf("stacks", Stack)

    def stack(self, given: str) -> Stack:
        """Return the stack that ``NAME[@VERSION]`` means.

        Raises:
            UnknownNameError: There is none of that name.
            CannotAnswerError: That version of it was not read.
        """
        from memplan.catalog.stack_versions import chosen_stack, split_name

        if given not in self._stacks:
            name, version = split_name(given)
            self._stacks[given] = chosen_stack(self.stacks.entries, self.stacks.name_of(name), version)
        return self._stacks[given]

    def release_months(self) -> dict[str, str | None]:
        """Return model -> its month, None for a user's own without one; ours without a known month are left out."""
        own = {name: Path(origin).is_relative_to(self.root) for name, origin in self.models.origins.items()}
        return {name: e.released for name, e in self.models.entries.items() if e.released or not own[name]}

    def shipped_config(self, name: str) -> TrainingConfig | None:
        """Return the config of that name as it ships, or None where none does or a user's own took its place."""
        entry = self.configs.entries.get(name)
        return entry if entry is not None and Path(self.configs.origins[name]).is_relative_to(self.root) else None

    def ships_evidence(self, name: str) -> bool:
        """Tell whether a record of ours has that name."""
        return "/" not in name and is_file(self.root / "configs" / "evidence" / f"{name}.json")

    @cached_property
    def tables(self) -> ShippedTables:
        """Tables that are no entries."""
        return ShippedTables(self.root)

    def check_own_entries(self) -> None:
        """Read every section of a user's catalog, so that what is wrong with it is said once, and as its own.

        Raises:
            InvalidFileError: What is wrong with each section in turn.
        """
        if self.extra is not None:
            for name in SECTIONS:
                self.section(name)

    def section(self, name: str) -> Shelf[Any]:
        """Return the shelf of a section by its name in :data:`SECTIONS`."""
        shelf: Shelf[Any] = getattr(self, name)
        return shelf

    @cached_property
    def hash(self) -> str:
        """SHA-256 over every data file, so that two answers can be told to share a catalog."""
        import hashlib

        digest = hashlib.sha256()
        for location in TABLES.values():
            digest.update(location.encode() + b"\0" + read_bytes(self.root / location) + b"\0")
        for section in sorted(SECTIONS):
            for path in [*yaml_files(self.root / SECTIONS[section][0]), *self._extra_files(section)]:
                digest.update(path.name.encode() + b"\0" + read_bytes(path) + b"\0")
        return digest.hexdigest()

    def _shelf(self, section: str, cls: type[T]) -> Shelf[T]:
        parts, origins = shipped_texts(self.root / SECTIONS[section][0])
        added, every = self._user_entries(section, cls, origins), dict(parts)

        taken = indexed(section, aliases_of(every), origins) if added else {}
        for name in added:
            parts.pop(taken.get(normalised_name(name), name), None)
        entries: Mapping[str, T] = BuiltEntries(cls, parts, added)
        index = partial(all_names, section, parts, every, added, origins)
        shelf = Shelf(SECTIONS[section][1], section, entries, origins, index)
        if added:
            _ = shelf.names  # what two of a user's entries share is said at once
        return shelf

    def _extra_files(self, section: str) -> list[Path]:
        """Return the files of the user's catalog that may hold entries of a section."""
        if self.extra is None:
            return []
        if is_file(self.extra):
            return [self.extra]
        location = SECTIONS[section][0]
        return yaml_files(self.extra / location) or yaml_files(self.extra / Path(location).name)

    def _user_entries(self, section: str, cls: type[T], origins: dict[str, str]) -> dict[str, T]:
        entries: dict[str, T] = {}
        problems: dict[str, None] = {}  # each once
        for path in self._extra_files(section):
            document = load_document(path)
            for name, (data, keys) in _user_section(document, path, section, self.extra == path).items():
                try:
                    entries[name] = validate(cls, document, data, keys)
                    origins[name] = str(path)
                    wrong = (*entry_problems(entries[name]), *self._name_problems(entries[name]))
                    problems |= dict.fromkeys(f"{document.where((*keys, *at))}: {text}" for at, text in wrong)
                except InvalidFileError as error:
                    problems |= dict.fromkeys(error.problems)
                if len(problems) >= MOST_EXPLAINED:
                    raise InvalidFileError([*problems])
        if problems:
            raise InvalidFileError([*problems])
        return entries

    def _name_problems(self, entry: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield what an entry names that is not there."""
        if isinstance(entry, Gpu):
            yield from link_problems(entry, self.tables.links, self.tables.networks)
        if isinstance(entry, StorageFormat) and entry.codec is not None:
            shipped = BuiltEntries(StorageFormat, shipped_texts(self.root / SECTIONS["formats"][0])[0], {})
            yield from codec_problems(entry, {known.codec for known in shipped.values() if known.codec})


def _user_section(
    document: Document, path: Path, section: str, sectioned: bool
) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return a user's entries of one section, each with its path of keys in the document."""
    data = document.data
    if not isinstance(data, dict):
        raise InvalidFileError([f"{document.where(())}: expected keys and values"])
    if not sectioned and not SECTIONS[section][0].endswith(".yaml"):
        return {path.stem: (data, ())}
    keys: tuple[str, ...] = ()
    if sectioned:
        unknown = [name for name in data if name not in SECTIONS]
        if unknown:
            known = f"; known: {', '.join(SECTIONS)}"
            raise InvalidFileError(
                [f"{document.where((n,))}: unknown section{match_hint(n, SECTIONS, known)}" for n in unknown]
            )
        data, keys = data.get(section) or {}, (section,)
        if not isinstance(data, dict):
            raise InvalidFileError([f"{document.where(keys)}: expected entries by name"])
    return {name: (entry, (*keys, name)) for name, entry in data.items()}
