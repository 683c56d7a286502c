"""A device as one number: the most requested bytes at which a verdict holds."""

from __future__ import annotations

from memplan.plan.allowances import Allowances
from memplan.plan.job_allowances import searched_allowances
from memplan.plan.memory_plan import Device, Verdict, verdict_of
from memplan.training.resolved import TrainingSetup
from memplan.values import dataclass


@dataclass(frozen=True, slots=True)
class Gauge:
    """Device bytes and verdict of a requested peak, without evaluating a whole plan."""

    usable_bytes: int  # Memory of the device that a job may use, after the reserve
    allowances: Allowances  # What is added to the requested bytes on this device

    def device_bytes(self, requested: int, rounding: int) -> int:
        """Return what nvidia-smi would show, as :meth:`memplan.plan.planner.CompiledPlan.evaluate` has it."""
        return self.allowances.device_bytes(self.allowances.allocated_bytes(requested, rounding))

    def upper_bytes(self, requested: int, rounding: int) -> int:
        """Return the upper end of the interval around it."""
        return self.allowances.upper_bytes(self.allowances.allocated_bytes(requested, rounding))

    def verdict(self, requested: int, rounding: int) -> Verdict:
        """Return the verdict on a requested peak."""
        sizes = self.device_bytes(requested, rounding), self.upper_bytes(requested, rounding)
        return verdict_of(*sizes, self.usable_bytes)

    def most_requested_bytes(self, tight: bool = False) -> int:
        """Return the most requested bytes that FIT, rounding to blocks included; negative where nothing does.

        Formula:
            ``a + floor(a * p / q) <= usable - context`` holds up to
            ``a = floor((q * (usable - context + 1) - 1) / (p + q))``; library workspaces are then subtracted.

        Args:
            tight: The most at which the verdict is at least TIGHT instead.

        Example:
            >>> from fractions import Fraction
            >>> gauge = Gauge(1150, Allowances(0, Fraction(5, 100), Fraction(15, 100), 0, 0))
            >>> gauge.most_requested_bytes(), gauge.upper_bytes(1000, 0), gauge.upper_bytes(1001, 0)
            (1000, 1150, 1151)
        """
        part = self.allowances
        share, context = part.upper_reserve_fraction, part.upper_context_bytes
        if tight:
            share, context = part.reserve_fraction, part.context_bytes
        room = self.usable_bytes - context
        p, q = share.numerator, share.denominator
        return (q * (room + 1) - 1) // (p + q) - part.library_bytes


def gauge_of(setup: TrainingSetup, device: Device, stream_bytes: int = 0, *, least: bool = False) -> Gauge:
    """Return the gauge of a device for a setup, whose reserve and allocator it takes into account.

    Args:
        device: What the job has to fit on.
        stream_bytes: Buffers of collectives that no other stream can use.
        least: Leave out what depends on the step, for who looks at its plan besides.

    Raises:
        CannotAnswerError: Something depends on the step otherwise.
    """
    allowances = searched_allowances(setup, device, stream_bytes, least=least)
    return Gauge(device.usable_bytes(setup.reserve_bytes), allowances)
