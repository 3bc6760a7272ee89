"""Runs a model's MTP layer for rows that come and go, with a cache of its own.

Entry e of a row's cache is for the token at position `start + 1 + e`, fed with the model's state one position before.
What a tree's nodes append lies behind the text, and is dropped when the trees are: text is fed with true states alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils.rnn import pad_sequence

from lade.backends.mtp.head import Head
from lade.backends.mtp.load import Loaded, examine, give_up, layer_of, pack_alike
from lade.backends.mtp.prompts import KnownStates, StateRecorder, states_in
from lade.decoding.kernels.native_tree import Frontier
from lade.decoding.mtp import MtpHabits, Predictions, RowText
from lade.decoding.tree import TokenTree
from lade.model.facts import CACHE
from lade.model.inputs import plan_for
from lade.model.kv_cache import TreeCache
from lade.model.runner import MTP_LAYERS, EagerRunner
from lade.model.supports import MTP_FILES

_ROOT_ALONE: Final = TokenTree(0)


@dataclass
class _Held:
    """A row in the layer's cache."""

    start: int  # place of the state that its first entry was fed with
    end: int  # place of the state that is fed next: as many entries of text are in the cache
    outputs: torch.Tensor  # [N, H], at the nodes of the tree; at first at the last entry of text, which is the root
    tree: TokenTree = _ROOT_ALONE  # the nodes that the layer has looked at


class _Nodes(NamedTuple):
    """Part of a pass of the layer: the last nodes of a tree, and the states `[N, H]` at the tokens before them."""

    tree: TokenTree
    states: torch.Tensor


