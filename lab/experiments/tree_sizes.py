"""The default against fixed tree sizes and plain decoding: real texts of any model, seconds of a made-up clock.

    python lab/experiments/tree_sizes.py --model FILE.gguf --prompts question.jsonl --prompts test.jsonl --cache FILE
    python lab/experiments/tree_sizes.py                            # the embedded model, beginnings of functions

The model runs and its tokens are real; seconds are made up: of passes by a curve through `PASSES_MS`, of the library's
own work by `OWN_S` and its like, with hiccups. So runs can be compared to the third digit, however busy the machine is.
What a fixed size feeds and yields does not depend on the clock, so it is run once for all clocks; `--cache` keeps it.

One line for each cell: a file of prompts, a length of answers, a machine, and what is known when an answer begins:
"first" nothing, as in a new process; "cold" what its model has taught the controller; "kept" a memory, too. Speeds are
over plain decoding, of all answers of a cell together; "least" is that of its slowest answer. The verdict is by `BARS`;
for "held out" see `held_out`.
The first pass of each shape is a prepared one, on a GPU a capture, whose time counts for none.
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
from transformers import PreTrainedModel

import lade
from lade.clock import Duration
from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.decoding.loop import DecodeLoop
from lade.embedded import model_path, prompts
from lade.hf import job
from lade.model.inputs import STEP_SIZES, step_bucket
from lade.tuning import cost_cache
from lade_lab.replay import read_model

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PASSES_MS = {
    "smol": (3.3, 3.4, 3.9, 4.7, 7.0, 12.2, 24.0, 44.0),  # SmolLM2-135M as a GGUF file, two cores of a Zen 5
    "qwen": (12.1, 12.6, 13.5, 15.4, 19.6, 34.0, 68.0, 140.0),  # Qwen2.5-Coder-0.5B as such a file
    "gemma": (6.3, 6.75, 7.65, 9.8, 14.2, 23.1, 45.0, 88.0),  # gemma-3-270m likewise; beyond 32 supposed
    "ledge": (17.3, 18.9, 24.2, 24.9, 41.5, 73.9, 136.0, 265.0),  # the same beside another process: a ledge at 8
    "small": (2.04, 2.47, 2.80, 3.18, 3.60, 4.42, 6.1, 9.5),  # 3M parameters in float32, one thread of a Xeon
    "large": (20.0, 20.3, 20.6, 21.0, 22.0, 24.5, 30.0, 45.0),  # supposed, as is the next
    "steep": (2.0, 2.8, 3.6, 5.0, 7.5, 12.0, 22.0, 40.0),
    "h200": (7.11, 7.7, 7.7, 7.7, 7.9, 8.2, 8.4, 9.3),  # 8B in bfloat16
    "h200 fused": (4.67, 4.76, 4.76, 4.76, 4.88, 5.04, 5.25, 6.08),
}
"""Milliseconds of a pass over each of `SIZES`."""
OWN_S, LOOK_S, NODE_S = (200e-6, 45e-6), (110e-6, 75e-6), 8e-6
"""The library's own time: of any step and of each row, what looking for guesses adds, and each node: measured beside
"smol"."""
GPU_OWN_S, CAPTURE_S = 1.0e-3, 0.2
"""On a GPU, what a step takes more, and the first pass of a shape."""
HICCUP = 0.067
"""What hiccups add to passes on average."""
FIXED = (1, 4, 8, 16, 32, 64, 128)
KNOWN = ("first", "cold", "kept")
BARS = {32: 0.90, 128: 0.95}
"""Of the best fixed size, by the length of answers; longer ones as the last."""
PLAIN_BAR = 0.98


class StepLog(NamedTuple):
    """Tokens that each of some rows fed in a step, what all emitted together, and whether guesses were looked for."""

    fed: int
    emitted: int
    looked: bool
    rows: int = 1


Answers = list[list[StepLog]]


class Clock:
    """Made-up seconds of the steps of one process."""

    def __init__(self, machine: str) -> None:
        self._passes_s = [1e-3 * each for each in PASSES_MS[machine]]
        self._is_gpu, self._luck = machine.startswith("h200"), random.Random(1)
        self._shapes = set[int]()

    def pass_s(self, size: int, rows: int = 1) -> float:
        """Return the seconds of a pass without hiccups; beyond the last of `SIZES` it goes on as it went there."""
        tokens, last = rows * (step_bucket(size) if self._is_gpu else size), self._passes_s[-2:]
        beyond_s = max(0, tokens - SIZES[-1]) * (last[1] - last[0]) / (SIZES[-1] - SIZES[-2])
        return float(np.interp(tokens, SIZES, self._passes_s)) + beyond_s

    def step_s(self, step: StepLog) -> float:
        """Return the seconds of a step, hiccups as they are on average."""
        own_s = GPU_OWN_S * self._is_gpu + OWN_S[0] + step.rows * OWN_S[1]
        if step.looked:
            own_s += LOOK_S[0] + step.rows * (LOOK_S[1] + NODE_S * (step.fed - 1))
        return self.pass_s(step.fed, step.rows) * (1.0 + HICCUP) + own_s

    def observed(self, step: StepLog) -> tuple[float, float, bool]:
        """Return what a controller sees: seconds of the step and of its pass, and whether this was prepared."""
        hiccup = 0.5 + self._luck.random() if self._luck.random() < 0.02 else abs(self._luck.gauss(0.0, 0.06))
        usual_s, shape = self.pass_s(step.fed, step.rows), step_bucket(step.fed) if self._is_gpu else step.fed
        prepared = shape not in self._shapes
        self._shapes.add(shape)
        forward_s = usual_s * (1.0 + hiccup) + CAPTURE_S * (prepared and self._is_gpu)
        return forward_s + self.step_s(step) - usual_s * (1.0 + HICCUP), forward_s, prepared

    def cost(self, rows: int) -> StepCost:
        """Return the step cost of so many rows as it would have been measured."""
        cost = StepCost.of({size: [self.pass_s(size, rows)] * 9 for size in KNOTS if size <= SIZES[-1]})
        cost.pad_to(STEP_SIZES if self._is_gpu else ())
        return cost


class Recorder:
    """Has the library go by a made-up clock, and logs its steps."""

    def __init__(self) -> None:
        self.clock, self.steps = Clock("small"), list[StepLog]()
        observe, observe_step = Controller.observe, DecodeLoop._observe

        def by_clock(controller: Controller, fed: int, *told: float, rows: int = 1, prepared: bool = False) -> None:
            self.steps[-1] = self.steps[-1]._replace(looked=controller._looked)
            seconds, forward_s, prepared = self.clock.observed(self.steps[-1])
            observe(controller, fed, told[0], seconds, forward_s, rows=rows, prepared=prepared)

        def logged(loop: DecodeLoop[Any], steps: Sequence[lade.stats.Step], fed: int, took: Duration) -> None:
            self.steps.append(StepLog(fed, sum(len(step.tokens) for step in steps), True, len(steps)))
            observe_step(loop, steps, fed, took)

        Controller.observe = by_clock  # type: ignore[method-assign,assignment]
        DecodeLoop._observe = logged  # type: ignore[method-assign]
        job.__dict__.update(step_cost_for=self._curve, save_refreshed=lambda *_, **__: None)

    def _curve(self, model: PreTrainedModel, runner: object, *, batch: int = 1) -> StepCost:
        curves = cost_cache._in_use.setdefault(model, {})
        if f"made up, {batch}" not in curves:
            cost = self.clock.cost(batch)
            curves[f"made up, {batch}"] = cost_cache.CurveInUse({}, cost, cost.table)
        return curves[f"made up, {batch}"].cost


class Texts:
    """A model and prompts of one file, which it answers."""

    def __init__(
        self, model: Any, prompts: Sequence[dict[str, torch.Tensor]], temperature: float, recorder: Recorder
    ) -> None:
        self._model, self._prompts, self._recorder = model, prompts, recorder
        self._sampling = {"do_sample": temperature > 0.0, **({"temperature": temperature} if temperature else {})}

    def answers(self, machine: str, budget: int | None, known: str, tokens: int) -> Answers:
        """Answer each prompt by a fixed size, or by default; see the module for what is known."""
        memory = lade.Memory() if known == "kept" else None
        config, answers = lade.LookaheadConfig(budget=budget, memory=memory, mtp=False), Answers()
        for number, prompt in enumerate(self._prompts):
            if known == "first" or not number:
                cost_cache._in_use.clear()
                self._recorder.clock = Clock(machine)
            self._recorder.steps = []
            torch.manual_seed(number)
            least = {} if len(prompt["input_ids"]) == 1 else {"min_new_tokens": tokens}  # so all rows end together
            lade.generate(self._model, **prompt, max_new_tokens=tokens, **least, lookahead=config, **self._sampling)
            answers.append(self._recorder.steps)
        return answers


def speeds(machine: str, answers: Answers) -> tuple[float, float]:
    """Return how many times as fast as plain decoding all answers are, and the slowest."""
    clock = Clock(machine)
    plain = [
        sum(step.emitted / step.rows * clock.step_s(StepLog(1, 1, False, step.rows)) for step in steps)
        for steps in answers
    ]
    took = [sum(map(clock.step_s, steps)) for steps in answers]
    return sum(plain) / sum(took), min(plain_s / s for plain_s, s in zip(plain, took, strict=True) if s)


def held_out(machine: str, runs: dict[int, Answers], answers: Answers) -> float:
    """Return the speed of answers over that of a fixed size which other answers have chosen.

    The best of several sizes is better by chance, too: its trees have led to other logits, and so to other guesses. So
    each half of the answers is compared with the size that is best in the other half.
    """
    clock = Clock(machine)
    took = {size: [sum(map(clock.step_s, steps)) for steps in run] for size, run in runs.items()}
    took[1] = [
        sum(step.emitted * clock.step_s(StepLog(1, 1, False, step.rows)) / step.rows for step in steps)
        for steps in answers
    ]
    ours, fixed = [sum(map(clock.step_s, steps)) for steps in answers], 0.0
    for half in (0, 1):
        best = min(took, key=lambda size: sum(took[size][1 - half :: 2]))
        fixed += sum(took[best][half::2])
    return fixed / sum(ours)


def compare(
    name: str, texts: Texts, tokens: int, machines: Sequence[str], kinds: Sequence[str], cache: Path | None
) -> list[list[float]]:
    """Print the cells of one file and length; return of each the speeds over the best fixed size, plain, `held_out`."""
    fixed: dict[str, Any] = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    cells = []
    for known in kinds:
        runs = {}
        for size in FIXED[1:]:
            key = f"{name} {tokens} {'kept' if known == 'kept' else 'cold'} {size}"
            if key not in fixed:
                fixed[key] = texts.answers("small", size, known, tokens)
                if cache is not None:
                    cache.write_text(json.dumps(fixed))
            runs[size] = [[StepLog(*step) for step in steps] for steps in fixed[key]]
        for machine in machines:
            steps = texts.answers(machine, None, known, tokens)
            emitted, made = sum(step.emitted for each in steps for step in each), sum(map(len, steps))
            rows = sum(step.rows for each in steps for step in each)
            if any(sum(step.emitted for each in run for step in each) != emitted for run in runs.values()):
                raise SystemExit(f"{name}: texts of fixed sizes and of the default differ")
            by_size = {1: 1.0, **{size: speeds(machine, run)[0] for size, run in runs.items()}}
            (speed, least), best = speeds(machine, steps), max(by_size, key=lambda size: by_size[size])
            cells.append([speed / by_size[best], speed, held_out(machine, runs, steps)])
            fed = sum(step.fed for each in steps for step in each) / made
            missed = cells[-1][0] < BARS.get(tokens, BARS[128]) or speed < PLAIN_BAR
            print(
                f"{name} {tokens} {known:5} {machine:10} {cells[-1][0]:.3f}{'*' if missed else ' '} of {best:3}, "
                f"{cells[-1][2]:.3f} held out  "
                f"{speed:.3f} of plain, least {least:.3f}  S {emitted / rows:.2f}  fed {fed:5.1f}   "
                + " ".join(f"{each:.3f}" for each in by_size.values()),
                flush=True,
            )
    return cells


def read(path: Path) -> list[str]:
    """Return the prompt of each line: its field `prompt` or `question`, or the first of `turns`."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line.get("prompt") or line.get("question") or line["turns"][0] for line in lines]


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder; the embedded model if not given")
    parser.add_argument("--prompts", type=Path, action="append", help="lines of JSON, see `read`")
    parser.add_argument("--raw", action="store_true", help="no chat template, as where there is none")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each file")
    parser.add_argument("--rows", type=int, default=1, help="prompts of one call, padded to the longest")
    parser.add_argument("--known", choices=KNOWN, action="append", help="all if not given")
    parser.add_argument("--tokens", type=int, action="append", help="of an answer; 32 and 128 if not given")
    parser.add_argument("--machine", choices=PASSES_MS, action="append", help="all but small if not given")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cache", type=Path, help="a file that keeps what fixed sizes fed and yielded")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = read_model(str(args.model or model_path()))

    def encoded(texts: Sequence[str]) -> dict[str, torch.Tensor]:
        chat = not args.raw and bool(tokenizer.chat_template)
        if chat:
            turns = [[{"role": "user", "content": text}] for text in texts]
            texts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in turns]
        options = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
        ids = tokenizer(texts, return_tensors="pt", add_special_tokens=not chat, **options)
        return {"input_ids": ids.input_ids, **({"attention_mask": ids.attention_mask} if options else {})}

    recorder, by_length = Recorder(), dict[int, list[list[float]]]()
    machines = args.machine or [machine for machine in PASSES_MS if machine != "small"]
    files = {path.stem: read(path) for path in args.prompts or ()} or {"functions": prompts()}
    for (name, lines), tokens in product(files.items(), args.tokens or (32, 128)):
        batches = [lines[start : start + args.rows] for start in range(0, min(args.limit, len(lines)), args.rows)]
        texts = Texts(model, list(map(encoded, batches)), args.temperature, recorder)
        title = f"{args.model.stem if args.model else 'embedded'} {name} {args.limit} {args.temperature}"
        title += f" {args.rows} rows" if args.rows > 1 else ""
        cells = compare(title, texts, tokens, machines, args.known or KNOWN, args.cache)
        by_length.setdefault(tokens, []).extend(cells)
    for tokens, cells in by_length.items():
        (best, plain, other), bar = zip(*cells, strict=True), BARS.get(tokens, BARS[128])
        missed = sum(ratio < bar or speed < PLAIN_BAR for ratio, speed, _ in cells)
        print(
            f"{'MISSED' if missed else 'PASSED'}: {tokens} tokens, {missed} of {len(cells)} cells under {bar} of the"
            f" best fixed size or {PLAIN_BAR} of plain; mean {np.mean(best):.4f}, least {min(best):.3f}; held out"
            f" {np.mean(other):.4f}, least {min(other):.3f}; over plain"
            f" {np.mean(plain):.3f}, least {min(plain):.3f}"
        )


if __name__ == "__main__":
    main()
