"""What a prediction brings: tokens per step, tokens fed and seconds, arm by arm in turn.

    python scripts/predictions.py --model FOLDER --prompts FILE.jsonl [--limit 10] [--budget 16]

The prediction is plain decoding's own greedy answer; the same with three tokens changed; its tokens in another order;
drawn tokens; none. Every answer is compared with plain decoding's before anything is counted. Then, without any
prediction, a text that is copied: the answer is what a model that copies its prompt with two words exchanged would
write, with and without looking for copies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.drafting.followed import OwnText
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.decoding.verify import Greedy
from lade.testing import FunctionRunner, ListCache, nearly_flat_cost

ARMS = ("the answer", "three changed", "another order", "drawn", "none")
COPIED = Path(lade.__file__).parent / "decoding" / "loop.py"


def expected(arm: str, answer: list[int], vocabulary: int) -> list[int] | None:
    rng = random.Random(0)
    match arm:
        case "none":
            return None
        case "drawn":
            return rng.choices(range(vocabulary), k=len(answer))
        case "another order":
            return rng.sample(answer, len(answer))
        case "three changed":
            places = {len(answer) * quarter // 4 for quarter in (1, 2, 3)}
            return [(token + (place in places)) % vocabulary for place, token in enumerate(answer)]
    return answer


def predictions(model: Any, prompts: Sequence[torch.Tensor], new_tokens: int, budget: int | None, repeats: int) -> None:
    config = lade.LookaheadConfig(budget=budget)
    stats, seconds = {arm: lade.Stats() for arm in ARMS}, {arm: list[float]() for arm in ARMS}
    for repeat in range(repeats + 1):
        for ids in prompts:
            arguments = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            plain = model.generate(ids, **arguments)
            for arm in ARMS:
                text = expected(arm, plain[0, ids.shape[1] :].tolist(), model.config.vocab_size)
                figures, start = lade.Stats(), perf_counter()
                found = lade.generate(model, ids, prediction=text, lookahead=config, stats=figures, **arguments)
                if repeat:
                    seconds[arm].append(perf_counter() - start)
                    stats[arm].merge(figures)
                assert torch.equal(found, plain), arm
    for arm in ARMS:
        fed = stats[arm].fed_tokens / stats[arm].steps
        ratios = [mine / none for mine, none in zip(seconds[arm], seconds["none"], strict=True)]
        print(f"{arm:14} {stats[arm].tokens_per_step:5.2f} @ {fed:5.2f}, {median(ratios):.3f} of the time without")


def copies(tokenizer: Any) -> None:
    code = COPIED.read_text()
    prompt, answer = (
        tokenizer(text)["input_ids"] for text in (code, code.replace("rows", "lines").replace("fed", "given"))
    )
    text = prompt + answer
    for budget in (4, 8, 16, 32):
        shown = []
        for sources in ([], [OwnText()]):
            drafter = drafter_for(lade.LookaheadConfig(budget=budget), cost=nearly_flat_cost(), sources=sources)
            row = Row(prompt, drafter, Greedy(), lambda tokens: len(tokens) >= len(text))
            runner = FunctionRunner(lambda known: text[len(known)] if len(known) < len(text) else 0, len(tokenizer))
            loop = DecodeLoop([row], runner, ListCache(), lade.Stats())
            for _ in loop.run():
                pass
            assert row.tokens == text
            shown.append(f"{loop.stats.tokens_per_step:5.2f} @ {loop.stats.fed_tokens / loop.stats.steps:5.2f}")
        print(f"copied, budget {budget:2}: without {shown[0]}, with {shown[1]}")


def main(
    model: Annotated[str, typer.Option(help="folder or hub id")],
    prompts: Annotated[Path, typer.Option(help="one a line, under the key prompt")],
    limit: int = 10,
    new_tokens: int = 200,
    budget: int | None = None,
    repeats: int = 2,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()[:limit]]
    predictions(loaded, [tokenizer(text, return_tensors="pt").input_ids for text in texts], new_tokens, budget, repeats)
    copies(tokenizer)


if __name__ == "__main__":
    typer.run(main)
