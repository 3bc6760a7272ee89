"""Texts are tokenised beside each other, so many at a time, and not at all where nobody waits."""

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
from served import CONTEXT, MODEL, SOON, TOKENIZER, running, until

from lade.server.access_log import AccessLog
from lade.server.served_model import ServedModel
from lade.server.service import PREPARING_LARGE, SMALL

LONG = "a" * 2 * CONTEXT
SLOW = "b" * (CONTEXT - 50)
TURNS = [{"role": "user", "content": LONG}]
TOO_LONG = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["a", LONG]}),
    ("/v1/chat/completions", {"messages": TURNS}),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 1}),
    ("/v1/responses", {"input": LONG}),
]


@dataclass(frozen=True)
class Watched(ServedModel):
    """Notes which texts are tokenised, and can be held up."""

    seen: list[str] = field(default_factory=list)
    inside: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)

    def ids(self, text, **arguments):
        self.seen.append(text)
        if text.startswith("b"):
            self.inside.release()
            assert self.go_on.wait(SOON)
        return super().ids(text, **arguments)


@pytest.fixture
def limits():
    return {"max_rows": 1, "max_waiting": 40}


@pytest.fixture
def watched(limits):
    """A server, its tokenizer, and how to begin slow calls."""
    served = Watched(MODEL, TOKENIZER, context=CONTEXT)
    with running(served, log=partial(AccessLog, as_json=True), **limits) as server:
        served.seen.clear()
        yield server, served
        served.go_on.set()


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
def test_a_prompt_that_cannot_fit_is_refused_with_its_length(server, path, body):
    message = server.http.post(path, json=body).json()["error"]["message"]
    assert "context" in message or "prompt is too long" in message
    assert int(re.search(r"\d{4,}(?= tokens )", message)[0]) >= 2 * CONTEXT


def test_what_is_counted_need_not_fit_and_of_a_prediction_no_more_is_kept_than_fits(server):
    assert server.http.post("/tokenize", json={"prompt": LONG}).json()["count"] == 2 * CONTEXT
    body = {"prompt": "a", "prediction": {"type": "content", "content": LONG}, "max_tokens": 4}
    details = server.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == CONTEXT


def padded(**body):
    """As large as those that have threads of their own."""
    return {**body, "user": "x" * SMALL}


def test_nobody_waits_for_a_text_that_takes_long(watched):
    """Neither where both are small, nor for any number of large ones."""
    server, tokenizer = watched
    with ThreadPoolExecutor(PREPARING_LARGE + 3) as pool:
        slow = [pool.submit(server.http.post, "/tokenize", json={"prompt": SLOW})]
        slow += [
            pool.submit(server.http.post, "/tokenize", json=padded(prompt=SLOW)) for _ in range(PREPARING_LARGE + 2)
        ]
        for _ in range(1 + PREPARING_LARGE):
            assert tokenizer.inside.acquire(timeout=SOON)
        assert server.http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
        assert server.complete("abc", max_tokens=2).status_code == 200
        assert server.chat("abc", max_tokens=2).status_code == 200
        tokenizer.go_on.set()
        assert [each.result().json()["count"] for each in slow] == [len(SLOW)] * len(slow)


def sent(server, path, body):
    """A client that waits for an answer."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=SOON)
    client.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return client


def test_what_nobody_waits_for_any_more_is_not_tokenised(watched):
    server, tokenizer = watched
    clients = [sent(server, "/tokenize", padded(prompt=SLOW)) for _ in range(PREPARING_LARGE + 6)]
    for _ in range(PREPARING_LARGE):
        assert tokenizer.inside.acquire(timeout=SOON)
    for client in clients:
        client.close()
    until(lambda: len(server.lines) == len(clients))
    tokenizer.go_on.set()
    response = server.http.post("/tokenize", json=padded(prompt="abc"))
    assert response.json()["count"] == 3 and len(tokenizer.seen) == PREPARING_LARGE + 1


def test_the_rest_of_a_request_is_not_tokenised_either(watched):
    server, tokenizer = watched
    with sent(server, "/v1/completions", {"prompt": [SLOW, "a", "b"]}):
        assert tokenizer.inside.acquire(timeout=SOON)
    until(lambda: not server.service.in_flight)
    tokenizer.go_on.set()
    assert server.http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
    assert tokenizer.seen == [SLOW, "abc"]


@pytest.mark.parametrize("limits", [{"max_rows": 1, "max_waiting": 1}])
def test_tokenising_takes_a_place_as_answers_do(watched):
    server, tokenizer = watched
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(server.http.post, "/tokenize", json={"prompt": SLOW}) for _ in range(2)]
        until(lambda: server.service.snapshot().waiting == 2)
        refused = server.http.post("/tokenize", json={"prompt": "abc"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_overloaded"
        assert server.http.post("/detokenize", json={"tokens": [1]}).status_code == 503
        tokenizer.go_on.set()
        assert {each.result().status_code for each in slow} == {200}
        assert server.http.post("/tokenize", json={"prompt": "abc"}).status_code == 200
