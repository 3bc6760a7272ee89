"""Count texts that differ from plain `model.generate`'s; an invariant model should have none.

    python scripts/count_differences.py --model stories3M-hf --prompts tinystories_openings.jsonl --record count.jsonl
    python scripts/count_differences.py --model stories3M-hf --prompts tinystories_openings.jsonl --weights packed
    python scripts/count_differences.py --model stories3M-hf --prompts tinystories_openings.jsonl --as-it-is

Each prompt is continued by the paper's method, and by the adaptive one with its memory empty and kept: greedily, as
samples with several seeds at temperature 0.8, and in batches of four; as beams; and by an engine of eight rows,
greedily and as samples. Every text is compared with that of `model.generate` on the same model, which is made once for
all methods, and the scores of the greedy texts and of one seed's samples as well. An invariant model's batches are
also compared with its single texts.

Eight prompts make a line of JSON in the record; what is in it is not done again. The last line of the output sums up.
The exit status is 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.backends.cpu.invariant_marker import invariance_of

BATCH, ROWS, BEAMS, BEAM_TOKENS = 4, 8, 3, 40
TEMPERATURE = 0.8
SCORED = {"output_scores": True, "return_dict_in_generate": True}
Methods = dict[str, lade.LookaheadConfig]
Weights = Literal["dense", "packed", "int8", "int4"]


class Count:
    """Texts, tokens, and the texts that differ, by method; scores are a method of their own."""

    def __init__(self) -> None:
        self.texts, self.tokens, self.differing = Counter[str](), Counter[str](), Counter[str]()

    def add(self, method: str, ours: torch.Tensor, plain: torch.Tensor, prompt: int) -> None:
        """Compare texts `[B, L]`, of which the prompt's ids are no tokens to count."""
        same = ours.shape == plain.shape and (ours == plain).all(1)
        self.texts[method] += len(plain)
        self.tokens[method] += plain[:, prompt:].numel()
        self.differing[method] += len(plain) - int(torch.as_tensor(same).sum())

    def add_scores(self, method: str, ours: Any, plain: Any) -> None:
        """Compare the scores of all tokens of one text, bit for bit."""
        found, expected = torch.cat(ours.scores), torch.cat(plain.scores)  # [tokens, V]
        same = found.shape == expected.shape and torch.equal(found.view(torch.int32), expected.view(torch.int32))
        self.texts[f"scores of {method}"] += 1
        self.differing[f"scores of {method}"] += not same

    def add_record(self, methods: dict[str, dict[str, int]]) -> None:
        """Add what `methods` returned before."""
        for name, numbers in methods.items():
            for field, number in numbers.items():
                getattr(self, field)[name] += number

    def methods(self) -> dict[str, dict[str, int]]:
        """For JSON."""
        fields = ("texts", "tokens", "differing")
        return {name: {field: getattr(self, field)[name] for field in fields} for name in self.texts}


class Texts:
    """A model's texts in every way, beside plain ones."""

    def __init__(self, model: Any, tokenizer: Any, methods: Methods, tokens: int, seeds: int) -> None:
        self.model, self.tokenizer, self.methods, self.seeds = model, tokenizer, methods, seeds
        self.greedy = {"max_new_tokens": tokens, "pad_token_id": 0, "do_sample": False}
        self.sampled = {**self.greedy, "do_sample": True, "temperature": TEMPERATURE}

    def count(self, texts: list[str]) -> Count:
        """Continue some prompts in every way."""
        count = Count()
        prompts = [self.tokenizer(text, return_tensors="pt").input_ids for text in texts]
        plain = [self._greedy(ids, count) for ids in prompts]
        for first in range(0, len(texts), BATCH):
            part = slice(first, first + BATCH)
            self._batch(texts[part], plain[part], count)
        self._engine("engine", prompts, plain, count)
        for seed in range(self.seeds):
            plain = [self._samples(ids, seed, count) for ids in prompts]
            self._engine("samples, engine", prompts, plain, count, seed=seed, do_sample=True, temperature=TEMPERATURE)
        for ids in prompts:
            self._beams(ids, count)
        return count

    def _greedy(self, ids: torch.Tensor, count: Count) -> torch.Tensor:
        plain = self.model.generate(ids, **SCORED, **self.greedy)
        for name, config in self.methods.items():
            ours = lade.generate(self.model, input_ids=ids, lookahead=config, **SCORED, **self.greedy)
            count.add(name, ours.sequences, plain.sequences, ids.shape[1])
            count.add_scores(name, ours, plain)
        return plain.sequences[0]  # type: ignore[no-any-return]

    def _samples(self, ids: torch.Tensor, seed: int, count: Count) -> torch.Tensor:
        torch.manual_seed(seed)
        plain = self.model.generate(ids, **SCORED, **self.sampled)
        for name, config in self.methods.items():
            torch.manual_seed(seed)
            ours = lade.generate(self.model, input_ids=ids, lookahead=config, **SCORED, **self.sampled)
            count.add(f"samples, {name}", ours.sequences, plain.sequences, ids.shape[1])
            if seed == 0:
                count.add_scores(f"samples, {name}", ours, plain)
        return plain.sequences[0]  # type: ignore[no-any-return]

    def _beams(self, ids: torch.Tensor, count: Count) -> None:
        beams = {**self.greedy, "num_beams": BEAMS, "max_new_tokens": BEAM_TOKENS}
        ours = lade.generate(self.model, input_ids=ids, lookahead=self.methods["paper"], **beams)
        count.add("beams", ours, self.model.generate(ids, **beams), ids.shape[1])

    def _batch(self, texts: list[str], alone: list[torch.Tensor], count: Count) -> None:
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
        )
        prompt, new = inputs.input_ids.shape[1], self.greedy["max_new_tokens"]
        plain = self.model.generate(**inputs, **self.greedy)
        for name, config in self.methods.items():
            ours = lade.generate(self.model, **inputs, lookahead=config, **self.greedy)
            count.add(f"batches, {name}", ours, plain, prompt)
        if invariance_of(self.model):
            count.add("batches beside single texts", plain[:, prompt:], torch.stack([text[-new:] for text in alone]), 0)

    def _engine(
        self, name: str, prompts: list[torch.Tensor], plain: list[torch.Tensor], count: Count, **sampling: Any
    ) -> None:
        with lade.Engine(self.model, max_rows=ROWS) as engine:
            handles = [engine.add(ids, **{**self.greedy, **sampling}) for ids in prompts]
            for ids, handle, text in zip(prompts, handles, plain, strict=True):
                count.add(name, handle.result(), text[None], ids.shape[1])


