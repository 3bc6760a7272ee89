"""Gain of the default method by a simulated clock, independent of the machine's load.

    python lab/experiments/simulated_controller.py --model FOLDER --prompts FILE.jsonl --limit 40

The model runs and its tokens are real. What the controller is told of a step's time is made up: of passes by a curve
through `PASSES_MS`, of the library's own work by `LOOK_S` and its like, with hiccups. So runs can be compared to the
third digit, and two may run at once. With `--rows` they are batches, on a machine whose passes are those of so many
rows. Speeds are those of `plain` steps of `model.generate` over steps; a prompt's own time is left out.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lade
from lade.decoding.drafting.batch_budget import BatchBudget
from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.tree_size import FixedBudget
from lade.hf import job
from lade.tuning import cost_cache
from lade.tuning.step_cost import StepCost

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PASSES_MS = {
    "small": (2.04, 2.47, 2.80, 3.18, 3.60, 4.42, 6.1, 9.5),  # 3M parameters in float32, one thread of a Xeon
    "large": (20.0, 20.3, 20.6, 21.0, 22.0, 24.5, 30.0, 45.0),
    "steep": (2.0, 2.8, 3.6, 5.0, 7.5, 12.0, 22.0, 40.0),
    "fast": (1.45, 1.75, 1.95, 2.2, 2.5, 3.1, 4.4, 7.0),  # "small" at 0.7 of its time: supposed
    "two": (1.8, 2.15, 2.5, 2.9, 3.4, 4.8, 8.0, 15.0),
    "four": (2.2, 2.6, 3.1, 3.7, 4.5, 7.0, 13.0, 26.0),  # supposed, too: the shape that a Zen 4 had
}
OWN_S, LOOK_S, NODE_S = 120e-6, 110e-6, 10e-6
"""The library's own time: of any step, what looking for guesses adds, and each node fed: 0.12, 0.23 and, at 16
tokens, 0.38 ms; measured beside "small"."""
ROW_SHARE = 0.2
"""Share of `OWN_S` for each row of a batch beside the first."""
GENERATE_OWN = 0.055
"""Overhead of a `model.generate` step as a share of its pass, beyond `OWN_S`."""


class Clock:
    """Seconds that steps took, made up."""

    def __init__(self, passes_ms: tuple[float, ...], rows: int) -> None:
        self._passes_s, self._rows = [1e-3 * each for each in passes_ms], rows
        self._luck = random.Random(1)
        self.seconds = 0.0

    def usual_s(self, size: int) -> float:
        """Return the seconds of a pass."""
        return float(np.interp(size, SIZES, self._passes_s))

    def step(self, size: int, looked: bool) -> tuple[float, float]:
        """Return the seconds of a step and of its pass; the clock advances by the former."""
        hiccup = 0.5 + self._luck.random() if self._luck.random() < 0.02 else abs(self._luck.gauss(0.0, 0.06))
        forward_s = self.usual_s(size) * (1.0 + hiccup)
        seconds = forward_s + self.own_s + (self._rows * (LOOK_S + NODE_S * (size - 1)) if looked else 0.0)
        self.seconds += seconds
        return seconds, forward_s

    @property
    def own_s(self) -> float:
        """The library's own time of a step that looks for nothing."""
        return OWN_S * (1.0 + ROW_SHARE * (self._rows - 1))

    def cost(self) -> StepCost:
        """As it would have been measured."""
        return StepCost.of({size: [self.usual_s(size)] * 4 for size in SIZES})


def put_in_place(clock: Clock) -> None:
    """Have the library go by this clock."""
    observe = Controller.observe

    def by_clock(self: Controller, fed: int, emitted: float, seconds: float, forward_s: float) -> None:
        observe(self, fed, emitted, *clock.step(fed, looked=not (self._skip or self._checks)))

    observe_pass = BatchBudget.observe_pass

    def of_batch(self: BatchBudget, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int) -> None:
        controller: Any = self._controller
        controller.observe = partial(observe, controller)  # is told what this one is told
        made_up = clock.step(fed, looked=not (controller._skip or controller._checks))
        observe_pass(self, fed, emitted, *made_up, rows=rows)

    def fixed(self: FixedBudget, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        clock.step(fed, looked=True)

    def curve(model: PreTrainedModel, *_: object, **__: object) -> StepCost:
        curves = cost_cache._in_use.setdefault(model, {})
        if "simulated" not in curves:
            cost = clock.cost()
            curves["simulated"] = cost_cache.CurveInUse({}, cost, cost.table)
        return curves["simulated"].cost

    Controller.observe, FixedBudget.observe = by_clock, fixed  # type: ignore[method-assign]
    BatchBudget.observe_pass = of_batch  # type: ignore[method-assign]
    job.__dict__.update(step_cost_for=curve, save_refreshed=lambda *_, **__: None)


def padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ids and mask of a batch, `[B, L]`, padded on the left."""
    most = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([pad(prompt, (most - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([pad(torch.ones_like(prompt), (most - prompt.shape[1], 0)) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def run(clock: Clock, name: str, model: PreTrainedModel, prompts: list[torch.Tensor], args: argparse.Namespace) -> None:
    """One arm: `adaptive` or `budget=S`, with `:kept` for a memory that all prompts share."""
    way, _, kept = name.partition(":")
    budget = None if way == "adaptive" else int(way.removeprefix("budget="))
    memory = lade.Memory() if kept else None
    config = lade.LookaheadConfig(budget=budget, memory=memory)
    cost_cache._in_use.clear()
    stats, tokens, clock.seconds = lade.Stats(), 0, 0.0
    sampling: dict[str, Any] = {"do_sample": True, "temperature": args.temperature} if args.temperature else {}
    sampling |= {"max_new_tokens": args.tokens, "pad_token_id": 0}
    for number in range(0, len(prompts), args.rows):
        torch.manual_seed(number)
        lade.generate(model, **padded(prompts[number : number + args.rows]), lookahead=config, stats=stats, **sampling)
        tokens += args.tokens
    plain_s = tokens * (clock.usual_s(1) * (1.0 + GENERATE_OWN) + clock.own_s)
    print(f"{name:20} S {stats.tokens_per_step:.2f}  speed {plain_s / clock.seconds:.3f}", flush=True)


def main() -> None:
    """Read the options and run all arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="a line of JSON with a field prompt for each")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=1, help="of a batch")
    parser.add_argument("--machine", choices=PASSES_MS, default="small")
    parser.add_argument("--arm", action="append", help="adaptive, adaptive:kept, budget=16, budget=16:kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]
    prompts = [tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids for line in lines]
    clock = Clock(PASSES_MS[args.machine], args.rows)
    put_in_place(clock)
    for arm in args.arm or ["adaptive", "adaptive:kept", "budget=16", "budget=16:kept"]:
        run(clock, arm, model, prompts, args)


if __name__ == "__main__":
    main()
