"""Which of the prompts that wait are read in one pass."""

from __future__ import annotations

from collections.abc import Sequence

from lade.model.runner import EagerRunner
from lade.serving.active import ActiveRequest
from lade.serving.reuse import Reuse


def first_together(line: Sequence[ActiveRequest], most: int, runner: EagerRunner, reuse: Reuse) -> list[ActiveRequest]:
    """The first ones of a line whose texts are fed together, whole and from the beginning on.

    Texts that have been begun are fed by themselves, and so is what an image is in, whose logprobs are wanted, what is
    on the shelf, or will be when those before it have been fed.

    Args:
        line: in the order in which they are fed.
        most: tokens to feed, padding included.
        runner: feeds them.
        reuse: knows what is on the shelf.
    """
    group: list[ActiveRequest] = []
    for active in line if runner.pads else ():
        begun = active.row is not None or active.pinned or active.prompt_logprobs is not None
        if begun or reuse.knows(active) or any(reuse.will_know(active, other) for other in group):
            break
        if runner.padded([len(each.text) for each in (*group, active)]) > most:
            break
        group.append(active)
    return group
