"""Shared by the parity tests: one thread (the models are tiny), and a look at what a generation did inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import Watch

from lade.backends.trials import backend as trials
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Notes the trees that are fed and the paths that are kept."""
    seen = Watch()
    forward, keep = EagerRunner.forward, TreeCache.keep

    def watched_forward(self, trees, rows, cache):  # type: ignore[no-untyped-def]
        seen.trees.extend(trees)
        deepest = max(max(tree.depths) for tree in trees)
        seen.furthest = max(seen.furthest, deepest + max(cache.lengths))
        return forward(self, trees, rows, cache)

    def watched_keep(self, paths, fed):  # type: ignore[no-untyped-def]
        seen.paths.extend(paths)
        return keep(self, paths, fed)

    monkeypatch.setattr(EagerRunner, "forward", watched_forward)
    monkeypatch.setattr(TreeCache, "keep", watched_keep)
    return seen


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Class names of the models on which trees were compared with plain decoding, one entry a comparison."""
    names: list[str] = []
    worst_error = trials.worst_error

    def counted(model: Any, *args: Any, **kwargs: Any) -> float:
        names.append(type(model).__name__)
        return worst_error(model, *args, **kwargs)

    monkeypatch.setattr(trials, "worst_error", counted)
    return names
