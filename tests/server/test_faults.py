"""Faults at every point that a request touches: once, and for as long as the machine lacks something.

Whoever is not hit has the whole and same text; whoever is hit has an error in the API's form; the server goes on.
"""

import errno
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2 as httpx
import pytest
from served import SERVED, TOKENIZER, byte_model, plain, running, templated, text_of, until
from spies import failing
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.hf import job
from lade.hf.detokenizer import AnswerText
from lade.hf.sampling import LoneSampler
from lade.server import answer, chat_template, completions, metrics, service
from lade.server.errors import ApiError
from lade.server.failures import FailedRequests
from lade.serving import batch, handle, prefix_cache, scheduler
from lade.serving import running as running_set

TOKENS = 24
PROBLEMS = {
    "fault": RuntimeError("a fault"),
    "memory": MemoryError("nothing left"),
    "descriptors": OSError(errno.EMFILE, "Too many open files"),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
}


class Saver:
    """Saves the draft memory: nothing, here."""

    def __call__(self):
        pass


HARMLESS = {
    "prefix cache: copy a text": (prefix_cache, "CachedText", 0),
    "prefix cache: store": (prefix_cache.PrefixCache, "put", 0),
    "prefix cache: find": (prefix_cache.PrefixCache, "find", 0),
    "metrics of a response": (metrics.Metrics, "add", 1),
    "memory: save": (Saver, "__call__", 0),
    "periodic work": (service.Service, "snapshot", 3),
    "step costs: save": (job.DecodeJob, "save", 0),
}
"""Points whose faults cost no answer: class, method, and the number of calls before the first that fails."""
HURTING = {
    "tokenize": (chat_template.ChatTemplate, "encode", 1),
    "parser": (completions.ChatPreprocessor, "parser", 1),
    "queue": (scheduler.Scheduler, "submit", 1),
    "admission": (running_set.RunningSet, "add", 1),
    "room": (running_set.RunningSet, "has_room", 1),
    "between passes": (batch.EngineBatch, "_preempt", 6),
    "after a pass": (batch.EngineBatch, "_report_use", 2),
    "prefill": (batch.EngineBatch, "_start", 1),
    "prefill of a prompt": (batch, "feed_chunk", 1),
    "join": (batch.EngineBatch, "_join", 1),
    "reserve": (running_set.KvAllocator, "reserve", 6),
    "draft": (DecodeLoop, "_draft", 6),
    "pass": (DecodeLoop, "_keep", 6),
    "first token": (Row, "choose_first", 1),
    "sampling": (LoneSampler, "draw", 9),
    "stop rule": (Row, "emit", 9),
    "detokenize": (AnswerText, "add", 9),
    "text of a step": (AnswerText, "taken", 9),
    "end of a text": (AnswerText, "finish", 0),
    "step": (handle.Handle, "add_step", 9),
    "event": (completions.ChatFormatter, "step", 5),
    "whole answer": (completions.ChatFormatter, "whole", 0),
    "answer's end": (answer.Answer, "_formatted", 0),
}


SAID = ["a beginning that all of them have in common, long enough to be kept: " + letter * 3 for letter in "abcd"]
SAMPLED = {"temperature": 1.0, "top_k": 0, "seed": 5}


def messages(number):
    return [{"role": "user", "content": SAID[number]}]


@pytest.fixture(scope="module")
def texts():
    """What each request is answered: two greedy ones, and two that sample."""
    limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    arguments = [{}, {"seed": 5, "do_sample": True, "top_k": 0}] * 2
    return [text_of(plain(templated(messages(at)), **limits, **each)) for at, each in enumerate(arguments)]


