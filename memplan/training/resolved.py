"""A training config with its names looked up and its contradictions refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from functools import lru_cache

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import GradientDtype, Optimizer, StorageFormat
from memplan.catalog.kernel_profiles import AttentionKernel, KernelProfile
from memplan.catalog.shipped_tables import FamilyGap, ReserveShare
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Checkpointing, Parallel, Rollout, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError, match_hint
from memplan.hardware.hardware_tables import HardwareTables, hardware_tables
from memplan.model.inventory import ROLES, Role
from memplan.training.config_refusals import (
    number_problems,
    refuse_frozen_formats,
    refuse_offloading,
    refuse_unmodelled,
    word_problems,
)
from memplan.training.learning import Learning, Recipe, learning_of, recipe_of
from memplan.training.parallelism import parallel_problems, parallel_refusals
from memplan.training.stack_rules import (
    beside_codes,
    casts_floats,
    kbit_formats,
    method_problems,
    method_refusals,
    never_run,
    runs_autocast,
    stack_problems,
    unmodelled,
    with_adapters,
    with_method,
    with_method_keys,
    with_stack_defaults,
)
from memplan.units import parse_bytes
from memplan.values import dataclass

FLOAT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Formats that a product can read as they are; all others are decoded first."""

PAIRED = frozenset(("dpo", "reward", "orpo", "cpo", "simpo"))
"""Stages whose samples are pairs of a chosen and a rejected answer, which run as one batch of twice the rows."""

MATRIX_ROLES: frozenset[Role] = frozenset(("hidden_matrix", "expert_matrix"))

WEIGHT_FALLBACKS: dict[Role, tuple[str, ...]] = {
    "hidden_matrix": ("hidden_matrix", "default"),
    "expert_matrix": ("expert_matrix", "hidden_matrix", "default"),
    "embedding": ("embedding", "default"),
    "head": ("head", "embedding", "default"),
    "router": ("router", "default"),
    "norm": ("norm", "default"),
    "bias": ("bias", "norm", "default"),
}
"""Role -> keys that may say its weight format, the most particular first."""

