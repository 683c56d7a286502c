"""The notes' own test of momentum: one layer of 256 x 256 that learns from a teacher.

Their optimizer is not Muon. It orthogonalises the gradient by five cubic Newton-Schulz steps, gives
the result the gradient's norm, and only then adds it to a momentum ``m = 0.95 m + u``; the layer
moves by ``0.02 * (u + 0.95 m)``. The weights are Q4_0, rounded to nearest in every step. Inputs
and outputs are fp16, so that an output above 65504 is an infinite loss.

Source:
    https://github.com/SQCU/pfhe, scripts/benchmark_muon_lowbit.py, from which the notes come.
"""

from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_reference
from memplan.muon.orthogonalisation.schedules import CUBIC
from memplan.muon.state_codecs.codecs import Codec, Scratch, Stretch, codec_bytes
from memplan.muon.state_codecs.state_formats import momentum_codec
from memplan.muon.weights.weight_codecs import weight_format

WIDTH, BATCH, NOISE = 256, 32, 0.05
TEACHER_DEVIATION, STUDENT_DEVIATION = 0.1, 0.02
RATE, MOMENTUM, ITERATIONS = 0.02, 0.95, 5
STEPS, LAST = 300, 20
SLOT = "momentum_buffer"


class Store(Protocol):
    """Where momentum is between steps."""

    def read(self) -> Tensor:
        """Return what is stored, ``(WIDTH, WIDTH)`` fp32."""

    def write(self, momentum: Tensor) -> None:
        """Store it."""

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of an element, scales included."""


class NotesStore:
    """The notes' quantiser: one range for the tensor, which only ever grows, and no level at zero.

    Where a magnitude exceeds 0.9 of the range, the range becomes 1.2 times that magnitude. An even
    number of levels lies from one end of the range to the other, so that zero falls between two.
    A fresh store reads as the lowest level everywhere, as in the script.
    """

    first_range = 0.01

    def __init__(self, bits: int) -> None:
        self.bits, self.range = bits, self.first_range
        self.codes = torch.zeros(WIDTH, WIDTH, dtype=torch.uint8)

    @property
    def bytes_per_parameter(self) -> float:
        """Packed codes; the one range for the tensor does not count."""
        return self.bits / 8

    @property
    def _step(self) -> float:
        return 2 * self.range / ((1 << self.bits) - 1)

    def read(self) -> Tensor:
        """Return ``code * step - range``."""
        return self.codes.float() * self._step - self.range

    def write(self, momentum: Tensor) -> None:
        """Widen the range if need be, and round to the nearest level."""
        largest = float(momentum.abs().max())
        if largest > 0.9 * self.range:
            self.range = 1.2 * largest
        codes = ((momentum + self.range) / self._step).round().clamp(0, (1 << self.bits) - 1)
        self.codes = codes.nan_to_num(0.0).to(torch.uint8)


class CodecStore:
    """A format of the bundled optimizer."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.elements = codec, WIDTH * WIDTH
        device = torch.device("cpu")
        self.state = Stretch(codec.empty(SLOT, self.elements, device), SLOT, 0, self.elements)
        self.scratch: Scratch = codec.scratch(self.elements, device)

    @property
    def bytes_per_parameter(self) -> float:
        """Codes and scales."""
        return codec_bytes(self.codec, self.elements) / self.elements

    def read(self) -> Tensor:
        """Return the decoded values."""
        values = self.codec.load(self.state, self.scratch)
        return values.view(WIDTH, WIDTH).clone()

    def write(self, momentum: Tensor) -> None:
        """Encode to nearest."""
        values = self.codec.load(self.state, self.scratch)
        values.copy_(momentum.reshape(-1))
        self.codec.store(values, self.state, self.scratch)


def store_of(name: str) -> Store:
    """Return an empty store: ``notes-8``, ``-4``, ``-3`` or ``-2``, or a format of the bundled optimizer."""
    if name.startswith("notes-"):
        return NotesStore(int(name.removeprefix("notes-")))
    return CodecStore(momentum_codec(name))


@dataclass(frozen=True, slots=True)
class StudentRun:
    """Losses of every step, up to the first that is not finite."""

    losses: tuple[float, ...]

    @property
    def first_bad_step(self) -> int | None:
        """The step, from 1 on, whose loss was not finite."""
        return None if isfinite(self.losses[-1]) else len(self.losses)

    @property
    def loss(self) -> float:
        """Mean of the last losses, as the notes take it; infinite where one is not finite."""
        return fmean(self.losses[-LAST:]) if self.first_bad_step is None else float("inf")


@torch.no_grad()
def student_run(momentum: str, weights: str, seed: int, steps: int = STEPS) -> StudentRun:
    """Train the student once.

    Args:
        weights: ``q4-0``, rounded to nearest in each step, or ``fp32``.
        seed: Of teacher, student and data.
        steps: At most.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    teacher = normal(WIDTH, WIDTH) * TEACHER_DEVIATION
    student = _stored(normal(WIDTH, WIDTH) * STUDENT_DEVIATION, weights)
    store, losses = store_of(momentum), []
    for _ in range(steps):
        inputs = _half(normal(BATCH, WIDTH))
        target = _half(torch.tanh(inputs @ teacher)) + NOISE * normal(BATCH, WIDTH)
        error = _half(inputs @ student.T) - target
        losses.append(float(error.square().mean()))
        if not isfinite(losses[-1]):
            break
        gradient = error.T @ inputs * (2 / error.numel())
        update = newton_schulz_reference(gradient, CUBIC * ITERATIONS, torch.float32)
        update *= gradient.norm() / (update.norm() + 1e-7)
        store.write(MOMENTUM * store.read() + update)
        student = _stored(student - RATE * (update + MOMENTUM * store.read()), weights)
    return StudentRun(tuple(losses))


def _half(values: Tensor) -> Tensor:
    """Return values as fp16 holds them: infinite above 65504."""
    return values.half().float()


def _stored(weights: Tensor, format: str) -> Tensor:
    """Return weights as they come back from their format."""
    if format == "fp32":
        return weights
    chosen = weight_format(format)
    blocks = torch.zeros(weights.numel() // chosen.block_elements, chosen.block_bytes, dtype=torch.uint8)
    chosen.encode_(weights.reshape(-1), blocks)
    return chosen.decode_(blocks, torch.empty(weights.numel())).view(weights.shape)
