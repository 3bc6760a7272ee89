"""The default against fixed sizes and plain decoding where passes take known times, however busy this machine is.

    python lab/experiments/simulated_controller.py --model FOLDER --prompts FILE.jsonl --limit 40
    python lab/experiments/simulated_controller.py --model FOLDER --prompts FILE.jsonl --rows 4 --rows 8 --rows 16

The model runs and its tokens are real; seconds are made up: of passes by a curve through `PASSES_MS`, of the library's
own work by `LOOK_S` and its like, with hiccups. So runs can be compared to the third digit. What a fixed size feeds and
yields does not depend on the clock, so it is run once for all machines; `--cache` keeps it for the next run.

Prints one table and a verdict: all machines x {the prompts, built-in code} x {cold, memory kept} x temperatures, the
default against the best of `FIXED`. With `--rows` batches are compared with plain decoding, on the machine "four", by
the size of each row's tree, and on "gpu", by the tokens of all rows. Other speeds are over steps of `model.generate`; a
prompt's own time is left out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lade
from lade.decoding.drafting.controller import BatchBudget, Controller
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.drafting.tree_size import FixedBudget
from lade.embedded.files import builtin_prompts, model_path, prompts
from lade.hf import job
from lade.model.inputs import batch_bucket
from lade.tuning import cost_cache

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PASSES_MS = {
    "small": (2.04, 2.47, 2.80, 3.18, 3.60, 4.42, 6.1, 9.5),  # 3M parameters in float32, one thread of a Xeon
    "large": (20.0, 20.3, 20.6, 21.0, 22.0, 24.5, 30.0, 45.0),
    "steep": (2.0, 2.8, 3.6, 5.0, 7.5, 12.0, 22.0, 40.0),
    "fast": (1.45, 1.75, 1.95, 2.2, 2.5, 3.1, 4.4, 7.0),  # "small" at 0.7 of its time: supposed
    "two": (1.8, 2.15, 2.5, 2.9, 3.4, 4.8, 8.0, 15.0),
    "four": (2.2, 2.6, 3.1, 3.7, 4.5, 7.0, 13.0, 26.0),  # supposed, too: the shape that a Zen 4 had
    "h200": (7.11, 7.7, 7.7, 7.7, 7.9, 8.2, 8.4, 9.3),  # a shape of 8B in bfloat16; own time in `GPU_OWN_S`
    "h200 fused": (4.67, 4.72, 4.74, 4.76, 4.88, 5.04, 5.25, 6.08),
    "gpu": (10.0, 10.0, 10.05, 10.1, 10.2, 10.3, 10.5, 11.0, 13.0, 20.0, 36.0, 68.0),  # by the tokens of all rows
}
SINGLE, BATCHED = [name for name in PASSES_MS if name != "gpu"], ("four", "gpu")
OWN_S, LOOK_S, NODE_S = 120e-6, 110e-6, 10e-6
"""The library's own time: of any step, what looking for guesses adds, and each node fed: 0.12, 0.23 and, at 16
tokens, 0.38 ms; measured beside "small"."""
GPU_OWN_S = 1.0e-3
"""What the library's own time of any step is more on "h200"."""
ROW_SHARE, LOOK_SHARE = 0.2, 0.45
"""Shares of `OWN_S`, and of looking, for each row of a batch beside the first."""
GENERATE_OWN = 0.055
"""What a step of `model.generate` takes beside its pass, as a share of it, beyond `OWN_S`."""
HICCUP = 0.067
"""What hiccups add to passes on average."""
FIXED = (1, 4, 8, 16, 32, 64)
BAR, MEAN_BAR = 0.98, 1.0
BATCH_BARS = {("gpu", 4): 1.5, ("gpu", 8): 1.3, ("gpu", 16): 1.15}


class StepLog(NamedTuple):
    """Tokens that the mean row was fed and emitted in one step, whether guesses were looked for, and how many rows."""

    fed: int
    emitted: float
    looked: bool
    rows: int = 1


