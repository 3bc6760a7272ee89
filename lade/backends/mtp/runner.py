"""Runs a model's MTP layer for rows that come and go, with a cache of its own.

Entry e of a row's cache is of the token at place `start + 1 + e`, fed with the model's state at the place before it.
What a tree's nodes append lies behind the text, and is dropped when the trees are: text is fed with true states alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lade.backends.mtp.head import Head
from lade.backends.mtp.load import Loaded, give_up, pack_alike
from lade.backends.mtp.prompts import KnownStates, StateRecorder, states_in
from lade.decoding.drafting.drafter import Unseen
from lade.decoding.mtp import Predictions, RowText
from lade.decoding.tree import ROOT, TokenTree
from lade.model.facts import CACHE, as_cache
from lade.model.inputs import plan_for
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


@dataclass
class _Held:
    """A row in the layer's cache.

    Attributes:
        start: place of the state that its first entry was fed with.
        entries: of text.
        output: `[H]`, of the last one.
        tree: its root is the last entry; the others are nodes that the layer has looked at.
        outputs: `[H]` each, of the nodes of the tree.
    """

    start: int
    entries: int
    output: torch.Tensor
    tree: TokenTree = field(default_factory=lambda: TokenTree(0))
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The place of the state that is fed next."""
        return self.start + self.entries


