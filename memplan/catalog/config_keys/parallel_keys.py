"""Keys of ``parallel``: how GPUs share a job, and what the engines are told that shard it."""

from typing import Literal

from memplan.documents.frozen_values import dataclass

MAXIMUM_GPUS = 16_384
"""The largest published run (https://arxiv.org/abs/2407.21783, section 3.3.1: "up to 16K H100 GPUs"); what NCCL and the
sharding of more would take was never seen, so that more are refused."""

Engine = Literal["torch", "fsdp1", "deepspeed"]
TransformerImplementation = Literal["transformer_engine", "local"]


Routing = Literal["even", "worst"]

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
class MegatronFlags:
    """What Megatron-LM is told of how a step runs, with its defaults but for experts, which training files hand on.

    Attributes:
        expert_dispatch: How ranks that share experts give each other tokens: each what is routed to it, or all of them all.
        grouped_experts: Whether Transformer Engine's grouped products run a rank's experts; else one runs after the other.
        fused_gradients: Whether products add weights' gradients to the buffer (``--no-gradient-accumulation-fusion`` not given).
        fused_rotation: Whether one kernel rotates queries and keys (``--no-rope-fusion`` not given).
        compiled_loss: Whether torch.compile's code is the loss (``--cross-entropy-loss-fusion``, natively), which copies probabilities in backward.
        micro_batch_group: Micro-batches that pass a chunk of a stage's layers before its next chunk is run; None is as many as there are
            stages (``--microbatch-group-size-per-virtual-pipeline-stage``).
        bucket_elements: Elements from which on a bucket of gradients is full (``--ddp-bucket-size``); None is 40 million, or a million for
            each data parallel rank.
        buckets: How many buckets a rank's parameters would fill, instead (``--ddp-num-buckets``).
        padded_buckets: Whether buckets end at multiples of 65,536 elements too (``--ddp-pad-buckets-for-high-nccl-busbw``).
        whole_copies: Whether ``precision_aware`` keeps fp32 weights whole all the same (an ``--fp8-recipe`` other than delayed scaling).
        wide_moment: Whether one of the moments of an optimizer that has them in bf16 is fp32 (``--exp-avg-dtype``, ``--exp-avg-sq-dtype``).
        alternating: Whether ranks are counted over stages before data parallel ranks (``--use-tp-pp-dp-mapping``), so that neighbours have other stages.
        predicted_tokens: Layers that predict one more token each (``--mtp-num-layers``); what they keep is answered, and no step.
        muon: Whether matrices have Muon's momentum instead of Adam's moments, and each data parallel rank all of them (``--optimizer muon``) or
            those of its own matrices (``dist_muon``); what they keep is answered, and no step.
        unplanned: What of a step is not modelled; with any of it what is kept between steps is answered, and no step.
    """

    expert_dispatch: Literal["alltoall", "allgather"] = "alltoall"
    grouped_experts: bool = True
    fused_gradients: bool = True
    fused_rotation: bool = True
    compiled_loss: bool = False
    micro_batch_group: int | None = None
    bucket_elements: int | None = None
    buckets: int | None = None
    padded_buckets: bool = False
    whole_copies: bool = False
    wide_moment: bool = False
    alternating: bool = False
    predicted_tokens: int = 0
    muon: Literal["none", "whole", "shared"] = "none"
    unplanned: tuple[str, ...] = ()


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
        expert: GPUs that share the routed experts, each of which has some of them.
        micro_batches: Micro-batches that pass a pipeline together; None is as many as there are chunks of layers.
        stage: The pipeline's rank that is planned; None is the fullest.
        expert_tensor: GPUs that share each expert's matrices; as many as ``tensor`` where it is None.
        routing: Which rows a rank's experts are given where ``expert`` GPUs share them: ``even`` as many as it sends, ``worst`` all
            that the others can send to it.
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
        megatron: What Megatron-LM is told besides, where it is the stack.
        unused_parameters: Whether replicas look for parameters without a gradient (``ddp_find_unused_parameters``); None is
            as the stack decides.
        deepspeed: What DeepSpeed is told besides the stage, where it is the engine.
        flat: What FullyShardedDataParallel is told, where it is the engine.
        reshard_after_forward: Whether shards let go of a layer's gathered weights behind its forward; else they stay until
            its backward is done.
        staged_codes: Whether weights of 4 bits were staged on the CPU, so that axolotl's own parametrisation of a module decodes
            them, and not a layer of bitsandbytes (``cpu_ram_efficient_loading``).
        shared_muon: Whether GPUs that all have the weights orthogonalise a share of the bundled Muon's matrices each
            (``share_replicas`` of memplan.muon).
        tower_blocks: Whether blocks of a vision tower are units of torch's shards, as layers are; false where a file names layers
            alone (``fsdp_transformer_layer_cls_to_wrap``), so that the root has them, None as transformers' own list has it.
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
    routing: Routing = "even"
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
    megatron: MegatronFlags = MegatronFlags()
    unused_parameters: bool | None = None
    deepspeed: DeepSpeed = DeepSpeed()
    flat: FlatShards = FlatShards()
    reshard_after_forward: bool = True
    staged_codes: bool = False
    tower_blocks: bool | None = None
    shared_muon: bool = False

    @property
    def shards(self) -> int:
        """GPUs among which everything is divided, where it is: those of one group, be it data or a sequence that they share."""
        return self.data * self.context // self.replicate

    @property
    def expert_shards(self) -> int:
        """GPUs of a group that have the same experts, among which these are divided anew."""
        return self.shards * self.tensor // self.expert

    @property
    def groups(self) -> tuple[int, ...]:
        """GPUs of each group that one communicates in: data parallel ones, those that share matrices, sequences, experts, those that divide these anew, a pipeline."""
        experts = (self.expert, self.expert_shards) if self.expert > 1 else ()
        degrees = (self.shards, self.replicate, self.tensor, self.context, *experts, self.pipeline)
        return tuple(n for n in degrees if n > 1)

    @property
    def gpus(self) -> int:
        """GPUs whose steps are planned together: data parallel ones, each of them as many as share a model."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def order(self) -> Schedule:
        """In what order a pipeline runs micro-batches."""
        return self.schedule or ("1f1b" if self.virtual == 1 else "interleaved")

    @property
    def together(self) -> int:
        """Micro-batches that pass a pipeline together."""
        return self.micro_batches or self.pipeline * self.virtual
