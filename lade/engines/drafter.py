"""Drafts for requests of any engine, from token ids and rows of logits.

    begin(request, prompt)
      propose(requests, budgets) ─▶ drafts ─▶ the engine's pass ─▶ learn(request, tokens, rows), observe(...)
    end(request)

The engine verifies and samples; the drafter holds neither model, loop nor KV cache. It drafts as `lade.generate` does:
the likeliest continuations by a memory of logits rows under hashed contexts, notes of what was predicted at places
ahead, and earlier occurrences of the text's end (see `decoding.kernels.native_tree`). Unlike there, sizes come from one
price per token, as engines pay by the token, and passes are only observed, never made to measure.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from lade.decoding import readout
from lade.decoding.drafting.memory import RATE, ContextMemory
from lade.decoding.kernels import tables
from lade.decoding.kernels.layout import LONGEST, WIDTH, Ints
from lade.decoding.kernels.native_tree import NativeTree, Requests, learn_requests
from lade.decoding.kernels.tables import Tables
from lade.engines.price import FIRST, NEWS, TokenPrice
from lade.errors import ConfigError, InputError
from lade.memory import Memory

_INT32 = np.dtype(np.int32)  # compared with this, a dtype is not converted first
_NO_ROWS = np.empty((0, WIDTH), np.int32)
_ROWS_AT_ONCE = 1024  # logits are copied to float32 on their device to be read
_ROWS_KEPT = 0.95  # weight of the steps before, in the share of steps that come with rows


@dataclass(slots=True)  # to make a frozen one takes three times as long
class EngineDraft:
    """Tokens that may follow a request's text, each after its parent; an engine may feed the first ones alone.

    Attributes:
        ids: `[N]` token ids.
        parents: `[N]`, the index of the token before each; -1 for the last token of the text.
        scores: `[N]`, the estimated probability that each is accepted.
    """

    ids: list[int]
    parents: list[int]
    scores: list[float]

    def __len__(self) -> int:
        """Return the number of drafted tokens."""
        return len(self.ids)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return `[1 + N, 1 + N]`, True where a token sees another: the text's last one, its ancestors and itself."""
        mask = np.eye(1 + len(self.ids), dtype=np.bool_)
        mask[:, 0] = True
        for node, parent in enumerate(self.parents, start=1):
            mask[node] |= mask[parent + 1]
        return mask

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes, from 0 for the text's last token on, after which the model chose each of `tokens`."""
        nodes = [0]
        for token in tokens[:-1]:
            for number in range(nodes[-1], len(self.ids)):  # children come after their parents
                if self.ids[number] == token and self.parents[number] == nodes[-1] - 1:
                    nodes.append(number + 1)
                    break
            else:
                break
        return nodes


_ROOT = EngineDraft([], [], [])
_Learned = tuple["_EngineRequest", Hashable, Sequence[int] | npt.NDArray[Any], npt.NDArray[np.int32], int]
"""A pass of one request: its state, what `EngineDrafter.learn` takes, and the number of tokens in its draft."""


@dataclass(slots=True, eq=False)
class _EngineRequest:
    """The state of a request."""

    tree: NativeTree  # grows its drafts; it takes some 130 KiB
    memory: ContextMemory  # what it learns from and adds to
    tokens: list[int]  # its text, prompt included
    draft: EngineDraft | None = None  # what the engine verifies; None if nothing was proposed after the last token
    is_sure: bool = False  # whether the text was learned as rows that are certain of it, as no logits came


class _EngineRequests(dict[Hashable, _EngineRequest]):
    """The requests that have begun and not ended, by name."""

    def __missing__(self, request: Hashable) -> NoReturn:
        """Refuse a name."""
        raise InputError(f"request={request!r} is not known: begin it first; {len(self)} are known")