Path = tuple[str, ...]
Where = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A training config whose names have been resolved to catalog entries.

    Attributes:
        name: Catalog name or path of the config.
        changed: Whether settings were changed on top of it.
        config: What it says, with overrides applied and what it leaves to its stack filled in.
        stack: Whose training loop runs it, at its version.
        profile: Its kernels: its own choices over those of its stack.
        format_names: Weight format of each role, by name.
        formats: Weight format of each role.
        gradient: How gradients are stored; None is the dtype of the weight.
        optimizer_names: Optimizer of each role, by name.
        optimizers: Optimizer of each role.
        compute_bytes: Bytes of an element in matrix products.
        reserve_bytes: Memory of the device to leave free.
        reserve_share: What the allocator needs beyond what it hands out.
        hardware: What cards can do, and what is taken on them.
        unmodelled: What of the job the formula does not follow; it plans none of that.
        family_gaps: Families whose own code in the stack's library saves more than the stack says.
        masked_attention: Kernel of attention within a window on a card; None where there is no window to see to.
        card_notes: What a card does in another way, one sentence each; none where there is no card.
    """

    name: str
    config: TrainingConfig
    stack: Stack
    profile: KernelProfile
    format_names: Mapping[Role, str]
    formats: Mapping[Role, StorageFormat]
    gradient: GradientDtype | None
    optimizer_names: Mapping[Role, str]
    optimizers: Mapping[Role, Optimizer]
    compute_bytes: int
    reserve_bytes: int
    reserve_share: ReserveShare
    hardware: HardwareTables
    changed: bool = False
    family_gaps: Mapping[str, FamilyGap] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()
    masked_attention: AttentionKernel | None = None
    card_notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The config's name, with a word where settings were changed on top of it."""
        return f"{self.name}, changed" if self.changed else self.name

    @property
    def autocast(self) -> bool:
        """Whether CUDA autocast casts weights and activations to a narrower compute dtype."""
        if self.config.parallel.engine == "deepspeed":
            return False  # the engine casts the weights beforehand
        return runs_autocast(self.stack, self.format_names["hidden_matrix"], self.config.compute_dtype)

    @property
    def attention_choice(self) -> AttentionKernel:
        """Kernel of attention as the config says it, else its stack; ``auto`` leaves it to torch."""
        return self.config.kernels.attention or self.stack.kernels.attention

    @property
    def checkpointing(self) -> Checkpointing:
        """What a layer keeps for backward: as the config says, else as its stack does."""
        assert self.config.activation_checkpointing is not None, "a setup's config is filled in"
        return self.config.activation_checkpointing

    @property
    def adapter_dtype(self) -> str:
        """Format of the weights of adapters: as the config says, else as its stack makes them."""
        assert self.config.adapter is not None
        assert self.config.adapter.dtype is not None, "a setup's config is filled in"
        return self.config.adapter.dtype

    @property
    def rows_per_sample(self) -> int:
        """Rows of tokens for each that a micro-batch counts: a pair, chosen and rejected, has two."""
        return 2 if self.config.method.stage in PAIRED else 1

    @property
    def rollout(self) -> Rollout:
        """What is generated, and by what."""
        assert self.config.method.rollout is not None, "a setup's config is filled in"
        return self.config.method.rollout

    @property
    def answer_length(self) -> int:
        """Tokens of each row that have a label; 0 for all that have a token before them."""
        return 0 if self.config.method.rollout is None else self.rollout.completion_length

    @property
    def generated_micro_batches(self) -> int:
        """Micro-batches whose rows are generated together; 0 where nothing is."""
        if self.config.method.rollout is None:
            return 0
        return self.rollout.micro_batches or self.config.gradient_accumulation_steps

    @property
    def keeps_old_log_probabilities(self) -> bool:
        """Whether the log-probabilities that completions were generated with are computed beforehand.

        Source:
            ``_generate_and_score_completions`` in trl/trainer/grpo_trainer.py (1.16.0): where steps and generations are
            not aligned, and always where an engine generates.
        """
        every = self.generated_micro_batches * self.rollout.iterations
        return self.rollout.engine != "transformers" or self.config.gradient_accumulation_steps % every != 0

    @property
    def copies_logits(self) -> bool:
        """Whether metrics are made of whole logits, of which they make copies."""
        copied = self.profile.loss == "fp32" and self.stack.loop.metrics not in ("none", "fused")
        return copied or self.profile.loss == "log-probabilities"

    @property
    def scores(self) -> bool:
        """Whether the model has a head that yields one number in place of logits, which is always trained."""
        return self.config.method.stage == "reward"

    @property
    def trains_codes(self) -> bool:
        """Whether matrices that are stored as codes are trained."""
        return self.config.adapter is None and self.format_names["hidden_matrix"] not in FLOAT_BYTES

    @property
    def offloads_states(self) -> bool:
        """Whether optimizer states lie in host memory, so that the bundled optimizer steps."""
        return self.config.offload.optimizer_states == "cpu"

    @property
    def residual_bytes(self) -> int:
        """Bytes of an element of the residual stream, which is as wide as the embedding and which autocast leaves so."""
        if self.format_names["hidden_matrix"] == "fp32":
            return 4 if self.autocast else self.compute_bytes
        return max(self.compute_bytes, FLOAT_BYTES.get(self.format_names["embedding"], 0))

    @property
    def loaded_float(self) -> str:
        """Format that the embedding is loaded in, before anything is cast: that of whatever is not quantised."""
        return format_name(self.config, "embedding")

    @property
    def kbit_floats(self) -> bool:
        """Whether all that is not quantised is in fp32 beside quantised matrices."""
        if self.config.parallel.engine == "deepspeed":
            return False  # the engine casts them back
        return self.stack.kbit_floats == "fp32" and beside_codes(self.config, self.format_names["hidden_matrix"])

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
    def wide_floats(self) -> bool:
        """Whether fp32 weights are multiplied in fp32 beside products in 16 bits."""
        return self.kbit_floats and not self.autocast