class Clock:
    """Made-up seconds of steps."""

    def __init__(self, machine: str, rows: int = 1) -> None:
        self._passes_s = [1e-3 * each for each in PASSES_MS[machine]]
        self._sizes, self._share = SIZES[: len(self._passes_s)], 1.0 if machine == "gpu" else 1.0 / rows
        self.machine, self._rows, self._luck = machine, rows, random.Random(1)
        self.seconds = 0.0

    def usual_s(self, size: int, rows: int | None = None) -> float:
        """Return the seconds of a pass over trees of `size` nodes in so many rows, all if None."""
        tokens = self._share * size * (rows or self._rows)
        less = min(0.0, tokens - 1.0) * (self._passes_s[1] - self._passes_s[0])  # fewer rows than at first
        return float(np.interp(tokens, self._sizes, self._passes_s)) + less

    def own_s(self, rows: int | None = None) -> float:
        """Return the library's own time of a step that looks for nothing."""
        return (
            OWN_S
            * (1.0 + GPU_OWN_S / OWN_S * self.machine.startswith("h200"))
            * (1.0 + ROW_SHARE * ((rows or self._rows) - 1))
        )

    def plain_s(self, rows: int | None = None) -> float:
        """Return the seconds of a step of plain decoding on average."""
        return self.usual_s(1, rows) * (1.0 + HICCUP) + self.own_s(rows)

    def step(self, size: int, looked: bool, rows: int | None = None) -> tuple[float, float]:
        """Return the seconds of a step and of its pass; the clock goes on by what they are on average."""
        hiccup = 0.5 + self._luck.random() if self._luck.random() < 0.02 else abs(self._luck.gauss(0.0, 0.06))
        own_s = self.own_s(rows) + (self._look_s(size, rows or self._rows) if looked else 0.0)
        forward_s = self.usual_s(size, rows)
        self.seconds += forward_s * (1.0 + HICCUP) + own_s
        return forward_s * (1.0 + hiccup) + own_s, forward_s * (1.0 + hiccup)

    @staticmethod
    def _look_s(size: int, rows: int) -> float:
        """Return the seconds of looking for guesses in all rows."""
        return (LOOK_S + NODE_S * (size - 1)) * (1.0 + LOOK_SHARE * (rows - 1))

    def cost(self, rows: int | None = None) -> StepCost:
        """Return the step cost as it would have been measured."""
        return StepCost.of({size: [self.usual_s(size, rows)] * 4 for size in SIZES[:8]})


class Recorder:
    """Has the library go by a made-up clock, and logs its steps."""

    def __init__(self) -> None:
        self.clock = Clock("small")
        self.steps: list[StepLog] = []
        observe, skip = Controller.observe, Controller.skip_drafting
        looked: dict[int, bool] = {}

        def skip_drafting(controller: Controller) -> bool:
            skips = skip(controller)
            looked[id(controller)] = not skips
            return skips

        def by_clock(
            controller: Controller,
            fed: int,
            emitted: float,
            seconds: float,
            forward_s: float,
            *,
            prepared: bool = False,
        ) -> None:
            rows = max(1, controller._rows) if isinstance(controller, BatchBudget) else 1
            self.steps.append(StepLog(fed, emitted, looked.get(id(controller), True), rows))
            observe(controller, fed, emitted, *self.clock.step(fed, self.steps[-1].looked, rows))

        def fixed(
            budget: FixedBudget, fed: int, emitted: int, seconds: float, forward_s: float, *, prepared: bool = False
        ) -> None:
            self.steps.append(StepLog(fed, emitted, budget.size > 1))

        Controller.skip_drafting, Controller.observe = skip_drafting, by_clock  # type: ignore[method-assign,assignment]
        FixedBudget.observe = fixed  # type: ignore[method-assign,assignment]
        job.__dict__.update(step_cost_for=self._curve, save_refreshed=lambda *_, **__: None)

    def _curve(self, model: PreTrainedModel, runner: object, *, batch: int = 1) -> StepCost:
        curves, rows = cost_cache._in_use.setdefault(model, {}), batch_bucket(batch)
        if f"{rows} rows" not in curves:
            cost = self.clock.cost(rows)
            curves[f"{rows} rows"] = cost_cache.CurveInUse({}, cost, cost.table)
        return curves[f"{rows} rows"].cost


