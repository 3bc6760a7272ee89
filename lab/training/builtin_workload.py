"""Choose the prompts of `lade_lab.workloads.load("builtin")`: `python -m training.builtin_workload OUT.jsonl`.

A prompt is the beginning of a function in a standard library module that the embedded model was never trained on:
everything up to the first line of its body, docstring included, methods below their class line. Functions of fewer than
`LEAST_LEFT` further lines are left out, and prompts of more than `MOST_TOKENS`. Of each module the `PER_MODULE`
functions are taken whose greedy continuation repeats itself least, since repetition flatters every method that proposes
text seen before; how fast any method is plays no part. Which lines there are depends on the Python that runs this: the
committed file was made with CPython 3.11.7, and is the same for everybody.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lade.embedded import model_path
from lade_lab.workloads import distinct_ngrams
from training.corpus import HELD_OUT, standard_library
from training.evaluate import load

LEAST_LEFT = 4
MOST_TOKENS = 350
PER_MODULE = 2
NEW_TOKENS = 120


def main() -> None:
    """Choose them, and write the file that the command line names."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_path())
    lines = []
    for module in HELD_OUT:
        shares = {}
        for name, prompt in beginnings((standard_library() / f"{module}.py").read_text(encoding="utf-8")):
            share = distinct_share(model, tokenizer, prompt)
            if share is not None:
                shares[name, prompt] = share
        for name, prompt in sorted(shares, key=shares.__getitem__, reverse=True)[:PER_MODULE]:
            print(f"{shares[name, prompt]:.2f}  {module}.{name}")
            lines.append(json.dumps({"id": f"{module}.{name}", "category": module, "prompt": prompt}))
        print(f"{sum(shares.values()) / len(shares):.2f}  mean of the {len(shares)} candidates of {module}")
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


def beginnings(source: str) -> Iterator[tuple[str, str]]:
    """Name and beginning of each function and method that has enough lines left to write."""
    lines = source.split("\n")
    for node in ast.parse(source).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in members:
            if not isinstance(function, ast.FunctionDef):
                continue
            body = function.body[1:] if ast.get_docstring(function) is not None else function.body
            if body and (function.end_lineno or 0) - body[0].lineno >= LEAST_LEFT:
                own = lines[function.lineno - 1 : body[0].lineno]
                if isinstance(node, ast.ClassDef):
                    yield f"{node.name}.{function.name}", "\n".join([lines[node.lineno - 1], *own])
                else:
                    yield function.name, "\n".join(own)


def distinct_share(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str) -> float | None:
    """Share of distinct 4-grams in the greedy continuation; None for a prompt that is too long."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] > MOST_TOKENS:
        return None
    generate: Any = model.generate
    output = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
    return distinct_ngrams(output[0, ids.shape[1] :].tolist())


if __name__ == "__main__":
    main()