def methods_of() -> Methods:
    """The methods by name."""
    return {
        "paper": lade.LookaheadConfig(7, 5, 7),
        "adaptive, cold": lade.LookaheadConfig(adaptive=True),
        "adaptive, kept": lade.LookaheadConfig(memory=lade.Memory()),
    }


def groups_of(files: list[Path], skip: int, limit: int) -> list[list[str]]:
    """The prompts of all files, so many at a time as an engine has rows."""
    lines = [line for file in files for line in file.read_text().splitlines()]
    texts = [json.loads(line)["prompt"] for line in lines][skip : skip + limit]
    return [texts[first : first + ROWS] for first in range(0, len(texts), ROWS)]


def main(
    model: Annotated[str, typer.Option(help="A checkpoint.")],
    prompts: Annotated[list[Path], typer.Option(help="JSON lines with the key prompt; several files, if wanted.")],
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    limit: Annotated[int, typer.Option(help="Prompts.")] = 1000,
    skip: Annotated[int, typer.Option(help="Prompts left out before these.")] = 0,
    tokens: Annotated[int, typer.Option(help="New tokens of each text.")] = 200,
    seeds: Annotated[int, typer.Option(help="Samples of each prompt and method.")] = 3,
    inflate: Annotated[float, typer.Option(help="Parameters to inflate the model to; 0 for none.")] = 0,
    weights: Annotated[Weights, typer.Option(help="Dense, packed, or packed in int8 or int4.")] = "dense",
    as_it_is: Annotated[bool, typer.Option(help="Leave the model as it is, which is not invariant.")] = False,
    threads: Annotated[int, typer.Option()] = 1,
    record: Annotated[Path | None, typer.Option(help="A line of JSON for each eight prompts; resumes.")] = None,
) -> None:
    """Count, and print a line of JSON for what is done so far after each eight prompts."""
    start = perf_counter()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    if inflate:
        loaded = lade.bench.inflate(loaded, inflate, dtype=getattr(torch, dtype))
    loaded.generation_config.eos_token_id = None
    if weights != "dense":
        lade.pack(loaded, weights=None if weights == "packed" else weights)
    loaded = loaded if as_it_is else lade.invariant(loaded)
    done = record.read_text().splitlines() if record and record.exists() else []
    total, texts = Count(), Texts(loaded, tokenizer, methods_of(), tokens, seeds)
    for number, group in enumerate(groups_of(prompts, skip, limit)):
        if number < len(done):
            total.add_record(json.loads(done[number]))
            continue
        methods = texts.count(group).methods()
        total.add_record(methods)
        if record:
            with record.open("a") as file:
                file.write(json.dumps(methods) + "\n")
        facts = {"dtype": dtype, "weights": weights, "threads": threads, "seconds": round(perf_counter() - start)}
        sums = {"tokens": total.tokens.total(), "differing": total.differing.total()}
        print(json.dumps({**facts, **sums, "methods": total.methods()}), flush=True)
    sys.exit(bool(total.differing.total()))


if __name__ == "__main__":
    typer.run(main)
