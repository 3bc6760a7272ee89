"""How far a step is from the model."""

import sys
from pathlib import Path

import pytest
import torch
from spies import watched

import lade
from lade.decoding.tree import TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.testing import toy_model

PACKAGE = str(Path(lade.__file__).parent)


def own_frames():
    """Names of this package's functions that are being called, the innermost first."""
    frame, names = sys._getframe(2), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_runner_calls_the_model_itself(family, monkeypatch):
    model = toy_model(family, vocabulary=48)
    runner, cache = EagerRunner(model, lade.supports(model).require(), model.generation_config), TreeCache()
    runner.prefill([[1, 2]], cache)
    found = watched(monkeypatch, type(model), "forward", lambda *_, **__: own_frames())
    assert torch.isfinite(runner.forward([TokenTree(3)], [[1, 2, 3]], cache)).all()
    assert found == [["forward"]]
