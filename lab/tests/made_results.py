"""A run that never ran: samples drawn step by step, as a real one has them, with known probabilities and costs."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from itertools import product

from lade_lab.results import Environment, Method, Mismatch, Model, Results, Sample, Settings, StepCurve, Workload

METHODS = [
    Method("hf", "hf"),
    Method("hf-prompt-lookup", "hf-prompt-lookup", {"tokens": 10}),
    Method("plain", "plain", {}, packed=True),
    Method("jacobi", "jacobi", {"window": 8}, packed=True),
    Method("lookahead 7,5,7", "lookahead", {"window": 7, "ngram": 5, "guesses": 7}, packed=True),
    Method("lookahead 15,5,15", "lookahead", {"window": 15, "ngram": 5, "guesses": 15}, packed=True),
    Method("adaptive", "adaptive", {}, packed=True),
    Method("adaptive-warm", "adaptive-warm", {}, packed=True),
]
FED = {"jacobi": 8, "lookahead 7,5,7": 35, "lookahead 15,5,15": 73, "adaptive": 6, "adaptive-warm": 9}
CHANCE = {"hf-prompt-lookup": 0.18, "jacobi": 0.05, "lookahead 7,5,7": 0.45, "lookahead 15,5,15": 0.5}
CHANCE |= {"adaptive": 0.4, "adaptive-warm": 0.55}
OFFERED = {
    "jacobi": ["window"],
    "lookahead 7,5,7": ["pool", "pool", "window", "prompt"],
    "lookahead 15,5,15": ["pool", "pool", "window", "prompt"],
    "adaptive": ["memory", "memory", "text", "window"],
    "adaptive-warm": ["memory", "memory", "memory", "text"],
}
EASE = {"humaneval": 1.25, "gsm8k": 0.9, "mt-bench": 0.6}
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]


def step_s(size: float, packed: bool) -> float:
    """Milliseconds flat up to 8 tokens, then a climb."""
    base = 0.040 if packed else 0.068
    return base * (1 + 0.012 * size + 0.02 * max(0.0, size - 8))


def sha(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def steps_of(method: Method, wanted: int, ease: float, chance: random.Random) -> list[tuple[int, list[str]]]:
    """Tokens fed and the source of each token emitted, for each step."""
    steps = []
    done = 1
    while done < wanted:
        sources: list[str] = []
        while method.name in CHANCE and len(sources) < 6 and chance.random() < CHANCE[method.name] * ease:
            sources.append(chance.choice(OFFERED.get(method.name, ["prompt"])))
        sources = [*sources, "bonus"][: wanted - done]
        fed = FED.get(method.name, 1) if method.name != "hf-prompt-lookup" else chance.choice([1, 1, 11])
        steps.append((max(fed + chance.choice([-1, 0, 0, 1]) if fed > 5 else fed, len(sources)), sources))
        done += len(sources)
    return steps


def sample_of(method: Method, workload: str, prompt: str, turn: int, repeat: int, tokens: int) -> Sample:
    chance = random.Random(f"{method.name} {workload} {prompt} {turn} {repeat}")
    steps = steps_of(method, tokens, EASE[workload], chance)
    slow = random.Random(f"{workload} {prompt}").uniform(0.92, 1.15)  # longer prompts, other company on the machine
    forward = [step_s(fed, method.packed) * slow * chance.uniform(0.97, 1.08) for fed, _ in steps]
    decode_s = sum(forward) + len(steps) * (0.0003 + 0.00002 * FED.get(method.name, 1))
    places: list[dict[str, int]] = []
    if not method.kind.startswith("hf"):
        for _, sources in steps:
            for place, source in enumerate(sources):
                if place == len(places):
                    places.append({})
                places[place][source] = places[place].get(source, 0) + 1
    return Sample(
        workload=workload, prompt=prompt, turn=turn, prompt_sha256=sha((workload, prompt, turn)),
        prompt_tokens=60 + 7 * len(prompt), method=method.name, seed=0, repeat=repeat, new_tokens=tokens,
        seconds=0.15 + decode_s + 0.002, prefill_s=0.15, decode_s=decode_s,
        forward_s=0.0 if method.kind.startswith("hf") else sum(forward), steps=len(steps),
        step_tokens=[fed for fed, _ in steps], accepted=[len(sources) for _, sources in steps], sources=places,
        distinct_4grams=random.Random(f"{prompt} {turn}").uniform(0.78, 0.99),
        output_sha256=sha((workload, prompt, turn, tokens)),
    )  # fmt: skip


def made_results(
    prompts: int = 12, repeats: int = 1, methods: list[Method] = METHODS, workloads: tuple[str, ...] = tuple(EASE)
) -> Results:
    """A complete run on 500 M parameters in bfloat16: gains, losses, near ties and one fault."""
    samples = []
    for workload, number in product(workloads, range(prompts)):
        prompt = f"{workload}/{number}"
        for turn in range(2 if workload == "mt-bench" else 1):
            tokens = random.Random(f"{prompt} {turn}").randint(60, 128)
            for repeat, method in product(range(repeats), methods):
                samples.append(sample_of(method, workload, prompt, turn, repeat, tokens))
    curves = []
    for packed, cached in product((False, True), (64, 512)):
        passes = [step_s(n * (1 + cached / 4000 + (not packed)), packed) for n in SIZES]
        curves.append(StepCurve(packed, cached, SIZES, [[took * k for k in (0.98, 1.0, 1.03)] for took in passes]))
    place = (workloads[0], f"{workloads[0]}/1", 0)
    near = Mismatch(*place, "adaptive", 0, 0, "hf", 17, 400, 812, 11.25, 11.1875, 1.0, True)
    fault = replace(near, method="jacobi", place=3, found_score=9.0, ulps=36.0, near_tie=False)
    named = {method.name: method for method in methods}
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "lade": "0.4.0"}
    return Results(
        created="2026-01-02T03:04:05+00:00",
        command=["lade", "bench", "--model", "stories3M-hf", "--prompts", "my prompts/human eval.jsonl", "--pack"],
        environment=Environment("AMD EPYC 9654 96-Core Processor, 2 cores", 2, versions, "Linux x86_64", "0123abc"),
        model=Model("stories3M-hf", "llama", 501_800_000, "bfloat16", inflated_from=3_100_000),
        settings=Settings(max_new_tokens=128, repeats=repeats),
        workloads=[Workload(name, name, prompts, sha(name)) for name in workloads],
        methods=methods,
        reference="hf",
        complete=True,
        samples=samples,
        mismatches=[each for each in (near, fault) if each.method in named],
        step_curves=curves,
    )
