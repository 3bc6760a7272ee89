"""An answer to watch: a method's steps, and beside them the pace of one token a step, both at their measured times."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from lade.bench.results import Replay, Results


@dataclass(frozen=True)
class LaneStep:
    """What appears at once.

    Attributes:
        pieces: text of each token.
        sources: who proposed each.
        seconds: that it took.
    """

    pieces: list[str]
    sources: list[str]
    seconds: float


@dataclass(frozen=True)
class Lane:
    """One side.

    Attributes:
        name: of the method.
        note: where its times are from, if not from watching it.
        steps: the first one is prefill.
    """

    name: str
    note: str
    steps: list[LaneStep]

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def sources(self) -> list[str]:
        """All that occur, in the order of their first token."""
        return list(dict.fromkeys(source for step in self.steps for source in step.sources))


@dataclass(frozen=True)
class Show:
    """One answer.

    Attributes:
        workload, prompt: which.
        lanes: the method, and if its pace is known the one that makes a token a step.
    """

    workload: str
    prompt: str
    lanes: list[Lane]

    @property
    def seconds(self) -> float:
        """Of the slower lane."""
        return max(lane.seconds for lane in self.lanes)


def shows_of(results: Results, base: str | None) -> list[Show]:
    """All recorded answers of methods that make several tokens in a step; of others if there are only those.

    Beside each stands what the base was seen to do with the same prompt; where that was not recorded, the same tokens
    one a step, each at the base's mean step time on this prompt.

    Args:
        results: a run.
        base: the method that feeds one token a step.
    """
    found = [replay for replay in results.replays if replay.steps]
    several = [replay for replay in found if any(len(step["pieces"]) > 1 for step in replay.steps)]
    return [_show(replay, results, base) for replay in several or found]


def _show(replay: Replay, results: Results, base: str | None) -> Show:
    own = _lane(replay)
    if base is None or replay.method == base:
        return Show(replay.workload, replay.prompt, [own])
    beside = [each for each in results.replays if (each.workload, each.prompt) == (replay.workload, replay.prompt)]
    watched = next((_lane(each) for each in beside if each.method == base and each.steps), None)
    other = watched or _paced(own, replay, results, base)
    return Show(replay.workload, replay.prompt, [own, other] if other else [own])


def _lane(replay: Replay) -> Lane:
    steps = [LaneStep(list(step["pieces"]), list(step["sources"]), float(step["seconds"])) for step in replay.steps]
    return Lane(replay.method, "", steps)


def _paced(own: Lane, replay: Replay, results: Results, base: str) -> Lane | None:
    samples = [
        sample for sample in results.of(base, replay.workload) if sample.prompt == replay.prompt and sample.steps
    ]
    if not samples:
        return None
    step_s = fmean(sample.decode_s / sample.steps for sample in samples)
    prefill_s = fmean(sample.prefill_s for sample in samples)
    pieces = [piece for step in own.steps for piece in step.pieces]
    sources = ["prefill", *["bonus"] * (len(pieces) - 1)]
    steps = [
        LaneStep([piece], [source], step_s if place else prefill_s)
        for place, (piece, source) in enumerate(zip(pieces, sources, strict=False))
    ]
    return Lane(base, "each step at its mean time on this prompt", steps)
