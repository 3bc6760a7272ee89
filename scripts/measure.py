"""Compression ratio and time of lookahead decoding on real text, outputs compared with plain decoding first.

    python scripts/measure.py --model FOLDER --prompts FILE.jsonl --sizes 7,5,7 --sizes 15,5,15

For each prompt (one a line, key `prompt`) plain `model.generate` and each (W,N,G) run in turn, so that a drift of the
machine's speed meets all of them. Exit code 1 if any output differs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.stats import distinct_ngrams


@dataclass
class Arm:
    """One way to decode, and what it did."""

    name: str
    lookahead: lade.LookaheadConfig | None
    stats: lade.Stats = field(default_factory=lade.Stats)
    seconds: list[float] = field(default_factory=list)
    differing: int = 0


def main(
    model: Annotated[Path, typer.Option(help="folder of a causal language model")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with the key `prompt`")],
    sizes: Annotated[list[str], typer.Option(help="W,N,G; may be given several times")] = ["7,5,7", "15,5,15"],  # noqa: B006
    max_new_tokens: int = 200,
    limit: Annotated[int | None, typer.Option(help="only the first prompts")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="write all tokens, past the end of the text")] = False,
    threads: Annotated[int | None, typer.Option(help="torch threads")] = None,
    temperature: Annotated[float | None, typer.Option(help="sample at this temperature instead of greedily")] = None,
    beams: Annotated[int, typer.Option(help="beams of a beam search")] = 1,
    seeds: Annotated[int, typer.Option(help="samples of each prompt, with the seeds 0, 1, ...")] = 1,
) -> None:
    """Measure and print a table."""
    if threads:
        torch.set_num_threads(threads)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()][:limit]
    arms = [Arm("plain", None), *(Arm(s, lade.LookaheadConfig(*map(int, s.split(",")))) for s in sizes)]
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": temperature is not None}
    if beams > 1:
        arguments |= {"num_beams": beams}
    if temperature is not None:
        arguments |= {"temperature": temperature, "top_k": 0}
    if ignore_eos:
        arguments["eos_token_id"] = None
    shares = []
    warm_up = tokenizer(texts[0], return_tensors="pt").input_ids
    for arm in arms:
        lade.generate(loaded, input_ids=warm_up, lookahead=arm.lookahead, **arguments)
    jobs = [(seed, text) for seed in range(seeds) for text in texts]
    for seed, text in track(jobs, "prompts", console=Console(stderr=True)):
        ids = tokenizer(text, return_tensors="pt").input_ids
        outputs = [run(loaded, ids, arm, arguments, seed) for arm in arms]
        for arm, output in zip(arms, outputs, strict=True):
            arm.differing += not torch.equal(output, outputs[0])
        shares.append(distinct_ngrams(outputs[0][0, ids.shape[1] :].tolist()))
    report(arms, shares, loaded)
    sys.exit(any(arm.differing for arm in arms))


def run(model: torch.nn.Module, ids: torch.Tensor, arm: Arm, arguments: dict, seed: int) -> torch.Tensor:
    """One prompt with one arm, timed."""
    torch.manual_seed(seed)
    start = perf_counter()
    output = lade.generate(model, input_ids=ids, lookahead=arm.lookahead, stats=arm.stats, **arguments)
    arm.seconds.append(perf_counter() - start)
    return output


def report(arms: list[Arm], shares: list[float], model: torch.nn.Module) -> None:
    """The table, and what it was measured on."""
    table = Table("W,N,G", "outputs differing", "S", "T̄", "step ms", "library share", "speed-up (median, quartiles)")
    for arm in arms:
        stats = arm.stats
        ratios = sorted(plain / ours for plain, ours in zip(arms[0].seconds, arm.seconds, strict=True))
        quartiles = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        table.add_row(
            arm.name,
            f"{arm.differing} of {len(arm.seconds)}",
            f"{stats.tokens_per_step:.3f}",
            f"{sum(stats.step_tokens) / stats.steps:.1f}",
            f"{1000 * stats.decode_s / stats.steps:.2f}",
            f"{stats.library_s / stats.decode_s:.1%}",
            f"{median(ratios):.2f} ({quartiles[0]:.2f} to {quartiles[1]:.2f})",
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"S: tokens per step. T̄: tokens fed per step. {len(shares)} outputs, {arms[0].stats.new_tokens} tokens; "
        f"distinct 4-grams per output: median {median(shares):.2f}, least {min(shares):.2f}; "
        f"{next(model.parameters()).dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


if __name__ == "__main__":
    typer.run(main)
