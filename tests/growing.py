"""Trees as they grow by the stages of a budget."""

from collections.abc import Sequence


def grown(scores: Sequence[float], stages: Sequence[tuple[int, float]]) -> list[float]:
    """What is added along the stages, when nodes come in the order of their scores."""
    size = 1
    for most, least in stages:
        while size < min(most, len(scores)) and scores[size] > least:
            size += 1
        if size < most:
            break
    return list(scores[:size])
