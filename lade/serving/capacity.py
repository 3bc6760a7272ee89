"""How much text the rows of an engine may hold, and what it takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lade.decoding.controller import LARGEST
from lade.errors import InputError

_SHARE_OF_HOST, _SHARE_OF_DEVICE = 0.25, 0.8
_UNKNOWN_HOST = 16 * 2**30
_GROWTH = 256  # tokens


@dataclass(frozen=True)
class Capacity:
    """The limits of an engine.

    All rows have room for as many tokens as the longest one, so a batch of B rows takes B times the longest row's
    tokens, trees included, times `token_bytes`.

    Attributes:
        max_rows: decoded at a time.
        max_tokens: rows times tokens of the longest one, at most.
        token_bytes: what one token of one row takes in the cache.
    """

    max_rows: int
    max_tokens: int
    token_bytes: int

    def check(self, tokens: int) -> None:
        """Raise `InputError` for a text that has no room even alone; `tokens` is its greatest length."""
        need = needed(tokens)
        if need > self.max_tokens:
            raise InputError(
                f"{tokens} tokens of prompt and answer need a cache of {need} with a step's guesses, at "
                f"{self.token_bytes} bytes each {_mebibytes(need * self.token_bytes)}; there is room for "
                f"{self.max_tokens} ({_mebibytes(self.max_tokens * self.token_bytes)}): give a smaller max_new_tokens, "
                "or the engine a greater max_tokens"
            )

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether texts of these greatest lengths fit beside each other."""
        return len(tokens) <= self.max_rows and len(tokens) * needed(max(tokens)) <= self.max_tokens

    def room(self, tokens: Sequence[int], now: int) -> tuple[int, int]:
        """Rows, and tokens of each, to make room for.

        Args:
            tokens: greatest lengths of the texts beside each other, which fit.
            now: length of the longest one as it is.
        """
        need = needed(max(tokens))
        rows = min(2 * len(tokens), self.max_rows, self.max_tokens // need)
        return max(len(tokens), rows), min(need, needed(now + max(_GROWTH, now // 2)))


def needed(tokens: int) -> int:
    """Slots of the cache that a text of this length takes while it is decoded: a step's tree lies behind it."""
    return tokens + LARGEST


def default_max_tokens(token_bytes: int, device: torch.device) -> int:
    """As many as fit in four fifths of what is free on a CUDA device, or in a quarter of the host's memory."""
    if device.type == "cuda":
        memory = _SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0]
    else:
        memory = _SHARE_OF_HOST * _host_bytes()
    return max(1, int(memory) // token_bytes)


def _host_bytes() -> int:
    names: dict[str, int] = getattr(os, "sysconf_names", {})  # none on Windows
    if "SC_PHYS_PAGES" not in names:
        return _UNKNOWN_HOST
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
