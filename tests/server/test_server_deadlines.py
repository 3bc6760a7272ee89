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
def server(passes):
    with running(slow_served(wait=passes), max_rows=2) as made:
        yield made
        passes.let_all()


@pytest.mark.parametrize(("fields", "headers"), [({"timeout": 0.2}, {}), ({}, {TIMEOUT: "0.2"})])
def test_an_answer_ends_at_its_deadline_though_no_pass_ends(server, passes, fields, headers):
    passes.let(20)
    response = server.http.post("/v1/completions", json={**BODY, **fields}, headers=headers)
    assert response.status_code == 504 and code(response) == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false" and "0.2 s" in response.json()["error"]["message"]
    passes.let_all()
    until(server.at_rest)
    assert server.service.snapshot().requests == {"cancelled": 1}
    assert server.complete(**{**BODY, "max_tokens": 3}).status_code == 200


def test_a_stream_ends_at_its_deadline_with_an_event(server, passes):
    passes.let(20)  # then none is made, and the stream notices by itself
    events = server.events("/v1/completions", **BODY, timeout=0.3)
    assert len(events) > 3 and events[-1]["error"]["code"] == "deadline_exceeded"
    passes.let_all()
    until(server.at_rest)


def test_a_stream_that_is_decoded_ends_at_its_deadline():
    with running(slow_served(), ping_s=SOON) as server:
        events = server.events("/v1/completions", **{**BODY, "max_tokens": 450}, timeout=0.3)
        assert events[-1]["error"]["code"] == "deadline_exceeded"


def test_others_lose_nothing(server, passes):
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.complete, **{**BODY, "prompt": "xyz"})
        until_placed(server, passes, rows=1, waiting=0)
        late = pool.submit(server.complete, **BODY, timeout=0.5)
        until_placed(server, passes, rows=2, waiting=0)
        passes.let(5)
        assert late.result().status_code == 504
        passes.let_all()
        assert other.result().json()["choices"][0]["text"] == whole_text("xyz", 60)


def test_who_waits_for_a_row_has_a_deadline(server, passes):
    with ThreadPoolExecutor(2) as pool:
        rows = [pool.submit(server.complete, **BODY) for _ in range(2)]
        until_placed(server, passes, rows=2, waiting=0)
        assert server.complete(**BODY, timeout=0.1).status_code == 504
        passes.let_all()
        assert {each.result().status_code for each in rows} == {200}


def test_a_prompt_that_is_being_tokenized_has_a_deadline(server, passes, monkeypatch):
    inside, go_on = held_up(monkeypatch, server)
    assert server.complete(**BODY, timeout=0.1).status_code == 504 and inside.is_set()
    go_on.set()
    passes.let_all()
    until(server.at_rest)
    assert server.service.snapshot().passes == 0, "it was decoded for nobody"


def test_the_shortest_deadline_counts():
    with running(slow_served(), request_timeout=0.2) as server:
        for given, header in ((None, "500"), (500.0, None), (0.1, "500"), (500.0, "0.1")):
            asked = {**BODY, "max_tokens": 450, **({"timeout": given} if given else {})}
            headers = {TIMEOUT: header} if header else {}
            response = server.http.post("/v1/completions", json=asked, headers=headers)
            least = min(float(each) for each in (given, header, 0.2) if each is not None)
            assert response.status_code == 504 and f"{least:g} s" in response.json()["error"]["message"]
        assert server.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("sent", ["soon", "0", "-1", "nan", "inf", "1e9", ""])
def test_a_header_that_is_no_time_is_refused(server, sent):
    response = server.http.post("/v1/completions", json=BODY, headers={TIMEOUT: sent})
    assert response.status_code == 400 and response.json()["error"]["param"] == TIMEOUT


@pytest.mark.parametrize("given", ["5", 0, -1, True, 1e9])
def test_a_field_that_is_no_time_is_refused(server, given):
    response = server.complete(timeout=given)
    assert response.status_code == 400 and response.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize("path", ["messages", "responses", "chat/completions"])
def test_all_apis_have_deadlines(server, passes, path):
    said = [{"role": "user", "content": "hi"}]
    body = {"input": said} if path == "responses" else {"messages": said}
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    response = server.http.post(f"/v1/{path}", json={**body, limit: 60, "timeout": 0.2})
    assert response.status_code == 504
    error = response.json()["error"]
    assert error["type"] == "timeout_error" and "0.2 s" in error["message"]
    passes.let_all()


def test_a_deadline_is_forgotten_with_its_request(server, passes):
    passes.let_all()
    seen, track = [], server.service.track

    def noted(*given):
        request = track(*given)
        seen.append(weakref.ref(request))
        return request

    server.service.track = noted
    asked, own = {"prompt": "ab", "max_tokens": 2, "timeout": 1e5}, {"connection": "close"}
    assert server.http.post("/v1/completions", json=asked, headers=own).status_code == 200
    until(lambda: gc.collect() >= 0 and seen[0]() is None)
