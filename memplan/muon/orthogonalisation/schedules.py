"""Coefficients of the odd quintic ``a*x + b*x**3 + c*x**5`` that each iteration applies to the singular values."""

from collections.abc import Sequence

from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice

Coefficients = tuple[float, float, float]
Schedule = tuple[Coefficients, ...]

# Newton-Schulz of the polar factor, third order: x * (3 - x**2) / 2. Higham, Functions of
# Matrices (2008), equation 8.20. Converges everywhere on (0, sqrt(3)), but slowly.
CUBIC: Schedule = ((1.5, -0.5, 0.0),)

# https://kellerjordan.github.io/posts/muon/: steepest at zero, ends between 0.7 and 1.2.
KELLER_JORDAN: Schedule = ((3.4445, -4.7750, 2.0315),)

# You Jiacheng's five steps, https://x.com/YouJiacheng/status/1893704552689303901, which the
# notes print rounded to two decimals and call "Muon's tuned coefficients".
YOU_JIACHENG: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Polar Express, https://arxiv.org/abs/2505.16932, implementation 1: minimax polynomials for
# singular values in [0.001, 1], before the safety factor.
_POLAR_EXPRESS_EXACT: Schedule = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
POLAR_EXPRESS_SAFETY = 1.01
POLAR_EXPRESS: Schedule = (
    *(
        (a / POLAR_EXPRESS_SAFETY, b / POLAR_EXPRESS_SAFETY**3, c / POLAR_EXPRESS_SAFETY**5)
        for a, b, c in _POLAR_EXPRESS_EXACT[:-1]
    ),
    _POLAR_EXPRESS_EXACT[-1],
)

SCHEDULES: dict[str, Schedule] = {
    "cubic": CUBIC,
    "keller-jordan": KELLER_JORDAN,
    "you-jiacheng": YOU_JIACHENG,
    "polar-express": POLAR_EXPRESS,
}


def resolved_schedule(coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int) -> Schedule:
    """Return one triple for each of ``steps`` iterations; the last one given is repeated.

    Args:
        coefficients: A name of ``SCHEDULES``, one triple, or a sequence of triples.
        steps: Iterations, 1 to 99.

    Raises:
        UnknownNameError: If a name is not known.
        OptimizerError: If a triple has not three numbers, or ``steps`` is out of range.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise OptimizerError(f"ns_steps: expected an integer from 1 to 99, got {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in SCHEDULES:
            raise unknown_choice("Newton-Schulz schedule", coefficients, SCHEDULES)
        triples = SCHEDULES[coefficients]
    else:
        triples = _triples(coefficients)
    return tuple(triples[min(step, len(triples) - 1)] for step in range(steps))


def _triples(coefficients: Sequence[float] | Sequence[Sequence[float]]) -> Schedule:
    flat = bool(coefficients) and all(isinstance(value, int | float) for value in coefficients)
    triples: list[Coefficients] = []
    for row in [coefficients] if flat else coefficients:
        if isinstance(row, int | float) or len(row) != 3:
            raise OptimizerError(f"ns_coefficients: expected triples (a, b, c), got {row!r}")
        a, b, c = (float(value) for value in row if isinstance(value, int | float))
        triples.append((a, b, c))
    if not triples:
        raise OptimizerError("ns_coefficients: expected at least one triple (a, b, c)")
    return tuple(triples)
