"""Controllers of a lone row, and trees as they grow by the stages of a budget."""

from collections.abc import Sequence

from lade.decoding.drafting.controller import LARGEST, Controller, ControllerState, PassCost


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
