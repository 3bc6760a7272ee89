"""Draft by copying: continuations of a predicted text, or of earlier text of the row, with learned agreement.

The cursor in the copied text is after its longest match with the suffix of the row's text. While the row follows the
copied text, drafts continue from the cursor; when the row departs, the match is searched again after every token, so it
is found after each edit. The probability that the next token agrees depends on the number of tokens that agreed so far.
It is learned online by that number, and decides how many tokens are worth feeding.

Sources: drafts from earlier occurrences of the last tokens: A. Saxena, "Prompt Lookup Decoding" (2023), and
SuffixDecoding, arXiv 2411.04975; texts expected by the caller: OpenAI's predicted outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from lade.decoding.drafting.drafter import LONGEST_CHAIN, Guess
from lade.decoding.kernels.native_tree import TAKEN_BACK


def same_beginning(known: list[int], tokens: Sequence[int], before: int = 0) -> int:
    """Return the length of the common prefix of a former text and the present one.

    Only the last `TAKEN_BACK` tokens are compared. The first `before` tokens of `known` are not in `tokens`.
    """
    count = len(known) - before
    late = max(0, min(count, len(tokens)) - TAKEN_BACK)
    rest = known[before + late :]
    if rest == list(tokens[late:count]):
        return count
    pairs = zip(rest, tokens[late:], strict=False)
    return late + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


_PRIOR = (1.2, 1.8, 2.6, 3.2, 3.6, 3.8, 3.9)
_DOUBTED_PRIOR = (0.4, 0.6, 1.0, 2.4)
PRIOR_WEIGHT = 4.0
"""Prior hits out of `PRIOR_WEIGHT` tokens, by the bit length of the agreement; 0 after a substitution. Agreements
longer than those of the doubted prior hardly ever occur by chance."""
KEPT = 1 - 1 / 64
"""Decay of the running means, per token: they are over some 64 tokens, as many as a guess has at most."""
LONGEST_MATCH = 1 << (len(_PRIOR) - 2)
"""Bound of the search for a match: longest agreement that is measured, in tokens, and occurrences of the last token
that are examined, on either side of where a substitution would have led."""


class Agreement:
    """Probability that the next token of a copied text agrees, by the number of tokens that agreed before it."""

    def __init__(self) -> None:
        self._hits = list(_PRIOR)
        self._weights = [PRIOR_WEIGHT] * len(_PRIOR)

    def probability(self, agreed: int) -> float:
        """Return the probability that the next token agrees after `agreed` tokens did."""
        kind = _kind(agreed)
        return self._hits[kind] / self._weights[kind]

    def learn(self, agreed: int, hit: bool) -> None:
        """Observe whether the next token agreed (`hit`) after `agreed` tokens did."""
        kind = _kind(agreed)
        self._hits[kind] = KEPT * self._hits[kind] + hit
        self._weights[kind] = KEPT * self._weights[kind] + 1

    def _expect(self, hits: tuple[float, ...]) -> None:
        """Reset short agreements to prior hits."""
        self._hits[: len(hits)], self._weights[: len(hits)] = hits, [PRIOR_WEIGHT] * len(hits)


class DoubtedAgreement(Agreement):
    """Agreement with a text that may be unrelated to the row's.

    Some tokens of the row occur in any text, by chance. So after the first miss short agreements get a low prior, until
    one is longer than chance explains.
    """

    def __init__(self) -> None:
        super().__init__()
        self._confirmed = self._doubted = False

    def learn(self, agreed: int, hit: bool) -> None:
        """See `Agreement`."""
        if not self._confirmed:
            if hit and _kind(agreed + 1) >= len(_DOUBTED_PRIOR):
                self._confirmed = True
                if self._doubted:
                    self._expect(_PRIOR[: len(_DOUBTED_PRIOR)])
            elif not hit and not self._doubted:
                self._doubted = True
                self._expect(_DOUBTED_PRIOR)
        super().learn(agreed, hit)


def _kind(agreed: int) -> int:
    """Return the bucket of an agreement: 0, 1, 2 to 3, 4 to 7, ..., from `LONGEST_MATCH` on."""
    return min(agreed, LONGEST_MATCH).bit_length()


ANCHOR = 12
"""Length of the match by which a copy of the row's own text is recognised.

