"""Write the keys of trainers' released schemas to ``tests/trainers/schemas``: ``python tests/trainers/extract_schemas.py FOLDER``.

``FOLDER`` holds unpacked packages, as ``pip download --no-deps`` and ``unzip`` leave them. Their source is parsed, never run.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
ANY = ".*"

PACKAGES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "axolotl": (
        ("axolotl/utils/schemas/config.py", "AxolotlInputConfig", ""),
        ("axolotl/utils/schemas/(model|training|peft|integrations|multimodal|deprecated).py", "(?!LoftQ|SpecialTokens|RoleBoundary|MixLora|LrGroup|SelectiveC).*Config|DeprecatedParameters", ""),
        ("axolotl/integrations/(liger|cut_cross_entropy|kd|spectrum|grokfast|densemixer|expert_parallel|kernels|mora)/args.py", ".*Args", ""),
        ("axolotl/utils/schemas/fsdp.py", "FSDPConfig", "fsdp_config."),
        ("axolotl/utils/schemas/trl.py", "TRLConfig", "trl."),
        ("axolotl/utils/schemas/vllm.py", "VllmConfig", "vllm."),
    ),
    "llamafactory": (
        ("llamafactory/hparams/(data|finetuning|model|training)_args.py", ANY, ""),
        ("llamafactory/v1/config/(model|training|data|sample)_args.py", ANY, ""),
        ("transformers/training_args.py", "TrainingArguments", ""),
    ),
    "trl": (
        ("trl/trainer/(base|sft|dpo|grpo|kto|reward|rloo|distillation|model)_config.py", ANY, ""),
        ("trl/scripts/utils.py", "ScriptArguments", ""),
        ("transformers/training_args.py", "TrainingArguments", ""),
    ),
    "accelerate": (("accelerate/commands/config/config_args.py", "(Base|Cluster|SageMaker)Config", ""),),
    "deepspeed": (
        ("deepspeed/runtime/zero/config.py", "DeepSpeedZeroConfig", "zero_optimization."),
        ("deepspeed/runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig", "zero_optimization.offload_param."),
        ("deepspeed/runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig", "zero_optimization.offload_optimizer."),
        ("deepspeed/runtime/precision_config.py", "DeepSpeedFP16Config", "fp16."),
        ("deepspeed/runtime/precision_config.py", "DeepSpeedBF16Config", "bf16."),
    ),
    "ms-swift": (
        ("swift/arguments/(sft|rlhf|pretrain|tuner)_args.py", ANY, ""),
        ("swift/arguments/base_args/(base|data|model|quant|template)_args.py", ANY, ""),
        ("swift/trainers/arguments.py", ANY, ""),
        ("swift/megatron/arguments/(megatron|sft|pretrain|rlhf)_args.py", ANY, ""),
        ("transformers/training_args.py", "TrainingArguments", ""),
    ),
    "torchtitan": tuple(
        ("torchtitan/config/job_config.py", name, f"{section}.")
        for name, section in (("Model", "model"), ("Optimizer", "optimizer"), ("LRScheduler", "lr_scheduler"), ("Training", "training"), ("Parallelism", "parallelism"), ("ActivationCheckpoint", "activation_checkpoint"), ("Compile", "compile"), ("Validation", "validation"), ("FaultTolerance", "fault_tolerance"), ("MemoryEstimation", "memory_estimation"))
    )
    + tuple(  # the flags of 0.3
        (f"torchtitan/{path}.py", name, f"{section}.")
        for path, name, section in (
            ("config/configs", "TrainingConfig", "training"), ("config/configs", "ParallelismConfig", "parallelism"), ("config/configs", "CompileConfig", "compile"), ("config/configs", "DebugConfig", "debug"),
            ("components/optimizer/optimizer", "Config", "optimizer"), ("components/validate", "Config", "validator"), ("distributed/activation_checkpoint", "Config", "activation_checkpoint"),
        )
    ),
    "unsloth": tuple(
        (path, classes, f"{call}.")
        for call, name in (("SFTConfig", "sft"), ("DPOConfig", "dpo"), ("GRPOConfig", "grpo"), ("KTOConfig", "kto"))
        for path, classes in ((f"trl/trainer/({name}|base)_config.py", ANY), ("transformers/training_args.py", "TrainingArguments"))
    ),
    "litgpt": (("litgpt/args.py", "TrainArgs", "train."), ("litgpt/args.py", "EvalArgs", "eval.")),
}  # fmt: skip
"""Mapping -> files of packages, the classes in them whose fields are keys, and what stands in front of these."""


def schema_keys(folder: Path, trainer: str) -> list[str]:
    """Return the keys of a trainer's schema, sorted."""
    keys = set()
    for pattern, classes, prefix in PACKAGES[trainer]:
        paths = [path for path in folder.rglob("*.py") if re.search(rf"(^|/){pattern}$", str(path))]
        assert paths, f"{trainer}: no file like {pattern} below {folder}"
        keys |= {f"{prefix}{name}" for path in paths for name in fields(path, classes)}
    return sorted(key for key in keys if (name := key.rsplit(".", 1)[-1]).islower() and name[0] != "_")


