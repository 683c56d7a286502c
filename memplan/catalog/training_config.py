"""A training config: every key of DESIGN section 6, with its default."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from memplan.catalog.config_keys.method_keys import Images, Method
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.entries import Status
from memplan.catalog.kernel_profiles import Kernels
from memplan.documents.frozen_values import dataclass

ComputeDtype = Literal["fp32", "bf16", "fp16"]
MasterWeights = Literal["none", "bf16", "fp32"]
Checkpointing = Literal["none", "selective", "full"]
GradientLifetime = Literal["step", "layer"]
Allocator = Literal["native", "expandable"]
NamesEnd = Literal["backward", "step", "next"]
Place = Literal["none", "cpu"]
"""Where something is moved: nowhere, or to host memory."""

MAXIMUM_TOKENS = 2**40
"""No step holds more tokens; a larger product of batch and sequence length is a slip."""

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
        vision: Whether targets count in a vision tower and its projector too, or in one of them alone; None is as the stack does.
    """

    kind: Literal["lora", "dora"] = "lora"
    rank: int = 16
    targets: tuple[str, ...] = ALL_LINEAR
    dtype: Literal["bf16", "fp32", "fp16"] | None = None
    dropout: float | None = None
    modules_to_save: tuple[str, ...] = ()
    vision: Literal[True, False, "tower", "projector"] | None = None


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
class Offload:
    """What is kept in host memory.

    Attributes:
        optimizer_states: ``cpu`` keeps them in host memory; the bundled optimizer then steps, or the ranks of FSDP and DeepSpeed do there.
        weights: ``cpu`` keeps the shards of FSDP's ranks there, with gradients and states, or the pieces of DeepSpeed's stage 3.
        activations: ``cpu`` keeps there what full checkpointing saves, on one GPU, where a stack does so.
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
        joined_rows: The rows of a micro-batch lie behind one another in one row, whose tokens attend under a mask of all by all.
        padded_rows: The rows of a micro-batch differ in length and are padded to the longest, of ``sequence_length``, or ``multiple``, a single
            one too, to a multiple: attention is given a mask. False says that none has padding; None that nobody knows.
        reentrant_checkpointing: Whether layers run again by torch's older checkpointing, ``use_reentrant=True``; None is as the stack does.
        outputs_until: Until when a loop has a name for what a model returns: its ``forward``, behind which the loss alone is used, a
            ``backward``, the end of the ``step``, where that is a function, or the ``next`` forward; None is as the stack does.
        method: What a step learns from.
        images: Images in its rows, of a vision-language model.
        adapter: Adapters; the other weights are frozen then.
        freeze: Which of a model's own parameters train.
        dropout: Probability; None takes the model's own.
        clip_gradients: Clip by the norm of all gradients; None is as the stack does.
        zero_gradients: ``free`` drops gradients after a step, ``fill`` keeps and zeroes them; None is as the stack does.
        loss_scaling: Dynamic loss scale for fp16.
        weight_average: Format of an averaged copy of the weights on the device, or ``none``.
        evaluation: The job evaluates, without gradients, at the same length.
        evaluation_batch_size: Rows that it evaluates together; None is as many as a micro-batch has.
        save_checkpoint: The job saves checkpoints.
        reserve: Memory kept free, such as ``500 MiB`` for a desktop.
        allocator: ``expandable`` is PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; None is as the stack does.
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
    joined_rows: bool = False
    padded_rows: bool | Literal["multiple"] | None = None
    activation_checkpointing: Checkpointing | None = None
    checkpointed_layers: CheckpointedLayers = CheckpointedLayers()
    reentrant_checkpointing: bool | None = None
    kernels: Kernels = Kernels()
    outputs_until: Literal["forward"] | NamesEnd | None = None
    method: Method = Method()
    images: Images = Images()
    adapter: Adapter | None = None
    freeze: Freeze = ALL_TRAIN
    parallel: Parallel = Parallel()
    offload: Offload = Offload()
    dropout: float | None = None
    clip_gradients: bool | None = None
    zero_gradients: Literal["free", "fill"] | None = None
    loss_scaling: bool = False
    weight_average: Literal["none", "fp32", "bf16"] = "none"
    evaluation: bool = False
    evaluation_batch_size: int | None = None
    save_checkpoint: bool = False
    reserve: str = "0 MiB"
    allocator: Allocator | None = None
    compile: Literal["none", "layers", "model"] = "none"

    @property
    def masks_rows(self) -> bool:
        """Whether a collator tells a model more of its rows than that they are full, for which attention is given a mask."""
        return self.joined_rows or bool(self.padded_rows)

    def pads(self, rows: int) -> bool:
        """Whether so many rows have padding: a single one has none, unless it is padded to a multiple."""
        return bool(self.padded_rows) and (rows > 1 or self.padded_rows == "multiple")

    @property
    def checkpointing_words(self) -> str:
        """What is checkpointed, in words."""
        return f"{self.activation_checkpointing}{self.checkpointed_layers.words}"
