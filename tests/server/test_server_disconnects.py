"""Clients that leave, and more clients than there are places for."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import SOON, Passes, held_up, running, slow_served, until, until_placed

SLOW = slow_served()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def slow():
    with running(SLOW, max_rows=1, max_waiting=4) as server:
        yield server


def leave(server, stream, there, tokens=450, prompt="x"):
    """Ask for a long answer, and close the connection when the request is where it is to be left."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        until(there)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_row(slow, stream):
    before, ended = cancelled(slow), cancelled_by_engine(slow)
    leave(slow, stream, lambda: slow.service.snapshot().rows == 1)
    until(slow.at_rest)
    until(lambda: cancelled(slow) == before + 1)
    assert cancelled_by_engine(slow) == ended + 1, "it was written to its end"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_frees_the_place(stream):
    passes = Passes()
    with running(slow_served(wait=passes), max_rows=1) as server, ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.complete, "y", max_tokens=100, ignore_eos=True)
        until_placed(server, passes, rows=1, waiting=0)
        leave(server, stream, lambda: server.service.snapshot().waiting == 1)
        until(lambda: server.service.snapshot().waiting == 0)
        assert server.service.snapshot().rows == 1, "the other one goes on"
        passes.let_all()
        assert other.result().json()["usage"]["completion_tokens"] == 100
        until(server.at_rest)


def test_who_leaves_while_the_prompt_is_prepared_frees_the_place(monkeypatch):
    with running(max_rows=1) as server:
        inside, go_on = held_up(monkeypatch, server)
        leave(server, False, inside.is_set)
        until(server.at_rest)
        go_on.set()
        assert server.complete(max_tokens=2, ignore_eos=True, lookahead=None).status_code == 200
        until(lambda: server.at_rest() and server.service.snapshot().passes)
        assert server.service.snapshot().passes == 1, "the other one was decoded for nobody"


def cancelled(server):
    return server.metric("lade_requests_total", endpoint="completions", outcome="cancelled")


def cancelled_by_engine(server):
    return server.service.snapshot().requests.get("cancelled", 0)


def test_more_than_there_are_places_for_are_refused_at_once():
    passes = Passes()
    with running(slow_served(wait=passes), max_rows=2, max_waiting=2) as server, ThreadPoolExecutor(4) as pool:
        asked = []
        for rows, waiting in ((1, 0), (2, 0), (2, 1), (2, 2)):
            asked.append(pool.submit(server.complete, max_tokens=80, ignore_eos=True))
            until_placed(server, passes, rows, waiting)
        for _ in range(6):  # no pass is made meanwhile that they could wait for
            refused = server.complete(max_tokens=80, ignore_eos=True)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "overloaded_error"
            assert refused.json()["error"]["code"] == "engine_overloaded"
        passes.let_all()
        served = [each.result() for each in asked]
        assert {response.json()["usage"]["completion_tokens"] for response in served} == {80}


def test_several_choices_need_a_place_each(slow):
    body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "stream": True}
    with slow.http.stream("POST", "/v1/completions", json=body):
        assert slow.complete(["a"] * 5, max_tokens=2).json()["error"]["code"] == "engine_overloaded"
    until(slow.at_rest)
    assert len(slow.complete(["a"] * 5, max_tokens=2).json()["choices"]) == 5


@pytest.mark.slow
def test_who_waits_too_long_is_told():
    with running(slow_served(), max_rows=1, queue_timeout=0.3) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.complete, max_tokens=300, ignore_eos=True)
        until(lambda: server.service.snapshot().rows == 1)
        response = server.complete(max_tokens=2)
        assert response.status_code == 503 and response.json()["error"]["code"] == "queue_timeout"
        events = server.events("/v1/completions", prompt="x", max_tokens=2)
        assert events[-1]["error"]["code"] == "queue_timeout"
        assert first.result().json()["usage"]["completion_tokens"] == 300
        assert server.complete(max_tokens=2).status_code == 200, "who is served in time is left alone"
