"""The answers of ``memplan list`` and ``memplan show``."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Gpu, GradientDtype, ModelEntry, Optimizer, StorageFormat
from memplan.catalog.stack_versions import split_name
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import UnknownNameError
from memplan.model.inventory import active_parameter_count, parameter_count, parameters_by_role
from memplan.model.model import Model
from memplan.model.readers.safetensors import StoredTensors
from memplan.report.document import Block, Document, Table
from memplan.report.training_records import evidence_lines
from memplan.training.learning import learning
from memplan.training.rules.stack_defaults import filled
from memplan.units import format_bytes, format_count, format_fraction


def list_document(kind: str, catalog: Catalog, unit: str) -> Document:
    """Return all entries of a kind."""
    shelf = catalog.section(kind)
    entries = {name: _judged(name, entry, catalog) for name, entry in shelf.entries.items()}
    rows = [{"name": name, **_plain(entry)} for name, entry in entries.items()]
    headers, cells = _LISTS[kind]
    table = Table(headers, tuple((name, *cells(entry, unit)) for name, entry in entries.items()))
    return Document({"schema": "memplan/list/1", "kind": kind, "rows": rows}, (table, f"{len(rows)} {kind}"))


def _judged(name: str, entry: Any, catalog: Catalog) -> Any:
    """Return an entry; a config with the status that evidence bears."""
    if not isinstance(entry, TrainingConfig):
        return entry
    try:
        entry = filled(entry, catalog.stack(entry.stack))
        return replace(entry, status=learning(entry, catalog, name).status)
    except UnknownNameError:
        return replace(entry, status="untried")  # a user's config of names that the catalog does not have


def _plain(entry: Any) -> dict[str, Any]:
    """Return an entry as JSON; an entry's own full name is its ``title``."""
    data = asdict(entry)
    if "name" in data:
        data = {"title": data.pop("name"), **data}
    if isinstance(entry, StorageFormat):
        data["bytes_per_element"] = float(entry.bytes_per_element)
    return data


def _gpu_cells(entry: Gpu, unit: str) -> tuple[str, ...]:
    rate = entry.dense_flops.get("bf16", entry.dense_flops.get("fp16", 0))
    return (
        entry.name,
        format_bytes(entry.memory_bytes, unit),
        format_bytes(entry.cuda_total_bytes, unit),
        f"{entry.bandwidth_bytes_per_second // 10**9:,} GB/s",
        f"{rate // 10**12:,}" if rate else "",
        "unified" if entry.unified_memory else entry.interconnect.kind,
        ", ".join(entry.aliases),
    )


def _model_cells(entry: ModelEntry, _: str) -> tuple[str, ...]:
    active = entry.expected_active_parameters
    return (
        entry.title,
        entry.architecture,
        format_count(entry.expected_parameters),
        format_count(active) if active else "",
        f"{entry.expected_parameters:,}",
        ", ".join(entry.aliases),
    )


def _format_cells(entry: StorageFormat, _: str) -> tuple[str, ...]:
    return (
        str(entry.block_elements),
        str(entry.block_bytes),
        str(entry.tensor_bytes or ""),
        format_fraction(entry.bytes_per_element, 6),
        "not storable" if not entry.storable else _TRAINING[entry.training],
        entry.description,
    )


_TRAINING = {"float": "trained", "coded": "trained as codes", "frozen": "frozen only"}


def _gradient_cells(entry: GradientDtype, _: str) -> tuple[str, ...]:
    return (str(entry.element_bytes), str(entry.tensor_bytes or ""), entry.description)


def _optimizer_cells(entry: Optimizer, _: str) -> tuple[str, ...]:
    return (
        slots_text(entry),
        entry.takes,
        entry.rest or "",
        entry.status,
        "yes" if entry.validated else "not yet",
        entry.description,
    )


def slots_text(entry: Optimizer) -> str:
    """Return an optimizer's slots as bytes per parameter."""
    texts = []
    for slot in entry.slots:
        size = "as the parameter" if slot.as_parameter else f"{slot.block_bytes}/{slot.block_elements} B"
        texts.append(
            f"{slot.name} {size}" + ("" if slot.layout == "elementwise" else f" per {slot.layout.rstrip('s')}")
        )
    return ", ".join(texts) or "none"


def _config_cells(entry: TrainingConfig, _: str) -> tuple[str, ...]:
    return (entry.status, entry.activation_checkpointing or "", entry.description)


def _stack_cells(entry: Stack, _: str) -> tuple[str, ...]:
    package, version = next(iter(entry.versions.items()))
    return (f"{package} {version}", entry.level, entry.checkpointing.default, entry.kernels.loss, entry.description)


_LISTS: Mapping[str, Any] = {
    "gpus": (
        ("name", "card", ">driver total", ">CUDA total", ">bandwidth", ">dense bf16 TFLOP/s", "link", "aliases"),
        _gpu_cells,
    ),
    "models": (("name", "model", "architecture", ">parameters", ">active", ">exactly", "aliases"), _model_cells),
    "formats": (("name", ">elements", ">bytes", ">per tensor", ">B/element", "weights", "description"), _format_cells),
    "gradients": (("name", ">bytes", ">per tensor", "description"), _gradient_cells),
    "optimizers": (
        ("name", "state per parameter", "takes", "rest", "learning", "validated", "description"),
        _optimizer_cells,
    ),
    "stacks": (("name", "library", "its own code", "checkpointing", "loss", "description"), _stack_cells),
    "configs": (("name", "learning", "checkpointing", "description"), _config_cells),
}


