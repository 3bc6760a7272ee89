"""Stand-ins for a model's passes: a function of the text, a cache of ids, a cost of passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lade.clock import Clock, Duration, WallClock
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree


def nearly_flat_cost() -> StepCost:
    """Return a step cost that makes drafting worthwhile: 128 tokens at once cost twice as much as one."""
    return StepCost.of({1: [1e-3], 128: [2e-3]})


class ListCache:
    """A fake KV cache of token ids, for checking which tokens each row holds.

    Attributes:
        rows: `[B]` lists of cached ids.
    """

    def __init__(self, batch: int = 1) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]

    @property
    def lengths(self) -> list[int]:
        """Number of cached ids of each row, `[B]`."""
        return [len(row) for row in self.rows]

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep the ids on each row's path, out of its last `fed` ones."""
        for row, path in zip(self.rows, paths, strict=True):
            start = len(row) - fed
            row[start:] = [row[start + node] for node in path]

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        self.rows = [self.rows[i] for i in indices.tolist()]


class FunctionRunner:
    """A fake runner: a function from the text to its next token takes the place of the model.

    Each node sees the cache and its ancestors, as in a model, so wrong bookkeeping leads to a wrong text.

    Args:
        follow: returns the token that follows a text.
        vocabulary: V, the vocabulary size.
        max_length: maximum number of positions; None for no limit.
    """

    def __init__(self, follow: Callable[[Sequence[int]], int], vocabulary: int, max_length: int | None = None) -> None:
        self.follow, self.vocabulary, self.max_length = follow, vocabulary, max_length
        self.clock: Clock = WallClock()
        self.pass_time = Duration(0.0, 0.0)
        self.prepared = False
        self.passes = 0

    def room(self, cached: int) -> int | None:
        """Return how deep a tree may be before `max_length`; None for no limit."""
        return None if self.max_length is None else max(0, self.max_length - 1 - cached)

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: ListCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Return the logits `[B, V]` after each row; call `hook` with those of all tokens."""
        cache.rows = [list(row) for row in rows]
        for number, row in enumerate(rows if hook else ()):
            assert hook is not None
            hook([number], 0, torch.stack([self._logits(row[: n + 1]) for n in range(len(row))]))
        return torch.stack([self._logits(row) for row in rows])

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: ListCache) -> torch.Tensor:
        """Return the logits `[B, S, V]` of all nodes; zeros pad the rows with smaller trees."""
        self.passes += 1
        size = max(map(len, trees))
        logits = torch.zeros(len(trees), size, self.vocabulary)
        for row, (tree, cached) in enumerate(zip(trees, cache.rows, strict=True)):
            seen = tree.closure()
            for node in range(len(tree)):
                text = cached + [tree.ids[i] for i in range(len(tree)) if seen[node, i]]
                logits[row, node] = self._logits(text)
            cached.extend(tree.ids + [-1] * (size - len(tree)))
        return logits

    def _logits(self, text: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(self.vocabulary)
        logits[self.follow(text)] = 1.0
        return logits
