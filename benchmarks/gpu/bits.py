"""How many answers have the bits of `model.generate`, before and after `lade.invariant`, and what that costs.

    python benchmarks/gpu/bits.py --model FOLDER --limit-s 60 --out results/bits.json

Answers are greedy, of equal length, and compared token by token with those of `model.generate` on the same model, in
transformers' own loop: the first token that differs counts. Then passes of one token and of 64 are timed, fused as
they are by default, and invariant.

Without --model the weights are random, in a published shape: then near ties are rarer than in a real text. --inflate
gives a small real model the cost of a large one.

Whatever is done when the time is over is printed and saved.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from steps import DTYPES, SHAPES, Lane, model_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.cuda_graphs.buffers import EagerReplay
from lade.backends.cuda_graphs.pool import new_pool, pool_of
from lade.backends.cuda_graphs.runner import GraphRunner

METHODS: dict[str, Any] = {
    "default": "auto",
    "16": lade.LookaheadConfig(budget=16),
    "64": lade.LookaheadConfig(budget=64),
}
SIZES = (1, 64)
QUESTIONS = (
    "Write a Python function that returns the prime numbers below n, with a docstring and two tests.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain step by step why the sky is blue and sunsets are red.",
    "A train leaves at 9:40 and arrives at 13:05. It stops for 25 minutes. How long does it move? Show the steps.",
    "List ten European capitals, each with its country and one sentence about it.",
    "Summarise the causes of the French Revolution in five bullet points.",
    "Write an email that moves a meeting from Tuesday to Thursday and apologises for it.",
    "Write a JSON object that describes a book with title, author, year and three chapters.",
)


def loaded(options: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Any:
    """The model, which writes until it is told to stop."""
    if options.model is None:
        model = model_of(options.shape, dtype, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    if options.inflate is not None:
        from lade_lab import inflate

        model = inflate(model, options.inflate, dtype=dtype, device=device)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model


def prompts_of(options: argparse.Namespace, model: Any, device: torch.device) -> list[torch.Tensor]:
    """Ids `[1, L]` of each prompt: questions, or random ones of several lengths."""
    if options.model is None:
        torch.manual_seed(1)
        lengths = [30 + 23 * number for number in range(options.answers)]
        return [torch.randint(2, model.config.vocab_size, (1, length)).to(device) for length in lengths]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [QUESTIONS[number % len(QUESTIONS)] for number in range(options.answers)]
    if tokenizer.chat_template:
        chats = ([{"role": "user", "content": text}] for text in texts)
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]


def compare(model: Any, prompts: Sequence[torch.Tensor], tokens: int, end: float) -> dict[str, list[int | None]]:
    """For each method, the first token of every answer that differs; None where none does. Stops when time is over."""
    found: dict[str, list[int | None]] = {name: [] for name in METHODS}
    fixed = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    slowest = 0.0  # prompts of all methods
    for ids in prompts:
        start = perf_counter()
        if start + slowest > end:
            break
        mask = torch.ones_like(ids)
        expected = model.generate(ids, attention_mask=mask, **fixed)[0]
        for name, method in METHODS.items():
            ours = lade.generate(model, ids, attention_mask=mask, lookahead=method, **fixed)[0]
            differing = (ours != expected).nonzero().flatten().tolist()
            found[name].append(differing[0] - ids.shape[1] if differing else None)
        slowest = max(slowest, perf_counter() - start)
    return found


def times_of(model: Any, cached: int, rounds: int) -> dict[int, float]:
    """Median milliseconds of passes by size, on the device's clock."""
    plan, device = lade.supports(model).require(), model.device
    graphs = device.type == "cuda" and not capture_refusal(model)
    pool = pool_of(model, device) if graphs else new_pool(model, EagerReplay)
    lane = Lane(GraphRunner(model, plan, model.generation_config, pool), SIZES, cached, 1)
    for number in range(rounds + 2):
        for size in SIZES:
            lane.run(size, counts=number >= 2)
    if pool.fusion_failed_in is not None:
        print("  passes are not fused: see the warning", flush=True)
    return {size: 1e3 * statistics.median(lane.device_s[size]) for size in SIZES}


