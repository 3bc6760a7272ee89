"""The library's own time of a step by part: all but the model's forward pass.

    python lab/experiments/profile_step.py --model FOLDER [--method 7,5,7 | --method budget=16 | ...] [--no-parts]

Each part is timed by wrapping its function. What the wrappers cost counts as the library's time, so this shows shares;
without them, with `--no-parts`, the total is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.decoding import loop
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import RowStep
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan, StepInputs
from lade_lab.harness.arms import PLAIN

PARTS: list[tuple[Any, str, str]] = [
    (DecodeLoop, "_learn", "learning"),
    (StepInputs, "of", "the step's tensors"),
    (MaskPlan, "masks", "masks in the model's form"),
    (TreeCache, "keep", "moving the accepted path's keys and values"),
    (loop, "read", "argmax, likeliest tokens, and the copy to the host"),
    (DecodeLoop, "_draft", "drafting the trees"),
    (RowStep, "walk", "the walk, stop rules included"),
]


def timed(function: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = function(*args, **kwargs)
        spent[name] += perf_counter() - start
        return result

    return call


def config_of(method: str) -> lade.LookaheadConfig:
    if method.startswith("budget="):
        return lade.LookaheadConfig(budget=int(method.removeprefix("budget=")))
    return PLAIN if method == "plain" else lade.LookaheadConfig(*map(int, method.split(",")))


def main(
    model: Annotated[Path, typer.Option(help="folder of a causal language model")],
    prompt: str = "Once upon a time there was a little girl named Lily",
    method: Annotated[str, typer.Option(help="W,N,G or budget=B or plain")] = "7,5,7",
    parts: Annotated[bool, typer.Option(help="time them one by one")] = True,
    rounds: int = 10,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    stats, spent = lade.Stats(), Counter[str]()
    arguments = {
        "input_ids": tokenizer(prompt, return_tensors="pt").input_ids,
        "max_new_tokens": 200,
        "do_sample": False,
        "eos_token_id": None,
        "lookahead": config_of(method),
        "stats": stats,
    }
    for owner, name, part in PARTS if parts else []:
        wrapper = timed(getattr(owner, name), part, spent)
        setattr(owner, name, staticmethod(wrapper) if owner is StepInputs else wrapper)
    lade.generate(loaded, **arguments)
    spent.clear()
    total, found = lade.Stats(), list[float]()
    for _ in range(rounds):
        stats.reset()
        lade.generate(loaded, **arguments)
        found.append(1e6 * stats.library_s / stats.steps)
        total.merge(stats)
    low, middle, high = quantiles(found, n=4)
    share = f"{total.library_s / total.decode_s:.1%} of it, {total.tokens_per_step:.2f} tokens a step"
    print(f"{middle:.0f} us a step ({low:.0f} to {high:.0f}), {share}")
    for part, seconds in spent.most_common():
        print(f"{seconds / total.library_s:6.1%}  {1e6 * seconds / total.steps:4.0f} us  {part}")
    if parts:
        print(f"{1 - sum(spent.values()) / total.library_s:6.1%}  the rest: calls, bookkeeping")


if __name__ == "__main__":
    typer.run(main)
