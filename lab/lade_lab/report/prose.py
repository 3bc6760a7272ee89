"""Findings of a run as sentences."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from lade.cli.terminal import count
from lade_lab.results import Method, Results
from lade_lab.summary import Block, Row, Speedup, Summary

MISSING = "-"
LOSS = "▼"
"""Marks what is slower than the reference, for those who see no colours."""

_EVEN = 0.995  # what rounds to 1.00 is no loss

LEAST_TOKENS = 8
"""Mean tokens of an answer below which no method is named the fastest: one step more or less would decide."""

_TELLING_GAP = 0.5
"""Above this relative difference a prediction is no percentage off, but wrong by a factor."""


@dataclass(frozen=True)
class Finding:
    """One plain sentence.

    Attributes:
        kind: what it is about; `fault` is an answer that differs by more than rounding explains.
        text: the sentence.
    """

    kind: Literal["incomplete", "fault", "tie", "loss", "gain", "equal"]
    text: str


def number(value: float | None, digits: int = 2) -> str:
    """With this many decimal places."""
    return MISSING if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share."""
    return MISSING if value is None else f"{value:.0%}"


def rate(value: float | None) -> str:
    """Tokens a second: three digits where there are not more before the point."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def is_loss(value: float | None) -> bool:
    """Return whether a speed-up is a loss."""
    return value is not None and value < _EVEN


def text_of(row: Row, summary: Summary) -> str:
    """Return the verdict on a method's answers against the reference's."""
    if row.method == summary.reference:
        return "reference"
    if not row.samples:
        return MISSING
    if row.mismatches:
        return f"{row.mismatches} DIFFER"
    if not row.compared:
        return "not compared"
    return f"{row.near_ties} near tie{'' if row.near_ties == 1 else 's'}" if row.near_ties else "equal"


def workload_name(block: Block) -> str:
    """For a heading."""
    return "all workloads" if block.workload is None else block.workload


def method_detail(method: Method) -> str:
    """The configuration of a method, such as `window 15, ngram 5, guesses 15; packed weights`."""
    config = ", ".join(f"{name} {value}" for name, value in method.config.items() if value is not None)
    return "; ".join(part for part in (config, "packed weights" if method.packed else "") if part)


def parameters(value: int) -> str:
    """`3.1M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def model_line(results: Results) -> str:
    """Return the line on the model and its settings."""
    model, settings = results.model, results.settings
    size = parameters(model.parameters) + " parameters"
    if model.inflated_from is not None:
        size += f" (computes what one of {parameters(model.inflated_from)} does)"
    parts = [f"{model.name} ({model.kind}), {size}", model.dtype]
    if model.draft:
        parts.append(f"draft model {model.draft}")
    parts.append(manner(results))
    parts.append(f"up to {count(settings.max_new_tokens, 'new token')}")
    if settings.ignore_eos:
        parts.append("past the end of the text")
    if settings.repeats > 1:
        parts.append(f"each answer timed {settings.repeats} times")
    return " · ".join(parts)


def manner(results: Results) -> str:
    """Return the line on decoding: greedy or sampled."""
    settings = results.settings
    if settings.temperature is None:
        return "greedy"
    limits = [f"top_k {settings.top_k}"] if settings.top_k else []
    limits += [f"top_p {settings.top_p:g}"] if settings.top_p else []
    seeds = count(len(settings.seeds), "seed")
    return ", ".join([f"sampled at temperature {settings.temperature:g}", *limits, seeds])


def machine_line(results: Results) -> str:
    """Return the line on hardware and versions."""
    place = results.environment
    versions = ", ".join(f"{name} {version}" for name, version in place.versions.items())
    commit = f"commit {place.commit}" if place.commit else "commit unknown"
    return " · ".join([place.device, count(place.threads, "thread"), versions, place.platform, commit])


def closing(summary: Summary) -> str:
    """Return how closely S over cost predicts the measured speed; empty where unknown."""
    rows = [row for row in summary.overall.rows if row.identity and row.method != summary.base]
    gaps = [(abs(row.identity.gap), row.method) for row in rows if row.identity]
    if not gaps:
        return ""
    largest, method = max(gaps)
    matched = f"match the measured speed over {summary.base}"
    text = f"Tokens per step over step cost {matched} {_closely(largest, 1)} (furthest: {method})"
    curves = [(row.identity.from_curve, row.identity.observed) for row in rows if row.identity]
    away = [abs(promised / observed - 1) for promised, observed in curves if promised]
    if away:
        closely = _closely(max(away), 0)
        text += f". With costs from the step curve, which leave out a method's own time, they do {closely}"
    return text + "."


def _closely(gap: float, digits: int) -> str:
    """Return how closely a prediction meets a speed, in words where a percentage would mean nothing.

    Args:
        gap: largest relative difference.
        digits: decimal places of the percentage.
    """
    return f"to within {gap:.{digits}%}" if gap <= _TELLING_GAP else f"only within a factor of {1 + gap:.1f}"


def caption(results: Results) -> str:
    """The short form of both, below a picture."""
    model, place = results.model, results.environment
    size = parameters(model.parameters)
    parts = [f"{model.name} {size}", model.dtype, manner(results), place.device, count(place.threads, "thread")]
    return " · ".join([*parts, f"commit {place.commit or 'unknown'}"])


def findings(results: Results, summary: Summary) -> list[Finding]:
    """Return the findings: faults first, then the gain, losses, and how the answers compare."""
    if not results.samples:
        return [Finding("incomplete", "No answer was measured yet.")]
    found = []
    if not summary.complete:
        answers = count(len(results.samples), "answer")
        found.append(
            Finding("incomplete", f"The run was interrupted: all figures are of the {answers} that there are.")
        )
    differences, fastest = _differences(summary), _fastest(results, summary)
    found += [each for each in differences if each.kind == "fault"]
    found += [fastest] if fastest else []
    return found + _losses(summary) + [each for each in differences if each.kind != "fault"]


def verdict(results: Results, summary: Summary) -> str:
    """Return what to use here, how much faster it is and whether its texts are equal, in one line."""
    tokens = [sample.new_tokens for sample in results.samples if sample.method == summary.reference]
    if not tokens:
        return "No verdict: nothing to compare with was measured."
    if fmean(tokens) < LEAST_TOKENS:
        few = f"{fmean(tokens):.0f} token{'' if round(fmean(tokens)) == 1 else 's'} on average"
        return f"No verdict: answers have {few}, and {LEAST_TOKENS} are needed. Are these prompts for this model?"
    best = _best(summary)
    if best is None or best.speedup is None:
        return f"Stay with {summary.reference}: no method is faster here without another text."
    speed = f"{best.speedup.each.median:.1f} times as fast as {summary.reference}"
    if not best.compared:
        return f"Use {best.method}: {speed}; its samples are others of the same distribution."
    equal = best.samples - best.near_ties
    texts = f"all {best.samples} texts equal" if not best.near_ties else f"{equal} of {best.samples} texts equal"
    return f"Use {best.method}: {speed}, {texts}{'' if not best.near_ties else ', the others after a near tie'}."


def _best(summary: Summary) -> Row | None:
    """Return the fastest method without a text that differs by more than rounding; None if none beats the reference."""
    rows = [row for row in summary.overall.rows if row.speedup and row.method != summary.reference]
    rows = [row for row in rows if not row.mismatches and row.speedup and row.speedup.each.median >= 2 - _EVEN]
    return max(rows, key=lambda row: row.speedup.each.median if row.speedup else 0.0, default=None)


def _differences(summary: Summary) -> list[Finding]:
    rows = [r for r in summary.overall.rows if r.samples and r.compared and r.method != summary.reference]
    faults = [f"{row.mismatches} of {row.samples} answers of {row.method}" for row in rows if row.mismatches]
    ties = [f"{row.near_ties} of {row.samples} of {row.method}" for row in rows if row.near_ties]
    found = []
    if faults:
        text = f"Texts differ from {summary.reference}'s by more than rounding explains: {_join(faults)}."
        found.append(Finding("fault", text))
    if ties:
        where = "where two tokens score almost equally and rounding decides"
        found.append(Finding("tie", f"Some answers differ from {summary.reference}'s {where}: {_join(ties)}."))
    other = [row.method for row in summary.overall.rows if row.samples and not row.compared]
    if rows and not found:
        which = "Every answer that was compared" if other else "Every answer of every method"
        found.append(Finding("equal", f"{which} equals {summary.reference}'s, token for token."))
    if other:
        text = f"Not compared, since they draw other samples from the same distribution: {_join(other)}."
        found.append(Finding("tie", text))
    return found


def _losses(summary: Summary) -> list[Finding]:
    """Methods slower than the reference; those slower only on a workload; those slower than the base."""
    rows = [row for row in summary.overall.rows if row.method != summary.reference]
    slow = [row for row in rows if is_loss(_median(row.speedup))]
    found = []
    if slow:
        found.append(f"Slower than {summary.reference}: {_speeds(slow, [row.speedup for row in slow])}.")
    for row in rows:
        own = [(workload_name(block), block.row(row.method).speedup) for block in summary.blocks]
        lost = [f"{name} ({number(_median(faster))})" for name, faster in own if is_loss(_median(faster))]
        if lost and row not in slow:
            found.append(f"{row.method} is slower than {summary.reference} on {_join(lost)}.")
    beaten = [row for row in rows if is_loss(_median(row.decode_speedup)) and row not in slow]
    if beaten and summary.base != summary.reference:
        speeds = _speeds(beaten, [row.decode_speedup for row in beaten])
        found.append(f"Slower after prefill than one token a step ({summary.base}): {speeds}.")
    return [Finding("loss", text) for text in found]


def _speeds(rows: list[Row], values: list[Speedup | None]) -> str:
    """`jacobi (0.95 of its speed) and lookahead 7,5,7 (0.77)`."""
    parts = [f"{row.method} ({number(_median(value))})" for row, value in zip(rows, values, strict=True)]
    return _join([parts[0].removesuffix(")") + " of its speed)", *parts[1:]])


def _fastest(results: Results, summary: Summary) -> Finding | None:
    """The best of the methods, or that none is faster than the reference; None for answers that are too short."""
    reference = summary.reference
    if fmean(sample.new_tokens for sample in results.samples) < LEAST_TOKENS:
        return None
    rows = [row for row in summary.overall.rows if row.speedup and row.method != reference]
    best = max(rows, key=lambda row: row.speedup.each.median if row.speedup else 0.0, default=None)
    if best is None or best.speedup is None or best.speedup.each.median < 2 - _EVEN:
        return Finding("loss", f"No method is faster than {reference}.") if rows else None
    each = best.speedup.each
    half = f"; half of its answers lie between {each.low:.2f} and {each.high:.2f}" if each.count > 1 else ""
    text = f"The fastest, {best.method}, runs at {each.median:.2f} times the speed of {reference}{half}."
    base = next((row for row in rows if row.method == summary.base and row is not best), None)
    packed = any(method.packed for method in results.methods if method.name == summary.base)
    if base and packed:
        text += f" With packed weights alone ({base.method}) it is {number(_median(base.speedup))}."
    return Finding("gain", text)


def _median(found: Speedup | None) -> float | None:
    return found.each.median if found else None


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
