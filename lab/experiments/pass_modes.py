"""Time of a one-token pass with and without torch's inference mode, in turn.

    python lab/experiments/pass_modes.py --model FOLDER [--passes 100 --rounds 6]

Both make the same passes of one process, thread time of which is taken, so that neighbours disturb both alike. The
passes without it are made twice: what these two differ by says what a difference is worth.
"""

from __future__ import annotations

from contextlib import nullcontext
from statistics import median
from time import thread_time
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import lade
from lade.decoding.tree import TokenTree
from lade.model.runner import EagerRunner

PROMPT = 60
WAYS = ("without", "without, again", "inference mode")


def main(
    model: Annotated[str, typer.Option(help="folder or hub id")],
    dtype: str = "float32",
    passes: Annotated[int, typer.Option(help="of each way, a round")] = 100,
    rounds: int = 6,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    plan = lade.supports(loaded).require()
    runners = [EagerRunner(loaded, plan, loaded.generation_config) for _ in WAYS]
    for runner in runners[:2]:
        runner.mode._mode = nullcontext
    text = torch.randint(loaded.config.vocab_size, (PROMPT,)).tolist()
    for _ in range(rounds):
        caches = [runner.new_cache() for runner in runners]
        for runner, cache in zip(runners, caches, strict=True):
            runner.prefill([text], cache)
        taken: list[list[float]] = [[] for _ in WAYS]
        for _ in range(passes):
            for runner, cache, seconds in zip(runners, caches, taken, strict=True):
                start = thread_time()
                runner.forward([TokenTree(text[0])], [text], cache)
                seconds.append(thread_time() - start)
                cache.keep([[0]], 1)
        first = median(taken[0])
        shown = (f"{way} {median(each) / first:.3f}" for way, each in zip(WAYS[1:], taken[1:], strict=True))
        print(f"{1e3 * first:.2f} ms without it; of that: {', '.join(shown)}")


if __name__ == "__main__":
    typer.run(main)
