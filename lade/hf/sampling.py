"""Seeded sampling in a different order than plain decoding: rows at their own pace, or all nodes of a tree at once.

Plain decoding calls `torch.multinomial` once per token, on the probabilities `[B, V]` of all rows, those that have
ended included. For one sample per row that call is an argmax of `p / q`, q being noise `[B, V]` from an exponential
distribution, drawn in one operation (aten/src/ATen/native/Distributions.cpp, `multinomial_out`). So the noise of a
token depends on its index and row only, not on the probabilities: it can be drawn when it is first needed, and kept, or
drawn again, until the last row has used it.

            token 1   token 2   token 3          a block `[B, V]` each, drawn in this order
    row 0    used      used      used
    row 1    used      next      kept            block 1 is not needed any more

The nodes of a tree use the noise of the tokens after them, which depends on their depth. NoiseBlocks drawn ahead for
nodes that are not reached is kept for the next tree; torch's generator is set back to where plain decoding would have
it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from lade.model.inputs import upload

MOST_BYTES = 2**28
"""Maximum size of the noise that is kept."""
NO_TOKEN = -1
"""Stands for the choice from invalid probabilities."""


class NoiseBlocks:
    """The noise blocks `[B, V]` of a batch, by index of the token that they are for.

    Torch's generator draws each of them once, in order. Blocks that do not fit into `most_bytes` are not kept, but
    drawn again from the saved state of the generator, which takes longer.

    Args:
        rows: B, the number of rows in the batch.
        most_bytes: maximum size of the blocks kept, the one in use not counted.
        generator: draws the blocks; None for torch's default generator of the device.
    """

    def __init__(self, rows: int, most_bytes: int = MOST_BYTES, generator: torch.Generator | None = None) -> None:
        self._rows, self._most_bytes, self._generator = rows, most_bytes, generator
        self._kept: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}  # states of the generator before each block was drawn
        self._next = 0  # first block never drawn
        self._at = 0  # block that the generator would draw now

    def __len__(self) -> int:
        """Return the number of blocks kept."""
        return len(self._kept)

    def block(self, number: int, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the noise of a token, the next one or any not dropped; `probabilities` defines V, dtype and device."""
        if number in self._kept:
            return self._kept[number]
        block = probabilities.new_empty(self._rows, probabilities.shape[-1])
        if number < self._next:
            generator = torch.Generator(block.device)
            generator.set_state(self._states[number])
            block.exponential_(generator=generator)
        else:
            self._draw(number, block)
        if (len(self._kept) + 1) * block.nbytes <= self._most_bytes:
            self._kept[number] = block
        return block

    def _draw(self, number: int, block: torch.Tensor) -> None:
        if self._generator is None:
            self._generator = generator_of(block.device)
        if self._at != number:
            self._generator.set_state(self._states[number])
        self._states[number] = self._generator.get_state()
        self._at = number + 1  # first, so that `rewind` also undoes an interrupted draw
        block.exponential_(generator=self._generator)
        self._next = self._at

    def rewind(self, number: int) -> None:
        """Set the generator back to before this block; blocks drawn already remain available."""
        if self._generator is None or number == self._at:
            return
        if number < self._at:
            self._states[self._at] = self._generator.get_state()
        self._generator.set_state(self._states[number])
        self._at = number

    def recheck(self) -> None:
        """Drop noise drawn ahead if other code has used the generator since: plain decoding would draw after that."""
        if self._generator is None or self._at == self._next:
            return
        if not torch.equal(self._generator.get_state(), self._states[self._at]):
            for known in (self._kept, self._states):
                for ahead in [number for number in known if number >= self._at]:
                    del known[ahead]
            self._next = self._at

    def forget(self, number: int) -> None:
        """Drop the blocks before this one."""
        for known in (self._kept, self._states):
            for old in [old for old in known if old < number]:
                del known[old]


class Draws:
    """The draws of a batch of B rows; see `NoiseBlocks` for the arguments.

    Whatever was drawn ahead, torch's generator is in the state of plain decoding after as many tokens as the most
    advanced row has taken.
    """

    def __init__(self, rows: int, most_bytes: int = MOST_BYTES, generator: torch.Generator | None = None) -> None:
        self.noise = NoiseBlocks(rows, most_bytes, generator)
        self.taken = [0] * rows  # number of tokens that each row has taken
        self.most_taken = 0

    def take(self, row: int) -> None:
        """Take a row's next token."""
        self.taken[row] += 1
        self.most_taken = max(self.most_taken, self.taken[row])
        self.noise.rewind(self.most_taken)
        self.noise.forget(min(self.taken))

    def leave(self, row: int) -> None:
        """Remove a row that has ended: no block is kept for it."""
        self.taken[row] = sys.maxsize
        self.noise.forget(min(self.taken))


class RowSampler:
    """Draws the tokens of one row of a batch."""

    def __init__(self, draws: Draws, row: int) -> None:
        self._draws, self._row = draws, row

    def draw(self, probabilities: torch.Tensor) -> int:
        """Draw the next token, given probabilities `[1, V]` float32; errors are those of `torch.multinomial`."""
        if not bool(_are_in_range(probabilities).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if not bool(probabilities.sum() > 0):
            raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
        noise = self._draws.noise.block(self._draws.taken[self._row], probabilities)
        token = int((probabilities[0] / noise[self._row]).argmax())
        self.take()
        return token

    def draw_ahead(self, probabilities: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """Draw the token after each node of a tree, without waiting for the device; no token is taken yet.

        Given are probabilities `[S, V]` float32, and the number of new tokens before each node's choice, `[S]`.

        Returns:
            `[S]` int64 on the same device, `NO_TOKEN` where `draw` would raise.
        """
        noise, first = self._draws.noise, self._draws.taken[self._row]
        noise.recheck()
        try:
            blocks = [noise.block(first + depth, probabilities)[self._row] for depth in range(max(depths) + 1)]
        finally:  # even without memory the generator must not stay ahead of the text
            noise.rewind(self._draws.most_taken)
        (levels,) = upload([np.array(depths, dtype=np.int64)], probabilities.device)
        tokens = (probabilities / torch.stack(blocks)[levels]).argmax(dim=-1)  # [S]
        are_valid = _are_in_range(probabilities).all(dim=-1) & (probabilities.sum(dim=-1) > 0)  # [S]
        return tokens.where(are_valid, NO_TOKEN)

    def take(self) -> None:
        """Take the next token, which was drawn ahead."""
        self._draws.take(self._row)


class LoneSampler(RowSampler):
    """Draws for a single row, or one with a generator of its own; None for torch's default one of the device."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__(Draws(1, generator=generator), 0)
        self._generator = generator

    def draw(self, probabilities: torch.Tensor) -> int:
        """Draw by `torch.multinomial`; see `RowSampler.draw`."""
        return int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if device.type == "mps":
        lone: torch.Generator = module._get_default_mps_generator()
        return lone
    generators: Sequence[torch.Generator] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]


def _are_in_range(probabilities: torch.Tensor) -> torch.Tensor:
    return (probabilities >= 0) & (probabilities < torch.inf)
