"""Answers end at their deadline, whatever the request waits for; others lose nothing by it."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import SOON, TOKENIZER, Passes, held_up, plain, running, slow_served, text_of, until, until_placed

TIMEOUT = "x-request-timeout"
BODY = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def code(response):
    return response.json()["error"]["code"]


def whole_text(prompt, tokens):
    return text_of(plain(TOKENIZER(prompt).input_ids, max_new_tokens=tokens, min_new_tokens=tokens))


@pytest.fixture
def passes():
    return Passes()


@pytest.fixture
def slow(passes):
    with running(slow_served(wait=passes), max_rows=2) as made:
        yield made
        passes.let_all()


@pytest.mark.parametrize(("fields", "headers"), [({"timeout": 0.2}, {}), ({}, {TIMEOUT: "0.2"})])
def test_an_answer_ends_at_its_deadline_though_no_pass_ends(slow, passes, fields, headers):
    passes.let(20)
    response = slow.http.post("/v1/completions", json={**BODY, **fields}, headers=headers)
    assert response.status_code == 504 and code(response) == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false" and "0.2 s" in response.json()["error"]["message"]
    passes.let_all()
    until(slow.at_rest)
    assert slow.service.snapshot().requests == {"cancelled": 1}
    assert slow.complete(**{**BODY, "max_tokens": 3}).status_code == 200


def test_a_stream_ends_at_its_deadline_with_an_event(slow, passes):
    passes.let(20)  # then none is made, and the stream notices by itself
    events = slow.events("/v1/completions", **BODY, timeout=0.3)
    assert len(events) > 3 and events[-1]["error"]["code"] == "deadline_exceeded"
    passes.let_all()
    until(slow.at_rest)


def test_a_stream_that_is_decoded_ends_at_its_deadline():
    with running(slow_served(), ping_s=SOON) as server:
        events = server.events("/v1/completions", **{**BODY, "max_tokens": 450}, timeout=0.3)
        assert events[-1]["error"]["code"] == "deadline_exceeded"


def test_others_lose_nothing(slow, passes):
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(slow.complete, **{**BODY, "prompt": "xyz"})
        until_placed(slow, passes, rows=1, waiting=0)
        late = pool.submit(slow.complete, **BODY, timeout=0.5)
        until_placed(slow, passes, rows=2, waiting=0)
        passes.let(5)
        assert late.result().status_code == 504
        passes.let_all()
        assert other.result().json()["choices"][0]["text"] == whole_text("xyz", 60)


def test_who_waits_for_a_row_has_a_deadline(slow, passes):
    with ThreadPoolExecutor(2) as pool:
        rows = [pool.submit(slow.complete, **BODY) for _ in range(2)]
        until_placed(slow, passes, rows=2, waiting=0)
        assert slow.complete(**BODY, timeout=0.1).status_code == 504
        passes.let_all()
        assert {each.result().status_code for each in rows} == {200}


def test_a_prompt_that_is_being_tokenized_has_a_deadline(slow, passes, monkeypatch):
    inside, go_on = held_up(monkeypatch, slow)
    assert slow.complete(**BODY, timeout=0.1).status_code == 504 and inside.is_set()
    go_on.set()
    passes.let_all()
    until(slow.at_rest)
    assert slow.service.snapshot().passes == 0, "it was decoded for nobody"


def test_the_shortest_deadline_counts():
    with running(slow_served(), request_timeout=0.2) as server:
        for given, header in ((None, "500"), (500.0, None), (0.1, "500"), (500.0, "0.1")):
            asked = {**BODY, "max_tokens": 450, **({"timeout": given} if given else {})}
            headers = {TIMEOUT: header} if header else {}
            response = server.http.post("/v1/completions", json=asked, headers=headers)
            least = min(float(each) for each in (given, header, 0.2) if each is not None)
            assert response.status_code == 504 and f"{least:g} s" in response.json()["error"]["message"]
        assert server.complete(max_tokens=1).status_code == 200


def test_what_is_no_time_is_refused(server):
    headers = ["soon", "0", "-1", "nan", "inf", "1e9", ""]
    asked = [(TIMEOUT, server.http.post("/v1/completions", json=BODY, headers={TIMEOUT: each})) for each in headers]
    asked += [("timeout", server.complete(timeout=each)) for each in ("5", 0, -1, True, 1e9)]
    for param, response in asked:
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.request.content


def test_all_apis_have_deadlines(slow):
    said = [{"role": "user", "content": "hi"}]
    for path in ("messages", "responses", "chat/completions"):
        body = {"input": said, "messages": said, "max_tokens": 60, "timeout": 0.1}
        response = slow.http.post(f"/v1/{path}", json=body)
        assert response.status_code == 504, path
        error = response.json()["error"]
        assert error["type"] == "timeout_error" and "0.1 s" in error["message"]


def test_a_deadline_is_forgotten_with_its_request(slow, passes):
    passes.let_all()
    seen, track = [], slow.service.track

    def noted(context, endpoint):
        track(context, endpoint)
        seen.append(weakref.ref(context))

    slow.service.track = noted
    asked, own = {"prompt": "ab", "max_tokens": 2, "timeout": 1e5}, {"connection": "close"}
    assert slow.http.post("/v1/completions", json=asked, headers=own).status_code == 200
    until(lambda: gc.collect() >= 0 and seen[0]() is None)
