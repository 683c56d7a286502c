"""Formula against trace over a grid of configurations: ``python -m tests.survey.agreement``.

Both are of memplan's own loop, also for shipped configs that name another stack. Models are released ones
at their full width, cut to a few layers: a trace allocates nothing, and what layers add is the same for each
of them. A few stay whole.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memplan.catalog.catalog import Catalog, data_directory
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Gradients, Offload, TrainingConfig
from memplan.documents.escaping import json_text
from memplan.documents.writing import write_answer, write_remark
from memplan.model.families import model_spec, with_towers
from memplan.model.model import Model
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import LayerRun
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.survey.drawn_models import NOT_BUNDLED

WHOLE = ("llama-3.1-8b", "qwen3-0.6b", "gpt2")
"""Models that are traced with all their layers."""

CUT_LAYERS = 2

AUTOCAST: Mapping[str, Any] = {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}

FAMILY_CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "fp32 loss": {"kernels": Kernels(loss="fp32", optimizer="fused")},
    "chunked loss": {"kernels": Kernels(loss="chunked", optimizer="fused")},
    "composite norm": {"kernels": Kernels(norm="composite", optimizer="fused")},
    "fused elementwise": {"kernels": Kernels(rotary="fused", activation="fused", optimizer="fused")},
    "for-loop optimizer": {"kernels": Kernels(optimizer="for-loop")},
    "autocast": AUTOCAST,
    "adapters": {"adapter": Adapter()},
}
"""What every family is traced with."""

LLAMA_CASES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"weights": {"default": "fp32"}, "compute_dtype": "fp32"},
    "math attention": {"kernels": Kernels(attention="math")},
    "efficient attention": {"kernels": Kernels(attention="efficient")},
    "cudnn attention": {"kernels": Kernels(attention="cudnn")},
    "sgd": {"optimizer": {"default": "sgd"}},
    "momentum": {"optimizer": {"default": "sgd-momentum"}},
    "8-bit states": {"optimizer": {"default": "adamw-8bit-bnb"}},
    "accumulation": {"gradient_accumulation_steps": 3},
    "chunked loss, released": {
        "kernels": Kernels(loss="chunked"),
        "gradients": Gradients(lifetime="layer"),
        "activation_checkpointing": "full",
    },
    "zero-filled gradients": {"zero_gradients": "fill"},
    "clipping": {"clip_gradients": True},
    "evaluation": {"evaluation": True},
    "dropout": {"dropout": 0.1},
    "release": {"gradients": Gradients(lifetime="layer")},
    "dora": {"adapter": Adapter(kind="dora")},
    "qlora": {"adapter": Adapter(), "weights": {"hidden_matrix": "nf4-dq", "default": "bf16"}},
    "fp32 adapters": {"adapter": Adapter(dtype="fp32")},
    "transformers' kernels": {"kernels": Kernels(norm="composite", optimizer="fused", loss="fp32")},
    "torchtitan's kernels": {"kernels": Kernels(optimizer="fused", loss="fp32")},
    "Transformer Engine's kernels": {
        "kernels": Kernels("cudnn", "fused", "fused", "fused", "fused", loss="fp32"),
    },
    "loss scaling": {"weights": {"default": "fp16"}, "compute_dtype": "fp16", "loss_scaling": True},
    "weight average": {"weight_average": "bf16"},
    "master weights": {"master_weights": "fp32", "optimizer": {"default": "adamw-fp32"}},
}
"""What the Llama family is traced with besides."""

BATCHES = ((1, 512), (4, 1024))
"""(sequences, tokens of each)."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Formula and trace of one configuration."""

    name: str
    family: str
    formula_bytes: int
    traced_bytes: int
    # Bytes by which the formula exceeds the trace, for instants where it does not agree, and for states in host memory
    # under ``host``.
    differences: Mapping[str, int]

    @property
    def difference_bytes(self) -> int:
        """Bytes by which the formula's peak exceeds the trace's."""
        return self.formula_bytes - self.traced_bytes


STORING_CASES: Mapping[str, Mapping[str, Any]] = {
    "fp8 gradients": {"gradients": Gradients(dtype="fp8-e4m3")},
    "fp8 gradients, released": {"gradients": Gradients(dtype="fp8-e4m3", lifetime="layer")},
    "autocast, accumulation": {**AUTOCAST, "gradient_accumulation_steps": 3},
    "autocast, released": {**AUTOCAST, "gradients": Gradients(lifetime="layer")},
    "autocast, chunked loss": {**AUTOCAST, "gradient_accumulation_steps": 3, "kernels": Kernels(loss="chunked")},
    "master weights": {"master_weights": "fp32", "optimizer": {"default": "adamw-fp32"}},
    "master weights, 8-bit states": {"master_weights": "fp32", "optimizer": {"default": "adamw-8bit-bnb"}},
    "master weights, released": {
        "master_weights": "fp32",
        "optimizer": {"default": "adamw-fp32"},
        "gradients": Gradients(lifetime="layer"),
    },
}
"""What a model with a head of its own, and one whose head is its embedding, are traced with."""

OFFLOADED_CASES: Mapping[str, Mapping[str, Any]] = {
    "AdamW in bf16": {},
    "AdamW in fp32": {"optimizer": {"default": "adamw-fp32"}},
    "AdamW in int8": {"optimizer": {"default": "adamw-int8"}},
    "Muon in fp32": {"optimizer": {"default": "muon-fp32"}},
    "Muon in int8": {"optimizer": {"default": "muon-int8"}},
    "Muon in int4": {"optimizer": {"default": "muon-int4"}},
    "accumulation": {"optimizer": {"default": "muon-int8"}, "gradient_accumulation_steps": 3},
    "clipping": {"optimizer": {"default": "adamw-int8"}, "clip_gradients": True},
    "released": {"optimizer": {"default": "muon-int4"}, "gradients": Gradients(lifetime="layer")},
    "autocast": AUTOCAST,
    "adapters": {"adapter": Adapter()},
    "codes": {
        "weights": {"hidden_matrix": "q4-0", "default": "q8-0", "norm": "fp32"},
        "optimizer": {"default": "muon-int4"},
    },
}
"""What states in host memory are traced with, on a model with a head of its own and on one without."""