def asked(server, number):
    """The text of an answer, or the code of its error; the first half of them is not streamed."""
    body = {"messages": messages(number), "max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True}
    body |= SAMPLED if number % 2 else {"temperature": 0}
    if number < 2:
        response = server.http.post("/v1/chat/completions", json=body)
        found = response.json()
        assert (response.status_code == 200) == ("error" not in found) and response.status_code in (200, 500, 503)
        return found if "error" in found else found["choices"][0]["message"]["content"]
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        raw = b"".join(response.iter_bytes()).decode()
    if response.status_code != 200:
        return json.loads(raw)
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert ("error" in events[-1]) != raw.endswith("data: [DONE]\n\n"), raw[-200:]
    if "error" in events[-1]:
        return events[-1]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def ask_all(server):
    with ThreadPoolExecutor(len(SAID)) as pool:
        return list(pool.map(lambda number: asked(server, number), range(len(SAID))))


@pytest.fixture
def server():
    with running(replace(SERVED, save=Saver()), prefix_cache=2**24, save_s=0.0) as made:
        yield made


def is_error(found):
    return isinstance(found, dict) and set(found["error"]) == {"message", "type", "param", "code"}


def check_server(server, texts):
    until(server.at_rest)
    assert server.service.phase == "ready" and server.service.snapshot().rows == 0
    assert ask_all(server) == texts, "afterwards"


CASES = [(kind, point) for kind in PROBLEMS for point in {**HARMLESS, **HURTING}]
cases = pytest.mark.parametrize(
    ("kind", "point"),
    [
        pytest.param(kind, point, marks=() if kind == list(PROBLEMS)[number % 4] else pytest.mark.slow)
        for number, (kind, point) in enumerate(sorted(CASES, key=lambda case: case[::-1]))
    ],
)


@cases
def test_one_fault_costs_one_answer_at_most(server, texts, monkeypatch, kind, point):
    owner, name, before = {**HARMLESS, **HURTING}[point]
    raised = failing(monkeypatch, owner, name, PROBLEMS[kind], calls={before + 1})
    found = ask_all(server)
    until(lambda: raised)
    failed = [each for each in found if is_error(each)]
    assert [each for each in found if not is_error(each)] == [
        text for each, text in zip(found, texts, strict=True) if not is_error(each)
    ]
    assert len(failed) <= (0 if point in HARMLESS else 1), failed
    check_server(server, texts)


@cases
def test_a_lasting_fault_is_told_of_and_ends(server, texts, monkeypatch, kind, point):
    owner, name, before = {**HARMLESS, **HURTING}[point]
    with monkeypatch.context() as patch:
        raised = failing(patch, owner, name, PROBLEMS[kind], calls=range(before + 1, sys.maxsize))
        found = ask_all(server)
        until(lambda: raised)
    assert all(is_error(each) or each == text for each, text in zip(found, texts, strict=True)), found
    if point in HARMLESS:
        assert found == texts
    check_server(server, texts)


KILLER = TOKENIZER("~").input_ids[0]


@pytest.fixture
def killing():
    """A server whose passes fail with a token in them, as with a text that a kernel cannot take."""

    def refuse(module, given, named):
        if (named["input_ids"] == KILLER).any():
            raise RuntimeError("the device does not take it")

    model = byte_model()
    model.register_forward_pre_hook(refuse, with_kwargs=True)
    with running(replace(SERVED, model=model)) as made:
        yield made


def code_of(response):
    return response.status_code, response.json()["error"]["code"]


def test_a_request_that_kills_its_pass_is_refused_after_two_tries(killing, texts):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(asked, killing, 0)
        for _ in range(2):
            assert code_of(killing.complete("a~b", max_tokens=3)) == (500, "internal_error")
        assert other.result() == texts[0]
    for _ in range(2):
        assert code_of(killing.complete("a~b", max_tokens=3)) == (422, "request_kills_pass")
    ended = killing.service.snapshot().requests
    assert ended["error"] == 2, "refused before it gets a row"
    assert code_of(killing.complete("a~b", max_tokens=4)) == (500, "internal_error"), "another request"
    assert killing.complete("ab", max_tokens=3).status_code == 200
    killing.service.failed.SECONDS = 0.0
    assert code_of(killing.complete("a~b", max_tokens=3)) == (500, "internal_error"), "it is forgotten by then"


def test_a_request_that_kills_a_pass_of_several_is_found(killing, texts):
    """Its first token is let through, and the pass after that is one over all rows."""
    passes = {"logit_bias": {str(KILLER): 100}, "temperature": 0, "max_tokens": 9, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(asked, killing, number) for number in (1, 3)]
        until(lambda: killing.service.snapshot().rows == 2)
        for status in (500, 500, 422):
            assert killing.complete("ab", **passes).status_code == status
        assert [each.result() for each in others] == [texts[1], texts[3]]


def test_many_requests_that_kill_their_passes_do_not_end_the_server(killing, texts):
    for number in range(7):
        assert code_of(killing.complete("~" * (number + 1), max_tokens=3)) == (500, "internal_error")
    assert asked(killing, 0) == texts[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("kind", "status"), [("fault", "dead"), ("memory", "ok")])
def test_a_device_that_is_gone_ends_the_engine_and_lack_of_memory_does_not(kind, status):
    """No pass succeeds any more, and whoever watches `/live` starts another server."""

    def gone(module, given, named):
        if broken:
            raise PROBLEMS[kind]

    model, broken = byte_model(), list[bool]()
    model.register_forward_pre_hook(gone, with_kwargs=True)
    with running(replace(SERVED, model=model)) as made:
        broken.append(True)
        for number in range(4):
            assert made.complete("a" * (number + 1), max_tokens=3).status_code in (500, 503)
        broken.clear()
        until(lambda: made.http.get("/health").json()["status"] == status)
        assert (made.complete("another", max_tokens=3).status_code == 200) == (status == "ok")
        assert made.http.get("/live").status_code == (200 if status == "ok" else 503)


def test_failures_of_one_key_are_nothing_to_another():
    failed = FailedRequests()
    for number in range(300):
        for _ in range(2):
            failed.add("a", number)
    with pytest.raises(ApiError):
        failed.check("a", 299)
    failed.check("b", 299)
    failed.check("a", 1)
    assert len(failed.known) == FailedRequests.MOST


@pytest.mark.parametrize("kind", ["descriptors", "disk"])
def test_a_write_that_fails_costs_one_connection(server, texts, monkeypatch, kind):
    raised = failing(monkeypatch, RequestResponseCycle, "send", PROBLEMS[kind], calls={10})

    def heard(number):
        try:
            return asked(server, number)
        except (httpx.HTTPError, AssertionError):
            return None  # it ends in the middle

    with ThreadPoolExecutor(len(SAID)) as pool:
        found = list(pool.map(heard, range(len(SAID))))
    assert raised and sum(each != text for each, text in zip(found, texts, strict=True)) <= 1
    check_server(server, texts)
