"""Where the library's own time of a step goes: all but the model's forward pass.

    python scripts/profile_step.py --model FOLDER [--method 7,5,7 | --method budget=16]

Each part is timed by wrapping its function. What the wrappers cost counts as the library's time, so this shows shares;
`lade bench` has the total (column `own`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.decoding import loop
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import RowStep
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan, StepInputs

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
    return lade.LookaheadConfig(*map(int, method.split(",")))


def main(
    model: Annotated[Path, typer.Option(help="folder of a causal language model")],
    prompt: str = "Once upon a time there was a little girl named Lily",
    method: Annotated[str, typer.Option(help="W,N,G or budget=B")] = "7,5,7",
    rounds: int = 10,
) -> None:
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
    for owner, name, part in PARTS:
        wrapper = timed(getattr(owner, name), part, spent)
        setattr(owner, name, staticmethod(wrapper) if owner is StepInputs else wrapper)
    lade.generate(loaded, **arguments)
    stats.reset()
    spent.clear()
    for _ in range(rounds):
        lade.generate(loaded, **arguments)
    print(f"{1e6 * stats.library_s / stats.steps:.0f} us a step, {stats.library_s / stats.decode_s:.1%} of it")
    for part, seconds in spent.most_common():
        print(f"{seconds / stats.library_s:6.1%}  {1e6 * seconds / stats.steps:4.0f} us  {part}")
    print(f"{1 - sum(spent.values()) / stats.library_s:6.1%}  the rest: calls, bookkeeping")


if __name__ == "__main__":
    typer.run(main)
