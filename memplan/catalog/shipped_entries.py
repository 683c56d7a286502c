"""Our own entries: texts by name, each parsed and built when it is asked for; names and aliases of all entries."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import parse_document
from memplan.documents.opening import files_in, is_file, is_folder, read_own_text, read_text
from memplan.documents.schemas import build
from memplan.errors import CatalogError, normalised_name

T = TypeVar("T")


def yaml_files(location: Path) -> list[Path]:
    """Return the YAML files of a folder, or a file itself."""
    if is_folder(location):
        return files_in(location, "*.yaml")
    return [location] if is_file(location) else []


@dataclass(frozen=True, slots=False)
class EntryText:
    """The text of one shipped entry, which is read and parsed when it is asked for.

    Reading two hundred entries takes far longer than the one or two that an answer needs. Ours
    keep to a layout that tests hold: entries start in the first column, aliases stand in one line.
    """

    name: str
    path: Path
    part: str | None  # The text, where it is a part of a file that has several entries, under its name

    @cached_property
    def text(self) -> str:
        """The text of the entry."""
        return read_own_text(self.path) if self.part is None else self.part

    @property
    def aliases(self) -> list[str]:
        """The aliases that the text lists."""
        return self.listed("aliases")

    def listed(self, key: str) -> list[str]:
        """Return the names that the text lists under a key, in one line or one a line."""
        if f"{key}: " not in self.text and f"{key}:\n" not in self.text:
            return []
        match = re.search(rf"^ *{key}: *(?:\[([^]]+)\]|((?:\n *- .+)+)|([^\s\[][^#\n]*))", self.text, re.MULTILINE)
        if not match:
            return []
        names = match[1].split(",") if match[1] else match[2].split("\n") if match[2] else [match[3]]
        return [name.strip().removeprefix("- ").strip("\"'") for name in names if name.strip()]

    @property
    def card(self) -> str:
        """Return the name that a GPU is sold under."""
        match = _CARD.search(self.text)
        return match[1].strip("\"'") if match else ""

    def data(self) -> Any:
        """Return the parsed entry."""
        value = parse_document(self.text, str(self.path)).data
        return value if self.part is None else value[self.name]


_CARD = re.compile(r"^  name: (.+?) *$", re.MULTILINE)
_ENTRY = re.compile(r"^([a-z0-9][^\s:]*):[ \t]*$", re.MULTILINE)


def shipped_texts(location: Path) -> tuple[dict[str, EntryText], dict[str, str]]:
    """Return the texts of our own entries by name, sorted, and the file that each stands in."""
    parts: dict[str, EntryText] = {}
    folder = is_folder(location)
    for path in yaml_files(location):
        if folder:
            parts[path.stem] = EntryText(path.stem, path, part=None)
            continue
        text = read_text(path)
        starts = list(_ENTRY.finditer(text))
        ends = [*(match.start() for match in starts[1:]), len(text)]
        for match, end in zip(starts, ends, strict=True):
            parts[match[1]] = EntryText(match[1], path, text[match.start() : end])
    return dict(sorted(parts.items())), {name: str(part.path) for name, part in parts.items()}


class BuiltEntries(Mapping[str, T]):
    """Entries by name, sorted; ours are built when they are asked for."""

    def __init__(self, cls: type[T], parts: Mapping[str, EntryText], added: Mapping[str, T]) -> None:
        self._cls = cls
        self._parts = parts
        self._built = dict(added)
        self._names = sorted({*parts, *added})
        self._lists: dict[str, list[tuple[str, str]]] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._built:
            self._built[name] = build(self._cls, self._parts[name].data())
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in self._built or name in self._parts

    def listed(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield what entries list under a key of names, each with the entry's name; none of ours is built for it."""
        if key not in self._lists:
            self._lists[key] = [*self._read(key)]
        yield from self._lists[key]

    def _read(self, key: str) -> Iterator[tuple[str, str]]:
        for name in self._names:
            part = self._parts.get(name)
            if part is not None:
                yield from ((text, name) for text in part.listed(key))
            else:
                value = getattr(self._built[name], key)
                yield from ((text, name) for text in ((value,) if isinstance(value, str) else value or ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _card_index(cards: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return normalised names of cards, with their vendor and without -> name.

    One that several entries share only begins what is indexed, so that it is refused as ambiguous.
    """
    index: dict[str, set[str]] = {}
    for name, card in cards:
        for spelling in {card, re.sub(r"^(NVIDIA|AMD|Apple) ", "", card)} - {""}:
            index.setdefault(normalised_name(spelling), set()).add(name)
    return {
        spelling if len(names) == 1 else spelling + normalised_name(name): name
        for spelling, names in index.items()
        for name in names
    }


def all_names(
    section: str,
    parts: Mapping[str, EntryText],
    every: Mapping[str, EntryText],
    added: Mapping[str, Any],
    origins: Mapping[str, str],
) -> dict[str, str]:
    """Return every name of a section, normalised -> its entry: shipped ones that are ``parts`` still, and a user's own."""
    cards: list[tuple[str, str]] = []
    own: list[tuple[str, str]] = []
    if section == "gpus":
        cards = [(name, part.card) for name, part in parts.items()]
        own = [(name, entry.name) for name, entry in added.items()]
    names = _card_index(cards) | indexed(section, aliases_of(every), origins)
    names |= _card_index(own) | indexed(section, aliases_of(added), origins)
    return {key: name for key, name in names.items() if name in parts or name in added}


def aliases_of(entries: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names of entries, each with its aliases."""
    return [(name, getattr(entry, "aliases", ())) for name, entry in entries.items()]


def indexed(section: str, entries: Iterable[tuple[str, Iterable[str]]], origins: Mapping[str, str]) -> dict[str, str]:
    """Return normalised names and aliases -> name.

    Raises:
        CatalogError: Two entries share a name or an alias.
    """
    index: dict[str, str] = {}
    for name, aliases in entries:
        for spelling in (name, *aliases):
            other = index.setdefault(normalised_name(spelling), name)
            if other != name:
                raise CatalogError(f"{origins[name]}: {section}.{name}: {spelling!r} already names {other!r}")
    return index
