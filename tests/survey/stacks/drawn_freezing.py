"""Jobs of which parts of the model train: some layers, some parts of these, some roles, or what patterns match."""

from dataclasses import replace
from random import Random
from typing import Any

from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import StackJob

LAYERS = (3, 4, 5, 6)
PATTERNS = (
    r"norm",
    r"embed",
    r"head",
    r"attn",
    r"mlp",
    r"bias$",
    r"\.[13]\.",
    r"o_proj|down_proj|dense",
    r"q_proj|k_proj",
)


def frozen_job(job: StackJob, seed: int, number: int) -> StackJob:
    """Return a job without adapters, of whose model some parameters train: which, and of how many layers, is drawn."""
    rng, model, training = Random(f"memplan frozen {seed} {number}"), dict(job.job.model), dict(job.job.training)
    training.pop("adapter", None)
    scaled = training.get("loss_scaling") or training["compute_dtype"] == "fp16"  # no scaler takes gradients in fp16
    default = "fp32" if scaled else training["weights"]["default"]
    optimizer = "adamw-fp32" if default == "fp32" else "adamw-bf16"
    training |= {"weights": {"default": default}, "optimizer": {"default": optimizer}}
    depth = [key for key in ("num_hidden_layers", "n_layer") if key in model and "layer_types" not in model]
    model |= dict.fromkeys(depth, rng.choice(LAYERS))
    training["freeze"] = _by_layers(rng) if job.stack == "llama-factory" else _freeze(rng)
    return replace(job, job=Job(model, training))


def _by_layers(rng: Random) -> dict[str, Any]:
    """Return which parameters train, as LLaMA-Factory's keys say it."""
    keys: dict[str, Any] = {rng.choice(("first_layers", "last_layers", "last_layers")): rng.choice((1, 2, 2))}
    if rng.random() < 0.4:
        keys["parts"] = rng.choice((["mlp"], ["self_attn"], ["mlp", "self_attn"]))
    if rng.random() < 0.4:
        keys["train"] = rng.choice((["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"], ["norm"]))
    return keys


def _freeze(rng: Random) -> dict[str, Any]:
    """Return which parameters train."""
    way = rng.choice(("layers", "layers", "parts", "roles", "train", "parameters", "parameters"))
    if way in ("layers", "parts"):
        keys: dict[str, Any] = {rng.choice(("first_layers", "last_layers", "last_layers")): rng.choice((1, 2))}
        if way == "parts":
            keys["parts"] = rng.choice((["mlp"], ["self_attn", "attn", "attention"], ["input_layernorm", "ln_1"]))
        return keys | ({"train": [rng.choice(PATTERNS)]} if rng.random() < 0.4 else {})
    if way == "roles":
        roles = ("embedding", "hidden_matrix", "norm", "head")
        return {"roles": sorted(rng.sample(roles, rng.choice((1, 2))))}
    return {way: sorted(rng.sample(PATTERNS, rng.choice((1, 2))))}
