"""OpenTelemetry: a span per request, with its queue, prompt and answer inside, made from times that are taken anyway.

Where spans go is configured by OpenTelemetry's own environment variables, which its library reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from lade.server.request_context import RequestContext
from lade.server.settings import PROBES
from lade.serving.handle import Handle


class Tracing:
    """Makes the spans of a server."""

    def __init__(self, model: str) -> None:
        self._model, self._own = model, None
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):  # else `opentelemetry-instrument` has set it up
            provider = self._own = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("lade")

    def add(self, context: RequestContext, route: str) -> None:
        """Make the spans of a request that has ended, within the trace that its client names."""
        if context.path in PROBES:
            return
        facts: dict[str, Any] = {"http.request.method": context.method, "http.route": route, "lade.key": context.key}
        facts |= {"http.response.status_code": context.status, "lade.request_id": context.id}
        handles = context.handles
        if context.endpoint:
            facts["gen_ai.response.model"] = self._model
            facts["gen_ai.usage.input_tokens"] = sum(each.prompt_tokens for each in handles)
            facts["gen_ai.usage.output_tokens"] = sum(each.stats.new_tokens for each in handles)
            facts["gen_ai.usage.cache_read.input_tokens"] = sum(each.cached_tokens for each in handles)
            facts["lade.outcome"] = str(context.outcome)
        name, parent = f"{context.method} {route}", propagate.extract(context.headers)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, facts, start_time=context.received_ns)
        if context.status >= 500:
            span.set_status(StatusCode.ERROR)
        now, within = context.began + context.seconds, trace.set_span_in_context(span)
        since = context.received_ns - int(1e9 * context.began)
        for index, handle in enumerate(handles):
            for name, began, ended, known in _phases(handle, now):
                known["lade.choice"] = index
                part = self._tracer.start_span(name, within, attributes=known, start_time=since + int(1e9 * began))
                part.end(since + int(1e9 * ended))
        span.end(since + int(1e9 * now))

    def close(self) -> None:
        """Send the spans that are left, which takes some ten seconds if there is no collector."""
        if self._own is not None:
            self._own.shutdown()


def _phases(handle: Handle, now: float) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield name, beginning, end and attributes of each part of a choice, on the `perf_counter` clock."""
    stats, ended = handle.stats, handle.ended or now
    started = ended if handle.queue_s is None else handle.began + handle.queue_s
    first = ended if handle.prefill_s is None else started + handle.prefill_s
    yield "queue", handle.began, started, {}
    if handle.queue_s is not None:
        prompt = {"lade.prompt_tokens": handle.prompt_tokens, "lade.cached_tokens": handle.cached_tokens}
        yield "prefill", started, first, prompt
    if handle.prefill_s is not None:
        answer = {"lade.tokens": stats.new_tokens, "lade.forward_passes": stats.steps, "lade.end": str(handle.reason)}
        yield "decode", first, ended, {**answer, "lade.tokens_per_step": stats.tokens_per_step}
