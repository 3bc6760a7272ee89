"""Whether two runs can be compared: what differs between them, and what only one of them has."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lade.bench.results import Method, Results

_FREE_SETTINGS = ("seeds", "repeats")  # they say how many samples there are, not what a sample is


def refused(a: Results, b: Results) -> list[str]:
    """What makes two runs incomparable, each as "what: this in A, that in B"."""
    found = [f"model {each}" for each in _differing(a.model, b.model)]
    found += [f"settings {each}" for each in _differing(a.settings, b.settings, but=_FREE_SETTINGS)]
    others = {method.name: method for method in b.methods}
    for method in a.methods:
        other: Method | None = others.get(method.name)
        if other is not None:
            found += [f"method {method.name!r} {each}" for each in _differing(method, other)]
    return found


def worth_knowing(a: Results, b: Results) -> list[str]:
    """What a reader should know, and may be just what is compared."""
    found = [f"environment {each}" for each in _differing(a.environment, b.environment, but=("versions", "commit"))]
    versions = a.environment.versions, b.environment.versions
    for name in sorted({*versions[0], *versions[1]}):
        if versions[0].get(name) != versions[1].get(name):
            found.append(f"version of {name}: {versions[0].get(name)} in A, {versions[1].get(name)} in B")
    found += [f"settings {each}" for each in _differing(a.settings, b.settings) if each.startswith(_FREE_SETTINGS)]
    found += [f"{name} is not complete" for name, run in (("A", a), ("B", b)) if not run.complete]
    return found


def missing(own: Results, other: Results) -> list[str]:
    """Methods, workloads and prompts that one run has answers of and the other has not."""
    methods, workloads = {s.method for s in other.samples}, {s.workload for s in other.samples}
    found = [f"method {name!r}" for name in dict.fromkeys(s.method for s in own.samples) if name not in methods]
    found += [f"workload {name!r}" for name in dict.fromkeys(s.workload for s in own.samples) if name not in workloads]
    prompts = {(s.workload, s.prompt) for s in other.samples}
    mine = dict.fromkeys((s.workload, s.prompt) for s in own.samples if s.workload in workloads)
    return found + [
        f"prompt {prompt!r} of {workload}" for workload, prompt in mine if (workload, prompt) not in prompts
    ]


def _differing(a: Any, b: Any, but: tuple[str, ...] = ()) -> list[str]:
    """Fields of two records that differ, as "name: this in A, that in B"."""
    pairs = ((each.name, getattr(a, each.name), getattr(b, each.name)) for each in fields(a) if each.name not in but)
    return [f"{name}: {x!r} in A, {y!r} in B" for name, x, y in pairs if x != y]
