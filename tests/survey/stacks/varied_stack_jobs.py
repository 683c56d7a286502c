"""Jobs of a survey of stacks made into others: of preferences, of images, of mixtures, of DeepSpeed, with other kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.training.rules.distillation_rules import DISTILLED
from memplan.training.rules.method_rules import GENERATING, REFERRED
from memplan.training.rules.ppo_rules import BESIDE_VALUES
from tests.survey.drawn_jobs import Job
from tests.survey.drawn_models import IMAGE_FAMILIES, encoder_model, image_model
from tests.survey.stacks.drawn_policies import policy_job
from tests.survey.stacks.drawn_stack_jobs import CARDS, LLAMA_LIKE, StackJob

PARTITIONED = 3
"""The stage of ZeRO that partitions parameters."""

DEEPSPEED_STAGES = (1, 2, 2)
"""Stages of ZeRO that DeepSpeed's jobs have."""

GENERATED_SHARE = 0.5
"""Share of the jobs that generate whose model does so itself."""


def with_stage(job: StackJob, seed: int, number: int, stages: tuple[str, ...]) -> StackJob:
    """Return a job that learns from preferences by one of these stages, its reference model drawn with it."""
    rng, training = Random(f"memplan stages {seed} {number}"), dict(job.job.training)
    stage = rng.choice(stages)
    own = "adapter-off" if "adapter" in training else "resident"
    training["method"] = {"stage": stage}
    if stage in BESIDE_VALUES:
        return policy_job(rng, job, training)
    if stage in REFERRED:
        training["method"]["reference_model"] = rng.choice((own, own, "precomputed"))
    if stage in GENERATING:
        training["method"] |= _rollout(rng, training, own)
    if stage in DISTILLED:
        if rng.random() < GENERATED_SHARE / 2:
            training["method"]["rollout"] = {"completion_length": rng.choice((2, 6, 20))}
        training["method"] |= _teacher(rng, job.job.model, str(training["compute_dtype"]))
    if stage in DISTILLED and Random(f"memplan trainers {seed} {number}").random() < CORE_SHARE:
        _by_core_trainer(rng, training)
    if stage in ("cpo", "simpo") and rng.random() < 0.4:
        training["method"]["chosen_nll"] = False
    if stage == "embedding":
        return _embedding_job(rng, job, training)
    if stage == "classification":
        training["method"]["labels"] = rng.choice((1, 2, 3, 77, 1000))
    if stage == "kto":
        training["micro_batch_size"] = max(2, int(training["micro_batch_size"]))
    return replace(job, job=Job(job.job.model, training))


CORE_SHARE = 0.5
"""Share of distillations that ``DistillationTrainer`` runs."""


