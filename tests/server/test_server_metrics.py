"""What Prometheus reads agrees with what clients were told."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from served import running, until

import lade.server


def read(server):
    """Samples by name and labels, but for the model's."""
    text = server.http.get("/metrics").text
    return {
        (sample.name, *sorted((name, value) for name, value in sample.labels.items() if name != "model")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_sums_are_those_of_the_answers():
    with running() as server:
        before = read(server)
        assert before["lade_generation_tokens_total",] == 0, "the warm-up does not count"
        answers = [server.chat(f"number {k}", seed=k, max_tokens=5 + k, n=1 + k % 2).json() for k in range(6)]
        server.complete("x" * 20, max_tokens=4, temperature=0, lookahead={"budget": 8})
        server.complete("x", temperature=-1)
        server.chat(model="none")
        until(server.at_rest)
        now = read(server)
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers) + 4
    assert now["lade_generation_tokens_total",] == tokens
    prompts = sum(answer["usage"]["prompt_tokens"] * len(answer["choices"]) for answer in answers) + 20
    assert now["lade_prompt_tokens_total",] == prompts
    accepted = {key[1][1]: value for key, value in now.items() if key[0] == "lade_accepted_tokens_total"}
    assert sum(accepted.values()) == tokens and accepted["prefill"] == 10
    outcomes = {(dict(key[1:])["endpoint"], dict(key[1:])["outcome"]): value
                for key, value in now.items() if key[0] == "lade_requests_total"}  # fmt: skip
    assert outcomes["chat", "length"] + outcomes.get(("chat", "stop"), 0) == 6
    assert outcomes["completions", "length"] == 1 and outcomes["chat", "rejected"] == 1
    path, status = ("path", "/v1/chat/completions"), ("status", "404")
    assert now["lade_http_responses_total", path, status] == 1
    assert now["lade_http_responses_total", ("path", "/v1/completions"), ("status", "400")] == 1
    assert now["lade_requests_running",] == now["lade_requests_waiting",] == now["lade_kv_slots_used",] == 0
    assert now["lade_request_generation_tokens_sum",] == tokens
    assert now["lade_time_to_first_token_seconds_count",] == 7
    assert now["lade_prompt_tokens_cached_total",] == sum(
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers
    )
    assert now["lade_ready",] == 1 and now["lade_rows_limit",] == 8


def test_what_was_expected_and_forms_of_answers_are_counted():
    with running() as server:
        said = server.chat(temperature=0, max_tokens=12).json()["choices"][0]["message"]["content"]
        expected = {"prediction": {"type": "content", "content": said + " and more"}, "temperature": 0}
        usage = server.chat(max_tokens=12, **expected).json()["usage"]["completion_tokens_details"]
        server.chat(max_tokens=4, response_format={"type": "json_object"})
        until(server.at_rest)
        now = read(server)
    kinds = {kind: now["lade_prediction_tokens_total", ("outcome", kind)] for kind in ("accepted", "rejected")}
    assert kinds == {kind: usage[f"{kind}_prediction_tokens"] for kind in kinds} and kinds["accepted"] > 0
    assert now["lade_grammar_compile_seconds_count",] == 1


def test_paths_that_clients_make_up_are_one_label(server):
    for k in range(5):
        server.http.get(f"/made/up/{k}")
        server.http.get(f"/v1/models/{k}")
    paths = {dict(key[1:])["path"] for key in read(server) if key[0] == "lade_http_responses_total"}
    assert {"other", "/v1/models/{name:path}"} <= paths and not any("made" in path for path in paths)


def test_the_dashboard_asks_for_series_that_are_there(server):
    server.chat(max_tokens=2)
    text = server.http.get("/metrics").text
    dashboard = (Path(lade.server.__file__).parent / "grafana.json").read_text()
    asked = set(re.findall(r"\blade_\w+", dashboard))
    assert len(asked) > 10
    missing = [name for name in sorted(asked) if not re.search(rf"^{name}\b", text, re.MULTILINE)]
    assert not missing
    assert "lade_request_seconds_bucket" in text and "_created" not in text, "which only say when others began"
