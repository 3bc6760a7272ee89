"""A state of torch's generators that several decodings in one process do not share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Noise:
    """The generators of the CPU and of one device as they are after `torch.manual_seed(seed)`, kept aside.

    >>> noise = Noise(7, model.device)
    >>> with noise.taken():
    ...     next(steps)  # draws from it, and from nothing else

    Args:
        seed: of all of them; None: `taken` changes nothing.
        device: where the model is.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._states: list[torch.Tensor] = []
        with self.taken():
            if seed is not None:
                torch.manual_seed(seed)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Run the body with torch's generators as the last turn left them; their states are restored afterwards."""
        if self._seed is None:
            yield
            return
        outside = self._get()
        if self._states:
            self._set(self._states)
        try:
            yield
        finally:
            self._states = self._get()
            self._set(outside)

    def _get(self) -> list[torch.Tensor]:
        match self._device.type:
            case "cuda":
                return [torch.get_rng_state(), torch.cuda.get_rng_state(self._device)]
            case "mps":
                return [torch.get_rng_state(), torch.mps.get_rng_state()]
        return [torch.get_rng_state()]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        match self._device.type:
            case "cuda":
                torch.cuda.set_rng_state(states[1], self._device)
            case "mps":
                torch.mps.set_rng_state(states[1])
