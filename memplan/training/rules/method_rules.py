"""Methods of training: what they fill into a config, what they cannot be, and what of them is not modelled."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import Embedding, Method, ReferenceModel, Rollout
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.entries import StorageFormat
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, Offload, TrainingConfig
from memplan.training.rules.distillation_rules import (
    DISTILLED,
    LOSSES,
    distillation_refusals,
    on_policy,
    outside_autocast,
    with_teacher,
)
from memplan.training.rules.embedding_rules import embedding_problems, embedding_refusals
from memplan.training.rules.image_rules import out_of_range
from memplan.training.rules.ppo_rules import (
    BESIDE_VALUES,
    HAS_TRAINER,
    POLICY_LOSS,
    as_policy_runs,
    ppo_refusals,
    with_phase,
)
from memplan.training.rules.stack_rules import FLOATS, beside_codes

Path = tuple[str, ...]
REFERRED = frozenset(("dpo", "kto"))
"""Stages whose loss compares log-probabilities with those of a reference model."""
UNREFERRED = frozenset(("orpo", "cpo", "simpo"))
"""Stages whose loss compares log-probabilities of whole logits with each other, and with no reference model's."""
GENERATING = frozenset(("grpo",))
"""Stages that learn from completions which the model generates, and may stay near a reference model."""

MOST_LABELS = 2**20
"""No head has more classes; a larger number is a slip."""
DEFAULT_LABELS = 2
"""Classes where nothing says how many: ``num_labels`` in transformers/configuration_utils.py (5.23.0)."""


def with_reference(config: TrainingConfig, stack: Stack) -> Method:
    """Return a config's method with its reference model filled in: the model itself where adapters can be switched off.

    Source:
        trl/trainer/dpo_trainer.py (1.16.0), lines 913 to 940; ``cpo_alpha`` in trl/experimental/cpo/cpo_config.py.
    """
    method = config.method
    if method.stage in UNREFERRED and method.chosen_nll is None and stack.loop.pairs != "softmax":
        method = replace(method, chosen_nll=True)
    if method.stage in GENERATING and method.rollout is None:
        method = replace(method, rollout=Rollout())
    if method.stage in DISTILLED:
        method = with_teacher(method)
    if method.stage in BESIDE_VALUES:
        method = with_phase(method)
    if method.stage == "classification" and method.labels is None:
        method = replace(method, labels=DEFAULT_LABELS)
    if method.stage == "embedding":
        texts = method.embedding or Embedding()
        method = replace(method, embedding=replace(texts, merges=_merges(texts)))
    if method.reference_model is not None:
        return method
    own: ReferenceModel = "resident" if config.adapter is None else "adapter-off"
    return replace(method, reference_model=own if method.stage in REFERRED | BESIDE_VALUES else "none")


def _merges(texts: Embedding) -> bool:
    """Tell whether columns behind the first pass through the model in one forward, which a cached loss never does.

    Source:
        ``embed_columns`` in sentence_transformers/base/losses/merged_forward.py (6.2.0).
    """
    said = texts.merges is None or texts.merges
    return said and texts.mini_batch_size is None and texts.columns > 2


def with_method(config: TrainingConfig, stack: Stack, profile: KernelProfile) -> KernelProfile:
    """Return the kernels of a config; a loss that compares log-probabilities may form these of whole logits."""
    if config.method.stage in BESIDE_VALUES:
        return replace(profile, loss=POLICY_LOSS)
    if config.method.stage in DISTILLED and config.method.trainer is not None:
        return replace(profile, loss=LOSSES[config.method.trainer])
    return replace(profile, loss="log-probabilities") if _compares_whole(config, stack) else profile


