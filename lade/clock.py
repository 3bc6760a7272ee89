"""How long a piece of work took: by the clock on the wall, and but for what other programs took of it.

On a busy machine a thread that could go on often has to wait until a processor is free. A pass of 3 ms then takes 3 or
20, as it happens, and which size of a tree pays cannot be seen any more: it is drowned. In the long run such waiting
stretches all work alike, so it says nothing about sizes either, and is best left out:

    wall           |--- runs ---|......... ready to run .........|--- runs ---|
    undisturbed    |--- runs ---|                                |--- runs ---|

A thread that sleeps waits for something else, a disk, a process on another machine, a second thread of its own: that is
part of the work, whoever is to blame. So time is left out only where the thread did not sleep at all.

What people are told is the time on the wall. What a method decides by is the undisturbed one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, thread_time


@dataclass(slots=True)  # frozen, each would take half a microsecond more
class Duration:
    """What a piece of work took, or all work before a moment.

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


Clock = Callable[[], Duration]
"""What the calling thread has done so far, from no matter when; the difference between two calls is what counts."""


def wall_clock() -> Duration:
    """For work that other threads or devices do while this one waits for them: nothing is left out."""
    now_s = perf_counter()
    return Duration(now_s, now_s)


if sys.platform == "linux":  # elsewhere a thread's sleeps are not counted
    from resource import RUSAGE_THREAD, getrusage

    def thread_clock() -> Duration:
        """For work that this thread does itself, on a processor; a microsecond."""
        return Duration(perf_counter(), thread_time(), getrusage(RUSAGE_THREAD).ru_nvcsw)

else:
    thread_clock = wall_clock
