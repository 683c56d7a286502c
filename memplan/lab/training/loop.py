"""Training itself: text that every machine has, and one seed after another, each a loss curve, a validation loss, and bytes."""

import hashlib
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import cos, isfinite, pi
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memplan.documents.opening import files_in, read_bytes
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.lab.training.optimizer_groups import (
    optimizer_for,
    refuse_unsupported,
    refuse_unused_formats,
    with_momentum,
)
from memplan.lab.training.run_bytes import Comparison, comparisons, measured_bytes, planned_bytes
from memplan.lab.training.trained_model import TrainedModel, fast_products, trained_model
from memplan.model.model import Model
from memplan.muon import Muon
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.trace.jobs.reference_job import batch_of
from memplan.training.resolved import TrainingSetup

VOCABULARY = 256
"""Tokens are bytes."""

TRAINING_BYTES = 4 << 20
VALIDATION_BYTES = 1 << 18
VALIDATION_EVERY = 10
"""Every tenth file is for validation: no file is in both parts."""


@dataclass(frozen=True, slots=True)
class Text:
    """Two disjoint parts of one text."""

    training: Tensor  # Bytes (tokens,), uint8
    validation: Tensor  # Likewise
    source: str  # Where it is from
    digest: str  # First digits of the SHA-256 of both parts, since Python releases differ


