"""Seeded sampling in a batch whose rows go on at their own pace.

Plain decoding calls `torch.multinomial` once per token, on the probabilities `[B, V]` of all rows, those that have
ended included. For one sample a row that call is an argmax of `p / q`, q being noise `[B, V]` from an exponential
distribution, drawn in one go (aten/src/ATen/native/Distributions.cpp, `multinomial_out`). So the noise of a token
depends on its number and its row alone, not on the probabilities: it can be drawn as soon as the first row needs it,
and be kept, or drawn anew, until the last row has come as far.

            token 1   token 2   token 3          a block `[B, V]` each, drawn in this order
    row 0    used      used      used
    row 1    used      next      kept            block 1 is not needed any more
"""

from __future__ import annotations

import sys

import torch

MOST_BYTES = 2**28
"""Of noise that is kept."""


class Noise:
    """The blocks `[B, V]` of a batch, by the number of the token they are for.

    Torch's generator draws each of them once, in order. What does not fit into `most_bytes` is not kept: it is drawn
    again from the state that the generator had, which takes longer.

    Args:
        rows: B.
        most_bytes: that blocks may take, the one in use not counted.
    """

    def __init__(self, rows: int, most_bytes: int = MOST_BYTES) -> None:
        self._rows, self._most_bytes = rows, most_bytes
        self._kept: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}  # before the others were drawn
        self._next = 0

    def __len__(self) -> int:
        """Blocks that are kept."""
        return len(self._kept)

    def block(self, number: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The noise of a token, the next one or any not forgotten; `probabilities` has its V, dtype and device."""
        if number in self._kept:
            return self._kept[number]
        block = probabilities.new_empty(self._rows, probabilities.shape[-1])
        fits = (len(self._kept) + 1) * block.nbytes <= self._most_bytes
        if number < self._next:
            generator = torch.Generator(block.device)
            generator.set_state(self._states[number])
            block.exponential_(generator=generator)
        else:
            self._next += 1
            if not fits:
                self._states[number] = _state_of(block.device)
            block.exponential_()
        if fits:
            self._states.pop(number, None)
            self._kept[number] = block
        return block

    def forget(self, number: int) -> None:
        """Of the blocks before this one."""
        for known in (self._kept, self._states):
            for old in [old for old in known if old < number]:
                del known[old]


class Draws:
    """The draws of a batch.

    In the end as many blocks have been drawn as the longest row has tokens: torch's generator is left as plain decoding
    leaves it. The blocks kept take 4 V bytes for each row and each token that the first row is ahead of the last one,
    up to a bound.

    Args:
        rows: B.
        most_bytes: see `Noise`.
    """

    def __init__(self, rows: int, most_bytes: int = MOST_BYTES) -> None:
        self._noise = Noise(rows, most_bytes)
        self._drawn = [0] * rows

    def draw(self, row: int, probabilities: torch.Tensor) -> int:
        """The next token of a row.

        Args:
            row: number of the row.
            probabilities: `[1, V]` float32.

        Raises:
            RuntimeError: they are none, as `torch.multinomial` has it.
        """
        _check(probabilities)
        noise = self._noise.block(self._drawn[row], probabilities)
        token = int((probabilities[0] / noise[row]).argmax())
        self._drawn[row] += 1
        self._noise.forget(min(self._drawn))
        return token

    def leave(self, row: int) -> None:
        """A row has ended: no block need be kept for it."""
        self._drawn[row] = sys.maxsize
        self._noise.forget(min(self._drawn))


def _state_of(device: torch.device) -> torch.Tensor:
    """Of torch's generator for a device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def draw_alone(probabilities: torch.Tensor) -> int:
    """The next token of a single row, given probabilities `[1, V]`."""
    return int(torch.multinomial(probabilities, num_samples=1))


def draw_from(generator: torch.Generator, probabilities: torch.Tensor) -> int:
    """The same from a generator other than torch's global one."""
    return int(torch.multinomial(probabilities, num_samples=1, generator=generator))


def _check(probabilities: torch.Tensor) -> None:
    """What `torch.multinomial` checks, with its words."""
    if not bool(((probabilities >= 0) & (probabilities < torch.inf)).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not bool(probabilities.sum() > 0):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
