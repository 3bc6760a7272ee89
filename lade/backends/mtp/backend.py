"""Runs a model's MTP layer for rows that come and go, with a cache of its own.

Entry e of a row's cache is for the token at position `start + 1 + e`, fed with the model's state one position before.
What a tree's nodes append lies behind the text, and is dropped when the trees are: text is fed with true states alone.

The language model head is often several times as large as the layer, so a pass costs mostly that. Where it is, the
logits of some tokens are enough: those that the memory suggests, those of the text, and those that the layer predicted
most often of late. This loses hardly a draft, since a token that is none of these is seldom right.

States of texts are kept from the passes that feed them until the layer takes them in. A pass over prompts says nothing
about whose tokens it feeds: several rows may go together, right-padded, in chunks, or once for rows that share a
prompt. So the ids of each pass are noted with its states, and a row finds its own by its text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from lade.backends.mtp.load import Loaded, examine, give_up, layer_of, pack_alike
from lade.decoding.kernels.layout import CEILING, MTP_WIDTH
from lade.decoding.kernels.native_tree import Frontier
from lade.decoding.mtp import MtpHabits, Predictions, RowText
from lade.decoding.tree import TokenTree
from lade.model.facts import CACHE
from lade.model.inputs import plan_for
from lade.model.kv_cache import TreeCache
from lade.model.module_changes import hooked
from lade.model.prefill import MOST_TOKENS
from lade.model.runner import MTP_LAYERS, EagerRunner
from lade.model.supports import MTP_FILES

LEAST_VOCABULARY = 16_384
"""With fewer tokens the whole head costs little more than a part of it."""
HOT_SHARE, RENEW_AFTER = 16, 256
"""The hot list has one of so many tokens of the vocabulary, and is made anew after so many predictions."""
_MOST_ODDS = CEILING + 4.0  # log-odds: a layer may be surer than what the memory can store
_LEAST = 1e-6
_ROOT_ALONE: Final = TokenTree(0)


class Head:
    """Predictions by the language model head of transformers' `MtpModel`, which scales what it returns.

    With `gathers` the logits of some tokens only are computed; None for that if the vocabulary is large.
    """

    def __init__(self, mtp: Any, gathers: bool | None = None) -> None:
        self._mtp = mtp
        head = mtp.shared_head
        self._weight: torch.Tensor | None = None
        plain = type(head) is nn.Linear and head.bias is None and head.weight.is_floating_point()
        scaled = any(getattr(mtp.config, name, None) for name in ("logits_mup_width_multiplier", "unpadded_vocab_size"))
        if plain and not scaled and (gathers or (gathers is None and len(head.weight) >= LEAST_VOCABULARY)):
            self._weight = head.weight
        self._counts = np.zeros(0 if self._weight is None else len(self._weight), np.int64)
        self._hot, self._rows = torch.empty(0, dtype=torch.long), torch.empty(0)
        self._since = RENEW_AFTER
        self.may_gather = False  # true once there is a hot list: then the logits of some tokens alone can be computed

    def predict(self, states: torch.Tensor, candidates: Collection[int] | None) -> Predictions:
        """Predict what follows the layer's outputs `[E, H]` among these candidates; None to compute the whole head."""
        if candidates is not None and self.may_gather:
            predictions = self._gathered(states, candidates)
        else:
            predictions = _likeliest(self._mtp._project_to_logits(states), None)
        if self._weight is not None:
            self._note(predictions)
        return predictions

    def _gathered(self, states: torch.Tensor, candidates: Collection[int]) -> Predictions:
        assert self._weight is not None
        weight = self._weight
        others = sorted(token for token in set(candidates) if token < len(weight))
        ids = torch.tensor(others, dtype=torch.long, device=weight.device)
        ids = ids[~torch.isin(ids, self._hot)]
        logits = torch.cat([states @ self._rows.T, states @ weight[ids].T], dim=-1)  # [E, hot + others]
        return _likeliest(logits, torch.cat([self._hot, ids]))

    def _note(self, predictions: Predictions) -> None:
        """Count what was predicted; now and then the hot list becomes what was predicted most."""
        assert self._weight is not None
        tokens = predictions.tokens[predictions.tokens >= 0]
        np.add.at(self._counts, tokens, 1)
        self._since += len(predictions.tokens)
        if self._since < RENEW_AFTER:
            return
        most = max(MTP_WIDTH, len(self._counts) // HOT_SHARE)
        best = np.argpartition(-self._counts, most)[:most]
        self._hot = torch.from_numpy(np.sort(best)).to(self._weight.device)
        self._rows = self._weight[self._hot]
        self._since, self.may_gather = 0, True
        self._counts >>= 1


def _likeliest(logits: torch.Tensor, ids: torch.Tensor | None) -> Predictions:
    """The likeliest tokens of logits `[E, V]`; of columns that stand for `ids`, where these are given."""
    chances = logits.float().softmax(-1)
    best, places = chances.topk(min(MTP_WIDTH, chances.shape[-1]))
    odds = best.clamp(_LEAST, 1.0 - _LEAST).logit().clamp(max=_MOST_ODDS)
    tokens = (places if ids is None else ids[places]).int()
    found = torch.cat([tokens, odds.view(torch.int32)], dim=-1).cpu().numpy()  # one copy from a device
    width = tokens.shape[-1]
    wide_tokens = np.full((len(found), MTP_WIDTH), -1, np.int32)
    wide_odds = np.zeros((len(found), MTP_WIDTH))
    wide_tokens[:, :width], wide_odds[:, :width] = found[:, :width], found[:, width:].copy().view(np.float32)
    return Predictions(wide_tokens, wide_odds)


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


@contextmanager
def prompt_passes(model: Any, cache_name: str) -> Iterator[list[PromptPass]]:
    """Record the prompts that this thread feeds to a model, and their states, while the context lasts."""
    passes, begun = list[PromptPass](), list[tuple[torch.Tensor | None, int]]()

    def note_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get(cache_name)
        start = 0 if cache is None else int(cache.get_seq_length())
        begun[:] = [(kwargs.get("input_ids", args[0] if args else None), start)]

    def note_states(output: Any) -> None:
        states: torch.Tensor = output[0]  # [B, T, H]
        ids, start = begun.pop() if begun else (None, 0)
        if ids is not None and ids.shape == states.shape[:2]:
            passes.append(PromptPass(ids.tolist(), start, states.detach()))

    with hooked(model, before=note_ids), hooked(model.get_decoder(), after=note_states):
        yield passes


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
        with prompt_passes(self._runner.model, self._runner.facts.cache_name or CACHE) as passes:
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
