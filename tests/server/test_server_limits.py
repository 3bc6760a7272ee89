"""What strangers can send is bounded before it costs anything: bodies of wrong items, of many values, and too many."""

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from served import running, until
from spies import watched

from lade.server import routes
from lade.server.middleware import _MAX_HELD, BodyRoute
from lade.server.routes import router
from lade.server.serialization import TooManyValuesError, decoded
from lade.server.service import SMALL
from lade.server.settings import MAX_OBJECTS, MAX_VALUES

BODIES = {route.path: route.body_field.field_info.annotation for route in router.routes if route.body_field}
LARGE = 4 * 2**20
WRONG = [{}, -1, [], "", None, 0.5, {"type": 1}]
FEW = 64
HEADERS = {"content-type": "application/json"}


def nodes(schema, found, wrap, seen):
    """All lists and objects below a schema, each with what makes a body of a value in its place."""
    if "$ref" in found:
        if found["$ref"] in seen:
            return
        seen, found = {*seen, found["$ref"]}, schema["$defs"][found["$ref"].rpartition("/")[2]]
    for branch in found.get("anyOf", ()):
        yield from nodes(schema, branch, wrap, seen)
    if found.get("type") in ("array", "object"):
        yield found, wrap
    if "items" in found:  # many of them, so that wrong ones could add up
        yield from nodes(schema, found["items"], lambda value: wrap([value] * min(50, found.get("maxItems", 50))), seen)
    for name, member in found.get("properties", {}).items():
        yield from nodes(schema, member, lambda value, name=name: wrap({name: value}), seen)


def all_nodes(path):
    schema = TypeAdapter(BODIES[path]).json_schema()
    return list(nodes(schema, schema, lambda value: value, frozenset()))


def test_all_bodies_are_checked_by_the_same_route():
    assert all(isinstance(route, BodyRoute) for route in router.routes)
    assert len(BODIES) >= 9 and sum(len(all_nodes(path)) for path in BODIES) > 150


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_list_and_every_object_has_a_greatest_length(path):
    for node, wrap in all_nodes(path):
        longest = "maxItems" if node["type"] == "array" else "maxProperties"
        assert 0 < node.get(longest, 0) <= 2**20, json.dumps(wrap("HERE"))[:200]


@pytest.mark.parametrize("path", sorted(BODIES))
def test_wrong_items_end_the_list_that_they_are_in(path):
    """However many there are: pydantic makes an error of each, for each of the forms that a value may have."""
    adapter = TypeAdapter(BODIES[path])
    for node, wrap in all_nodes(path):
        for item in WRONG:
            several = [item] * 200 if node["type"] == "array" else {str(-number): item for number in range(2000)}
            try:
                adapter.validate_python(wrap(several))
            except ValidationError as problem:
                assert problem.error_count() < FEW, json.dumps(wrap("HERE"))[:200]


def test_values_of_a_body_are_counted_before_it_is_read():
    objects, values = b"[" + b"{}," * MAX_OBJECTS, b"[" + b"0," * MAX_VALUES
    for raw in (objects, b"[" * LARGE, b'{"user":' * (MAX_OBJECTS + 1)):
        with pytest.raises(TooManyValuesError, match=f"{MAX_OBJECTS} lists and objects"):
            decoded(raw)
    with pytest.raises(TooManyValuesError, match=f"{MAX_VALUES} values"):
        decoded(values + b"0]")
    assert len(decoded(b"[" + b"{}," * (MAX_OBJECTS - 2) + b"{}]")) == MAX_OBJECTS - 1


def test_brackets_and_commas_in_texts_are_no_values():
    said = '[{,"\\' * MAX_VALUES
    assert decoded(json.dumps([said, said])) == [said, said]
    split = ['\\"[' * 2**16, "{" * 2**17, '"' * 2**18]  # pieces begin and end in the middle of them
    assert decoded(json.dumps(split)) == split


def loop_of(server):
    server.http.get("/live")
    return next(iter(server.server.server_state.connections)).loop


async def _thread_seconds():
    return time.thread_time()


def seconds_of(loop):
    """Of CPU time, of the thread that all connections share."""
    return asyncio.run_coroutine_threadsafe(_thread_seconds(), loop).result()