class MtpRunner:
    """See `lade.decoding.mtp.MtpLayer`.

    Args:
        runner: runner of the model's passes, which are watched; it `exposes_states`.
        loaded: the model's MTP layer.
        gathers: see `Head`.
    """

    def __init__(self, runner: EagerRunner, loaded: Loaded, gathers: bool | None = None) -> None:
        pack_alike(loaded, runner.facts)
        self._mtp = mtp = loaded.mtp
        self._head = Head(mtp, gathers)
        self._runner = runner
        self._recorder = StateRecorder(runner.model, runner.facts.cache_name or CACHE)
        self._states: torch.Tensor | None = None  # [B, S, H], of the last pass over trees
        self._plan = plan_for(mtp.config, by_layer_type=False)
        self._device, self._dtype = runner.model.device, runner.model.dtype
        self._none = torch.empty(0, device=self._device)  # states of a row that is fed nothing
        self._known: WeakKeyDictionary[RowText, KnownStates] = WeakKeyDictionary()  # of rows that may never draft, too
        self._held: dict[RowText, _Held] = {}
        self._order: list[RowText] = []  # rows of the cache
        self._cache = TreeCache()

    @property
    def gathers(self) -> bool:
        """See `MtpLayer`."""
        return self._head.gathers

    def prefer(self, gathers: bool) -> None:
        """See `MtpLayer`."""
        self._head.preferred = gathers

    @contextmanager
    def reading(self, rows: Sequence[RowText]) -> Iterator[None]:
        """See `MtpLayer`."""
        with self._recorder.prompts() as passes:
            yield
            for row in rows:
                if (known := states_in(passes, row, self._known.get(row))) is not None:
                    self._known[row] = known

    def watching(self) -> Any:
        """See `MtpLayer`."""
        self._states = None
        return self._runner.watching_states(self._note_states)

    def _note_states(self, states: torch.Tensor) -> None:
        self._states = states

    def accept(self, rows: Sequence[RowText], paths: Sequence[Sequence[int]], fed: int) -> None:
        """See `MtpLayer`."""
        states, self._states = self._states, None
        if states is None:
            return
        states = states[:, -fed:]  # a pass that fed the whole text anew ends with the root
        for place, (row, path) in enumerate(zip(rows, paths, strict=True)):
            if not path:
                continue
            start = len(row.tokens) - 1 - len(path)
            held = self._held.get(row)
            known = self._known.setdefault(row, KnownStates(start if held is None else held.end))
            in_place = path[-1] == len(path) - 1
            known.add(start, states[place, : len(path)] if in_place else states[place, list(path)])

    def knows(self, row: RowText) -> bool:
        """See `MtpLayer`."""
        known, held = self._known.get(row), self._held.get(row)
        end = known.end if known is not None and known.parts else held.end if held is not None else -1
        return end == len(row.tokens) - 1

    def retain(self, rows: Sequence[RowText]) -> None:
        """See `MtpLayer`."""
        if len(self._order) > len(rows) or any(row not in rows for row in self._order):
            for row in [row for row in self._order if row not in rows]:
                self.leave(row)

    def leave(self, row: RowText) -> None:
        """See `MtpLayer`."""
        self._known.pop(row, None)
        if self._held.pop(row, None) is None:
            return
        place = self._order.index(row)
        self._cache.leave(place)
        self._order[place] = self._order[-1]
        self._order.pop()
        if not self._order:
            self._cache.reset()

    @torch.no_grad()
    def predict(self, rows: Sequence[RowText], candidates: Sequence[Sequence[int]]) -> Predictions:
        """See `MtpLayer`."""
        self.forget()
        for row in rows:
            self._drop_if_interrupted(row)
        joining = [row for row in rows if row not in self._held]
        self._take_in([row for row in rows if row in self._held])
        for row in joining:
            self._join(row)
        for row in rows:
            held = self._held[row]
            held.tree, held.outputs = TokenTree(row.tokens[-1]), [held.output]
        outputs = torch.stack([self._held[row].output for row in rows])
        return self._head.predict(outputs, self._wanted(rows, candidates))

    def _wanted(self, rows: Sequence[RowText], candidates: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Tokens whose logits are computed, where not all are: candidates, and those of the texts."""
        if not self._head.gathers:
            return candidates
        return [(*own, *row.tokens[-_RECENT:]) for own, row in zip(candidates, rows, strict=True)]

    def _drop_if_interrupted(self, row: RowText) -> None:
        """Have a row begin anew where states are missing between what the layer holds and what is known."""
        held, known = self._held.get(row), self._known.get(row)
        if held is not None and known is not None and known.parts and known.start != held.end:
            self._known.pop(row)
            self.leave(row)
            self._known[row] = known

    def _take_in(self, rows: Sequence[RowText]) -> None:
        """Feed what is known of rows that the cache holds, in one pass; other rows of the cache are fed nothing."""
        fresh = {row for row in rows if (known := self._known.get(row)) is not None and known.parts}
        if not fresh:
            return
        trees, held, states = list[TokenTree](), list[int](), list[torch.Tensor]()
        for row in self._order:
            if row not in fresh:
                trees.append(TokenTree(0))
                held.append(1)
                states.append(self._none)
                continue
            own, first = self._known[row].take(), self._held[row].end + 1
            trees.append(_chain(row.tokens[first : first + len(own)]))
            held.append(0)
            states.append(own)
        output = self._feed(self._cache, trees, held, states)
        for place, row in enumerate(self._order):
            if row in fresh:
                self._held[row].entries += len(states[place])
                self._held[row].output = output[place, len(states[place]) - 1]

    def _join(self, row: RowText) -> None:
        """Feed what is known of a row that is new, by itself; then it joins the others."""
        known, part = self._known[row], TreeCache()
        start, states = known.start, known.take()
        output = self._feed(part, [_chain(row.tokens[start + 1 : start + 1 + len(states)])], [0], [states], [start])
        self._held[row] = _Held(start, len(states), output[0, len(states) - 1])
        self._order.append(row)
        self._cache.take(part)

    @torch.no_grad()
    def look(
        self, rows: Sequence[RowText], nodes: Sequence[Sequence[Unseen]], candidates: Sequence[Sequence[int]]
    ) -> Predictions:
        """See `MtpLayer`."""
        states = dict[RowText, torch.Tensor]()
        for row, own in zip(rows, nodes, strict=True):
            held = self._held[row]
            for node in own:
                held.tree.add(node.parent, node.token, "mtp")
            if own:
                states[row] = torch.stack([held.outputs[node.parent] for node in own])
        trees = [self._held[row].tree if row in states else TokenTree(0) for row in self._order]
        fed = [states.get(row, self._none) for row in self._order]
        output = self._feed(
            self._cache, trees, [len(tree) - len(own) for tree, own in zip(trees, fed, strict=True)], fed
        )
        found = []
        for row, own in zip(rows, nodes, strict=True):
            outputs = output[self._order.index(row), : len(own)]
            self._held[row].outputs += outputs.unbind()
            found.append(outputs)
        owners = [row for row, own in zip(rows, nodes, strict=True) for _ in own]
        return self._head.predict(torch.cat(found), self._wanted(owners, candidates))

    def give_up(self, problem: Exception) -> None:
        """See `MtpLayer`."""
        give_up(self._runner.model, problem)

    def forget(self) -> None:
        """See `MtpLayer`."""
        lengths = [self._held[row].entries for row in self._order]
        if lengths and self._cache.lengths != lengths:
            self._cache.trim(lengths)

    def _feed(
        self,
        cache: TreeCache,
        trees: Sequence[TokenTree],
        held: Sequence[int],
        states: Sequence[torch.Tensor],
        starts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed the nodes of one tree a row that the cache does not hold yet; all of them stay in it.

        Args:
            cache: the layer's.
            trees: B.
            held: `[B]`, how many nodes of each tree the end of the row in the cache holds.
            states: for each row those at the tokens before the nodes, `[N, H]`.
            starts: `[B]`, see `_Held`; None for those of the rows of the cache.

        Returns:
            The layer's outputs `[B, S, H]`; in rows with fewer nodes those after the last one are undefined.
        """
        starts = [self._held[row].start for row in self._order] if starts is None else starts
        before = cache.lengths
        inputs = self._plan.inputs(trees, before, self._device, held)
        fed = inputs.ids.shape[1]
        size = next(each.shape[-1] for each in states if len(each))
        hidden = torch.zeros(len(trees), fed, size, dtype=self._dtype, device=self._device)
        for place, own in enumerate(states):
            if len(own):
                hidden[place, : len(own)] = own
        positions = inputs.positions + torch.tensor(starts, device=self._device)[:, None] + 1
        output = self._layer(inputs.ids, hidden, positions, self._plan.masks(inputs, self._dtype), cache)
        cache.keep([range(own + len(each)) for own, each in zip(held, states, strict=True)], fed, held)
        return output

    def _layer(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, mask: Any, cache: TreeCache
    ) -> torch.Tensor:
        """One pass of transformers' layer, as `MtpModel.forward_layer` makes it, with masks of our own."""
        mtp = self._mtp
        embedded = mtp.embed_tokens(ids)
        rotated = None
        if mtp.rotary_emb is not None:
            kind = {"layer_type": mtp.config.layer_types[0]} if mtp.has_per_layer_rope else {}
            rotated = mtp.rotary_emb(embedded, position_ids=positions, **kind)
        output: torch.Tensor = mtp.layers[0](
            embedded,
            hidden,
            position_embeddings=rotated,
            position_ids=positions,
            attention_mask=mask,
            **as_cache(cache),
        )
        return mtp.shared_post_norm(output) if mtp.use_shared_post_norm else output


_RECENT = 512  # tokens at the end of a text that may come again, where the head is gathered


def _chain(tokens: Sequence[int]) -> TokenTree:
    """A tree without branches."""
    tree = TokenTree(tokens[ROOT])
    tree.add_path(tokens[1:], "text")
    return tree
