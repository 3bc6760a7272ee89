"""Prometheus metrics, whose totals come from one snapshot of the engine, and the acceptance metrics of an answer."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from lade.server.request_context import RequestContext
from lade.serving.snapshot import EngineSnapshot
from lade.stats import Step
from lade.version import __version__, versions

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_PER_STEP = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 12, 16, 32)

_GAUGES: dict[str, tuple[str, Callable[[EngineSnapshot], float]]] = {
    "requests_running": ("Requests being prefilled or decoded.", lambda now: now.rows),
    "requests_waiting": ("Requests in the queue.", lambda now: now.waiting),
    "requests_displaced": ("Preempted requests that wait to resume.", lambda now: now.displaced),
    "rows_limit": ("Maximum number of requests decoded at a time.", lambda now: now.max_rows),
    "waiting_limit": ("Maximum number of requests in the queue.", lambda now: now.max_waiting),
    "kv_slots_used": ("KV cache slots in use.", lambda now: now.slots),
    "kv_slots_reserved": ("KV cache slots allocated.", lambda now: now.room),
    "prefix_cache_entries": ("Texts in the prefix cache.", lambda now: now.prefix_texts),
    "prefix_cache_bytes": ("Size of the prefix cache in bytes.", lambda now: now.prefix_bytes),
    "prefix_cache_limit_bytes": ("Maximum size of the prefix cache in bytes.", lambda now: now.max_prefix_bytes),
    "kv_slots_limit": ("Maximum number of KV cache slots.", lambda now: now.max_slots),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineSnapshot], float]]] = {
    "prompt_tokens": ("Prompt tokens.", lambda now: now.prompt_tokens),
    "prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", lambda now: now.cached_tokens),
    "generation_tokens": ("Generated tokens.", lambda now: now.new_tokens),
    "displacements": ("Preemptions.", lambda now: now.displacements),
    "passes": ("Forward passes after prefill.", lambda now: now.passes),
    "row_steps": ("Decoding steps, summed over rows.", lambda now: now.steps),
    "resting_steps": ("Row steps in which drafting rested, as drafts had not paid.", lambda now: now.resting_steps),
    "fed_tokens": ("Tokens fed in decoding steps.", lambda now: now.fed_tokens),
    "forward_seconds": ("Seconds in forward passes.", lambda now: now.forward_s),
    "host_seconds": ("Seconds of decoding outside of forward passes.", lambda now: now.decode_s - now.forward_s),
    "prefill_seconds": ("Seconds of prefill.", lambda now: now.prefill_s),
}


class Metrics:
    """All series of one server, in a registry of its own; with a replica's name all have it as a label."""

    def __init__(
        self, model: str, snapshot: Callable[[], EngineSnapshot | None], ready: Callable[[], bool], replica: str = ""
    ) -> None:
        self.info: dict[str, str] = {}  # labels of `lade_info` besides the versions
        self._labels = {"replica": replica} if replica else {}
        self._model, self._snapshot, self._ready = model, snapshot, ready
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._requests = self._counter("requests", "Requests by outcome.", "endpoint", "outcome")
        self._responses = self._counter("http_responses", "HTTP responses by path and status.", "path", "status")
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token.", _SECONDS)
        self._each = self._histogram("time_per_output_token_seconds", "Time per token after the first.", _TOKEN_SECONDS)
        self._queued = self._histogram("queue_seconds", "Time in the queue.", _SECONDS)
        self._whole = self._histogram("request_seconds", "Time to the last token.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self._answer = self._histogram("request_generation_tokens", "Generated tokens of a choice.", _TOKENS)
        self._per_step = self._histogram("request_tokens_per_step", "Tokens per decoding step of a choice.", _PER_STEP)
        self.compiled = self._histogram("grammar_compile_seconds", "Time to compile a grammar.", _SECONDS)
        self._key_requests = self._counter("key_requests", "Requests by name of the key.", "key", "outcome")
        self._key_tokens = self._counter("key_tokens", "Tokens by name of the key.", "key", "kind")
        self._predicted = self._counter("prediction_tokens", "Tokens of predicted outputs by outcome.", "outcome")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"lade_{name}", what, ("model", *labels), registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Any:
        made = Histogram(f"lade_{name}", what, ("model",), registry=self._registry, buckets=buckets)
        return made.labels(self._model)

    def add(self, context: RequestContext, known_path: str) -> None:
        """Count an answer; `known_path` is a route's path, which bounds the number of labels."""
        self._responses.labels(self._model, known_path, str(context.status)).inc()
        if context.endpoint:
            self._add_decoded(context)
            if context.key != "-":
                self._add_for_key(context)

    def _add_for_key(self, context: RequestContext) -> None:
        self._key_requests.labels(self._model, context.key, context.outcome).inc()
        for kind, tokens in (
            ("prompt", sum(handle.prompt_tokens for handle in context.handles)),
            ("generation", sum(handle.stats.new_tokens for handle in context.handles)),
        ):
            self._key_tokens.labels(self._model, context.key, kind).inc(tokens)

    def _add_decoded(self, context: RequestContext) -> None:
        self._requests.labels(self._model, context.endpoint, context.outcome).inc()
        if context.first_s is not None:
            self._first.observe(context.first_s)
            self._whole.observe(context.seconds)
        for outcome, tokens in zip(("accepted", "rejected"), context.predictions, strict=True):
            self._predicted.labels(self._model, outcome).inc(tokens)
        for handle in context.handles:
            if handle.queue_s is not None:
                self._queued.observe(handle.queue_s)
            if handle.stats.new_tokens == 0:
                continue
            self._prompt.observe(handle.prompt_tokens)
            self._answer.observe(handle.stats.new_tokens)
            if handle.stats.steps:
                self._each.observe(handle.stats.decode_s / max(1, handle.stats.accepted_tokens))
                self._per_step.observe(handle.stats.tokens_per_step)

    def text(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return generate_latest(_Labelled(self._registry, self._labels))

    def collect(self) -> Iterator[Metric]:
        """Yield the series that are read from the engine."""
        model = {"model": self._model}
        yield _series(GaugeMetricFamily, "lade_ready", "1 if requests are accepted.", (model, float(self._ready())))
        info = {**model, "version": __version__, **versions(), **self.info}
        yield _series(GaugeMetricFamily, "lade_info", "Versions, device, dtype and method.", (info, 1.0))
        now = self._snapshot()
        if now is None:
            return
        for name, (what, read) in _GAUGES.items():
            yield _series(GaugeMetricFamily, f"lade_{name}", what, (model, read(now)))
        for name, (what, read) in _COUNTERS.items():
            yield _series(CounterMetricFamily, f"lade_{name}", what, (model, read(now)))
        accepted = [({**model, "source": source}, tokens) for source, tokens in now.sources.items()]
        yield _series(CounterMetricFamily, "lade_accepted_tokens", "Generated tokens by source.", *accepted)
        yield from self._collect_vllm(now)

    def _collect_vllm(self, now: EngineSnapshot) -> Iterator[Metric]:
        """Yield the speculative decoding counters under the names and labels that dashboards for vLLM have."""
        engine, prefix = {"model_name": self._model, "engine": "0"}, "vllm:spec_decode_num"
        by_position = accepted_by_position(now.acceptance)
        drafts, drafted = sum(now.acceptance.values()), now.fed_tokens - now.steps
        yield _series(CounterMetricFamily, f"{prefix}_drafts", "Decoding steps with drafts.", (engine, drafts))
        yield _series(CounterMetricFamily, f"{prefix}_draft_tokens", "Draft tokens.", (engine, drafted))
        name, what = f"{prefix}_accepted_tokens", "Accepted draft tokens"
        yield _series(CounterMetricFamily, name, f"{what}.", (engine, sum(by_position)))
        positions = [({**engine, "position": str(place)}, tokens) for place, tokens in enumerate(by_position)]
        yield _series(CounterMetricFamily, f"{name}_per_pos", f"{what} by position in the draft.", *positions)


def _series(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, what: str, *samples: tuple[dict[str, str], float]
) -> Metric:
    """Return a series with its samples: the labels and the value of each."""
    made = kind(name, what, labels=list(samples[0][0]) if samples else ())
    for labels, value in samples:
        made.add_metric(list(labels.values()), value)
    return made


class _Labelled:
    """Registry that adds labels to all series and omits `_created` ones."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        for metric in self._registry.collect():
            kept = [each for each in metric.samples if not each.name.endswith("_created")]
            metric.samples = [each._replace(labels={**each.labels, **self._labels}) for each in kept]
            yield metric


def speculative_decoding(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the acceptance metrics of one answer in the shape of vLLM's `metrics.speculative_decoding`.

    Prefill and steps without drafts do not count. A tree drafts all its tokens, of which one path can be accepted, so
    `draft_acceptance_rate` is lower than that of a chain with the same `mean_acceptance_length`. Sizes adapt, so
    `num_spec_tokens` is the size of the largest draft. `accepted_by_source` is not among vLLM's members.

    Source: vLLM, docs/features/speculative_decoding/acceptance_metrics.md; AIPerf and SPEED-Bench read it.
    """
    sizes = [(step.accepted_drafts, step.fed - 1) for step in steps if step.index > 0 and step.fed > 1]
    by_length = defaultdict[int, Tally[int]](Tally)
    for accepted, drafted in sizes:
        by_length[drafted][accepted] += 1
    largest = max(by_length, default=0)
    sources = Tally(source for step in steps if step.index > 0 for source in step.sources)
    del sources["bonus"]
    accepted_tokens, draft_tokens = sum(accepted for accepted, _ in sizes), sum(drafted for _, drafted in sizes)
    return {
        "mean_acceptance_length": 1.0 + accepted_tokens / max(1, len(sizes)),
        "draft_acceptance_rate": accepted_tokens / max(1, draft_tokens),
        "acceptance_histogram": _dense(Tally(accepted for accepted, _ in sizes), largest),
        "acceptance_histogram_by_draft_length": {
            str(length): _dense(counts, length) for length, counts in sorted(by_length.items())
        },
        "num_spec_steps": len(sizes),
        "num_accepted_draft_tokens": accepted_tokens,
        "num_draft_tokens": draft_tokens,
        "num_spec_tokens": largest,
        "accepted_by_source": dict(sources),
    }


def accepted_by_position(acceptance: Mapping[int, int]) -> list[int]:
    """Return how many draft tokens were accepted at each position, from the numbers of steps by accepted tokens."""
    longest = max(acceptance, default=0)
    return [sum(steps for accepted, steps in acceptance.items() if accepted > position) for position in range(longest)]


def _dense(counts: Mapping[int, int], length: int) -> list[int]:
    return [counts.get(accepted, 0) for accepted in range(length + 1)]
