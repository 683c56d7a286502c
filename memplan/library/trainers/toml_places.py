"""Where keys and values stand in a TOML file, so that single values can be changed: tomllib does not say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TABLE = re.compile(r"\s*\[(?!\[)\s*([A-Za-z0-9_.\"' -]+?)\s*\]\s*(?:#.*)?$")
_ENTRY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=[ \t]*")
_SCALAR = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"(?!\")|'[^'\n]*'(?!')|[^\s\"'\[{#][^\s#]*")


@dataclass(frozen=True, slots=True)
class TomlPlace:
    """A value that stands on one line."""

    path: str  # Its key with the tables above it, joined by dots
    begin: int  # Index of its first character
    end: int  # Index behind its last
    line_end: int  # Index of the end of its line


def toml_places(text: str) -> Iterator[TomlPlace]:
    """Yield the scalar values of a file in their order; of tables in arrays, and of values on several lines, none."""
    table: str | None = ""
    at = 0
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        if body.lstrip().startswith("["):
            head = _TABLE.match(body)
            table = None if head is None else f"{_plain(head[1])}."
        elif table is not None and (entry := _ENTRY.match(body)) and (value := _SCALAR.match(body, entry.end())):
            yield TomlPlace(f"{table}{_plain(entry[1])}", at + value.start(), at + value.end(), at + len(body))
        at += len(line)


def _plain(path: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in path.split("."))
