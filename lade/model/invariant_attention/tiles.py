"""The tiles in which keys are summed up: sixty-four positions each, wherever in the cache they lie.

    position   0 ........ 63 | 64 ....... 127 | 128 .. 150                    plain decoding
    slot       0 ........ 63 | 64 ....... 127 | 128 .. 150

    position   0 ........ 63 | 64 ....... 127 | 128 .. 140, 141 142 142 143   a tree of four nodes
    slot       0 ........ 63 | 64 ....... 127 | 128 .. 140, 141 142 143 144

Tiles that lie in place in all rows are read there. The slots of any other tile are collected: the text that it has,
then the nodes of the tree, in the order of their slots. Along the path of a node that is the order of positions, and
what is not on the path has the weight zero, which adds nothing to a sum that is formed from the first key to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

TILE = 64
"""Positions of a tile."""
MOST_COLLECTED = 128
"""Slots that are collected for one tile, at most. Matrix products sum in one go, from the first key to the last, only
up to some size: 192 in MKL."""
MOST_QUERIES = 64
"""Queries of a piece: a prompt's first queries need not look at its last keys, and their weights stay near."""


@dataclass(frozen=True)
class Piece:
    """Queries that are served together, and where their keys lie.

    Attributes:
        queries: of the pass.
        slots: of the keys, from the first one that lies in place, or is collected, to the last one.
        common: number of the first ones of these slots which every query sees.
        hidden: `[B, 1, S, N - common]` bool, true where a query does not see one of the others.
        whole: number of the tiles that lie in place, the first ones of these slots.
        collected: `[B, T, W]` int64, for each tile that comes after these the slots, counted from the first of the
            piece; None where there is no such tile.
        filling: `[B, T, W]` bool, true where `collected` is no slot of the tile but fills it up.
    """

    queries: slice
    slots: slice
    common: int
    hidden: torch.Tensor
    whole: int
    collected: torch.Tensor | None
    filling: torch.Tensor | None


def cut(allowed: torch.Tensor, positions: torch.Tensor) -> Sequence[Piece]:
    """Cut a pass into pieces whose tiles have few enough slots.

    Args:
        allowed: `[B, S, K]` bool, what each query sees.
        positions: `[B, K]` int64, of the keys.
    """
    step = allowed.shape[1]
    tiles = positions.cpu().numpy() // TILE
    pieces: list[Piece] = []
    waiting = [slice(first, min(first + MOST_QUERIES, step)) for first in reversed(range(0, step, MOST_QUERIES))]
    while waiting:
        queries = waiting.pop()
        piece = _piece(queries, allowed[:, queries], tiles)
        if piece is None:  # a path has few enough slots, so some halving ends this
            middle = (queries.start + queries.stop) // 2
            waiting += [slice(middle, queries.stop), slice(queries.start, middle)]
        else:
            pieces.append(piece)
    return pieces


def _piece(queries: slice, allowed: torch.Tensor, tiles: np.ndarray) -> Piece | None:
    """The piece of these queries; None if some tile has too many slots.

    Args:
        queries: of the pass.
        allowed: `[B, S, K]` bool, what each of them sees.
        tiles: `[B, K]`, the tile of each key.
    """
    seen = allowed.any(1).cpu().numpy()  # [B, K]
    found = np.flatnonzero(seen.any(0))
    first, last = (int(found[0]) // TILE, int(found[-1]) + 1) if len(found) else (0, 1)
    whole = max(first, _tiles_in_place(seen, tiles, last))
    start = first * TILE
    rest = _collect(seen[:, whole * TILE : last], tiles[:, whole * TILE : last])
    if rest is not None and rest.shape[-1] > MOST_COLLECTED:
        return None
    slots = slice(start, max(last, whole * TILE))
    shared = allowed[:, :, slots].all(1).all(0).cpu().numpy()
    common = len(shared) if shared.all() else int(shared.argmin())
    hidden = ~allowed[:, None, :, slots][..., common:]
    collected = filling = None
    if rest is not None:
        filling = torch.from_numpy(rest < 0).to(allowed.device)
        collected = torch.from_numpy(np.maximum(rest, 0) + (whole * TILE - start)).to(allowed.device)
    return Piece(queries, slots, common, hidden, whole - first, collected, filling)


def _tiles_in_place(seen: np.ndarray, tiles: np.ndarray, last: int) -> int:
    """How many tiles lie in place: all that their queries see of them, in all rows, and nothing else.

    Args:
        seen: `[B, K]` bool.
        tiles: `[B, K]`.
        last: the last slot that is seen, and one.
    """
    slots = seen.shape[1]
    astray = seen & (tiles != np.arange(slots) // TILE)
    whole = min(slots // TILE, -(-last // TILE))
    if astray.any():
        whole = min(whole, int(astray.any(0).argmax()) // TILE, int(tiles[astray].min()))
    return int(whole)


def _collect(seen: np.ndarray, tiles: np.ndarray) -> np.ndarray | None:
    """`[B, T, W]`: for each row and tile its slots, in their order, and -1 for no slot; None if nothing is seen.

    Args:
        seen: `[B, N]` bool, of the slots to collect from.
        tiles: `[B, N]`.
    """
    lists = []
    for row_seen, row_tiles in zip(seen, tiles, strict=True):
        slots = np.flatnonzero(row_seen)
        numbers = row_tiles[slots]
        lists.append([slots[numbers == number] for number in np.unique(numbers)])
    longest = max((len(slots) for row in lists for slots in row), default=0)
    if not longest:
        return None
    width = -(-longest // TILE) * TILE
    collected = np.full((len(lists), max(map(len, lists)), width), -1, dtype=np.int64)
    for number, row in enumerate(lists):
        for tile, slots in enumerate(row):
            collected[number, tile, : len(slots)] = slots
    return collected