def grid(catalog: Catalog) -> Iterator[tuple[str, Model, TrainingConfig]]:
    """Yield (name, model, config) of every configuration."""
    for name in _one_of_each_family(catalog):
        model = cut_model(name, catalog)
        for case, keys in FAMILY_CASES.items():
            batch, length = BATCHES[len(case) % 2]
            yield f"{name}, {case}", model, _config(keys, batch, length)
    llama = cut_model("llama-3.2-1b", catalog)
    for case, keys in LLAMA_CASES.items():
        for batch, length in BATCHES:
            yield f"llama-3.2-1b, {case}, {batch} x {length}", llama, _config(keys, batch, length)
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        model = cut_model(name, catalog)
        for case, keys in STORING_CASES.items():
            yield f"{name}, {case}", model, _config(keys, *BATCHES[0])
        for case, keys in OFFLOADED_CASES.items():
            offloaded = {**keys, "offload": Offload(optimizer_states="cpu")}
            yield f"{name}, offloaded states, {case}", model, _config(offloaded, *BATCHES[0])
    for name in WHOLE:
        model = cut_model(name, catalog, layers=10**6)
        for shipped in ("bf16-adamw", "mixed-adamw", "lora"):
            length = model.spec.learned_positions or 2048
            config = replace(catalog.configs[shipped], sequence_length=length, stack="bundled")
            yield f"{name}, {shipped}", model, config


def _config(keys: Mapping[str, Any], batch: int, length: int) -> TrainingConfig:
    return replace(TrainingConfig("", micro_batch_size=batch, sequence_length=length), **keys)


def _one_of_each_family(catalog: Catalog) -> list[str]:
    first_of_family: dict[str, str] = {}
    for name, entry in catalog.models.entries.items():
        if entry.architecture not in (
            *with_towers(),
            *NOT_BUNDLED,
        ):  # text models of other families; no code of the bundled stack
            first_of_family.setdefault(entry.architecture, name)
    return list(first_of_family.values())


def cut_model(name: str, catalog: Catalog, layers: int = CUT_LAYERS) -> Model:
    """Return a catalog model with at most ``layers`` layers of each run."""
    entry = catalog.models[name]
    spec = model_spec({**entry.config, "model_type": entry.architecture}, entry.title, f"catalog:{name}")
    runs: list[LayerRun] = []
    first = 0
    for run in spec.runs:
        count = min(layers, run.count)
        runs.append(LayerRun(run.layer, count, first))
        first += count
    spec = replace(spec, runs=tuple(runs))
    return Model(spec, inventory_of(spec), spec.source)


def compare(name: str, model: Model, config: TrainingConfig, catalog: Catalog) -> Agreement:
    """Return formula and trace of one configuration."""
    setup = resolve(config, catalog, name)
    gpu = "h100-sxm-80gb"
    plan = CompiledPlan(model, setup).evaluate(Device(catalog.gpus[gpu], gpu))
    trace = trace_training(model, setup)
    formula = dict(plan.instants)
    differences = {
        instant: formula[instant] - size
        for instant, size in trace.instant_bytes.items()
        if instant in formula and formula[instant] != size
    }
    if plan.host_bytes != trace.host_bytes:
        differences["host"] = plan.host_bytes - trace.host_bytes
    return Agreement(name, model.spec.architecture, plan.requested_bytes, trace.peak_bytes, differences)


def main() -> None:
    """Compare the whole grid; print a line for each family, the worst case, and JSON with ``--json``."""
    catalog = Catalog(data_directory())
    agreements = []
    for name, model, config in grid(catalog):
        agreements.append(compare(name, model, config, catalog))
        write_remark(f"{len(agreements)} {name}\n")
    if "--json" in sys.argv:
        write_answer(json_text([_data(item) for item in agreements], indent=1))
        return
    for line in report(agreements):
        write_answer(line + "\n")


def _data(item: Agreement) -> dict[str, Any]:
    return {
        "name": item.name,
        "family": item.family,
        "formula_bytes": item.formula_bytes,
        "traced_bytes": item.traced_bytes,
        "instant_differences": dict(item.differences),
    }


def report(agreements: list[Agreement]) -> Iterator[str]:
    """Yield a line for each family, and one for the worst case."""
    yield f"{'family':<14}{'configurations':>16}{'equal to the byte':>20}{'worst':>12}"
    for family in dict.fromkeys(item.family for item in agreements):
        group = [item for item in agreements if item.family == family]
        exact = sum(not item.difference_bytes for item in group)
        worst = max(abs(item.difference_bytes) / item.traced_bytes for item in group)
        yield f"{family:<14}{len(group):>16}{exact:>20}{worst:>12.5%}"
    worst_item = max(agreements, key=lambda item: abs(item.difference_bytes) / item.traced_bytes)
    exact = sum(not item.difference_bytes for item in agreements)
    yield f"{len(agreements)} configurations, {exact} equal to the byte; the worst:"
    yield f"{worst_item.name}: {worst_item.difference_bytes:+,} B of {worst_item.traced_bytes:,} B"


if __name__ == "__main__":
    main()
