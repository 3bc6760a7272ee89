"""An engine that hangs is found and described; one that is slow, or sets up what is done once, is not."""

import importlib
import logging
import sys
from pathlib import Path

import pytest
from served import Passes, running, slow_served, until

from lade.server import failures
from lade.server.failures import SET_UP, Watchdog
from lade.serving.snapshot import CurrentWork

BODY = {"max_tokens": 30, "ignore_eos": True}


def live(server):
    response = server.http.get("/live")
    return response.status_code, response.json()


def said(caplog, words):
    return [text for text in caplog.messages if words in text]


def test_a_pass_that_hangs_turns_the_probes_red_until_it_returns(caplog):
    passes, texts = Passes(), []
    caplog.set_level(logging.INFO, "lade")
    with running(slow_served(wait=passes), pass_timeout=0.3) as server:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a secret", "stream": True, **BODY}) as sent:
            passes.let(5)
            until(lambda: live(server)[0] == 503)
            reason = "decode of 1 rows has taken more than 0.3 s"
            assert live(server) == (503, {"status": "stuck", "reason": reason})
            assert server.http.get("/ready").status_code == 503
            passes.let_all()
            texts += sent.iter_lines()
        until(lambda: live(server) == (200, {"status": "ok"}))
        assert server.http.get("/ready").status_code == 200 and "data: [DONE]" in texts
    (line,) = said(caplog, "makes no progress")
    assert "phase decode" in line and "served.py" in line and "_allowed.acquire" in line and "8 + " in line
    assert "secret" not in line and len(said(caplog, "goes on after")) == 1


def test_many_short_passes_are_no_hang(caplog):
    with running(slow_served(0.01), pass_timeout=0.15) as server:
        assert server.complete(max_tokens=60, ignore_eos=True).status_code == 200
    assert not said(caplog, "makes no progress")


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(failures, "perf_counter", lambda: self.now)

    def looks(self, dog, seconds, began, frame=None):
        """Look ten times a second."""
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            dog.look(None if began is None else CurrentWork("decode", began, ((3, 4),), frame))


def frame_in(module, name):
    """A call of a function of this name in a module of this name."""
    scope = {"__name__": module, "frame": sys._getframe}
    exec(f"def {name}():\n return frame()", scope)
    return scope[name]()


@pytest.mark.parametrize(("module", "name"), sorted(SET_UP))
def test_what_is_done_once_does_not_count(monkeypatch, module, name):
    clock, dog = Clock(monkeypatch), Watchdog(2.0)
    clock.looks(dog, 50, 100.0, frame_in(module, name))
    clock.looks(dog, 1.8, 100.0)
    assert not dog.reason, "1.8 s besides"
    clock.looks(dog, 0.4, 100.0)
    assert dog.reason


@pytest.mark.parametrize(("module", "name"), sorted(SET_UP))
def test_what_is_done_once_has_these_names(module, name):
    if module.startswith("triton"):
        pytest.importorskip("triton", reason="triton is not installed")
    assert f"def {name}(" in Path(importlib.import_module(module).__file__).read_text()


def test_the_time_of_one_piece_of_work_counts(monkeypatch):
    clock, dog = Clock(monkeypatch), Watchdog(2.0)
    for _ in range(5):
        clock.looks(dog, 1.5, clock.now)
        assert not dog.reason
    clock.looks(dog, 60, None)
    assert not dog.reason, "it waits for requests"
    began = clock.now
    clock.looks(dog, 2.2, began)
    assert dog.reason == "decode of 1 rows has taken more than 2 s"
    clock.looks(dog, 0.1, None)
    assert not dog.reason


def test_without_a_limit_nothing_hangs(monkeypatch):
    clock, dog = Clock(monkeypatch), Watchdog(0.0)
    clock.looks(dog, 1000, 100.0)
    assert not dog.reason