def entry_document(kinds: list[str], given: str, catalog: Catalog, unit: str) -> Document:
    """Return an entry in full; a name of several kinds (bf16) is shown for each."""
    blocks: list[Block] = []
    entries = []
    for kind in kinds:
        shelf = catalog.section(kind)
        name = shelf.name_of(split_name(given)[0] if kind == "stacks" else given)
        entry = catalog.stack(given) if kind == "stacks" else shelf.entries[name]
        data = {"kind": kind, "name": name, **_plain(_judged(name, entry, catalog))}
        entries.append(data)
        apart = ("sources", "keys", "values", "history") if isinstance(entry, Stack) else ("sources",)
        rows = tuple((key, _cell(key, value, unit)) for key, value in data.items() if key not in apart)
        blocks.append(
            Table(("key", "value"), rows, f"{shelf.kind} {entry.label if isinstance(entry, Stack) else name}")
        )
        if isinstance(entry, Stack):
            blocks += _stack_tables(entry)
        sources = [
            f"  {s['url']} ({', '.join(s['covers']) or 'all'}; checked {s['checked']})" for s in data.get("sources", ())
        ]
        blocks.append(("Sources:", *sources) if sources else f"Defined in {shelf.origins[name]}")
        if data.get("evidence"):
            blocks.append(evidence_lines(data["evidence"], catalog.root))
        if (
            kind == "configs"
            and catalog.ships_evidence(published := f"literature-{name}")
            and published != data["evidence"]
        ):
            blocks.append(evidence_lines(published, catalog.root))
    data = (
        {"schema": "memplan/show/1", **entries[0]}
        if len(entries) == 1
        else {"schema": "memplan/show/1", "entries": entries}
    )
    return Document(data, tuple(blocks))


LEVELS = {
    "traced": "Its own code can be run on tensors without memory: memplan trace MODEL --stack NAME.",
    "read": "Its own code is only read here, not run.",
}
"""How far what is said of a stack was checked."""


def _stack_tables(stack: Stack) -> Iterator[Block]:
    """Yield how far a stack was checked, how its users write settings, and what older versions did."""
    yield LEVELS[stack.level]
    rows = []
    for key, own in stack.keys.items():
        values = stack.values.get(key, {})
        texts = (f"{value}: {', '.join(f'{k}: {v}' for k, v in parts.items())}" for value, parts in values.items())
        rows.append((key, own, "; ".join(texts) or "as it is"))
    if rows:
        yield Table(("key", "there", "values there"), tuple(rows), "Settings in its own words")
    if stack.history:
        older = tuple(
            (
                item.since if item.since == item.until else f"{item.since} to {item.until}",
                ", ".join(filter(None, (item.like and f"as {item.like}", _cell("", item.changes, "")))),
            )
            for item in stack.history
        )
        yield Table(("version", "what was otherwise"), older, "Older versions")


def _cell(key: str, value: Any, unit: str) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        readable = f" ({format_bytes(value, unit)})" if key.endswith("_bytes") and value > 2**20 else ""
        return f"{value:,}{readable}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_cell(str(k), v, unit)}" for k, v in value.items()) or "-"
    if isinstance(value, list | tuple):
        return "; ".join(_cell(key, v, unit) for v in value) or "-"
    return str(value)


def model_document(model: Model, unit: str) -> Document:
    """Return a model: its parameters by role, its shapes, and how a file stores it."""
    spec, roles = model.spec, parameters_by_role(model.inventory)
    parameters, active = parameter_count(model.inventory), active_parameter_count(model.inventory)
    data: dict[str, Any] = {
        "schema": "memplan/show/1",
        "kind": "models",
        "name": spec.name,
        "architecture": spec.architecture,
        "source": model.source,
        "parameters": parameters,
        "active_parameters": active,
        "parameters_by_role": roles,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "max_position_embeddings": spec.max_position_embeddings,
        "quantization": model.quantization,
        "notes": list(model.notes),
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "role": t.role, "count": t.count, "first": t.first}
            for t in model.inventory
        ],
    }
    head = f"{spec.name}: {format_count(parameters)} parameters ({parameters:,}), architecture {spec.architecture}, from {model.source}"
    if active != parameters:
        head += f"; {format_count(active)} ({active:,}) active per token"
    by_role = Table(
        ("role", ">parameters", ">exactly"), tuple((r, format_count(n), f"{n:,}") for r, n in roles.items())
    )
    tensors = Table(
        ("tensor", "shape", ">layers", "role"),
        tuple((t.name, "x".join(map(str, t.shape)), str(t.count), t.role) for t in model.inventory),
    )
    blocks: list[Block] = [head, by_role, tensors]
    if model.storage is not None:
        data["storage"] = {
            "bytes_by_format": dict(model.storage.bytes_by_format),
            "total_bytes": model.storage.total_bytes,
            "tensors": model.storage.tensors,
        }
        rows = tuple(
            (name, format_bytes(size, unit), f"{size:,}") for name, size in model.storage.bytes_by_format.items()
        )
        blocks.append(Table(("stored as", ">bytes", ">exactly"), rows, "In the file"))
    if model.quantization:
        blocks.append(f"Released in {model.quantization}.")
    blocks += [f"Note: {note}" for note in model.notes]
    return Document(data, tuple(blocks))


def stored_document(name: str, stored: StoredTensors, unit: str) -> Document:
    """Return what a safetensors file without a config holds."""
    formats = stored.storage().bytes_by_format
    rows = tuple((key, format_bytes(value, unit), f"{value:,}") for key, value in formats.items())
    data = {
        "schema": "memplan/show/1",
        "kind": "file",
        "name": name,
        "parameters": stored.elements,
        "bytes_by_format": formats,
    }
    head = f"{name}: {stored.elements:,} stored elements; no config.json beside it, so no model can be planned from it"
    return Document(data, (head, Table(("stored as", ">bytes", ">exactly"), rows)))
