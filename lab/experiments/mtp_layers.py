"""Tokens per step with and without a checkpoint's MTP layer, at fixed tree sizes.

    python lab/experiments/mtp_layers.py --model FOLDER [--prompts FILE] [--tokens 200]

Counts, so the load of the machine does not matter. Every text is compared with that of plain decoding. "kept" has a
memory, and trust in the layer, from the second half of the prompts; all else begins each text without a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade import LookaheadConfig, Memory, Stats
from lade_lab import workloads

BUDGETS = (4, 8, 16)
TEMPERATURE = 0.7

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def tokens_per_step(
    model: Any,
    prompts: Sequence[torch.Tensor],
    config: LookaheadConfig,
    tokens: int,
    *,
    temperature: float = 0.0,
    memory: Memory | None = None,
) -> float:
    """Return accepted tokens per step over texts of `tokens` new tokens each.

    Args:
        model: a decoder-only model.
        prompts: `[1, T]` each.
        config: how to draft; its memory is replaced.
        tokens: new tokens of each text.
        temperature: 0.0 for greedy decoding; samples have the seed of their prompt's index.
        memory: kept over all texts; None for a new one for each.

    Raises:
        AssertionError: a text differs from that of plain decoding.
    """
    stats = Stats()
    arguments: dict[str, Any] = {"max_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    if temperature:
        arguments |= {"do_sample": True, "temperature": temperature}
    for seed, ids in enumerate(prompts):
        torch.manual_seed(seed)
        plain = model.generate(ids, **arguments)
        torch.manual_seed(seed)
        own = LookaheadConfig(budget=config.budget, mtp=config.mtp, memory=Memory() if memory is None else memory)
        ours = lade.generate(model, ids, lookahead=own, stats=stats, **arguments)
        assert torch.equal(ours, plain), f"text {seed} differs from that of plain decoding"
    return stats.tokens_per_step


def table(model: Any, prompts: Sequence[torch.Tensor], tokens: int, budgets: Sequence[int] = BUDGETS) -> list[str]:
    """Return the lines of the table: a row for each way of drafting, a column for each tree size."""
    half = (len(prompts) + 1) // 2
    lines = [
        f"| tokens per step | {' | '.join(f'{budget} fed' for budget in budgets)} |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    ways = {"cold": (0.0, False), "kept": (0.0, True), f"T = {TEMPERATURE}": (TEMPERATURE, False)}
    for mtp in (False, True):
        for name, (temperature, kept) in ways.items():
            cells = []
            for budget in budgets:
                config, memory = LookaheadConfig(budget=budget, mtp=mtp), Memory() if kept else None
                if kept:
                    tokens_per_step(model, prompts[half:], config, tokens, memory=memory)
                found = tokens_per_step(model, prompts[:half], config, tokens, temperature=temperature, memory=memory)
                cells.append(f"{found:.2f}")
            lines.append(f"| {'with' if mtp else 'without'} the layer, {name} | {' | '.join(cells)} |")
    return lines


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="Folder of a model with an MTP layer.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, a prompt a line; the built-in code without it.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="New tokens of each text.", min=1)] = 200,
) -> None:
    """Print tokens per step with and without a checkpoint's MTP layer."""
    torch.set_num_threads(1)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    builtin = [each.turns[0] for each in workloads.load(workloads.BUILTIN).items]
    texts = builtin if prompts is None else prompts.read_text("utf-8").splitlines()
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    typer.echo("\n".join(table(loaded, ids, tokens)))


if __name__ == "__main__":
    app()
