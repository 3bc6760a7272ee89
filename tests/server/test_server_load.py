"""Many requests, odd ones, and for long."""

import json
import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import running, slow_served, until

NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(-3, 3), st.just(10**400))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20), st.just("\x00"), st.just("\ud800")),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
FIELDS = """
    messages prompt model stream stream_options max_tokens max_completion_tokens n seed temperature top_p top_k min_p
    repetition_penalty presence_penalty frequency_penalty logit_bias stop stop_token_ids min_tokens ignore_eos logprobs
    top_logprobs tools tool_choice response_format chat_template_kwargs continue_final_message echo lookahead lade
    cache_salt return_token_ids generation_config user other structured_outputs guided_json
    input instructions max_output_tokens text reasoning include system stop_sequences thinking tokens
""".split()  # noqa: SIM905 - a table of words reads better without the quotes
BODIES = st.one_of(VALUES, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
VALID = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 2, "input": "x", "tokens": [1]}


def check_odd_body(server, path, body, valid):
    if valid and isinstance(body, dict):
        body = {**VALID, **{name: value for name, value in body.items() if name not in VALID}}
    raw = json.dumps(body).encode()
    start = time.process_time()  # the server is in this process
    response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert time.process_time() - start < 5
    assert response.status_code in (200, 400, 404, 503, 529), (body, response.text)
    if response.status_code != 200:
        assert set(response.json()["error"]) == ERROR_OF.get(path, {"message", "type", "param", "code"})
    elif "event-stream" in response.headers["content-type"]:
        assert END_OF[path] in response.text.rsplit("\n\n", 2)[-2]
    else:
        assert response.json()[ANSWER_OF[path]] is not None


ERROR_OF = {path: {"message", "type"} for path in ("/v1/messages", "/v1/messages/count_tokens")}
END_OF = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/responses": "event: response.",
    "/v1/messages": "event: message_stop",
}
ANSWER_OF = {
    "/v1/chat/completions": "choices",
    "/v1/completions": "choices",
    "/v1/responses": "output",
    "/v1/messages": "content",
    "/v1/messages/count_tokens": "input_tokens",
    "/tokenize": "tokens",
    "/detokenize": "prompt",
}
PATHS = st.sampled_from(sorted(ANSWER_OF))


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
@given(path=PATHS, body=BODIES, valid=st.booleans())
def test_odd_bodies_are_answered_in_form(server, path, body, valid):
    check_odd_body(server, path, body, valid)


@pytest.mark.slow
@settings(max_examples=500, suppress_health_check=list(HealthCheck), deadline=None)
@given(path=PATHS, body=BODIES, valid=st.booleans())
def test_many_odd_bodies_are_answered_in_form(server, path, body, valid):
    check_odd_body(server, path, body, valid)
    assert server.service.phase == "ready"


def memory_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_run_leaves_nothing_behind():
    """1,000 requests, a quarter of them left by their clients, a tenth of them bad."""
    with running(slow_served(0.0005), max_rows=8, max_waiting=64) as server:
        outcomes, lock = [], threading.Lock()

        def ask(number):
            rng = random.Random(number)
            kind = "leave" if rng.random() < 0.25 else "bad" if rng.random() < 0.13 else "good"
            body = {
                "prompt": "x" * rng.randint(1, 60),
                "seed": number,
                "ignore_eos": True,
                "stream": rng.random() < 0.5,
            }
            body["max_tokens"] = 400 if kind == "leave" else rng.randint(1, 20)
            if kind == "bad":
                body["temperature"] = -1
            try:
                with httpx.Client(
                    base_url=server.url, timeout=rng.uniform(0.01, 0.3) if kind == "leave" else 60
                ) as client:
                    status = client.post("/v1/completions", json=body).status_code
            except httpx.TimeoutException:
                status = 499
            with lock:
                outcomes.append((kind, status))

        sizes = []
        for part in range(5):
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(ask, range(200 * part, 200 * (part + 1))))
            until(server.at_rest)
            sizes.append((memory_mib(), threading.active_count()))
        assert len(outcomes) == 1000
        assert {status for kind, status in outcomes if kind == "good"} == {200}
        assert {status for kind, status in outcomes if kind == "bad"} == {400}
        of_outcome = partial(server.metric, "lade_requests_total", endpoint="completions")
        done = of_outcome(outcome="length") + of_outcome(outcome="cancelled")
        bad = server.metric("lade_http_responses_total", path="/v1/completions", status="400")
        never_came = 1000 - done - bad
        assert 0 <= never_came < 100, "clients that left before their request was read"
        assert sizes[-1][0] < 1.05 * sizes[0][0] and sizes[-1][1] <= sizes[0][1] + 2
        assert not server.service.in_flight
