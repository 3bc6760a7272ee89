"""Cost of drafting and learning by the length of the text; no model is needed.

    python lab/experiments/long_texts.py [--lengths 2000,8000,30000] [--budget 16] [--vocabulary 32000]

Texts are drawn like words, few of them often; logits are drawn too. The prompt is learned 1,024 rows of logits at a
time, as prefill hands them over; then steps are taken behind it. What a pass takes is left out: it grows with the text.
"""

from __future__ import annotations

from time import perf_counter
from typing import Annotated

import numpy as np
import torch
import typer

from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.drafting.tree_size import FixedBudget
from lade.decoding.readout import read
from lade.decoding.row import Row
from lade.decoding.verify import Greedy, walk
from lade.model.masks import StepInputs

PIECE = 1024
PARTS = ("drafting", "tensors", "reading", "walk", "learning")


def words(rng: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    """Tokens of a text: the n-th commonest is drawn about 1 / n as often as the commonest."""
    return [int(token) % vocabulary for token in rng.zipf(1.3, count)]


def logits_of(rng: np.random.Generator, rows: int, vocabulary: int) -> torch.Tensor:
    """Logits `[rows, V]` whose likeliest tokens are words of the text."""
    logits = rng.standard_normal((rows, vocabulary), dtype=np.float32)
    for _ in range(6):
        logits[np.arange(rows), words(rng, rows, vocabulary)] += rng.uniform(5.0, 9.0, rows).astype(np.float32)
    return torch.from_numpy(logits)


def learned_s(drafter: AdaptiveDrafter, row: Row, rng: np.random.Generator, vocabulary: int) -> float:
    """Learn the prompt; seconds."""
    piece, taken = logits_of(rng, PIECE, vocabulary), 0.0
    for start in range(0, len(row.tokens), PIECE):
        begin = perf_counter()
        entries = read(piece[: len(row.tokens) - start]).entries
        assert entries is not None
        drafter.learn_prompt(row.tokens, start, entries)
        taken += perf_counter() - begin
    length, begin = len(row.tokens), perf_counter()
    row.emit(row.tokens[0])
    drafter.begin(row.tokens, length)
    return taken + perf_counter() - begin


def steps_s(drafter: AdaptiveDrafter, row: Row, logits: torch.Tensor, steps: int) -> list[list[float]]:
    """Take steps; seconds of each step's `PARTS`."""
    taken = []
    for _ in range(steps):
        clock = [perf_counter()]
        draft = drafter.draft(row.tokens, None)
        clock.append(perf_counter())
        StepInputs.of([draft.tree], [len(row.tokens) - 1], torch.device("cpu"))
        clock.append(perf_counter())
        readout = read(logits[: len(draft.tree)])
        clock.append(perf_counter())
        verdict = walk(draft.tree, row.chooser.bind(logits, readout.argmax_ids, row.tokens), row.emit)
        clock.append(perf_counter())
        drafter.learn(row.tokens, draft, readout, verdict)
        clock.append(perf_counter())
        taken.append(np.diff(clock).tolist())
        logits = logits.roll(1, 0)
    return taken


def main(
    lengths: Annotated[str, typer.Option(help="tokens of the prompts")] = "2000,8000,30000",
    budget: Annotated[int, typer.Option(help="tokens of a step")] = 16,
    vocabulary: Annotated[int, typer.Option(help="tokens that there are")] = 32_000,
    steps: Annotated[int, typer.Option(help="steps behind each prompt")] = 300,
) -> None:
    torch.set_num_threads(1)
    parts = ", ".join(PARTS)
    print(f"{'tokens':>7s} {'learned, ms per 1,024':>22s} {'memory, MiB':>12s}  us a step, median: {parts}; all")
    for length in map(int, lengths.split(",")):
        rng, memory = np.random.default_rng(0), ContextMemory()
        drafter = AdaptiveDrafter(memory, FixedBudget(budget), vocabulary=vocabulary)
        row = Row(words(rng, length, vocabulary), drafter, Greedy(), lambda tokens: False)
        seconds = learned_s(drafter, row, rng, vocabulary)
        taken = 1e6 * np.array(steps_s(drafter, row, logits_of(rng, 4 * budget, vocabulary), steps))
        parts = " ".join(f"{us:6.0f}" for us in [*np.median(taken, axis=0), np.median(taken.sum(axis=1))])
        mebibytes = sum(table.nbytes for table in memory.tables) / 2**20
        print(f"{length:7d} {1e3 * seconds * PIECE / length:22.1f} {mebibytes:12.1f}  {parts}")


if __name__ == "__main__":
    typer.run(main)
