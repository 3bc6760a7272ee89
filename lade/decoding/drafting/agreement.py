"""How likely the next token of a text is to come, where a row seems to follow that text: learned as it goes on."""

from __future__ import annotations

LONGEST_MATCH = 32
"""Agreement beyond so many tokens is not told apart."""

_HOPED = (1.2, 1.8, 2.6, 3.2, 3.6, 3.8, 3.9)
_DOUBTED = (0.4, 0.6, 1.0, 2.4)
_PRIOR_WEIGHT = 4.0
"""By the bit length of the agreement, 0 being the place behind a token that was exchanged for another: how many of
four tokens are expected to be the text's."""
_MEMORY = 64  # tokens that a likelihood is averaged over
_CONFIRMED = 7  # tokens that agree by chance in hardly any other text


class Agreement:
    """How likely an expected token is to come, by the number of tokens before it that came as expected."""

    def __init__(self) -> None:
        self._hits = list(_HOPED)
        self._weights = [_PRIOR_WEIGHT] * len(_HOPED)

    def probability(self, agreed: int) -> float:
        """Of the next token, after so many have agreed."""
        kind = _kind(agreed)
        return self._hits[kind] / self._weights[kind]

    def learn(self, agreed: int, hit: bool) -> None:
        """Take in whether the next token came as expected, after so many had."""
        kind, keep = _kind(agreed), 1 - 1 / _MEMORY
        self._hits[kind] = keep * self._hits[kind] + hit
        self._weights[kind] = keep * self._weights[kind] + 1

    def begin_text(self) -> None:
        """Another text begins: what was learned of earlier ones counts no more for it than what was hoped at first."""
        for kind, weight in enumerate(self._weights):
            share = min(1.0, _PRIOR_WEIGHT / weight)
            self._hits[kind], self._weights[kind] = share * self._hits[kind], share * weight

    def _expect(self, hits: tuple[float, ...]) -> None:
        """Forget what was learned about short agreements; so many of four tokens are expected to come."""
        self._hits[: len(hits)], self._weights[: len(hits)] = hits, [_PRIOR_WEIGHT] * len(hits)


class DoubtedAgreement(Agreement):
    """The same for a text that may have nothing to do with the row's.

    Some tokens of the row stand in any text, and what comes behind them then is something else. So once an expected
    token has not come, little is expected behind a few that agree, until more of them agree than do by chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self._confirmed = self._doubted = False

    def learn(self, agreed: int, hit: bool) -> None:
        """See `Agreement`."""
        if not self._confirmed:
            if hit and agreed >= _CONFIRMED:
                self._confirmed = True
                if self._doubted:
                    self._expect(_HOPED[: len(_DOUBTED)])
            elif not hit and not self._doubted:
                self._doubted = True
                self._expect(_DOUBTED)
        super().learn(agreed, hit)


def _kind(agreed: int) -> int:
    """Which lengths of agreement are counted together: 0, 1, 2 and 3, 4 to 7, ... and from `LONGEST_MATCH` on."""
    return min(agreed, LONGEST_MATCH).bit_length()
