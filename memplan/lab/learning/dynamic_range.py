"""What optimizer states and Newton-Schulz' matrix really span while a tiny language model learns."""

from collections.abc import Mapping, Sequence
from math import ceil, inf, log, log2
from typing import Any

import torch
from torch import Tensor

from memplan.catalog.catalog import Catalog
from memplan.lab.experiment_record import Outcome, Progress, Row, interval
from memplan.lab.learning.variants import LIMITS, Size, Task, lab_setup
from memplan.lab.training.loop import Text, Trainer, TrainingOptions, library_text
from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_reference
from memplan.muon.orthogonalisation.schedules import KELLER_JORDAN
from memplan.muon.state_codecs.state_formats import DEFAULT_BLOCK

NOTES = (-30.0, 2.0)
"""Powers of ten that Adam's second moment spans by the notes: 1e-30 to 1e+2, "70+ orders of magnitude"."""

ITERATIONS = 5
ADAMW_RATE = 0.002
"""Of AdamW on all weights; 0.006, which suits the embedding beside Muon, is too much for matrices."""

SHARES = (0.001, 0.5, 0.999)
LOST = 0.05
"""Part of a block's elements that may become zero where bits are counted."""

OPTIMIZERS = ("adamw-fp32", "muon-fp32")
Spans = dict[tuple[str, int], dict[str, float]]
"""Measurements by quantity and step."""


def dynamic_range(catalog: Catalog, size: Size, seeds: Sequence[int], device: str = "cpu") -> Task:
    """Return the experiment: the model is trained by AdamW, and by Muon."""

    def run(progress: Progress) -> Outcome:
        text = library_text()
        by_seed: list[Spans] = []
        for count, seed in enumerate(seeds):
            spans: Spans = {}
            for place, optimizer in enumerate(OPTIMIZERS):
                spans |= spans_of(catalog, size, optimizer, seed, text, device)
                progress(count * len(OPTIMIZERS) + place + 1, f"seed {seed}, {optimizer}")
            by_seed.append(spans)
        rows = [_row(key, [spans[key] for spans in by_seed]) for key in by_seed[0]]
        settings = {
            **size.settings(text),
            "adamw_rate": ADAMW_RATE,
            "block": DEFAULT_BLOCK,
            "unit": "powers of ten",
            "low_and_high": "0.1 % and 99.9 % of the elements that are not zero",
            "absmax_bits": f"bits with which linear codes turn at most {LOST:.0%} of a block's elements into zero; "
            "the median of blocks",
        }
        return Outcome("dynamic-range", settings, seeds, rows, findings(rows), LIMITS)

    return Task(len(OPTIMIZERS) * len(seeds), run)


def watched_steps(steps: int) -> tuple[int, ...]:
    """Return the steps after which there is a measurement: the first, a tenth, a third, and the last."""
    return tuple(sorted({1, ceil(steps / 10), ceil(steps / 3), steps}))


def spans_of(catalog: Catalog, size: Size, optimizer: str, seed: int, text: Text, device: str) -> Spans:
    """Train once and return what was measured."""
    setup = lab_setup(catalog, size, matrices=optimizer)
    options = TrainingOptions(steps=size.steps, device=device)
    if optimizer.startswith("adamw"):
        options = TrainingOptions(steps=size.steps, adamw_lr=ADAMW_RATE, device=device)
    trainer = Trainer(size.model, setup, options, text, seed)
    gradients: dict[Tensor, Tensor] = {}
    trainer.optimizer.register_step_pre_hook(lambda *_: gradients.update(_copies(trainer)))
    spans: Spans = {}
    watched = watched_steps(size.steps)
    for number in range(size.steps):
        gradients.clear()
        trainer.step(number)
        if number + 1 in watched:
            for quantity, tensors in quantities(trainer, gradients).items():
                spans[quantity, number + 1] = measurements(tensors)
    return spans


def _copies(trainer: Trainer) -> dict[Tensor, Tensor]:
    """Return a copy of each matrix's gradient: Muon may use up the gradient itself."""
    return {
        handle.key: handle.key.grad.clone()
        for handle, group in trainer.optimizer.handles()
        if group["algorithm"] == "muon" and handle.key.grad is not None
    }


def quantities(trainer: Trainer, gradients: Mapping[Tensor, Tensor]) -> dict[str, list[Tensor]]:
    """Return what is measured after a step, a tensor for each weight."""
    tensors: dict[str, list[Tensor]] = {}
    groups = list(trainer.optimizer.handles())
    if all(group["algorithm"] == "adamw" for _, group in groups):
        states = [trainer.optimizer.state[handle.key] for handle, _ in groups]
        tensors["adam-v"] = [state["exp_avg_sq"] for state in states]
        tensors["adam-v-matrices"] = [
            trainer.optimizer.state[weight.tensor]["exp_avg_sq"]
            for weight in trainer.trained.weights
            if weight.role == "hidden_matrix"
        ]
        tensors["adam-m"] = [state["exp_avg"] for state in states]
        return tensors
    tensors = {"muon-momentum": [], "newton-schulz-x-first": [], "newton-schulz-x-last": []}
    for handle, group in groups:
        if group["algorithm"] != "muon":
            continue
        momentum = trainer.optimizer.state[handle.key]["momentum_buffer"].view(handle.shape)
        ahead = gradients[handle.key].lerp(momentum, group["momentum"])
        tensors["muon-momentum"].append(momentum)
        tensors["newton-schulz-x-first"].append(ahead / ahead.norm())
        tensors["newton-schulz-x-last"].append(
            newton_schulz_reference(ahead, KELLER_JORDAN * ITERATIONS, torch.float32)
        )
    return tensors


