"""What counts of the time that work takes."""

import sys
from time import sleep, thread_time

import pytest

from lade.clock import Duration, ThreadClock, WallClock


def test_waiting_for_a_processor_does_not_count_unless_that_part_of_the_work_slept():
    assert Duration(wall_s=20.0, running_s=3.0).undisturbed_s == 3.0
    assert Duration(wall_s=20.0, running_s=3.0, sleeps=1).undisturbed_s == 20.0
    assert Duration(wall_s=3.0, running_s=3.001).undisturbed_s == 3.0, "two clocks are not read at the same moment"
    whole, part = Duration(20.0, 5.0, sleeps=1), Duration(12.0, 1.0, sleeps=1)
    assert (whole - part).undisturbed_s == 4.0
    assert (whole - part) + part == whole


@pytest.mark.parametrize("kind", [WallClock, ThreadClock])
def test_sleep_is_part_of_the_work(kind):
    clock = kind()
    start = clock.start()
    sleep(0.01)
    took = clock.since(start)
    assert took.undisturbed_s == took.wall_s >= 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a thread's waiting known")
def test_a_thread_is_timed_while_it_runs():
    """However busy the machine is that this runs on; unless another thread of this process took its turn."""
    clock = ThreadClock()
    for _ in range(20):
        start, end = clock.start(), thread_time() + 0.005
        while thread_time() < end:
            pass
        took = clock.since(start)
        if not took.sleeps:
            break
    assert not took.sleeps and 0.005 <= took.undisturbed_s < 0.006
