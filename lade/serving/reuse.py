"""What a request takes from texts before it, and leaves for those after it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.logits_cache import NotingDrafter, Said
from lade.decoding.row import Row
from lade.model.kv_cache import TreeCache
from lade.serving.active import ActiveRequest
from lade.serving.shelf import LEAST, Shelf, ShelvedText, common

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
            self.shelf.put(ShelvedText(scope, np.array(text, dtype=np.int64), copy_row(place, tokens), said))
        except (MemoryError, torch.OutOfMemoryError) as problem:
            logger.info("no memory for texts that are kept for later prompts, they are dropped: %s", problem)
            self.shelf.clear()

    def _serves(self, active: ActiveRequest) -> bool:
        """Whether its text can be shared: an image is not seen in its ids."""
        return bool(self.shelf.max_bytes) and self._most >= LEAST and not active.pinned
