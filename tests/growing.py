"""Controllers of a lone row, the row itself, and trees as they grow by the stages of a budget."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lade import Stats
from lade.decoding.drafting.controller import LARGEST, LARGEST_SHARED, Controller, ControllerState, PassCost
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.decoding.verify import Greedy
from lade_lab.fakes import ListCache


def grown(scores: Sequence[float], stages: Sequence[tuple[int, float]]) -> list[float]:
    """What is added along the stages, when nodes come in the order of their scores."""
    size = 1
    for most, least in stages:
        while size < min(most, len(scores)) and scores[size] > least:
            size += 1
        if size < most:
            break
    return list(scores[:size])


def begun(cost: PassCost, state: ControllerState | None = None, most: int = LARGEST) -> Controller:
    """A controller of a lone row, whose text begins."""
    controller = Controller(cost, state, most)
    controller.begin_texts(1)
    return controller


def sized(controller: Controller, scores: Sequence[float]) -> int:
    """How many of these nodes a lone row feeds."""
    controller.decide([scores])
    return controller.choose(scores)


def written(
    prompt: Sequence[int], length: int, drafter: Any, runner: Any, budget: Any = None, stats: Stats | None = None
) -> tuple[list[int], list[str], Stats]:
    """Decode a lone row greedily to a length; return its tokens, the name of each one's source, and stats."""
    row, stats = Row(prompt, drafter, Greedy(), lambda tokens: len(tokens) >= length), stats or Stats()
    loop = DecodeLoop([row], runner, ListCache(), stats, budget)
    names = [name for steps in loop.run() for step in steps for name in step.sources]
    return row.tokens, names, stats


def writer_of(text: Sequence[int], vocabulary: int) -> Callable[[Sequence[int]], int]:
    """What a model says that writes this text; of another one it knows no more than anybody."""

    def follow(known: Sequence[int]) -> int:
        on_the_way = len(known) < len(text) and list(known) == list(text[: len(known)])
        return text[len(known)] if on_the_way else (7 * known[-1] + len(known)) % vocabulary

    return follow


def lower_hull(cost: StepCost) -> list[float]:
    """Seconds on the lower convex hull by size, 0 to `LARGEST_SHARED`; entry 0 repeats entry 1."""
    return np.interp(range(LARGEST_SHARED + 1), cost.corners, [cost.table[size] for size in cost.corners]).tolist()
