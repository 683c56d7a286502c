"""One job of a survey of stacks, drawn at random: its model, its training config and its card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from typing import Any

from memplan.catalog.catalog import Catalog
from tests.survey.drawn_jobs import Job
from tests.survey.drawn_models import LEARNED, STATE_SPACE, TOWERS, model_values
from tests.survey.stacks.drawn_own_models import OLDER_MODELS, OWN_CARD, OWN_MODELS, REENTRANT

STACKS = ("plain-loop", "transformers", "trl")
"""Stacks of which an environment with transformers draws by default."""
ALONE = ("llama-factory", "llama-factory-v1", "ms-swift", "sentence-transformers")
"""Stacks that take the same jobs in an environment of their own."""
LLAMA_LIKE = ("axolotl",)
"""Stacks whose own code takes models that are built like Llama."""
CARDS = ("7.5", "8.0", "8.6", "8.9", "9.0")
"""Compute capabilities of cards that attention is chosen for."""

ATTENTION_ONLY = {
    "gpt_oss": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "qwen2_moe": ("q_proj", "o_proj"),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), ("q_proj", "k_proj", "v_proj", "o_proj")),
    "qwen3_next": ("q_proj", "o_proj", "in_proj_qkvz", "out_proj"),
    "qwen3_5_moe": ("q_proj", "out_proj"),
    "qwen3_5_moe_text": ("q_proj", "v_proj", "in_proj_qkv", "in_proj_b", "out_proj"),
    "granitemoehybrid": ("q_proj", "v_proj", "in_proj", "out_proj"),
    "falcon_h1": ("q_proj", "k_proj", "in_proj", "down_proj"),
    "nemotron_h": ("q_proj", "k_proj", "in_proj", "up_proj"),
    "olmoe": ("q_proj", "v_proj", "o_proj"),
    "granitemoe": ("q_proj", "k_proj", "o_proj"),
    "deepseek_v2": ("kv_b_proj", "o_proj"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), ("kv_b_proj", "o_proj")),
    "glm4_moe": ("q_proj", "k_proj", "o_proj"),
    "lfm2_moe": ("q_proj", "out_proj"),
    "llama4_text": ("q_proj", "k_proj", "gate_proj", "down_proj"),
}
"""Families with experts -> what their adapters are put on: PEFT wraps experts in ways of its own, and refuses some of Falcon-H1."""

SPLIT_PROJECTIONS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", *TOWERS)
"""Families with projections of query, key and value of their own, and a gated feed-forward part."""

WINDOWED, WINDOWS = ("mistral", "phi3", "mixtral"), (100, 200, 1024)
"""Families whose layers attend within a window all alike, and how many tokens that has."""

LIGER = {"norm": "in-place", "rotary": "in-place", "activation": "in-place", "loss": "fused-linear"}
"""Liger's kernels, each drawn by itself."""

METHODS = ("full", "full", "full", "lora", "lora", "nf4", "nf4-dq", "llm-int8")
DTYPES = ("bf16", "bf16", "fp32", "fp16", "autocast")
LENGTHS, EAGER_LENGTHS = (64, 65, 200, 512, 1000, 2048), (64, 65, 200, 512)


@dataclass(frozen=True, slots=True)
class StackJob:
    """A job for a stack.

    Attributes:
        job: Model and training config.
        card: Compute capability of the card.
        reentrant: Whether checkpointing is the reentrant kind.
        rank: Which of the ranks that share it is looked at, where shards are uneven.
    """

    job: Job
    card: str
    reentrant: bool
    rank: int = 0

    @property
    def stack(self) -> str:
        """Name of the stack, without its version."""
        return str(self.job.training["stack"]).partition("@")[0]

    @property
    def family(self) -> str:
        """Family of the model."""
        return str(self.job.model["model_type"])

    @property
    def stage(self) -> str:
        """What it learns from."""
        return str(self.job.training.get("method", {}).get("stage", "sft"))

    @property
    def method(self) -> str:
        """How it trains: ``full``, ``lora``, or the format of a quantised base."""
        training = self.job.training
        if "adapter" not in training:
            return "full"
        return str(training["weights"].get("hidden_matrix", "lora"))

    @property
    def text(self) -> str:
        """All of it as JSON on one line, which ``--job`` takes."""
        data = {"model": self.job.model, "training": self.job.training, "card": self.card, "reentrant": self.reentrant}
        data |= {"rank": self.rank} if self.rank else {}
        return json.dumps(data, sort_keys=True)

    @classmethod
    def read(cls, text: str) -> StackJob:
        """Return the job that :attr:`text` gave."""
        data: dict[str, Any] = json.loads(text)
        return cls(Job(data["model"], data["training"]), data["card"], data["reentrant"], data.get("rank", 0))


