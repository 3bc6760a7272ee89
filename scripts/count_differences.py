"""How many texts of an invariant model are not bit for bit those of plain `model.generate`: there should be none.

    python scripts/count_differences.py --model stories3M-hf --prompts tinystories_openings.jsonl [--dtype bfloat16]

Each prompt is continued in every way that this package has: the paper's method, the adaptive one with its memory empty
and kept, samples with several seeds at temperature 0.8, batches of four prompts, beams, and an engine of eight rows.
Every text is compared with that of `model.generate` on the same model, and the logits of the first method, too. The
last line
is JSON. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade

PAPER, COLD = lade.LookaheadConfig(7, 5, 7), lade.LookaheadConfig(adaptive=True)
BATCH, ROWS, SEEDS, BEAMS = 4, 8, 3, 3
SAMPLING = {"do_sample": True, "temperature": 0.8}


class Count:
    """Texts, tokens, and those that differ, by method."""

    def __init__(self) -> None:
        self.texts, self.tokens, self.differing = Counter[str](), Counter[str](), Counter[str]()

    def add(self, method: str, ours: torch.Tensor, plain: torch.Tensor, prompt: int) -> None:
        """Compare texts `[B, L]`, the prompt's ids included."""
        self.texts[method] += len(plain)
        self.tokens[method] += plain[:, prompt:].numel()
        same = ours.shape == plain.shape and (ours == plain).all(1)
        self.differing[method] += len(plain) - int(torch.as_tensor(same).sum())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = ("texts", "tokens", "differing")
        methods = {name: {field: getattr(self, field)[name] for field in fields} for name in self.texts}
        return {"tokens": self.tokens.total(), "differing": self.differing.total(), "methods": methods}


def singly(model: Any, ids: torch.Tensor, kept: lade.LookaheadConfig, count: Count, arguments: dict[str, Any]) -> None:
    """One prompt, `[1, L]`: greedy, with logits, then samples, then beams."""
    shape = {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, do_sample=False, **shape, **arguments)
    for name, config in (("paper", PAPER), ("adaptive, cold", COLD), ("adaptive, kept", kept)):
        ours = lade.generate(model, input_ids=ids, lookahead=config, do_sample=False, **shape, **arguments)
        count.add(name, ours.sequences, plain.sequences, ids.shape[1])
        if name == "paper":
            count.add("its logits", torch.cat(ours.logits), torch.cat(plain.logits), 0)
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        expected = model.generate(ids, **SAMPLING, **arguments)
        torch.manual_seed(seed)
        found = lade.generate(model, input_ids=ids, lookahead=COLD, **SAMPLING, **arguments)
        count.add("samples", found, expected, ids.shape[1])
    beams = {"do_sample": False, "num_beams": BEAMS, **arguments, "max_new_tokens": 40}
    found = lade.generate(model, input_ids=ids, lookahead=PAPER, **beams)
    count.add("beams", found, model.generate(ids, **beams), ids.shape[1])


def together(model: Any, tokenizer: Any, texts: list[str], count: Count, arguments: dict[str, Any]) -> None:
    """Prompts as one batch, padded on the left, and as requests of an engine."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    plain = model.generate(**inputs, do_sample=False, **arguments)
    ours = lade.generate(model, **inputs, lookahead=COLD, do_sample=False, **arguments)
    count.add("batches", ours, plain, inputs.input_ids.shape[1])


def served(model: Any, tokenizer: Any, texts: list[str], count: Count, arguments: dict[str, Any]) -> None:
    """Prompts as requests of an engine."""
    with lade.Engine(model, max_rows=ROWS) as engine:
        prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
        handles = [engine.add(ids, do_sample=False, **arguments) for ids in prompts]
        for ids, handle in zip(prompts, handles, strict=True):
            count.add("engine", handle.result(), model.generate(ids, do_sample=False, **arguments), ids.shape[1])


def parts(texts: list[str], size: int) -> Iterator[list[str]]:
    """So many at a time."""
    for first in range(0, len(texts), size):
        yield texts[first : first + size]


def main(
    model: Annotated[str, typer.Option(help="A checkpoint.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with the key prompt.")],
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    limit: Annotated[int, typer.Option(help="Prompts.")] = 40,
    skip: Annotated[int, typer.Option(help="Prompts left out before these.")] = 0,
    tokens: Annotated[int, typer.Option(help="New tokens of each text.")] = 200,
    seconds: Annotated[float, typer.Option(help="Begin no further prompt after this time.")] = 1e9,
    inflate: Annotated[float, typer.Option(help="Parameters to inflate the model to; 0 for none.")] = 0,
    pack: Annotated[bool, typer.Option(help="Pack the weights.")] = False,
) -> None:
    """Count, and print a line of JSON for what is done so far after each four prompts."""
    start = perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    if inflate:
        loaded = lade.bench.inflate(loaded, inflate, dtype=getattr(torch, dtype))
    loaded.generation_config.eos_token_id = None
    lade.invariant(lade.pack(loaded) if pack else loaded)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()][skip : skip + limit]
    kept, count = lade.LookaheadConfig(memory=lade.Memory()), Count()
    arguments = {"max_new_tokens": tokens, "pad_token_id": 0}
    for some in parts(texts, BATCH):
        if perf_counter() - start > seconds:
            break
        for text in some:
            singly(loaded, tokenizer(text, return_tensors="pt").input_ids, kept, count, arguments)
        together(loaded, tokenizer, some, count, arguments)
        served(loaded, tokenizer, some, count, arguments)
        facts = {"dtype": dtype, "threads": torch.get_num_threads(), "seconds": round(perf_counter() - start)}
        print(json.dumps({**facts, **count.as_dict()}), flush=True)
    sys.exit(bool(count.differing.total()))


if __name__ == "__main__":
    typer.run(main)
