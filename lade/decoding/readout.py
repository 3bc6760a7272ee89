"""What the logits of a step say: the argmax at each node, and, where a memory asks, the likeliest tokens behind it.

This is the one place where a step waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FLOOR, CEILING = -7.0, 5.0
"""Log-odds beyond which probabilities are not told apart: 0.1 % and 99 %."""
SCALE = (CEILING - FLOOR) / 255
"""Log-odds per unit of a stored value: 0 stands for `FLOOR` and below, 255 for `CEILING` and above."""
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 64
_BOUNDS = np.exp(FLOOR + SCALE * (np.arange(255) + 0.5)).astype(np.float32)
"""Odds halfway between two stored values."""
_TINY = 1e-9


@dataclass(frozen=True)
class Readout:
    """Likeliest tokens of M rows of logits.

    Attributes:
        tokens: `[M, K]` int32, in falling order.
        values: `[M, K]` uint8, their log-odds in steps of `SCALE` above `FLOOR`.
    """

    tokens: npt.NDArray[np.int32]
    values: npt.NDArray[np.uint8]

    def __getitem__(self, rows: slice) -> Readout:
        """Some of the rows."""
        return Readout(self.tokens[rows], self.values[rows])


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


def read(logits: torch.Tensor, width: int) -> tuple[list[int], Readout]:
    """The argmax of each row, and its `width` likeliest tokens.

    The best of 64 tokens are found first, then the best among the blocks that have them: the `width` likeliest tokens
    lie in the `width` blocks with the highest maxima. That is faster than an argmax of the whole. The probabilities are
    relative to the sum over all maxima, which leaves out little: they only weigh guesses.

    Args:
        logits: `[M, V]` in any floating dtype.
        width: K, tokens per row; fewer where the vocabulary is smaller.

    Returns:
        `[M]` ids as `best_tokens` finds them, and the rest.
    """
    if logits.dtype == torch.float64:
        logits = logits.float()
    vocabulary = logits.shape[-1]
    if vocabulary < _BLOCK * width:
        scores, tokens = map(_on_host, logits.topk(min(width, vocabulary)))
        values = _values(scores, _on_host(logits))
    else:
        scores, tokens, maxima = _likeliest(logits, width)
        values = _values(scores, maxima)
    picks: list[int] = tokens[:, 0].tolist()
    for row, first_two in enumerate(scores[:, :2].tolist()):
        if first_two[0] == first_two[-1]:
            picks[row] = int(logits[row].argmax())  # of equal tokens the argmax is the first one
    return picks, Readout(tokens.astype(np.int32), values)


def _likeliest(logits: torch.Tensor, width: int) -> tuple[Floats, Ids, Floats]:
    """Scores and ids of the best tokens, both `[M, K]`, and the maxima of all blocks, `[M, V / 64]`."""
    rows = logits.shape[0]
    if logits.shape[1] % _BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -logits.shape[1] % _BLOCK), value=-torch.inf)
    blocks = logits.reshape(-1, _BLOCK)
    maxima = _on_host(blocks.amax(1)).reshape(rows, -1)
    count = maxima.shape[1]
    best = maxima.argpartition(count - width, axis=1)[:, count - width :]  # [M, K]; topk takes twice as long
    best += np.arange(0, rows * count, count)[:, None]  # counted through all rows
    best = best.ravel()
    chosen = blocks.index_select(0, torch.from_numpy(best).to(logits.device)).view(rows, -1)
    scores, places = map(_on_host, chosen.topk(width))
    tokens = best.take(places // _BLOCK + np.arange(0, rows * width, width)[:, None])
    tokens *= _BLOCK
    tokens += places % _BLOCK
    tokens -= np.arange(0, rows * count * _BLOCK, count * _BLOCK)[:, None]
    return scores, tokens, maxima


def _on_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """As an array: float32 or int64."""
    if tensor.is_floating_point():
        tensor = tensor.float()
    return tensor.cpu().numpy()


def _values(scores: Floats, maxima: Floats) -> npt.NDArray[np.uint8]:
    """Log-odds `[M, K]` in steps of `SCALE`, of scores in falling order, relative to the sum over `maxima`."""
    best = scores[:, :1]
    weights = np.exp(scores - best)
    others = np.exp(maxima - best).sum(1, keepdims=True) - weights
    values: npt.NDArray[np.uint8] = _BOUNDS.searchsorted(weights / np.maximum(others, _TINY)).astype(np.uint8)
    return values
