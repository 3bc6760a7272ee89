"""Turns of a conversation: what was read is not read again, and only for those who may know of it."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from served import SERVED, Passes, plain, running, slow_served, templated, text_of, until
from spies import watched

from lade import LookaheadConfig, Memory
from lade.server.keys import NO_KEYS, Key, Keys

KEYS = Keys((Key("a", "ka"), Key("b", "kb")))
QUESTIONS = ["tell me a long story about a fox", "and then", "why", "what did the fox say", "the end"]


def talk(server, key="ka", **fields):
    """Five turns; for each the tokens of prompt and answer, those that were kept, and whether it is plain's answer."""
    messages, turns = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "temperature": 0, "max_tokens": 25, **fields}
        headers = {"authorization": f"Bearer {key}"}
        answer = server.http.post("/v1/chat/completions", json=body, headers=headers).json()
        said, usage = answer["choices"][0]["message"]["content"], answer["usage"]
        assert said == text_of(plain(templated(messages), max_new_tokens=25))
        turns.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        messages.append({"role": "assistant", "content": said})
    return turns


@pytest.fixture(scope="module")
def shared():
    with running(keys=KEYS, prefix_cache=2**24) as server:
        yield server


def test_turns_reuse_the_turns_before_them(shared):
    turns = talk(shared)
    assert turns[0][1] == 0
    for (before, _), (_, cached) in itertools.pairwise(turns):
        assert cached > 0.8 * before
    assert talk(shared, "kb")[0][1] == 0, "another key"
    assert talk(shared, cache_salt="s")[0][1] == 0, "another salt"
    again = talk(shared)
    assert all(cached > 0.8 * prompt for prompt, cached in again), "all of it was said before"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("changes", [{"prefix_cache": 0}, {"share": "none", "prefix_cache": 2**24}])
def test_it_can_be_switched_off(changes):
    with running(keys=KEYS, **changes) as server:
        assert [cached for _, cached in talk(server)] == [0] * 5


TWO, ONE = KEYS, Keys((Key("a", "ka"),))


@pytest.mark.parametrize(
    ("share", "keys", "salt", "used"),
    [
        ("all", TWO, None, True),
        ("key", ONE, None, True),
        ("key", NO_KEYS, None, True),
        ("key", TWO, None, False),
        ("none", TWO, None, False),
        ("none", NO_KEYS, None, False),
        ("key", ONE, "s", False),
        ("all", TWO, "s", False),
    ],
)
def test_the_memory_of_a_file_serves_those_who_share_alone(share, keys, salt, used, caplog, monkeypatch):
    memory = Memory(2**20)
    served = replace(SERVED, lookahead=LookaheadConfig(memory=memory), save=lambda: None)
    with running(served, share=share, keys=keys) as server:
        warned = "neither read nor filled" in caplog.text
        asked = watched(monkeypatch, server.service.serving.engine, "add", lambda *given, **named: named)
        for key in [each.secret for each in keys.all] or ["-"]:
            body = {"prompt": "the fox said that", "max_tokens": 30, "temperature": 0, "cache_salt": salt}
            assert server.http.post("/v1/completions", json=body, headers={"x-api-key": key}).status_code == 200
    assert [each["lookahead"].memory is memory for each in asked] == [used] * max(1, len(keys.all))
    assert warned is (not used and not salt)


def test_a_key_sees_its_own_requests_in_the_status():
    passes = Passes()
    with running(slow_served(wait=passes), keys=KEYS) as server, ThreadPoolExecutor(1) as threads:

        def status(key):
            return server.http.get("/v1/lade/status", headers={"x-api-key": key}).json()

        body = {"prompt": "the fox", "max_tokens": 5}
        headers = {"x-api-key": "ka", "x-request-id": "mine"}
        answer = threads.submit(server.http.post, "/v1/completions", json=body, headers=headers)
        until(lambda: status("ka")["rows"])
        assert [row["id"] for row in status("ka")["rows"]] == ["mine"]
        others = status("kb")
        assert others["rows"] == [] and others["kv_slots"].keys() == {"limit"}
        passes.let_all()
        assert answer.result(60).status_code == 200
    with running() as server:
        status = server.http.get("/v1/lade/status").json()
        assert {"state", "rows_limit", "waiting_limit", "rows"} < status.keys()
        assert status["kv_slots"].keys() == {"used", "reserved", "limit"}
