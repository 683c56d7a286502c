"""Jobs over grids of GPUs: those that share matrices, groups that each divide everything anew, and pipelines."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from memplan.step.pipelines.pipeline_schedules import ONE_STAGE
from memplan.trace.pretended_cuda.bitsandbytes_layers import FOUR_BIT
from memplan.training.parallelism import PROVEN
from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import ATTENTION_ONLY, CARDS, StackJob

MOST_GPUS, QUANTISED_SHARE = 1024, 0.75
MOST_SPREAD = 64
"""GPUs of the largest world whose experts are shared."""


def divided_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job over a grid of GPUs, its degrees drawn, and heads and widths that these divide."""
    rng = Random(f"memplan grid {seed} {number}")
    tensor = rng.choice((2, 2, 4, 8, 16))
    data = rng.choice([n for n in (1, 1, 2, 3, 4, 8, 64) if n * tensor <= MOST_GPUS])
    groups = rng.choice((1, 2, 3))
    model, training = dict(job.job.model), dict(job.job.training)
    model |= {
        "num_attention_heads": tensor * groups * rng.choice((1, 2, 4)),
        "num_key_value_heads": tensor * groups,
        "intermediate_size": tensor * rng.choice((16, 43, 64, 128)),
        "tie_word_embeddings": False,
    }
    if training["compute_dtype"] == "bf16" and rng.random() < 0.5:  # torchtitan's own default
        training |= {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
    training["parallel"] = {"data": data, "tensor": tensor, "sequence": rng.random() < 0.6, "zero_stage": 3}
    training["sequence_length"] = max(16, training["sequence_length"])
    return replace(job, job=Job(model, training))


def ranked_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job as one of the ranks that share it: the last, or any but the first, which is drawn."""
    rng, parallel = Random(f"memplan rank {seed} {number}"), job.job.training.get("parallel", {})
    tensor, ranks = parallel.get("tensor", 1), parallel.get("data", 1) * parallel.get("tensor", 1)
    if ranks == 1:
        return job
    rank = rng.choice((ranks - 1, rng.randrange(1, ranks)))
    uneven = (
        "vocab_size" in job.job.model and job.job.model["vocab_size"] % tensor
    )  # of those that share, the first is planned
    return replace(job, rank=rank - rank % tensor if uneven else rank)


def muon_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job whose matrices the bundled Muon has, its momentum's format drawn, and AdamW in fp32 or 8 bits the rest."""
    rng, training, model = Random(f"memplan muon {seed} {number}"), dict(job.job.training), dict(job.job.model)
    momentum = rng.choice(("fp32", "fp32", "bf16", "int8", "gauss4", "ternary"))
    training["optimizer"] = {"hidden_matrix": f"muon-{momentum}", "default": rng.choice(("adamw-fp32", "adamw-int8"))}
    training["kernels"] = {**training.get("kernels", {}), "muon_batch_bytes": rng.choice((0, 0, 1 << 20, 1 << 24))}
    if momentum not in ("fp32", "bf16"):  # rows of shards have to be whole blocks
        tensor = training.get("parallel", {}).get("tensor", 1)
        model |= {
            "hidden_size": 256 * tensor,
            "intermediate_size": 256 * tensor * rng.choice((1, 2, 3)),
            "head_dim": 256,
        }
    return replace(job, job=Job(model, training))


def layered_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job that checkpoints some layers only, which of how many is drawn; every third is over shards."""
    rng, model, training = Random(f"memplan layers {seed} {number}"), dict(job.job.model), dict(job.job.training)
    model["num_hidden_layers"] = rng.choice((3, 4, 5, 7))
    training["activation_checkpointing"] = "full"
    training["checkpointed_layers"] = rng.choice(({"every": 2}, {"every": 3}, {"first": 2}, {"every": 2, "first": 4}))
    if number % 3 == 0:
        model["tie_word_embeddings"] = False
        training["parallel"] = {"data": rng.choice((2, 3, 8, 64)), "zero_stage": 3}
    return replace(job, job=Job(model, training))


def sharded_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job that is every other time over shards, of weights in fp32 as a rule where products are in bf16."""
    rng, model, training = Random(f"memplan shards {seed} {number}"), dict(job.job.model), dict(job.job.training)
    if number % 2:
        return job
    model["tie_word_embeddings"] = False
    training["parallel"] = {"data": rng.choice((2, 3, 8, 64)), "zero_stage": 3}
    if training["compute_dtype"] == "bf16" and rng.random() < 0.7:
        training |= {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
    return replace(job, job=Job(model, training))


def mixed_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job of a mixture of experts in bf16, its experts drawn; two of three are over shards."""
    rng, model, training = Random(f"memplan experts {seed} {number}"), dict(job.job.model), dict(job.job.training)
    experts = rng.choice((4, 8, 12, 16, 64))
    model |= {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_experts": experts,
        "num_experts_per_tok": rng.choice((1, 2, 3, 4)),
        "moe_intermediate_size": rng.choice((32, 64, 96, 172, 256)),
        "norm_topk_prob": rng.random() < 0.8,
    }
    training |= {"compute_dtype": "bf16", "weights": {"default": "bf16"}, "optimizer": {"default": "adamw-bf16"}}
    if number % 3:
        ranks = rng.choice([n for n in (2, 3, 4, 8, 16, 64) if n <= experts])
        training["parallel"] = {"data": ranks, "zero_stage": 3}
        training |= {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
    return replace(job, job=Job(model, training))


def spread_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job of a mixture whose experts GPUs share, their degree drawn; every third also shares matrices, others are of several groups."""
    rng = Random(f"memplan expert parallelism {seed} {number}")
    tensor = rng.choice((2, 2, 4, 8)) if number % 3 == 1 else 1
    shards = rng.choice([n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if 4 <= n * tensor <= MOST_SPREAD])
    ranks = rng.choice([n for n in (2, 3, 4, 6, 8, 16) if shards * tensor % n == 0])
    groups = rng.choice((2, 4)) if number % 3 == 2 and 1 < shards <= MOST_SPREAD // 4 else 1
    model, training = dict(job.job.model), dict(job.job.training)
    width, experts, heads = 8 * (shards * tensor // ranks), ranks * rng.choice((1, 2, 3, 5, 8, 16)), rng.choice((1, 2))
    model |= {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "hidden_size": width * max(1, model["hidden_size"] // width),
        "num_hidden_layers": rng.choice((1, 2, 3, 4)),
        "num_experts": experts,
        "num_experts_per_tok": rng.choice([n for n in (1, 2, 3, 4, 8) if n <= experts]),
        "moe_intermediate_size": width * rng.choice((1, 3, 5, 8)),
        "norm_topk_prob": rng.random() < 0.8,
    }
    if tensor > 1:
        model |= {"num_attention_heads": tensor * heads * rng.choice((1, 2)), "num_key_value_heads": tensor * heads}
    weights = rng.choice(("fp32", "fp32", "bf16"))
    training |= {"compute_dtype": "bf16", "weights": {"default": weights}, "optimizer": {"default": f"adamw-{weights}"}}
    training |= {"zero_gradients": "free", "sequence_length": max(16, training["sequence_length"])}
    training["parallel"] = {
        "data": shards * groups,
        "replicate": groups,
        "expert": ranks,
        "tensor": tensor,
        "sequence": tensor > 1,
        "routing": "worst" if number % 4 == 1 else "even",
        "zero_stage": 3,
    }
    return replace(job, job=Job(model, training))


def along_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job whose sequences GPUs share, their degree drawn; every third shares matrices too, every third experts."""
    rng = Random(f"memplan context parallelism {seed} {number}")
    kinds: tuple[Callable[[StackJob, int, int], StackJob], ...] = (sharded_job, divided_job, spread_job)
    job = kinds[number % 3](job, seed, number)
    model, training = dict(job.job.model), dict(job.job.training)
    parallel = {"data": 1, "tensor": 1, "replicate": 1, "expert": 1, **training.get("parallel", {}), "zero_stage": 3}
    context = rng.choice((2, 2, 4, 8))
    parallel |= {"context": context, "sequence": parallel["tensor"] > 1}
    while parallel["data"] > parallel["replicate"] and parallel["data"] * context * parallel["tensor"] > MOST_SPREAD:
        parallel["data"] = max(parallel["replicate"], parallel["data"] // 2)
    parallel["data"] -= parallel["data"] % parallel["replicate"]
    model |= {"max_position_embeddings": 16384, "tie_word_embeddings": False}
    training |= {"parallel": parallel, "sequence_length": 128 * context * parallel["tensor"] * rng.choice((1, 1, 2, 3))}
    training["kernels"] = {**training.get("kernels", {}), "attention": "flex"}
    training["micro_batch_size"] = min(training["micro_batch_size"], 2)
    return replace(job, job=Job(model, training))


def replicated_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job whose data parallel GPUs form several groups, their number and the GPUs of each drawn."""
    rng, training = Random(f"memplan groups {seed} {number}"), dict(job.job.training)
    parallel = {"data": 1, "tensor": 1, "zero_stage": 3, **training.get("parallel", {})}
    most = MOST_GPUS // parallel["tensor"]
    shards, groups = rng.choice([(n, m) for n in (2, 3, 4, 8, 64) for m in (2, 3, 4, 16) if n * m <= most])
    training["parallel"] = {**parallel, "data": shards * groups, "replicate": groups}
    return replace(job, job=Job(job.job.model, training))


def piped_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job over a pipeline, its degrees, schedule and rank drawn; every other one shares matrices too."""
    rng = Random(f"memplan pipeline {seed} {number}")
    if rng.random() < 0.4:
        job = divided_job(job, seed, number)
    order, ranks = rng.choice(PROVEN), rng.choice((2, 2, 3, 4, 4, 6, 8))
    virtual = 1 if order in ONE_STAGE else rng.choice((2, 2, 3))
    together = rng.choice((ranks, ranks + 1, 2 * ranks, 2 * ranks + 1, 3 * ranks))
    while order == "interleaved" and together % max(1, together // ranks):
        together += 1
    model, training = dict(job.job.model), dict(job.job.training)
    shared = {"tensor": 1, "sequence": False, **training.get("parallel", {})}
    model |= {
        "num_hidden_layers": ranks * virtual + rng.choice((0, 1, ranks, ranks * virtual)),
        "tie_word_embeddings": False,
    }
    training["gradient_accumulation_steps"] = 1
    training["parallel"] = {
        "data": rng.choice([n for n in (1, 1, 2, 3, 8, 64) if n * ranks * shared["tensor"] <= MOST_GPUS]),
        "tensor": shared["tensor"],
        "sequence": shared["sequence"],
        "pipeline": ranks,
        "virtual": virtual,
        "schedule": order,
        "micro_batches": together,
        "stage": rng.randrange(ranks),
        "zero_stage": 3,
    }
    if training["compute_dtype"] == "bf16" and rng.random() < 0.5:  # torchtitan's own default
        training |= {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
    return replace(job, job=Job(model, training))


def flat_job(job: StackJob, seed: int, number: int, *, adapted: bool = False) -> StackJob:
    """Return a job that FullyShardedDataParallel (FSDP1) shards, its ranks drawn, and when it gathers; with adapters or without."""
    rng, training = Random(f"memplan flat {seed} {number}"), dict(job.job.training)
    coded, dtype = "adapter" in training, training["compute_dtype"]
    adapter = training.pop("adapter", {"rank": 8})
    training.pop("loss_scaling", None)
    dtype = "bf16" if dtype == "fp16" else dtype
    weights = rng.choice(("fp32", "fp32", dtype)) if not coded else "fp32"
    if adapted:
        stored = {role: name for role, name in training["weights"].items() if name in FOUR_BIT}
        weights = dtype if stored else rng.choice(("fp32", dtype, dtype))
        training["adapter"] = {**adapter, "kind": "lora", "dtype": "fp32"}
        if not coded and job.job.model["model_type"] in ATTENTION_ONLY:
            training["adapter"]["targets"] = list(ATTENTION_ONLY[str(job.job.model["model_type"])])
        training |= {"weights": {"default": weights, **stored}, "optimizer": {"default": "adamw-fp32"}}
    else:
        training |= {"weights": {"default": weights}, "optimizer": {"default": f"adamw-{weights}"}}
    training["compute_dtype"] = dtype
    if job.stack == "litgpt":
        return replace(job, job=Job(job.job.model, _by_lightning(training, rng)))
    flat = {"backward_prefetch": rng.choice(("none", "pre", "post")), "use_orig_params": rng.random() < 0.5}
    shards, groups = rng.choice((2, 3, 4, 7, 8, 16, 64, 256)), rng.choice((1, 1, 1, 2, 4))
    training["parallel"] = {
        "data": shards * groups,
        "replicate": groups,
        "zero_stage": 3,
        "engine": "fsdp1",
        "flat": flat,
    }
    return replace(job, job=Job(job.job.model, training))


def _by_lightning(training: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Return the keys of a training config as LitGPT finetunes on several GPUs, which are drawn."""
    flat = {"backward_prefetch": "pre", "use_orig_params": True}
    ranks = rng.choice((2, 3, 4, 7, 8, 16, 64))
    parallel = {"data": ranks, "zero_stage": 3, "engine": "fsdp1", "flat": flat}
    return {**training, "activation_checkpointing": "full", "parallel": parallel}


def adapted_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job with adapters over ``fully_shard``, on ranks drawn; three of four over quantised weights."""
    rng, training = Random(f"memplan adapters {seed} {number}"), dict(job.job.training)
    training.pop("loss_scaling", None)
    adapter = {**training.get("adapter", {"rank": rng.choice((4, 8, 16, 64))}), "kind": "lora", "dtype": "fp32"}
    weights = {"default": "bf16"}
    if rng.random() < QUANTISED_SHARE:
        weights["hidden_matrix"] = rng.choice(("nf4", "nf4-dq", "nf4-dq"))
    training |= {"compute_dtype": "bf16", "weights": weights, "optimizer": {"default": "adamw-fp32"}}
    training |= {"adapter": adapter, "parallel": _drawn_shards(rng)}
    return replace(job, job=Job(job.job.model, training), card=max(job.card, CARDS[1]))


def staged_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job with adapters over shards of codes that were staged on the CPU, by PEFT's layers or axolotl's functions, which is drawn."""
    rng, job = Random(f"memplan staged {seed} {number}"), adapted_job(job, seed, number)
    training = dict(job.job.training)
    kernels = {key: value for key, value in training.get("kernels", {}).items() if key != "adapters"}
    adapters = rng.choice(("composite", "composite", "fused", "fused", "fused-mlp", "fused-qkv-o"))
    training |= {
        "weights": {"default": "bf16", "hidden_matrix": rng.choice(("nf4", "nf4-dq", "nf4-dq"))},
        "parallel": {"data": rng.choice((2, 3, 4, 8, 16, 64)), "zero_stage": 3, "staged_codes": True},
        "kernels": {**kernels, "adapters": adapters},
        "activation_checkpointing": rng.choice(("none", "full")),
    }
    return replace(job, job=Job(job.job.model, training))


def staying_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job over ``fully_shard`` whose layers stay gathered until their backward, on ranks drawn."""
    rng, training = Random(f"memplan staying {seed} {number}"), dict(job.job.training)
    _put_in_shards(training, rng)
    training["parallel"] = {**training["parallel"], "reshard_after_forward": False}
    return replace(job, job=Job(job.job.model, training))


def towered_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job over shards, on ranks drawn where it has none, and whether blocks of its model's tower are units of torch's."""
    rng, training = Random(f"memplan towers {seed} {number}"), dict(job.job.training)
    _put_in_shards(training, rng)
    if training["parallel"].get("engine") == "deepspeed":
        left_out = "adapter" in training and (training["parallel"]["zero_stage"] < 3 or rng.random() < 0.5)
        training |= {"adapter": {**training["adapter"], "vision": False}} if left_out else {}
    else:
        training["parallel"] = {**training["parallel"], "tower_blocks": rng.choice((None, None, False, False, True))}
    return replace(job, job=Job(job.job.model, training))


def _drawn_shards(rng: Random) -> dict[str, int]:
    shards, groups = rng.choice((2, 3, 4, 8, 16, 64)), rng.choice((1, 1, 1, 2, 4))
    return {"data": shards * groups, "replicate": groups, "zero_stage": 3}


def _put_in_shards(training: dict[str, Any], rng: Random) -> None:
    """Let a job train in shards, on ranks drawn and in what shards are trained in, where it has none."""
    if "parallel" in training:
        return
    training["parallel"] = _drawn_shards(rng)
    training.pop("loss_scaling", None)
    if training["compute_dtype"] == "fp16":
        training["compute_dtype"] = "bf16"
    if "adapter" not in training and rng.random() < 0.5:  # what accelerate makes of weights in 16 bits
        training |= {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}


def offloaded_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job whose weights, gradients and states lie in host memory; over ``fully_shard`` on ranks drawn, where it has none."""
    rng, training = Random(f"memplan offload {seed} {number}"), dict(job.job.training)
    _put_in_shards(training, rng)
    if training["parallel"].get("engine") == "deepspeed":
        weights = rng.choice(("none", "cpu")) if training["parallel"]["zero_stage"] == 3 else "none"
        training["offload"] = {"weights": weights, "optimizer_states": "cpu"}
        return replace(job, job=Job(job.job.model, training))
    training["offload"] = {"weights": "cpu", "optimizer_states": "cpu"}
    return replace(job, job=Job(job.job.model, training))
