"""What clients can do without sending a request: connect, send slowly, send no HTTP."""

import contextlib
import json
import socket
import time

import pytest
from served import Passes, running, slow_served, until

from lade.server import listen, middleware

HEAD = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEADERS_S = 0.2


@pytest.fixture(scope="module")
def impatient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listen, "HEADERS_S", HEADERS_S)
        with running() as server:
            yield server


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def rest_of(client):
    """What comes until the server closes: heads without their lengths, and bodies."""
    raw = b""
    with contextlib.suppress(ConnectionError):  # what was sent to a server that had closed already resets it
        while part := client.recv(2**16):
            raw += part
    return raw


def nothing(client):
    """Whether the server closes without a word, however that is done."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def answer(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower() and b"connection: close" in head.lower()
    assert b"x-content-type-options: nosniff" in head
    return int(head.split()[1]), json.loads(body)["error"]


def test_headers_that_come_slowly_are_not_waited_for(impatient):
    start = time.monotonic()
    with connected(impatient) as client:
        for letter in HEAD:  # each byte in time, all together not
            try:
                client.sendall(bytes([letter]))
            except OSError:
                break
            time.sleep(HEADERS_S / 8)
            if time.monotonic() - start > 2 * HEADERS_S:
                break
        status, error = answer(rest_of(client))
    assert (status, error["type"], error["code"]) == (408, "invalid_request_error", "request_timeout")
    assert f"{HEADERS_S} s" in error["message"]


def test_a_connection_without_a_request_is_closed(impatient):
    for sent in (b"", b"\r\n"):
        start = time.monotonic()
        with connected(impatient) as client:
            client.sendall(sent)
            assert rest_of(client) == b""
        assert HEADERS_S * 0.9 < time.monotonic() - start < 15


def test_the_second_request_of_a_connection_is_not_waited_for_either(impatient):
    with connected(impatient) as client:
        client.sendall(HEAD + b"\r\n" + HEAD)
        raw = rest_of(client)
    assert raw.startswith(b"HTTP/1.1 200 OK")
    assert answer(raw[raw.rindex(b"HTTP/1.1") :])[0] == 408


def test_between_requests_there_is_more_time_but_not_for_what_is_none(impatient):
    with connected(impatient) as client:
        for _ in range(2):
            client.sendall(HEAD + b"\r\n")
            raw = b""
            while not raw.endswith(b"}"):
                raw += client.recv(2**16)
            assert raw.startswith(b"HTTP/1.1 200 OK")
            time.sleep(2 * HEADERS_S)
        client.sendall(b"\r\n")
        assert rest_of(client) == b""


def test_what_takes_long_for_other_reasons_is_waited_for(impatient):
    """A slow body, an answer that takes long, and half of the next request meanwhile."""
    body = json.dumps({"prompt": "abc", "max_tokens": 450, "ignore_eos": True, "lookahead": None}).encode()
    with connected(impatient) as client:
        client.sendall(POST + b"content-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 10):
            client.sendall(body[at : at + 10])
            time.sleep(3 * HEADERS_S / (len(body) / 10))
        client.sendall(HEAD)
        raw = rest_of(client)
    assert raw.startswith(b"HTTP/1.1 200 OK") and b'"finish_reason":"length"' in raw
    assert raw.count(b"HTTP/1.1") == 2 and answer(raw[raw.rindex(b"HTTP/1.1") :])[0] == 408


def test_a_body_has_its_time_too(impatient, monkeypatch):
    monkeypatch.setattr(middleware, "_SECONDS", HEADERS_S)
    with connected(impatient) as client:
        client.sendall(POST + b"content-length: 100\r\n\r\n{")
        head, _, body = rest_of(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408") and json.loads(body)["error"]["code"] == "request_timeout"
    assert impatient.complete("abc", max_tokens=1).status_code == 200, "its bytes are free again"


def test_headers_have_a_bound(impatient):
    with connected(impatient) as client:
        client.sendall(HEAD + b"x: " + b"y" * (listen.MAX_HEADER_BYTES + 1 - len(HEAD) - 3))
        status, error = answer(rest_of(client))
    assert status == 431 and error["code"] == "headers_too_large"
    large = {"x": "y" * (listen.MAX_HEADER_BYTES // 2)}
    assert impatient.http.get("/version", headers=large).status_code == 200


def test_what_is_no_http_is_told_so_in_json(impatient):
    for sent in (b"hello\r\n\r\n", HEAD + b"content-length: x\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"):
        with connected(impatient) as client:
            client.sendall(sent)
            status, error = answer(rest_of(client))
        assert (status, error["code"]) == (400, "invalid_http")


def test_of_too_many_connections_an_idle_one_is_closed(monkeypatch):
    monkeypatch.setattr(listen, "CONNECTIONS", 2)
    monkeypatch.setattr(listen, "HEADERS_S", 60.0)
    passes, body = Passes(), {"prompt": "x", "max_tokens": 9, "ignore_eos": True, "stream": True}
    with running(slow_served(wait=passes)) as server, connected(server) as idle:
        until(lambda: len(server.server.server_state.connections) == 1)
        with server.http.stream("POST", "/v1/completions", json=body) as response, connected(server) as client:
            assert nothing(idle), "and not the one with an answer"
            client.sendall(HEAD)
            until(lambda: not any(each.is_idle for each in server.server.server_state.connections))
            with connected(server) as another:
                assert nothing(another), "none is idle"
            passes.let_all()
            assert response.read().endswith(b"data: [DONE]\n\n")


def test_what_is_written_is_sent_at_once(server):
    """Not when the client has acknowledged what came before."""
    with connected(server) as client:
        client.sendall(HEAD + b"\r\n")
        assert client.recv(1)
        for each in list(server.server.server_state.connections):
            accepted = each.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [(1024, 10**6, 2240, None), (1024, 1500, 1500, 1308), (4096, 10**6, None, None), (1024, 1024, None, 832)],
)
def test_the_limit_of_open_files_is_raised_and_told_of(monkeypatch, caplog, soft, hard, raised, allowed):
    limits = [(soft, hard)]
    monkeypatch.setattr(listen.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(listen.resource, "setrlimit", lambda _, pair: limits.append(pair))
    caplog.set_level("INFO", "lade")
    listen.raise_file_limit()
    said = [f"this process may open {raised} files now"] if raised else []
    said += [f"the hard limit of open files allows {allowed} connections"] if allowed else []
    assert limits[-1] == (raised or soft, hard) and [line.split(",")[0] for line in caplog.messages] == said
