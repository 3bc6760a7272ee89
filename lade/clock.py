"""Clocks: wall time, time less what other programs took, and device time by events.

On a busy machine a thread that could go on often has to wait until a processor is free. A pass of 3 ms then takes 3 or
20, as it happens, and nobody sees which size of a tree pays. In the long run such waiting stretches all work alike, so
it says nothing about sizes, and is best left out:

    wall           |--- runs ---|......... ready to run .........|--- runs ---|
    undisturbed    |--- runs ---|                                |--- runs ---|

A thread that sleeps waits for something else, a disk, a process on another machine, a second thread of its own: that is
part of the work, whoever is to blame. So time is left out only where the thread did not sleep at all.

What people are told is the time on the wall. What a method decides by is the undisturbed one.

A CUDA device works asynchronously: a clock on the host sees how long launching took. So two events are put into the
device's own queue, and read when `seconds` is. In a step that is after its logits were read, when the device has long
passed them: a step does not wait twice.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(slots=True)
class Duration:
    """What a piece of work took.

    Attributes:
        wall_s: seconds by the clock on the wall.
        running_s: of these the seconds in which its thread ran.
        sleeps: how often its thread fell asleep.
    """

    wall_s: float
    running_s: float
    sleeps: int = 0

    @property
    def undisturbed_s(self) -> float:
        """Seconds without those in which the thread was ready to run and had no processor, where that is known."""
        return self.wall_s if self.sleeps else min(self.wall_s, self.running_s)

    def __add__(self, other: Duration) -> Duration:
        """Of this piece of work and another one."""
        return Duration(self.wall_s + other.wall_s, self.running_s + other.running_s, self.sleeps + other.sleeps)

    def __sub__(self, part: Duration) -> Duration:
        """Of the rest of this piece of work."""
        return Duration(self.wall_s - part.wall_s, self.running_s - part.running_s, self.sleeps - part.sleeps)


class Moment(NamedTuple):
    """When a piece of work began, by the measures of a clock: only what was added to them since then tells anything."""

    wall_s: float
    running_s: float
    sleeps: int


class Clock(Protocol):
    """Times what one thread does."""

    def start(self) -> Moment:
        """A piece of work begins."""
        ...

    def since(self, start: Moment) -> Duration:
        """What it has taken so far."""
        ...


class WallClock:
    """For work that a device does while this thread waits for it: nothing is left out. See `Clock`."""

    def start(self) -> Moment:
        """See `Clock`."""
        return Moment(perf_counter(), 0.0, 0)

    def since(self, start: Moment) -> Duration:
        """See `Clock`."""
        seconds = perf_counter() - start.wall_s
        return Duration(seconds, seconds)


if sys.platform == "linux":  # elsewhere it is not known whether a thread slept
    from resource import RUSAGE_THREAD, getrusage

    class ThreadClock:
        """For work that this thread does itself, on a processor. See `Clock`.

        Asking how long a thread has run is when its turn may be found to be over. So the wall is looked at first, and
        last in the end: what others do then is within the work, and not between two pieces, where nobody counts it.
        """

        def start(self) -> Moment:
            """See `Clock`."""
            return Moment(perf_counter(), thread_time(), getrusage(RUSAGE_THREAD).ru_nvcsw)

        def since(self, start: Moment) -> Duration:
            """See `Clock`."""
            sleeps = getrusage(RUSAGE_THREAD).ru_nvcsw - start.sleeps
            running_s = thread_time() - start.running_s
            return Duration(perf_counter() - start.wall_s, running_s, sleeps)

else:
    ThreadClock = WallClock


_NOTHING = Duration(0.0, 0.0)


class Stopwatch:
    """How long work took between `start` and `stop`, where it was done.

    Args:
        clock: for work that is not a CUDA device's. Nobody disturbs such a device, as far as can be seen.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._started = clock, clock.start()
        self._before, self._taken = _NOTHING, _NOTHING
        self._device = torch.device("cpu")
        self._begin: Any = None
        self._end: Any = None  # set as long as the events have not been read

    def start(self, device: torch.device) -> None:
        """Work begins on this device."""
        self._before, self._device, self._end = _NOTHING, device, None
        if device.type == "cuda":
            self._begin = _event(device)
        self._started = self._clock.start()

    def resume(self, device: torch.device) -> None:
        """Work goes on after a pause; what was measured counts, too. Waits for the device like `taken`."""
        before = self.taken
        self.start(device)
        self._before = before

    def stop(self, device: torch.device) -> None:
        """All work is queued; it ends on this device."""
        if device.type == "cuda" and device == self._device:
            self._end = _event(device)
            return
        if device.type == "cuda":  # the clocks of two devices cannot be compared
            torch.cuda.synchronize(device)
        self._taken = self._before + self._clock.since(self._started)

    @property
    def taken(self) -> Duration:
        """Of the last measurement; waits for the device if it has not come so far."""
        if self._end is not None:
            self._end.synchronize()
            seconds, self._end = self._begin.elapsed_time(self._end) / 1e3, None
            self._taken = self._before + Duration(seconds, seconds)
        return self._taken

    @taken.setter
    def taken(self, taken: Duration) -> None:
        self._taken, self._end = taken, None


def _event(device: torch.device) -> Any:
    """An event that was queued after all that the device has to do."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
