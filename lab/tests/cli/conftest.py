"""What tests of the bench's commands share."""

import json
import signal

import pytest
from spies import watched

from lade_lab.harness.arms import OwnArm


@pytest.fixture
def prompts(tmp_path, request):
    """A file with the texts of the test's module."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in request.module.TEXTS))
    return file


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def interrupting(monkeypatch):
    """Presses Ctrl-C in one of the answers of this library's methods, counted from 1, a warm-up included."""
    state = {"answers": 0, "at": 0}

    def press(*_):
        state["answers"] += 1
        if state["answers"] == state["at"]:
            signal.raise_signal(signal.SIGINT)

    watched(monkeypatch, OwnArm, "complete", press)
    return state
