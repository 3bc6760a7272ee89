"""Prefix cache: KV and logits of finished texts, reused by prompts with the same beginning.

Whole texts lie beside each other, each with a copy of its own, and the longest common beginning is found by comparing
ids: a few dozen texts take less than a millisecond, and nothing is ever taken for something else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.logits_cache import NotingDrafter, Said
from lade.decoding.row import Row
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.serving.running import ActiveRequest

LEAST = 32
"""Tokens that texts must have in common at least, to be worth a copy."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShelvedText:
    """A text on the shelf.

    Attributes:
        scope: whose it is; None for everyone's who names no scope.
        tokens: `[L]`.
        cache: keys and values of them.
        said: what the logits said at them.
        client: whose request left it here.
    """

    scope: str | None
    tokens: Tokens
    cache: TreeCache
    said: Said
    client: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.tokens) * self.cache.token_bytes + self.tokens.nbytes + self.said.nbytes


class Shelf:
    """Texts of at most so many bytes; of the client with most of them, the one used least recently goes first.

    Otherwise one client that sends many texts, under as many scopes as it likes, would evict all others'.

    Args:
        max_bytes: of all texts together.

    Attributes:
        max_bytes: as given.
        nbytes: what they take.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._texts: list[ShelvedText] = []  # the one used last is the last one

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, scope: str | None, tokens: Sequence[int]) -> tuple[ShelvedText, int] | None:
        """The text of a scope that has the most first tokens in common with these, and how many; None below `LEAST`."""
        length, number = self._longest(scope, tokens)
        if length < LEAST:
            return None
        text = self._texts.pop(number)
        self._texts.append(text)
        return text, length

    def knows(self, scope: str | None, tokens: Sequence[int]) -> bool:
        """Whether `find` finds one."""
        return self._longest(scope, tokens)[0] >= LEAST

    def _longest(self, scope: str | None, tokens: Sequence[int]) -> tuple[int, int]:
        """How many first tokens a text has in common with these at most, and its number."""
        wanted = np.asarray(tokens, dtype=np.int64)
        return max(((common(text.tokens, wanted), number) for number, text in self._of(scope)), default=(0, 0))

    def lacks(self, scope: str | None, tokens: Sequence[int]) -> bool:
        """Whether no text begins with these tokens, and they are worth a place."""
        wanted = np.asarray(tokens, dtype=np.int64)
        known = any(common(text.tokens, wanted) == len(wanted) for _, text in self._of(scope))
        return len(wanted) >= LEAST and not known

    def put(self, text: ShelvedText) -> None:
        """Keep a text, in place of those that it begins with. One that is too large for the shelf is not kept."""
        if text.nbytes > self.max_bytes:
            return
        for number, other in reversed(list(self._of(text.scope))):
            if common(other.tokens, text.tokens) == len(other.tokens):
                self._drop(number)
        while self.nbytes + text.nbytes > self.max_bytes:
            self._drop(self._first_to_go(text))
        self._texts.append(text)
        self.nbytes += text.nbytes

    def _first_to_go(self, coming: ShelvedText) -> int:
        """Return the number of the text that makes room for another one, which counts as its client's already."""
        taken = Counter({coming.client: coming.nbytes})
        for text in self._texts:
            taken[text.client] += text.nbytes
        here = {text.client for text in self._texts}
        most = max(here, key=taken.__getitem__)
        return next(number for number, text in enumerate(self._texts) if text.client == most)

    def clear(self) -> None:
        """Forget all."""
        self._texts.clear()
        self.nbytes = 0

    def _of(self, scope: str | None) -> list[tuple[int, ShelvedText]]:
        return [(number, text) for number, text in enumerate(self._texts) if text.scope == scope]

    def _drop(self, number: int) -> None:
        self.nbytes -= self._texts.pop(number).nbytes


def common(one: Tokens, other: Tokens) -> int:
    """How many first tokens two texts have in common."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


logger = logging.getLogger(__name__)


class Reuse:
    """Keys and values of a request's text, taken from a shelf and put on it.

    Args:
        max_bytes: of the shelf; with 0 nothing is taken or kept.
        most: first tokens of a text that can be shared at all; see `TextPieces.shareable`.

    Attributes:
        shelf: the texts.
    """

    def __init__(self, max_bytes: int, most: int) -> None:
        self.shelf, self._most = Shelf(max_bytes), most

    def drafter(self, drafter: Drafter) -> Drafter:
        """The same one, noting what it learns, for those that learn it later."""
        return NotingDrafter(drafter) if self.shelf.max_bytes else drafter

    def take(self, active: ActiveRequest) -> None:
        """Copy what is known of a text that has not been fed into its cache; its last token is always fed."""
        row, text = active.row, active.text
        if row is None or not self._serves(active) or active.prompt_logprobs is not None:
            return
        found = self.shelf.find(active.request.scope, text)
        if found is None:
            return
        known, tokens = found[0], min(found[1], len(text) - 1, self._most)
        active.cache, active.fed = known.cache.copy_row(0, tokens), tokens
        if row.written:  # its drafter knows the text
            return
        active.handle.cached_tokens = tokens
        if row.drafter.learns_prompts:
            for start, entries in known.said.runs(tokens):
                row.drafter.learn_prompt(row.tokens, start, entries)

    def knows(self, active: ActiveRequest) -> bool:
        """Whether much of a text that has not been fed can be taken."""
        return self._serves(active) and self.shelf.knows(active.request.scope, active.text)

    def will_know(self, active: ActiveRequest, other: ActiveRequest) -> bool:
        """Whether much of its text can be taken once another one, of which nothing is known, has been fed."""
        if not self._serves(active) or active.request.scope != other.request.scope or len(other.text) < 2 * LEAST:
            return False
        return common(np.array(active.text), np.array(other.text)) >= LEAST

    def put_prompt(self, active: ActiveRequest) -> None:
        """Keep a prompt that has just been fed, where much of it was new: those that wait may begin like it."""
        if active.row is not None and active.fed - active.handle.cached_tokens >= 2 * LEAST:
            self.put(active, active.row, active.fed, active.cache.copy_row)

    def put(
        self, active: ActiveRequest, row: Row, tokens: int, copy_row: Callable[[int, int], TreeCache], place: int = 0
    ) -> None:
        """Keep the first tokens of a row's text.

        Args:
            active: the request.
            row: its row.
            tokens: how many.
            copy_row: copies keys and values of so many tokens of a row.
            place: number of the row there.
        """
        tokens = min(tokens, self._most)
        text, scope = row.tokens[:tokens], active.request.scope
        if not self._serves(active) or not self.shelf.lacks(scope, text):
            return
        said = row.drafter.said.first(tokens) if isinstance(row.drafter, NotingDrafter) else Said()
        try:
            ids, client = np.array(text, dtype=np.int64), active.request.client
            self.shelf.put(ShelvedText(scope, ids, copy_row(place, tokens), said, client))
        except (MemoryError, torch.OutOfMemoryError) as problem:
            logger.info("no memory for texts that are kept for later prompts, they are dropped: %s", problem)
            self.shelf.clear()

    def _serves(self, active: ActiveRequest) -> bool:
        """Whether its text can be shared: an image is not seen in its ids."""
        return bool(self.shelf.max_bytes) and self._most >= LEAST and not active.pinned


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
