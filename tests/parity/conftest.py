"""Shared by the parity tests: one thread (the models are tiny), and a look at what a generation did inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import Watch
from pretend import DEVICES, torch_threads
from spies import watched

from lade.backends.trials import backend as trials
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Notes the trees that are fed and the paths that are kept."""
    seen = Watch()

    def fed(runner: EagerRunner, trees: Any, rows: Any, cache: Any) -> None:
        seen.trees.extend(trees)
        deepest = max(max(tree.depths) for tree in trees)
        seen.furthest = max(seen.furthest, deepest + max(cache.lengths))

    watched(monkeypatch, EagerRunner, "forward", fed)
    watched(monkeypatch, TreeCache, "keep", lambda cache, paths, *_, **__: seen.paths.extend(paths))
    return seen


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Class names of the models on which trees were compared with plain decoding, one entry a comparison."""
    return watched(monkeypatch, trials, "worst_error", lambda model, *_, **__: type(model).__name__)
