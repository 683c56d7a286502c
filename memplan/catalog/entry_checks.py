"""What the schema of an entry cannot say: figures out of range, keys that go together, names that must exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from memplan.catalog.entries import Gpu, Optimizer, StorageFormat
from memplan.catalog.shipped_tables import Link, Network
from memplan.catalog.update_classes import optimizer_problems
from memplan.errors import match_hint

POSITIVE = frozenset(
    ("memory_bytes", "cuda_total_bytes", "block_elements", "block_bytes", "element_bytes", "exempt_unless_multiple")
)
MAXIMUM_FIGURE = 2**60
"""Larger figures in a catalog are slips: no machine has an exbibyte, or an exaFLOP/s."""

EntryPath = tuple[str | int, ...]


def entry_problems(entry: Any) -> Iterator[tuple[EntryPath, str]]:
    """Yield what is wrong with an entry by itself: (path of keys, what is expected)."""
    yield from _figure_problems(entry, ())
    if isinstance(entry, StorageFormat):
        yield from _format_problems(entry)
    elif isinstance(entry, Optimizer):
        yield from optimizer_problems(entry)


def codec_problems(entry: StorageFormat, codecs: Collection[str]) -> Iterator[tuple[EntryPath, str]]:
    """Yield that a format names a codec which is none of ``codecs``, nor given by its path."""
    if entry.codec is not None and entry.codec not in codecs and "." not in entry.codec:
        known = ", ".join(sorted(codecs))
        hint = match_hint(entry.codec, codecs, f"; known: {known}, or package.module.NAME of your own")
        yield ("codec",), f"no codec is called {entry.codec!r}{hint}"


def link_problems(
    entry: Gpu, links: Mapping[str, Link], networks: Mapping[str, Network]
) -> Iterator[tuple[EntryPath, str]]:
    """Yield that the link of a GPU to the host, or the network between its nodes, is not known."""
    network = entry.interconnect.network
    if network is not None and network not in networks:
        hint = match_hint(network, networks, f"; known: {', '.join(networks)}")
        yield ("interconnect", "network"), f"no network is called {network!r}{hint}"
    kind, host = entry.interconnect.kind, entry.interconnect.host
    known = ", ".join(links)
    if host is None and kind not in links:
        hint = match_hint(kind, links, f"; known: {known}")
        yield ("interconnect", "kind"), f"no link is called {kind!r}{hint}; of any other say interconnect.host too"
    leads = [name for name, link in links.items() if link.bytes_per_second]
    if host is not None and host not in leads:
        yield ("interconnect", "host"), f"no link to the host is called {host!r}; known: {', '.join(leads)}"


def _format_problems(entry: StorageFormat) -> Iterator[tuple[EntryPath, str]]:
    """Yield the keys of a format that do not go with how it is trained."""
    for key in ("codec", "codec_scratch"):
        given = getattr(entry, key) is not None
        if entry.training == "coded" and not given:
            yield (key,), "required key is missing: weights that are trained as codes are coded and decoded"
        elif entry.training != "coded" and given:
            yield (key,), f"goes with training: coded, not {entry.training}"
    if entry.training == "float" and entry.block_elements > 1:
        yield ("training",), "blocks are no floats: expected coded or frozen"


def _figure_problems(entry: Any, path: EntryPath) -> Iterator[tuple[EntryPath, str]]:
    for field in fields(entry):
        yield from _value_problems(field.name, getattr(entry, field.name), (*path, field.name))


def _value_problems(name: str, value: Any, path: EntryPath) -> Iterator[tuple[EntryPath, str]]:
    if type(value) is int:
        least = 1 if name in POSITIVE else 0
        if not least <= value <= MAXIMUM_FIGURE:
            yield path, f"expected a whole number from {least} to 2^60, got {value}"
    elif name == "compute_capability" and value is not None and not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", value):
        yield path, f"expected a version such as '9.0', got {value[:60]!r}"
    elif name == "dense_flops":
        for key, rate in value.items():
            yield from _value_problems(key, rate, (*path, key))
    elif is_dataclass(value):
        yield from _figure_problems(value, path)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _value_problems(name, item, (*path, index))
