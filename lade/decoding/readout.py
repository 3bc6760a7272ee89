"""What is read of the logits of a pass.

    logits [M, V] ──▶ argmax, likeliest tokens, choices ──▶ one copy, of 8 numbers a row ──▶ host
                      on the device that has them

This is the one place where a step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lade.decoding import kernels
from lade.decoding.kernels import BITS, FLOOR, SCALE, TINY, TOKEN, WIDTH, Ints

_BLOCK = 64


@dataclass(frozen=True)
class Readout:
    """What M rows of logits say.

    Attributes:
        picks: `[M]` ids, the argmax of each row as plain decoding finds it: on float32, where float64 may have ties.
        entries: `[M, WIDTH]`, its likeliest tokens with their log-odds, see `kernels`; None where nobody asked.
        choices: `[M]` ids that were found before, and came in the same copy; None where there were none.
    """

    picks: list[int]
    entries: Ints | None = None
    choices: list[int] | None = None

    def split(self, chosen: Sequence[bool]) -> list[Readout]:
        """The same in equal parts, as many as `chosen` has entries; those that are not chosen have no choices."""
        size = len(self.picks) // len(chosen)
        spans = [slice(part * size, (part + 1) * size) for part in range(len(chosen))]
        return [
            Readout(
                self.picks[span],
                None if self.entries is None else self.entries[span],
                self.choices[span] if self.choices is not None and keeps else None,
            )
            for span, keeps in zip(spans, chosen, strict=True)
        ]


def read(logits: torch.Tensor, choices: torch.Tensor | None = None, *, likeliest: bool = True) -> Readout:
    """Read rows of logits.

    Args:
        logits: `[M, V]` in any floating dtype.
        choices: `[M]` ids on the same device, to be read along.
        likeliest: whether anybody asks for the entries.
    """
    if logits.device.type != "cpu":
        return _read_remotely(logits, choices, likeliest=likeliest)
    chosen = None if choices is None else choices.tolist()
    if not likeliest:  # numpy's argmax is ten times as fast as torch's, and takes the first one too
        return Readout(logits.float().numpy().argmax(axis=-1).tolist(), None, chosen)
    logits = logits.float().contiguous()
    picks, entries = kernels.entries_of(logits.numpy(), _maxima(logits).numpy(), _BLOCK)
    return Readout(picks.tolist(), entries, chosen)


def _maxima(logits: torch.Tensor) -> torch.Tensor:
    """Of each 64 tokens, `[M, V / 64, rounded up]`: only blocks that have the best of these need to be looked at."""
    whole = logits.shape[1] // _BLOCK * _BLOCK
    if whole == logits.shape[1]:
        return logits.view(-1, whole // _BLOCK, _BLOCK).amax(2)
    parts = [logits[:, :whole].unflatten(1, (-1, _BLOCK)).amax(2)] if whole else []
    return torch.cat([*parts, logits[:, whole:].amax(1, keepdim=True)], dim=1)


def _read_remotely(logits: torch.Tensor, choices: torch.Tensor | None, *, likeliest: bool) -> Readout:
    """Where logits are on another device, all is found there, and copied at once."""
    logits = logits.float().contiguous()
    parts = [logits.argmax(dim=-1, keepdim=True).int()]
    if likeliest:
        parts.append(_entries(logits))
    if choices is not None:
        parts.append(choices[:, None].int())
    found = torch.cat(parts, dim=1).cpu().numpy()  # [M, 1 + WIDTH + 1]
    return Readout(
        found[:, 0].tolist(),
        found[:, 1 : 1 + WIDTH].copy() if likeliest else None,
        None if choices is None else found[:, -1].tolist(),
    )


def _entries(logits: torch.Tensor) -> torch.Tensor:
    """Entries `[M, WIDTH]` int32 of float32 logits `[M, V]`; see `kernels.entries_of`, which does the same."""
    scores, tokens = logits.topk(min(WIDTH, logits.shape[1]))  # [M, K], in falling order
    best = scores[:, :1]
    total = (_maxima(logits) - best).exp().sum(dim=-1, keepdim=True)
    weights = (scores - best).exp()
    odds = (weights.clamp(min=TINY) / (total - weights).clamp(min=TINY)).log()
    values = ((odds - FLOOR) / SCALE + 0.5).nan_to_num(0.0).clamp(0.0, 255.0)
    entries = (values.int() << BITS | tokens.int()).masked_fill(tokens >= TOKEN, TOKEN)
    return torch.nn.functional.pad(entries, (0, WIDTH - entries.shape[1]), value=TOKEN)