The memory, which knows what the logits say at the same place, drafts shorter ones: at 6, HumanEval lost 2 to 5 % of its
tokens per step, and without these copies a text that is copied word for word 14 to 33 %.
"""
_AFTERMATH = 16  # tokens after a departure during which it is treated as a possible substitution
_FOLLOWING = 4  # agreement after which a miss may be a substitution; assumed before the first token
FAINTEST = 0.02
"""Least probability of a drafted token: what is less likely takes time to rank, and is hardly ever worth feeding."""


class Cursor(NamedTuple):
    """A position in the copied text."""

    start: int
    """Index of the token expected next."""
    agreed: int
    """Number of tokens before it that agreed."""


class CopySource(ABC):
    """A `Source` for one row that copies from a text while the row follows it.

    `excluded` ids are never drafted (EOS, padding): guesses end before them.
    """

    name: str

    def __init__(self, text: Sequence[int], excluded: Collection[int] = (), agreement: Agreement | None = None) -> None:
        self._text, self._excluded = list(text), frozenset(excluded)
        self._agreement = Agreement() if agreement is None else agreement
        self._cursors: list[Cursor] = []
        self._length, self._last = 0, -1  # length and last token of the row's text at the last call
        self._substituted = 0  # cursor if every token since the departure was a substitution
        self._aftermath = 0  # number of tokens for which that remains possible

    @abstractmethod
    def _longest_match(self, context: Sequence[int]) -> Cursor | None:
        """Return the cursor after the longest match with the suffix of `context`; None without a match."""

    def guesses(self, context: Sequence[int]) -> list[Guess]:
        """See `Source`: the continuation at each cursor."""
        if self._length > len(context) or (self._length and context[self._length - 1] != self._last):
            self._cursors, self._aftermath = self._found(context), 0  # not a continuation of the last context
        elif new := context[self._length :]:
            agreed = [self._learned(cursor, new) for cursor in self._cursors]
            self._cursors = self._after(new, context, agreed)
        self._length, self._last = len(context), context[-1]
        return [guess for cursor in self._cursors for guess in self._guesses_from(cursor)]

    def _learned(self, cursor: Cursor, new: Sequence[int]) -> int:
        """Observe how many of the `new` tokens agree with a cursor; return that number."""
        agreed = 0
        for came, expected in zip(new, self._text[cursor.start : cursor.start + len(new)], strict=False):
            self._agreement.learn(cursor.agreed + agreed, hit=came == expected)
            if came != expected:
                break
            agreed += 1
        return agreed

    def _after(self, new: Sequence[int], context: Sequence[int], agreed: Sequence[int]) -> list[Cursor]:
        """Return the cursors after `new` tokens at the end of `context`, `agreed[i]` of which agreed with cursor i."""
        self._substituted += len(new)
        self._aftermath -= len(new)
        if self._cursors:
            cursor = self._cursors[0]
            if agreed[0] == len(new):
                return [Cursor(cursor.start + len(new), cursor.agreed + len(new))]
            if cursor.agreed >= _FOLLOWING:
                self._substituted, self._aftermath = cursor.start + len(new), _AFTERMATH
        return self._found(context)

    def _found(self, context: Sequence[int]) -> list[Cursor]:
        """Return the cursors after the longest match and after a possible substitution."""
        cursors = [] if (tail := self._longest_match(context)) is None else [tail]
        if self._aftermath > 0 and (tail is None or tail.start != self._substituted):
            cursors.append(Cursor(self._substituted, 0))
        return [cursor for cursor in cursors if cursor.start < len(self._text)]

    def _agreeing_before(self, number: int, context: Sequence[int]) -> int:
        """Return the length of the match between the end of `context` and the text up to index `number`."""
        length, most = 0, min(LONGEST_MATCH, number + 1, len(context))
        while length < most and context[-1 - length] == self._text[number - length]:
            length += 1
        return length

    def _guesses_from(self, cursor: Cursor) -> Iterator[Guess]:
        scores, score = list[float](), 1.0
        for number in range(min(LONGEST_CHAIN, len(self._text) - cursor.start)):
            score *= self._agreement.probability(cursor.agreed + number)
            if score < FAINTEST:
                break
            scores.append(score)
        tokens = self._text[cursor.start : cursor.start + len(scores)]
        if not self._excluded.isdisjoint(tokens):
            tokens = list(takewhile(lambda token: token not in self._excluded, tokens))
        if tokens:
            yield Guess(tokens, self.name, scores[: len(tokens)])


class Prediction(CopySource):
    """Guesses from the expected answer."""

    name = "prediction"

    def __init__(self, text: Sequence[int], excluded: Collection[int] = ()) -> None:
        super().__init__(text, excluded, DoubtedAgreement())
        self._numbers: dict[int, list[int]] = defaultdict(list)
        for number, token in enumerate(self._text):
            self._numbers[token].append(number)

    def guesses(self, context: Sequence[int]) -> list[Guess]:
        """See `CopySource`; the answer may begin like the text."""
        if not self._length and len(context) > 1:  # prefill has yielded one token
            self._length, self._last, self._cursors = len(context) - 1, context[-2], [Cursor(0, _FOLLOWING)]
        return super().guesses(context)

    def _longest_match(self, context: Sequence[int]) -> Cursor | None:
        numbers = self._numbers.get(context[-1], [])
        middle = bisect_left(numbers, self._substituted)
        near = numbers[max(0, middle - LONGEST_MATCH) : middle + LONGEST_MATCH]
        found = [
            (self._agreeing_before(number, context), -abs(number + 1 - self._substituted), number) for number in near
        ]
        if not found:
            return None
        length, _, number = max(found)
        return Cursor(number + 1, length)


class OwnText(CopySource):
    """Guesses copied from the row's own prompt and answer, and from a text `before` them, such as an encoder's input.

    The context memory drafts a few tokens after short contexts; copies are long. They start from matches of at least
    `ANCHOR` tokens, which are rarely followed by anything else.
    """

    name = "text"

    def __init__(self, before: Sequence[int] = (), excluded: Collection[int] = ()) -> None:
        super().__init__((), excluded)
        self._before = len(before)
        self._context: Sequence[int] = ()
        self._ends: dict[tuple[int, ...], int] = {}  # index of the last token of each n-gram
        self._tail: tuple[int, ...] = ()  # the row's last n-gram at the last call
        self._extend(before)

    def guesses(self, context: Sequence[int]) -> list[Guess]:
        """See `CopySource`; a list passed before is assumed to have only grown since."""
        if context is self._context and not self._cursors and ANCHOR <= self._length == len(context) - 1:
            return self._fast_guesses(context)
        if context is not self._context:
            same = same_beginning(self._text, context, self._before)
            del self._text[self._before + same :]
            self._context = context
        self._extend(context[len(self._text) - self._before :])
        self._tail = tuple(context[-ANCHOR:])
        return super().guesses(context)

    def _fast_guesses(self, context: Sequence[int]) -> list[Guess]:
        """Fast path of `guesses` for one new token without a cursor, as in most steps.

        While a substitution is possible there is a cursor, so none is possible here.
        """
        token, last = context[-1], len(self._text) - 1
        self._text.append(token)
        self._ends[self._tail] = last
        self._tail = tuple(context[-ANCHOR:])
        self._length, self._last = self._length + 1, token
        if self._tail not in self._ends:
            return []
        self._cursors = self._found(context)
        return [guess for cursor in self._cursors for guess in self._guesses_from(cursor)]

    def _extend(self, tokens: Sequence[int]) -> None:
        text, first = self._text, len(self._text)
        text += tokens
        for end in range(max(first, ANCHOR), len(text)):  # n-grams that are followed by a token
            self._ends[tuple(text[end - ANCHOR : end])] = end - 1

    def _longest_match(self, context: Sequence[int]) -> Cursor | None:
        number = self._ends.get(tuple(context[-ANCHOR:]))
        if number is None or number >= len(self._text) - 1:
            return None
        agreed = self._agreeing_before(number, context)
        return Cursor(number + 1, agreed) if agreed >= ANCHOR else None
