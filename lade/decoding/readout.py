"""What is read of the logits of a pass.

    logits [M, V] ──▶ argmax, likeliest tokens, choices ──▶ one copy, of 8 numbers a row ──▶ host
                      on the device that has them

This is the one place where a step waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lade.decoding.kernels import reading
from lade.decoding.kernels.layout import BITS, BLOCK, FLOOR, SCALE, TINY, TOKEN, WIDTH, Ints


@dataclass(frozen=True)
class Readout:
    """What was read of M rows of logits.

    Attributes:
        argmax_ids: `[M]`, the argmax of each row as plain decoding finds it: on float32, where float64 may have ties.
        entries: `[M, WIDTH]`, its likeliest tokens with their log-odds, see `kernels`; None if not wanted.
        choices: `[M]` ids that were chosen on the device, and came in the same copy; None if there were none.
    """

    argmax_ids: list[int]
    entries: Ints | None = None
    choices: list[int] | None = None

    def rows(self, first: int, count: int) -> Readout:
        """The part that belongs to `count` rows of logits from number `first` on."""
        span = slice(first, first + count)
        return Readout(
            self.argmax_ids[span],
            None if self.entries is None else self.entries[span],
            None if self.choices is None else self.choices[span],
        )


def read(logits: torch.Tensor, choices: torch.Tensor | None = None, *, wants_entries: bool = True) -> Readout:
    """Read rows of logits.

    Args:
        logits: `[M, V]` or `[B, M / B, V]` in any floating dtype.
        choices: `[M]` ids on the same device, to be read along.
        wants_entries: whether to find the entries, too.
    """
    if not logits.is_cpu:
        return _read_remotely(logits, choices, wants_entries=wants_entries)
    argmax_ids, entries = _read_here(logits, wants_entries=wants_entries)
    return Readout(argmax_ids.tolist(), entries, None if choices is None else choices.tolist())


def packed(logits: torch.Tensor, *, wants_entries: bool) -> torch.Tensor:
    """What `read` would read, where the logits are: int32 `[M, 1 + WIDTH]`, or `[M, 1]` without entries.

    Args:
        logits: `[M, V]` in any floating dtype.
        wants_entries: whether to find the entries, too.
    """
    if logits.device.type != "cpu":
        logits = logits.float().contiguous()
        ids = logits.argmax(dim=-1, keepdim=True).int()
        return torch.cat([ids, _entries(logits)], dim=1) if wants_entries else ids
    argmax_ids, entries = _read_here(logits, wants_entries=wants_entries)
    columns = [argmax_ids[:, None].astype(np.int32), *(() if entries is None else (entries,))]
    return torch.from_numpy(np.concatenate(columns, axis=1))


def unpacked(found: torch.Tensor) -> Readout:
    """The readout that `packed` has packed, after one copy to the host."""
    numbers = found.cpu().numpy()
    return Readout(numbers[:, 0].tolist(), numbers[:, 1:].copy() if numbers.shape[1] > 1 else None)


def _read_here(logits: torch.Tensor, *, wants_entries: bool) -> tuple[npt.NDArray[np.int64], Ints | None]:
    """Argmax and entries of logits on the host."""
    rows = logits.float().numpy().reshape(-1, logits.shape[-1])  # by numpy: an operation of torch takes 5 us here
    if not wants_entries:  # numpy's argmax is ten times as fast as torch's, and takes the first one too
        return rows.argmax(axis=-1), None
    return reading.entries_of(np.ascontiguousarray(rows))


def _maxima(logits: torch.Tensor) -> torch.Tensor:
    """Of each `BLOCK` tokens, `[M, V / BLOCK, rounded up]`."""
    whole = logits.shape[1] // BLOCK * BLOCK
    if whole == logits.shape[1]:
        return logits.view(-1, whole // BLOCK, BLOCK).amax(2)
    parts = [logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(2)] if whole else []
    return torch.cat([*parts, logits[:, whole:].amax(1, keepdim=True)], dim=1)


def _read_remotely(logits: torch.Tensor, choices: torch.Tensor | None, *, wants_entries: bool) -> Readout:
    """Logits on another device: all is found there, and copied at once."""
    parts = [packed(logits.reshape(-1, logits.shape[-1]), wants_entries=wants_entries)]
    if choices is not None:
        parts.append(choices[:, None].int())
    found = torch.cat(parts, dim=1).cpu().numpy()  # [M, 1 + WIDTH + 1]
    return Readout(
        found[:, 0].tolist(),
        found[:, 1 : 1 + WIDTH].copy() if wants_entries else None,
        None if choices is None else found[:, -1].tolist(),
    )


def _entries(logits: torch.Tensor) -> torch.Tensor:
    """Entries `[M, WIDTH]` int32 of float32 logits `[M, V]`; see `reading.entries_of`, which does the same."""
    scores, tokens = logits.topk(min(WIDTH, logits.shape[1]))  # [M, K], in falling order
    best = scores[:, :1]
    total = (_maxima(logits) - best).exp().sum(dim=-1, keepdim=True)
    weights = (scores - best).exp()
    odds = (weights.clamp(min=TINY) / (total - weights).clamp(min=TINY)).log()
    values = ((odds - FLOOR) / SCALE + 0.5).nan_to_num(0.0).clamp(0.0, 255.0)
    entries = (values.int() << BITS | tokens.int()).masked_fill(tokens >= TOKEN, TOKEN)
    return torch.nn.functional.pad(entries, (0, WIDTH - entries.shape[1]), value=TOKEN)
