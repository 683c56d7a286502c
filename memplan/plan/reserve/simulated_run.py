"""One training run in the simulated allocator, each way that the driver may place its segments; what is not needed is not played."""

from collections.abc import Sequence

from memplan.allocator.streams.stream_replay import Stream, StreamPeaks
from memplan.documents.frozen_values import dataclass
from memplan.step.events.event_stream import RunEvents

PLACEMENTS = (True, False)
"""New segments below those before, as on an H200 and a T4, and above them: which addresses it gives is the driver's choice.

Of 19 runs on an H200 where it matters 15 held what it says within 0.005 % (tests/records/cuda), where 3 held what the other says; on a T4 with eager
attention ten are within 0.2 %, where the other was up to 9 % low and 3 % high."""


FURTHER_SHARE = 16
"""A run that takes more than a card has is played until it takes a 16th more: cards of about that size need no play of their own."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulated allocator says of a run, in bytes of its segments."""

    allocated_bytes: int  # Most bytes in blocks
    spare_bytes: int  # Most bytes in segments with memory to spare, new segments below those before
    most_bytes: int  # The same where the driver puts segments so that it is more
    least_bytes: int  # The least of the sizes tried with which it runs; it releases what it caches, and tries again
    below_bytes: int  # A size with which it does not run, or the blocks alone: less is not to be had


class Simulation:
    """One run, and the allocator's settings under which it is played.

    Args:
        expandable: Whether segments are expandable; the driver then has no choice of addresses.
        placements: Whether new segments are below those before: each way that it is played.
    """

    __slots__ = ("_exceeded_bytes", "_expandable", "_known", "_stream", "_survived", "_ways")

    def __init__(self, events: RunEvents, *, expandable: bool, placements: Sequence[bool] = PLACEMENTS) -> None:
        self._expandable = expandable
        self._ways = placements[:1] if expandable else placements
        first, *alike = events.steps
        codes, own = (events.sizes, events.codes, alike, events.passes), events.stream
        self._stream = Stream(*codes, own.streams, first=first, cleared=own.cleared)
        self._known: dict[bool, StreamPeaks] = {}
        self._survived: dict[tuple[int, bool], bool] = {}
        self._exceeded_bytes = -1  # less than it takes

    @property
    def _peaks(self) -> list[StreamPeaks]:
        """The peaks with memory to spare, each way."""
        return [self._to_spare(downwards) for downwards in self._ways]

    def _to_spare(self, downwards: bool) -> StreamPeaks:
        """Return the peaks with memory to spare, one way."""
        if downwards not in self._known:
            self._known[downwards] = self._played(downwards=downwards)
        return self._known[downwards]

    def _survives(self, capacity_bytes: int, downwards: bool) -> bool:
        """Whether the run survives in so many bytes of segments, one way."""
        if self._to_spare(downwards).reserved_bytes <= capacity_bytes:
            return True
        if (key := (capacity_bytes, downwards)) not in self._survived:
            self._survived[key] = self._played(capacity_bytes, downwards=downwards).survives
        return self._survived[key]

    @property
    def allocated_range(self) -> tuple[int, int]:
        """What is allocated at its peak at least and at most, without playing the run."""
        return self._stream.allocated_range

    def takes_more(self, capacity_bytes: int) -> bool:
        """Whether segments take more than so many bytes with memory to spare, one way or another; plays little further than that."""
        if capacity_bytes <= self._exceeded_bytes:
            return True
        further = max(capacity_bytes, 0) * (1 + FURTHER_SHARE) // FURTHER_SHARE
        limit = None if self._expandable else further
        for downwards in self._ways:
            if downwards not in self._known:
                peaks = self._played(limit, downwards=downwards, releases=False)
                if not peaks.survives:
                    self._exceeded_bytes = further
                    return True
                self._known[downwards] = peaks
            if self._known[downwards].reserved_bytes > capacity_bytes:
                return True
        return False

    def runs_in(self, capacity_bytes: int, *, anywhere: bool = True) -> bool:
        """Whether the run survives in so many bytes of segments, ``anywhere`` the driver may put them, or where it is expected to."""
        ways = self._ways if anywhere else self._ways[:1]
        if all(self._to_spare(downwards).allocated_bytes > capacity_bytes for downwards in ways):
            return False
        return all(self._survives(capacity_bytes, downwards) for downwards in ways)

    @property
    def allocated_bytes(self) -> int:
        """Most bytes in blocks with memory to spare."""
        return self._to_spare(self._ways[0]).allocated_bytes

    @property
    def before_steps_bytes(self) -> int:
        """Most bytes in blocks before the first step, as weights are put together or sent."""
        return self._to_spare(self._ways[0]).first_bytes

    def result(self, *, least: bool = True) -> Simulated:
        """Return its figures; the least that it needs is looked for half-way between blocks and segments.

        The simulator is within 3 % of measured runs (tests/records/cuda), so that a finer search says no more.

        Args:
            least: Whether that is looked for; else the run is known to need what its segments take, and no less than
                its blocks.
        """
        reserved = [peaks.reserved_bytes for peaks in self._peaks]
        spare, allocated = reserved[0], self.allocated_bytes
        if not least:
            return Simulated(allocated, spare, max(reserved), spare, below_bytes=allocated)
        middle = (allocated + min(reserved)) // 2
        runs = self.runs_in(middle)
        return Simulated(
            allocated_bytes=allocated,
            spare_bytes=spare,
            most_bytes=max(reserved),
            least_bytes=middle if runs else spare,
            below_bytes=allocated if runs else middle,
        )

    def _played(
        self, capacity_bytes: int | None = None, *, downwards: bool = True, releases: bool = True
    ) -> StreamPeaks:
        return self._stream.peaks(capacity_bytes, downwards=downwards, expandable=self._expandable, releases=releases)
