"""A fixed request, greedy and sampled: how long it takes, and whether its answers stay the same."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from lade_lab.live_server import COMPLETIONS, BrokenAnswerError, Client
from lade_lab.soak.process import processor_s

PROMPT = "def merge_sorted_lists(first, second):\n"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 11}
ROUNDS = 3


class Probed(NamedTuple):
    """One probe.

    Attributes:
        seconds: least time of both answers together, of a few rounds.
        processor_s: least processor time of the server for them.
        greedy, sampled: tokens of the answers.
    """

    seconds: float
    processor_s: float
    greedy: list[int]
    sampled: list[int]


def probe(url: str, pid: int) -> Probed:
    """Ask for both answers a few times, of which the fastest counts: others use the machine, too.

    Raises:
        BrokenAnswerError: an answer is missing, or differs from round to round.
    """
    client, times, processor, answers = Client(url), list[float](), list[float](), list[list[list[int]]]()
    for _ in range(ROUNDS):
        start, used = time.perf_counter(), processor_s(pid)
        replies = [client.post(COMPLETIONS, {**body, "return_token_ids": True}) for body in (GREEDY, SAMPLED)]
        times.append(time.perf_counter() - start)
        processor.append(processor_s(pid) - used)
        if any(reply.status != 200 for reply in replies):
            raise BrokenAnswerError(f"the probe has status {[reply.status for reply in replies]}")
        answers.append([reply.json["choices"][0]["token_ids"] for reply in replies])
    client.close()
    if any(each != answers[0] for each in answers):
        raise BrokenAnswerError("the probe's answers differ from one round to the next")
    return Probed(min(times), min(processor), *answers[0])
