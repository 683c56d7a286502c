"""One job of a survey of stacks: what it is, and what formula and trace say of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from random import Random
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.errors import MemplanError
from memplan.lab.stack_survey.drawn_own_models import OLDER_MODELS, OWN_CARD, OWN_MODELS
from memplan.lab.survey.drawn_jobs import GPU, Job, Verdict, compared, reserved, resolved
from memplan.lab.survey.drawn_models import IMAGE_FAMILIES, TOWERS, image_model, model_values
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.step.engines.engine_step import EngineStep
from memplan.step.instants import regime_of, step_on_tape
from memplan.step.states.flat_partitions import flat_groups, rank_shares, trained_tensors
from memplan.step.states.optimizer_scratch import Temporaries
from memplan.step.states.parallel_shards import is_flat
from memplan.trace.recording.trace_result import Moment, Trace
from memplan.trace.stacks.registry import trace_stack
from memplan.trace.stacks.stack_inputs import STEPS, StackInputs, details_of
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.method_rules import GENERATING, REFERRED

STACKS = ("plain-loop", "transformers", "trl")
"""Stacks of which an environment with transformers draws by default."""
ALONE = ("llama-factory", "llama-factory-v1", "ms-swift")
"""Stacks that take the same jobs in an environment of their own."""
LLAMA_LIKE = ("axolotl",)
"""Stacks whose own code takes models that are built like Llama."""
CARDS = ("7.5", "8.0", "8.6", "8.9", "9.0")
"""Compute capabilities of cards that attention is chosen for."""

ATTENTION_ONLY = {
    "gpt_oss": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "qwen2_moe": ("q_proj", "o_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3_next": ("q_proj", "o_proj", "in_proj_qkvz", "out_proj"),
    "qwen3_5_moe": ("q_proj", "out_proj"),
    "qwen3_5_moe_text": ("q_proj", "v_proj", "in_proj_qkv", "in_proj_b", "out_proj"),
    "deepseek_v2": ("kv_b_proj", "o_proj"),
    "deepseek_v3": ("kv_b_proj", "o_proj"),
    "glm4_moe": ("q_proj", "k_proj", "o_proj"),
}
"""Families with experts -> what their adapters are put on: PEFT wraps experts in ways of its own."""

SPLIT_PROJECTIONS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", *TOWERS)
"""Families with projections of query, key and value of their own, and a gated feed-forward part."""

WINDOWED, WINDOWS = ("mistral", "phi3", "mixtral"), (100, 200, 1024)
"""Families whose layers attend within a window all alike, and how many tokens that has."""

LIGER = {"norm": "in-place", "rotary": "in-place", "activation": "in-place", "loss": "fused-linear"}
"""Liger's kernels, each drawn by itself."""

PARTITIONED = 3
"""The stage of ZeRO that partitions parameters."""

DEEPSPEED_STAGES = (1, 2, 2)
"""Stages of ZeRO that DeepSpeed's jobs have."""

