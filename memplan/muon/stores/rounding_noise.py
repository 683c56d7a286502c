"""Random numbers for rounding: drawn anew for each step, or phases that advance by the golden ratio.

A weight that moves by ``u`` levels a step, and is rounded down after a number in [0, 1) was added, moves by ``u`` on
average. With independent numbers ``T`` steps are off by ``sqrt(T * u * (1 - u))`` levels. With
``frac(phase + T / golden ratio)``, the phase of each element drawn once from (seed, parameter), they are off by about
one level, and by ``1.2 + 0.35 * ln(T)`` at worst (measured); no sequence does better than the logarithm. Phases are
drawn again in every step rather than stored, so that they take no bytes.

Source:
    Schmidt, Irregularities of distribution VII, Acta Arithmetica 21 (1972): the logarithm.
    Roberts, The unreasonable effectiveness of quasirandom sequences (2018): the golden ratio in one dimension.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

ADVANCE = (sqrt(5) - 1) / 2
"""What phases advance by in a step: the golden ratio's inverse, whose multiples fill [0, 1) most evenly."""
SEED_STEP = 1_000_003
_TAG = 0x9E3779B9
"""Sets the phases apart from the numbers drawn for single steps."""


class Phases(torch.Generator):
    """A generator that draws the same numbers in every step, which ``uniform`` and ``random_bits_`` advance."""

    shift: float = 0.0  # How far the phases have come, in [0, 1)


def seed_of(first: int, second: int) -> int:
    """Return a generator's seed from two numbers, of any size."""
    return (first * SEED_STEP + second) % (1 << 63)


def phases_of(device: torch.device, seed: int, place: int, step: Tensor | int) -> Phases:
    """Return the phases of a parameter, by its place among all, at a step; without a shift where there is no memory."""
    without = device.type == "meta"
    phases = Phases("cpu" if without else device)
    phases.manual_seed(seed_of(seed * SEED_STEP + place, _TAG))
    phases.shift = 0.0 if without else int(step) * ADVANCE % 1.0
    return phases


def uniform(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Return fp32 numbers in [0, 1), phases advanced."""
    numbers = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
    return numbers.add_(generator.shift).frac_() if isinstance(generator, Phases) else numbers


def random_bits_(out: Tensor, generator: torch.Generator) -> Tensor:
    """Fill ``out``, int32, with numbers of 16 bits, phases advanced."""
    out.random_(0, 1 << 16, generator=generator)
    if isinstance(generator, Phases):
        out.add_(int(generator.shift * (1 << 16))).bitwise_and_((1 << 16) - 1)
    return out
