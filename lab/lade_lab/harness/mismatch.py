"""Divergence of two answers, and whether rounding explains it.

A pass over several tokens does not round like a pass over one. Where the two best scores lie within that rounding, the
choice between them may go either way: a near tie. Anything else is a mistake in one of the two methods.

When sampling, transformers draws `argmax(p / q)` with exponential noise q, so the token drawn is the one with the best
`score - log q`, and the same test is made on these sums. The noise is drawn again from the seed: one row for each
token of the text, just as the method did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.hf.call import original_generate
from lade_lab.harness.arms import Place, generate_arguments, inputs_of, seeded
from lade_lab.results import Mismatch, Settings

NEAR_ULPS = {torch.bfloat16: 8.0, torch.float16: 8.0}
NEAR_ULPS_OTHERWISE = 64.0
"""Units in the last place, of a score, within which rounding explains another choice. In 16 bits the sums inside a
layer are taken in float32, and what is rounded is what passes between layers; in float32 the sums themselves round."""


@dataclass(frozen=True)
class Scores:
    """Scores of the tokens that may follow a text, `[V]` float64.

    Attributes:
        seen: what decides between them: logits after the processors, with the noise if the token is drawn.
        raw: logits before; their size says how they round.
    """

    seen: torch.Tensor
    raw: torch.Tensor


class Judge:
    """Compares answers with those of the reference."""

    def __init__(self, model: PreTrainedModel, settings: Settings, reference: str) -> None:
        self._model: Any = model
        self._settings, self._reference = settings, reference

    def compare(
        self, place: Place, method: str, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
    ) -> Mismatch | None:
        """None where the answers are equal."""
        start = first_difference(expected, found)
        if start is None:
            return None
        pair = [answer[start] if start < len(answer) else None for answer in (expected, found)]
        scores: list[float | None] = [None, None]
        ulps = None
        if None not in pair:
            scored = self.scores([*prompt, *expected[:start]], place.seed, drawn=start)
            scores = [_finite(float(scored.seen[token])) for token in pair]
            if None not in scores:
                ulps = self._ulps(scored, [int(token) for token in pair if token is not None])
        return Mismatch(
            **asdict(place),
            method=method,
            reference=self._reference,
            place=start,
            expected=pair[0],
            found=pair[1],
            expected_score=scores[0],
            found_score=scores[1],
            ulps=ulps,
            near_tie=ulps is not None and ulps <= NEAR_ULPS.get(self._model.dtype, NEAR_ULPS_OTHERWISE),
        )

    def scores(self, text: Sequence[int], seed: int, drawn: int) -> Scores:
        """Return the scores of the next token after one pass over a text.

        Args:
            text: prompt and answer so far.
            seed: of the answer.
            drawn: how many of its tokens were drawn before.
        """
        with seeded(seed, self._model), original_generate(self._model) as generate:
            output: Any = generate(
                **inputs_of(text, self._model),
                **generate_arguments(self._settings),
                max_new_tokens=1,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
            )
        seen, raw = output.scores[0][0].double(), output.logits[0][0].double()
        temperature = self._settings.temperature
        if temperature is not None:  # back to the size of logits, whose rounding is what matters
            seen = temperature * (seen - self._noise(output.scores[0], seed, drawn).log())
        return Scores(seen.cpu(), raw.cpu())

    def _noise(self, like: torch.Tensor, seed: int, drawn: int) -> torch.Tensor:
        """The exponential noise `[V]` of the draw after the first `drawn` ones."""
        with seeded(seed, self._model):
            noise = torch.empty_like(like, dtype=torch.float32)
            for _ in range(drawn + 1):
                noise.exponential_(1)
        return noise[0].double()

    def _ulps(self, scores: Scores, pair: Sequence[int]) -> float:
        unit = unit_of(max(abs(float(scores.raw[token])) for token in pair), self._model.dtype)
        return abs(float(scores.seen[pair[0]] - scores.seen[pair[1]])) / unit


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Number of the first token that differs, be it that one of the texts has ended; None where they are equal."""
    if list(expected) == list(found):
        return None
    pairs = zip(expected, found, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found)))


def unit_of(size: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a number of this size."""
    information = torch.finfo(dtype)
    return information.eps * 2.0 ** math.floor(math.log2(max(size, information.tiny)))


def _finite(score: float) -> float | None:
    """None for a token that top-k or top-p left out."""
    return score if math.isfinite(score) else None
