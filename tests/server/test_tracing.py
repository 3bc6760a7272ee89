"""Spans of requests: what is in them, whose trace they are part of, and that they cost nothing where they are off."""

import re

import httpx2 as httpx
import pytest
from served import Passes, running, slow_served, until, until_placed

from lade.server.keys import Key, Keys

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra [otel] is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra [otel] is not installed")
from opentelemetry import trace  # noqa: E402 - only if they are installed
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

from lade.server import tracing  # noqa: E402

SECRET = "sk-one-secret"
KEYS = Keys((Key("alice", SECRET), Key("bob", "sk-b")))
BODY = {"prompt": "a private text", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch):
    """The spans of servers that are made from now on, once there are so many."""
    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)  # as `opentelemetry-instrument` sets it up

    def found(count=0):
        until(lambda: len(exporter.get_finished_spans()) >= count)
        spans = exporter.get_finished_spans()
        assert not count or len(spans) == count, [span.name for span in spans]
        return spans

    return found


def by_name(spans):
    return {span.name: span for span in spans}


def test_a_request_has_a_span_with_its_parts(spans):
    with running(otel=True, keys=KEYS, prefix_cache=2**22) as server:
        server.http.headers["x-api-key"] = SECRET
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = server.http.post("/v1/completions", json=BODY, headers=headers).json()
        server.http.get("/live")
        whole = by_name(spans(4))
        request, queue, prefill, decode = (whole[name] for name in ("POST /v1/completions", *PARTS))
        assert request.kind is SpanKind.SERVER and request.status.status_code is StatusCode.UNSET
        assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == PARENT
        assert {each.parent.span_id for each in (queue, prefill, decode)} == {request.context.span_id}
        assert request.start_time <= queue.start_time <= queue.end_time == prefill.start_time
        assert prefill.end_time == decode.start_time < decode.end_time <= request.end_time
        facts = request.attributes
        assert (facts["http.request.method"], facts["http.route"]) == ("POST", "/v1/completions")
        assert (facts["http.response.status_code"], facts["lade.key"]) == (200, "alice")
        assert facts["gen_ai.response.model"] == "toy" and facts["lade.outcome"] == "length"
        usage = answer["usage"]
        assert facts["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert facts["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
        assert dict(prefill.attributes) == {
            "lade.prompt_tokens": usage["prompt_tokens"], "lade.cached_tokens": 0, "lade.choice": 0
        }  # fmt: skip
        steps = answer["lade"]["steps"]
        assert decode.attributes["lade.forward_passes"] == steps and decode.attributes["lade.tokens"] == 12
        assert decode.attributes["lade.tokens_per_step"] == pytest.approx(11 / steps)
        assert not re.search(f"{SECRET}|private", "".join(span.to_json() for span in whole.values()))


PARTS = ("queue", "prefill", "decode")


def test_each_choice_has_parts_and_a_stream_ends_with_its_last_token(spans):
    with running(otel=True) as server:
        assert server.events("/v1/completions", **BODY, n=2)[-1] == "[DONE]"
        found = spans(7)
        choices = sorted((span.name, span.attributes["lade.choice"]) for span in found if span.name in PARTS)
        assert choices == sorted((name, index) for name in PARTS for index in range(2))
        assert by_name(found)["POST /v1/completions"].attributes["gen_ai.usage.output_tokens"] == 24


@pytest.mark.parametrize("sent", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 4000])
def test_what_is_no_trace_begins_one(spans, sent):
    with running(otel=True) as server:
        response = server.http.post("/v1/completions", json={**BODY, "temperature": -1}, headers={"traceparent": sent})
        assert response.status_code == 400
        (span,) = spans(1)
        assert span.parent is None and span.attributes["http.response.status_code"] == 400
        assert span.status.status_code is StatusCode.UNSET and span.attributes["lade.key"] == "-"


def test_faults_and_requests_that_never_got_a_row_have_what_there_was(spans):
    passes, fails = Passes(), []
    served = slow_served(wait=passes, failing=lambda: bool(fails))
    with running(served, otel=True, max_rows=1) as server:
        with server.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}):
            until_placed(server, passes, rows=1, waiting=0)
            with pytest.raises(httpx.ReadTimeout):
                server.http.post("/v1/completions", json=BODY, timeout=0.3)
            queued = spans(2)
            assert [span.name for span in queued] == ["queue", "POST /v1/completions"]
            assert queued[1].attributes["lade.outcome"] == "cancelled"
            passes.let_all()
        until(server.at_rest)
        fails.append(1)
        assert server.complete("ab").status_code == 500
        until(lambda: len(server.service.in_flight) == 0)
    failed = [span for span in spans() if span.status.status_code is StatusCode.ERROR]
    assert [span.name for span in failed] == ["POST /v1/completions"]
    assert failed[0].attributes["lade.outcome"] == "error"


def test_without_the_option_there_is_none(spans):
    """Not even from the framework, whose own spans and logs may have texts."""
    with running() as server:
        assert server.complete("ab", max_tokens=2).status_code == 200
        assert server.complete("ab", temperature=-1).status_code == 400
        until(server.at_rest)
    assert not spans()


def test_what_a_server_sends_by_itself_is_named_by_the_environment(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    sent = []
    monkeypatch.setattr(tracing.OTLPSpanExporter, "export", lambda self, spans: sent.extend(spans))
    with running(otel=True) as server:
        assert server.complete("ab", max_tokens=2).status_code == 200
    assert [span.name for span in sent] == [*PARTS, "POST /v1/completions"], "those that are left, at the end"
    assert sent[0].resource.attributes["service.name"] == "mine"
