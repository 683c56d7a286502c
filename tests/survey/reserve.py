"""The reserve of the caching allocator beyond allocated bytes: ``python -m tests.survey.reserve``.

Traced steps of whole released models are replayed through the simulated allocator in two ways: without
a memory limit, which gives the reserved bytes where memory is plentiful, and on ever smaller cards, which
gives the smallest card that the step survives on, since the allocator empties its cache before it fails.
The shares in :mod:`memplan.plan.allowances` are the median and the 95th percentile of the latter for the
native allocator, torch's default.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

from memplan.allocator.caching_allocator import replay
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.catalog.catalog import Catalog, data_directory
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.escaping import json_text
from memplan.documents.writing import write_answer, write_remark
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.survey.agreement import cut_model

CARD_STEPS = (300, 200, 150, 120, 100, 80, 60, 50, 40, 30, 20, 15, 10, 5, 0)
"""Sizes of cards that are tried, in thousandths above the allocated peak."""

MODELS = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen3-1.7b", "gemma-2-2b", "llama-3.2-3b", "llama-3.1-8b")
BATCHES = ((1, 2048), (4, 2048), (1, 8192), (3, 1000))
CASES: Mapping[str, Mapping[str, Any]] = {
    "bf16-adamw": {},
    "bf16-adamw fused": {"kernels": Kernels(optimizer="fused")},
    "bf16-adamw full": {"activation_checkpointing": "full"},
    "bf16-adamw fused full": {"kernels": Kernels(optimizer="fused"), "activation_checkpointing": "full"},
    "mixed-adamw": {},
    "lora": {},
    "qlora": {"activation_checkpointing": "full"},
    "tier1": {"activation_checkpointing": "full"},
}


def cases(catalog: Catalog) -> Iterator[tuple[str, str, TrainingConfig]]:
    """Yield (label, model, config) of every step that is replayed."""
    for model in MODELS:
        for case, keys in CASES.items():
            for batch, length in BATCHES:
                shipped = catalog.configs[case.split()[0]]
                config = replace(shipped, stack=DEFAULT_STACK, micro_batch_size=batch, sequence_length=length, **keys)
                yield f"{model}, {case}, {batch} x {length}", model, config


def measured(catalog: Catalog) -> Iterator[dict[str, Any]]:
    """Yield requested, allocated and reserved peaks of every step, native and with expandable segments."""
    for label, name, config in cases(catalog):
        trace = trace_training(
            cut_model(name, catalog, layers=10**6), resolve(config, catalog, label), compute_capability="9.0"
        )
        row: dict[str, Any] = {"name": label, "requested_bytes": trace.peak_bytes}
        events = [(1 if e.allocates else -1, e.storage, e.bytes) for e in trace.events]
        for kind, text in (("native", ""), ("expandable", "expandable_segments:True")):
            row[kind] = _replayed(events, parse_alloc_conf(text))
        yield row


def _replayed(events: list[tuple[int, int, int]], settings: AllocatorSettings) -> dict[str, int]:
    """Return peaks without a limit, and the smallest card, in steps of a percent, that survives with all larger ones."""
    free = replay(events, settings)
    allocated = free.allocated_peak_bytes
    least = free.reserved_peak_bytes
    for percent in CARD_STEPS:
        card = allocated + allocated * percent // 1000
        if card >= least:
            continue
        if not replay(events, settings, card).survives:
            break
        least = card
    return {"allocated_bytes": allocated, "reserved_bytes": free.reserved_peak_bytes, "least_card_bytes": least}


def main() -> None:
    """Print the shares, and every step with ``--json``."""
    rows = []
    for row in measured(Catalog(data_directory())):
        rows.append(row)
        write_remark(f"{len(rows)} {row['name']}\n")
    if "--json" in sys.argv:
        write_answer(json_text(rows, indent=1))
        return
    for kind in ("native", "expandable"):
        shares = [row[kind]["least_card_bytes"] / row[kind]["allocated_bytes"] - 1 for row in rows]
        plenty = [row[kind]["reserved_bytes"] / row[kind]["allocated_bytes"] - 1 for row in rows]
        blocks = [row[kind]["allocated_bytes"] / row["requested_bytes"] - 1 for row in rows]
        high = quantiles(shares, n=20)[-1]
        write_answer(
            f"{kind}, {len(rows)} steps: needed over allocated: median {median(shares):.1%}, 95th percentile {high:.1%}, "
            f"largest {max(shares):.1%}; reserved without a limit: median {median(plenty):.1%}, largest {max(plenty):.1%}; "
            f"allocated over requested: median {median(blocks):.2%}\n"
        )


if __name__ == "__main__":
    main()
