"""Host time of a step during which a GPU would wait, measured without a GPU.

    python lab/experiments/host_step.py --model FOLDER --prompts FILE.jsonl [--budget 16 --budget 64]

A forward pass on a CPU leaves nothing in the CPU's caches of what the library needs next; one on a GPU does. So the
passes are made once, and what was read of their logits is written down. Then the same texts are written again from
that, without a model: growing the trees, filling a captured pass's inputs, walking, and learning are all that is left,
and all that is timed. The tokens must come out the same. Launching kernels and waiting for copies is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.backends.cuda_graphs.pass_inputs import StaticInputs
from lade.decoding import loop
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.tree_size import FixedBudget
from lade.decoding.readout import Readout
from lade.decoding.row import Row
from lade.decoding.verify import Greedy, walk
from lade.model.prepared import special_ids, vocabulary_of

PARTS = ("growing", "inputs", "walk", "learning")
NO_LOGITS = torch.empty(0)


@dataclass
class Written:
    """A text, and what was read while it was written: of the prompt first, then of each pass."""

    prompt: list[int]
    tokens: list[int]
    said: list[Readout]


def written(model: Any, prompts: list[torch.Tensor], budget: int, new_tokens: int) -> Iterator[Written]:
    """Texts, one after the other, with one memory."""
    memory, said, read = lade.Memory(), list[Readout](), loop.read

    def listening(*args: Any, wants_entries: bool = True) -> Readout:
        said.append(read(*args, wants_entries=wants_entries))
        return said[-1]

    loop.read = listening
    try:
        for ids in prompts:
            said.clear()
            config = lade.LookaheadConfig(budget=budget, memory=memory)
            output = lade.generate(model, input_ids=ids, lookahead=config, max_new_tokens=new_tokens, do_sample=False)
            assert isinstance(output, torch.Tensor)
            yield Written(ids[0].tolist(), output[0].tolist(), [each for each in said if each.entries is not None])
    finally:
        loop.read = read


def replayed(model: Any, texts: list[Written], budget: int) -> list[list[float]]:
    """Write the texts again; seconds of each step's `PARTS`."""
    memory, taken = lade.Memory(), []
    for text in texts:
        excluded, vocabulary = special_ids(model.generation_config), vocabulary_of(model)
        drafter = AdaptiveDrafter(memory, FixedBudget(budget), excluded, vocabulary=vocabulary)
        end, first = len(text.tokens), text.said[0]
        row = Row(text.prompt, drafter, Greedy(), lambda tokens, end=end: len(tokens) >= end)  # type: ignore[misc]
        assert first.entries is not None
        drafter.learn_prompt(row.tokens, len(text.prompt) - len(first.argmax_ids), first.entries)
        row.emit(text.tokens[len(text.prompt)])
        drafter.begin(row.tokens, len(text.prompt))
        inputs = StaticInputs(1, budget, torch.device("cpu"))
        for said in text.said[1:]:
            clock = [perf_counter()]
            draft = drafter.draft(row.tokens, None)
            clock.append(perf_counter())
            inputs.fill([draft.tree], [len(row.tokens) - 1])
            clock.append(perf_counter())
            verdict = walk(draft.tree, row.chooser.bind(NO_LOGITS, said.argmax_ids, row.tokens), row.emit)
            clock.append(perf_counter())
            drafter.learn(row.tokens, draft, said, verdict)
            clock.append(perf_counter())
            taken.append(np.diff(clock).tolist())
        if row.tokens != text.tokens:
            raise SystemExit("the text came out otherwise: what was timed is not what happens")
    return taken


def main(
    model: Annotated[Path, typer.Option(help="folder of a causal language model")],
    prompts: Annotated[Path, typer.Option(help='JSON lines with a "prompt" each')],
    budget: Annotated[list[int] | None, typer.Option(help="tokens of a step; may be repeated")] = None,
    limit: Annotated[int, typer.Option(help="prompts")] = 12,
    new_tokens: Annotated[int, typer.Option(help="tokens to write for each")] = 150,
    rounds: Annotated[int, typer.Option(help="times that all is written again")] = 5,
) -> None:
    torch.set_num_threads(1)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    lines = prompts.read_text(encoding="utf-8").splitlines()[:limit]
    ids = [tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids for line in lines]
    for size in budget or [16, 64]:
        texts = list(written(loaded, ids, size, new_tokens))
        taken = 1e6 * np.array([step for _ in range(rounds) for step in replayed(loaded, texts, size)])
        parts = ", ".join(f"{name} {us:.0f}" for name, us in zip(PARTS, np.median(taken, axis=0), strict=True))
        low, middle, high = np.percentile(taken.sum(axis=1), [25, 50, 75])
        print(f"{size} tokens: {middle:.0f} us a step ({low:.0f} to {high:.0f}); {parts}")


if __name__ == "__main__":
    typer.run(main)
