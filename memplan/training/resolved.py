"""A training config with its names looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from memplan.catalog.config_keys.method_keys import SCORED, Rollout
from memplan.catalog.entries import GradientDtype, Optimizer, StorageFormat
from memplan.catalog.hardware.hardware_tables import HardwareTables
from memplan.catalog.kernel_profiles import AttentionKernel, CodesLoading, KernelProfile
from memplan.catalog.shipped_tables import FamilyGap, ReserveShare
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Checkpointing, TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import Role
from memplan.training.rules.distillation_rules import DISTILLED, on_policy
from memplan.training.rules.flat_rules import steps_beside
from memplan.training.rules.method_rules import REFERRED, UNREFERRED
from memplan.training.rules.ppo_rules import BESIDE_VALUES
from memplan.training.rules.stack_defaults import format_name
from memplan.training.rules.stack_rules import beside_codes, runs_autocast

if TYPE_CHECKING:
    from memplan.model.model import Model
    from memplan.training.second_models import BesideModel

FLOAT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Formats that a product can read as they are; all others are decoded first."""

PAIRED = frozenset(("dpo", "reward", "orpo", "cpo", "simpo"))
"""Stages whose samples are pairs of a chosen and a rejected answer, which run as one batch of twice the rows."""


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A training config whose names have been resolved to catalog entries."""

    name: str  # Catalog name or path of the config
    config: TrainingConfig  # What it says, with overrides applied and what it leaves to its stack filled in
    stack: Stack  # Whose training loop runs it, at its version
    profile: KernelProfile  # Its kernels: its own choices over those of its stack
    format_names: Mapping[Role, str]  # Weight format of each role, by name
    formats: Mapping[Role, StorageFormat]  # Weight format of each role
    gradient: GradientDtype | None  # How gradients are stored; None is the dtype of the weight
    optimizer_names: Mapping[Role, str]  # Optimizer of each role, by name
    optimizers: Mapping[Role, Optimizer]  # Optimizer of each role
    compute_bytes: int  # Bytes of an element in matrix products
    reserve_bytes: int  # Memory of the device to leave free
    reserve_shares: Mapping[str, ReserveShare]  # Allocator -> what it needs beyond what it hands out
    hardware: HardwareTables  # What cards can do, and what is taken on them
    # What steps roles that the stack leaves in fp32 where a family's code does, by name and as an entry.
    wide_optimizers: Mapping[Role, tuple[str, Optimizer]] = field(default_factory=dict)
    changed: bool = False  # Whether settings were changed on top of it
    # Families whose own code in the stack's library saves more than the stack says.
    family_gaps: Mapping[str, FamilyGap] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()  # What of the job the formula does not follow; it plans none of that
    # Kernel of attention within a window on a card; None where there is no window to see to.
    masked_attention: AttentionKernel | None = None
    # Kernel of heads wider than flash takes, where a model has narrower ones too; None where it has none of one kind.
    wide_attention: AttentionKernel | None = None
    tower_attention: AttentionKernel | None = None
    widens_stream: bool = False  # Whether autocast leaves the result of a norm behind the embedding in fp32
    card_notes: tuple[str, ...] = ()  # What a card does in another way, one sentence each; none where there is no card
    # Whether the embedding is frozen in the dtype that it was loaded in, where what trains is cast to fp32.
    frozen_embedding: bool = False
    given: TrainingConfig | None = field(default=None, compare=False)  # Before its stack filled it in
    uncheckpointed: bool = False  # Whether layers never run again, whatever the config says
    teacher: BesideModel | None = None  # What distillation learns from
    value_model: BesideModel | None = None  # What PPO trains beside its policy
    reward_model: BesideModel | None = None  # What scores the answers of that
    untied_ends: bool = False  # Whether a tied embedding and head are tensors of their own, as copies of either train

    def with_floats(self, names: Mapping[Role, str]) -> TrainingSetup:
        """Return the same setup with the weights of some roles in other floats."""
        formats = {role: plain_format(name) for role, name in names.items()}
        return replace(self, format_names={**self.format_names, **names}, formats={**self.formats, **formats})

    @property
    def beside(self) -> Mapping[str, Model]:
        """Models of their own beside the one that is trained, as they were looked up."""
        return {role: second.given for role, second in self.seconds.items()}

    @property
    def seconds(self) -> Mapping[str, BesideModel]:
        """The same as they run, by what they are."""
        named = {"teacher": self.teacher, "value_model": self.value_model, "reward_model": self.reward_model}
        return {role: second for role, second in named.items() if second is not None}

    @property
    def names_hidden(self) -> bool:
        """Whether a loop asks for hidden states of all layers (``forward`` in trl/experimental/ppo/ppo_trainer.py, 1.12.0)."""
        return self.profile.loss in ("policy", "values")

    @property
    def label(self) -> str:
        """The config's name, with a word where settings were changed on top of it."""
        return f"{self.name} (changed)" if self.changed else self.name

    @property
    def autocast(self) -> bool:
        """Whether CUDA autocast casts weights and activations to a narrower compute dtype."""
        if self.config.parallel.engine == "deepspeed":
            return False  # the engine casts the weights beforehand
        return runs_autocast(self.config, self.stack, self.format_names["hidden_matrix"])

    @property
    def attention_choice(self) -> AttentionKernel:
        """Kernel of attention as the config says it, else its stack; ``auto`` leaves it to torch."""
        return self.config.kernels.attention or self.stack.kernels.attention

    @property
    def checkpointing(self) -> Checkpointing:
        """What a layer keeps for backward: as the config says, else as its stack does."""
        assert self.config.activation_checkpointing is not None, "a setup's config is filled in"
        return "none" if self.uncheckpointed else self.config.activation_checkpointing

    @property
    def asks_for_checkpointing(self) -> bool:
        """Whether a library is told to checkpoint, which the model's code may not do."""
        return self.config.activation_checkpointing != "none"

    def computes_again(self, number: int) -> bool:
        """Whether a layer, numbered from 0, is checkpointed."""
        return self.checkpointing != "none" and self.config.checkpointed_layers.has(number)

    @property
    def adapter_dtype(self) -> str:
        """Format of the weights of adapters: as the config says, else as its stack makes them."""
        assert self.config.adapter is not None
        assert self.config.adapter.dtype is not None, "a setup's config is filled in"
        return self.config.adapter.dtype

    @property
    def rows_per_sample(self) -> int:
        """Rows of a forward for each that a micro-batch counts: a pair, chosen and rejected, has two, merged columns one each."""
        if self.config.method.embedding is not None:
            return self.config.method.embedding.forwards[-1]
        return 2 if self.config.method.stage in PAIRED else 1

    @property
    def balances(self) -> bool:
        """Whether a loss of unbalanced experts is added, where a model's family has a factor for it.

        Source:
            ``aux_loss_enabled`` in trl/trainer/{sft,dpo,kto,grpo}_trainer.py (1.16.0), which reward models and ``trl.experimental`` lack.
        """
        method = self.config.method
        by_stack = self.stack.loop.balances and method.stage in ("sft", "dpo", "kto", "grpo")
        return by_stack if method.balances is None else method.balances

    @property
    def rollout(self) -> Rollout:
        """What is generated, and by what."""
        assert self.config.method.rollout is not None, "a setup's config is filled in"
        return self.config.method.rollout

    @property
    def generates(self) -> bool:
        """Whether the model generates the completions that it learns from."""
        return self.config.method.rollout is not None and self.rollout.engine == "transformers"

    @property
    def generates_rows(self) -> bool:
        """Whether rows are generated that a loss over whole rows is formed of, as it is of those of the data."""
        return self.generates and self.profile.loss == "divergence"

    @property
    def caches_generated(self) -> bool:
        """Whether what generates has a cache of keys and values, which GKD has not beside checkpointing.

        Source:
            ``use_cache`` among ``generation_kwargs`` in trl/experimental/gkd/gkd_trainer.py (1.16.0).
        """
        return self.profile.loss != "divergence" or not self.asks_for_checkpointing

    @property
    def evaluates_apart(self) -> bool:
        """Whether the job evaluates another number of rows than it trains on."""
        return self.config.evaluation and self.config.evaluation_batch_size is not None

    @property
    def scales_loss(self) -> bool:
        """Whether torch's GradScaler scales the loss; DeepSpeed's own scale is a number in host memory.

        Source:
            ``DynamicLossScaler`` in deepspeed/runtime/fp16/loss_scaler.py (0.19.8); accelerate/accelerator.py (1.15.0).
        """
        return self.config.loss_scaling and self.config.parallel.engine != "deepspeed"

    @property
    def answer_length(self) -> int:
        """Tokens of each row that have a label; 0 for all that have a token before them."""
        return 0 if self.profile.loss == "divergence" or self.names_hidden else self.completion_length

    @property
    def labelled_length(self) -> int:
        """The same where whole logits are formed, of which a loss takes those of answers."""
        return self.completion_length if self.names_hidden else self.answer_length

    @property
    def completion_length(self) -> int:
        """Tokens of each row that are generated; 0 where nothing is."""
        return 0 if self.config.method.rollout is None else self.rollout.completion_length

    @property
    def generated_micro_batches(self) -> int:
        """Micro-batches whose rows are generated together; 0 where nothing is."""
        if self.config.method.rollout is None:
            return 0
        return self.rollout.micro_batches or self.config.gradient_accumulation_steps

    @property
    def copies_logits(self) -> bool:
        """Whether metrics are made of whole logits, of which they make copies."""
        if self.compares_pairs:
            return False
        if self.stack.loop.own_comparison:
            return False
        copied = self.profile.loss == "fp32" and self.stack.loop.metrics not in ("none", "fused")
        return copied or self.profile.loss == "log-probabilities"

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss compares chosen with rejected answers, and with no reference model."""
        return self.config.method.stage in UNREFERRED

    @property
    def joins_rows(self) -> bool:
        """Whether rows are joined, or copied, before each forward: completions to prompts, chosen to rejected answers."""
        copied = self.stack.loop.metrics == "softmax" and self.config.method.stage in REFERRED
        return self.answer_length > 0 or copied or (self.compares_pairs and not self.stack.loop.own_comparison)

    @property
    def has_value_head(self) -> bool:
        """Whether a model with its own head has one of values beside that, which alone is trained on (``stage: rm`` of LLaMA-Factory)."""
        return self.config.method.stage == "reward" and self.stack.loop.value_head

    @property
    def scores(self) -> bool:
        """Whether the model has a head that yields some numbers in place of logits, which is always trained."""
        return self.config.method.stage in SCORED and not self.has_value_head

    @property
    def score_count(self) -> int:
        """How many numbers that head yields for each token."""
        return (self.config.method.labels or 1) if self.scores else 0

    @property
    def disables_dropout(self) -> bool:
        """Whether the trainer switches off the model's dropout (``disable_dropout`` in trl/trainer/dpo_config.py and others, 1.16.0)."""
        method, stages = self.config.method, REFERRED | UNREFERRED | DISTILLED | BESIDE_VALUES | {"reward"}
        return method.stage in stages and not self.has_value_head and not on_policy(method)

    @property
    def trains_codes(self) -> bool:
        """Whether matrices that are stored as codes are trained."""
        return self.config.adapter is None and self.format_names["hidden_matrix"] not in FLOAT_BYTES

    @property
    def offloads_states(self) -> bool:
        """Whether optimizer states lie in host memory, from where the bundled optimizer brings them to step on the device."""
        return self.config.offload.optimizer_states == "cpu" and not self.steps_on_host

    @property
    def steps_on_host(self) -> bool:
        """Whether an engine of several GPUs keeps optimizer states in host memory, and steps there."""
        return self.config.offload.optimizer_states == "cpu" and steps_beside(self.config.parallel)

    @property
    def offloads_weights(self) -> bool:
        """Whether pieces of weights lie in host memory, from where they are brought to be gathered."""
        return self.config.offload.weights == "cpu" and self.steps_on_host

    @property
    def runs_flash_attn(self) -> bool:
        """Whether attention is run by the package flash-attn, which transformers gives no mask and no repeated heads."""
        return self.stack.model_code == "transformers" and self.config.kernels.attention == "flash"

    @property
    def residual_bytes(self) -> int:
        """Bytes of an element of the residual stream: in fp32 where autocast runs a norm behind the embedding."""
        return 4 if self.widens_stream and self.autocast else self.embedded_bytes

    @property
    def embedded_bytes(self) -> int:
        """Bytes of an element of embedded tokens, which are as wide as the embedding and which autocast leaves so."""
        compute, embedding = self.compute_bytes, self.format_names["embedding"]
        if self.format_names["hidden_matrix"] == "fp32":
            return FLOAT_BYTES.get(embedding, compute) if self.autocast and not self.frozen_embedding else compute
        return max(compute, FLOAT_BYTES.get(embedding, 0))

    @property
    def loaded_float(self) -> str:
        """Format that the embedding is loaded in, before anything is cast: that of whatever is not quantised."""
        return format_name(self.config, "embedding")

    @property
    def kbit_floats(self) -> bool:
        """Whether all that is not quantised is in fp32 beside quantised matrices."""
        if self.config.parallel.engine != "torch":
            return False  # DeepSpeed casts them back, and FSDP1 refuses to flatten two dtypes into one tensor
        quantised = beside_codes(self.config, self.format_names["hidden_matrix"])
        return self.stack.kbit_floats in ("fp32", "fp32-norms") and quantised

    @property
    def loads_codes(self) -> CodesLoading | None:
        """How 4-bit weights are quantised on the card, where that decides what its allocator holds."""
        blocks = self.formats["hidden_matrix"].blocking == "tensor" and not self.formats["hidden_matrix"].row_bytes
        return (
            self.stack.loads_codes if blocks and beside_codes(self.config, self.format_names["hidden_matrix"]) else None
        )

    @property
    def stable_embedding(self) -> bool:
        """Whether another embedding, trained by nothing, stands before quantised matrices in the place of the model's."""
        quantised = beside_codes(self.config, self.format_names["hidden_matrix"])
        return self.stack.kbit_floats == "stable-embedding" and quantised

    @property
    def leaves_gradients(self) -> bool:
        """Whether a step leaves gradients: filled with zeros, or those that no optimizer has."""
        return self.config.zero_gradients == "fill" or self.stable_embedding

    @property
    def reserve_share(self) -> ReserveShare:
        """What the allocator needs beyond what it hands out."""
        return self.reserve_shares[self.config.allocator or "native"]

    @property
    def captures_step(self) -> bool:
        """Whether forwards and backwards are captured as a CUDA graph, whose memory serves nothing else."""
        return self.stack.cuda_graphs and self.config.zero_gradients == "fill"

    @property
    def takes_beyond_peak(self) -> bool:
        """Whether a device holds more than the peak of a step and its usual allowances, which its plan alone tells."""
        return self.captures_step or self.config.compile != "none"

    @property
    def wide_floats(self) -> bool:
        """Whether fp32 weights are multiplied in fp32 beside products in 16 bits."""
        return self.kbit_floats and not self.autocast


def plain_format(name: str) -> StorageFormat:
    """Return a float format of that name."""
    return StorageFormat(name, 1, FLOAT_BYTES[name], "", (), "float")
