"""Seconds on a device, with events of a device that is not there."""

import pytest
import torch

from lade.clock import Duration, WallClock
from lade.model.stopwatch import Stopwatch


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


CUDA = torch.device("cuda", 0)


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


def test_on_a_cpu_it_is_a_clock(monkeypatch):
    watch = Stopwatch(WallClock())
    assert watch.taken.wall_s == 0.0
    watch.start(torch.device("cpu"))
    watch.stop(torch.device("cpu"))
    assert 0 < watch.taken.wall_s < 1