def fields(path: Path, classes: str) -> Iterator[str]:
    """Yield the annotated fields of classes in a file, but for constants."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and re.fullmatch(classes, node.name):
            for item in node.body:
                text = ast.unparse(item)
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and "init=False" not in text:
                    yield item.target.id


def argument_keys(folder: Path) -> Iterator[str]:
    """Yield what unsloth's functions take, as keys of their calls."""
    for path, owner, function, called in UNSLOTH:
        for node in ast.walk(ast.parse((folder / path).read_text(encoding="utf-8"))):
            for item in node.body if isinstance(node, ast.ClassDef) and node.name == owner else ():
                if isinstance(item, ast.FunctionDef) and item.name == function:
                    yield from (f"{called}_{function}.{one.arg}" for one in item.args.args)


UNSLOTH = (
    ("unsloth/models/loader.py", "FastLanguageModel", "from_pretrained", "FastLanguageModel"),
    ("unsloth/models/loader.py", "FastModel", "from_pretrained", "FastModel"),
    ("unsloth/models/llama.py", "FastLlamaModel", "get_peft_model", "FastLanguageModel"),
    ("unsloth/models/vision.py", "FastBaseModel", "get_peft_model", "FastModel"),
)
"""Files, their classes, the functions that a script calls, and of which name."""


def recipe_keys(folder: Path) -> list[str]:
    """Return the keys of torchtune's training configs, those that its recipes read, and what its models are built with."""
    keys: set[str] = set()
    for path in (folder / "recipes" / "configs").rglob("*.yaml"):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        keys |= set(dotted(data)) if {"optimizer", "policy_model"} & data.keys() else set()
    for path in (folder / "recipes").glob("*.py"):
        if not re.match("generate|quantize|eleuther", path.name):
            keys |= set(re.findall(r"""\bcfg\.get\(\s*["'](\w+)""", path.read_text(encoding="utf-8")))
    for path in (folder / "torchtune" / "models").rglob("_model_builders.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not re.search(
                "tokenizer|transform|clip|t5|flux|autoencoder", node.name
            ):
                keys |= {f"model.{item.arg}" for item in (*node.args.args, *node.args.kwonlyargs)}
    return sorted(keys)


def dotted(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a document, those of sections with dots."""
    for name, value in data.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")


def main() -> None:
    """Write one file for each trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    SCHEMAS.mkdir(exist_ok=True)
    for trainer in PACKAGES:
        (SCHEMAS / f"{trainer}.txt").write_text("".join(f"{key}\n" for key in schema_keys(folder, trainer)))
    with (SCHEMAS / "unsloth.txt").open("a") as file:
        file.write("".join(f"{key}\n" for key in sorted(set(argument_keys(folder)))))
    (SCHEMAS / "torchtune.txt").write_text("".join(f"{key}\n" for key in recipe_keys(folder)))


if __name__ == "__main__":
    main()