GENERATED_SHARE = 0.5
"""Share of the jobs that generate whose model does so itself."""

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
    """

    job: Job
    card: str
    reentrant: bool

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
        return json.dumps(data, sort_keys=True)

    @classmethod
    def read(cls, text: str) -> StackJob:
        """Return the job that :attr:`text` gave."""
        data: dict[str, Any] = json.loads(text)
        return cls(Job(data["model"], data["training"]), data["card"], data["reentrant"])


def with_stage(job: StackJob, seed: int, number: int, stages: tuple[str, ...]) -> StackJob:
    """Return a job that learns from preferences by one of these stages, its reference model drawn with it."""
    rng, training = Random(f"memplan stages {seed} {number}"), dict(job.job.training)
    stage = rng.choice(stages)
    own = "adapter-off" if "adapter" in training else "resident"
    training["method"] = {"stage": stage}
    if stage in REFERRED:
        training["method"]["reference_model"] = rng.choice((own, own, "precomputed"))
    if stage in GENERATING:
        training["method"] |= _rollout(rng, training, own)
    if stage in ("cpo", "simpo") and rng.random() < 0.4:
        training["method"]["chosen_nll"] = False
    if stage == "classification":
        training["method"]["labels"] = rng.choice((1, 2, 3, 77, 1000))
    if stage == "kto":
        training["micro_batch_size"] = max(2, int(training["micro_batch_size"]))
    return replace(job, job=Job(job.job.model, training))


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


SIDES = (28, 56, 140, 224, 252, 448, 644, 1008)
"""Pixels of an image, each way."""


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
        images |= rng.choice(({}, {}, {"tower": "frozen"}, {"tower": "frozen", "projector": "frozen"}))
    elif rng.random() < 0.4:
        training["adapter"] = {**training["adapter"], "targets": ["all-linear"], "vision": False}
    else:
        training["adapter"] = {**training["adapter"], "targets": ["all-linear"]}
    if training["compute_dtype"] != "fp32" and job.card != "7.5" and rng.random() < 0.3:
        training["kernels"] = {"attention": "flash"}
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


def with_kernels(job: StackJob, chosen: Mapping[str, str]) -> StackJob:
    """Return the same job with some other kernels."""
    kernels = {**job.job.training.get("kernels", {}), **chosen}
    return replace(job, job=Job(job.job.model, {**job.job.training, "kernels": kernels}))


def at_version(job: StackJob, version: str) -> StackJob:
    """Return the same job for an older version of its stack, where an engine generates."""
    training = {**job.job.training, "stack": f"{job.stack}@{version}"}
    if rollout := training.get("method", {}).get("rollout"):
        training["method"] = {**training["method"], "rollout": {**rollout, "engine": "vllm"}}
    return replace(job, job=Job(job.job.model, training))


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
        linear: Whether the model has gated delta networks, as none has otherwise; kernels run them where installed.
        version: An older one of a stack, whose models or configs may be others.
    """
    rng = Random(f"memplan stacks {seed} {number}")
    stack = rng.choice(stacks) if set(stacks) <= set(LLAMA_LIKE) else ""
    values = model_values(rng, catalog, linear=linear)
    while stack in LLAMA_LIKE and values["model_type"] not in SPLIT_PROJECTIONS:
        values = model_values(rng, catalog)
    stack = stack or rng.choice(stacks)
    if stack in OWN_MODELS:
        drawn = OLDER_MODELS.get(f"{stack}@{version}", OWN_MODELS[stack])
        return StackJob(Job(*drawn(rng)), OWN_CARD, reentrant=False)
    training = {"description": "drawn at random", "stack": stack, **_weights(rng)}
    if eager := rng.random() < 0.3:
        training["kernels"] = {"attention": "eager"}
    training["sequence_length"] = rng.choice(EAGER_LENGTHS if eager else LENGTHS)
    if values["model_type"] == "gpt2":
        training["sequence_length"] = min(training["sequence_length"], int(values.get("n_positions") or 1024))
    training["micro_batch_size"] = rng.choice((1, 1, 2, 3))
    training["activation_checkpointing"] = rng.choice(("none", "full", "full"))
    training["gradient_accumulation_steps"] = rng.choice((1, 1, 2))
    training["clip_gradients"] = rng.random() < 0.5
    if values["model_type"] in WINDOWED and rng.random() < 0.5:
        values["sliding_window"] = rng.choice(WINDOWS)
    if "adapter" in training and values["model_type"] in ATTENTION_ONLY:
        training["adapter"]["targets"] = list(ATTENTION_ONLY[str(values["model_type"])])
    cards = CARDS if training["compute_dtype"] != "bf16" else CARDS[1:]
    if training["compute_dtype"] == "fp16" and stack != "plain-loop":
        training["loss_scaling"] = True
    if linear and find_spec("fla") is not None and rng.random() < 0.5:
        training["kernels"] = {**training.get("kernels", {}), "linear_attention": "fla"}
    if stack in LLAMA_LIKE:
        training["kernels"] = {**training.get("kernels", {}), **_liger(rng, values["model_type"])}
    return StackJob(Job(values, training), rng.choice(cards), rng.random() < 0.4)


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


def under_deepspeed(job: StackJob, seed: int, number: int, stages: tuple[int, ...] = DEEPSPEED_STAGES) -> StackJob:
    """Return a job as DeepSpeed runs it on several ranks, its stage, ranks and buckets drawn with it."""
    rng, training = Random(f"memplan deepspeed {seed} {number}"), dict(job.job.training)
    dtype = "fp32" if training["compute_dtype"] == "fp32" else "bf16"
    coded = {role: name for role, name in training["weights"].items() if role == "hidden_matrix"}
    training |= {"compute_dtype": dtype, "weights": {"default": dtype, **coded}, "optimizer": {"default": "adamw-fp32"}}
    training.pop("loss_scaling", None)
    if "adapter" in training:
        training["adapter"] = {**training["adapter"], "dtype": dtype}
    elif dtype == "bf16":
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


def stack_setup(job: StackJob, catalog: Catalog) -> tuple[Any, TrainingSetup]:
    """Return model and setup of a job.

    Raises:
        MemplanError: The job is refused.
    """
    model, setup = resolved(job.job, catalog)
    checkpointing = replace(setup.stack.checkpointing, reentrant=job.reentrant)
    return model, replace(setup, stack=replace(setup.stack, checkpointing=checkpointing))


