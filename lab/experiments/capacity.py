"""Capacity estimate: cost of an engine's passes by rows, and simulated waiting times by load.

Measures first: passes and tokens of one engine with 1, 2, 4, ... rows. Then requests arrive at random in a simulation
that takes these costs, on one replica and on several; one load is tried on the engine, too, with the same arrivals.

Usage: python lab/experiments/capacity.py [rows] [tokens] [requests] [--model NAME]
"""

import argparse
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lade import Engine, LookaheadConfig, Memory
from lade.cli.loading.load import load
from lade.cli.options.model import Loading
from lade.cli.terminal import terminal
from lade.embedded.files import prompts

LOADS = (0.25, 0.5, 0.75, 0.9, 1.1)
TRIED = 0.5


@dataclass(frozen=True)
class Cost:
    """Cost of a pass in seconds, tokens per row, and prefill seconds per token."""

    pass_s: float
    per_step: float
    prefill_s: float


def measured(model, texts, rows, tokens):
    """Measure the cost of passes over a number of rows."""
    with Engine(model, max_rows=rows) as engine:
        for _ in range(2):  # the first one learns what steps cost
            before = engine.snapshot()
            lookahead = LookaheadConfig(memory=Memory())
            asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "lookahead": lookahead}
            for handle in [engine.add(texts[k % len(texts)], **asked) for k in range(rows)]:
                handle.result()
        now = engine.snapshot()

    def sums(name):
        return getattr(now, name) - getattr(before, name)

    per_step = (sums("new_tokens") - rows) / sums("steps")
    return Cost(sums("decode_s") / sums("passes"), per_step, sums("prefill_s") / sums("prompt_tokens"))


def between(costs, rows):
    """Interpolate between two measured numbers of rows."""
    low, high = max(each for each in costs if each <= rows), min(each for each in costs if each >= rows)
    part = (rows - low) / max(1, high - low)
    mixed = [a + part * (b - a) for a, b in zip(vars(costs[low]).values(), vars(costs[high]).values(), strict=True)]
    return Cost(*mixed)


def arrivals(rate, count, texts, tokens, seed=0):
    """When, which prompt, and how many tokens of answer: exponential gaps, half to one and a half times as many."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        found.append((now, draw.randrange(len(texts)), draw.randint(tokens // 2, 3 * tokens // 2)))
    return found


def simulated(costs, asked, texts, rows, replicas):
    """Seconds to the first and to the last token of each request, each replica taking every so-manyth."""
    found = []
    for own in (asked[number::replicas] for number in range(replicas)):
        found += _one(costs, own, texts, rows)
    return found


def _one(costs, asked, texts, rows):
    ahead, active, now, found = list(asked), [], 0.0, []
    while ahead or active:
        if not active and ahead[0][0] > now:
            now = ahead[0][0]
        while ahead and ahead[0][0] <= now and len(active) < rows:
            came, text, tokens = ahead.pop(0)
            now += costs[1].prefill_s * len(texts[text])
            active.append([came, now, tokens - 1.0])
        cost = between(costs, len(active))
        now += cost.pass_s
        for row in active:
            row[2] -= cost.per_step
        found += [(first - came, now - came) for came, first, left in active if left <= 0]
        active = [row for row in active if row[2] > 0]
    return found


def tried(model, asked, texts, rows):
    """The same on an engine."""

    def waited(came, handle):
        handle.result()
        return (handle.queue_s or 0) + (handle.prefill_s or 0), time.perf_counter() - came

    with Engine(model, max_rows=rows, max_waiting=len(asked)) as engine, ThreadPoolExecutor(len(asked)) as pool:
        start, found = time.perf_counter(), []
        for came, text, tokens in asked:
            time.sleep(max(0.0, start + came - time.perf_counter()))
            lookahead = LookaheadConfig(memory=Memory())
            handle = engine.add(texts[text], max_new_tokens=tokens, min_new_tokens=tokens, lookahead=lookahead)
            found.append(pool.submit(waited, start + came, handle))
        return [each.result() for each in found]


def told(found):
    """Medians and nineteen in twenty, in seconds."""
    firsts, lasts = zip(*found, strict=True)
    cells = [statistics.median(firsts), statistics.quantiles(firsts, n=20)[-1]]
    cells += [statistics.median(lasts), statistics.quantiles(lasts, n=20)[-1]]
    return " | ".join(f"{seconds:.2f}" for seconds in cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", type=int, default=16, help="that an engine may have")
    parser.add_argument("tokens", nargs="?", type=int, default=100, help="of an answer")
    parser.add_argument("requests", nargs="?", type=int, default=200, help="that arrive at a replica")
    parser.add_argument("--model", help="a folder, or a hub id; the embedded model by default")
    given = parser.parse_args()
    most, tokens, count = given.rows, given.tokens, given.requests
    with terminal() as term:
        loaded = load(Loading(model=given.model), term=term, pack=None, images=None)
    texts = [loaded.tokenizer(text)["input_ids"] for text in prompts()]
    sizes = [2**power for power in range(most.bit_length())]
    costs = {rows: measured(loaded.model, texts, rows, tokens) for rows in sizes}
    print("| rows | pass, ms | tokens a row and pass | tokens/s | tokens/s of a row |\n|---|---|---|---|---|")
    for rows, cost in costs.items():
        each = cost.per_step / cost.pass_s
        print(f"| {rows} | {1e3 * cost.pass_s:.2f} | {cost.per_step:.2f} | {rows * each:.0f} | {each:.0f} |")
    print(f"\nprompts: {1e3 * costs[1].prefill_s:.3f} ms a token")
    full = max(rows * cost.per_step / cost.pass_s for rows, cost in costs.items()) / tokens
    print(f"one replica can answer {full:.2f} requests/s of {tokens} tokens, prompts apart\n")
    print("| load of a replica | replicas | requests/s | first token: median | 95 % | last: median | 95 % |")
    print("|---|---|---|---|---|---|---|")
    for load_of in LOADS:
        for replicas in (1, 2, 4):
            rate = load_of * full * replicas
            asked = arrivals(rate, count * replicas, texts, tokens)
            found = simulated(costs, asked, texts, most, replicas)
            print(f"| {load_of:.2f} | {replicas} | {rate:.2f} | {told(found)} |")
    asked = arrivals(TRIED * full, count, texts, tokens)
    print(f"\ntried at {TRIED}: simulated {told(simulated(costs, asked, texts, most, 1))}")
    print(f"            the engine {told(tried(loaded.model, asked, texts, most))}")


if __name__ == "__main__":
    main()
