"""Loss against bits, levels and range of Adam's second moment, the notes' own quantiser included."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor

from memplan.catalog.catalog import Catalog
from memplan.lab.experiment_record import Row
from memplan.lab.learning.variants import Size, Task, Variant, chosen, comparison_task, lab_setup, percent_text
from memplan.lab.training.loop import Trainer, TrainingOptions
from memplan.report.experiments import row_of

BLOCK = 128
ADAMW_RATE = 0.002
"""Best of 0.001, 0.002, 0.004, 0.006, 0.008 and 0.012 for the tiny model under AdamW, on a seed of its own."""

NOTES_RANGE = (-90.0, -10.0)
"""Natural logarithms that the notes' kernel spans, for every tensor alike.

Source: https://github.com/SQCU/pfhe, scripts/benchmark_optimizer_variants.py; it cuts off instead of rounding.
"""


@dataclass(frozen=True, slots=True)
class Quantiser:
    """How the second moment is stored."""

    bits: int  # Of each code
    scales: int  # fp32 numbers that a block of 128 has besides
    # Replaces a block's numbers, (blocks, 128), by those that its codes stand for.
    rounded: Callable[[Tensor, int], Tensor]

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of an element."""
        return self.bits / 8 + 4 * self.scales / BLOCK


def linear_with_zero(rows: Tensor, bits: int) -> Tensor:
    """Return the nearest of ``2**bits`` levels, evenly from 0 to the block's largest number."""
    step = rows.amax(dim=1, keepdim=True).clamp_min(1e-38) / (2**bits - 1)
    nearest: Tensor = (rows / step).round_() * step
    return nearest


def linear_without_zero(rows: Tensor, bits: int) -> Tensor:
    """Return the nearest of ``2**bits`` levels, evenly up to the block's largest number, zero not among them.

    Source:
        https://arxiv.org/abs/2309.01507, section 4.1; torchao's AdamW4bit has the same levels.
    """
    step = rows.amax(dim=1, keepdim=True).clamp_min(1e-38) / 2**bits
    nearest: Tensor = (rows / step).round_().clamp_(1, 2**bits) * step
    return nearest


def logarithmic(rows: Tensor, bits: int) -> Tensor:
    """Return the nearest of ``2**bits`` powers, evenly in the logarithm from the block's smallest number to its largest."""
    logs = rows.clamp_min(1e-38).log()
    low, high = logs.amin(dim=1, keepdim=True), logs.amax(dim=1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    nearest: Tensor = (((logs - low) / step).round_() * step + low).exp_()
    return nearest


def notes_logarithmic(rows: Tensor, bits: int) -> Tensor:
    """Return what the notes' kernel stores: a logarithm cut off to one of ``2**bits`` levels of a fixed range."""
    low, high = NOTES_RANGE
    step = (high - low) / (2**bits - 1)
    logs = rows.clamp_min(exp(low) if low > -87 else 1e-38).log().clamp_(low, high)
    level: Tensor = (((logs - low) / step).floor_() * step + low).exp_()
    return level


QUANTISERS: dict[str, Quantiser] = {
    "linear-8": Quantiser(8, 1, linear_with_zero),
    "linear-4": Quantiser(4, 1, linear_with_zero),
    "linear-8-no-zero": Quantiser(8, 1, linear_without_zero),
    "linear-4-no-zero": Quantiser(4, 1, linear_without_zero),
    "linear-3-no-zero": Quantiser(3, 1, linear_without_zero),
    "log-4": Quantiser(4, 2, logarithmic),
    "log-3": Quantiser(3, 2, logarithmic),
    "log-2": Quantiser(2, 2, logarithmic),
    "notes-log-3": Quantiser(3, 0, notes_logarithmic),
}


def adam_bits(
    catalog: Catalog, size: Size, seeds: Sequence[int], moments: Sequence[str] = (), device: str = "cpu"
) -> Task:
    """Return the experiment.

    Args:
        moments: Of ``QUANTISERS``; all by default.

    Raises:
        UnknownNameError: A name is not known.
    """
    names = chosen("quantiser of the second moment", moments, ("fp32", *QUANTISERS), "fp32")
    variants = [variant_of(name, catalog, size, device) for name in names]
    settings = {
        "block_elements": BLOCK,
        "adamw_lr": ADAMW_RATE,
        "stored": "second moments of all matrices are rounded to their codes after every step; the rest is fp32",
    }
    return comparison_task("adam-bits", variants, size, seeds, settings, findings)


def variant_of(name: str, catalog: Catalog, size: Size, device: str) -> Variant:
    """Return the model under AdamW with its second moments kept in one way."""
    quantiser = QUANTISERS.get(name)
    keys = {"second_moment": name, "bytes_per_parameter": quantiser.bytes_per_parameter if quantiser else 4.0}
    options = TrainingOptions(steps=size.steps, adamw_lr=ADAMW_RATE, device=device)
    setup = lab_setup(catalog, size, matrices="adamw-fp32")
    return Variant(keys, setup, options, None if quantiser is None else rounding(quantiser))


def rounding(quantiser: Quantiser) -> Callable[[Trainer], None]:
    """Return a hook that rounds every matrix's second moment after each step."""

    @torch.no_grad()
    def store(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            moment = state["exp_avg_sq"]
            if moment.ndim > 1:
                moment.copy_(stored(moment, quantiser))

    def prepare(trainer: Trainer) -> None:
        trainer.optimizer.register_step_post_hook(store)

    return prepare


def stored(moment: Tensor, quantiser: Quantiser) -> Tensor:
    """Return a second moment, of the same shape, after it has been stored in blocks and read back."""
    flat = moment.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    parts = [quantiser.rounded(flat[:whole].view(-1, BLOCK), quantiser.bits).view(-1)]
    if whole < flat.numel():
        parts.append(quantiser.rounded(flat[whole:].view(1, -1), quantiser.bits).view(-1))
    return torch.cat(parts).view(moment.shape)


def findings(rows: Sequence[Row]) -> list[str]:
    """Return what follows from the rows that are there."""
    gaps = {row["second_moment"]: percent_text(row["gap_percent"]) for row in rows}
    sentences = []
    for bits in (8, 4):
        plain, without = gaps.get(f"linear-{bits}"), gaps.get(f"linear-{bits}-no-zero")
        if plain and without:
            sentences.append(f"{bits} bits, evenly spaced: {plain} with zero among the levels, {without} without it.")
    spaced = [f"{bits} bits {gaps[f'log-{bits}']}" for bits in (4, 3, 2) if f"log-{bits}" in gaps]
    if spaced:
        sentences.append(f"Logarithmic levels between each block's own extremes: {', '.join(spaced)}.")
    notes = row_of(rows, second_moment="notes-log-3")
    if notes:
        sentences.append(
            f"The notes' 3-bit kernel, one range for all tensors and cut off: {percent_text(notes['gap_percent'])}; "
            "they conclude that log space does not save 3 bits, which is true of their kernel only."
        )
    return sentences
