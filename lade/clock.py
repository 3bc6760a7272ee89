"""Clocks: wall time, wall time less scheduling delays, and device time by CUDA events.

On a busy machine a runnable thread often waits for a free core. A pass of 3 ms then takes anything up to 20, and
the noise hides which tree size pays. Such delays stretch all work alike in the long run, so they say nothing about
tree sizes and are left out of the measurements that the tree-size control uses:

    wall           |--- runs ---|........ runnable, no core ........|--- runs ---|
    undisturbed    |--- runs ---|                                   |--- runs ---|

A thread that sleeps waits for something else: a disk, another process, a second thread of its own. That wait is part
of the work, so scheduling delays are subtracted only where the thread did not sleep at all.

Reports show wall time; control decisions use undisturbed time.

CUDA devices work asynchronously: a host clock measures only the kernel launches. So two events are queued on the
device's stream and read when `Stopwatch.taken` is. In a decoding step that happens after the logits were read, when
the device has long passed both events: reading them costs no second synchronization.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Duration:
    """Time spent on a piece of work; as the reading of a clock, since a moment that means nothing."""

    wall_s: float
    running_s: float  # in which the thread ran on a core
    sleeps: int = 0  # voluntary context switches: how often the thread slept

    @property
    def undisturbed_s(self) -> float:
        """Seconds without those in which the thread was runnable but had no core, where that can be told."""
        return self.wall_s if self.sleeps else min(self.wall_s, self.running_s)

    def __add__(self, other: Duration) -> Duration:
        """Return the duration of both pieces of work together."""
        return Duration(self.wall_s + other.wall_s, self.running_s + other.running_s, self.sleeps + other.sleeps)

    def __sub__(self, part: Duration) -> Duration:
        """Return the duration of the work without `part`."""
        return Duration(self.wall_s - part.wall_s, self.running_s - part.running_s, self.sleeps - part.sleeps)


class Clock(Protocol):
    """Measures the time that one thread spends."""

    def start(self) -> Duration:
        """Return the current reading."""

    def since(self, start: Duration) -> Duration:
        """Return the time spent since the reading `start`."""


class WallClock:
    """Wall time, for work that a device does while this thread waits. See `Clock`."""

    def start(self) -> Duration:
        """See `Clock`."""
        return Duration(perf_counter(), 0.0)

    def since(self, start: Duration) -> Duration:
        """See `Clock`."""
        seconds = perf_counter() - start.wall_s
        return Duration(seconds, seconds)


if sys.platform == "linux":  # elsewhere it is not known whether a thread slept
    from resource import RUSAGE_THREAD, getrusage

    class ThreadClock:
        """Wall and running time of work that this thread does itself, on a core. See `Clock`.

        Asking the kernel for a thread's running time may itself preempt the thread. So the wall clock is read first
        at the start and last at the end: such a preemption then falls inside a measurement, never between two.
        """

        def start(self) -> Duration:
            """See `Clock`."""
            return Duration(perf_counter(), thread_time(), getrusage(RUSAGE_THREAD).ru_nvcsw)

        def since(self, start: Duration) -> Duration:
            """See `Clock`."""
            sleeps = getrusage(RUSAGE_THREAD).ru_nvcsw - start.sleeps
            running_s = thread_time() - start.running_s
            return Duration(perf_counter() - start.wall_s, running_s, sleeps)

else:
    ThreadClock = WallClock


_NOTHING = Duration(0.0, 0.0)


class Stopwatch:
    """Measures work between `start` and `stop` on the device that does it.

    CUDA devices are timed by events, undisturbed by other programs, and all else by the clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._started = clock, clock.start()
        self._before, self._taken = _NOTHING, _NOTHING
        self._device = torch.device("cpu")
        self._begin: Any = None
        self._end: Any = None  # set as long as the events have not been read

    def start(self, device: torch.device) -> None:
        """Start a new measurement of work on `device`."""
        self._before, self._device, self._end = _NOTHING, device, None
        if device.type == "cuda":
            self._begin = _event(device)
        self._started = self._clock.start()

    def resume(self, device: torch.device) -> None:
        """Continue the last measurement after a pause. Synchronizes with the device like `taken`."""
        before = self.taken
        self.start(device)
        self._before = before

    def stop(self, device: torch.device) -> None:
        """End the measurement: all work is queued, and ends on `device`."""
        if device.type == "cuda" and device == self._device:
            self._end = _event(device)
            return
        if device.type == "cuda":  # the clocks of two devices cannot be compared
            torch.cuda.synchronize(device)
        self._taken = self._before + self._clock.since(self._started)

    @property
    def taken(self) -> Duration:
        """Duration of the last measurement; waits for the device until it has got that far."""
        if self._end is not None:
            self._end.synchronize()
            seconds, self._end = self._begin.elapsed_time(self._end) / 1e3, None
            self._taken = self._before + Duration(seconds, seconds)
        return self._taken

    @taken.setter
    def taken(self, taken: Duration) -> None:
        self._taken, self._end = taken, None


def _event(device: torch.device) -> Any:
    """Return a CUDA event recorded after all work queued on the device so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
