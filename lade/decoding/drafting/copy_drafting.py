"""Draft by copying: continuations of a predicted text, or of earlier text of the row, with learned agreement.

The place in that text is behind the longest tail of the row's text that it has. While the row follows it, the next
tokens are guessed from there; when the row departs, the place is sought again after every token, so that it is found
behind each change. How likely the next token is to be the one expected depends on how many have agreed so far; that is
learned online, by the length of the agreement, and decides how many are worth feeding.

Source of the idea: drafts from where the last tokens stood before: A. Saxena, "Prompt Lookup Decoding" (2023), and
SuffixDecoding, arXiv 2411.04975; texts that the caller expects: OpenAI's predicted outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from lade.decoding.drafting.drafter import Guess
from lade.decoding.drafting.suffix_index import same_beginning

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
        """Return the probability that the next token agrees after `agreed` tokens did."""
        kind = _kind(agreed)
        return self._hits[kind] / self._weights[kind]

    def learn(self, agreed: int, hit: bool) -> None:
        """Observe whether the next token agreed (`hit`) after `agreed` tokens did."""
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


LONGEST_CHAIN = 64
"""Tokens guessed at a time."""
ANCHOR = 6
"""Tokens by which a copy is recognised."""
_PLACES = 64  # places where the last token stands that are looked at
_AFTERMATH = 16  # tokens after a departure in which the text may go on as if one token had been exchanged for another
_BEGINNING = 4  # tokens that are supposed to have agreed before the first one
_FOLLOWING = 4  # tokens that agree where one that does not may be an exchange
_FAINTEST = 0.02  # what is less likely to be accepted is not guessed


class Place(NamedTuple):
    """Where the row's text may go on in the text that is expected."""

    start: int
    """Number of the token expected next."""
    agreed: int
    """Tokens before it that came as expected."""


class Followed(ABC):
    """A `Source` for one row: what comes next in a text, while the row follows it.

    Args:
        text: ids.
        excluded: ids that are never guessed (end of sequence, padding): guesses end before them.
        agreement: learns how likely its tokens are to come.

    Attributes:
        name: of its guesses in `Step.sources`.
    """

    name: str

    def __init__(self, text: Sequence[int], excluded: Collection[int] = (), agreement: Agreement | None = None) -> None:
        self._text, self._excluded = list(text), frozenset(excluded)
        self._agreement = Agreement() if agreement is None else agreement
        self._places: list[Place] = []
        self._length, self._last = 0, -1  # of the row's text when these were found, and its last token
        self._exchanged = 0  # number of the token expected next if each since the departure stands for one of the text
        self._aftermath = 0  # tokens for which that is thought possible

    @abstractmethod
    def _behind_tail(self, context: Sequence[int]) -> Place | None:
        """Behind a long tail of `context` that the text has."""

    def guesses(self, context: Sequence[int]) -> list[Guess]:
        """See `Source`: what follows each place at which the row may be."""
        if self._length > len(context) or (self._length and context[self._length - 1] != self._last):
            self._places, self._aftermath = self._found(context), 0  # another text than was expected
        elif new := context[self._length :]:
            agreed = [self._learned(place, new) for place in self._places]
            self._places = self._after(new, context, agreed)
        self._length, self._last = len(context), context[-1]
        return [guess for place in self._places for guess in self._guesses_from(place)]

    def _learned(self, place: Place, new: Sequence[int]) -> int:
        """Take in how many of the `new` tokens, from the first one on, were those that a place had made expect."""
        agreed = 0
        for came, expected in zip(new, self._text[place.start : place.start + len(new)], strict=False):
            self._agreement.learn(place.agreed + agreed, hit=came == expected)
            if came != expected:
                break
            agreed += 1
        return agreed

    def _after(self, new: Sequence[int], context: Sequence[int], agreed: Sequence[int]) -> list[Place]:
        """The places after `new` tokens at the end of `context`, of which so many were those of each place."""
        self._exchanged += len(new)
        self._aftermath -= len(new)
        if self._places:
            place = self._places[0]
            if agreed[0] == len(new):
                return [Place(place.start + len(new), place.agreed + len(new))]
            if place.agreed >= _FOLLOWING:
                self._exchanged, self._aftermath = place.start + len(new), _AFTERMATH
        return self._found(context)

    def _found(self, context: Sequence[int]) -> list[Place]:
        """Behind the longest tail of `context` that the text has, and where an exchange of tokens would lead to."""
        places = [] if (tail := self._behind_tail(context)) is None else [tail]
        if self._aftermath > 0 and (tail is None or tail.start != self._exchanged):
            places.append(Place(self._exchanged, 0))
        return [place for place in places if place.start < len(self._text)]

    def _agreeing_before(self, number: int, context: Sequence[int]) -> int:
        """How many tokens at the end of `context` are those of the text up to that number."""
        length, most = 0, min(LONGEST_MATCH, number + 1, len(context))
        while length < most and context[-1 - length] == self._text[number - length]:
            length += 1
        return length

    def _guesses_from(self, place: Place) -> Iterator[Guess]:
        scores, score = list[float](), 1.0
        for number in range(min(LONGEST_CHAIN, len(self._text) - place.start)):
            score *= self._agreement.probability(place.agreed + number)
            if score < _FAINTEST:
                break
            scores.append(score)
        tokens = self._text[place.start : place.start + len(scores)]
        if not self._excluded.isdisjoint(tokens):
            tokens = list(takewhile(lambda token: token not in self._excluded, tokens))
        if tokens:
            yield Guess(tokens, self.name, scores[: len(tokens)])