class EngineDrafter:
    """Drafts tokens for the requests of an inference engine, which verifies them.

    >>> drafter = lade.EngineDrafter(vocabulary=100)
    >>> drafter.begin("a", [1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    >>> drafter.propose(["a"], 2)[0].ids
    [3, 4]
    >>> drafter.learn("a", [3, 4, 1])  # both were accepted, and the model chose 1 after them

    Rows of logits teach far more than tokens alone, those of rejected drafts included: an engine that can should pass
    what `read_rows` returns to `learn`. One thread may use a drafter at a time; several may share a memory.

    Args:
        vocabulary: ids below it can be fed.
        excluded: ids that are never drafted (end of sequence, padding).
        memory: what requests learn from unless `begin` names another one; None for a new one.
        trees: whether drafts are trees; else chains, for engines that verify nothing else.
        price: expected tokens that one more drafted token must bring; None to go by the passes that `observe` is given.

    Attributes:
        memory: the default memory; `lade.Memory.save` keeps it in a file.

    Raises:
        ConfigError: an argument is out of range.
        UnsupportedError: the compiled kernels are missing.
    """

    def __init__(
        self,
        vocabulary: int,
        excluded: Collection[int] = (),
        *,
        memory: Memory | None = None,
        trees: bool = False,
        price: float | None = None,
    ) -> None:
        if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or vocabulary < 1:
            raise ConfigError("vocabulary", vocabulary, "give the number of token ids of the model, at least 1")
        self.vocabulary, self.memory, self._trees = vocabulary, Memory() if memory is None else memory, trees
        self._excluded, self._price = tuple(excluded), TokenPrice(price)
        self._with_rows = 1.0  # share of late steps that came with rows of logits
        self._requests = _EngineRequests()
        self._batch: tuple[Sequence[_EngineRequest], Mapping[ContextMemory, Tables], Requests] | None = None

    @property
    def requests(self) -> list[Hashable]:
        """The requests that have begun and not ended."""
        return list(self._requests)

    def __contains__(self, request: Hashable) -> bool:
        """Return whether a request has begun and not ended."""
        return request in self._requests

    @property
    def price(self) -> float:
        """Expected tokens that one more drafted token must bring now, for any request."""
        return self._price.value

    def begin(self, request: Hashable, prompt: Sequence[int] | npt.NDArray[Any], memory: Memory | None = None) -> None:
        """Begin a request.

        Args:
            request: the name of the request until `end`.
            prompt: `[T]` token ids, at least one.
            memory: the memory of its tenant. Timing is a side channel: requests that share a memory can find out which
                texts it has seen. None for the drafter's own.

        Raises:
            InputError: the request has begun already, or the prompt has no ids, or others than the vocabulary's.
        """
        if request in self._requests:
            raise InputError(f"request={request!r} has begun already: end it first, or give another name")
        tokens = self._checked("prompt", prompt)
        tree = NativeTree(self._excluded, self.vocabulary)
        tree.set_prompt(len(tokens))
        state = _EngineRequest(tree, self.memory if memory is None else memory, tokens)
        self._requests[request] = state
        _learn_text(state, 1, is_sure=False)
        tree.read(tokens)

    def propose(self, requests: Sequence[Hashable], budgets: int | Sequence[int]) -> list[EngineDraft]:
        """Draft what may follow the texts of these requests.

        Args:
            requests: `[B]` names of requests.
            budgets: the most tokens to draft, for all or, `[B]`, for each.

        Returns:
            `[B]` drafts; of trees the likelier nodes come about first, and each after its parent.

        Raises:
            InputError: a request is not known, or a budget is no whole number >= 0.
        """
        each = [budgets] * len(requests) if isinstance(budgets, int) else budgets
        if len(each) != len(requests):
            raise InputError(f"budgets has {len(each)} entries for {len(requests)} requests: give one for each")
        for budget in each if each is budgets else each[:1]:
            if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < 0:
                raise InputError(f"budgets has {budget!r}: give whole numbers of tokens >= 0")
        states = [self._requests[request] for request in requests]
        return self._draft(states, each) if states else []

    def learn(
        self, request: Hashable, tokens: Sequence[int] | npt.NDArray[Any], rows: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Learn from a pass that verified the last draft of a request, or its first tokens, or none of it.

        Args:
            request: the name that `begin` gave it.
            tokens: `[A]` ids that the request got, at least one: accepted ones, and the one the model chose after them.
            rows: `[F, WIDTH]` int32 from `read_rows`, of the logits at each token that was fed: the text's last one,
                then the draft's first F - 1, accepted or not. None where there are no logits; then tokens are learned
                as if the model had been sure of them, which teaches less.

        Raises:
            InputError: the request is not known, ids are not the vocabulary's, or the rows are of another dtype or
                shape, or more than were drafted, or fewer than the tokens need.
        """
        state = self._requests[request]
        emitted = self._checked("tokens", tokens)
        draft = _ROOT if state.draft is None else state.draft
        path = draft.path(emitted)
        if rows is not None:
            _check_rows(rows, len(draft) + 1, path[-1] + 1)
        if state.draft is None:
            state.tree.start(state.tokens)
        state.draft = None
        self._with_rows += (1.0 - _ROWS_KEPT) * ((rows is not None) - self._with_rows)
        if rows is None and not state.is_sure and len(state.tokens) > 1:
            tails, following = _tails(state, 1)
            state.memory.learn(tails, tables.certain(following))
        state.is_sure |= rows is None
        chosen = emitted[: len(path)]
        state.memory.learn_tree(state.tree, _NO_ROWS if rows is None else np.ascontiguousarray(rows), path, chosen)
        if rows is None:
            state.memory.learn(state.tree.contexts(path), tables.certain(np.array(chosen, dtype=np.int64)))
        known = len(state.tokens) + len(path)
        state.tokens += emitted
        _learn_text(state, known, is_sure=rows is None)
        state.tree.read(state.tokens)

    def learn_batch(
        self,
        requests: Sequence[Hashable],
        tokens: Sequence[Sequence[int] | npt.NDArray[Any]],
        rows: Sequence[npt.NDArray[np.int32] | None],
    ) -> None:
        """Learn from a pass of many requests as `learn` does from each, in a fraction of the time.

        Args:
            requests: `[B]` names of requests, each once.
            tokens: `[B]`, the ids that each got.
            rows: `[B]`, the rows of each, or None; those without are learned from first.

        Raises:
            InputError: see `learn`; a request is named twice; or the lengths differ. Where the rows of a request do not
                fit its draft, others may have been learned from.
        """
        if not len(requests) == len(tokens) == len(rows) == len(set(requests)):
            counts = f"{len(requests)} requests ({len(set(requests))} different ones), {len(tokens)} tokens"
            raise InputError(f"{counts} and {len(rows)} rows: give one entry for each request, and each request once")
        batch = list[_Learned]()
        for request, new, entries in zip(requests, tokens, rows, strict=True):
            state = self._requests[request]
            if entries is None or state.draft is None:
                self.learn(request, new, entries)
            else:
                batch.append((state, request, new, entries, len(state.draft.ids)))
        if batch:
            self._learn_drafted(batch)

    def _learn_drafted(self, batch: Sequence[_Learned]) -> None:
        """Learn from a pass of requests whose drafts came with rows."""
        states, names, tokens, rows, drafted = map(list, zip(*batch, strict=True))
        ids, counts = self._checked("tokens", [*chain.from_iterable(tokens)]), [*map(len, tokens)]
        if not all(counts):
            raise InputError(f"tokens has none for request={names[counts.index(0)]!r}: give at least one")
        for found, count in zip(rows, drafted, strict=True):
            _check_rows(found, count + 1, 1)
        ends, row_ends, entries = [*accumulate(counts)], [*accumulate(map(len, rows))], np.concatenate(rows)
        start = 0
        while start < len(states):
            with ExitStack() as stack:
                memories = sorted({state.memory for state in states}, key=id)
                lent = {memory: stack.enter_context(memory.lent()) for memory in memories}
                requests = self._batch_of(states, lent)
                stopped = learn_requests(requests, drafted, start, ids, ends, entries, row_ends, RATE)
            learned = slice(start, stopped)
            for state, count, end in zip(states[learned], counts[learned], ends[learned], strict=True):
                state.draft = None
                state.tokens += ids[end - count : end]
                self._with_rows += (1.0 - _ROWS_KEPT) * (1.0 - self._with_rows)
            start = stopped
            if start < len(states):  # without room, or refused
                self.learn(names[start], tokens[start], rows[start])
                start += 1

    def _batch_of(self, states: Sequence[_EngineRequest], tables: Mapping[ContextMemory, Tables]) -> Requests:
        """Return trees and tables of requests as kernels take them; those of the last call if it was for the same."""
        if self._batch is None or self._batch[:2] != (states, tables):
            self._batch = states, tables, Requests([(state.tree, tables[state.memory]) for state in states])
        return self._batch[2]

    def observe(self, fed: int, emitted: int, seconds: float) -> None:
        """Learn what tokens cost, from a pass of the engine.

        Passes over prompts should be left out, as should pauses.

        Args:
            fed: tokens that the pass fed, of all requests.
            emitted: tokens that all requests together got.
            seconds: time from this pass to the next, drafting included.

        Raises:
            InputError: one of them is out of range.
        """
        self._price.observe(fed, emitted, seconds)

    def end(self, request: Hashable) -> None:
        """End a request, finished or aborted; what it taught stays in its memory.

        Raises:
            InputError: the request is not known.
        """
        self.text(request)  # refuses a name that is not known
        del self._requests[request]
        self._batch = None

    def text(self, request: Hashable) -> Sequence[int]:
        """Return the ids of a request, prompt included, as the drafter knows them; not to be changed.

        Raises:
            InputError: the request is not known.
        """
        return self._requests[request].tokens

    @staticmethod
    def pack_rows(logits: torch.Tensor) -> torch.Tensor:
        """Reduce rows of logits on their device, for `unpack_rows` to copy once they are needed; starts no copy itself.

        Args:
            logits: `[M, V]`, of any floating-point dtype, before penalties and temperature.

        Returns:
            int32 `[M, 1 + WIDTH]`, 28 bytes a row.

        Raises:
            InputError: the logits are of another dtype or shape.
        """
        if logits.ndim != 2 or not logits.is_floating_point():
            found = f"{logits.dtype} of shape {list(logits.shape)}"
            raise InputError(f"logits are {found}: give floating-point ones [M, V]")
        parts = [readout.packed(part, wants_entries=True) for part in logits.detach().split(_ROWS_AT_ONCE)]
        return torch.cat(parts)

    @staticmethod
    def unpack_rows(packed: torch.Tensor) -> npt.NDArray[np.int32]:
        """Copy the result of `pack_rows` to the host: `[M, WIDTH]` int32, as `EngineDrafter.learn` takes rows."""
        entries = readout.unpacked(packed).entries
        assert entries is not None
        return entries

    @staticmethod
    def read_rows(logits: torch.Tensor) -> npt.NDArray[np.int32]:
        """Read rows of logits `[M, V]` for `EngineDrafter.learn`, `[M, WIDTH]` int32; waits for their device.

        Raises:
            InputError: the logits are of another dtype or shape.
        """
        return EngineDrafter.unpack_rows(EngineDrafter.pack_rows(logits))

    def _draft(self, states: Sequence[_EngineRequest], budgets: Sequence[int]) -> list[EngineDraft]:
        """Grow a draft for each request, of at most so many tokens."""
        bound = {memory: memory.bound for memory in {state.memory for state in states}}
        prices = self._price.value, NEWS * self._with_rows, FIRST
        ids, parents, scores, ends = self._batch_of(states, bound).propose(budgets, prices, trees=self._trees)
        drafts, end = list[EngineDraft](), 0
        for state, after in zip(states, ends, strict=True):
            state.draft = draft = EngineDraft(ids[end:after], parents[end:after], scores[end:after])
            drafts.append(draft)
            end = after
        return drafts

    def _checked(self, name: str, tokens: Sequence[int] | npt.NDArray[Any]) -> list[int]:
        """Return ids as a list, all of them the vocabulary's."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            found = f"{ids.dtype} of shape {list(ids.shape)}"
            raise InputError(f"{name} is {found}: give a flat list of token ids, at least one")
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            wrong = int(ids[(ids < 0) | (ids >= self.vocabulary)][0])
            raise InputError(f"{name} has the id {wrong}: ids are from 0 to {self.vocabulary - 1}")
        listed: list[int] = ids.tolist()
        return listed


def _check_rows(rows: Any, fed: int, needed: int) -> None:
    """Raise unless rows are entries of at most `fed` tokens, and of at least those that the emitted tokens need."""
    if not isinstance(rows, np.ndarray) or rows.dtype != _INT32 or rows.ndim != 2 or rows.shape[1] != WIDTH:
        kind = f"{rows.dtype} of shape {list(rows.shape)}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InputError(f"rows are {kind}: give int32 [F, {WIDTH}], the result of read_rows")
    if not needed <= len(rows) <= fed:
        raise InputError(
            f"rows has {len(rows)}, where {needed} to {fed} are possible: give one for each token that was fed, "
            "the text's last one and the draft's first ones, in their order"
        )


def _tails(state: _EngineRequest, start: int) -> tuple[Ints, npt.NDArray[np.int64]]:
    """Return the contexts `[M, LONGEST]` of the text's tokens from number `start` on, and these tokens `[M]`."""
    first = max(0, start - LONGEST)
    text = np.array(state.tokens[first:], dtype=np.int64)
    return tables.tails_of(text, start - first - 1, len(state.tokens) - start), text[start - first :]


def _learn_text(state: _EngineRequest, start: int, *, is_sure: bool) -> None:
    """Learn which tokens followed which, from number `start` of the text on, and that the model was sure of them."""
    if start < len(state.tokens):
        tails, following = _tails(state, start)
        state.memory.learn_text(tails, following)
        if is_sure:
            state.memory.learn(tails, tables.certain(following))
