"""Whole calls of a few prompts at once, by `model.generate`, `lade.generate` and an engine, in turn.

    python lab/experiments/calls_in_turn.py --model FOLDER --prompts FILE.jsonl --rows 4 --rounds 8 [--parts]

Each set of prompts is answered by every arm before the next, another arm first each time, so that all meet the same
minutes of the machine, and all must write the same tokens. The engines are made once, as a server's. Speeds are over
`model.generate`'s for the same set.
`--parts` says where a call's time went, but takes some of it, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lade
from lade.clock import Duration
from lade.decoding.loop import DecodeLoop
from lade.serving.request import PLAIN
from lade.stats import Step

Prompts = Sequence[list[int]]
Answering = Callable[[Prompts], list[list[int]]]
ARMS = ("hf", "plain", "default", "engine plain", "engine default")


class Pass(NamedTuple):
    """One step of all rows."""

    fed: int
    seconds: float
    forward_s: float
    emitted: float


def padded(prompts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ids and mask of a batch, `[B, L]`, padded on the left."""
    most = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([pad(prompt, (most - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([pad(torch.ones_like(prompt), (most - prompt.shape[1], 0)) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def noted_passes() -> list[Pass]:
    """A list that every step from now on is added to."""
    passes, observe = list[Pass](), DecodeLoop._observe

    def noting(loop: DecodeLoop[Any], steps: Sequence[Step], fed: int, took: Duration) -> None:
        start = perf_counter()
        observe(loop, steps, fed, took)
        own_s, emitted = perf_counter() - start, sum(len(step.tokens) for step in steps) / len(steps)
        passes.append(Pass(fed, took.wall_s + own_s, loop.runner.pass_time.wall_s, emitted))

    DecodeLoop._observe = noting  # type: ignore[method-assign, assignment]
    return passes


def arms_of(model: PreTrainedModel, rows: int, tokens: int) -> dict[str, Answering]:
    """By name, what answers prompts greedily, each to its last token: the new tokens of each."""
    given: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}

    def engine(lookahead: lade.LookaheadConfig) -> Answering:
        opened = lade.Engine(model, max_rows=rows, max_waiting=rows)

        def answered(prompts: Prompts) -> list[list[int]]:
            handles = [opened.add(ids, lookahead=lookahead, **given) for ids in prompts]
            return [handle.result()[0, -tokens:].tolist() for handle in handles]

        return answered

    def batch(way: Callable[..., Any]) -> Answering:
        return lambda prompts: way(pad_token_id=0, **given, **padded([torch.tensor([ids]) for ids in prompts]))[
            :, -tokens:
        ].tolist()

    default = lade.LookaheadConfig()
    return {
        "hf": batch(model.generate),  # type: ignore[arg-type]
        "plain": batch(partial(lade.generate, model, lookahead=PLAIN)),
        "default": batch(partial(lade.generate, model, lookahead=default)),
        "engine plain": engine(PLAIN),
        "engine default": engine(default),
    }


def parts_of(took: float, passes: Sequence[Pass]) -> list[float]:
    """Milliseconds of a call: outside of steps, a usual step over roots, its pass, and what is lost by other steps."""
    roots = [each for each in passes if each.fed == 1] or passes
    usual = statistics.median(each.seconds for each in roots)
    lost = sum(each.seconds - usual * each.emitted for each in passes if each.fed > 1)
    forward_s = statistics.median(each.forward_s for each in roots)
    return [1e3 * seconds for seconds in (took - sum(each.seconds for each in passes), usual, forward_s, lost)]


def main() -> None:
    """Read the options, answer all prompts in turn, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="a line of JSON with a field prompt for each")
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--rows", type=int, default=4, help="prompts at once")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    if args.rounds * -(-args.limit // args.rows) < len(ARMS) + 2:
        parser.error(f"--rounds {args.rounds} of --limit {args.limit} prompts are too few: give more of either")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    sets = [prompts[first : first + args.rows] for first in range(0, len(prompts), args.rows)]
    arms, passes = arms_of(model, args.rows, args.tokens), noted_passes() if args.parts else []
    times, parts = defaultdict[str, list[float]](list), defaultdict[str, list[list[float]]](list)
    for number, chosen in enumerate(sets * args.rounds):
        answers = list[list[list[int]]]()
        for name in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
            passes.clear()
            start = perf_counter()
            answers.append(arms[name](chosen))
            took = perf_counter() - start
            if number >= len(ARMS):  # the first ones find caches cold, and costs unmeasured
                times[name].append(took)
                if passes:
                    parts[name].append(parts_of(took, passes))
        if any(each != answers[0] for each in answers):
            raise SystemExit(f"outputs differ at prompts {number * args.rows % len(prompts)} and after")
    report(times, parts)


def report(times: Mapping[str, list[float]], parts: Mapping[str, list[list[float]]]) -> None:
    """A line for each arm."""
    for name in ARMS:
        speeds = [plain_s / took for plain_s, took in zip(times["hf"], times[name], strict=True)]
        low, middle, high = statistics.quantiles(speeds, n=4)
        said = f"{name:15} {middle:.3f} ({low:.2f} to {high:.2f}), least {1e3 * min(times[name]):.0f} ms"
        if parts.get(name):
            means = [statistics.fmean(column) for column in zip(*parts[name], strict=True)]
            said += "; outside of steps {:.0f}, a step {:.2f}, its pass {:.2f}, lost by guesses {:.0f} ms".format(
                *means
            )
        print(said, flush=True)


if __name__ == "__main__":
    main()
