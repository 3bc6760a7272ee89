"""The model's states of texts, kept from the passes that feed them until the MTP layer takes them in.

A pass says nothing about whose tokens it feeds: prompts of several rows may go together, right-padded, in chunks, or
once for rows that share one. So the ids of each pass are noted with its states, and a row finds its own by its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from lade.decoding.mtp import RowText
from lade.model.module_changes import hooked
from lade.model.prefill import MOST_TOKENS


class PromptPass(NamedTuple):
    """One pass over prompts."""

    ids: list[list[int]]  # [B, T], what was fed
    start: int  # how many tokens were cached before them
    states: torch.Tensor  # [B, T, H], after the final norm


class KnownStates:
    """States of a row's text that the layer has not taken in, from place `start` to before `end`."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.parts: list[torch.Tensor] = []  # [T, H] each, one after the other

    def add(self, start: int, states: torch.Tensor) -> None:
        """Add states `[T, H]` from place `start` on; where some are missing before them, older ones are dropped."""
        if start != self.end:
            self.start, self.end, self.parts = start, start, []
        self.parts.append(states)
        self.end += len(states)
        while len(self.parts) > 1 and self.end - self.start - len(self.parts[0]) >= MOST_TOKENS:
            self.start += len(self.parts.pop(0))
        if (spare := self.end - self.start - MOST_TOKENS) > 0 and spare < len(self.parts[0]):
            self.parts[0] = self.parts[0][spare:].clone()  # a view would keep those before, too
            self.start += spare

    def take(self) -> torch.Tensor:
        """All of them, `[T, H]`; none are left."""
        taken = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        self.start, self.parts = self.end, []
        return taken


class StateRecorder:
    """Records the prompts that this thread feeds to a model, and their states."""

    def __init__(self, model: PreTrainedModel, cache_name: str) -> None:
        self._model: Any = model
        self._cache_name = cache_name
        self._ids: torch.Tensor | None = None
        self._start = 0
        self.passes: list[PromptPass] = []

    @contextmanager
    def prompts(self) -> Iterator[list[PromptPass]]:
        """A block whose passes feed prompts; they are in the list when it ends."""
        self.passes = []
        decoder = self._model.get_decoder()
        with hooked(self._model, before=self._note_ids), hooked(decoder, after=self._note_states):
            yield self.passes
        self.passes = []

    def _note_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get(self._cache_name)
        self._ids = kwargs.get("input_ids", args[0] if args else None)
        self._start = 0 if cache is None else int(cache.get_seq_length())

    def _note_states(self, output: Any) -> None:
        states: torch.Tensor = output[0]  # [B, T, H]
        ids, self._ids = self._ids, None
        if ids is not None and ids.shape == states.shape[:2]:
            self.passes.append(PromptPass(ids.tolist(), self._start, states.detach()))


def states_in(passes: Sequence[PromptPass], row: RowText, known: KnownStates | None) -> KnownStates | None:
    """Return the known states of a row's text after passes over prompts; its own are found by their tokens."""
    for each in passes:
        wanted = row.tokens[each.start : each.start + len(each.ids[0])]
        place = next((at for at, ids in enumerate(each.ids) if ids[: len(wanted)] == wanted), None)
        if place is None or not wanted:
            continue
        known = KnownStates(each.start) if known is None else known
        known.add(each.start, each.states[place, : len(wanted)])
    return known
