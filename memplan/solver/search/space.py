"""The settings that a search may choose from, and what fixes some of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Status
from memplan.catalog.kernel_profiles import LossKernel, NewtonSchulzKernel, OptimizerKernel
from memplan.catalog.training_config import (
    Allocator,
    CheckpointedLayers,
    Checkpointing,
    ComputeDtype,
    GradientLifetime,
    Gradients,
    MasterWeights,
    Place,
    TrainingConfig,
)
from memplan.catalog.update_classes import is_bundled
from memplan.documents.frozen_values import dataclass
from memplan.solver.search.cluster import Cluster
from memplan.step.states.update_algorithms import depends_on_kernel
from memplan.training.resolved import FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """How weights are stored and computed with."""

    name: str
    dtype: str  # Format of hidden matrices
    formats: Mapping[str, str]
    compute_dtype: ComputeDtype
    loss_scaling: bool
    coded: bool  # Whether hidden matrices are in a block format and so trained without being floats


@dataclass(frozen=True, slots=True)
class StateChoice:
    """The persistent states, how they are updated, and whether optimizer states are in host memory."""

    weights: WeightChoice
    master: MasterWeights
    gradient: str | None
    optimizer: Mapping[str, str]
    optimizer_kernel: OptimizerKernel
    newton_schulz: NewtonSchulzKernel
    offload: Place = "none"


@dataclass(frozen=True, slots=True)
class PassChoice:
    """How forward and backward run."""

    lifetime: GradientLifetime
    checkpointing: Checkpointing
    loss: LossKernel
    allocator: Allocator


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination that a search considers."""

    base: TrainingConfig  # Config whose other keys all combinations share
    weights: tuple[WeightChoice, ...]
    masters: tuple[MasterWeights, ...]
    gradients: tuple[str | None, ...]
    lifetimes: tuple[GradientLifetime, ...]
    optimizers: tuple[Mapping[str, str], ...]
    optimizer_kernels: tuple[OptimizerKernel, ...]
    newton_schulz: tuple[NewtonSchulzKernel, ...]
    checkpointing: tuple[Checkpointing, ...]
    losses: tuple[LossKernel, ...]
    allocators: tuple[Allocator, ...]
    batches: tuple[int, ...]
    offloads: tuple[Place, ...] = ("none",)
    # Least sequences per optimizer step; each micro-batch takes the fewest accumulation steps that reach it.
    step_batch: int = 1
    accumulation: int | None = None  # Accumulation steps, where they are fixed
    host_bytes: int | None = None  # Host memory that offloaded states may take; None for any amount
    cluster: Cluster | None = None  # Where several GPUs are; None for nodes of eight of the vendor's own

    @property
    def axes(self) -> tuple[Sequence[object], ...]:
        """The choices of each axis."""
        return (
            self.weights,
            self.masters,
            self.gradients,
            self.lifetimes,
            self.optimizers,
            self.optimizer_kernels,
            self.newton_schulz,
            self.checkpointing,
            self.losses,
            self.allocators,
            self.batches,
            self.offloads,
        )

    @property
    def size(self) -> int:
        """Combinations before any is ruled out: the product of the axes."""
        return prod(map(len, self.axes))

    def steps(self, batch: int) -> int:
        """Return the accumulation steps that go with a micro-batch on each GPU."""
        return self.accumulation or -(-self.step_batch // (batch * self.base.parallel.data))

    def config(
        self, state: StateChoice, way: PassChoice, batch: int, description: str = "", status: Status = "works"
    ) -> TrainingConfig:
        """Return a combination as a complete training config."""
        kernels = replace(
            self.base.kernels, optimizer=state.optimizer_kernel, newton_schulz=state.newton_schulz, loss=way.loss
        )
        return replace(
            self.base,
            description=description or self.base.description,
            status=status,
            evidence=None,
            weights=state.weights.formats,
            compute_dtype=state.weights.compute_dtype,
            loss_scaling=state.weights.loss_scaling,
            master_weights=state.master,
            gradients=Gradients(state.gradient, way.lifetime),
            optimizer=state.optimizer,
            activation_checkpointing=way.checkpointing,
            checkpointed_layers=self.base.checkpointed_layers if way.checkpointing == "full" else CheckpointedLayers(),
            kernels=kernels,
            allocator=way.allocator,
            offload=replace(self.base.offload, optimizer_states=state.offload),
            micro_batch_size=batch,
            gradient_accumulation_steps=self.steps(batch),
        )

    def states(self, catalog: Catalog) -> Iterator[StateChoice]:
        """Yield the choices of persistent states, without duplicates and contradictions.

        A kernel that no optimizer of the combination runs stays at its first choice.
        """
        for weights in self.weights:
            for optimizer in self.optimizers:
                entries = [catalog.optimizers[name] for name in optimizer_names(optimizer, catalog)]
                able = all(map(is_bundled, entries))
                bundled = len(self.optimizers) == 1 or able
                if weights.coded and not bundled:
                    continue
                torch = any(map(depends_on_kernel, entries))
                muon = any(e.orthogonalises for e in entries)
                parts = product(
                    _masters(self.masters, weights, torch and not muon),
                    _gradients(self.gradients, weights, bundled, catalog),
                    self.optimizer_kernels if torch else self.optimizer_kernels[:1],
                    self.newton_schulz if muon else self.newton_schulz[:1],
                    self.offloads,
                )
                for master, gradient, kernel, newton_schulz, offload in parts:
                    state = StateChoice(weights, master, gradient, optimizer, kernel, newton_schulz, offload)
                    if offload == "none" or (able and self._offloads(state, muon)):
                        yield state

    def _offloads(self, state: StateChoice, muon: bool) -> bool:
        """Tell whether the bundled optimizer can step a combination, which then runs none of torch's kernels."""
        first = state.optimizer_kernel == self.optimizer_kernels[0]
        return first and state.master == "none" and not (muon and state.newton_schulz == "torch")

    def passes(self) -> Iterator[PassChoice]:
        """Yield how forward and backward may run."""
        for parts in product(self.lifetimes, self.checkpointing, self.losses, self.allocators):
            yield PassChoice(*parts)

    def allowed(self, way: PassChoice, batch: int) -> bool:
        """Tell whether a batch goes with a pass: gradients that are released at once cannot accumulate."""
        return way.lifetime == "step" or self.steps(batch) == 1


def as_meant(space: Space) -> Space:
    """Return a space in which adapters stay on weights of the kind that the base has them on: floats, or codes."""
    base = space.base
    if base.adapter is None or len(space.weights) == 1:
        return space
    hidden = base.weights.get("hidden_matrix", base.weights.get("default", base.compute_dtype))
    kind = tuple(choice for choice in space.weights if choice.coded == (hidden not in FLOAT_BYTES))
    return replace(space, weights=kind) if kind else space


def without_bf16(space: Space) -> Space:
    """Return a space for a card that only emulates bf16: fp16 with a loss scale takes its place; what is fixed stays."""
    weights = space.weights
    if len(weights) > 1:
        retained = (choice for choice in weights if choice.coded or choice.dtype != "bf16")
        weights = tuple(_in_fp16(choice) if choice.compute_dtype == "bf16" else choice for choice in retained)
    fixed = len(space.gradients) == 1
    gradients = space.gradients if fixed else tuple(name for name in space.gradients if name != "bf16")
    base, adapter = space.base, space.base.adapter
    if adapter is not None and adapter.dtype == "bf16":
        base = replace(base, adapter=replace(adapter, dtype="fp32"))
    return replace(space, base=base, weights=weights, gradients=gradients)


def _in_fp16(choice: WeightChoice) -> WeightChoice:
    formats = {role: "fp16" if name == "bf16" else name for role, name in choice.formats.items()}
    name = choice.name.replace("bf16", "fp16")
    return replace(choice, name=name, formats=formats, compute_dtype="fp16", loss_scaling=True)


def optimizer_names(optimizer: Mapping[str, str], catalog: Catalog) -> tuple[str, ...]:
    """Return the optimizers of a mapping, that of hidden matrices first, those for the remaining parameters included."""
    first = optimizer.get("hidden_matrix", optimizer.get("default", ""))
    names = []
    for given in dict.fromkeys((first, *optimizer.values())):
        name = catalog.optimizers.name_of(given)
        entry = catalog.optimizers[name]
        names += [name, *([entry.rest] if entry.takes == "matrices" and entry.rest is not None else [])]
    return tuple(dict.fromkeys(names))


def _masters(choices: Sequence[MasterWeights], weights: WeightChoice, torch: bool) -> Iterator[MasterWeights]:
    """Yield master weights wider than the weights, for torch's AdamW; with coded weights, bf16 weights would cost less."""
    for choice in choices:
        wider = torch and not weights.coded and FLOAT_BYTES.get(choice, 0) > FLOAT_BYTES[weights.dtype]
        if len(choices) == 1 or choice == "none" or wider:
            yield choice


def _gradients(
    choices: Sequence[str | None], weights: WeightChoice, bundled: bool, catalog: Catalog
) -> Iterator[str | None]:
    """Yield gradient dtypes, without the weights' own under another name and narrow ones that no optimizer supports.

    torch stores no 16-bit gradient of an fp32 weight.
    """
    own = weights.compute_dtype if weights.coded else weights.dtype
    for choice in choices:
        if len(choices) == 1 or choice is None:
            yield choice
        elif choice != own:
            width, formed = catalog.gradients[choice].element_bytes, FLOAT_BYTES[own]
            if width > formed or (width == 1 and bundled):
                yield choice