class MtpRunner:
    """See `lade.decoding.mtp.MtpLayer`; the runner makes the model's passes, which are watched: it `exposes_states`."""

    def __init__(self, runner: EagerRunner, loaded: Loaded, gathers: bool | None = None) -> None:
        pack_alike(loaded, runner.facts)
        self._mtp = mtp = loaded.mtp
        self._head = Head(mtp, gathers)
        self._runner = runner
        self._recorder = StateRecorder(runner.model, runner.facts.cache_name or CACHE)
        self._states: list[torch.Tensor] = []  # [B, S, H], of the last pass over trees
        self._plan = plan_for(mtp.config, by_layer_type=False)
        self._device, self._dtype = runner.model.device, runner.model.dtype
        self._known: WeakKeyDictionary[RowText, KnownStates] = WeakKeyDictionary()  # of rows that may never draft, too
        self._held: dict[RowText, _Held] = {}
        self._order: list[RowText] = []  # rows of the cache
        self._cache = TreeCache()

    @property
    def may_gather(self) -> bool:
        """See `MtpLayer`."""
        return self._head.may_gather

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
        self._states.clear()
        return self._runner.watching_states(self._states.append)

    def accept(self, rows: Sequence[RowText], paths: Sequence[Sequence[int]], fed: int) -> None:
        """See `MtpLayer`."""
        if not self._states:
            return
        states = self._states[-1][:, -fed:]  # a pass that fed the whole text anew ends with the root
        self._states.clear()
        for place, (row, path) in enumerate(zip(rows, paths, strict=True)):
            if not path:
                continue
            start = len(row.tokens) - 1 - len(path)
            if (known := self._known.get(row)) is None:
                held = self._held.get(row)
                known = self._known[row] = KnownStates(start if held is None else held.end)
            in_place = path[-1] == len(path) - 1
            known.add(start, states[place, : len(path)] if in_place else states[place, list(path)])

    def knows(self, row: RowText) -> bool:
        """See `MtpLayer`."""
        known, held = self._known.get(row), self._held.get(row)
        end = known.end if known is not None and known.parts else held.end if held is not None else -1
        return end == len(row.tokens) - 1

    def retain(self, rows: Sequence[RowText]) -> None:
        """See `MtpLayer`."""
        present = set(rows)
        for row in [row for row in self._order if row not in present]:
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
    def predict(self, rows: Sequence[RowText], candidates: Collection[int] | None) -> Predictions:
        """See `MtpLayer`."""
        entries = list[int]()
        for held in map(self._held.__getitem__, self._order):
            held.tree, held.outputs = _ROOT_ALONE, held.outputs[:1]
            entries.append(held.end - held.start)
        self._cache.trim(entries)
        more = dict[RowText, _Nodes]()
        for row in rows:
            known, own = self._known.get(row), self._held.get(row)
            if own is None or known is None or not known.parts:
                continue
            if known.start == own.end:
                more[row] = _text_of(row, known)
            else:  # states are missing: it begins anew
                self.leave(row)
                self._known[row] = known
        for row, output in self._feed_some(more).items():
            held = self._held[row]
            held.end, held.outputs = held.end + len(output), output[-1:]
        outputs = list[torch.Tensor]()
        for row in rows:
            if row not in self._held:
                self._join(row)
            outputs.append(self._held[row].outputs)
        return self._head.predict(torch.cat(outputs), candidates)

    def _join(self, row: RowText) -> None:
        """Feed what is known of a row that is new, by itself; then it joins the others."""
        known, part = self._known[row], TreeCache()
        start = known.start
        output = self._feed(part, [_text_of(row, known)], [0], [start + 1])[0]
        self._held[row] = _Held(start, known.end, output[-1:])
        self._order.append(row)
        self._cache.take(part)

    @torch.no_grad()
    def look(
        self, rows: Sequence[RowText], frontiers: Sequence[Frontier], candidates: Collection[int] | None
    ) -> Predictions:
        """See `MtpLayer`."""
        fed = dict[RowText, _Nodes]()
        for row, each in zip(rows, frontiers, strict=True):
            if each.nodes:
                held = self._held[row]
                if held.tree is _ROOT_ALONE:
                    held.tree = TokenTree(row.tokens[-1])
                held.tree.extend(each.tokens, each.parents, each.depths, "mtp")
                fed[row] = _Nodes(held.tree, held.outputs[each.parents])
        outputs = self._feed_some(fed)
        for row, found in outputs.items():
            self._held[row].outputs = torch.cat([self._held[row].outputs, found])
        return self._head.predict(torch.cat([outputs[row] for row in fed]), candidates)

    def give_up(self, problem: Exception) -> None:
        """See `MtpLayer`."""
        give_up(self._runner.model, problem)

    def _feed_some(self, fed: Mapping[RowText, _Nodes]) -> dict[RowText, torch.Tensor]:
        """Feed nodes of some rows of the cache in one pass, and nothing of the others; return the outputs at them."""
        if not fed:
            return {}
        nothing = _Nodes(_ROOT_ALONE, next(iter(fed.values())).states[:0])
        every = [fed.get(row, nothing) for row in self._order]
        rows = [self._held[row] for row in self._order]
        lengths = [held.end - held.start + len(held.outputs) - 1 for held in rows]  # of text, and of nodes
        output = self._feed(self._cache, every, lengths, [held.start + 1 for held in rows])
        return {row: output[place, : len(fed[row].states)] for place, row in enumerate(self._order) if row in fed}

    def _feed(
        self,
        cache: TreeCache,  # the layer's, or a new one
        fed: Sequence[_Nodes],  # [B]
        lengths: Sequence[int],  # [B], number of each row's entries and nodes in the cache
        starts: Sequence[int],  # [B], place of the token of each row's first entry
    ) -> torch.Tensor:
        """Feed the nodes of one tree a row that the cache does not hold yet; all of them stay in it.

        It is a pass of transformers' layer, as `MtpModel.forward_layer` makes it, with masks of our own. In rows with
        fewer nodes the outputs `[B, S, H]` after the last one are undefined.
        """
        trees, states = zip(*fed, strict=True)
        held = [len(tree.ids) - len(own) for tree, own in fed]
        inputs = self._plan.inputs(trees, lengths, self._device, held)
        hidden = pad_sequence(list(states), batch_first=True).to(self._device, self._dtype)
        positions = inputs.positions + torch.tensor(starts, device=self._device)[:, None]
        mtp, masks = self._mtp, self._plan.masks(inputs, self._dtype)
        embedded, rotated = mtp.embed_tokens(inputs.ids), None
        if mtp.rotary_emb is not None:
            kind = {"layer_type": mtp.config.layer_types[0]} if mtp.has_per_layer_rope else {}
            rotated = mtp.rotary_emb(embedded, position_ids=positions, **kind)
        ids = {"position_embeddings": rotated, "position_ids": positions}
        output: torch.Tensor = mtp.layers[0](embedded, hidden, attention_mask=masks, **ids, **{CACHE: cache})
        if len(fed) > 1:  # the nodes lie behind the longest row
            cache.keep([range(len(tree)) for tree in trees], inputs.ids.shape[1], held)
        return mtp.shared_post_norm(output) if mtp.use_shared_post_norm else output


def _text_of(row: RowText, known: KnownStates) -> _Nodes:
    """Return what is fed of a row: the tokens after those whose states are known, and these states."""
    chain = TokenTree.chain(row.tokens[known.start + 1 : known.end + 1], "text")
    return _Nodes(chain, known.take())


class MtpBackend:
    """Multi-token prediction layers of checkpoints; see `lade.model.registry`."""

    examine = staticmethod(examine)

    def layer_for(self, runner: EagerRunner, kind: str) -> tuple[MtpRunner, MtpHabits] | str:
        """Return the layer of a runner's model and what texts of a kind have taught about it; or why there is none."""
        loaded = layer_of(runner.model)
        if isinstance(loaded, str):
            return loaded
        return MtpRunner(runner, loaded), loaded.habits.setdefault(kind, MtpHabits())


BACKEND = MtpBackend()
MTP_FILES.fill(BACKEND)
MTP_LAYERS.fill(BACKEND)
