"""Times what a device does without waiting for it.

A CUDA device works asynchronously: a clock on the host sees how long launching took. So two events are put into the
device's own queue, and read when `seconds` is. In a step that is after its logits were read, when the device has long
passed them: a step does not wait twice.
"""

from __future__ import annotations

from typing import Any

import torch

from lade.clock import Clock, Duration

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