def _by_core_trainer(rng: Random, training: dict[str, Any]) -> None:
    """Make a distillation one of ``DistillationTrainer``: of generated rows, out of autocast, in no fp16 that a scaler is beside."""
    weights, method, length = dict(training["weights"]), training["method"], int(training["sequence_length"])
    if weights["default"] == "fp16" or training["compute_dtype"] == "fp16":
        weights["default"] = "bf16"
        training["optimizer"] = {"default": "adamw-fp32" if "adapter" in training else "adamw-bf16"}
    training |= {"weights": weights, "compute_dtype": weights["default"]}
    training.pop("loss_scaling", None)
    method["trainer"] = "distillation"
    engine = "transformers" if rng.random() < GENERATED_SHARE / 2 else rng.choice(("vllm", "server"))
    answer = min(length - 1, rng.choice((1, 6, 20, length // 2, length - 1)))
    method["rollout"] = {"completion_length": answer, "engine": engine}
    method["teacher"] = {**method["teacher"], "dtype": rng.choice(("bf16", "fp32"))}


TEACHERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "olmo2", "qwen3_moe", "granite")
"""Families of teachers."""


def _teacher(rng: Random, student: Mapping[str, Any], compute: str) -> dict[str, Any]:
    """Return a teacher of a student's vocabulary, of a family and of sizes that are drawn."""
    family, heads, width = rng.choice(TEACHERS), rng.choice((2, 4, 6)), rng.choice((16, 32, 64))
    model: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * width,
        "num_hidden_layers": rng.choice((1, 2, 3, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, 2, heads)),
        "intermediate_size": rng.choice((40, 96, 256, 512)),
        "vocab_size": student.get("text_config", student)["vocab_size"],
        "max_position_embeddings": 4096,
        "tie_word_embeddings": rng.random() < 0.3,
    }
    if family in ("gemma", "gemma2", "qwen3", "qwen3_moe"):
        model["head_dim"] = width
    if family == "qwen3_moe":
        model |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model |= {"decoder_sparse_step": 1}
    dtype = rng.choice((compute, compute, "fp32"))
    teacher: dict[str, Any] = {"model": model, "dtype": dtype}
    if rng.random() < 0.3:
        teacher["weights"] = rng.choice(("nf4", "nf4-dq"))
    return {"teacher": teacher, "divergence": rng.choice(("jsd", "jsd", "forward-kl", "reverse-kl"))}


def _embedding_job(rng: Random, job: StackJob, training: dict[str, Any]) -> StackJob:
    """Return a job that learns embeddings: its columns, its pooling and its loss are drawn."""
    columns = rng.choice((2, 2, 3, 4))
    texts: dict[str, Any] = {"columns": columns, "pooling": rng.choice(("mean", "last", "cls"))}
    if columns < 4 and rng.random() < 0.3:
        texts["loss"] = "pairs"
    elif rng.random() < 0.3:
        texts["mini_batch_size"] = rng.choice((1, 2, 4))
        training["micro_batch_size"] = rng.choice((2, 4, 7))
    training["method"]["embedding"] = texts
    return replace(job, job=Job(job.job.model, training), reentrant=False)


def _rollout(rng: Random, training: dict[str, Any], own: str) -> dict[str, Any]:
    """Return what is generated and compared with, and make a micro-batch of at least two rows where all else is one."""
    length = int(training["sequence_length"])
    rollout = {"completion_length": rng.choice((1, length // 2, length - 8)), "engine": rng.choice(("vllm", "server"))}
    if rng.random() < GENERATED_SHARE:
        rollout = {"completion_length": rng.choice((2, 6, 20)), "engine": "transformers"}  # each token takes a forward
    if rng.random() < 0.3:
        rollout |= {"micro_batches": 2, "iterations": rng.choice((1, 2))}
    if training["micro_batch_size"] * rollout.get("micro_batches", training["gradient_accumulation_steps"]) < 2:
        training["micro_batch_size"] = 2
    return {"rollout": rollout, "reference_model": rng.choice((own, "none"))}


def hosted_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job whose layers are checkpointed with what they are given in host memory, and how many there are drawn."""
    rng, model = Random(f"memplan hosted {seed} {number}"), dict(job.job.model)
    name = next((key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in model), "num_hidden_layers")
    if "layer_types" not in model:
        model[name] = rng.choice((1, 2, 3, 6, 8))
    offload = {"activation_checkpointing": "full", "offload": {"activations": "cpu"}}
    return replace(job, job=Job(model, {**job.job.training, **offload}), reentrant=job.stack == "llama-factory")


OPTIMIZERS = (
    "adafactor-transformers",
    "adamw-8bit-bnb",
    "adamw-8bit-paged-bnb",
    "adamw-paged-bnb",
    "lion-bnb",
    "lion-paged-bnb",
    "rmsprop",
    "sgd",
)
"""Optimizers of Trainer's that are not AdamW of torch, each as likely as the next."""


def optimized_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job that steps by another optimizer, which is drawn, a few tokens at a time, so that updates decide its peak."""
    rng = Random(f"memplan optimizers {seed} {number}")
    training = {**job.job.training, "optimizer": {"default": rng.choice(OPTIMIZERS)}}
    training["sequence_length"] = min(training["sequence_length"], rng.choice((8, 8, 65, 512)))
    training["kernels"] = {**training.get("kernels", {}), "optimizer": "foreach"}
    return replace(job, job=Job(job.job.model, training))


MODULES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe")
"""Families whose experts were modules of their own before transformers 5.0."""

EXPERT_TARGETS = {
    "mixtral": (["all-linear"], ["q_proj", "v_proj"], ["q_proj", "w1", "w2", "w3"], ["w1", "gate"]),
    "": (["all-linear"], ["q_proj", "v_proj"], ["o_proj", "gate_proj", "up_proj", "down_proj"], ["down_proj", "gate"]),
}
"""What adapters go on, the family's own names first."""


def modular_job(job: StackJob, seed: int, number: int, families: Sequence[str] = MODULES) -> StackJob:
    """Return a job of two layers of such a family, its experts and the targets of its adapters drawn."""
    rng, training = Random(f"memplan modules {seed} {number}"), dict(job.job.training)
    family, heads, width = rng.choice(families), rng.choice((2, 4, 6)), rng.choice((16, 32, 64))
    experts, hidden = rng.choice((4, 6, 8, 16)), heads * width
    model: dict[str, object] = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, 2, heads)),
        "intermediate_size": rng.choice((40, 96, 257, 512)),
        "vocab_size": rng.choice((320, 1000, 4096)),
        "max_position_embeddings": 4096,
        "num_local_experts" if family == "mixtral" else "num_experts": experts,
        "num_experts_per_tok": rng.choice((1, 2, 3, 4)),
        "tie_word_embeddings": rng.random() < 0.3,
    }
    if family != "mixtral":
        model["norm_topk_prob"] = rng.random() < 0.5
    if family in ("qwen2_moe", "qwen3_moe"):
        model |= {"moe_intermediate_size": rng.choice((32, 64, 100)), "decoder_sparse_step": rng.choice((1, 1, 2))}
    if family == "qwen2_moe":
        model["shared_expert_intermediate_size"] = rng.choice((48, 200))
    if family in ("mixtral", "qwen3_moe") and rng.random() < 0.3:
        model["head_dim"] = width * 2
    if "adapter" in training:
        targets = rng.choice(EXPERT_TARGETS.get(family, EXPERT_TARGETS[""]))
        training["adapter"] = {**training["adapter"], "targets": targets}
    return replace(job, job=Job(model, training))


def compiled_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job in bf16 whose layers torch compiles, of widths and lengths that it does not pad."""
    rng, model, training = Random(f"memplan compiled {seed} {number}"), dict(job.job.model), dict(job.job.training)
    model["intermediate_size"] = rng.choice((256, 688, 1024, 2048, 3584))
    if training["compute_dtype"] != "bf16":
        training |= {"compute_dtype": "bf16", "weights": {"default": "bf16"}, "optimizer": {"default": "adamw-bf16"}}
    training |= {"compile": "layers", "sequence_length": rng.choice((64, 256, 1024, 2048, 4096))}
    training["activation_checkpointing"] = rng.choice(("none", "full", "selective"))
    training.pop("checkpointed_layers", None)
    card, attention = rng.choice((("8.0", "flash"), ("9.0", "cudnn")))
    training["kernels"] = {**training.get("kernels", {}), "attention": rng.choice(("flex", attention))}
    return replace(job, job=Job(model, training), card=card)


SIDES = (28, 56, 140, 224, 252, 448, 644, 1008)
"""Pixels of an image, each way."""
FROZEN_PARTS: tuple[dict[str, str], ...] = (
    {}, {}, {"tower": "frozen"}, {"tower": "frozen", "projector": "frozen"}
)  # fmt: skip
"""Parts of a tower that are frozen where all of it trains by default, each as likely as the next."""
TRAINED_PARTS: tuple[dict[str, str], ...] = (
    {}, {"tower": "trained"}, {"projector": "trained"}, {"tower": "trained", "projector": "trained"}
)  # fmt: skip
"""The same of those that train where it is frozen by default."""
ADAPTED_PARTS: dict[str, tuple[bool | str, ...]] = {
    "llama-factory": (False, False, "tower"),
    "ms-swift": (False, False, True, "tower", "projector"),
}
"""Stack that freezes towers by default -> the parts that adapters may go on."""


def with_images(
    job: StackJob, seed: int, number: int, catalog: Catalog, families: Sequence[str] = IMAGE_FAMILIES
) -> StackJob:
    """Return a job whose rows hold images, drawn with the model that they are for, and whether its tower is trained."""
    rng, training = Random(f"memplan images {seed} {number}"), dict(job.job.training)
    values = image_model(rng, catalog, families)
    training.pop("kernels", None)
    count, height, width = rng.choice((1, 1, 2, 3)), rng.choice(SIDES), rng.choice(SIDES)
    tokens = count * (height // 28) * (width // 28)
    if "mm_tokens_per_image" in values:
        height = width = values["vision_config"]["image_size"]
        tokens = count * values["mm_tokens_per_image"]
    training["sequence_length"] = max(training["sequence_length"], tokens + rng.choice((7, 100)))
    images: dict[str, Any] = {"per_row": count, "height": height, "width": width}
    if "adapter" not in training:
        images |= rng.choice(TRAINED_PARTS if job.stack in ADAPTED_PARTS else FROZEN_PARTS)
    elif job.stack in ADAPTED_PARTS:
        chosen = rng.choice(ADAPTED_PARTS[job.stack])
        training["adapter"] = {**training["adapter"], "targets": ["all-linear"], "vision": chosen}
    elif rng.random() < 0.4:
        training["adapter"] = {**training["adapter"], "targets": ["all-linear"], "vision": False}
    else:
        training["adapter"] = {**training["adapter"], "targets": ["all-linear"]}
    if training["compute_dtype"] != "fp32" and job.card != "7.5" and rng.random() < 0.3:
        training["kernels"] = {"attention": "flash"}
    if job.stack in LLAMA_LIKE and "adapter" in training and values["model_type"] == "qwen2_5_vl":
        adapters = rng.choice(("composite", "fused-mlp"))  # axolotl has no functions for its attention
        training["kernels"] = {**training.get("kernels", {}), "adapters": adapters}
    return replace(job, job=Job(values, {**training, "images": images}))


def without_autocast(job: StackJob) -> StackJob:
    """Return a job over 16-bit weights whose trainer has no mixed precision on."""
    training = dict(job.job.training)
    dtype = "bf16" if training["compute_dtype"] == "fp32" else training["compute_dtype"]
    training |= {"weights": {**training["weights"], "default": dtype}, "compute_dtype": dtype, "autocast": False}
    training.pop("loss_scaling", None)
    if "adapter" not in training:
        training["optimizer"] = {"default": "adamw-bf16"}
    if job.card == CARDS[0] and dtype == "bf16":
        job = replace(job, card=CARDS[1])
    return replace(job, job=Job(job.job.model, training))


def evaluated_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job that evaluates, one of three by twice as many rows as it trains on."""
    training = {**job.job.training, "evaluation": True}
    if (
        Random(f"memplan evaluated {seed} {number}").random() < 1 / 3 and job.stack != "litgpt"
    ):  # which has no key for it
        training["evaluation_batch_size"] = 2 * training["micro_batch_size"]
    return replace(job, job=Job(job.job.model, training))


def padded_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job whose rows differ in length, where its stack tells attention of it."""
    return replace(job, job=replace(job.job, training={**job.job.training, "padded_rows": True}))


PROJECTIONS = {
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "mpnet": ("q", "k", "v", "o"),
    "modernbert": ("Wqkv", "Wo", "Wi"),
}
"""Family of encoders -> projections of its attention, where these are not called as BERT's are."""


def encoder_job(job: StackJob, seed: int, number: int, catalog: Catalog) -> StackJob:
    """Return a job of an encoder, which is drawn, with fewer tokens than it has positions."""
    rng, training = Random(f"memplan encoders {seed} {number}"), dict(job.job.training)
    values = encoder_model(rng, catalog)
    positions = int(values["max_position_embeddings"]) - 2
    training["sequence_length"] = min(int(training["sequence_length"]), positions)
    if "adapter" in training:
        names = PROJECTIONS.get(str(values["model_type"]), ("query", "key", "value", "attention.output.dense"))
        own = rng.choice(((names[0], names[-2]), ("all-linear",), names))
        training["adapter"] = {**training["adapter"], "targets": list(own)}
    if values["model_type"] == "mpnet":
        training["activation_checkpointing"] = "none"
        training.pop("checkpointed_layers", None)
        training["kernels"] = {key: one for key, one in training.get("kernels", {}).items() if key != "attention"}
    if values["model_type"] == "modernbert":
        training.pop("dropout", None)
        if training.get("kernels", {}).get("attention") == "eager":
            training.pop("kernels")
    return replace(job, job=Job(values, training))


def with_kernels(job: StackJob, chosen: Mapping[str, str]) -> StackJob:
    """Return the same job with some other kernels."""
    kernels = {**job.job.training.get("kernels", {}), **chosen}
    return replace(job, job=Job(job.job.model, {**job.job.training, "kernels": kernels}))


def at_version(job: StackJob, version: str) -> StackJob:
    """Return the same job for an older version of its stack, where an engine generates, and torchtitan's attention is torch's choice."""
    training = {**job.job.training, "stack": f"{job.stack}@{version}"}
    if job.stack == "torchtitan":
        training["kernels"] = {key: value for key, value in training.get("kernels", {}).items() if key != "attention"}
    method = training.get("method", {})
    if (rollout := method.get("rollout")) and method["stage"] not in BESIDE_VALUES:
        training["method"] = {**method, "rollout": {**rollout, "engine": "vllm"}}
    return replace(job, job=Job(job.job.model, training))


def under_deepspeed(job: StackJob, seed: int, number: int, stages: tuple[int, ...] = DEEPSPEED_STAGES) -> StackJob:
    """Return a job as DeepSpeed runs it on several ranks, its stage, ranks and buckets drawn with it."""
    rng, training = Random(f"memplan deepspeed {seed} {number}"), dict(job.job.training)
    narrow = Random(f"memplan deepspeed dtype {seed} {number}").choice(("bf16", "bf16", "fp16"))
    dtype = "fp32" if training["compute_dtype"] == "fp32" else narrow
    coded = {role: name for role, name in training["weights"].items() if role == "hidden_matrix"}
    training |= {"compute_dtype": dtype, "weights": {"default": dtype, **coded}, "optimizer": {"default": "adamw-fp32"}}
    training.pop("loss_scaling", None)
    if "adapter" in training:
        training["adapter"] = {**training["adapter"], "dtype": dtype}
    elif dtype != "fp32":
        training["master_weights"] = "fp32"
    buckets = {
        "reduce_bucket_size": rng.choice(("auto", "auto", 100_000, 1_000_000, 20_000_000)),
        "overlap_comm": rng.choice((None, True, False)),
        "round_robin_gradients": rng.random() < 0.2,
        "reduce_scatter": rng.random() < 0.9,
    }
    ranks, stage = rng.choice((1, 2, 4, 8, 8, 16, 32)), rng.choice(stages)
    if stage == PARTITIONED:
        ranks = max(2, ranks)
        buckets |= {
            "persistence_threshold": rng.choice(("auto", "auto", 0, 1_000, 100_000)),
            "prefetch_bucket_size": rng.choice(("auto", "auto", 0, 100_000, 50_000_000)),
            "max_live_parameters": rng.choice((1_000_000_000, 1_000_000_000, 300_000, 3_000_000, 100_000_000)),
            "max_reuse_distance": rng.choice((1_000_000_000, 1_000_000_000, 0, 300_000, 3_000_000, 100_000_000)),
            "sub_group_size": rng.choice((1_000_000_000, 1_000_000_000, 50_000, 1_000_000)),
        }
        buckets.pop("round_robin_gradients")
    training["parallel"] = {"data": ranks, "zero_stage": stage, "engine": "deepspeed", "deepspeed": buckets}
    return replace(job, job=Job(job.job.model, training))