def padded(prompts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ids and mask of a batch, `[B, L]`, padded on the left."""
    most = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([pad(prompt, (most - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([pad(torch.ones_like(prompt), (most - prompt.shape[1], 0)) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


class Workload:
    """A model, its prompts, and the log of a run over them."""

    def __init__(self, name: str, folder: Path, texts: Sequence[str], tokens: int, recorder: Recorder) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
        self._recorder, self._tokens, self.name = recorder, tokens, name

    @property
    def steps(self) -> int:
        """How many plain steps all texts take, one after the other."""
        return len(self._prompts) * (self._tokens - 1)

    def plain_s(self, clock: Clock, rows: int) -> float:
        """Return the seconds that plain decoding takes in batches of so many rows, the last of which may have fewer."""
        full, rest = divmod(len(self._prompts), rows)
        return (self._tokens - 1) * (full * clock.plain_s() + (clock.plain_s(rest) if rest else 0.0))

    def run(self, clock: Clock, budget: int | None, kept: bool, temperature: float, rows: int = 1) -> list[StepLog]:
        """Generate, with a new step cost and a new state of the controller."""
        config, sampling = self._begin(clock, budget, kept), self._sampling(temperature)
        for number in range(0, len(self._prompts), rows):
            torch.manual_seed(number)
            batch: dict[str, Any] = {**padded(self._prompts[number : number + rows]), **sampling, "pad_token_id": 0}
            lade.generate(self._model, lookahead=config, **batch)
        return self._recorder.steps

    def serve(self, clock: Clock, kept: bool, temperature: float, rows: int) -> list[StepLog]:
        """Answer all prompts by an engine of so many rows; see `run`."""
        config, sampling = self._begin(clock, None, kept), self._sampling(temperature)
        with lade.Engine(self._model, max_rows=rows) as engine:
            handles = [
                engine.add(prompt, lookahead=config, seed=seed if temperature else None, **sampling)
                for seed, prompt in enumerate(self._prompts)
            ]
            for handle in handles:
                handle.result()
        return self._recorder.steps

    def _begin(self, clock: Clock, budget: int | None, kept: bool) -> lade.LookaheadConfig:
        self._recorder.clock, self._recorder.steps = clock, []
        cost_cache._in_use.clear()
        return lade.LookaheadConfig(budget=budget, memory=lade.Memory() if kept else None, mtp=False)

    def _sampling(self, temperature: float) -> dict[str, Any]:
        drawn: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {}
        return {"max_new_tokens": self._tokens, **drawn}


def priced(machine: str, steps: Sequence[StepLog]) -> float:
    """Return the seconds that steps take on a machine."""
    clock = Clock(machine)
    for step in steps:
        clock.step(step.fed, step.looked)
    return clock.seconds


def compare(loads: Sequence[Workload], temperatures: Sequence[float], cache: Path | None, skip: int) -> None:
    """Print the default against fixed sizes, and the verdict."""
    known: dict[str, Any] = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    ratios: list[float] = []
    print(f"{'':28} default  S     fed   of best      {' '.join(f'{size:>6}' for size in FIXED)}")
    for load in loads:
        for temperature in temperatures:
            for kept in (False, True):
                logs = {1: [StepLog(1, 1.0, False)] * load.steps}
                for size in FIXED[1:]:
                    key = f"{load.name} {skip} {load.steps} {temperature} {kept} {size}"
                    if key not in known:
                        known[key] = load.run(Clock("small"), size, kept, temperature)
                    logs[size] = [StepLog(*step) for step in known[key]]
                if cache is not None:
                    cache.write_text(json.dumps(known))
                for machine in SINGLE:
                    clock = Clock(machine)
                    plain_s = load.steps * (clock.usual_s(1) * (1.0 + GENERATE_OWN) + clock.own_s())
                    speeds = {size: plain_s / priced(machine, log) for size, log in logs.items()}
                    steps = load.run(clock, None, kept, temperature)
                    best, speed = max(speeds, key=lambda size: speeds[size]), plain_s / clock.seconds
                    ratios.append(speed / speeds[best])
                    cell = f"{load.name} {temperature} {'kept' if kept else 'cold'} {machine}"
                    fed = sum(step.fed for step in steps) / len(steps)
                    print(
                        f"{cell:28} {speed:.3f} {load.steps / len(steps):5.2f} {fed:5.1f}   {ratios[-1]:.3f}"
                        f"{' ' if ratios[-1] >= BAR else '*'} {best:>3}   "
                        + " ".join(f"{each:6.3f}" for each in speeds.values()),
                        flush=True,
                    )
    missed, mean = sum(ratio < BAR for ratio in ratios), sum(ratios) / len(ratios)
    print(
        f"{'PASSED' if not missed and mean >= MEAN_BAR else 'MISSED'}: {missed} of {len(ratios)} cells below {BAR}, ",
        end="",
    )
    print(f"the least at {min(ratios):.3f}, mean {mean:.4f} ({MEAN_BAR:.2f} wanted)")


def batch_speed(load: Workload, clock: Clock, steps: Sequence[StepLog], rows: int, served: bool) -> float:
    """Return the speed over plain decoding: of an engine as long as it has enough requests, of batches altogether."""
    if not served:
        return load.plain_s(clock, rows) / clock.seconds
    busy = Clock(clock.machine, rows)
    for step in steps:
        if step.rows == rows:
            busy.step(step.fed, step.looked)
    return sum(step.emitted for step in steps if step.rows == rows) * busy.plain_s() / busy.seconds


def compare_batches(loads: Sequence[Workload], temperatures: Sequence[float], batches: Sequence[int]) -> None:
    """Print batches and engines by default against plain decoding, and the verdict."""
    missed, cells = 0, 0
    for load, temperature, kept, machine, rows, served in product(
        loads, temperatures, (False, True), BATCHED, batches, (False, True)
    ):
        clock = Clock(machine, rows)
        steps = load.serve(clock, kept, temperature, rows) if served else load.run(clock, None, kept, temperature, rows)
        speed, bar = batch_speed(load, clock, steps, rows, served), BATCH_BARS.get((machine, rows), 0.99)
        missed, cells = missed + (speed < bar), cells + 1
        fed, kind = sum(step.fed for step in steps) / len(steps), "engine" if served else "batch"
        name = f"{load.name} {temperature} {'kept' if kept else 'cold'} {machine} {kind} {rows}"
        print(f"{name:36} {speed:.3f}{' ' if speed >= bar else '*'} wanted {bar:.2f}, fed {fed:.1f}", flush=True)
    print(f"{'MISSED' if missed else 'PASSED'}: {missed} of {cells} cells")


def read_prompts(path: Path) -> list[str]:
    """Return the field `prompt` of each line."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="a line of JSON with a field prompt for each")
    parser.add_argument("--code", type=Path, help="likewise, for the built-in model; its own if not given")
    parser.add_argument("--skip", type=int, default=0, help="openings to leave out: what is tuned on is not evidence")
    parser.add_argument("--limit", type=int, default=40, help="openings after these")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, action="append", help="0, 0.7 and 1 if not given")
    parser.add_argument("--rows", type=int, action="append", help="of a batch; then batches are compared")
    parser.add_argument("--cache", type=Path, help="a file that keeps what fixed sizes fed and yielded")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recorder = Recorder()
    openings = slice(args.skip, args.skip + args.limit)
    own = builtin_prompts() if args.rows else prompts()  # the former are more, and some of them repeat themselves
    code = own if args.code is None else read_prompts(args.code)
    loads = [
        Workload("stories", args.model, read_prompts(args.prompts)[openings], args.tokens, recorder),
        Workload("code", model_path(), code[openings], args.tokens, recorder),
    ]
    temperatures = args.temperature or [0.0, 0.7, 1.0]
    if args.rows:
        compare_batches(loads, temperatures, args.rows)
    else:
        compare(loads, temperatures, args.cache, args.skip)


if __name__ == "__main__":
    main()
