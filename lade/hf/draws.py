"""Seeded sampling in a batch whose rows go on at their own pace.

Plain decoding calls `torch.multinomial` once per token, on the probabilities `[B, V]` of all rows, those that have
ended included. For one sample a row that call is an argmax of `p / q`, q being noise `[B, V]` from an exponential
distribution, drawn in one go (aten/src/ATen/native/Distributions.cpp, `multinomial_out`). So the noise of a token
depends on its number and its row alone, not on the probabilities: it can be drawn as soon as the first row needs it,
and be kept until the last row has come as far.

            token 1   token 2   token 3          a block `[B, V]` each, drawn in this order
    row 0    used      used      used
    row 1    used      next      kept            block 1 is not needed any more
"""

from __future__ import annotations

import sys
from collections import deque

import torch


class Draws:
    """The noise of a batch, and the draws that are made with it.

    In the end as many blocks have been drawn as the longest row has tokens: torch's generator is left as plain decoding
    leaves it. The blocks kept take 4 V bytes for each row and each token that the first row is ahead of the last one.

    Args:
        rows: B.
    """

    def __init__(self, rows: int) -> None:
        self._blocks: deque[torch.Tensor] = deque()
        self._first = 0  # number of the first block that is kept
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
        place = self._drawn[row] - self._first
        if place == len(self._blocks):
            block = probabilities.new_empty(len(self._drawn), probabilities.shape[1])
            self._blocks.append(block.exponential_())
        token = int((probabilities[0] / self._blocks[place][row]).argmax())
        self._drawn[row] += 1
        self._forget()
        return token

    def leave(self, row: int) -> None:
        """A row has ended: no block need be kept for it."""
        self._drawn[row] = sys.maxsize
        self._forget()

    def _forget(self) -> None:
        """Drop the blocks that every row has passed."""
        needed = min(self._drawn)
        while self._blocks and self._first < needed:
            self._blocks.popleft()
            self._first += 1


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