def _compares_whole(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether a config's loss compares log-probabilities that are formed of whole logits."""
    stage = config.method.stage
    return stage in UNREFERRED or (stage in REFERRED | GENERATING and stack.loop.metrics != "none")


def with_checkpointing(config: TrainingConfig, stack: Stack) -> Stack:
    """Return a stack with the kind of checkpointing that a config says, or that it has for replicas, where that is another.

    Source:
        ``_fix_gradient_checkpointing`` in swift/trainers/mixin.py (4.6.0).
    """
    rules, parallel = stack.checkpointing, config.parallel
    if forces_reentrant(config, stack):
        return replace(stack, checkpointing=replace(rules, reentrant=True))
    if config.reentrant_checkpointing is not None:
        return replace(stack, checkpointing=replace(rules, reentrant=config.reentrant_checkpointing))
    if rules.replicas_reentrant is None or parallel.gpus == 1 or parallel.zero_stage or parallel.engine != "torch":
        return stack
    return replace(stack, checkpointing=replace(rules, reentrant=rules.replicas_reentrant))


def forces_reentrant(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether a stack has adapters' layers run again by reentrant checkpointing, whatever it is told: TRL under stage 3."""
    parallel, forced = config.parallel, stack.checkpointing.partitioned_reentrant
    return forced and config.adapter is not None and (parallel.engine, parallel.zero_stage) == ("deepspeed", 3)


def with_outputs(config: TrainingConfig, stack: Stack) -> Stack:
    """Return a stack whose loop has a name for what the model returns for as long as a config says."""
    until = config.outputs_until
    if until is None:
        return stack
    loop = replace(stack.loop, holds=()) if until == "forward" else replace(stack.loop, holds=("logits",), until=until)
    return replace(stack, loop=loop)


def with_method_rules(config: TrainingConfig, stack: Stack, hidden: StorageFormat) -> Stack:
    """Return a stack as a config's method has it: without a key for the length of a prompt and its completion, its floats cast otherwise.

    Source:
        ``ORPOTrainer.__init__`` and ``peft_module_casting_to_bf16`` in trl/experimental (1.16.0), ``SFTTrainer.__init__`` in
        trl/trainer/sft_trainer.py (0.9.6): norms alone stay in fp32 beside weights of four bits under bf16.
    """
    own_precision = on_policy(config.method) or config.method.stage in BESIDE_VALUES
    if config.method.stage in GENERATING or own_precision:
        stack = replace(stack, keys={key: own for key, own in stack.keys.items() if key != "sequence_length"})
        if config.method.stage in BESIDE_VALUES:
            return as_policy_runs(stack)
        return outside_autocast(stack) if own_precision else stack
    own = stack.pair_kbit_floats if config.method.stage in UNREFERRED else None
    floats = own or stack.kbit_floats
    alike = floats == "fp32-norms" and (hidden.product == "integers" or config.compute_dtype != "bf16")
    return replace(stack, kbit_floats="fp32" if alike else floats) if own or alike else stack


def method_problems(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield what a config, filled in, says of its method that cannot be.

    Source:
        ``KTOTrainer.__init__`` in trl/trainer/kto_trainer.py (1.16.0), for micro-batches of one answer.
    """
    method = config.method
    path = ("method", "reference_model")
    if method.stage not in REFERRED | GENERATING | BESIDE_VALUES and method.reference_model != "none":
        yield path, f"{method.stage} has no reference model; leave it out"
    if method.rollout is not None:
        yield from _rollout_problems(config, method.rollout)
    if method.embedding is not None:
        yield from embedding_problems(config, method.embedding)
    if method.labels is not None and method.stage != "classification":
        yield ("method", "labels"), f"{method.stage} has no classes; leave it out"
    else:
        yield from out_of_range(method, ("method",), ("labels",), MOST_LABELS)
    if method.stage in REFERRED | BESIDE_VALUES and method.reference_model == "none":
        yield path, f"{method.stage} compares with a reference model: resident, adapter-off or precomputed"
    if method.chosen_nll is not None and method.stage not in UNREFERRED:
        yield ("method", "chosen_nll"), f"{method.stage} has no such second loss; leave it out"
    if method.chosen_nll is False and method.stage == "orpo":
        yield ("method", "chosen_nll"), "orpo adds odds to the likelihood of chosen answers; leave it out"
    if method.reference_model == "adapter-off" and config.adapter is None:
        yield path, "there are no adapters to switch off; use resident or precomputed"
    if method.stage == "kto" and config.micro_batch_size == 1 and not stack.loop.own_comparison:
        yield (
            ("micro_batch_size",),
            "kto compares answers of one micro-batch with each other, of which it takes at least 2",
        )


def _rollout_problems(config: TrainingConfig, rollout: Rollout) -> Iterator[tuple[Path, str]]:
    """Yield what a config says of generated completions that cannot be."""
    path, stage = ("method", "rollout"), config.method.stage
    if stage not in GENERATING | DISTILLED | BESIDE_VALUES:
        yield path, f"{stage} generates nothing; leave it out"
    if config.method.reference_model == "precomputed":
        yield ("method", "reference_model"), f"what {stage} compares is generated as it trains; use resident"
    if not 0 < rollout.completion_length < config.sequence_length:
        yield (*path, "completion_length"), f"expected 1 to sequence_length less one, {config.sequence_length - 1}"
    yield from out_of_range(rollout, path, ("micro_batches", "iterations"), 2**20)
    if not 0 < rollout.engine_fraction <= 1:
        yield (*path, "engine_fraction"), "expected a share of the GPU, more than 0 and at most 1"
    for key in ("micro_batches", "iterations") if stage in DISTILLED | BESIDE_VALUES else ():
        together = key == "micro_batches" and on_policy(config.method)
        if getattr(rollout, key) not in ((None,) if together else (None, 1)):
            rows = "all micro-batches together" if on_policy(config.method) else "each micro-batch by themselves"
            yield (*path, key), f"{stage} generates the rows of {rows}, for one step; leave it out"
    micro_batches = rollout.micro_batches or config.gradient_accumulation_steps
    if stage in GENERATING and config.micro_batch_size * micro_batches * config.parallel.data < 2:
        yield ("micro_batch_size",), f"{stage} compares completions of one prompt, of which it takes at least 2"


def _beside_values(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield what is not followed where a head of values beside the model's own is learnt from."""
    values = f"{stack.label}'s reward model, which has a head of values beside its own,"
    if config.parallel != Parallel():
        yield ("method", "stage"), f"{values} is not modelled on several GPUs; use one"
    if config.freeze != ALL_TRAIN:
        yield ("freeze",), f"{values} is not modelled with parts of the model frozen; use full or LoRA"
    if config.adapter is not None and config.adapter.modules_to_save:
        yield ("adapter", "modules_to_save"), f"{values} is not modelled with copies that train; leave it out"
    if config.kernels.loss not in (None, "fp32"):
        yield ("kernels", "loss"), f"{values} forms whole logits and a loss in fp32; leave it out"
    if config.evaluation:
        yield ("evaluation",), f"{values} is not modelled as it evaluates; use evaluation: false"


def _another_way(stage: str, stack: Stack, catalog: Catalog) -> str:
    """Return the stack that runs a stage which this one does not, or nothing."""
    if stage in BESIDE_VALUES:
        return f"; as TRL's PPOTrainer runs it, which versions up to 1.12 have: --stack {HAS_TRAINER}"
    if (stack.model_code == "transformers" or stack.name == DEFAULT_STACK) and stage in catalog.stack("trl").stages:
        who = "as its newest version runs it" if stack.name == "trl" else "as TRL's own trainer runs it"
        return f"; {who}: --stack trl"
    if stage in catalog.stack("sentence-transformers").stages:
        return "; as Sentence Transformers' own trainer runs it: --stack sentence-transformers"
    runs = stage in catalog.stack("transformers").stages
    return "; as transformers' Trainer runs it: --stack transformers" if runs else ""


def method_refusals(config: TrainingConfig, stack: Stack, catalog: Catalog, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield what of a config's method the formula does not follow.

    Source:
        Trainers of stacks that train transformers' models are made of TRL's: ``AxolotlDPOTrainer`` in
        axolotl/core/trainers/dpo/trainer.py (0.21.0).
    """
    stage, own = config.method.stage, stack.loop.own_comparison
    casts = stack.magnitudes == "cast" or (stack.magnitudes == "cast-but-sft" and stage != "sft")
    narrow = stage not in UNREFERRED | BESIDE_VALUES and not own and (casts or _compares_whole(config, stack))
    if narrow and config.adapter and config.adapter.kind == "dora" and beside_codes(config, hidden):
        text = f"{stack.label} casts DoRA's magnitudes on quantised weights to bf16, which is not modelled; use lora"
        yield ("adapter", "kind"), text
    if stage == "reward" and stack.loop.value_head:
        yield from _beside_values(config, stack)
    comparison, reference = (
        _comparison_refusals(config, stack, catalog),
        _reference_refusals(config, stack, hidden),
    )
    rest = (reference, _run_refusals(config, stack), embedding_refusals(config, stack))
    yield from islice(chain(comparison, *rest), 1)


def _comparison_refusals(config: TrainingConfig, stack: Stack, catalog: Catalog) -> Iterator[tuple[Path, str]]:
    """Yield a stage that a stack does not run, or losses that it does not take."""
    stage = config.method.stage
    if stage not in stack.stages:
        planned = f"planned of it are {', '.join(stack.stages)}{_another_way(stage, stack, catalog)}"
        yield ("method", "stage"), f"{stage} as {stack.label} runs it is not modelled; {planned}"
    elif stage in DISTILLED:
        yield from distillation_refusals(config, stack)
    elif stage in BESIDE_VALUES:
        yield from ppo_refusals(config)
    elif _compares_whole(config, stack) and config.kernels.loss not in (None, "log-probabilities"):
        keys = stack.values.get("kernels.loss", {}).get(config.kernels.loss, {})
        there = f", there {', '.join(keys)}" if keys else ""
        text = f"{config.kernels.loss} is not what preferences are compared by in what is modelled of {stack.label}; leave it out{there}"
        yield ("kernels", "loss"), text
    elif stack.loop.metrics == "softmax" and stage in UNREFERRED and config.method.chosen_nll:
        text = f"{stack.label} takes no second loss from logits: it adds log-probabilities that are there (pref_ftx); leave it out"
        yield ("method", "chosen_nll"), text


def _reference_refusals(config: TrainingConfig, stack: Stack, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield a reference model that a stack does not keep, or not as it is modelled."""
    full, reference = config.adapter is None, config.method.reference_model
    if stack.loop.own_comparison and config.method.stage in REFERRED and reference == "precomputed":
        yield (
            ("method", "reference_model"),
            f"{stack.label} computes what it compares with in each step; use {'resident' if full else 'adapter-off'}",
        )
    elif stack.loop.metrics == "softmax" and reference == "resident" and hidden not in ("fp32", config.compute_dtype):
        text = f"{stack.label} loads a reference model in {config.compute_dtype} beside weights in {hidden}, which is not modelled"
        yield ("method", "reference_model"), f"{text}; use weights: {config.compute_dtype}"
    elif reference == "resident" and hidden not in FLOATS and config.parallel.zero_stage == 3:
        text = "a reference model of its own whose weights are quantised is not modelled over shards; use adapter-off"
        yield ("method", "reference_model"), text
    elif _compares_whole(config, stack) and stack.loop.metrics == "accuracy" and reference == "precomputed" and full:
        text = f"{stack.label} keeps the reference model though its log-probabilities are known; use resident"
        yield ("method", "reference_model"), text  # trl/trainer/dpo_trainer.py, lines 689 to 702 (0.29.0)


def _run_refusals(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield generation, evaluation and sharing as a method's loop does not run them, or not as it is modelled."""
    stage, whole = config.method.stage, _compares_whole(config, stack)
    referred = whole and stage not in UNREFERRED
    if stage in DISTILLED and config.joined_rows:
        # ``DataCollatorForChatML`` in trl/experimental/utils.py; ``DistillationTrainer`` generates its rows (1.16.0)
        yield ("joined_rows",), f"{stage} as {stack.label} runs it joins no rows: it pads them; leave it out"
    elif whole and config.method.rollout is not None and config.method.rollout.engine == "transformers":
        text = f"generation by the model itself is not modelled for {stack.label}; use vllm or server, or --stack trl"
        yield ("method", "rollout", "engine"), text
    elif stage in GENERATING and config.evaluation:
        yield ("evaluation",), f"{stage} generates to evaluate, which is not modelled; use evaluation: false"
    elif (
        stage != "sft"
        and not _shares_model(config, stack)
        and replace(config.parallel, data=config.parallel.data if referred else 1) != Parallel()
    ):
        text = f"{stage} over several GPUs that share a model is not modelled; plan replicas, parallel.zero_stage: 0"
        text += (
            ", DeepSpeed (stage 3: dpo and reward), or FSDP without evaluation"
            if _compares_inside(config, stack)
            else ""
        )
        if replace(config.parallel, data=1) == Parallel():
            text = f"{stage} on several GPUs as {stack.label} runs it is not modelled; as TRL's newest version does: --stack trl"
        yield ("method", "stage"), text


def _compares_inside(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether a model that accelerate prepares forms what is compared itself, as under TRL's newest."""
    stage = config.method.stage
    return stage in REFERRED | {"reward"} and stack.sharded_units == "accelerate" and stack.loop.metrics == "none"


def _shares_model(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether a comparison by GPUs that share a model is followed.

    Source:
        ``prepare_fsdp`` and ``prepare_deepspeed`` in trl/models/utils.py (1.16.0): up to stage 2 the reference model is a whole copy,
        and an engine of its own at stage 3; a forward without adapters begins the trained one's engine anew there (``reset_step``),
        which is followed.
    """
    parallel, resident = config.parallel, config.method.reference_model == "resident"
    if not _compares_inside(config, stack):
        return False
    if parallel.engine == "deepspeed":
        alone = config.offload == Offload() and not config.evaluation and config.method.stage != "kto"
        return parallel.zero_stage < 3 or alone
    gathered_anew = parallel.reshard_after_forward and not config.evaluation
    if parallel.engine == "fsdp1" and not (gathered_anew and config.offload == Offload()):
        return False
    return parallel.zero_stage == 3 and (gathered_anew or not resident)
