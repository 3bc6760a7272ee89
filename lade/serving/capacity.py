"""How much text the rows of an engine may hold, and what it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lade.config import LookaheadConfig
from lade.decoding.drafting.controller import LARGEST
from lade.errors import InputError
from lade.model.kv_cache import BufferSizes, TreeCache
from lade.model.runner import EagerRunner, input_device

_SHARE_OF_HOST, _SHARE_OF_DEVICE = 0.25, 0.8
_PEAK = 2.75
"""Caches of the greatest size that are there at once, at worst: the old and the new one while a cache grows, and the
prompt that joins, as the second row. The latter is in a cache that may be half as large again as the prompt."""
_UNKNOWN_HOST = 16 * 2**30


@dataclass(frozen=True)
class Need:
    """What one text can come to take.

    Attributes:
        tokens: of prompt and answer, at most.
        tree: tokens fed in one of its steps, at most.
    """

    tokens: int
    tree: int

    def limited(self, tokens: int) -> Need:
        """The same of a text that does not become longer than that."""
        return self if tokens >= self.tokens else Need(tokens, self.tree)


@dataclass(frozen=True)
class Capacity:
    """The limits of an engine.

    All rows have room for as many tokens as the longest one and for the largest tree after it, so a batch of B rows
    takes B times these slots, times `token_bytes`. The states of recurrent layers count as further slots of each row.

    Attributes:
        max_rows: decoded at a time.
        max_tokens: slots of all rows together, at most.
        token_bytes: what one token of one row takes in the cache.
        sizing: how rows and slots are rounded up by the cache.
        state_slots: slots that take as much memory as the states of one row, whatever its length.
    """

    max_rows: int
    max_tokens: int
    token_bytes: int
    sizing: BufferSizes = TreeCache
    state_slots: int = 0

    def check(self, need: Need) -> None:
        """Raise `InputError` for a text that has no room even alone."""
        slots = self.slots([need]) + self.state_slots
        if slots > self.max_tokens:
            raise InputError(
                f"{need.tokens} tokens of prompt and answer need a cache of {slots} with a step's guesses, at "
                f"{self.token_bytes} bytes each {_mebibytes(slots * self.token_bytes)}; there is room for "
                f"{self.max_tokens} ({_mebibytes(self.max_tokens * self.token_bytes)}): give a smaller max_new_tokens, "
                "or the engine a greater max_tokens"
            )

    def fits(self, needs: Sequence[Need]) -> bool:
        """Whether these texts fit beside each other, as long as they may become."""
        slots = self.slots(needs) + self.state_slots
        return len(needs) <= self.max_rows and self.sizing.buffer_rows(len(needs)) * slots <= self.max_tokens

    def slots(self, needs: Sequence[Need], longest: int | None = None) -> int:
        """Slots that each row takes while these texts are decoded: the trees lie after the longest one.

        Args:
            needs: of the texts.
            longest: its length; None for the greatest that it can have.
        """
        tokens = max(need.tokens for need in needs) if longest is None else longest
        return self.sizing.buffer_slots(tokens, max(need.tree for need in needs))

    def suffices(self, room: tuple[int, int], needs: Sequence[Need], now: int) -> bool:
        """Whether there is room for a step of these texts, and no more than there may be.

        Args:
            room: rows, and slots of each.
            needs: of the texts beside each other.
            now: length of the longest one as it is.
        """
        rows, slots = room
        total = rows * (slots + self.state_slots)
        return rows >= len(needs) and slots >= self.slots(needs, now) and total <= self.max_tokens

    def longest(self, slots: int, needs: Sequence[Need]) -> int:
        """How long the longest of these texts may be for rows of so many slots to be enough for a step."""
        tree = max(need.tree for need in needs)
        tokens = slots - tree
        return tokens - max(0, self.sizing.buffer_slots(tokens, tree) - slots)  # no less than what rounding up adds

    def room(self, needs: Sequence[Need], now: int) -> tuple[int, int]:
        """Rows, and slots of each, to make room for: more than a step takes, so that copies stay rare.

        Args:
            needs: of texts that fit beside each other.
            now: length of the longest one as it is.
        """
        most = self.slots(needs)
        most_fit = self.max_tokens // (most + self.state_slots)
        least_rows = self.sizing.buffer_rows(len(needs))
        most_rows = min(self.sizing.buffer_rows(min(2 * len(needs), self.max_rows)), most_fit)
        rows = next(rows for rows in range(most_rows, least_rows - 1, -1) if self.sizing.buffer_rows(rows) == rows)
        return rows, min(most, self.slots(needs, now + self.sizing.spare_tokens(now)))


def largest_tree(config: LookaheadConfig) -> int:
    """Tokens that a step feeds at most, the root included."""
    if not config.adaptive:  # while the window fills, its rows are up to N - 2 cells longer
        return (config.ngram - 1) * (config.window + config.guesses) + config.ngram
    return LARGEST if config.budget is None else config.budget


def default_max_tokens(token_bytes: Mapping[torch.device, float]) -> int:
    """As many as fit in a quarter of the host's memory, or as take four fifths of what is free on a device of its own.

    There the cache may grow to its greatest size at the worst moment, and takes no more. Where layers lie on several
    devices, the one that has room for the fewest decides.

    Args:
        token_bytes: what one token of one row takes on each device.
    """
    return max(1, min(int(_cache_bytes(device) / size) for device, size in token_bytes.items()))


def weight_shares(model: PreTrainedModel) -> dict[torch.device, float]:
    """What part of a model's weights lies on each device: about that of a text's keys and values, too."""
    weights: dict[torch.device, float] = {}
    for weight in model.parameters():
        if weight.device.type != "meta":  # offloaded ones are computed on a device that has others, too
            weights[weight.device] = weights.get(weight.device, 0.0) + weight.nbytes
    total = sum(weights.values())
    return {device: size / total for device, size in weights.items()} or {input_device(model): 1.0}


def _cache_bytes(device: torch.device) -> float:
    """What keys and values may take there."""
    on_device = device.type != "cpu" and hasattr(torch.get_device_module(device), "mem_get_info")
    return _SHARE_OF_DEVICE / _PEAK * _free_bytes(device) if on_device else _SHARE_OF_HOST * _host_bytes()


def row_bytes(runner: EagerRunner) -> tuple[dict[torch.device, int], int]:
    """Bytes of a slot by device, and of a row's states, found by feeding a token: no two families keep the same.

    Where a cached token takes no bytes, since all layers are recurrent, a slot is one byte of the states.
    """
    cache = runner.tree_cache()
    runner.prefill([[0]], cache)
    device_bytes = {device: size for device, size in cache.device_bytes.items() if size}
    return device_bytes or {runner.device: 1}, cache.state_bytes


def _free_bytes(device: torch.device) -> int:
    """Free memory of a device, with what torch keeps for later allocations."""
    memory = torch.get_device_module(device)
    free: int = memory.mem_get_info(device)[0]
    return free + int(memory.memory_reserved(device)) - int(memory.memory_allocated(device))


def _host_bytes() -> int:
    names: dict[str, int] = getattr(os, "sysconf_names", {})  # none on Windows
    if "SC_PHYS_PAGES" not in names:
        return _UNKNOWN_HOST
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
