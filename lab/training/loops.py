"""Teaching a small model not to go round in circles, after Xu et al., "Learning to Break the Loop" (2022).

Greedy decoding of a small model soon repeats a line for ever: every repetition makes the next one likelier. So some
rows are made to loop, and there the model is taught to give a repeated token half the probability that it gave
to the same token one round earlier. Text that does not loop is not touched by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_DAMPING = 0.5  # the wanted probability of a token, relative to the one it had a round earlier
_SHORTEST, _LONGEST = 3, 64  # tokens in a round
TOLERATED = 8  # tokens of repetition that honest code has too, and that go unpunished


@dataclass(frozen=True)
class LoopRows:
    """Rows that begin as text and then loop, and where each label was one round earlier.

    ids: [R, T + 1] int64; earlier: [R, T] int64, the place of the same label a round before; looping: [R, T] bool,
    whether the label continues a repetition that has lasted too long.
    """

    ids: torch.Tensor
    earlier: torch.Tensor
    looping: torch.Tensor


def make_loops(rows: torch.Tensor, seed: list[int]) -> LoopRows:
    """Let each of `rows` [R, T + 1] run in a circle from somewhere in its first half on.

    The circle is closed where a token occurs for a second time, as it is when a model falls into a loop.
    """
    random = np.random.default_rng(seed)
    ids = rows.numpy().copy()
    labels = ids.shape[1] - 1
    places = np.arange(labels)
    earlier, looping = np.zeros((len(ids), labels), np.int64), np.zeros((len(ids), labels), np.bool_)
    for row, tokens in enumerate(ids):
        start, period = _circle(tokens, random)
        repeated = np.arange(start + period, labels + 1)
        tokens[repeated] = tokens[start + (repeated - start) % period]
        earlier[row] = np.maximum(places - period, 0)
        looping[row] = places >= start + period + TOLERATED
    return LoopRows(torch.from_numpy(ids), torch.from_numpy(earlier), torch.from_numpy(looping))


def loop_loss(log_probs: torch.Tensor, earlier: torch.Tensor, looping: torch.Tensor) -> torch.Tensor:
    """Return the mean penalty of the labels' `log_probs` [R, T] where they repeat, []."""
    probs = log_probs.exp()
    wanted = _DAMPING * probs.detach().gather(1, earlier)
    penalty = -torch.log((1 - (probs - wanted).abs()).clamp_min(1e-4))
    return (penalty * looping).sum() / looping.sum().clamp_min(1)  # a short row may not have looped for long


def _circle(tokens: NDArray[np.int64], random: np.random.Generator) -> tuple[int, int]:
    """Return where a circle of `tokens` starts and its period; the token after the period equals the first."""
    half = len(tokens) // 2
    for start in random.permutation(np.arange(1, half)):
        again = np.flatnonzero(tokens[start + _SHORTEST : start + _LONGEST + 1] == tokens[start])
        if len(again):
            return int(start), int(_SHORTEST + random.choice(again))
    return half, _SHORTEST
