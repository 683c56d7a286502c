"""A training config: every key of DESIGN section 6, with its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from memplan.catalog.entries import Status
from memplan.catalog.kernel_profiles import Kernels
from memplan.values import dataclass

ComputeDtype = Literal["fp32", "bf16", "fp16"]
MasterWeights = Literal["none", "bf16", "fp32"]
Checkpointing = Literal["none", "selective", "full"]
GradientLifetime = Literal["step", "layer"]
Stage = Literal["sft", "classification", "dpo", "kto", "reward", "orpo", "cpo", "simpo", "grpo"]
"""What a step learns from: rows of tokens; rows that have a class each; pairs of answers, chosen and rejected; answers that are said
to be good or bad; or answers that the model has generated itself, which are scored."""
SCORED: frozenset[Stage] = frozenset(("reward", "classification"))
"""Stages whose model yields scores in place of logits."""
ReferenceModel = Literal["none", "resident", "adapter-off", "precomputed"]
Place = Literal["none", "cpu"]
"""Where something is moved: nowhere, or to host memory."""

MAXIMUM_TOKENS = 2**40
"""No step holds more tokens; a larger product of batch and sequence length is a slip."""

MAXIMUM_GPUS = 16_384
"""The largest published run (https://arxiv.org/abs/2407.21783, section 3.3.1: "up to 16K H100 GPUs"); what NCCL and the
sharding of more would take was never seen, so that more are refused."""

ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True, slots=True)
class Gradients:
    """How gradients are kept between backward and step.

    Attributes:
        dtype: Name of a gradient dtype; None is the dtype of the weight itself, as autograd has it.
        lifetime: ``step`` keeps all of them; ``layer`` updates inside backward and frees each one.
    """

    dtype: str | None = None
    lifetime: GradientLifetime = "step"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank adapters on frozen weights (https://arxiv.org/abs/2106.09685, DoRA 2402.09353).

    Attributes:
        kind: ``lora``, or ``dora`` with a learned magnitude per output row.
        rank: Width of the adapter.
        targets: Last parts of the names of the adapted projections, of the embedding or head, such as ``q_proj`` or
            ``self_attn.q_proj``; or ``all-linear``.
        dtype: Format of the adapter's weights; None is that of the stack.
        dropout: Probability with which the adapter's input is dropped; None is 0.
        modules_to_save: Embedding, head and norms, by how their names end, that are trained whole: as copies, beside
            which the originals stay.
        vision: Whether targets count in a vision tower and its projector too; None is as the stack does.
    """

    kind: Literal["lora", "dora"] = "lora"
    rank: int = 16
    targets: tuple[str, ...] = ALL_LINEAR
    dtype: Literal["bf16", "fp32", "fp16"] | None = None
    dropout: float | None = None
    modules_to_save: tuple[str, ...] = ()
    vision: bool | None = None


@dataclass(frozen=True, slots=True)
class Freeze:
    """Which parameters of a model train; where nothing is said, all do.

    What ``parameters`` match is frozen, or all where it is empty; of that, what ``train`` matches trains, and what is of
    the layers, parts and roles that are said, of all of these together.

    Attributes:
        parameters: Regular expressions, found anywhere in the names of parameters that are frozen.
        train: Regular expressions, found likewise in names of those that train.
        first_layers: How many layers train, counted from the first.
        last_layers: How many layers train, counted from the last.
        parts: Beginnings of what parameters that train are called within their layer, such as ``mlp``.
        roles: Roles of parameters that train.
        input_gradients: Whether a frozen embedding's output is made to need a gradient; None is as the stack does.
    """

    parameters: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    first_layers: int | None = None
    last_layers: int | None = None
    parts: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    input_gradients: bool | None = None

    @property
    def words(self) -> str:
        """What trains, in words; nothing where all does.

        Example:
            >>> Freeze(last_layers=2, parts=("mlp",)).words, Freeze(train=("lm_head",)).words, Freeze().words
            ('mlp of the last 2 layers', "what matches 'lm_head'", '')
        """
        ends = [f"the {end} {n} layers" for end, n in (("first", self.first_layers), ("last", self.last_layers)) if n]
        inner = [", ".join(words) for words in (self.parts, self.roles) if words]
        chosen = " of ".join([*inner[::-1], *([" and ".join(ends)] if ends else [])])
        parts = [chosen] if chosen else []
        parts += [f"what matches {', '.join(map(repr, self.train))}"] if self.train else []
        parts += [f"all but what matches {', '.join(map(repr, self.parameters))}"] if self.parameters else []
        return " and ".join(parts)


ALL_TRAIN = Freeze()


@dataclass(frozen=True, slots=True)
class Rollout:
    """The completions that a step learns from, and what generates them.

    Attributes:
        completion_length: Tokens of each row that are generated, the rest being its prompt.
        micro_batches: Micro-batches whose rows are generated together; None is as many as a step accumulates.
        iterations: Steps that learn from the same completions.
        engine: ``transformers`` generates with the model that is trained; ``vllm`` is an engine on the same GPU, with
            weights of its own; ``server`` one elsewhere.
        engine_fraction: Share of the GPU that an engine on it takes.
        sleeps: Whether that engine lets go of its memory while a step runs.
    """

    completion_length: int = 256
    micro_batches: int | None = None
    iterations: int = 1
    engine: Literal["transformers", "vllm", "server"] = "transformers"
    engine_fraction: float = 0.3
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """What a step learns from, and the model that it is compared with.

    Attributes:
        stage: ``sft``, which pretraining is too; or a preference method, whose micro-batch counts pairs where it has pairs.
        reference_model: ``resident`` is a frozen second copy; ``adapter-off`` the model without its adapters;
            ``precomputed`` none, its log-probabilities having been computed before; None is as the stack does.
        rollout: What a method learns from that generates, which others have not.
        chosen_nll: Whether the likelihood of chosen answers is a second loss; None is as the stage has it.
        labels: Classes that rows are told apart by, one score each; None is 2, as transformers has it.
    """

    stage: Stage = "sft"
    reference_model: ReferenceModel | None = None
    rollout: Rollout | None = None
    chosen_nll: bool | None = None
    labels: int | None = None


@dataclass(frozen=True, slots=True)
class Images:
    """Images in the rows that a vision-language model learns from: as many in each row, all of one size.

    Attributes:
        per_row: Images in each row; 0 for rows of text.
        height: Pixels of each as its processor hands it on, after it has resized it: whole patches that are merged.
        width: The same.
        pixels: In their place: the most pixels that its processor leaves an image, of which the largest grid is planned.
        tower: Whether the vision tower is trained or frozen; None is as the stack does, and frozen beside adapters.
        projector: The same of what merges patches and hands them to the text model.
    """

    per_row: int = 0
    height: int | None = None
    width: int | None = None
    pixels: int | None = None
    tower: Literal["trained", "frozen"] | None = None
    projector: Literal["trained", "frozen"] | None = None


Engine = Literal["torch", "fsdp1", "deepspeed"]
TransformerImplementation = Literal["transformer_engine", "local"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"]


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """Keys of ``zero_optimization`` in DeepSpeed's configuration, by their names and with their defaults (0.19.8).

    Attributes:
        reduce_bucket_size: Elements of gradients that are reduced together; ``auto`` is the hidden size squared, as
            transformers fills it in.
        overlap_comm: Whether they are reduced beside backward, which takes a second bucket; None is as the stage does.
        reduce_scatter: Whether a rank's gradients are reduced for it; else all are, for all, and none are copied.
        round_robin_gradients: Whether parameters are dealt out to ranks in turn.
        persistence_threshold: Elements up to which stage 3 keeps a parameter gathered; ``auto`` is ten hidden sizes.
        sub_group_size: Elements that stage 3 steps at once.
        prefetch_bucket_size: Elements that stage 3 gathers ahead at once; ``auto`` is 0.9 times the hidden size squared.
        max_live_parameters: Elements that it gathers ahead as long as fewer are gathered.
        max_reuse_distance: Elements of modules ahead among which one that needs a parameter again keeps it gathered.
        pinned_optimizer: Whether what ``offload.optimizer_states`` keeps in host memory is pinned (``offload_optimizer.pin_memory``).
        pinned_weights: Whether what ``offload.weights`` keeps there is (``offload_param.pin_memory``).
    """

    reduce_bucket_size: int | Literal["auto"] = 500_000_000
    overlap_comm: bool | None = None
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    persistence_threshold: int | Literal["auto"] = 100_000
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int | Literal["auto"] = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    pinned_optimizer: bool = True
    pinned_weights: bool = True


@dataclass(frozen=True, slots=True)
class FlatShards:
    """What FullyShardedDataParallel (FSDP1) is told, by torch's names, with the defaults of TrainingArguments.

    Attributes:
        backward_prefetch: When the next unit is gathered in backward: when it is needed, ``pre`` as a unit begins, or ``post``
            when it is done.
        use_orig_params: Whether the optimizer is given parameters as they were, and not flat tensors.
    """

    backward_prefetch: Literal["none", "pre", "post"] = "none"
    use_orig_params: bool = True


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of parallelism; what is modelled of them stands in memplan/training/parallelism.py.

    Attributes:
        data: GPUs that each train on a micro-batch of their own.
        zero_stage: 0 replicates everything (torch's DistributedDataParallel), 3 shards weights,
            gradients and optimizer states (torch's ``fully_shard``).
        replicate: Groups that these GPUs form, each of which divides everything anew (HSDP).
        virtual: Chunks of layers in each pipeline stage.
        schedule: In what order a pipeline runs micro-batches; None is 1f1b, or interleaved where there are chunks.
        micro_batches: Micro-batches that pass a pipeline together; None is as many as there are chunks of layers.
        stage: The pipeline's rank that is planned; None is the fullest.
        expert_tensor: GPUs that share each expert's matrices; as many as ``tensor`` where it is None.
        engine: Whose code shards: ``torch`` with ``fully_shard`` (FSDP2) or DistributedDataParallel, ``fsdp1`` with
            FullyShardedDataParallel, or ``deepspeed``.
        first_stage_layers: Layers of the first pipeline stage, where stages are uneven.
        last_stage_layers: Layers of the last one.
        first_stage_less_layers: Layers that the first stage has less than others, for its embedding (torchtitan).
        last_stage_less_layers: Layers that the last one has less, for its head.
        stage_layout: Every chunk's layers, as Megatron-LM's ``--pipeline-model-parallel-layout`` has them.
        embedding_as_layer: The embedding counts as a layer where layers are divided among stages.
        loss_as_layer: So does the loss.
        precision_aware: Megatron-LM's optimizer that keeps the half of an fp32 weight which its bf16 weight lacks.
        overlap_gradients: Megatron-LM reduces gradients in buckets, during backward.
        vocabulary_multiple: Megatron-LM pads the vocabulary to a multiple of this times ``tensor``.
        transformer_impl: Whose modules Megatron-LM builds a model of: Transformer Engine's or its own.
        recompute_modules: What Megatron-LM's selective recompute computes again; its default is the core attention.
        unused_parameters: Whether replicas look for parameters without a gradient (``ddp_find_unused_parameters``); None is
            as the stack decides.
        deepspeed: What DeepSpeed is told besides the stage, where it is the engine.
        flat: What FullyShardedDataParallel is told, where it is the engine.
        reshard_after_forward: Whether shards let go of a layer's gathered weights behind its forward; else they stay until
            its backward is done.
    """

    data: int = 1
    zero_stage: int = 0
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    replicate: int = 1
    virtual: int = 1
    schedule: Schedule | None = None
    micro_batches: int | None = None
    stage: int | None = None
    expert_tensor: int | None = None
    engine: Engine = "torch"
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    first_stage_less_layers: int = 1
    last_stage_less_layers: int = 1
    stage_layout: str | None = None
    embedding_as_layer: bool = False
    loss_as_layer: bool = False
    precision_aware: bool = False
    overlap_gradients: bool = False
    vocabulary_multiple: int = 128
    transformer_impl: TransformerImplementation = "transformer_engine"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    unused_parameters: bool | None = None
    deepspeed: DeepSpeed = DeepSpeed()
    flat: FlatShards = FlatShards()
    reshard_after_forward: bool = True

    @property
    def shards(self) -> int:
        """GPUs among which everything is divided, where it is: those of one group."""
        return self.data // self.replicate

    @property
    def gpus(self) -> int:
        """GPUs whose steps are planned together: data parallel ones, each of them as many as share a model."""
        return self.data * self.tensor * self.pipeline

    @property
    def order(self) -> Schedule:
        """In what order a pipeline runs micro-batches."""
        return self.schedule or ("1f1b" if self.virtual == 1 else "interleaved")

    @property
    def together(self) -> int:
        """Micro-batches that pass a pipeline together."""
        return self.micro_batches or self.pipeline * self.virtual


@dataclass(frozen=True, slots=True)
class Offload:
    """What is kept in host memory.

    Attributes:
        optimizer_states: ``cpu`` keeps them in host memory; the bundled optimizer then steps, or the ranks of FSDP and DeepSpeed do there.
        weights: ``cpu`` keeps the shards of FSDP's ranks there, with gradients and states, or the pieces of DeepSpeed's stage 3.
        activations: ``cpu`` keeps there what full checkpointing saves, where a stack does so.
    """

    optimizer_states: Place = "none"
    weights: Place = "none"
    activations: Place = "none"


@dataclass(frozen=True, slots=True)
class CheckpointedLayers:
    """Which layers full checkpointing computes again; all of them by default.

    Attributes:
        every: One layer of so many: every second, say, counted from the first layer.
        first: The first so many of these; None is all.
    """

    every: int = 1
    first: int | None = None

    def has(self, number: int) -> bool:
        """Tell whether a layer, numbered from 0, is one of them.

        Source:
            ``_apply_layer_sac`` in torchtitan/distributed/activation_checkpoint.py (0.2.2), ``every``;
            ``--recompute-method block`` in megatron/training/arguments.py (core_v0.15.0), ``first``.

        Example:
            >>> [number for number in range(6) if CheckpointedLayers(every=2).has(number)]
            [1, 3, 5]
        """
        return (number + 1) % self.every == 0 and (self.first is None or number < self.first)

    @property
    def words(self) -> str:
        """Which layers, in words that go behind ``full``; nothing where it is all of them.

        Example:
            >>> CheckpointedLayers(every=2).words, CheckpointedLayers(first=8).words, CheckpointedLayers().words
            (' (1 layer in 2)', ' (the first 8 layers)', '')
        """
        parts = [f"1 layer in {self.every}"] if self.every > 1 else []
        parts += [] if self.first is None else [f"the first {self.first} layers"]
        return f" ({', of '.join(parts)})" if parts else ""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """One training config as a file gives it; names are not yet looked up.

    Attributes:
        stack: Whose training loop it is run by: a file of ``configs/stacks/``, with ``@VERSION`` for an older one.
        status: How it learns; whatever a file says, a resolved setup has what the evidence says.
        evidence: The record in ``configs/evidence/`` behind it.
        weights: Format by role; ``default`` stands for roles that are not named.
        master_weights: A second copy that the optimizer updates.
        compute_dtype: Dtype of matrix products; narrower than the weights means autocast.
        autocast: Whether the model runs under autocast where products are in 16 bits; None is as the stack does.
        optimizer: Optimizer by role; ``default`` stands for roles that are not named, and is AdamW
            with states in the dtype of the weights where it is not given.
        activation_checkpointing: What a layer keeps for backward; None is as the stack does.
        checkpointed_layers: Of ``full`` checkpointing, which layers it is of.
        method: What a step learns from.
        images: Images in its rows, of a vision-language model.
        adapter: Adapters; the other weights are frozen then.
        freeze: Which of a model's own parameters train.
        dropout: Probability; None takes the model's own.
        clip_gradients: Clip by the norm of all gradients; None is as the stack does.
        zero_gradients: ``free`` drops gradients after a step, ``fill`` keeps and zeroes them.
        loss_scaling: Dynamic loss scale for fp16.
        weight_average: Format of an averaged copy of the weights on the device, or ``none``.
        evaluation: The job evaluates, without gradients, at the same length.
        evaluation_batch_size: Rows that it evaluates together; None is as many as a micro-batch has.
        save_checkpoint: The job saves checkpoints.
        reserve: Memory kept free, such as ``500 MiB`` for a desktop.
        allocator: ``expandable`` is PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        compile: What torch compiles: nothing, each layer by itself, or the model as a whole.
    """

    description: str
    stack: str = "bundled"
    status: Status = "untried"
    evidence: str | None = None
    weights: Mapping[str, str] = field(default_factory=lambda: {"default": "bf16"})
    master_weights: MasterWeights = "none"
    compute_dtype: ComputeDtype = "bf16"
    autocast: bool | None = None
    gradients: Gradients = Gradients()
    optimizer: Mapping[str, str] = field(default_factory=dict)
    micro_batch_size: int = 1
    sequence_length: int = 2048
    gradient_accumulation_steps: int = 1
    activation_checkpointing: Checkpointing | None = None
    checkpointed_layers: CheckpointedLayers = CheckpointedLayers()
    kernels: Kernels = Kernels()
    method: Method = Method()
    images: Images = Images()
    adapter: Adapter | None = None
    freeze: Freeze = ALL_TRAIN
    parallel: Parallel = Parallel()
    offload: Offload = Offload()
    dropout: float | None = None
    clip_gradients: bool | None = None
    zero_gradients: Literal["free", "fill"] = "free"
    loss_scaling: bool = False
    weight_average: Literal["none", "fp32", "bf16"] = "none"
    evaluation: bool = False
    evaluation_batch_size: int | None = None
    save_checkpoint: bool = False
    reserve: str = "0 MiB"
    allocator: Literal["native", "expandable"] = "native"
    compile: Literal["none", "layers", "model"] = "none"

    @property
    def checkpointing_words(self) -> str:
        """What is checkpointed, in words."""
        return f"{self.activation_checkpointing}{self.checkpointed_layers.words}"
