"""From a port that is open to one that is free again."""

import copy
import functools
import gc
import json
import re
import threading
from dataclasses import replace

import pytest
from inside import batch_of
from served import MODEL, SERVED, SETTINGS, SOON, Passes, Running, running, slow_served, until, until_placed
from spies import failing

import lade
from lade.errors import InputError
from lade.server import service
from lade.server.access_log import AccessLog
from lade.server.service import warm_up

HI = [{"role": "user", "content": "hi"}]


def stream(server, results, path="chat/completions", **body):
    """Read a stream to its end, in a thread."""

    def read():
        body_ = {"messages": HI, "input": HI, "stream": True, "ignore_eos": True, **body}
        with server.http.stream("POST", f"/v1/{path}", json=body_) as response:
            results.append(b"".join(response.iter_bytes()))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_the_port_answers_while_the_model_is_loaded():
    gate = threading.Event()

    def load():
        gate.wait()
        return SERVED

    with running(load, ready=False) as server:
        assert server.http.get("/live").json() == {"status": "ok"}
        for path in ("/ready", "/health", "/v1/health"):
            response = server.http.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "loading"})
        for response in (server.chat(), server.complete(), server.http.get("/v1/models")):
            assert response.status_code == 503 and response.headers["retry-after"] == "5"
            assert response.json()["error"]["code"] == "model_loading"
        assert set(server.http.get("/version").json()) == {"version", "torch", "transformers", "python"}
        assert "lade_ready" in server.http.get("/metrics").text
        gate.set()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert server.http.get("/ready").json() == {"status": "ok"}
        assert server.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize("lookahead", ["auto", None])
def test_the_log_says_once_that_16_bits_round(lookahead, caplog):
    served = replace(SERVED, model=copy.deepcopy(MODEL).bfloat16(), lookahead=lookahead)
    with running(served) as server:
        assert server.chat(max_tokens=4).status_code == server.complete(max_tokens=4).status_code == 200
    said = [record.getMessage() for record in caplog.records if "almost equally" in record.getMessage()]
    assert len(said) == (lookahead == "auto") and all(each.startswith("bfloat16: ") for each in said)


def test_a_server_that_is_stopped_while_it_warms_up_has_no_problem(monkeypatch):
    warming, ended = threading.Event(), threading.Event()

    def until_the_engine_is_closed(engine, *_):
        warming.set()
        try:
            engine.add([1, 2], max_new_tokens=10**5, min_new_tokens=10**5).result()
        finally:
            ended.set()

    monkeypatch.setattr(service, "warm_up", until_the_engine_is_closed)
    with running(ready=False) as server:
        assert warming.wait(SOON)
    assert ended.wait(SOON)
    until(lambda: "lade.serve loading" not in {each.name for each in threading.enumerate()})
    assert server.service.problem is None


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def load():
        raise InputError("there is no such model")

    made = Running(SETTINGS, load)
    made.thread.start()
    made.thread.join(SOON)
    assert not made.thread.is_alive() and str(made.service.problem) == "there is no such model"


def test_a_server_can_be_stopped_while_its_model_is_set_up(monkeypatch):
    begun, gate = threading.Event(), threading.Event()

    def template(*arguments):
        begun.set()
        gate.wait()
        raise InputError("too late")

    monkeypatch.setattr(service, "ChatTemplate", template)
    with running(SERVED, ready=False) as server:
        assert begun.wait(SOON)
        server.server.handle_exit(15, None)
        server.thread.join(SOON)
        assert not server.thread.is_alive() and not server.server.lifespan.shutdown_failed
        gate.set()


def test_answers_end_before_the_server_does(caplog):
    """Also those that begin while a tick does its periodic work, which saw none; what they taught is saved once."""
    caplog.set_level("INFO", "lade.server")
    passes, ticks, go_on, saved = Passes(), threading.Semaphore(0), threading.Event(), []
    served = replace(slow_served(wait=passes), save=lambda: saved.append(1))
    with running(served, shutdown_timeout=60.0) as server:
        server.service.watch = lambda: (ticks.release(), go_on.wait(SOON))
        assert ticks.acquire(timeout=SOON)
        results, threads = [], []
        for row in (1, 2, 3):
            threads.append(stream(server, results, max_tokens=60))
            until_placed(server, passes, rows=row, waiting=0)
        server.server.handle_exit(15, None)
        response = server.chat(max_tokens=1)
        assert response.status_code == 503 and response.json()["error"]["code"] == "server_shutting_down"
        assert response.headers["connection"] == "close"
        assert server.http.get("/ready").json() == {"status": "draining"}
        go_on.set()
        assert all(ticks.acquire(timeout=SOON) for _ in range(2)), "the server ends with answers in flight"
        passes.let_all()
        for thread in threads:
            thread.join()
        assert [raw.endswith(b"data: [DONE]\n\n") for raw in results] == [True] * 3
        server.thread.join(SOON)
        assert not server.thread.is_alive() and saved == [1]
    (line,) = [each for each in caplog.messages if each.startswith("shutting down")]
    assert re.fullmatch(r"shutting down: 3 answers have (5\d|60) s to end", line)


