"""Refusals come at once, whatever is decoded meanwhile."""

import statistics
import sys
import threading
import time

import pytest
from served import running, slow_served, until

from lade.server.keys import Key, Keys
from lade.server.listen import SWITCH_S

TIMES = 12
SOON, LATEST = 2, 20
"""Passes made meanwhile: a median, and the most of some dozen. Seconds would be more where others use the machine."""
KEY = {"authorization": "Bearer sk-1"}
LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 480, "ignore_eos": True, "lookahead": None}
CHAT = "/v1/chat/completions"


def spin(seconds):
    """As the code of a model between its kernels: Python's lock is held, for seconds of this thread's own."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture(scope="module")
def busy():
    """Two rows decode, and another request has the only place in the line."""
    keys, before = Keys((Key("a", "sk-1"),)), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with running(slow_served(0.02, wait=spin), max_rows=2, max_waiting=1, keys=keys, max_body=2**12) as server:
            threads = [begun(server) for _ in range(3)]
            until(lambda: (server.service.snapshot().rows, server.service.snapshot().waiting) == (2, 1))
            yield server
            server.service.abort()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)


def begun(server):
    """A thread that reads a stream, once that has its place."""
    has_place = threading.Event()

    def read():
        with server.http.stream("POST", CHAT, json={**LONG, "stream": True}, headers=KEY) as response:
            has_place.set()
            for _ in response.iter_raw():
                pass

    thread = threading.Thread(target=read)
    thread.start()
    assert has_place.wait(60)
    return thread


@pytest.mark.parametrize(
    ("status", "path", "asked"),
    [
        (503, CHAT, {"json": LONG}),
        (503, CHAT, {"json": {**LONG, "stream": True}}),
        (529, "/v1/messages", {"json": {"messages": LONG["messages"], "max_tokens": 9}}),
        (401, CHAT, {"json": LONG, "headers": {"authorization": "Bearer wrong"}}),
        (400, CHAT, {"json": {**LONG, "temperature": -1}}),
        (400, CHAT, {"content": "{", "headers": {**KEY, "content-type": "application/json"}}),
        (403, CHAT, {"json": LONG, "headers": {**KEY, "host": "evil.example"}}),
        (404, CHAT, {"json": {**LONG, "model": "nobody"}}),
        (404, "/v1/nothing", {"json": {}}),
        (413, CHAT, {"json": {**LONG, "user": "x" * 2**13}}),
        (415, CHAT, {"data": {"a": "b"}}),
    ],
)
def test_refusals_come_at_once_while_others_are_decoded(busy, status, path, asked):
    passes = []
    for _ in range(TIMES):
        before = busy.service.snapshot().passes
        response = busy.http.post(path, **{"headers": KEY, **asked})
        passes.append(busy.service.snapshot().passes - before)
        assert response.status_code == status and response.json()["error"]["message"], response.text
        assert status not in (503, 529) or response.json()["error"]["type"] == "overloaded_error"
    now = busy.service.snapshot()
    assert (now.rows, now.waiting) == (2, 1), "it was busy all the time"
    assert statistics.median(passes) <= SOON and max(passes) <= LATEST, passes
