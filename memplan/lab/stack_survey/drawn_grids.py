"""Jobs over grids of GPUs: those that share matrices, and groups that each divide everything anew."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from memplan.lab.stack_survey.drawn_stack_jobs import StackJob
from memplan.lab.survey.drawn_jobs import Job

MOST_GPUS = 1024


def divided_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job over a grid of GPUs, its degrees drawn, and heads and widths that these divide.

    Args:
        job: A job of torchtitan.
        seed: Of the survey.
        number: Of the job.
    """
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


def replicated_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job whose data parallel GPUs form several groups, their number and the GPUs of each drawn."""
    rng, training = Random(f"memplan groups {seed} {number}"), dict(job.job.training)
    parallel = {"data": 1, "tensor": 1, "zero_stage": 3, **training.get("parallel", {})}
    most = MOST_GPUS // parallel["tensor"]
    shards, groups = rng.choice([(n, m) for n in (2, 3, 4, 8, 64) for m in (2, 3, 4, 16) if n * m <= most])
    training["parallel"] = {**parallel, "data": shards * groups, "replicate": groups}
    return replace(job, job=Job(job.job.model, training))