def library_text(folder: Path | None = None) -> Text:
    """Return the top-level modules of Python's library, in the order of their names.

    Args:
        folder: Where the ``.py`` files are; by default where this Python keeps its own.

    Raises:
        CannotAnswerError: There is too little text to train on.
    """
    where = folder or Path(sysconfig.get_paths()["stdlib"])
    files = files_in(where, "*.py")
    training_sources = [read_bytes(path) for index, path in enumerate(files) if index % VALIDATION_EVERY]
    validation_sources = [read_bytes(path) for path in files[::VALIDATION_EVERY]]
    training, validation = b"".join(training_sources)[:TRAINING_BYTES], b"".join(validation_sources)[:VALIDATION_BYTES]
    if min(len(training), len(validation)) < 1 << 14:
        raise CannotAnswerError(f"no text to train on: {where} holds too few Python sources")
    digest = hashlib.sha256(training + validation).hexdigest()[:16]
    return Text(_tensor(training), _tensor(validation), "top-level modules of Python's standard library", digest)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def random_windows(text: Tensor, batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (batch, tokens) int64, from random places of ``text``."""
    starts = torch.randint(0, text.numel() - tokens - 1, (batch,), generator=generator)
    return windows_at(text, starts, tokens)


def windows_at(text: Tensor, starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that begin at ``starts``."""
    windows = text[starts[:, None] + torch.arange(tokens + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def even_windows(text: Tensor, count: int, batch: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``count`` windows spread evenly over ``text``, ``batch`` at a time; always the same ones."""
    starts = torch.linspace(0, text.numel() - tokens - 2, count).long()
    for part in torch.split(starts, batch):
        yield windows_at(text, part, tokens)


Rounding = Literal["nearest", "stochastic", "golden"]
Progress = Callable[[int, float], None]
"""Is told of steps done, and the loss of the last."""

VALIDATION_WINDOWS = 256
WARMUP_STEPS = 10


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What a run needs besides a model and a setup."""

    steps: int = 300  # Optimizer steps
    lr: float = 0.02  # Largest learning rate of Muon
    adamw_lr: float = 0.006  # Largest learning rate of AdamW
    weight_decay: float = 0.0  # Decoupled, for all weights
    rounding: Rounding = "nearest"  # Of weights that are not fp32
    momentum_format: str | None = None  # Of Muon's momentum; None is the config's own
    matrix_options: Mapping[str, Any] = field(default_factory=dict)  # More keys of Muon's parameter groups
    device: str = "cpu"  # ``cpu`` or ``cuda``
    validation_windows: int = VALIDATION_WINDOWS  # Windows of the validation text that a loss is the mean of


@dataclass(frozen=True, slots=True)
class Run:
    """What one seed gave."""

    seed: int
    losses: tuple[float, ...]  # Training loss of each step; it ends early where it stopped being finite
    validation_loss: float  # Mean cross-entropy in nats per byte after the last step
    first_validation_loss: float  # The same before the first
    tokens: int
    seconds: float  # Of all steps together, without validation
    bytes: tuple[Comparison, ...]  # Planned and measured, component by component

    @property
    def tokens_per_second(self) -> float:
        """Throughput of training."""
        return self.tokens / self.seconds if self.seconds else 0.0


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: up over ``WARMUP_STEPS``, then down to 0 by a cosine.

    Formula:
        ``min((step + 1) / WARMUP_STEPS, 1) * (1 + cos(pi * step / steps)) / 2``
    """
    return min((step + 1) / WARMUP_STEPS, 1.0) * (1 + cos(pi * step / steps)) / 2


class Trainer:
    """A model, its optimizer and its text.

    Args:
        seed: Of weights, batches and rounding.

    Raises:
        CannotAnswerError: The setup cannot be trained here.
        InvalidFileError: A format of momentum that does not go with it.
    """

    def __init__(self, model: Model, setup: TrainingSetup, options: TrainingOptions, text: Text, seed: int) -> None:
        if model.spec.vocab_size < VOCABULARY:
            raise InvalidFileError(
                [f"vocab_size: {model.spec.vocab_size}: text is bytes, which need {VOCABULARY} tokens"]
            )
        refuse_unsupported(setup)
        refuse_unused_formats(model, setup)
        self.setup = with_momentum(setup, options.momentum_format)
        self.options, self.text = options, text
        self.trained: TrainedModel = trained_model(model, setup, seed, options.device)
        more = dict(options.matrix_options)
        if options.momentum_format is not None:
            more["momentum_format"] = options.momentum_format
        shared = {"weight_decay": options.weight_decay, "rounding": options.rounding}
        self.rates = {"muon": options.lr, "adamw": options.adamw_lr}
        self.optimizer: Muon = optimizer_for(self.trained, setup, self.rates, shared, more, seed)
        self.planned = planned_bytes(model, self.setup)
        self.measured: dict[str, int] = {}
        config, run = setup.config, self.trained.module.run
        self.batch, self.length = config.micro_batch_size, config.sequence_length
        self.tables = batch_of(model.spec, run.options, self.batch, self.length, options.device).tables
        self.generator = torch.Generator().manual_seed(seed)
        self.loss_scale = LossScale() if config.loss_scaling else None

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a batch."""
        device = self.options.device
        loss: torch.Tensor = self.trained.module(inputs.to(device), targets.to(device), self.tables)
        return loss

    def step(self, number: int) -> float:
        """Take one optimizer step and return its loss; the step is left out where scaled gradients overflow."""
        factor = rate_factor(number, self.options.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[group["algorithm"]] * factor
        parts = self.setup.config.gradient_accumulation_steps
        scale = 1.0 if self.loss_scale is None else self.loss_scale.factor
        total = 0.0
        for part in range(parts):
            loss = self.loss(*random_windows(self.text.training, self.batch, self.length, self.generator)) / parts
            if part + 1 < parts:
                with self.optimizer.accumulating():
                    (loss * scale).backward()  # type: ignore[no-untyped-call]
            else:
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if not self.measured:
            self.measured = measured_bytes(self.trained, self.optimizer)
        if self.loss_scale is None or self.loss_scale.divide_(self._gradients()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _gradients(self) -> list[torch.Tensor]:
        keys = (handle.key for handle, _ in self.optimizer.handles())
        return [key.grad for key in keys if key.grad is not None]

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss over fixed windows of the validation text."""
        self.trained.module.eval()
        count = self.options.validation_windows
        windows = even_windows(self.text.validation, count, self.batch, self.length)
        losses = [(float(self.loss(*pair)), pair[0].shape[0]) for pair in windows]
        self.trained.module.train()
        return sum(loss * part for loss, part in losses) / count


def train(
    model: Model,
    setup: TrainingSetup,
    options: TrainingOptions,
    text: Text,
    seed: int,
    progress: Progress | None = None,
) -> Run:
    """Train a model from fresh weights.

    A loss or gradient that is not finite ends the run, whose validation loss is then infinite.
    """
    return trained(Trainer(model, setup, options, text, seed), seed, progress)


def trained(trainer: Trainer, seed: int, progress: Progress | None = None) -> Run:
    """Take every step of a trainer; as ``train``, for those who change something about it first."""
    with fast_products(trainer.options.device, trainer.setup.config.compute_dtype):
        return _trained(trainer, seed, progress)


def _trained(trainer: Trainer, seed: int, progress: Progress | None = None) -> Run:
    first = trainer.validation_loss()
    losses: list[float] = []
    began = time.perf_counter()
    for number in range(trainer.options.steps):
        try:
            losses.append(trainer.step(number))
        except OptimizerError:  # it refuses gradients that are not finite
            losses.append(float("inf"))
        if not isfinite(losses[-1]):
            break
        if progress is not None:
            progress(number + 1, losses[-1])
    seconds = time.perf_counter() - began
    last = trainer.validation_loss() if losses and isfinite(losses[-1]) else float("inf")
    tokens = len(losses) * trainer.batch * trainer.length * trainer.setup.config.gradient_accumulation_steps
    compared = comparisons(trainer.planned, trainer.measured)
    return Run(seed, tuple(losses), last, first, tokens, seconds, compared)


INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class LossScale:
    """A dynamic loss scale: halved where a gradient overflows, doubled after enough steps where none does.

    ``torch.amp.GradScaler`` does the same with fp32 gradients and refuses those in fp16, which
    weights in fp16 have.

    Attributes:
        factor: What the loss is multiplied by now.

    Source:
        https://docs.pytorch.org/docs/2.13/amp.html (initial scale, growth interval and factors).
    """

    def __init__(self) -> None:
        self.factor = INITIAL_SCALE
        self._good_steps = 0

    def divide_(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the scale, in place, and return whether all are finite; adapt the scale.

        Where one is not, the step is to be left out and the gradients are of no use.
        """
        scaled = list(gradients)
        if not all(bool(gradient.isfinite().all()) for gradient in scaled):
            self.factor, self._good_steps = self.factor / 2, 0
            return False
        for gradient in scaled:
            gradient.div_(self.factor)
        self._good_steps += 1
        if self._good_steps % GROWTH_INTERVAL == 0:
            self.factor *= 2
        return True
