"""Speed of the first call of a new process on a model never seen, from some token on.

    python lab/experiments/first_call.py --model FOLDER --prompts FILE.jsonl [--inflate 100e6] [--rounds 8] [--start 50]

Each call is made by a process of its own with an empty cache folder, so that pass costs are measured in it.
`model.generate` and `lade.generate` take turns, another one first each time. Prints tokens per second from token
`--start` to the last, and the seconds until there, which include loading and measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import lade
from lade_lab.inflation import inflate

ARMS = ("generate", "default")


class Times(BaseStreamer):
    """Notes how many tokens there were, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def put(self, value: torch.Tensor) -> None:
        """Note new tokens; the prompt is the first of them."""
        self.seen.append(((self.seen[-1][0] if self.seen else 0) + value.numel(), perf_counter()))

    def end(self) -> None:
        """Do nothing."""

    def rate_from(self, start: int) -> tuple[float, float]:
        """Return tokens per second from token `start` of the answer on, and the time when there were as many."""
        prompt = self.seen[0][0]
        tokens, began = next((tokens, at) for tokens, at in self.seen if tokens - prompt >= start)
        last, ended = self.seen[-1]
        return (last - tokens) / (ended - began), began


def call(args: argparse.Namespace) -> None:
    """Make one call in this process, and print its figures as JSON."""
    began = perf_counter()
    torch.set_num_threads(1)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(args.model),
        AutoModelForCausalLM.from_pretrained(args.model).eval(),
    )
    if args.inflate:
        model = inflate(model, int(args.inflate))
    prompt = json.loads(args.prompts.read_text(encoding="utf-8").splitlines()[args.number])["prompt"]
    times = Times()
    given: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None}
    given |= {"streamer": times, "pad_token_id": 0, **tokenizer(prompt, return_tensors="pt")}
    given.pop("token_type_ids", None)
    model.generate(**given) if args.arm == "generate" else lade.generate(model, **given)
    rate, at = times.rate_from(args.start)
    print(json.dumps([rate, at - began]))


def main() -> None:
    """Read the options, make the calls, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="a line of JSON with a field prompt for each")
    parser.add_argument("--inflate", type=float, default=0.0, help="parameters to pad the model to")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--start", type=int, default=50)
    parser.add_argument("--arm", choices=ARMS, help="make one call in this process")
    parser.add_argument("--number", type=int, default=0, help="the prompt of this call")
    args = parser.parse_args()
    if args.arm:
        call(args)
        return
    found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            with TemporaryDirectory() as folder:
                command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm, "--number", str(number)]
                done = subprocess.run(
                    command, env={**os.environ, "XDG_CACHE_HOME": folder}, check=True, capture_output=True, text=True
                )
            found[arm].append(json.loads(done.stdout.splitlines()[-1]))
    ratios = sorted(ours[0] / theirs[0] for ours, theirs in zip(found["default"], found["generate"], strict=True))
    for arm, calls in found.items():
        rate, until = (statistics.median(column) for column in zip(*calls, strict=True))
        print(f"{arm:9} {rate:7.1f} tokens/s from token {args.start} on, {until:.2f} s until there")
    print(f"default over generate: {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
