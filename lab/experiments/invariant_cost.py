"""Cost of invariance: the same model, packed, as it is and invariant.

    python lab/experiments/invariant_cost.py --model stories3M-hf --inflate 500e6 --threads 2

Passes over one token and over a tree of sixteen behind 512 cached tokens, over one token behind 1,500, and a prefill of
500 tokens. Rounds alternate between the two; milliseconds are medians, with the least in brackets, which a busy machine
disturbs less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import lade
from lade.decoding.tree import TokenTree
from lade.model.runner import EagerRunner
from lade.model.supports import supports


def tree_passes(model: Any, cached: int, sizes: Sequence[int]) -> list[Callable[[], None]]:
    """Passes over trees of so many nodes behind a text of so many tokens."""
    runner = EagerRunner(model, supports(model).require(), model.generation_config)
    text = torch.randint(1, model.config.vocab_size, (cached,)).tolist()
    cache = runner.tree_cache()
    runner.prefill([text], cache)

    def run(tree: TokenTree) -> None:
        runner.forward([tree], [[*text, 1]], cache)
        cache.keep([[]], fed=len(tree))

    return [partial(run, tree_of(nodes)) for nodes in sizes]


def tree_of(nodes: int) -> TokenTree:
    """A binary tree."""
    tree = TokenTree(1)
    for node in range(1, nodes):
        tree.add((node - 1) // 2, node + 1, "pool")
    return tree


def prefill(model: Any, tokens: int) -> Callable[[], Any]:
    """A prompt of so many tokens."""
    runner = EagerRunner(model, supports(model).require(), model.generation_config)
    text = torch.randint(1, model.config.vocab_size, (tokens,)).tolist()
    return lambda: runner.prefill([text], runner.tree_cache())


def cases(model: Any) -> dict[str, Callable[[], Any]]:
    """Return the timed calls by name."""
    lone, tree = tree_passes(model, 512, (1, 16))
    (far,) = tree_passes(model, 1500, (1,))
    return {
        "one token, 512 cached": lone,
        "16 tokens, 512 cached": tree,
        "one token, 1,500 cached": far,
        "prefill of 500": prefill(model, 500),
    }


@torch.no_grad()
def main(
    model: Annotated[str, typer.Option(help="A checkpoint.")],
    inflate: Annotated[float, typer.Option(help="Parameters to inflate it to.")] = 500e6,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    threads: Annotated[int, typer.Option()] = 2,
    rounds: Annotated[int, typer.Option(help="Of which the first warms up.")] = 9,
    seconds: Annotated[float, typer.Option(help="Begin no further round after this time, but for the third.")] = 1e9,
) -> None:
    """Time both, and print a table."""
    begun = perf_counter()
    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    inflated = lade.pack(lade.bench.inflate(loaded, inflate, dtype=getattr(torch, dtype)))
    inflated.config.max_position_embeddings = 4096
    copied = copy.deepcopy(inflated)
    start = perf_counter()
    lade.invariant(copied)
    print(f"trials: {perf_counter() - start:.1f} s", flush=True)
    known = {False: cases(inflated), True: cases(copied)}
    samples: dict[tuple[str, bool], list[float]] = {}
    for number in range(rounds):
        if number > 2 and perf_counter() - begun > seconds:
            break
        for name in known[True]:
            for invariant, runs in known.items():
                start = perf_counter()
                runs[name]()
                samples.setdefault((name, invariant), []).append(1e3 * (perf_counter() - start))
    for name in known[True]:
        taken = [samples[name, invariant][1:] for invariant in (False, True)]
        columns = "".join(f"{median(each):9.1f} ({min(each):.1f})" for each in taken)
        more = (100 * (statistic(taken[1]) / statistic(taken[0]) - 1) for statistic in (median, min))
        print(f"{name:24}{columns} ms  " + "{:+.1f} % ({:+.1f} %)".format(*more))


if __name__ == "__main__":
    typer.run(main)
