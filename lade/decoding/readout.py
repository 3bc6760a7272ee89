"""What the logits of a step say: the argmax at each node, and, where a memory asks, the likeliest tokens behind it.

This is the one place where a step waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FLOOR, CEILING = -7.0, 5.0
"""Log-odds beyond which probabilities are not told apart: 0.1 % and 99 %."""
SCALE = (CEILING - FLOOR) / 255
"""Log-odds per unit of a stored value: 0 stands for `FLOOR` and below, 255 for `CEILING` and above."""
_BLOCK = 64
_TINY = 1e-6


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
    found = _likeliest(logits, min(width, logits.shape[-1]))
    scores, tokens, maxima = (tensor.cpu() for tensor in found)
    picks = tokens[:, 0].tolist()
    if scores.shape[1] > 1:
        for row in (scores[:, 0] <= scores[:, 1]).nonzero().flatten().tolist():
            picks[row] = int(logits[row].argmax())  # of equal tokens the argmax is the first one
    return picks, Readout(tokens.numpy().astype(np.int32), _values(scores.float().numpy(), maxima.float().numpy()))


def _likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores and ids of the best tokens, both `[M, K]`, and the maxima of all blocks, `[M, V / 64]`."""
    rows, vocabulary = logits.shape
    if vocabulary < _BLOCK * width:
        scores, tokens = logits.topk(width)
        return scores, tokens, logits
    if vocabulary % _BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -vocabulary % _BLOCK), value=-torch.inf)
    blocks = logits.view(rows, -1, _BLOCK)
    maxima = blocks.amax(-1)
    best = maxima.topk(width, sorted=False).indices  # [M, K]
    scores, places = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).view(rows, -1).topk(width)
    return scores, best.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK, maxima


def _values(scores: npt.NDArray[np.float32], maxima: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Log-odds `[M, K]` in steps of `SCALE`, of scores in falling order, relative to the sum over `maxima`."""
    likelihoods = np.exp(scores - scores[:, :1])
    likelihoods /= np.exp(maxima - scores[:, :1]).sum(1, keepdims=True)
    odds = np.log(likelihoods + _TINY) - np.log1p(_TINY - np.minimum(likelihoods, 1.0))
    return np.rint(np.clip((odds - FLOOR) / SCALE, 0, 255)).astype(np.uint8)
