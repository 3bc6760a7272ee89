"""Size of the largest part of a tree split over processes, and the tree's yield, by budget.

    python lab/experiments/count_parts.py [--model FOLDER] [--budgets 16,32,64,128,256,512] [--processes 2,4,8]

Counts only, no times: they are the same on any machine. Prompts are those that come with the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.backends.processes.lookahead_parallel import partition
from lade.decoding.tree import TokenTree
from lade.embedded.files import builtin_prompts
from lade.model.runner import EagerRunner


class Noted:
    """The trees of all steps."""

    def __init__(self) -> None:
        self.trees: list[list[int]] = []
        forward = EagerRunner.forward

        def noting(runner: EagerRunner, trees: list[TokenTree], *rest: object) -> torch.Tensor:
            self.trees += [list(tree.parents) for tree in trees]
            return forward(runner, trees, *rest)  # type: ignore[arg-type]

        EagerRunner.forward = noting  # type: ignore[method-assign, assignment]


def main(
    model: Annotated[Path, typer.Option()] = Path("lade/embedded/model"),
    budgets: Annotated[str, typer.Option()] = "16,32,64,128,256,512",
    processes: Annotated[str, typer.Option()] = "2,4,8",
    prompts: Annotated[int, typer.Option()] = 8,
    tokens: Annotated[int, typer.Option()] = 100,
) -> None:
    """Print a row for each budget."""
    torch.set_num_threads(1)
    decoder, tokenizer = AutoModelForCausalLM.from_pretrained(model).float(), AutoTokenizer.from_pretrained(model)
    texts = builtin_prompts()[:prompts]
    sizes, noted = [int(each) for each in processes.split(",")], Noted()
    print("| budget | S | fed |", " | ".join(f"{size} processes" for size in sizes), "|")
    print("|---|---|---|" + "---|" * len(sizes))
    for budget in budgets.split(","):
        stats = lade.Stats()
        noted.trees.clear()
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            config = lade.LookaheadConfig(budget=int(budget))
            lade.generate(decoder, ids, max_new_tokens=tokens, do_sample=False, lookahead=config, stats=stats)
        fed = sum(map(len, noted.trees)) / len(noted.trees)
        parts = [
            sum(max(map(len, partition(parents, size))) for parents in noted.trees) / len(noted.trees) for size in sizes
        ]
        print(
            f"| {budget} | {stats.tokens_per_step:.2f} | {fed:.1f} |", " | ".join(f"{part:.1f}" for part in parts), "|"
        )


if __name__ == "__main__":
    typer.run(main)
