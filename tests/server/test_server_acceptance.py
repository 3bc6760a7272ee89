"""Acceptance metrics of answers, in vLLM's shape, agree with the steps and with the Prometheus series."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families
from served import running, until

from lade.server.metrics import accepted_by_position, speculative_decoding
from lade.stats import Step

ASKED = {"temperature": 0, "max_tokens": 40, "lookahead": {"budget": 12}}


def step(index, sources, fed):
    return Step(index, list(range(len(sources))), sources, fed, 0.0)


def test_the_shape_is_that_of_vllm():
    steps = [
        step(0, ["prefill"], 50),
        step(1, ["pool", "pool", "bonus"], 5),
        step(2, ["bonus"], 1),
        step(3, ["bonus"], 3),
        step(4, ["text", "text"], 3),
    ]
    found = speculative_decoding(steps)
    assert found == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 8,
        "acceptance_histogram": [1, 0, 2, 0, 0],
        "acceptance_histogram_by_draft_length": {"2": [1, 0, 1], "4": [0, 0, 1, 0, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 4,
        "accepted_by_source": {"pool": 2, "text": 2},
    }
    found = speculative_decoding([step(0, ["prefill"], 9), step(1, ["bonus"], 1)])
    assert found["acceptance_histogram"] == [0] and found["mean_acceptance_length"] == 1.0
    assert found["num_spec_steps"] == found["num_draft_tokens"] == found["draft_acceptance_rate"] == 0
    assert accepted_by_position({0: 5, 1: 2, 3: 1}) == [3, 1, 1] and accepted_by_position({}) == []


def metrics_of(answer):
    return answer["metrics"]["speculative_decoding"]


def test_answers_have_none_unless_asked_for(server):
    assert "metrics" not in server.chat(**ASKED).json()
    usage = {"stream_options": {"include_usage": True}}
    assert not any("metrics" in event for event in server.events("/v1/completions", prompt="abc", **usage)[:-1])


def test_answers_agree_with_their_figures_streamed_or_not():
    with running(acceptance="summary", share="none") as server:
        whole = server.chat("ab" * 9, **ASKED).json(), server.complete("ab" * 9, **ASKED).json()
        bodies = {"messages": [{"role": "user", "content": "ab" * 9}]}, {"prompt": "ab" * 9}
        usage = {"stream_options": {"include_usage": True}}
        for path, body, answer in zip(("chat/completions", "completions"), bodies, whole, strict=True):
            found, figures = metrics_of(answer), answer["lade"]
            assert found["num_draft_tokens"] == figures["fed"] - figures["steps"] > 0
            emitted = found["num_accepted_draft_tokens"] + figures["steps"]
            assert emitted - 1 <= answer["usage"]["completion_tokens"] - 1 <= emitted, "the last step may have no bonus"
            histogram = found["acceptance_histogram"]
            assert sum(histogram) == found["num_spec_steps"] and len(histogram) == found["num_spec_tokens"] + 1
            assert sum(k * steps for k, steps in enumerate(histogram)) == found["num_accepted_draft_tokens"] > 0
            assert sum(found["accepted_by_source"].values()) == found["num_accepted_draft_tokens"]
            events = server.events(f"/v1/{path}", **body, **ASKED, **usage)
            *others, last, end = events
            assert end == "[DONE]" and metrics_of(last) == found and last["usage"] == answer["usage"]
            assert not any("metrics" in event for event in others)
            assert not any("metrics" in event for event in server.events(f"/v1/{path}", **body, **ASKED)[:-1])


def test_several_choices_have_null():
    with running(acceptance="summary") as server:
        assert server.chat(n=2, max_tokens=4).json()["metrics"] == {"speculative_decoding": None}
        assert server.complete(["ab", "cd"], max_tokens=4).json()["metrics"] == {"speculative_decoding": None}
        assert metrics_of(server.chat(max_tokens=4, lookahead=None).json())["num_spec_steps"] == 0


def vllm_series(server):
    return {
        (sample.name, sample.labels.get("position")): (sample.value, sample.labels)
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def test_answers_add_up_to_the_series_that_dashboards_know():
    with running(acceptance="summary") as server:
        assert vllm_series(server)["vllm:spec_decode_num_drafts_total", None][0] == 0, "the warm-up does not count"
        found = [metrics_of(server.chat("ab" * k, **ASKED).json()) for k in range(3, 9)]
        until(server.at_rest)
        series = vllm_series(server)
    names = {"drafts": "num_spec_steps", "draft_tokens": "num_draft_tokens"}
    for name, member in {**names, "accepted_tokens": "num_accepted_draft_tokens"}.items():
        value, labels = series[f"vllm:spec_decode_num_{name}_total", None]
        assert value == sum(each[member] for each in found) > 0
        assert labels == {"model_name": "toy", "engine": "0"}
    accepted = Counter[int]()
    for each in found:
        accepted.update(dict(enumerate(each["acceptance_histogram"])))
    accepted = +accepted
    for position in range(max(accepted)):
        value, labels = series["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(position)]
        assert value == sum(steps for count, steps in accepted.items() if count > position)
        assert labels == {"model_name": "toy", "engine": "0", "position": str(position)}
    assert ("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(max(accepted))) not in series