def resolve(config: TrainingConfig, catalog: Catalog, name: str, where: Where | None = None) -> TrainingSetup:
    """Return the setup that a config describes.

    Args:
        config: Read from a file, with overrides applied.
        catalog: Where its names are looked up.
        name: What messages call the config.
        where: Turns a path of keys into ``file:line: key`` for messages.

    Raises:
        InvalidFileError: Every unknown name, impossible number and contradiction at once.
        CannotAnswerError: Keys whose effect is not modelled yet.
    """
    place = where or (lambda path: f"{name}: {'.'.join(path)}")
    problems = [f"{place(path)}: {text}" for path, text in config_problems(config, catalog)]
    if problems:
        raise InvalidFileError(problems)
    stack = catalog.stack(config.stack)
    config, profile = filled(config, stack), config.kernels.over(stack.kernels)
    stack = with_method_keys(config, stack)
    profile = with_method(config, stack, profile)
    profile = with_adapters(config, profile, stack, catalog.formats[format_name(config, "hidden_matrix")])
    if profile.adapters != stack.kernels.adapters:
        config = replace(config, kernels=replace(config.kernels, adapters=profile.adapters))
    refuse_unmodelled(config, place)
    for path, text in method_refusals(config, stack, catalog, format_name(config, "hidden_matrix")):
        raise CannotAnswerError(f"{place(path)}: {text}")
    format_names = {role: format_name(config, role) for role in ROLES}
    named_formats = {role: catalog.formats.name_of(n) for role, n in format_names.items()}
    if config.adapter is None:
        refuse_frozen_formats(format_names, catalog, place)
    optimizer_names = {role: _optimizer_name(config, catalog, role) for role in ROLES}
    if config.offload.optimizer_states == "cpu":
        refuse_offloading(config, optimizer_names.values(), catalog, place)
    known_formats = kbit_formats(config, stack, named_formats)
    if config.parallel != Parallel():
        used = {key: catalog.optimizers[key] for key in optimizer_names.values()}
        whole = {name for name in known_formats.values() if "bitsandbytes-4bit" in catalog.formats[name].needs}
        for path, text in parallel_refusals(config, profile, known_formats, FLOAT_BYTES, used, stack, whole):
            raise CannotAnswerError(f"{place(path)}: {text}")
    recipe = recipe_of(config, named_formats, optimizer_names, catalog)
    stored = {role: catalog.formats[n] for role, n in known_formats.items()}
    return TrainingSetup(
        name=name,
        config=_with_learning(config, recipe, catalog, name),
        stack=stack,
        profile=profile,
        format_names=known_formats,
        formats=stored,
        gradient=None if config.gradients.dtype is None else catalog.gradients[config.gradients.dtype],
        optimizer_names=optimizer_names,
        optimizers={role: catalog.optimizers[n] for role, n in optimizer_names.items()},
        compute_bytes=FLOAT_BYTES[config.compute_dtype],
        reserve_bytes=parse_bytes(config.reserve),
        reserve_share=catalog.tables.reserve_share(config.allocator, recipe.coded),
        hardware=hardware_tables(catalog.root),
        family_gaps=_family_gaps(stack, catalog),
        unmodelled=tuple(f"{place(path)}: {text}" for path, text in unmodelled(stack, profile, known_formats, catalog)),
    )


def filled(config: TrainingConfig, stack: Stack) -> TrainingConfig:
    """Return a config in which what it leaves to its stack is filled in; its formats need not be known."""
    return with_stack_defaults(config, stack, format_name(config, "hidden_matrix"))


