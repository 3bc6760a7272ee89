"""Top-k logits of cached tokens, replayed into a drafter on a prefix hit.

On a prefix hit a prompt is not fed again, so a drafter that learns from logits would know less than after a full
prefill. Therefore the entries of the logits are stored along with keys and values, as far as they were computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lade.decoding.drafting.drafter import Draft, Drafter, ForwardingDrafter
from lade.decoding.kernels.layout import WIDTH, Ints
from lade.decoding.readout import Readout
from lade.decoding.verify import Verdict


class CachedLogits:
    """Entries of the logits at the tokens of a text, as far as known; see `layout`."""

    def __init__(self) -> None:
        self._entries = np.empty((0, WIDTH), np.int32)  # [L, WIDTH]
        self._known = np.empty(0, np.bool_)  # [L]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._entries.nbytes + self._known.nbytes

    def put(self, start: int, entries: Ints) -> None:
        """Store entries `[T, WIDTH]` for the tokens from index `start` on."""
        end = start + len(entries)
        if end > len(self._known):
            more = max(end, 2 * len(self._known)) - len(self._known)
            self._entries = np.concatenate([self._entries, np.zeros((more, WIDTH), np.int32)])
            self._known = np.concatenate([self._known, np.zeros(more, np.bool_)])
        self._entries[start:end], self._known[start:end] = entries, True

    def first(self, tokens: int) -> CachedLogits:
        """Return a copy for the first `tokens` tokens."""
        copy = CachedLogits()
        copy._entries, copy._known = self._entries[:tokens].copy(), self._known[:tokens].copy()
        return copy

    def runs(self, tokens: int) -> Iterator[tuple[int, Ints]]:
        """Yield the runs of known tokens among the first `tokens`: index of the first one, and entries `[T, WIDTH]`."""
        known = np.concatenate([[False], self._known[:tokens], [False]])
        edges = np.flatnonzero(known[1:] != known[:-1])
        for start, end in edges.reshape(-1, 2).tolist():
            yield start, self._entries[start:end]


class RecordingDrafter(ForwardingDrafter):
    """A drafter that records the logits it learns from.

    Args:
        drafter: the drafter that does the work.

    Attributes:
        said: the logits recorded so far.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.said = CachedLogits()

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:
        """See `Drafter`."""
        self.said.put(start, entries)
        super().learn_prompt(tokens, start, entries)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        emitted = len(verdict.tokens)
        if readout.entries is not None and self.learns_prompts:
            self.said.put(len(context) - emitted - 1, readout.entries[verdict.path[:emitted]])
        super().learn(context, draft, readout, verdict)
