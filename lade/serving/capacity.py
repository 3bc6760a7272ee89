"""Memory limits of an engine: slots of the KV cache per request and over all rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lade.config import LookaheadConfig
from lade.decoding.drafting.controller import LARGEST
from lade.errors import InputError
from lade.model.kv_cache import BufferSizes, TreeCache
from lade.model.runner import EagerRunner

_SHARE_OF_HOST, _SHARE_OF_DEVICE, _SHARE_OF_PREFIXES = 0.25, 0.8, 0.1
_PEAK = 2.75
"""Peak cache memory in units of the largest cache: old and new buffers while it grows, plus the cache of the joining
prompt, which may be 1.5 times the prompt's own size.
"""
_UNKNOWN_HOST = 16 * 2**30


@dataclass(frozen=True)
class Need:
    """Upper bound on the cache space of one request."""

    tokens: int  # of prompt and answer
    tree: int  # tokens fed in one step

    def limited(self, tokens: int) -> Need:
        """Return this need with its length capped at `tokens`."""
        return self if tokens >= self.tokens else Need(tokens, self.tree)


@dataclass(frozen=True)
class Capacity:
    """The limits of an engine.

    Every row has as many slots as the longest text plus the largest tree, so a batch of B rows takes B times these
    slots, times `token_bytes`. The states of recurrent layers count as extra slots of each row.
    """

    max_rows: int  # requests decoded at a time
    max_tokens: int  # slots over all rows
    token_bytes: int  # of one slot
    sizing: BufferSizes = TreeCache  # how the cache rounds up rows and slots
    state_slots: int = 0  # recurrent states of one row, in slots; independent of its length

    def check(self, need: Need) -> None:
        """Raise `InputError` if a request does not fit even alone."""
        slots = self.slots([need]) + self.state_slots
        if slots > self.max_tokens:
            raise InputError(
                f"{need.tokens} tokens of prompt and answer need a cache of {slots} with a step's drafts, at "
                f"{self.token_bytes} bytes each {_mebibytes(slots * self.token_bytes)}; there is room for "
                f"{self.max_tokens} ({_mebibytes(self.max_tokens * self.token_bytes)}): give a smaller max_new_tokens, "
                "or the engine a larger max_tokens"
            )

    def fits(self, needs: Sequence[Need]) -> bool:
        """Return True if these requests fit side by side at their maximum lengths."""
        slots = self.slots(needs) + self.state_slots
        return len(needs) <= self.max_rows and self.sizing.buffer_rows(len(needs)) * slots <= self.max_tokens

    def slots(self, needs: Sequence[Need], longest: int | None = None) -> int:
        """Return the slots per row needed to decode requests whose longest text has so many tokens, or all it may have.

        Trees lie after the longest text.
        """
        tokens = max(need.tokens for need in needs) if longest is None else longest
        return self.sizing.buffer_slots(tokens, max(need.tree for need in needs))

    def suffices(self, room: tuple[int, int], needs: Sequence[Need], now: int) -> bool:
        """Return True if buffers of so many rows and slots per row hold one step within `max_tokens`; see `room`."""
        rows, slots = room
        total = rows * (slots + self.state_slots)
        return rows >= len(needs) and slots >= self.slots(needs, now) and total <= self.max_tokens

    def longest(self, slots: int, needs: Sequence[Need]) -> int:
        """Return how long the longest text may grow before rows of `slots` slots are too short for a step."""
        tree = max(need.tree for need in needs)
        tokens = slots - tree
        return tokens - max(0, self.sizing.buffer_slots(tokens, tree) - slots)  # undo what rounding up adds

    def room(self, needs: Sequence[Need], now: int) -> tuple[int, int]:
        """Return rows and slots per row to allocate for requests that fit, the longest of which has `now` tokens.

        It is more than the next step takes, so that reallocation is rare.
        """
        most = self.slots(needs)
        most_fit = self.max_tokens // (most + self.state_slots)
        least_rows = self.sizing.buffer_rows(len(needs))
        most_rows = min(self.sizing.buffer_rows(min(2 * len(needs), self.max_rows)), most_fit)
        rows = next(rows for rows in range(most_rows, least_rows - 1, -1) if self.sizing.buffer_rows(rows) == rows)
        return rows, min(most, self.slots(needs, now + self.sizing.spare_tokens(now)))


def largest_tree(config: LookaheadConfig) -> int:
    """Return the maximum number of tokens fed in one step, the root included."""
    if config.method.name == "lookahead":  # rows are up to N - 2 cells longer while the window fills
        return (config.ngram - 1) * (config.window + config.guesses) + config.ngram
    return LARGEST if config.budget is None else config.budget


def default_max_tokens(token_bytes: Mapping[torch.device, float]) -> int:
    """Return the slots, of so many bytes on each device, that fit in 25 % of the host's or 29 % of a device's memory.

    On a device with memory of its own, growth of the cache to its full size at the worst moment stays within 80 % of
    what was free. If the layers lie on several devices, the one with room for the fewest slots decides.
    """
    return max(1, min(int(_cache_bytes(device) / size) for device, size in token_bytes.items()))


def default_prefix_bytes(token_bytes: Mapping[torch.device, float]) -> int:
    """Return a tenth of the KV cache's default size in bytes."""
    return int(_SHARE_OF_PREFIXES * default_max_tokens(token_bytes) * sum(token_bytes.values()))


def _cache_bytes(device: torch.device) -> float:
    """Return the memory budget of keys and values on a device."""
    memory: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(memory, "mem_get_info"):
        return _SHARE_OF_HOST * _host_bytes()
    reserve = memory.memory_reserved(device) - memory.memory_allocated(device)  # held by torch's allocator
    return _SHARE_OF_DEVICE / _PEAK * int(memory.mem_get_info(device)[0] + reserve)


def row_bytes(runner: EagerRunner) -> tuple[dict[torch.device, int], int]:
    """Return bytes per slot on each device, and bytes of recurrent states per row, measured by feeding one token.

    If cached tokens take no bytes since all layers are recurrent, a slot is one byte of the states.
    """
    cache = runner.tree_cache()
    runner.prefill([[0]], cache)
    device_bytes = {device: size for device, size in cache.device_bytes.items() if size}
    return device_bytes or {runner.device: 1}, cache.state_bytes


def _host_bytes() -> int:
    names: dict[str, int] = getattr(os, "sysconf_names", {})  # missing on Windows
    if "SC_PHYS_PAGES" not in names:
        return _UNKNOWN_HOST
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
