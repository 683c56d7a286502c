"""The training job of a reference model, and what its steps are given."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from memplan.model.inventory import ROLES, expanded
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import Attention, ModelSpec
from memplan.trace.jobs import optimizers, training_job
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.jobs.training_job import Job, Watcher
from memplan.trace.recording import valueless_tensors
from memplan.trace.recording.trace_result import Component
from memplan.trace.reference import operations, run_options, weight_storage
from memplan.trace.reference.decoder import ReferenceModel
from memplan.trace.reference.parts import Tables
from memplan.trace.reference.run_options import TORCH_DTYPES, ReferenceOptions, Target
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.stack_models import text_spec


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch and its tables."""

    ids: Tensor  # Tokens (batch, tokens)
    targets: Tensor  # Tokens to predict, already shifted
    tables: tuple[Tables, ...]  # One for each rotary base
    positions: Tensor | None  # Positions (1, tokens) for learned position embeddings

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from (self.ids, self.targets)
        for table in self.tables:
            yield from (tensor for tensor in table if tensor is not None)
        if self.positions is not None:
            yield self.positions


def batch_of(spec: ModelSpec, options: ReferenceOptions, batch: int, tokens: int, device: str) -> Batch:
    """Return a batch of ``batch`` sequences of ``tokens`` tokens."""
    ids = torch.zeros((batch, tokens), dtype=torch.long, device=device)
    positions = torch.arange(tokens, device=device)[None] + spec.reserved_positions if spec.learned_positions else None
    return Batch(ids, torch.zeros_like(ids), _tables(spec, tokens, options, device), positions)


def _tables(spec: ModelSpec, tokens: int, options: ReferenceOptions, device: str) -> tuple[Tables, ...]:
    """Return the rotary tables for ``tokens`` positions, in the compute dtype, and a mask where one is needed."""
    mask = None
    if any(isinstance(run.layer.attention, Attention) and _eager(run.layer.attention) for run in spec.runs):
        mask = torch.ones((tokens, tokens), dtype=torch.bool, device=device).triu(1)
    parts = [run.layer.attention for run in spec.runs]
    widths = [
        part.rotary_dim if isinstance(part, Attention) else getattr(part, "qk_rope_head_dim", 0) for part in parts
    ]
    width = max(widths)
    if not width:
        return (Tables(torch.empty(0, device=device), torch.empty(0, device=device), mask),)
    steps = torch.arange(0, width, 2, device=device).float() / width
    angles = torch.outer(torch.arange(tokens, device=device).float(), 1.0 / 10000.0**steps)
    angles = torch.cat((angles, angles), -1)
    dtype = options.compute_dtype
    return tuple(Tables(angles.cos().to(dtype), angles.sin().to(dtype), mask) for _ in range(spec.rotary_tables))


def _eager(part: Attention) -> bool:
    return part.sinks or part.logit_softcap > 0


def skipped_files() -> tuple[str, ...]:
    """Return the files whose lines explain nothing about a model."""
    helpers = (training_job, operations, optimizers, run_options, valueless_tensors, weight_storage)
    return (__file__, *(str(module.__file__) for module in helpers))


def reference_options(setup: TrainingSetup, spec: ModelSpec, target: Target = "cuda") -> ReferenceOptions:
    """Return how the reference model runs under ``setup``."""
    config, compute = setup.config, TORCH_DTYPES[setup.config.compute_dtype]
    floats = {role: TORCH_DTYPES[name] for role, name in setup.format_names.items() if name in TORCH_DTYPES}
    return ReferenceOptions(
        profile=setup.profile,
        compute_dtype=compute,
        autocast=setup.autocast,
        checkpointing=setup.checkpointing,
        checkpointed_layers=config.checkpointed_layers,
        dropout=spec.dropout if config.dropout is None else config.dropout,
        attention_dropout=spec.attention_dropout if config.dropout is None else config.dropout,
        target=target,
        dtypes=floats,
        coded={role: setup.formats[role] for role in ROLES if setup.format_names[role] not in FLOAT_BYTES},
        adapter=config.adapter,
    )


class Session(Job):
    """A reference model in training.

    Args:
        device: ``meta`` to trace, ``cpu`` or ``cuda`` to run.
    """

    model: ReferenceModel

    def __init__(self, spec: ModelSpec, setup: TrainingSetup, device: str = "meta", target: Target = "cuda") -> None:
        spec = text_spec(spec)
        options = reference_options(setup, spec, target)
        model = self.built(spec, options, device)
        if device != "meta":
            model.initialise()
        config = setup.config
        self.batch = batch_of(spec, options, config.micro_batch_size, config.sequence_length, device)
        super().__init__(model, setup, list(_trained(model, config.gradients.dtype)), device, target)

    def built(self, spec: ModelSpec, options: ReferenceOptions, device: str) -> ReferenceModel:
        """Return the model."""
        return ReferenceModel(spec, options, device)

    def loss(self) -> Tensor:
        """Return the loss of one micro-batch."""
        batch = self.batch
        loss: Tensor = self.model(batch.ids, batch.targets, batch.tables, batch.positions)
        return loss

    def evaluate(self) -> None:
        """Run the model, which drops nothing, on the micro-batch, or on rows beside it where a number of them is given."""
        trained = self.batch
        rows = self.config.evaluation_batch_size
        if rows is not None:
            ids = trained.ids.new_zeros((rows, trained.ids.shape[1]))
            self.batch = replace(trained, ids=ids, targets=ids.clone())
        self.model.eval()
        self.loss()
        self.model.train()
        self.batch = trained

    def tensors(self) -> Iterator[tuple[str, Tensor, Component]]:
        """Yield weights, buffers and data."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            is_weight = isinstance(tensor, nn.Parameter) or id(tensor) in self.model.run.coded
            yield name, tensor, "weights" if is_weight else "buffers"
        for tensor in (*self.batch.tensors(), *self._code_tables()):
            yield "", tensor, "buffers"

    def _code_tables(self) -> Iterator[Tensor]:
        """Yield the tables that decoding reads, once for each format."""
        matrices = [weight.matrix for weight in self.model.run.coded.values() if weight.matrix is not None]
        for matrix in {matrix.format.name: matrix for matrix in matrices}.values():
            yield from matrix.tables()

    def watch(self, watcher: Watcher) -> None:
        """Let ``watcher`` see what there is, what the model does, and every gradient as it is finished."""
        self.model.run.probe = watcher
        super().watch(watcher)


def _trained(model: ReferenceModel, gradient: str | None) -> Iterator[Trained]:
    """Yield the weights that are trained, in the order of the model, adapters last."""
    roles = {name: tensor.role for name, tensor in expanded(inventory_of(model.spec))}
    keeps = None if gradient is None else TORCH_DTYPES[gradient]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    order = [name for name in roles if name in tensors] + [name for name in tensors if name not in roles]
    for name in order:
        tensor = tensors[name]
        weight = model.run.coded.get(id(tensor))
        if weight.trained if weight is not None else tensor.requires_grad:
            shape = tuple(tensor.shape) if weight is None else weight.shape
            role = roles.get(name, "hidden_matrix" if len(shape) > 1 else "norm")
            yield Trained(name, role, shape, tensor, weight, keeps)