def _family_gaps(stack: Stack, catalog: Catalog) -> Mapping[str, FamilyGap]:
    gaps = catalog.tables.family_gaps.get(stack.name)
    return {} if gaps is None else gaps.families


def named_recipe(config: TrainingConfig, catalog: Catalog) -> Recipe:
    """Return what decides how a config learns; its names have to be known."""
    config = filled(config, catalog.stack(config.stack))
    formats = {role: catalog.formats.name_of(format_name(config, role)) for role in ROLES}
    return recipe_of(config, formats, {role: _optimizer_name(config, catalog, role) for role in ROLES}, catalog)


def learning(config: TrainingConfig, catalog: Catalog, name: str) -> Learning:
    """Return how the config called ``name`` learns."""
    return _learning(named_recipe(config, catalog), catalog, name)


def _learning(recipe: Recipe, catalog: Catalog, name: str) -> Learning:
    shipped = catalog.shipped_config(name)
    known = None if shipped is None else _shipped_recipe(catalog, name)
    return learning_of(recipe, catalog, known, None if shipped is None else shipped.evidence, name)


@lru_cache(maxsize=64)
def _shipped_recipe(catalog: Catalog, name: str) -> Recipe:
    return named_recipe(catalog.configs.entries[name], catalog)


def _with_learning(config: TrainingConfig, recipe: Recipe, catalog: Catalog, name: str) -> TrainingConfig:
    """Return a config with the status that evidence bears; evidence of a user's own is named, and bears none."""
    learned = _learning(recipe, catalog, name)
    own = config.evidence if config.evidence and not catalog.ships_evidence(config.evidence) else None
    return replace(config, status=learned.status, evidence=learned.evidence or own)


def format_name(config: TrainingConfig, role: Role) -> str:
    """Return the weight format that a config gives a role, in its own spelling."""
    for key in WEIGHT_FALLBACKS[role]:
        if key in config.weights:
            return config.weights[key]
    return config.compute_dtype


def _is_whole(config: TrainingConfig, role: Role) -> bool:
    """Tell whether tensors of a role are trained whole beside adapters: modules to save, and a head that scores."""
    if config.adapter is None or role not in ("embedding", "head"):
        return False
    return bool(config.adapter.modules_to_save) or (config.method.stage == "reward" and role == "head")


def _optimizer_name(config: TrainingConfig, catalog: Catalog, role: Role) -> str:
    """Return the optimizer that a role's tensors go to, following ``rest`` where one takes only matrices."""
    trained = config.adapter.dtype if config.adapter is not None else format_name(config, "hidden_matrix")
    whole = _is_whole(config, role)
    if whole:
        names = {each: format_name(config, each) for each in ROLES}
        trained = kbit_formats(config, catalog.stack(config.stack), names)[role]
    if config.parallel.engine == "deepspeed" and config.parallel.zero_stage:
        trained = "fp32"  # what it steps is a flat copy
    default = "adamw-fp32" if trained == "fp32" else "adamw-bf16"
    keys = (role, "hidden_matrix", "default") if role == "expert_matrix" else (role, "default")
    given = next((config.optimizer[key] for key in keys if key in config.optimizer), default)
    name = catalog.optimizers.name_of(given)
    entry = catalog.optimizers[name]
    if entry.takes == "matrices" and role not in MATRIX_ROLES and entry.rest is not None:
        return entry.rest
    stack, alike = catalog.stack(config.stack), entry.implementation == catalog.optimizers[default].implementation
    if whole and alike and role not in config.optimizer:
        return default  # its states are as wide as the module that is trained, not as adapters are
    if config.adapter is None and alike and casts_floats(config, stack):
        names = {each: format_name(config, each) for each in ROLES}
        wide = kbit_formats(config, stack, names)[role] == "fp32"
        return "adamw-fp32" if wide else name  # states are as wide as what the stack has cast
    return name