class Prediction(Followed):
    """Guesses from a text that is expected as the answer."""

    name = "prediction"

    def __init__(self, text: Sequence[int], excluded: Collection[int] = ()) -> None:
        super().__init__(text, excluded, DoubtedAgreement())
        self._numbers: dict[int, list[int]] = defaultdict(list)
        for number, token in enumerate(self._text):
            self._numbers[token].append(number)

    def guesses(self, context: Sequence[int]) -> list[Guess]:
        """See `Followed`; the answer may begin as the text does."""
        if not self._length and len(context) > 1:  # prefill has yielded one token
            self._length, self._last, self._places = len(context) - 1, context[-2], [Place(0, _BEGINNING)]
        return super().guesses(context)

    def _behind_tail(self, context: Sequence[int]) -> Place | None:
        numbers = self._numbers.get(context[-1], [])
        middle = bisect_left(numbers, self._exchanged)
        near = numbers[max(0, middle - _PLACES // 2) : middle + _PLACES // 2]
        found = [
            (self._agreeing_before(number, context), -abs(number + 1 - self._exchanged), number) for number in near
        ]
        if not found:
            return None
        length, _, number = max(found)
        return Place(number + 1, length)


class OwnText(Followed):
    """Guesses that the row copies from its prompt, or from what it has written.

    A memory knows what followed the last tokens, and guesses a few more; copies go on for long. They are looked for
    behind so many tokens that stood there before that hardly anything else follows.

    Args:
        before: ids of a text before the prompt's, such as what an encoder was fed.
        excluded: see `Followed`.
        agreement: likewise.
    """

    name = "text"

    def __init__(
        self, before: Sequence[int] = (), excluded: Collection[int] = (), agreement: Agreement | None = None
    ) -> None:
        super().__init__((), excluded, agreement)
        self._before = len(before)
        self._context: Sequence[int] = ()
        self._ends: dict[tuple[int, ...], int] = {}  # number of the last token of each n-gram
        self._tail: tuple[int, ...] = ()  # the row's last n-gram the last time
        self._extend(before)

    def guesses(self, context: Sequence[int]) -> list[Guess]:
        """See `Followed`; a list that was given the last time has grown since, and that is all."""
        if context is self._context and not self._places and ANCHOR <= self._length == len(context) - 1:
            return self._sought(context)
        if context is not self._context:
            same = same_beginning(self._text, context, self._before)
            del self._text[self._before + same :]
            self._context = context
        self._extend(context[len(self._text) - self._before :])
        self._tail = tuple(context[-ANCHOR:])
        return super().guesses(context)

    def _sought(self, context: Sequence[int]) -> list[Guess]:
        """The same by the shortest way, where the row follows nothing and one token has come: so are most steps.

        As long as an exchange is thought possible there is a place, so none is here.
        """
        token, last = context[-1], len(self._text) - 1
        self._text.append(token)
        self._ends[self._tail] = last
        self._tail = tuple(context[-ANCHOR:])
        self._length, self._last = self._length + 1, token
        if self._tail not in self._ends:
            return []
        self._places = self._found(context)
        return [guess for place in self._places for guess in self._guesses_from(place)]

    def _extend(self, tokens: Sequence[int]) -> None:
        text, first = self._text, len(self._text)
        text += tokens
        for end in range(max(first, ANCHOR), len(text)):  # of what the text goes on behind
            self._ends[tuple(text[end - ANCHOR : end])] = end - 1

    def _behind_tail(self, context: Sequence[int]) -> Place | None:
        number = self._ends.get(tuple(context[-ANCHOR:]))
        if number is None or number >= len(self._text) - 1:
            return None
        agreed = self._agreeing_before(number, context)
        return Place(number + 1, agreed) if agreed >= ANCHOR else None
