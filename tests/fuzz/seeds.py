"""A valid file of every kind that memplan reads, and the commands that read it."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from memplan.allocator.history_comparison import compare_history as compare
from memplan.allocator.memory_history import load_history
from memplan.budget.baseline import read_baseline
from memplan.budget.budget_files import read_budget
from memplan.catalog.catalog import SECTIONS, Catalog, data_directory
from memplan.library.budget_plans import Workshop
from memplan.library.lookup import Overrides, Shapes, catalog_model, find_model, find_setup
from memplan.library.lookup.device_lookup import with_profile
from memplan.library.lookup.prices import load_prices
from memplan.library.runs.real_runs import why
from memplan.library.trainers.imported_file import import_file
from memplan.measure.records.measurement_records import read_data, read_record
from memplan.measure.records.prediction import planned
from memplan.model.readers.safetensors import stored_tensors
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.report.experiments import read_record as read_experiment
from memplan.report.validation_answer import calibration_document
from tests.readers.conftest import LLAMA_CONFIG, LLAMA_KEYS, llama_tensors, write_gguf

ROOT = data_directory()
GPU = ("--gpu", "rtx4090")
CONFIG = ("--config", "bf16-adamw")


@dataclass(frozen=True)
class Seed:
    """One kind of file.

    Attributes:
        file: Its name.
        content: Its bytes; as values where ``data`` is given.
        read: What the commands read it with.
        commands: Arguments, ``{}`` for the file's path, ``{folder}`` for its folder's.
        beside: Files that lie beside it.
    """

    file: str
    content: bytes
    commands: tuple[tuple[str, ...], ...]
    read: Callable[[Path], object]
    data: Any = None
    beside: Mapping[str, bytes] = field(default_factory=dict)

    def arguments(self, command: tuple[str, ...], path: Path) -> list[str]:
        """Return one of the commands for the file at a path."""
        return [part.replace("{folder}", str(path.parent)).replace("{}", str(path)) for part in command]

    def written(self, folder: Path) -> Path:
        """Write the file and those beside it; return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.beside.items():
            (folder / name).write_bytes(content)
        (folder / self.file).write_bytes(self.content)
        return folder / self.file


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=1).encode()


def _of(file: str, data: Any, read: Callable[[Path], object], *commands: tuple[str, ...]) -> Seed:
    return Seed(file, _json(data), commands, read, data)


def _text(file: str, text: str, read: Callable[[Path], object], *commands: tuple[str, ...]) -> Seed:
    return Seed(file, text.encode(), commands, read, yaml.safe_load(text))


# ------------------------------------------------------------------ readers, as the commands use them
SHIPPED = Catalog(ROOT)
ON = Device(SHIPPED.gpus["rtx4090"], "rtx4090")


def _model(path: Path) -> object:
    return CompiledPlan(
        find_model(str(path), Shapes(), SHIPPED), find_setup("bf16-adamw", Overrides(), SHIPPED)
    ).evaluate(ON)


def _setup(path: Path) -> object:
    model = catalog_model("smollm2-135m", SHIPPED)
    return CompiledPlan(model, find_setup(str(path), Overrides(), SHIPPED, model)).evaluate(ON)


def _catalog(path: Path) -> object:
    catalog = Catalog(ROOT, path)
    entries = [[shelf[name] for name in shelf] for shelf in map(catalog.section, SECTIONS) if shelf.origins]
    added = [name for name in catalog.gpus if name not in SHIPPED.gpus]
    model, setup = catalog_model("smollm2-135m", SHIPPED), find_setup("bf16-adamw", Overrides(), SHIPPED)
    return entries, [CompiledPlan(model, setup).evaluate(Device(catalog.gpus[name], name)) for name in added]


def _budget(path: Path) -> object:
    return Workshop(SHIPPED).results(read_budget(path), None)


def _profiled(path: Path) -> object:
    model = catalog_model("smollm2-135m", SHIPPED)
    return CompiledPlan(model, find_setup("bf16-adamw", Overrides(), SHIPPED)).evaluate(with_profile(ON, path))


