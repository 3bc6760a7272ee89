"""What the logits of a step say: the argmax at each node, and, where a memory asks, the likeliest tokens behind it.

This is the one place where a step waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from lade.decoding import kernels
from lade.decoding.kernels import WIDTH, Ints

_BLOCK = 64


def best_tokens(logits: torch.Tensor) -> list[list[int]]:
    """Argmax over the last dimension, as plain decoding finds it: on float32, where float64 may have ties.

    Args:
        logits: `[B, S, V]` in any floating dtype.

    Returns:
        `[B, S]` ids.
    """
    if logits.device.type == "cpu":  # numpy's argmax is ten times as fast as torch's, and takes the first one too
        found: list[list[int]] = logits.float().numpy().argmax(axis=-1).tolist()
        return found
    if logits.dtype == torch.float64:
        logits = logits.float()
    picks: list[list[int]] = logits.argmax(dim=-1).tolist()
    return picks


def read(logits: torch.Tensor) -> tuple[list[int], Ints]:
    """The argmax of each row, and its likeliest tokens with their log-odds.

    The best of 64 tokens are found first, on the device; then only the blocks that have the best of those are looked
    at. That is faster than an argmax of the whole.

    Args:
        logits: `[M, V]` in any floating dtype.

    Returns:
        `[M]` ids as `best_tokens` finds them, and `[M, WIDTH]` int32, see `kernels.entries_of`.
    """
    logits = logits.float().contiguous()
    maxima = _maxima(logits)
    if logits.device.type != "cpu":
        return _read_remotely(logits, maxima)
    picks, entries = kernels.entries_of(logits.numpy(), maxima.numpy(), _BLOCK)
    return picks.tolist(), entries


def _maxima(logits: torch.Tensor) -> torch.Tensor:
    """Of each block, `[M, V / 64, rounded up]`."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    if whole == logits.shape[1]:
        return logits.view(-1, whole // _BLOCK, _BLOCK).amax(2)
    parts = [logits[:, :whole].unflatten(1, (-1, _BLOCK)).amax(2)] if whole else []
    return torch.cat([*parts, logits[:, whole:].amax(1, keepdim=True)], dim=1)


def _read_remotely(logits: torch.Tensor, maxima: torch.Tensor) -> tuple[list[int], Ints]:
    """Where logits are on another device, only what is needed of them is copied."""
    scores, tokens = logits.topk(min(WIDTH, logits.shape[1]))
    picks = logits.argmax(dim=-1, keepdim=True)
    parts = picks.int(), tokens.int(), scores.view(torch.int32), maxima.view(torch.int32)
    found = torch.cat(parts, dim=1).cpu().numpy()  # one copy, of floats as they are stored
    ends = np.cumsum([part.shape[1] for part in parts[:-1]])
    best, ids, *floats = (np.ascontiguousarray(part) for part in np.split(found, ends, axis=1))
    of_ids, of_blocks = (part.view(np.float32) for part in floats)
    return best[:, 0].tolist(), kernels.entries_of_best(of_ids, ids.astype(np.int64), of_blocks)