def planned(job: StackJob, catalog: Catalog) -> MemoryPlan:
    """Return what the formula says of a job.

    Raises:
        MemplanError: The job is refused.
    """
    model, setup = stack_setup(job, catalog)
    card = replace(catalog.gpus[GPU], compute_capability=job.card)
    return CompiledPlan(model, setup).evaluate(Device(card, GPU))


def job_inputs(job: StackJob, catalog: Catalog) -> StackInputs:
    """Return what the program of a job's stack is given.

    Raises:
        MemplanError: The job is refused.
    """
    model, setup = stack_setup(job, catalog)
    return StackInputs(model, _keys(job.job.model), setup, job.card, details_of(setup))


def traced(job: StackJob, catalog: Catalog, *, workspaces: bool = False) -> Trace:
    """Return the trace of the stack's own code.

    Args:
        workspaces: Whether what CUDA's libraries hold is among the events.

    Raises:
        MemplanError: The job is refused.
    """
    inputs = job_inputs(job, catalog)
    model, setup = inputs.model, inputs.setup
    if not is_flat(setup.config.parallel):
        return trace_stack(job.stack, inputs, workspaces=workspaces)[0]
    fullest = (replace(inputs, details=replace(inputs.details, rank=rank)) for rank in fullest_ranks(model, setup))
    return fullest_of([trace_stack(job.stack, rank, workspaces=False)[0] for rank in fullest])


def with_fullest(job: StackJob, number: int, catalog: Catalog) -> StackJob:
    """Return a job over a pipeline whose rank is the fullest by the formula; every third keeps the rank that was drawn."""
    if number % 3 == 2:
        return job
    training = dict(job.job.training)
    alone = replace(
        job, job=replace(job.job, training={**training, "parallel": {**training["parallel"], "stage": None}})
    )
    try:
        rows = planned(alone, catalog).ranks
    except MemplanError:
        return job
    fullest = max(rows, key=lambda row: row.requested_bytes).rank
    return replace(
        job, job=replace(job.job, training={**training, "parallel": {**training["parallel"], "stage": fullest}})
    )


def fullest_ranks(model: Model, setup: TrainingSetup) -> list[int]:
    """Return the ranks of DeepSpeed that have the most gradients, and the most at each instant, by the formula for each alone."""
    plan = CompiledPlan(model, setup)
    groups = flat_groups(setup, trained_tensors(plan.states))
    shares = rank_shares(setup, groups)
    regime = regime_of(model, setup, setup.config.micro_batch_size, setup.config.sequence_length)
    inputs, taped = step_on_tape(plan.model, setup, plan.states, regime)
    values = plan.values(setup.config.micro_batch_size, setup.config.sequence_length)

    def sizes(rank: int) -> dict[str, int]:
        alone = [
            share if other == rank else replace(share, gradient_bytes=0, names=frozenset())
            for other, share in enumerate(shares)
        ]
        update = Temporaries(shares[rank].step_bytes - shares[rank].gradient_bytes, "")
        own = replace(inputs, gradient_bytes=shares[rank].gradient_bytes, optimizer=update)
        found: dict[str, int] = {}
        for instant in EngineStep(own, taped, groups, alone).instants():
            found[instant.name] = max(found.get(instant.name, 0), instant.form.total_bytes(values))
        return found

    by_rank = [sizes(rank) for rank in range(len(shares))]
    fullest = [max(range(len(shares)), key=lambda rank: by_rank[rank][name]) for name in by_rank[0]]
    return list(dict.fromkeys((max(range(len(shares)), key=lambda rank: shares[rank].gradient_bytes), *fullest)))


def fullest_of(traces: Sequence[Trace]) -> Trace:
    """Return the first of several ranks' traces, with the fullest of all at each instant."""
    instants: dict[str, Moment] = {}
    for trace in traces:
        for name, moment in trace.instants.items():
            if name not in instants or moment.bytes > instants[name].bytes:
                instants[name] = moment
    return replace(traces[0], instants=instants)


def _keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in values.items() if value is not None or name == "q_lora_rank"}


def stack_verdict(job: StackJob, catalog: Catalog) -> Verdict:
    """Return what formula and trace say of a job."""
    try:
        plan = planned(job, catalog)
    except MemplanError as error:
        return Verdict(job.job, "refused", f"formula: {error}")
    except Exception as error:
        return Verdict(job.job, "crashed", f"formula: {type(error).__name__}: {error}")
    try:
        trace = traced(job, catalog, workspaces=True)
    except MemplanError as error:
        return Verdict(job.job, "refused", f"trace: {error}")
    own, other = reserved(plan, trace, STEPS)
    return replace(compared(job.job, plan, trace), reserved_bytes=own, traced_reserved_bytes=other)