def measurements(tensors: Sequence[Tensor]) -> dict[str, float]:
    """Return quantiles of ``log10 |x|`` over all elements that are not zero, and what follows from them."""
    flat = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors]).abs().cpu()
    logs = flat[flat > 0].double().log10().sort().values
    last = logs.numel() - 1
    low, median, high = (float(logs[round(share * last)]) for share in SHARES)
    return {
        "lowest": float(logs[0]),
        "low": low,
        "median": median,
        "high": high,
        "largest": float(logs[-1]),
        "decades": float(logs[-1] - logs[0]),
        "decades_of_most": high - low,
        "zeros_percent": 100 * (1 - logs.numel() / flat.numel()),
        "absmax_bits": float(torch.tensor([bits for tensor in tensors for bits in absmax_bits(tensor)]).median()),
    }


def absmax_bits(tensor: Tensor) -> list[float]:
    """Return, for each whole block, the bits with which few of its elements become zero.

    Formula:
        A linear code of ``b`` bits with the block's largest magnitude as scale turns into zero what
        is below ``1 / (2 * (2**(b - 1) - 1))`` of it. With ``q`` the 5 % quantile of ``|x|`` over
        that magnitude, ``b = ceil(log2(1 / (2 q) + 1)) + 1``.
    """
    flat = tensor.detach().float().reshape(-1).abs()
    rows = flat[: flat.numel() // DEFAULT_BLOCK * DEFAULT_BLOCK].view(-1, DEFAULT_BLOCK)
    scales = rows.amax(dim=1)
    rows = rows[scales > 0] / scales[scales > 0, None]
    small = rows.kthvalue(int(LOST * DEFAULT_BLOCK) + 1, dim=1).values
    return [ceil(log2(1 / (2 * part) + 1)) + 1 if part > 0 else inf for part in small.tolist()]


def _row(key: tuple[str, int], by_seed: Sequence[Mapping[str, float]]) -> Row:
    quantity, step = key
    return {
        "quantity": quantity,
        "step": step,
        **{name: interval([one[name] for one in by_seed]) for name in by_seed[0]},
    }


# ------------------------------------------------------------------ sentences
def findings(rows: Sequence[Row]) -> list[str]:
    """Return what follows from the rows."""
    widest = {name: max(_of(rows, name), key=lambda row: row["decades"]["mean"]) for name in _names(rows)}
    last = {name: max(_of(rows, name), key=lambda row: row["step"]) for name in _names(rows)}
    square, square_first = widest["adam-v"], _of(rows, "adam-v-matrices")[0]
    first, final = last["newton-schulz-x-first"], last["newton-schulz-x-last"]
    notes = NOTES[1] - NOTES[0]
    return [
        f"Adam's second moment spans {_whole(square['decades'])} decades at most (step {square['step']}), from "
        f"{_power(square['lowest'])} to {_power(square['largest'])}, and {_whole(last['adam-v']['decades'])} after "
        f"{last['adam-v']['step']} steps. The notes say 70+ orders of magnitude, but their 1e-30 to 1e+2 is "
        f"{notes:.0f} decades; {notes * log(10):.1f} is its width in natural logarithms.",
        f"{last['adam-v']['zeros_percent']['mean']:.1f} % of the second moment is exactly zero at the end, rows of the "
        f"embedding whose byte has not come up; of the matrices {last['adam-v-matrices']['zeros_percent']['mean']:.2g} %.",
        f"Without the largest and smallest 0.1 %, Adam's second moment of the matrices spans "
        f"{last['adam-v-matrices']['decades_of_most']['mean']:.1f} decades and Muon's momentum "
        f"{last['muon-momentum']['decades_of_most']['mean']:.1f}: squares span twice the decades.",
        f"X of Newton-Schulz lies within {10 ** first['largest']['high']:.2g} at the start and "
        f"{10 ** final['largest']['high']:.2g} at the end; the notes say 0.1. Its elements span "
        f"{_whole(final['decades'])} decades, not one: {final['decades_of_most']['mean']:.1f} without the outer 0.2 %.",
        f"Linear codes with a scale for each block of {DEFAULT_BLOCK} keep 95 % of a block's elements from becoming zero "
        f"with {_bits(last['muon-momentum'])} bits for Muon's momentum and {_bits(last['adam-v-matrices'])} for Adam's "
        f"second moment of the same matrices, {_bits(square_first)} after the first step.",
    ]


def _bits(row: Row) -> str:
    return "-" if row["absmax_bits"] is None else _whole(row["absmax_bits"])


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["quantity"] for row in rows))


def _of(rows: Sequence[Row], quantity: str) -> list[Row]:
    return [row for row in rows if row["quantity"] == quantity]


def _whole(value: Row) -> str:
    low, high = round(value["low"]), round(value["high"])
    return f"{low}" if low == high else f"{low} to {high}"


def _power(value: Mapping[str, Any]) -> str:
    return f"1e{round(value['mean']):+d}"
