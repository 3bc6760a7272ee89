"""Compression ratio and time of every way to decode on real text, outputs compared with `model.generate` first.

    python scripts/measure.py --model FOLDER --prompts FILE.jsonl --arm 7,5,7 --arm budget=24 --arm adaptive:kept

Arms: `plain` (our loop, one token a step), `W,N,G` (the paper's method), `budget=B` and `adaptive` (ours, the memory
empty for each prompt, or with `:kept` kept across the prompts). `generate` is `model.generate` and always runs. For
each prompt all arms run in turn, so that a drift of the machine's speed meets all of them. Exit code 1 if any output
differs (in bfloat16 near ties may, and are counted).
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.stats import distinct_ngrams

PLAIN = lade.LookaheadConfig(window=0, ngram=2, guesses=0)


@dataclass
class Arm:
    """One way to decode, and what it did."""

    name: str
    lookahead: lade.LookaheadConfig | None
    kept: bool = False
    stats: lade.Stats = field(default_factory=lade.Stats)
    seconds: list[float] = field(default_factory=list)
    differing: int = 0
    gaps: list[float] = field(default_factory=list)  # see `gap`, one for each differing output

    @classmethod
    def of(cls, name: str) -> Arm:
        """An arm by its name."""
        method, _, kept = name.partition(":")
        if method == "plain":
            return cls(name, PLAIN)
        if method == "adaptive":
            return cls(name, lade.LookaheadConfig(), bool(kept))
        if method.startswith("budget="):
            return cls(name, lade.LookaheadConfig(budget=int(method.removeprefix("budget="))), bool(kept))
        return cls(name, lade.LookaheadConfig(*map(int, method.split(","))))


def main(  # noqa: PLR0917 - the options of a command
    model: Annotated[str, typer.Option(help="folder of a causal language model, or `embedded`")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with the key `prompt`; none: the embedded ones")
    ] = None,
    arm: Annotated[list[str], typer.Option(help="may be given several times")] = ["7,5,7", "15,5,15"],  # noqa: B006
    max_new_tokens: int = 200,
    limit: Annotated[int | None, typer.Option(help="only the first prompts")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="write all tokens, past the end of the text")] = False,
    threads: Annotated[int | None, typer.Option(help="torch threads")] = None,
    temperature: Annotated[float | None, typer.Option(help="sample at this temperature instead of greedily")] = None,
    beams: Annotated[int, typer.Option(help="beams of a beam search")] = 1,
    batch: Annotated[int, typer.Option(help="prompts decoded together")] = 1,
    seeds: Annotated[int, typer.Option(help="samples of each prompt, with the seeds 0, 1, ...")] = 1,
    inflate: Annotated[float | None, typer.Option(help="grow the model to so many parameters, same function")] = None,
    dtype: Annotated[str, typer.Option(help="of the weights")] = "float32",
    random_weights: Annotated[bool, typer.Option(help="of the same shape: a text that nobody can guess")] = False,
    pack: Annotated[bool, typer.Option(help="pack the weights for all arms but `generate`")] = False,
) -> None:
    """Measure and print a table."""
    if threads:
        torch.set_num_threads(threads)
    loaded, tokenizer = load(model, dtype, inflate, random_weights)
    ours = lade.pack(copy.deepcopy(loaded)) if pack else loaded
    texts = texts_of(prompts)[:limit]
    arms = [Arm("generate", None), *map(Arm.of, arm)]
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature is not None}
    if beams > 1:
        arguments |= {"num_beams": beams}
    if temperature is not None:
        arguments |= {"temperature": temperature, "top_k": 0}
    if ignore_eos:
        arguments["eos_token_id"] = None
    shares = []
    warm_up = padded(tokenizer, texts[:batch])
    for each in arms:
        lade.generate(ours, **warm_up, lookahead=each.lookahead, **arguments | {"max_new_tokens": 20})
        if each.kept:
            each.lookahead = replace(each.lookahead, memory=lade.Memory())
    jobs = [(seed, texts[i : i + batch]) for seed in range(seeds) for i in range(0, len(texts), batch)]
    for seed, together in track(jobs, "prompts", console=Console(stderr=True)):
        rows = padded(tokenizer, together)
        outputs = [run(ours if each.lookahead else loaded, rows, each, arguments, seed) for each in arms]
        for each, output in zip(arms, outputs, strict=True):
            if not torch.equal(output, outputs[0]):
                each.differing += 1
                if batch == 1:
                    each.gaps.append(gap(loaded, outputs[0], output))
        shares += [distinct_ngrams(row) for row in outputs[0][:, rows["input_ids"].shape[1] :].tolist()]
    report(arms, shares, ours)
    sys.exit(any(each.differing for each in arms))


def load(model: str, dtype: str, inflate: float | None, random_weights: bool) -> tuple[Any, Any]:
    """The model in evaluation mode, and its tokenizer."""
    if model == "embedded":
        from lade.embedded.files import model_path

        model = str(model_path())
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    if random_weights:
        torch.manual_seed(0)
        for parameter in loaded.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    if inflate:
        loaded = lade.bench.inflation.inflate(loaded, params=inflate)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return loaded, tokenizer


def texts_of(prompts: Path | None) -> list[str]:
    """The prompts."""
    if prompts is None:
        from lade.embedded.files import prompts as embedded

        return list(embedded())
    return [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]


def padded(tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    """Ids and mask of prompts, padded on the left."""
    encoded = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, padding_side="left")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def run(model: Any, rows: dict[str, torch.Tensor], arm: Arm, arguments: dict[str, Any], seed: int) -> torch.Tensor:
    """The prompts of a batch with one arm, timed."""
    torch.manual_seed(seed)
    start = perf_counter()
    output = lade.generate(model, **rows, lookahead=arm.lookahead, stats=arm.stats, **arguments)
    arm.seconds.append(perf_counter() - start)
    return output


@torch.no_grad()
def gap(model: Any, expected: torch.Tensor, found: torch.Tensor) -> float:
    """How far the two tokens where two texts first part lie apart, in units of the last place of the better score.

    A few units are a near tie, which passes of different widths may round either way.
    """
    length = min(expected.shape[1], found.shape[1])
    place = int((expected[0, :length] != found[0, :length]).nonzero()[0])
    logits = model(expected[:, :place]).logits[0, -1]
    best, other = logits[expected[0, place]], logits[found[0, place]]
    unit = torch.finfo(logits.dtype).eps * 2.0 ** best.abs().float().log2().floor()
    return float((best.float() - other.float()).abs() / unit)


def report(arms: list[Arm], shares: list[float], model: Any) -> None:
    """The table, and what it was measured on."""
    table = Table(
        "method", "differing", "S", "T̄", "step ms", "library ms", "speed-up over generate (median, quartiles)"
    )
    for arm in arms:
        stats = arm.stats
        ratios = sorted(plain / ours for plain, ours in zip(arms[0].seconds, arm.seconds, strict=True))
        quartiles = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        table.add_row(
            arm.name,
            f"{arm.differing} of {len(arm.seconds)}" + (f", {max(arm.gaps):.1f} ulp" if arm.gaps else ""),
            f"{stats.tokens_per_step:.3f}",
            f"{stats.fed_tokens / stats.steps:.2f}",
            f"{1000 * stats.decode_s / stats.steps:.2f}",
            f"{1000 * stats.library_s / stats.steps:.3f} ({stats.library_s / stats.decode_s:.1%})",
            f"{sum(arms[0].seconds) / sum(arm.seconds):.2f} in all; {median(ratios):.2f} ({quartiles[0]:.2f} to "
            f"{quartiles[1]:.2f})",
        )
    console = Console(width=130)
    console.print(table)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        "S: tokens per step. T̄: tokens fed per step. ulp: of the better score, by which the two tokens differ where "
        f"texts first part, at most, without --batch. {len(shares)} outputs, {arms[0].stats.new_tokens} tokens; "
        f"distinct 4-grams per output: median {median(shares):.2f}, least {min(shares):.2f}; "
        f"{parameters / 1e6:.1f}M parameters, {next(model.parameters()).dtype}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


if __name__ == "__main__":
    typer.run(main)