def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def filled(before, item, after=b"]}"):
    return before + b",".join([item] * ((LARGE - 100) // (len(item) + 1))) + after


TURN = b'{"max_tokens":1,"messages":[{"role":"user","content":['
LARGE_BODIES = [
    ("/v1/completions", b'{"prompt":[', b"-1"),
    ("/v1/completions", b'{"prompt":[', b"0"),
    ("/v1/completions", b'{"prompt":[', b'""'),
    ("/v1/chat/completions", TURN, b"{}"),
    ("/v1/chat/completions", b'{"messages":[', b'{"role":"user","content":[{}]}'),
    ("/v1/chat/completions", b'{"user":[', b"[]"),
    ("/v1/messages", TURN, b"{}"),
    ("/v1/messages", b'{"max_tokens":1,"system":[', b'{"type":"text","text":0}'),
    ("/v1/responses", b'{"input":[{"content":[', b"{}"),
    ("/tokenize", b'{"messages":[', b"-1"),
    ("/tokenize", b'{"prompt":[', b"0"),
    ("/detokenize", b'{"tokens":[', b"-1"),
    ("/detokenize", b'{"tokens":[', b"0"),
]


@pytest.mark.parametrize(("path", "before", "item"), LARGE_BODIES)
def test_4_mb_of_wrong_items_cost_little_and_hold_up_nobody(server, path, before, item):
    body, loop = filled(before, item, b"]}" if before.count(b"[") == 1 else b"]}]}"), loop_of(server)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    peak, process, connections = peak_bytes(), time.process_time(), seconds_of(loop)
    response = server.http.post(path, content=body, headers=HEADERS)
    assert response.status_code == 400 and response.json()["error"]["message"], response.text
    assert len(response.content) < 1000
    assert seconds_of(loop) - connections < 0.2, "others wait meanwhile"
    assert time.process_time() - process < 1.5
    assert peak_bytes() - peak < 200 * 2**20


@pytest.mark.parametrize("size", [10, SMALL])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "turns_as_chat"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}, "items_as_chat"),
    ],
)
def test_large_requests_become_chats_beside_the_others(server, monkeypatch, path, body, name, size):
    threads = watched(monkeypatch, routes, name, lambda asked: threading.current_thread())
    assert server.http.post(path, json={**body, "user": "x" * size}).status_code == 200
    assert (threads[0] is server.thread) == (size < SMALL)


def test_large_json_means_what_it_means_where_it_is_small():
    value = {"a": [1, -1, 2**64, 2**70, 0.1, 1e300, 5e-324, True, None, '\u00e9\U0001f642\\"/\x00', {}, []]}
    pad = {"pad": "x" * SMALL}
    raw = json.dumps(value | pad)
    assert decoded(raw) == decoded(raw.encode()) == value | decoded(json.dumps(pad)) == json.loads(raw)
    for wrong in (
        raw[:-1],
        raw + "]",
        raw.replace("null", "nul"),
        raw.replace("null", "1,"),
        "[" * 60_000 + " " * SMALL,
    ):
        with pytest.raises((ValueError, RecursionError)):
            decoded(wrong)


def test_bodies_of_many_valid_items_are_read_beside_the_others(server):
    """What is large and right takes its time, and nobody else's."""
    parts = [{"type": "text", "text": "a" * 30}] * 1000
    body = json.dumps({"messages": [*[{"role": "user", "content": parts}] * 30, {}]}).encode()
    loop = loop_of(server)
    assert len(body) > SMALL
    before, process = seconds_of(loop), time.process_time()
    response = server.http.post("/v1/chat/completions", content=body, headers=HEADERS)
    assert response.json()["error"]["param"] == "messages[30].role"
    assert seconds_of(loop) - before < 0.3 * (time.process_time() - process)


def test_large_bodies_together_have_a_bound_and_small_ones_pass():
    """Those that are still being sent count as well."""
    size = 2 * SMALL
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n"
    with running(max_body=size) as server, ExitStack() as stack:
        for _ in range(_MAX_HELD):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            client.sendall(head.encode() + b"\r\n" + b" " * (size - 1))
        large, small = {"prompt": "a", "user": "x" * (size - 100)}, {"prompt": "a"}
        refused: list[httpx.Response] = []  # as the last of those bodies arrives, or the one before is still held

        def is_refused() -> bool:
            refused.append(server.http.post("/tokenize", json=large))
            return refused[-1].status_code == 503

        until(is_refused)
        error = refused[-1].json()["error"]
        assert (error["type"], error["code"]) == ("overloaded_error", "too_many_bytes")
        assert server.http.post("/tokenize", json=small).status_code == 200
        stack.close()
        until(lambda: server.http.post("/tokenize", json=large).status_code == 200)
