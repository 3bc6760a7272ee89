"""Whether an inflated model writes the small model's greedy texts.

    python scripts/check_inflate.py --model FOLDER --prompts FILE.jsonl --params 100e6 --dtype float32 --limit 10

For each prompt (one a line, key `prompt`) both models write. Where the texts part, the gap between the two tokens'
scores in either model is given in units in the last place of the score: a gap of 0 to 2 of them is a near tie, which
the order of sums decides. Exit code 1 if texts part elsewhere, and in float64 or float32 if any part at all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from math import frexp
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lade_lab import inflate

NEAR_TIE_ULPS = 2
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Text:
    """What a model wrote: ids `[N]`, their logits `[N, V]`, and the time it took."""

    ids: torch.Tensor
    logits: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class Parting:
    """Where two texts part, and by how much each model preferred its own token, in units in the last place."""

    prompt: int
    position: int
    small_ulps: float
    large_ulps: float

    @property
    def near_tie(self) -> bool:
        """Whether the order of sums may have decided."""
        return max(self.small_ulps, self.large_ulps) <= NEAR_TIE_ULPS


def main(
    model: Annotated[Path, typer.Option(help="folder of a causal language model")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with the key `prompt`")],
    params: Annotated[float, typer.Option(help="wanted number of parameters")] = 100e6,
    dtype: Annotated[str, typer.Option(help="of both models: " + ", ".join(DTYPES))] = "float32",
    max_new_tokens: int = 100,
    limit: Annotated[int | None, typer.Option(help="only the first prompts")] = None,
    threads: Annotated[int | None, typer.Option(help="torch threads")] = None,
) -> None:
    """Compare and print a table."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype}: give one of {', '.join(DTYPES)}", param_hint="--dtype")
    if threads:
        torch.set_num_threads(threads)
    small = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    start = perf_counter()
    large = inflate(small, params)
    made_s = perf_counter() - start
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()][:limit]
    pairs = []
    for text in track(texts, "prompts", console=Console(stderr=True)):
        ids = tokenizer(text, return_tensors="pt").input_ids
        pairs.append((write(small, ids, max_new_tokens), write(large, ids, max_new_tokens)))
    partings = [found for i, pair in enumerate(pairs) if (found := parting(i, *pair, DTYPES[dtype]))]
    report(pairs, partings, large, made_s)
    exact = DTYPES[dtype] in (torch.float64, torch.float32)
    sys.exit(any(exact or not each.near_tie for each in partings))


def write(model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int) -> Text:
    """The greedy text after `ids`."""
    start = perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    seconds = perf_counter() - start
    return Text(output.sequences[0, ids.shape[1] :], torch.cat(output.logits), seconds)


def parting(prompt: int, small: Text, large: Text, dtype: torch.dtype) -> Parting | None:
    """Where the texts part; None where they are equal. No text ends before they part: the end is a token, too."""
    for position, (own, other) in enumerate(zip(small.ids.tolist(), large.ids.tolist(), strict=False)):
        if own != other:
            first, second = small.logits[position].double(), large.logits[position].double()
            return Parting(
                prompt,
                position,
                float(first[own] - first[other]) / ulp(float(first[own]), dtype),
                float(second[other] - second[own]) / ulp(float(second[other]), dtype),
            )
    return None


def ulp(score: float, dtype: torch.dtype) -> float:
    """The distance from a score to the next number of its type."""
    return torch.finfo(dtype).eps * 2.0 ** (frexp(score)[1] - 1)


def largest_difference(pairs: list[tuple[Text, Text]]) -> float:
    """Of the logits, up to and with the token at which texts part."""
    worst = 0.0
    for small, large in pairs:
        same = min(len(small.ids), len(large.ids))
        equal = int((small.ids[:same] == large.ids[:same]).cumprod(0).sum())
        rows = slice(min(equal + 1, same))
        worst = max(worst, float((small.logits[rows] - large.logits[rows]).abs().max()))
    return worst


def report(pairs: list[tuple[Text, Text]], partings: list[Parting], large: PreTrainedModel, made_s: float) -> None:
    """What differs, and what it was measured on."""
    console, config = Console(width=110), large.config
    table = Table("prompt", "first differing token", "small model's gap, ulp", "large model's gap, ulp", "near tie")
    for each in partings:
        numbers = (each.prompt, each.position, f"{each.small_ulps:.1f}", f"{each.large_ulps:.1f}")
        table.add_row(*map(str, numbers), "yes" if each.near_tie else "NO")
    if partings:
        console.print(table)
    tokens = [sum(len(text.ids) for text in texts) for texts in zip(*pairs, strict=True)]
    seconds = [sum(text.seconds for text in texts) for texts in zip(*pairs, strict=True)]
    ties = sum(each.near_tie for each in partings)
    console.print(
        f"{len(partings)} of {len(pairs)} texts differ, {ties} of them at near ties; {tokens[0]} tokens; "
        f"largest difference of logits {largest_difference(pairs):.2g}.\n"
        f"Inflated in {made_s:.1f} s to {large.num_parameters() / 1e6:.1f} million parameters: "
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, feed-forward {config.intermediate_size}, "
        f"{config.num_attention_heads} heads, {config.num_key_value_heads} key heads.\n"
        f"ms per token, prompt included: {1000 * seconds[0] / tokens[0]:.1f} and {1000 * seconds[1] / tokens[1]:.1f}; "
        f"{large.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


if __name__ == "__main__":
    typer.run(main)
