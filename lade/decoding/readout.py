"""Reads from a pass's logits what a step needs, in one copy from device to host.

    logits [M, V] ──▶ argmax, top-k tokens, choices ──▶ one copy, 8 numbers per row ──▶ host
                      on the device of the logits

This is the only place where a step waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lade.decoding.kernels.layout import BITS, BLOCK, FLOOR, SCALE, TINY, TOKEN, WIDTH, Floats, Ints
from lade.native import library
from lade.native.kernel import FLOATS, HALVES, LONGS, SCORES, TABLE, kernel

Halves = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Readout:
    """Data read from M rows of logits.

    Attributes:
        argmax_ids: `[M]`, the argmax as plain decoding finds it: on float32, where float64 logits may tie.
        entries: `[M, WIDTH]`, top-k tokens with their log-odds, see `lade.decoding.kernels`; None if not requested.
        choices: `[M]` ids that were chosen on the device, copied along; None if there were none.
    """

    argmax_ids: list[int]
    entries: Ints | None = None
    choices: list[int] | None = None

    def rows(self, first: int, count: int) -> Readout:
        """Return the part for `count` rows of logits from index `first` on."""
        span = slice(first, first + count)
        return Readout(
            self.argmax_ids[span],
            None if self.entries is None else self.entries[span],
            None if self.choices is None else self.choices[span],
        )


def read(logits: torch.Tensor, choices: torch.Tensor | None = None, *, wants_entries: bool = True) -> Readout:
    """Read rows of logits, `[M, V]` or `[B, M / B, V]`, of any floating-point dtype.

    `choices`, `[M]` ids on the same device or None, are copied along; `wants_entries` also finds the entries.
    """
    if not logits.is_cpu:
        return _read_on_device(logits, choices, wants_entries=wants_entries)
    argmax_ids, entries = _read_on_host(logits, wants_entries=wants_entries)
    return Readout(argmax_ids.tolist(), entries, None if choices is None else choices.tolist())


def packed(logits: torch.Tensor, *, wants_entries: bool) -> torch.Tensor:
    """Return what `read` reads of `[M, V]` as one tensor there: int32 `[M, 1 + WIDTH]`, `[M, 1]` without entries."""
    if logits.device.type != "cpu":
        return reduced(logits, wants_entries=wants_entries)
    argmax_ids, entries = _read_on_host(logits, wants_entries=wants_entries)
    columns = [argmax_ids[:, None].astype(np.int32), *(() if entries is None else (entries,))]
    return torch.from_numpy(np.concatenate(columns, axis=1))


def unpacked(found: torch.Tensor) -> Readout:
    """Return the readout held by the result of `packed`, after one copy to the host."""
    numbers = found.cpu().numpy()
    return Readout(numbers[:, 0].tolist(), numbers[:, 1:].copy() if numbers.shape[1] > 1 else None)


def _read_on_host(logits: torch.Tensor, *, wants_entries: bool) -> tuple[npt.NDArray[np.int64], Ints | None]:
    """Return argmax and entries of logits in host memory."""
    if library() is None:
        found = reduced(logits.reshape(-1, logits.shape[-1]), wants_entries=wants_entries).numpy()
        return found[:, 0].astype(np.int64), found[:, 1:].copy() if wants_entries else None
    if logits.dtype == torch.bfloat16:  # torch would convert them on all its threads, and wait for busy ones
        halves = logits.contiguous().view(torch.int16).numpy().view(np.uint16)
        picks, entries = entries_of(halves.reshape(-1, logits.shape[-1]))
        return picks, entries if wants_entries else None
    rows = logits.float().numpy().reshape(-1, logits.shape[-1])  # numpy: each torch operation has 5 us of overhead
    if not wants_entries:  # numpy's argmax is ten times as fast as torch's, and returns the first of ties too
        return rows.argmax(axis=-1), None
    return entries_of(np.ascontiguousarray(rows))


def entries_of(logits: Floats | Halves) -> tuple[npt.NDArray[np.int64], Ints]:
    """Return the argmax of each row, `[M]`, and its `WIDTH` likeliest tokens as entries, `[M, WIDTH]`, descending.

    The `WIDTH` likeliest tokens lie in the `WIDTH` blocks with the highest maxima. The normaliser is the sum over the
    block maxima alone, close enough for ranking drafts. Logits `[M, V]` are float32, or uint16 with bits of bfloat16.
    """
    rows, vocabulary = logits.shape
    picks, entries = np.empty(rows, np.int64), np.empty((rows, WIDTH), np.int32)
    read: Any = _entries_of if logits.dtype == np.float32 else _entries_of_bfloat16
    read(logits, np.empty((vocabulary + BLOCK - 1) // BLOCK, np.float32), picks, entries)
    return picks, entries


@kernel(SCORES, FLOATS, LONGS, TABLE, keeps_lock=False)
def _entries_of(logits: Floats, maxima: Floats, picks: npt.NDArray[np.int64], entries: Ints) -> None: ...


@kernel(HALVES, FLOATS, LONGS, TABLE, keeps_lock=False)
def _entries_of_bfloat16(logits: Halves, maxima: Floats, picks: npt.NDArray[np.int64], entries: Ints) -> None: ...


def _read_on_device(logits: torch.Tensor, choices: torch.Tensor | None, *, wants_entries: bool) -> Readout:
    """Reduce logits on their device, and copy the result to the host at once."""
    parts = [reduced(logits.reshape(-1, logits.shape[-1]), wants_entries=wants_entries)]
    if choices is not None:
        parts.append(choices[:, None].int())
    found = torch.cat(parts, dim=1).cpu().numpy()  # [M, 1 + WIDTH + 1]
    return Readout(
        found[:, 0].tolist(),
        found[:, 1 : 1 + WIDTH].copy() if wants_entries else None,
        None if choices is None else found[:, -1].tolist(),
    )


def reduced(logits: torch.Tensor, *, wants_entries: bool) -> torch.Tensor:
    """Return argmax and entries of logits `[M, V]`, int32 `[M, 1 + WIDTH]`: the counterpart of `entries_of`.

    The likeliest K tokens are in the K blocks with the highest maxima, so logits are read once, and only these blocks
    are searched: a search of all takes ten times as long at a vocabulary of 128k.
    """
    tokens = logits.shape[1]
    if logits.dtype == torch.float64:
        logits = logits.float()
    padded = logits
    if tokens % BLOCK:
        padded = torch.nn.functional.pad(logits, (0, -tokens % BLOCK), value=-torch.inf)
    blocks = padded.unflatten(1, (-1, BLOCK))  # [M, V / BLOCK, BLOCK]
    maxima = blocks.amax(2)
    first = maxima.argmax(1, keepdim=True)  # of equal ones the first, as within a block
    inside = _blocks_at(blocks, first).argmax(1, keepdim=True)
    ids: torch.Tensor = (first * BLOCK + inside).int()
    if not wants_entries:
        return ids
    if tokens % BLOCK:  # padding would tie with logits of -inf
        scores, found = logits.float().topk(min(WIDTH, tokens))
    else:
        places = maxima.topk(min(WIDTH, maxima.shape[1])).indices  # [M, K]
        scores, found = _blocks_at(blocks, places).float().topk(WIDTH)  # [M, K], descending
        found = places.gather(1, found // BLOCK) * BLOCK + found % BLOCK
    best = scores[:, :1]
    total = (maxima.float() - best).exp().sum(dim=-1, keepdim=True)
    weights = (scores - best).exp()
    odds = (weights.clamp(min=TINY) / (total - weights).clamp(min=TINY)).log()
    values = ((odds - FLOOR) / SCALE + 0.5).nan_to_num(0.0).clamp(0.0, 255.0)
    entries = (values.int() << BITS | found.int()).masked_fill(found >= TOKEN, TOKEN)
    return torch.cat([ids, torch.nn.functional.pad(entries, (0, WIDTH - entries.shape[1]), value=TOKEN)], dim=1)


def _blocks_at(blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return blocks `[M, N, BLOCK]` at places `[M, K]` as `[M, K * BLOCK]`."""
    found: torch.Tensor = blocks.gather(1, places[..., None].expand(-1, -1, BLOCK)).flatten(1)
    return found
