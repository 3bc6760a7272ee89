"""The n-gram pool: what has been seen to follow a token, most recently seen first.

Source: arXiv 2402.02057, section 3.2; n-grams of the prompt: the authors' library, POOL_FROM_PROMPT.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Guess = tuple[tuple[int, ...], str]


class NGramPool:
    """Maps a token to its G most recently seen continuations of up to N-1 tokens each.

    A continuation that begins another one is the same guess cut short, so only the longer one is held.

    Args:
        ngram: N.
        guesses: G, continuations kept per token; 0 keeps nothing.
        excluded: ids (end of sequence, padding) that no n-gram may contain: nothing follows them.
        max_keys: tokens with continuations, the least recently extended goes first. It bounds the memory to
            `max_keys * G * N` ids.
    """

    def __init__(self, ngram: int, guesses: int, excluded: Collection[int] = (), max_keys: int = 65_536) -> None:
        self.ngram, self.guesses, self.max_keys = ngram, guesses, max_keys
        self._excluded = frozenset(excluded)
        self._table: dict[int, dict[tuple[int, ...], str]] = {}

    def __len__(self) -> int:
        """Number of continuations held."""
        return sum(map(len, self._table.values()))

    def learn(self, ngrams: Iterable[Sequence[int]], source: str) -> None:
        """Enter n-grams (2 to N ids each), the last one as the most recent; `source` names where they were seen."""
        if not self.guesses:
            return
        for key, *rest in ngrams:
            continuation = tuple(rest[: self.ngram - 1])
            if key in self._excluded or not self._excluded.isdisjoint(continuation):
                continue
            # Dictionaries keep insertion order: taken out and put in again, an entry is the most recent.
            entry = self._table.pop(key, {})
            self._table[key] = entry
            _enter(entry, continuation, source)
            if len(entry) > self.guesses:
                del entry[next(iter(entry))]
            if len(self._table) > self.max_keys:
                del self._table[next(iter(self._table))]

    def lookup(self, token: int) -> list[Guess]:
        """The continuations of `token`, at most G, most recently seen first, each with its source."""
        return list(reversed(self._table.get(token, {}).items()))


def _enter(entry: dict[tuple[int, ...], str], continuation: tuple[int, ...], source: str) -> None:
    first = continuation[0]
    for other in entry:
        if other[0] != first:
            continue
        shared = min(len(other), len(continuation))
        if other[:shared] == continuation[:shared]:  # at most one can be: entries do not begin one another
            known_as = entry.pop(other)
            if len(other) > len(continuation):
                continuation, source = other, known_as
            break
    entry[continuation] = source
