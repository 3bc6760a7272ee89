"""An engine that hangs is found and described; one that is slow, or sets up what is done once, is not."""

import gc
import importlib
import inspect
import logging
from pathlib import Path

import pytest
from served import Passes, running, slow_served, until

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
    assert "phase decode" in line and "served.py" in line and "_changed.wait_for" in line and "8 + " in line
    assert "secret" not in line and len(said(caplog, "goes on after")) == 1


def test_many_short_passes_are_no_hang(caplog):
    with running(slow_served(0.01), pass_timeout=0.15) as server:
        assert server.complete(max_tokens=25, ignore_eos=True, lookahead=None).status_code == 200
    assert not said(caplog, "makes no progress")


class Watched:
    """A watchdog, and the time by which it goes."""

    def __init__(self, limit_s):
        self.now = 100.0
        self.dog = Watchdog(limit_s, clock=lambda: self.now)

    def looks(self, seconds, began, frame=None):
        """What it finds, looking ten times a second."""
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            self.dog.look(None if began is None else CurrentWork("decode", began, ((3, 4),), frame))
        return self.dog.reason


def frame_in(module, name):
    """A call of a function of this name in a module of this name."""
    scope = {"__name__": module, "frame": inspect.currentframe}
    exec(f"def {name}():\n return frame()", scope)
    return scope[name]()


@pytest.mark.parametrize(("module", "name"), sorted(SET_UP))
def test_what_is_done_once_does_not_count(module, name):
    watched = Watched(2.0)
    assert not watched.looks(50, 100.0, frame_in(module, name))
    assert not watched.looks(1.8, 100.0), "1.8 s besides"
    assert watched.looks(0.4, 100.0)
    if module.startswith("triton"):
        pytest.importorskip("triton", reason="triton is not installed")
    assert f"def {name}(" in Path(importlib.import_module(module).__file__).read_text()


def test_the_time_of_one_piece_of_work_counts():
    watched = Watched(2.0)
    for _ in range(5):
        assert not watched.looks(1.5, watched.now)
    assert not watched.looks(60, None), "it waits for requests"
    assert watched.looks(2.2, watched.now) == "decode of 1 rows has taken more than 2 s"
    assert not watched.looks(0.1, None)
    assert not Watched(0.0).looks(1000, 100.0), "without a limit"


class Call:
    """A call of a running thread: frames may end while a caller is asked for, if garbage is collected then."""

    f_globals, f_lineno, f_code, asked = {"__name__": "somewhere"}, 1, inspect.currentframe().f_code, 0

    @property
    def f_back(self):
        self.asked += 1
        assert not gc.isenabled()


def test_the_stack_of_short_work_is_left_alone_and_no_garbage_is_collected_while_one_is_read():
    watched, call = Watched(2.0), Call()
    assert not watched.looks(0.9, 100.0, call) and not call.asked
    assert not watched.looks(0.9, 100.0, call) and call.asked > 5 and gc.isenabled()