def test_answers_that_take_too_long_end_with_an_error():
    with running(slow_served(0.02), shutdown_timeout=0.2) as server:
        results, plain = [], []
        thread = stream(server, results, max_tokens=400)
        other = threading.Thread(target=lambda: plain.append(server.chat(max_tokens=400, ignore_eos=True)))
        other.start()
        until(lambda: server.service.snapshot().rows == 2)
        server.server.handle_exit(15, None)
        thread.join()
        other.join()
        last = results[0].decode().split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
        assert b"[DONE]" not in results[0]
        assert plain[0].status_code == 503 and plain[0].json()["error"]["code"] == "server_shutting_down"
        server.thread.join(SOON)
        assert not server.thread.is_alive()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("chat/completions", (None, "server_error", "internal_error")),
        ("messages", ("error", "api_error", None)),
        ("responses", ("response.failed", None, "server_error")),
    ],
)
def test_a_failed_pass_ends_its_requests_alone_and_is_told_in_the_form_of_the_api(path, told):
    fails = threading.Event()
    with running(slow_served(failing=fails.is_set), log=functools.partial(AccessLog, as_json=True)) as server:
        results = []
        thread = stream(server, results, path, max_tokens=300)
        until(lambda: server.service.snapshot().new_tokens > 5)
        fails.set()
        thread.join()
        fails.clear()
        last = json.loads(results[0].decode().rpartition("data: ")[2])
        error = last.get("response", last)["error"]
        assert (last.get("type"), error.get("type"), error.get("code")) == told
        assert "device" not in error["message"]
        until(lambda: server.lines)
        assert json.loads(server.lines[0])["id"] in error["message"]
        assert server.chat(max_tokens=3).status_code == 200
        fails.set()
        assert server.chat(max_tokens=3).status_code == 500


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_breaks_down_ends_the_server(monkeypatch):
    with running() as server:
        failing(monkeypatch, batch_of(server.service.serving.engine), "advance", MemoryError("nothing left"))
        assert server.chat(max_tokens=3).status_code == 500
        until(lambda: server.service.phase == "dead")
        live = server.http.get("/live")
        assert live.status_code == 503 and live.json() == {"status": "dead", "reason": "MemoryError: nothing left"}
        assert server.http.get("/ready").status_code == 503
        assert server.chat(max_tokens=3).json()["error"]["code"] == "engine_dead"
        until(lambda: server.server.ends_at)
        server.end_now()
        assert not server.thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_waits_for_its_answers_ends_when_the_engine_breaks_down(monkeypatch):
    passes = Passes()
    with running(slow_served(wait=passes), shutdown_timeout=10 * SOON) as server:
        answer = stream(server, [], max_tokens=9)
        until_placed(server, passes, rows=1, waiting=0)
        failing(monkeypatch, batch_of(server.service.serving.engine), "advance", MemoryError("nothing left"))
        server.server.handle_exit(15, None)
        passes.let(9)
        answer.join(SOON)
        server.thread.join(SOON)
        assert not server.thread.is_alive() and server.service.phase == "dead"


@pytest.mark.parametrize(("path", "ping"), [("chat/completions", ": ping"), ("messages", "event: ping")])
def test_a_silent_stream_has_pings_in_the_form_of_its_api(path, ping):
    passes, body = Passes(), {"messages": HI, "max_tokens": 2, "stream": True}
    with running(slow_served(wait=passes), ping_s=0.05) as server:  # noqa: SIM117 - the stream is the server's
        with server.http.stream("POST", f"/v1/{path}", json=body) as response:
            lines = response.iter_lines()
            assert ping in lines
            passes.let_all()
            assert {"data: [DONE]", "event: message_stop"} & set(lines)


def test_the_log_has_a_line_now_and_then():
    lines, now = [], [0.0]
    log = AccessLog(lines.append, as_json=True, clock=lambda: now[0])
    with running() as server:
        log.tick(server.service.snapshot())
        server.chat(max_tokens=20, ignore_eos=True)
        until(server.at_rest)
        log.tick(server.service.snapshot())
        assert not lines, "it is not due"
        now[0] += 11
        log.tick(server.service.snapshot())
        log.tick(server.service.snapshot())
    (line,) = lines
    assert json.loads(line)["tokens_per_s"] == 2.0 and json.loads(line)["rows"] == 0
    assert json.loads(line)["cached"] == 0.0


def test_the_warm_up_decodes_with_each_number_of_rows():
    """Batches of all sizes are measured then, and not amid answers; nor is what stays collected then."""
    with lade.Engine(MODEL, max_rows=5) as engine:
        seen, add = [], engine.add
        engine.add = lambda *arguments, **named: seen.append(engine.snapshot().requests) or add(*arguments, **named)
        warm_up(engine, SERVED, replace(SETTINGS, max_rows=5))
        ended = [sum(reasons.values()) for reasons in seen]
        assert (ended[0], ended[1], ended[3]) == (0, 1, 3), "1, 2 and 4 rows, each time when all others have ended"
        assert engine.snapshot().requests == {"length": 7}
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()


def test_what_is_learned_is_saved_now_and_then():
    saved = threading.Semaphore(0)
    with running(replace(SERVED, save=saved.release), save_s=0.0) as server:
        for _ in range(2):
            server.complete("ab", max_tokens=3)
            assert saved.acquire(timeout=SOON)
        until(server.at_rest)
        while saved.acquire(timeout=0.1):
            pass
        assert not saved.acquire(timeout=0.1), "there was nothing new"


def test_what_could_not_be_saved_is_tried_again():
    told, problems = [], [InputError("the disk is full")] * 2

    def save():
        told.append(server.service.unsaved)
        if problems:
            raise problems.pop()

    with running(replace(SERVED, save=save), save_s=0.0) as server:
        server.complete("ab", max_tokens=3)
        until(lambda: len(told) >= 3 and server.service.unsaved is None)
    assert [each and str(each) for each in told[:3]] == [None, "the disk is full", "the disk is full"]
