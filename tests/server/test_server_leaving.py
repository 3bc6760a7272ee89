"""Clients that leave, and more clients than there are places for."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from served import running, slow_served, until

SLOW = slow_served()


@pytest.fixture(scope="module")
def slow():
    with running(SLOW, max_rows=1, max_waiting=4) as server:
        yield server


def leave(server, stream, tokens=450, prompt="x"):
    """Ask for a long answer, and close the connection after a while."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    client = httpx.Client(base_url=server.url, timeout=0.25)
    with contextlib.suppress(httpx.TimeoutException), client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                time.sleep(0.2)
        else:
            client.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_row(slow, stream):
    before = cancelled(slow)
    leave(slow, stream)
    until(slow.at_rest, 1.0)
    until(lambda: cancelled(slow) == before + 1, 1.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_frees_the_place(slow, stream):
    others = httpx.Client(base_url=slow.url, timeout=60)
    results = []
    body = {"prompt": "y", "max_tokens": 100, "ignore_eos": True}
    thread = threading.Thread(target=lambda: results.append(others.post("/v1/completions", json=body)))
    thread.start()
    until(lambda: slow.service.snapshot().rows == 1)
    leave(slow, stream)
    until(lambda: slow.service.snapshot().waiting == 0, 1.0)
    assert slow.service.snapshot().rows == 1, "the other one goes on"
    thread.join()
    others.close()
    assert results[0].json()["usage"]["completion_tokens"] == 100
    until(slow.at_rest, 1.0)


@pytest.mark.slow
def test_who_leaves_during_prefill_frees_the_row():
    served = slow_served(0.4)
    with running(served, max_rows=1) as server:
        leave(server, True, prompt=[70] * 500, tokens=5)
        until(server.at_rest, 2.0)


def test_who_leaves_while_the_prompt_is_prepared_frees_the_place(monkeypatch):
    with running(max_rows=1) as server:
        add, inside = server.service._engine.add, threading.Event()

        def slowly(*arguments, **named):
            inside.set()
            time.sleep(0.6)
            return add(*arguments, **named)

        monkeypatch.setattr(server.service._engine, "add", slowly)
        leave(server, False)
        assert inside.is_set()
        until(server.at_rest, 2.0)
        monkeypatch.undo()
        time.sleep(0.6)
        assert server.at_rest() and server.complete(max_tokens=2).status_code == 200


def cancelled(server):
    return server.service.metrics._registry.get_sample_value(
        "lade_requests_total", {"model": "toy", "endpoint": "completions", "outcome": "cancelled"}
    ) or 0  # fmt: skip


def test_more_than_there_are_places_for_are_refused_at_once():
    with running(slow_served(), max_rows=2, max_waiting=2) as server, ThreadPoolExecutor(10) as pool:

        def ask(number):
            time.sleep(0.03 * number)
            start = time.monotonic()
            response = server.complete(max_tokens=80, ignore_eos=True)
            return response, time.monotonic() - start

        answers = list(pool.map(ask, range(10)))
        served = [response for response, _ in answers if response.status_code == 200]
        refused = [(response, seconds) for response, seconds in answers if response.status_code == 503]
        assert len(served) == 4 and len(refused) == 6
        for response, seconds in refused:
            assert response.headers["retry-after"] == "1" and seconds < 0.5
            assert response.json()["error"]["type"] == "overloaded_error"
            assert response.json()["error"]["code"] == "engine_overloaded"
        assert {response.json()["usage"]["completion_tokens"] for response in served} == {80}


def test_several_choices_need_a_place_each(slow):
    body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "stream": True}
    with slow.http.stream("POST", "/v1/completions", json=body):
        assert slow.complete(["a"] * 5, max_tokens=2).json()["error"]["code"] == "engine_overloaded"
    until(slow.at_rest, 1.0)
    assert len(slow.complete(["a"] * 5, max_tokens=2).json()["choices"]) == 5


@pytest.mark.slow
def test_who_waits_too_long_is_told():
    with running(slow_served(), max_rows=1, queue_timeout=0.3) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.complete, max_tokens=90, ignore_eos=True)
        until(lambda: server.service.snapshot().rows == 1)
        response = server.complete(max_tokens=2)
        assert response.status_code == 503 and response.json()["error"]["code"] == "queue_timeout"
        events = server.events("/v1/completions", prompt="x", max_tokens=2)
        assert events[-1]["error"]["code"] == "queue_timeout"
        assert first.result().json()["usage"]["completion_tokens"] == 90
        assert server.complete(max_tokens=2).status_code == 200, "who is served in time is left alone"
