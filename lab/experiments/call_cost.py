"""CPU time of whole calls of few tokens, `model.generate`'s beside ours.

    python lab/experiments/call_cost.py --model FOLDER [--prompt-tokens 20 --prompt-tokens 300] [--profile plain]

The arms take turns, and the least of many calls counts besides the median, so that a busy machine does not matter much.
With `--profile ARM` the functions in which that arm's calls spend their time are listed instead.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import lade
from lade_lab.harness.arms import PLAIN

ARMS: dict[str, lade.LookaheadConfig | str | None] = {"generate": None, "plain": PLAIN, "adaptive": "auto"}
Call = Callable[[], object]


def call_of(model: Any, arm: str, tokens: int, new_tokens: int) -> Call:
    """A call of this arm, with the same prompt every time."""
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    arguments |= {"max_new_tokens": new_tokens, "do_sample": False}
    if arm == "generate":
        return lambda: model.generate(**arguments)
    return lambda: lade.generate(model, lookahead=ARMS[arm], **arguments)  # type: ignore[arg-type]


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """CPU time of each call, ascending."""
    taken: dict[str, list[float]] = {arm: [] for arm in calls}
    for _ in range(rounds):
        for arm, call in calls.items():
            start = process_time()
            call()
            taken[arm].append(1e3 * (process_time() - start))
    return {arm: sorted(each) for arm, each in taken.items()}


def print_profile(call: Call, rounds: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(rounds):
        call()
    profile.disable()
    pstats.Stats(profile).sort_stats("cumulative").print_stats(90)


def main(
    model: Annotated[Path, typer.Option(help="folder of a causal language model")],
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="length of the prompt; may be repeated")] = None,
    new_tokens: Annotated[list[int] | None, typer.Option(help="tokens to write; may be repeated")] = None,
    rounds: int = 200,
    profile: Annotated[str, typer.Option(help=f"one of {', '.join(ARMS)}")] = "",
) -> None:
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for tokens in prompt_tokens or [20, 300]:
        for new in new_tokens or [1, 2]:
            calls = {arm: call_of(loaded, arm, tokens, new) for arm in ARMS}
            milliseconds(calls, 3)  # measures the step cost, reads machine code
            if profile:
                print_profile(calls[profile], rounds)
                continue
            taken = milliseconds(calls, rounds)
            least = ", ".join(f"{arm} {each[0]:.2f} ({median(each):.2f})" for arm, each in taken.items())
            print(f"{tokens} tokens, {new} new: {least} ms, least (median)", flush=True)


if __name__ == "__main__":
    typer.run(main)
