"""Seconds on a device, with events of a device that is not there."""

import pytest
import torch
from made_clock import MadeClock

from lade.clock import Duration, Stopwatch, WallClock


class Device:
    """A CUDA device, as far as a stopwatch sees one: it is as far behind the host as it likes."""

    def __init__(self, monkeypatch):
        self.now_ms, self.waited = 0.0, 0
        self.stream = object()
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert stream is device.stream
                self.at_ms = device.now_ms

            def synchronize(self):
                device.waited += 1

            def elapsed_time(self, end):
                return end.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(self, "waited", self.waited + 1))


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_the_device_is_not_waited_for_until_somebody_asks(monkeypatch):
    device, watch = Device(monkeypatch), Stopwatch(WallClock())
    for taken_ms in (3.0, 5.0):
        watch.start(CUDA)
        device.now_ms += taken_ms
        watch.stop(CUDA)
        assert device.waited == 0
    assert watch.taken.wall_s == pytest.approx(5e-3)
    assert watch.taken.wall_s == pytest.approx(5e-3) and device.waited == 1


def test_what_is_set_is_read(monkeypatch):
    device, watch = Device(monkeypatch), Stopwatch(WallClock())
    watch.start(CUDA)
    watch.stop(CUDA)
    watch.taken = Duration(7.0, 6.0)
    assert watch.taken == Duration(7.0, 6.0) and device.waited == 0


def test_clocks_of_two_devices_are_not_compared(monkeypatch):
    device, watch = Device(monkeypatch), Stopwatch(WallClock())
    watch.start(CUDA)
    device.now_ms = 1e9
    watch.stop(torch.device("cuda", 1))
    assert 0 < watch.taken.wall_s < 1 and device.waited == 1


def test_on_a_cpu_it_goes_by_the_clock_given():
    clock = MadeClock()
    watch = Stopwatch(clock)
    watch.start(CPU)
    clock.run(3.0, waiting_s=17.0)
    watch.stop(CPU)
    assert (watch.taken.wall_s, watch.taken.undisturbed_s) == (20.0, 3.0)


def test_a_cuda_device_is_not_disturbed_by_what_the_host_does(monkeypatch):
    device, watch = Device(monkeypatch), Stopwatch(MadeClock())
    watch.start(CUDA)
    device.now_ms += 3.0
    watch.stop(CUDA)
    assert watch.taken.undisturbed_s == watch.taken.wall_s == pytest.approx(3e-3)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_work_goes_on_after_a_pause(kind, monkeypatch):
    device, clock, where = Device(monkeypatch), MadeClock(), torch.device(kind, 0)
    watch = Stopwatch(clock)

    def work(seconds):
        device.now_ms += 1e3 * seconds
        clock.run(seconds)

    watch.start(where)
    work(2.0)
    watch.stop(where)
    work(10.0)
    watch.resume(where)
    work(3.0)
    watch.stop(where)
    assert watch.taken.wall_s == pytest.approx(5.0)
    watch.start(where)
    work(1.0)
    watch.stop(where)
    assert watch.taken.wall_s == pytest.approx(1.0)