# ------------------------------------------------------------------ what is refused
def config_problems(config: TrainingConfig, catalog: Catalog) -> Iterator[tuple[Path, str]]:
    """Yield every unknown name, impossible number and contradiction of a config, with its path of keys."""
    yield from word_problems(config, ())
    yield from number_problems(config)
    yield from _names(config, catalog)
    if problems := tuple(stack_problems(config, catalog)):
        yield from problems
    else:
        stack = catalog.stack(config.stack)
        yield from _contradictions(whole := filled(config, stack))
        yield from method_problems(whole)
        yield from never_run(whole, stack, format_name(config, "hidden_matrix"))
    yield from parallel_problems(config.parallel)
    if config.gradients.dtype is not None and config.gradients.dtype not in catalog.gradients:
        yield ("gradients", "dtype"), _unknown(catalog.gradients, config.gradients.dtype)


def _names(config: TrainingConfig, catalog: Catalog) -> Iterator[tuple[Path, str]]:
    for section, mapping, shelf in (
        ("weights", config.weights, catalog.formats),
        ("optimizer", config.optimizer, catalog.optimizers),
    ):
        for role, name in mapping.items():
            if role not in ROLES and role != "default":
                known = (*ROLES, "default")
                yield (section, role), "unknown role" + match_hint(role, known, f"; known: {', '.join(known)}")
            if name not in shelf:
                yield (section, role), _unknown(shelf, name)
    for role, name in config.weights.items():
        if name in catalog.formats and not catalog.formats[name].storable:
            yield ("weights", role), f"{name} exists only during computation; weights cannot be stored in it"
        if role in ("norm", "bias") and name in catalog.formats and catalog.formats[name].block_elements > 1:
            yield ("weights", role), f"norms and biases stay in fp32, bf16 or fp16, not {name}"
    for role, name in config.optimizer.items():
        entry = catalog.optimizers[name] if name in catalog.optimizers else None
        if entry and entry.takes == "matrices" and role in ROLES and role not in MATRIX_ROLES:
            yield (
                ("optimizer", role),
                f"{name} takes hidden and expert matrices only; give {role} an AdamW, say {entry.rest}",
            )


def _unknown(shelf: object, name: str) -> str:
    try:
        shelf[name]  # type: ignore[index]
    except MemplanError as error:
        return str(error)
    raise AssertionError(name)


def _contradictions(config: TrainingConfig) -> Iterator[tuple[Path, str]]:
    hidden = format_name(config, "hidden_matrix")
    if hidden in FLOAT_BYTES and FLOAT_BYTES[hidden] < FLOAT_BYTES[config.compute_dtype]:
        yield (
            ("compute_dtype",),
            f"{config.compute_dtype} is wider than the weights ({hidden}); torch computes in the weights' dtype",
        )
    if {hidden, config.compute_dtype} == {"bf16", "fp16"}:
        yield ("compute_dtype",), f"weights in {hidden} compute in {hidden}, not in {config.compute_dtype}"
    if config.gradients.lifetime == "layer":
        if config.gradient_accumulation_steps > 1:
            yield (
                ("gradient_accumulation_steps",),
                "gradients released inside backward cannot accumulate; use lifetime: step",
            )
        if config.clip_gradients:
            yield (
                ("clip_gradients",),
                "clipping needs the norm of all gradients before the first update; use lifetime: step",
            )
        if config.zero_gradients == "fill":
            yield (
                ("zero_gradients",),
                "gradients released inside backward leave nothing to fill; use zero_gradients: free",
            )
    if config.adapter is not None and config.master_weights != "none":
        yield ("master_weights",), "with adapters the base weights are frozen and have no master copy"
    if config.adapter is not None and not config.adapter.targets:
        yield ("adapter", "targets"), "expected at least one projection, such as q_proj, or all-linear"


def is_bundled(entry: Optimizer) -> bool:
    """Tell whether the bundled library steps as an optimizer does; it alone takes codes and narrow gradients."""
    return entry.bundled is not None
