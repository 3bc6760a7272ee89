"""The recurrent backend, and trees kept over several passes on recurrent layers: pending nodes are fed again.

States can only move forward through text. So between two passes the cache holds the text before the root of each tree,
and a pass feeds the whole tree, including nodes that earlier passes have fed:

    text, in the states           tree, fed by each pass until it is accepted or rejected
    Once upon a time there ────── was ── a ── little ─┬─ girl
                                                      └─ boy
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from lade.backends.recurrent.cores import CorePatches
from lade.clock import Duration
from lade.decoding.tree import TokenTree
from lade.model.cache_layers import Recurrence
from lade.model.facts import RECURRENT_LAYERS, ModelFacts
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


class RefedCache(TreeCache):
    """Holds the text of rows up to the roots of their trees; roots are text as well, and advance with every pass."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: Sequence[Sequence[int]] = ()
        self._slots: int | None = None  # slots of the last pass; None before the first one

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """Record the paths to keep; `commit` learns how many of their nodes have become text."""
        self._paths = paths

    def commit(self, held: Sequence[int]) -> None:
        """Fold the text before the new roots into the states; of the kept nodes `held`, `[B]`, are in the new trees."""
        texts = [path[: len(path) - own] for path, own in zip(self._paths, held, strict=True)]
        if self._slots is None:  # the roots are the last tokens of the prompts
            super().keep(texts, 0, [1] * len(texts))
        else:
            super().keep(texts, self._slots)

    def fed(self, slots: int) -> None:
        """Record a pass over trees of at most `slots` nodes."""
        self._slots = slots


class RefeedingRunner:
    """Feeds whole trees, where `EagerRunner.extend` feeds only nodes that are not cached."""

    refeeds = True

    def __init__(self, runner: EagerRunner) -> None:
        self._runner, self.clock = runner, runner.clock
        self.prefill, self.room = runner.prefill, runner.room

    @property
    def pass_time(self) -> Duration:
        """See `EagerRunner.pass_time`."""
        return self._runner.pass_time

    @property
    def prepared(self) -> bool:
        """See `EagerRunner.prepared`."""
        return self._runner.prepared

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: RefedCache) -> torch.Tensor:
        """Feed one tree per row, whose root is text, and return the logits of nodes that are new, `[B, S, V]`.

        Of each tree the first nodes, `held`, were fed by an earlier pass, and given to the cache's `keep`.
        """
        cache.commit(held)
        logits = self._runner.forward(trees, [()] * len(trees), cache)
        cache.fed(logits.shape[1])
        new = max(len(tree) - own for tree, own in zip(trees, held, strict=True))
        rows = [row[own : own + new] for row, own in zip(logits, held, strict=True)]  # [S or fewer, V]
        return torch.stack([pad(row, (0, 0, 0, new - len(row))) for row in rows])


class RecurrentBackend:
    """Token trees through recurrent layers, see `lade.model.registry`."""

    def of(self, facts: ModelFacts) -> Recurrence:
        """Return the patches with which a model's recurrent layers process token trees."""
        return CorePatches(facts)


BACKEND = RecurrentBackend()
RECURRENT_LAYERS.fill(BACKEND)