def drawn_stack_job(
    seed: int,
    number: int,
    catalog: Catalog,
    stacks: tuple[str, ...] = STACKS,
    *,
    linear: bool = False,
    version: str = "",
) -> StackJob:
    """Return a job of a survey; each has a generator of its own, so that one can be drawn again alone.

    Args:
        linear: Whether the model has gated delta networks or state space layers, as none has otherwise; kernels run them where installed.
        version: An older one of a stack, whose models or configs may be others.
    """
    rng = Random(f"memplan stacks {seed} {number}")
    stack = rng.choice(stacks) if set(stacks) <= set(LLAMA_LIKE) else ""
    values = model_values(rng, catalog, linear=linear)
    while stack in LLAMA_LIKE and values["model_type"] not in SPLIT_PROJECTIONS:
        values = model_values(rng, catalog)
    while stacks == ("sentence-transformers",) and values["model_type"] in TOWERS:
        values = model_values(rng, catalog)
    stack = stack or rng.choice(stacks)
    if stack in OWN_MODELS:
        drawn = OLDER_MODELS.get(f"{stack}@{version}", OWN_MODELS[stack])
        return StackJob(Job(*drawn(rng)), OWN_CARD, reentrant=stack in REENTRANT)
    training = {"description": "drawn at random", "stack": stack, **_weights(rng)}
    if eager := rng.random() < 0.3:
        training["kernels"] = {"attention": "eager"}
    training["sequence_length"] = rng.choice(EAGER_LENGTHS if eager else LENGTHS)
    if (positions := LEARNED.get(values["model_type"])) is not None:
        training["sequence_length"] = min(training["sequence_length"], int(values.get(positions) or 1024))
    training["micro_batch_size"] = rng.choice((1, 1, 2, 3))
    training["activation_checkpointing"] = rng.choice(("none", "full", "full"))
    training["gradient_accumulation_steps"] = rng.choice((1, 1, 2))
    training["clip_gradients"] = rng.random() < 0.5
    if values["model_type"] in WINDOWED and rng.random() < 0.5:
        values["sliding_window"] = rng.choice(WINDOWS)
    if "adapter" in training and values["model_type"] in ATTENTION_ONLY:
        training["adapter"]["targets"] = list(ATTENTION_ONLY[str(values["model_type"])])
    if (
        values["model_type"] == "granitemoehybrid" and stack == "trl"
    ):  # whose loss of routers knows its experts by another name
        training["method"] = {"balances": False}
    cards = CARDS if training["compute_dtype"] != "bf16" else CARDS[1:]
    if training["compute_dtype"] == "fp16" and stack != "plain-loop":
        training["loss_scaling"] = True
    scans = values["model_type"] in STATE_SPACE
    if linear and find_spec("mamba_ssm" if scans else "fla") is not None and rng.random() < 0.5:
        training["kernels"] = {**training.get("kernels", {}), "linear_attention": "mamba" if scans else "fla"}
        if scans:
            _for_scans(values, training)
    if stack in LLAMA_LIKE:
        training["kernels"] = {**training.get("kernels", {}), **_liger(rng, values["model_type"])}
    job = StackJob(Job(values, training), rng.choice(cards), rng.random() < 0.4)
    if stack == "plain-loop" and rng.random() < 0.5:
        training["outputs_until"] = rng.choice(("forward", "backward", "step"))
    return job


def _for_scans(values: dict[str, Any], training: dict[str, Any]) -> None:
    """Make a job one that mamba-ssm's function takes: widths of 8, weights in the dtype of products, adapters on what it is given."""
    if values["model_type"] == "nemotron_h":
        values["mamba_num_heads"] = values["n_groups"] = 8
    elif "mamba_d_ssm" in values:
        values["mamba_n_heads"] = values["mamba_n_groups"] = 8
        values["mamba_d_ssm"] = 8 * values["mamba_d_head"]
    else:
        values["hidden_size"] = -(-values["hidden_size"] // 32) * 32
        values["mamba_n_heads"] = values["mamba_n_groups"] = 8
        values["mamba_d_head"] = values["hidden_size"] // 4
        values.setdefault("head_dim", 32)
    training["weights"] = {"default": training["compute_dtype"]}
    if "adapter" not in training and training["compute_dtype"] != "fp32":
        training["optimizer"] = {"default": "adamw-bf16"}
    training["activation_checkpointing"] = (
        "full" if training["stack"] == "plain-loop" else training["activation_checkpointing"]
    )
    if "adapter" in training:
        training["adapter"]["targets"] = [name for name in training["adapter"]["targets"] if name != "out_proj"]


def _liger(rng: Random, family: str) -> dict[str, str]:
    """Return some of Liger's kernels; a vision-language model runs none."""
    return {key: value for key, value in LIGER.items() if rng.random() < 0.3 and family not in TOWERS}


def _weights(rng: Random) -> dict[str, Any]:
    """Return weights, adapters, and the dtype of products."""
    method, dtype = rng.choice(METHODS), rng.choice(DTYPES)
    plain = "fp32" if dtype == "autocast" else dtype
    weights = {"default": plain}
    keys: dict[str, Any] = {"weights": weights, "compute_dtype": "bf16" if dtype == "autocast" else dtype}
    keys["optimizer"] = {"default": "adamw-fp32" if plain == "fp32" or method != "full" else "adamw-bf16"}
    if method == "full":
        return keys
    if method != "lora":
        weights["hidden_matrix"] = method
        weights["default"] = "bf16" if plain == "fp32" else plain
        keys["compute_dtype"] = weights["default"]
    keys["adapter"] = {"kind": rng.choice(("lora", "lora", "dora")), "rank": rng.choice((4, 16)), "dtype": "fp32"}
    return keys
