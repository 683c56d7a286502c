"""The measurement plans: what is run on a GPU within 25 minutes, and on a CPU within a few.

Whole models from 135 million parameters to 8 billion, the three tiers, AdamW in bf16 and under
autocast, adapters, checkpointing, batches and lengths, the native allocator and expandable segments;
then two layers of every architecture.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.catalog.training_config import Offload
from memplan.errors import MemplanError
from memplan.measure.records.prediction import planned
from memplan.measure.task import SMALL, Scale, Task, scaled_model
from memplan.model.inventory import parameter_count
from memplan.training.resolution.resolve_config import resolve

EXPANDABLE = "expandable_segments:True"
WHOLE = Scale()

CPU_MODELS = ("llama-3.2-1b", "gpt2", "qwen3-0.6b")
CPU_KERNELS: dict[str, Any] = {"attention": "math", "norm": "composite"}
"""What the CPU build runs and the formula knows: so that all three can be compared."""

SMALL_MODELS = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b")
LARGE_MODELS = ("qwen3-1.7b", "llama-3.2-3b", "llama-3.1-8b")
CONFIGS = ("bf16-adamw", "mixed-adamw", "muon", "tier1", "tier2", "tier3")
OFFLOADED_CONFIGS = ("bf16-adamw", "tier1")
OFFLOADED = Offload(optimizer_states="cpu")
LARGE_CONFIGS = ("bf16-adamw", "lora", "muon", "tier1")
FAMILY_SCALE = Scale(layers=2, vocab=8192)
"""What every architecture is cut to, at its own width."""


def cpu_tasks(catalog: Catalog) -> Iterator[Task]:
    """Yield every shipped config on a small Llama, one config on other families, and some with offloaded states."""
    for name in catalog.configs.entries:
        yield cpu_task(CPU_MODELS[0], name, catalog)
    for model in CPU_MODELS[1:]:
        yield cpu_task(model, "fp32-adamw", catalog)
    for name in OFFLOADED_CONFIGS:
        yield cpu_task(CPU_MODELS[0], name, catalog, offload=OFFLOADED)


def cpu_task(model: str, config: str, catalog: Catalog, **keys: Any) -> Task:
    """Return a shipped config on a model that a CPU trains in seconds."""
    kernels = Kernels(**CPU_KERNELS)
    shipped = replace(catalog.configs[config], stack=DEFAULT_STACK, micro_batch_size=2, sequence_length=128)
    changed = replace(shipped, kernels=kernels, **keys)
    return Task(model, SMALL, scaled_model(model, SMALL, catalog), resolve(changed, catalog, config))


def cuda_tasks(catalog: Catalog, total_bytes: int = 0) -> Iterator[Task]:
    """Yield the measurement plan for a GPU: more than 60 configurations, short ones first.

    Args:
        total_bytes: Memory of the card; larger tasks are left out. 0 for no limit.
    """
    for task in _all_cuda_tasks(catalog):
        if not total_bytes or _upper_bytes(task) <= total_bytes:
            yield task


def _all_cuda_tasks(catalog: Catalog) -> Iterator[Task]:
    for model in SMALL_MODELS:
        for config in CONFIGS:
            yield cuda_task(model, config, catalog, micro_batch_size=2, sequence_length=1024)
    for model in SMALL_MODELS[2:]:
        for batch, length in ((1, 4096), (8, 512)):
            yield cuda_task(model, "bf16-adamw", catalog, micro_batch_size=batch, sequence_length=length)
        yield cuda_task(model, "bf16-adamw", catalog, activation_checkpointing="full", sequence_length=4096)
        yield cuda_task(model, "mixed-adamw", catalog, activation_checkpointing="full")
        yield cuda_task(model, "bf16-adamw", catalog, alloc_conf=EXPANDABLE)
        yield cuda_task(model, "bf16-adamw", catalog, gradient_accumulation_steps=2)
        for config in OFFLOADED_CONFIGS:
            yield cuda_task(model, config, catalog, offload=OFFLOADED, sequence_length=512)
    for model in LARGE_MODELS:
        for config in LARGE_CONFIGS:
            yield cuda_task(model, config, catalog, activation_checkpointing="full")
        yield cuda_task(model, "lora", catalog, micro_batch_size=4)
        yield cuda_task(model, "bf16-adamw", catalog, alloc_conf=EXPANDABLE, activation_checkpointing="full")

    # A step of tier 3 takes 26 s on 1.7 billion parameters (H200): encoding to a grid is many small kernels.
    yield cuda_task(LARGE_MODELS[0], "tier3", catalog, activation_checkpointing="full")
    for model in _smallest_of_each_family(catalog):
        task = cuda_task(model, "bf16-adamw", catalog, micro_batch_size=2, sequence_length=512)
        yield replace(task, scale=FAMILY_SCALE, model=scaled_model(model, FAMILY_SCALE, catalog))


def _smallest_of_each_family(catalog: Catalog) -> list[str]:
    """Return the smallest catalog model of every architecture."""
    smallest: dict[str, tuple[int, str]] = {}
    for name, entry in catalog.models.entries.items():
        size = parameter_count(scaled_model(name, FAMILY_SCALE, catalog).inventory)
        smallest[entry.architecture] = min(smallest.get(entry.architecture, (size, name)), (size, name))
    return [name for _, name in smallest.values()]


def cuda_task(model: str, config: str, catalog: Catalog, alloc_conf: str = "", **keys: Any) -> Task:
    """Return a shipped config on a whole model; coded weights are too many small tensors for a memory history."""
    setup = resolve(replace(catalog.configs[config], stack=DEFAULT_STACK, **keys), catalog, config)
    conf = alloc_conf or (EXPANDABLE if setup.config.allocator == "expandable" else "")
    coded = setup.trains_codes
    return Task(model, WHOLE, scaled_model(model, WHOLE, catalog), setup, "cuda", alloc_conf=conf, history=not coded)


def _upper_bytes(task: Task) -> int:
    try:
        return planned(task).upper_bytes
    except MemplanError:
        return 0


def task_label(task: Task) -> str:
    """Return a task's name, which is that of its record too."""
    config = task.setup.config
    parts = [task.device, task.name, task.setup.name, f"b{config.micro_batch_size}", f"s{config.sequence_length}"]
    if task.scale.text:
        parts.insert(2, "small" if task.scale == SMALL else task.scale.text.replace(", ", "-").replace(" ", ""))
    if task.setup.checkpointing != "none":
        parts.append(task.setup.checkpointing)
    if config.gradient_accumulation_steps > 1:
        parts.append(f"a{config.gradient_accumulation_steps}")
    if config.offload.optimizer_states != "none":
        parts.append("offload")
    if task.alloc_conf:
        parts.append("expandable" if task.alloc_conf == EXPANDABLE else "conf")
    if task.capacity_bytes:
        parts.append(f"c{task.capacity_bytes}")
    return "-".join(parts)
