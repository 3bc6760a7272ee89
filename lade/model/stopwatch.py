"""Times what a device does without waiting for it.

A CUDA device works asynchronously: a clock on the host sees how long launching took. So two events are put into the
device's own queue, and read when `seconds` is. In a step that is after its logits were read, when the device has long
passed them: a step does not wait twice.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class Stopwatch:
    """Seconds between `start` and `stop`, where the work was done."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started_s = 0.0
        self._device = torch.device("cpu")
        self._begin: Any = None
        self._end: Any = None  # set as long as the events have not been read

    def start(self, device: torch.device) -> None:
        """Work begins on this device."""
        self._device, self._end = device, None
        if device.type == "cuda":
            self._begin = _event(device)
        self._started_s = perf_counter()

    def stop(self, device: torch.device) -> None:
        """All work is queued; it ends on this device."""
        if device.type == "cuda" and device == self._device:
            self._end = _event(device)
            return
        if device.type == "cuda":  # the clocks of two devices cannot be compared
            torch.cuda.synchronize(device)
        self._seconds = perf_counter() - self._started_s

    @property
    def seconds(self) -> float:
        """Of the last measurement; waits for the device if it has not come so far."""
        if self._end is not None:
            self._end.synchronize()
            self._seconds, self._end = self._begin.elapsed_time(self._end) / 1e3, None
        return self._seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._seconds, self._end = seconds, None


def _event(device: torch.device) -> Any:
    """An event that was queued after all that the device has to do."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