def measured(options: argparse.Namespace, dtype: str, start: float, until: float) -> dict[str, Any]:
    """Everything in one dtype, of which a third of the time is for the model as it is."""
    device = torch.device(options.device)
    model = loaded(options, DTYPES[dtype], device)
    prompts = prompts_of(options, model, device)
    line: dict[str, Any] = {"dtype": dtype, "load_s": perf_counter() - start, "class": type(model).__name__}
    for name in ("as it is", "invariant"):
        begun = perf_counter()
        if name == "invariant":
            gc.collect()  # a cache of the passes that were timed, which would be in use
            lade.invariant(model)
            line["trial_s"] = perf_counter() - begun
        end = until if name == "invariant" else begun + (until - begun) / 3
        passes = times_of(model, options.cached, options.rounds)
        line[name] = {"passes_ms": passes, "differing": compare(model, prompts, options.tokens, end)}
        print(table_of([line]), flush=True)
    return line


def table_of(lines: Sequence[dict[str, Any]]) -> str:
    """The results for people."""
    heads = [f"{name} differ" for name in METHODS]
    rows = [f"{'dtype':9} {'model':10} " + " ".join(f"{head:>16}" for head in heads) + "   1 token   64 tokens"]
    for line in lines:
        for name in ("as it is", "invariant"):
            if name in line:
                found, times = line[name]["differing"], line[name]["passes_ms"]
                counts = [
                    f"{sum(each is not None for each in answers)} of {len(answers)}" for answers in found.values()
                ]
                cells = " ".join(f"{count:>16}" for count in counts)
                rows.append(f"{line['dtype']:9} {name:10} {cells} {times[1]:7.3f} ms {times[64]:8.3f} ms")
        if "error" in line:
            rows.append(f"{line['dtype']:9} {line['error']}")
    return "\n".join(rows)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description="Answers with the bits of model.generate, and what they cost.")
    parser.add_argument("--model", type=Path, help="folder of a model and its tokenizer")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="random weights, without --model")
    parser.add_argument("--inflate", type=float, help="parameters to inflate the model to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--cached", type=int, default=512, help="cached tokens of the passes that are timed")
    parser.add_argument("--rounds", type=int, default=10, help="passes of each size that count")
    parser.add_argument("--tiles", type=int, help="tiles of 64 keys in a span, to try others than the default")
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--out", type=Path, help="a JSON file; beside it the table, as .txt")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, save; 1 if an answer of an invariant model differs, or a part failed."""
    start, options = perf_counter(), arguments(words)
    if options.tiles is not None:
        from lade.backends.cuda_graphs.invariant import attention

        attention.TILES, attention.SPAN = options.tiles, options.tiles * attention.KEYS
    dtypes, lines = options.dtypes.split(","), list[dict[str, Any]]()
    for number, dtype in enumerate(dtypes):
        begun = perf_counter()
        until = begun + (start + options.limit_s - begun) / (len(dtypes) - number)
        try:
            lines.append(measured(options, dtype, begun, until))
        except Exception as error:  # noqa: BLE001 - the other dtype is measured, and what is known is saved
            lines.append({"dtype": dtype, "error": f"{type(error).__name__}: {error}"})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    table = table_of(lines)
    print(f"\n{table}\n{perf_counter() - start:.0f} s")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else options.device
        found = {"machine": machine, "torch": torch.__version__, "command": sys.argv, "lines": lines}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    answers = [each for line in lines if "invariant" in line for each in line["invariant"]["differing"].values()]
    return int(any("error" in line for line in lines) or any(each is not None for some in answers for each in some))


if __name__ == "__main__":
    sys.exit(main())