def _record(path: Path) -> object:
    record = read_record(path, SHIPPED)
    return planned(record.task), calibration_document([read_data(path)])


def _history(path: Path) -> object:
    return compare(load_history(path))


def _evidence(path: Path) -> object:
    return read_experiment(str(path), ROOT / "configs" / "evidence")


MODELS = (
    "llama-3.1-8b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b", "gpt2", "gemma-2-2b", "falcon-7b", "gpt-oss-20b",
    "phi-2",
)  # fmt: skip


def _models() -> list[Seed]:
    seeds = []
    for name in MODELS:
        entry = yaml.safe_load((ROOT / "configs" / "models" / f"{name}.yaml").read_text())
        config = {"model_type": entry["architecture"], **entry["config"], "torch_dtype": "bfloat16"}
        seeds.append(_of("config.json", config, _model, ("fit", "{}", *GPU, *CONFIG), ("show", "{}")))
    nested = {
        "model_type": "gemma3",
        "text_config": LLAMA_CONFIG,
        "vision_config": {"vision_use_head": False},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    return [*seeds, _of("config.json", nested, _model, ("show", "{}"))]


TENSORS = {
    "a.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
}
INDEX = {"metadata": {"total_size": 16}, "weight_map": {"a.weight": "model.safetensors", "b": "model.safetensors"}}


def safetensors(header: bytes, data: bytes = b"0" * 16) -> bytes:
    """Return a safetensors file with a true length before its header."""
    return struct.pack("<Q", len(header)) + header + data


CATALOG = """\
gpus:
  my-gpu:
    name: Mine
    vendor: nvidia
    architecture: Ada
    memory_bytes: 25757220864
    memory_kind: measured
    cuda_total_bytes: 25393692672
    cuda_total_kind: measured
    bandwidth_bytes_per_second: 1008000000000
    dense_flops: {bf16: 165200000000000}
    interconnect: {kind: pcie-4-x16, bytes_per_second: 64000000000}
    unified_memory: false
    compute_capability: "8.9"
    aliases: [mine, my own]
    sources: [{url: "https://example.com/sheet", checked: "2026-01-31", covers: [memory_bytes]}]
optimizers: {}
models: {}
configs:
  my-config: {description: mine, weights: {default: bf16}, optimizer: {default: adamw-bf16}}
"""

BUDGET = """\
version: 1
baseline: base.json
defaults: {model: smollm2-135m, gpu: rtx4090}
include: [more.yaml]
budgets:
  - {name: one, config: lora, limit: 19 GiB, basis: upper}
  - {name: two, config: bf16-adamw, set: {micro_batch_size: 2}, gpus: [t4, a100-80gb], level: warn}
  - {name: three, config: tier1, components: {weights: 5 GiB}, max_increase: 99%}
"""

BASED = """\
version: 1
baseline: base.json
budgets: [{name: qlora, model: llama-8b, config: qlora, gpu: rtx4090, max_increase: 50%}]
"""

TRAINING = {
    "description": "fuzz", "status": "works", "weights": {"default": "bf16", "norm": "fp32"}, "master_weights": "none",
    "compute_dtype": "bf16", "gradients": {"dtype": "bf16", "lifetime": "step"}, "optimizer": {"default": "adamw-bf16"},
    "micro_batch_size": 2, "sequence_length": 512, "gradient_accumulation_steps": 1,
    "activation_checkpointing": "none", "stack": "bundled", "kernels": {"optimizer": "fused", "loss_chunks": 4},
    "adapter": {"kind": "lora", "rank": 8, "targets": ["c_attn"], "dtype": "bf16"},
    "parallel": {"data": 2, "zero_stage": 0}, "offload": {"optimizer_states": "none"}, "dropout": 0.1,
    "clip_gradients": False, "reserve": "500 MiB", "allocator": "native", "evaluation": True,
}  # fmt: skip

TRAINERS = Path(__file__).parents[1] / "trainers" / "examples"
TRAINER_COMMANDS = (("import", "{}", "--gpus", "8"), ("fit", "{}", *GPU))
UNSLOTH = """\
from unsloth import FastLanguageModel
size = 2 * 1024
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen2.5-7B", max_seq_length=size, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"])
arguments = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="adamw_8bit")
"""

SCRIPT = """#!/bin/bash
#SBATCH --gpus-per-node=8
MODEL=${MODEL:-meta-llama/Llama-3.1-8B}
ROWS=$((2 * 2))
OPTIONS=(--bf16 --per_device_train_batch_size "$ROWS" --max_length 2048)
for i in 1 2; do echo "$i"; done
if [ -n "$SEED" ]; then OPTIONS+=(--seed "$SEED"); fi
cat > ds.json <<EOF
{"zero_optimization": {"stage": 2}}
EOF
torchrun --nproc_per_node 8 \\
  $(which trl) sft --model_name_or_path "$MODEL" "${OPTIONS[@]}" # a comment
"""
LAUNCHED = (
    "accelerate launch --num_processes 8 --mixed_precision bf16 --use_deepspeed --zero_stage 2 -m trl.scripts.sft "
    "--model_name_or_path Qwen/Qwen2.5-7B --use_peft --lora_r 16 --per_device_train_batch_size 2 --max_length 4096 --bf16 true"
)
CRASH = """\
  File "/usr/lib/python3.12/site-packages/torch/autograd/graph.py", line 841, in _engine_run_backward
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.65 GiB of which \
160.00 MiB is free. Process 77 has 512.00 MiB memory in use. Including non-PyTorch memory, this process has 22.90 GiB memory \
in use. Of the allocated memory 21.90 GiB is allocated by PyTorch, and 310.50 MiB is reserved by PyTorch but unallocated.
"""

PROFILE = {
    "schema": "memplan/profile/1", "records": 3, "device": "NVIDIA H200", "torch_version": "2.11.0",
    "context_bytes": 778043392, "upper_context_bytes": 851443712, "library_bytes": 67108864, "alloc_conf": [""],
}  # fmt: skip

HISTORY = {
    "device_traces": [[
        {"action": "segment_alloc", "addr": 2**30, "size": 2**21, "stream": 0},
        {"action": "alloc", "addr": 2**30, "size": 1000, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 2**30 + 1024, "size": 2000, "stream": 0},
        {"action": "free_requested", "addr": 2**30, "size": 1000, "stream": 0},
        {"action": "free_completed", "addr": 2**30, "size": 1000, "stream": 0},
    ]],
    "segments": [{
        "device": 0, "address": 2**30, "total_size": 2**21, "stream": 0, "segment_pool_id": [0, 0],
        "blocks": [{"size": 1024, "requested_size": 1000, "state": "inactive"},
                   {"size": 2048, "requested_size": 2000, "state": "active_allocated"},
                   {"size": 2**21 - 3072, "requested_size": 0, "state": "inactive"}],
    }],
    "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
}  # fmt: skip


def seeds(folder: Path) -> list[Seed]:
    """Return a seed of every kind; files that only their own packages write are made in ``folder``."""
    records = Path(__file__).parent.parent / "records"
    sample = next(iter(sorted((records / "cuda").glob("*.json"))))
    record = json.loads(sample.read_text())
    baseline = json.loads((ROOT / "memplan-baseline.json").read_text())
    evidence = [
        _of(
            f"{name}.json",
            json.loads((ROOT / "configs" / "evidence" / f"{name}.json").read_text()),
            _evidence,
            ("lab", "show", "{}"),
        )
        for name in ("train-tier1", "lab-orthogonality", "lab-weight-bits")
    ]
    gguf = write_gguf(folder / "seed.gguf", "llama", LLAMA_KEYS, llama_tensors(1), extra={"general.name": "Tiny"})
    header = json.dumps(TENSORS).encode()
    of_three = next(row for row in baseline["rows"] if row["gpu"] == "rtx4090") | {"name": "three"}
    budget_beside = {"base.json": _json(baseline | {"rows": [of_three]}), "more.yaml": b"version: 1\nbudgets: []\n"}
    budget = _text("budget.yaml", BUDGET, _budget, ("check", "{}"), ("check", "{}", "-f", "junit"))
    tier1 = (ROOT / "configs" / "training" / "tier1.yaml").read_text()
    return [
        *_models(),
        Seed("tiny.gguf", gguf.read_bytes(), (("show", "{}"), ("fit", "{}", *GPU, *CONFIG)), _model),
        Seed("model.safetensors", safetensors(header), (("show", "{}"),), stored_tensors),
        Seed("model.safetensors", safetensors(header), (("show", "{}"),), _model, TENSORS, {"config.json": _json(LLAMA_CONFIG)}),
        Seed("model.safetensors.index.json", _json(INDEX), (("show", "{}"),), _model, INDEX,
             {"config.json": _json(LLAMA_CONFIG), "model.safetensors": safetensors(header)}),
        _of("training.json", TRAINING, _setup, ("fit", "gpt2", *GPU, "--config", "{}"), ("explain", "gpt2", "--config", "{}")),
        _text("training.yaml", tier1, _setup, *(("fit", "smollm2-135m", *GPU, "--config", place) for place in ("{}", "-"))),
        _text("catalog.yaml", CATALOG, _catalog, ("list", "gpus", "--catalog", "{}"), ("list", "configs", "--catalog", "{}"),
              ("fit", "smollm2-135m", "--gpu", "mine", "--config", "my-config", "--catalog", "{}")),
        Seed(budget.file, budget.content, budget.commands, _budget, budget.data, budget_beside),
        Seed("base.json", _json(baseline), (("diff", "{}", "{}"), ("check", "{folder}/budget.yaml")), read_baseline, baseline,
             {"budget.yaml": BASED.encode()}),
        _text("prices.yaml", "currency: USD\nprices: {h100-sxm-80gb: 2.49, rtx4090: 0.39}\n", lambda path: load_prices(path, SHIPPED),
              ("where", "gpt2", *CONFIG, "--price", "{}")),
        *(_text(f"{name}.yaml", (TRAINERS / f"{name}.yaml").read_text(), import_file, *(TRAINER_COMMANDS if name == "axolotl-full" else TRAINER_COMMANDS[:1]))
          for name in ("axolotl", "axolotl-full", "llama-factory", "trl", "dpo", "litgpt", "torchtune", "megatron", "accelerate")),
        _of("ds_z3.json", json.loads((TRAINERS / "ds_z3.json").read_text()), import_file, TRAINER_COMMANDS[0]),
        Seed("torchtitan.toml", (TRAINERS / "torchtitan.toml").read_bytes(), TRAINER_COMMANDS[:1], import_file),
        Seed("unsloth.py", UNSLOTH.encode(), TRAINER_COMMANDS[:1], import_file),
        Seed("launch.sh", SCRIPT.encode(), TRAINER_COMMANDS[:1], import_file),
        _of("unsloth.ipynb", {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [
            {"cell_type": "markdown", "source": "# Fine-tuning"},
            {"cell_type": "code", "source": [f"{line}\n" for line in UNSLOTH.splitlines()]},
        ]}, import_file, TRAINER_COMMANDS[0]),
        Seed("crash.log", CRASH.encode(), (("why", "gpt2", *CONFIG, "--message", "{}"), ("why", "--message", "{}")),
             lambda path: why(file=path)),
        Seed("command.sh", LAUNCHED.encode(), (("import", "--", *LAUNCHED.split()),), lambda path: import_file(path.read_text("latin-1").split())),
        _of("profile.json", PROFILE, _profiled, ("fit", "gpt2", "--gpu", "h100", *CONFIG, "--profile", "{}")),
        _of("record.json", record, _record, ("validate", "--calibrate", "{}")),
        _of("history.json", HISTORY, _history, ("trace", "--history", "{}")),
        *evidence,
    ]  # fmt: skip
