"""Which prompts are fed in one pass: padding costs tokens, and a pass of its own costs as much as some tokens do."""

from __future__ import annotations

from collections.abc import Mapping

PASS_TOKENS = {"cpu": 64, "cuda": 256}
"""What a pass costs beside its tokens, in tokens, by the type of device. On a CPU three models of 0.3 to 134 million
parameters took 45 to 75. A GPU reads all weights in the time in which it multiplies some hundred tokens by them."""


def grouped(prompts: Mapping[int, int], pass_tokens: int) -> list[set[int]]:
    """Lengths that are fed together, each prompt padded to the longest of its group, so that all costs least.

    Args:
        prompts: how many prompts there are of each length.
        pass_tokens: what a pass costs beside its tokens, in tokens.

    Returns:
        The lengths of each pass, shorter prompts first. A group costs `pass_tokens`, and its prompts times its longest.
    """
    lengths = sorted(prompts)
    best = [(0, 0)]  # of the n shortest lengths: what they cost, and how many of them are in groups before the last
    for end, longest in enumerate(lengths, start=1):
        rows, choices = 0, []
        for first in range(end - 1, -1, -1):
            rows += prompts[lengths[first]]
            choices.append((best[first][0] + pass_tokens + rows * longest, first))
        best.append(min(choices))
    groups, end = [], len(lengths)
    while end:
        first = best[end][1]
        groups.append(set(lengths[first:end]))
        end = first
    return groups[::-1]
