"""Gain of a prediction: tokens per step, tokens fed and seconds, arm by arm in turn.

    python lab/experiments/predictions.py --model FOLDER --prompts FILE.jsonl [--limit 10] [--budget 16]

The prediction is plain decoding's own greedy answer; the same with three tokens changed; its tokens in another order;
drawn tokens; none. Every answer is compared with plain decoding's before anything is counted. Then, without any
prediction, texts that are copied, by methods that read their own text: the answers are what a model would write that
copies its prompt with two words exchanged, and one that quotes from it between words of its own.
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
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.decoding.verify import Greedy
from lade.testing import FunctionRunner, ListCache, nearly_flat_cost
from lade_lab.peers import PromptLookupDrafter, SuffixDrafter

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


def edited(code: str) -> str:
    """The same with two names exchanged."""
    return code.replace("rows", "lines").replace("fed", "given")


def quoting(code: str) -> str:
    """Some lines of it in another order, with words between them."""
    rng, lines = random.Random(0), code.splitlines(keepends=True)
    starts = [rng.randrange(len(lines) - 6) for _ in range(16)]
    words = [word for word in code.split() if word.isalpha()]
    return "".join(" ".join(rng.sample(words, 8)) + ":\n" + "".join(lines[start : start + 6]) for start in starts)


def drafters(budget: int) -> dict[str, Drafter]:
    config, cost = lade.LookaheadConfig(budget=budget), nearly_flat_cost()
    return {
        "prompt lookup": PromptLookupDrafter(budget),
        "suffix": SuffixDrafter(budget),
        "adaptive": drafter_for(config, cost=cost),
    }


def copies(tokenizer: Any) -> None:
    code = COPIED.read_text()[:6000]
    prompt = tokenizer(code)["input_ids"]
    for name, answer in (("edited", edited(code)), ("quoted", quoting(code))):
        text = prompt + tokenizer(answer)["input_ids"]
        for budget in (4, 8, 16, 32):
            shown = [f"{kind} {copied(text, len(prompt), drafter)}" for kind, drafter in drafters(budget).items()]
            print(f"{name}, budget {budget:2}: {'; '.join(shown)}")


def copied(text: list[int], prompt_length: int, drafter: Drafter) -> str:
    """Tokens per step @ tokens fed, where a text is what a model would write behind its first tokens."""
    row = Row(text[:prompt_length], drafter, Greedy(), lambda tokens: len(tokens) >= len(text))
    vocabulary = max(text) + 1

    def follow(known: Sequence[int]) -> int:
        """Return the given text's next token, or an arbitrary one behind any other text."""
        on_the_way = len(known) < len(text) and list(known) == text[: len(known)]
        return text[len(known)] if on_the_way else (7 * known[-1] + len(known)) % vocabulary

    runner = FunctionRunner(follow, vocabulary)
    stats = lade.Stats()
    for _ in DecodeLoop([row], runner, ListCache(), stats).run():
        pass
    assert row.tokens == text
    return f"{stats.tokens_per_step:.2f} @ {stats.fed_tokens / stats.steps:.1f}"


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
