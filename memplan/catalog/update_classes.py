"""The optimizer classes whose updates were read and traced, and what the schema of an entry cannot say: figures, keys that go together."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any

from memplan.catalog.entries import Form, Gpu, Optimizer, StorageFormat
from memplan.catalog.shipped_tables import Link, Network
from memplan.documents.frozen_values import dataclass
from memplan.errors import match_hint, nearest_match

BUNDLED = "memplan.muon.Muon"
TORCH_ADAMW = "torch.optim.AdamW"
TORCH_MUON = "torch.optim.Muon"
STACKED = "nanochat.optim.MuonAdamW"
NO_UPDATE = "none"
UNTRACED = "untraced"


@dataclass(frozen=True, slots=True)
class UpdateClass:
    """An optimizer class."""

    keeps: frozenset[str]  # Names of the state tensors that it may keep
    form: Form  # How its scratch memory arises
    fused: bool = False  # Whether it has a fused kernel, which keeps step counters on the device
    needs: Mapping[str, str] = field(default_factory=dict)  # State tensor -> the option without which it is not kept


UPDATE_CLASSES: Mapping[str, UpdateClass] = {
    "adam_mini.Adam_mini": UpdateClass(frozenset(("m", "vmean")), "adam-mini"),
    "bitsandbytes.optim.AdamW8bit": UpdateClass(frozenset(("state1", "state2", "absmax1", "absmax2")), "in-place"),
    "bitsandbytes.optim.Lion": UpdateClass(frozenset(("state1",)), "in-place"),
    "bitsandbytes.optim.PagedAdamW": UpdateClass(frozenset(("state1", "state2")), "in-place"),
    "bitsandbytes.optim.PagedAdamW8bit": UpdateClass(frozenset(("state1", "state2", "absmax1", "absmax2")), "in-place"),
    "bitsandbytes.optim.PagedLion": UpdateClass(frozenset(("state1",)), "in-place"),
    "lion_pytorch.Lion": UpdateClass(frozenset(("exp_avg",)), "lion"),
    BUNDLED: UpdateClass(frozenset(("exp_avg", "exp_avg_sq", "momentum_buffer", "momentum_codes", "step")), "chunks"),
    "torch.optim.Adafactor": UpdateClass(frozenset(("row_var", "col_var", "variance", "step")), "adafactor"),
    TORCH_ADAMW: UpdateClass(
        frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")),
        "adamw",
        fused=True,
        needs={"max_exp_avg_sq": "amsgrad"},
    ),
    STACKED: UpdateClass(frozenset(("exp_avg", "exp_avg_sq", "momentum_buffer", "second_momentum_buffer")), "stacked"),
    TORCH_MUON: UpdateClass(frozenset(("momentum_buffer",)), "torch-muon"),
    "torch.optim.SGD": UpdateClass(
        frozenset(("momentum_buffer",)), "in-place", fused=True, needs={"momentum_buffer": "momentum"}
    ),
    "transformers.optimization.Adafactor": UpdateClass(
        frozenset(("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "RMS")), "adafactor-fp32"
    ),
}
"""Class -> what is known of it. Any other class by its path is traced as it is, and planned as its entry says."""

Path = tuple[str | int, ...]
Problems = Iterator[tuple[Path, str]]


def is_known(implementation: str) -> bool:
    """Tell whether the update of a class was read, or there is none."""
    return implementation in UPDATE_CLASSES or implementation == NO_UPDATE


def optimizer_problems(entry: Optimizer) -> Problems:
    """Yield what in an optimizer's entry contradicts its class or itself, each with its path of keys."""
    yield from _scratch_problems(entry)
    kind = entry.implementation
    if kind in UPDATE_CLASSES:
        yield from _class_problems(entry, UPDATE_CLASSES[kind])
    elif kind not in (NO_UPDATE, UNTRACED) and "." not in kind:
        paths = {path.rpartition(".")[2]: path for path in (*UPDATE_CLASSES, UNTRACED)}
        match = nearest_match(kind, paths)
        known = f"known: {', '.join(paths.values())}, or any other class by its path"
        hint = known if match is None else f"did you mean {paths[match]!r}?"
        yield ("implementation",), f"no class is called {kind!r}; {hint}"
    if (entry.takes == "matrices") != (entry.rest is not None):
        yield ("rest",), "expected the optimizer of all other tensors where takes is matrices, and only there"


def _scratch_problems(entry: Optimizer) -> Problems:
    scratch = entry.scratch
    copies = scratch.all_tensors + scratch.largest_tensor
    if (scratch.form == "copies") != (copies > 0):
        yield (
            ("scratch",),
            "all_tensors and largest_tensor count the copies of form copies, which needs one of them, and of no other",
        )
    if (scratch.form == "chunks") != (entry.implementation == BUNDLED):
        yield ("scratch", "form"), f"chunks is what {BUNDLED} takes, and nothing else; got {scratch.form}"
    if scratch.form == "untraced" and entry.implementation != UNTRACED:
        yield ("scratch", "form"), f"untraced says that {entry.implementation} is not modelled; say what it takes"
    if entry.implementation == BUNDLED and entry.bundled is None:
        yield ("bundled",), f"required with {BUNDLED}: adamw or muon"


def _class_problems(entry: Optimizer, known: UpdateClass) -> Problems:
    if entry.scratch.form != known.form:
        yield ("scratch", "form"), f"{entry.implementation} takes {known.form}, not {entry.scratch.form}"
    names = list(dict.fromkeys(slot.name for slot in (*entry.slots, *entry.exempt_slots)))
    if unknown := [name for name in names if name not in known.keeps]:
        states = ", ".join(sorted(known.keeps))
        yield ("slots",), f"keeps {', '.join(unknown)}, which {entry.implementation} does not; it keeps {states}"
    for name in names:
        option = known.needs.get(name)
        if option is not None and option not in entry.options:
            yield ("options",), f"{entry.implementation} keeps {name} with option {option} alone, which is not given"


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
    elif isinstance(entry, Gpu) and 0 < entry.memory_bytes < entry.cuda_total_bytes:
        yield ("cuda_total_bytes",), f"expected at most the driver's memory_bytes, {entry.memory_bytes}"
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
    for one in fields(entry):
        yield from _value_problems(one.name, getattr(entry, one.name), (*path, one.name))


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


def is_bundled(entry: Optimizer) -> bool:
    """Tell whether the bundled library steps as an optimizer does; it alone takes codes and narrow gradients."""
    return entry.bundled is not None
