"""What orthogonalising noisy gradients does to their spread: the notes' table of variance reduction."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev, variance

import torch
from torch import Tensor

from memplan.errors import UnitError
from memplan.lab.experiment_record import Outcome, Progress, Row, interval
from memplan.lab.matrices.matrix_draws import check_sizes, errors, iterated, normalised
from memplan.muon.orthogonalisation.schedules import resolved_schedule

METHODS = ("raw", "cubic", "you-jiacheng", "qr")
KEYS = ("error", "element_variance", "norm_dispersion", "norm_cv", "relative_variance", "signal")
NOISE = 0.5
LIMITS = (
    "A Gaussian direction under independent Gaussian noise: gradients are neither, and a network's loss is another "
    "question. The error is that of the last sample, as in the notes."
)

Method = Callable[[Tensor], Tensor]


def run(
    seeds: Sequence[int],
    progress: Progress,
    width: int = 512,
    samples: int = 100,
    iterations: int = 5,
    noise: float = NOISE,
    device: str = "cpu",
) -> Outcome:
    """Draw gradients around one direction of unit Frobenius norm, and return the spread of each method's results.

    Args:
        seeds: One direction and its samples each.
        width: Side of the square gradients.
        samples: Gradients for each seed, at least 2.
        iterations: Of Newton-Schulz, in bf16.
        noise: Standard deviation of what is added to each element of the direction.

    Raises:
        UnitError: A number out of range.
    """
    check_sizes([width], iterations, device)
    if samples < 2 or noise <= 0:
        raise UnitError("expected at least 2 samples and noise above 0")
    methods = _methods(iterations)
    values: dict[str, list[tuple[float, ...]]] = {name: [] for name in methods}
    done = 0
    for seed in seeds:
        for name, method in methods.items():
            values[name].append(_spread(method, seed, width, samples, noise, device))
            done += 1
            progress(done, f"seed {seed}, {name}")
    rows: list[Row] = []
    for name, group in values.items():
        row: Row = {"method": name, "rows": width, "columns": width, "samples": samples}
        rows.append(row | {key: interval(column) for key, column in zip(KEYS, zip(*group, strict=True), strict=True)})
    settings = {
        "width": width,
        "samples": samples,
        "iterations": iterations,
        "noise": noise,
        "dtype": "bf16",
        "device": device,
    }
    return Outcome("variance", settings, seeds, rows, findings(rows), LIMITS)


def _methods(iterations: int) -> dict[str, Method]:
    def newton_schulz(name: str) -> Method:
        schedule = resolved_schedule(name, iterations)

        def orthogonalised(gradient: Tensor) -> Tensor:
            x = normalised(gradient, torch.bfloat16)
            for coefficients in schedule:
                x = iterated(x, coefficients)
            return x

        return orthogonalised

    return {
        "raw": lambda gradient: gradient,
        "cubic": newton_schulz("cubic"),
        "you-jiacheng": newton_schulz("you-jiacheng"),
        "qr": lambda gradient: torch.linalg.qr(gradient)[0].bfloat16(),
    }


def _spread(method: Method, seed: int, width: int, samples: int, noise: float, device: str) -> tuple[float, ...]:
    """Return the values of ``KEYS`` for one direction; every method sees the same samples.

    Formula:
        error: Frobenius, of the last sample. element variance: over samples, mean over elements. norm
        dispersion: variance of the results' Frobenius norms over their mean, which the notes call "Norm
        CV". norm CV: standard deviation over mean. relative variance: element variance over the
        elements' mean square. signal: cosine between the direction and the mean of the results.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(width, width, generator=generator)
    base /= torch.linalg.matrix_norm(base)
    total = torch.zeros(width, width, dtype=torch.float64, device=device)
    squares = torch.zeros_like(total)
    norms = []
    for _ in range(samples):
        gradient = base + noise * torch.randn(width, width, generator=generator)
        update = method(gradient.to(device)).double()
        total += update
        squares.addcmul_(update, update)
        norms.append(float(torch.linalg.matrix_norm(update)))
    average = total / samples
    variances = (squares - samples * average.square()) / (samples - 1)
    spread = float(variances.mean())
    return (
        errors(update.float())[0],
        spread,
        variance(norms) / fmean(norms),
        stdev(norms) / fmean(norms),
        spread / float(squares.mean() / samples),
        float(torch.nn.functional.cosine_similarity(average.flatten(), base.to(average).flatten(), dim=0)),
    )


def findings(rows: Sequence[Row]) -> list[str]:
    """Return what follows from the rows, a sentence each."""
    known = {row["method"]: row for row in rows}
    if set(known) < set(METHODS) or any(known[name][key] is None for name in METHODS for key in KEYS):
        return ["A value is not finite."]
    mean = {name: {key: known[name][key]["mean"] for key in KEYS} for name in METHODS}
    side, raw, tuned = known["raw"]["rows"], mean["raw"], mean["you-jiacheng"]
    relative = [mean[name]["relative_variance"] for name in METHODS]
    signals = ", ".join(f"{name} {mean[name]['signal']:.3f}" for name in METHODS)
    words = "below" if tuned["norm_cv"] < raw["norm_cv"] else "not below"
    after = ": nothing is averaged out" if max(relative) - min(relative) < 0.01 else ""
    return [
        f"Element variance goes from {raw['element_variance']:.3g} to {tuned['element_variance']:.3g} with you-jiacheng; "
        f"an orthogonal {side}x{side} matrix has a mean square of 1/{side} = {1 / side:.3g}, whatever went in.",
        f"Relative to the elements' own mean square the variance is {min(relative):.3f} to {max(relative):.3f} with "
        f"all methods{after}.",
        f"Norm CV as printed is variance over mean ({tuned['norm_dispersion']:.2g} with you-jiacheng), which changes "
        f"with scale. The coefficient of variation is {tuned['norm_cv']:.2g}, {words} that of raw gradients "
        f"({raw['norm_cv']:.2g}), and {mean['cubic']['norm_cv']:.2g} with cubic, {mean['qr']['norm_cv']:.2g} with QR.",
        f"The error of raw gradients, {raw['error']:.0f}, is that of a matrix that was never normalised.",
        f"Cosine between the direction and the mean of {known['raw']['samples']} results: {signals}.",
    ]


def parts(seeds: Sequence[int]) -> int:
    """Return how often ``run`` reports."""
    return len(seeds) * len(METHODS)
