"""Shared by the tests of `lade.Engine`: one thread (the models are tiny), no measuring, and no thread left behind."""

import sys
import time
from pathlib import Path

import pytest
from pretend import torch_threads
from serving_toys import engine_threads
from spies import watched

from lade.model.prefill import PromptPasses

sys.path.append(str(Path(__file__).parent.parent / "parity"))  # where the tiny models of all families are


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    end = time.monotonic() + 10.0
    while engine_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not engine_threads(), "an engine was left open"


@pytest.fixture
def fed(monkeypatch):
    """Shapes of what prefill feeds, pass by pass, padding included."""
    shapes = []

    def see(passes, prompts, sharing, cache, hook):
        if prompts != [[0]]:  # which an engine feeds to find out what a row takes
            shapes.append((len(prompts), max(map(len, prompts)) - cache.get_seq_length()))

    watched(monkeypatch, PromptPasses, "feed", see)
    return shapes
