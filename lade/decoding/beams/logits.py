"""Logits for beam search: all beams of a prompt are paths of one token tree.

The caller performs the beam search itself. It passes the tokens that extend the beams, and gets the logits after
them. If the tree has these nodes already, no forward pass is needed. Otherwise the new tokens are fed, together with
drafts of the beam steps to come:

    trunk, cached                 tree, cached too                   fed by the next pass
    Once upon a time there was ─┬─ a ─── little ─┬─ girl           ┬─ who ─── ...
                                │                └─ boy            ├─ named ─ ...
                                └─ an ── old ───── man             └─ called

The common prefix of the beams is cached once, not once per beam, and a drafted node stays in the tree as long as some
beam may still reach it.

Each of several prompts has a tree and a cache row of its own. They take their beam steps together, so a pass is
needed as soon as one tree lacks a node; the others then use it to draft further ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch

from lade.config import LookaheadConfig
from lade.decoding.beams.tree import Branches, BranchRow, Follow
from lade.decoding.drafting.lookahead import NGramPool, chosen_ngrams
from lade.decoding.loop import KVCache, PromptRunner, Texts
from lade.decoding.tree import ROOT, TokenTree
from lade.stats import Stats, Step


class Recycler:
    """Maps the last 1 to `orders` tokens of a text to the top next tokens last seen after them.

    Of contexts of each length at most `max_contexts` are kept: the least recently learned is evicted first.
    """

    def __init__(self, orders: int = 3, max_contexts: int = 65_536) -> None:
        self.orders, self._max_contexts = orders, max_contexts
        self._tables: list[dict[tuple[int, ...], Sequence[Follow]]] = [{} for _ in range(orders)]

    def learn(self, text: Sequence[int], follows: Sequence[Follow]) -> None:
        """Store the tokens that follow `text`, likeliest first; its last `orders` tokens are the context."""
        for order, table in enumerate(self._tables[: len(text)], start=1):
            context = tuple(text[-order:])
            table.pop(context, None)  # reinserting moves a key to the end of the dictionary: eviction is LRU
            table[context] = follows
            if len(table) > self._max_contexts:
                del table[next(iter(table))]

    def lookup(self, text: Sequence[int]) -> Sequence[Follow]:
        """Return the tokens that followed the longest known suffix of `text`; empty if even its last token is new."""
        for order in range(min(self.orders, len(text)), 0, -1):
            follows = self._tables[order - 1].get(tuple(text[-order:]))
            if follows is not None:
                return follows
        return ()


FOLLOWS = 8  # next tokens stored per row of logits; with more beams than that, one per beam


class BeamGuesser:
    """Adds to the tree of a beam search the tokens that its next steps are expected to select.

    The next N - 1 beam steps are simulated, with k + W beams, or not at all if W is 0. At a node that has been fed, the
    next tokens and their log-probabilities are known; elsewhere those are used that the model last gave after the same
    context. This replaces the Jacobi window, which predicts one text where k are needed: under the best beam 7 columns
    saved fewer passes than as many nodes of this simulation. After each beam G n-grams of the pool are tried.

    The recycler may be shared with other prompts. Tokens of the text `source`, the encoder's input, may recur.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        num_beams: int,
        excluded: Collection[int],
        recycler: Recycler,
        source: Sequence[int] = (),
    ) -> None:
        self.kept = max(FOLLOWS, num_beams)
        self._config, self._excluded = config, frozenset(excluded)
        self._width = num_beams + config.window if config.window else 0
        self._recycler = recycler
        self._pool = NGramPool(config.ngram, config.guesses, excluded)
        if config.prompt_ngrams:
            self._pool.learn_text(source, 0, "prompt")
        self._known_text = 0  # length of the trunk whose n-grams are in the pool

    def learn(self, branches: Branches, first: int) -> None:
        """Learn from a forward pass over the nodes from index `first` on."""
        for node in range(first, len(branches.follows)):
            self._recycler.learn(branches.ending(node, self._recycler.orders), branches.follows[node])
        argmax_ids = [follows[0][0] if follows else -1 for follows in branches.follows]
        self._pool.learn(chosen_ngrams(branches.tree, argmax_ids, self._config.ngram)[max(first - 1, 0) :], "pool")

    def learn_text(self, text: Sequence[int]) -> None:
        """Add the n-grams of the trunk that are not in the pool yet."""
        if self._config.prompt_ngrams:
            self._pool.learn_text(text, self._known_text, "prompt")
        self._known_text = len(text)

    def grow(self, branches: Branches, beams: Mapping[int, float], room: int | None) -> None:
        """Add at most `room` levels of guesses after the beams, given as last nodes with log-probabilities."""
        steps = self._config.ngram - 1 if room is None else min(self._config.ngram - 1, room)
        self._simulate(branches, beams, steps)
        for node in beams:
            for guess, source in self._pool.lookup(branches.tree.ids[node]):
                place: int | None = node
                for token in guess[:steps]:
                    place = branches.tree.add(place, token, source)

    def _simulate(self, branches: Branches, beams: Mapping[int, float], steps: int) -> None:
        ends = list(beams.items())
        for _ in range(steps):
            candidates = [
                (score + gain, node, token)
                for node, score in ends
                for token, gain in self._next_tokens(branches, node)
                if token not in self._excluded
            ]
            best = nlargest(self._width, candidates)
            grown = [(branches.tree.add(node, token, "memory"), score) for score, node, token in best]
            ends = [(child, score) for child, score in grown if child is not None]

    def _next_tokens(self, branches: Branches, node: int) -> Sequence[Follow]:
        if node < len(branches.follows):
            return branches.follows[node]
        return self._recycler.lookup(branches.ending(node, self._recycler.orders))


def top_follows(logits: torch.Tensor, count: int) -> list[list[Follow]]:
    """Return the top next tokens of each row of logits `[S, V]` with their log-probabilities, in descending order."""
    logits = logits.float()
    values, ids = logits.topk(min(count, logits.shape[-1]))
    values -= logits.logsumexp(-1, keepdim=True)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


class BeamRow(BranchRow):
    """One prompt of a beam search; `beams`, `[k]`, are the last nodes of its beams."""

    def __init__(self, prompt: Sequence[int], num_beams: int, guesser: BeamGuesser) -> None:
        self.branches = Branches.of(prompt)
        self.beams = [ROOT] * num_beams
        self._scores = [0.0] * num_beams  # log-probabilities of the beams before processors, used for drafting alone
        self._guesser = guesser

    @property
    def position(self) -> int:
        """Position of the last token of the beams, which are equally long."""
        return len(self.branches.trunk) + self.tree.depths[self.beams[0]]

    @property
    def known(self) -> bool:
        """True if the logits after the beams are available without a forward pass."""
        return all(node in self.branches.logits for node in self.beams)

    @property
    def logits(self) -> torch.Tensor:
        """Logits after the beams, `[k, V]`."""
        return torch.stack([self.branches.logits[node] for node in self.beams])

    def reorder(self, beams: Sequence[int]) -> None:
        """Let beam i continue what was beam `beams[i]`."""
        self.beams = [self.beams[beam] for beam in beams]
        self._scores = [self._scores[beam] for beam in beams]

    def lengthen(self, tokens: Sequence[int]) -> None:
        """Append to each beam its token."""
        for beam, token in enumerate(tokens):
            follows = self.branches.follows[self.beams[beam]]
            self._scores[beam] += dict(follows).get(token, follows[-1][1])
            child = self.tree.add(self.beams[beam], token, "beam")
            assert child is not None  # the tree has no `max_depth`
            self.beams[beam] = child

    def prune(self) -> list[int]:
        """Drop nodes that no beam can reach; return the nodes that stay in the cache, in the old numbering."""
        kept, numbers = self.branches.prune(self.beams)
        self.beams = [numbers[node] for node in self.beams]
        return kept

    def grow(self, room: int | None) -> None:
        """Add at most `room` levels of guesses after the beams; None for no limit."""
        self._guesser.learn_text(self.branches.trunk)
        self._guesser.grow(self.branches, dict(zip(self.beams, self._scores, strict=True)), room)

    def learn(self, logits: torch.Tensor) -> None:
        """Store the logits `[S, V]` of a pass at the nodes not seen before; further rows are padding."""
        first, new = self.seen, logits[: len(self.tree) - self.seen]
        self.branches.learn(new, top_follows(new, self._guesser.kept))
        self._guesser.learn(self.branches, first)


class BranchCache(KVCache, Protocol):
    """Keys and values of B rows, which end with nodes of their trees."""

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """Keep the tokens on each row's path, out of its last `fed` ones and the `held[b]` before them."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""


CacheT = TypeVar("CacheT", bound=BranchCache)
CacheT_contra = TypeVar("CacheT_contra", bound=BranchCache, contravariant=True)


class BranchRunner(PromptRunner[CacheT_contra], Protocol[CacheT_contra]):
    """Runs passes over trees whose first nodes are cached."""

    @property
    def refeeds(self) -> bool:
        """True if `extend` feeds the held nodes again."""

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: CacheT_contra) -> torch.Tensor:
        """Feed one tree per row without its `held[b]` first nodes, the last ones in the cache; return `[B, S, V]`."""


class PassMeter:
    """Reports each forward pass to `stats` when the next one begins, and the tokens that it served are known."""

    def __init__(self, stats: Stats, rows: int) -> None:
        self._stats, self.passes = stats, 0
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._sources: list[list[str]] = [[] for _ in range(rows)]
        self._fed: Sequence[int] = [0] * rows
        self._seconds = self._forward_s = 0.0

    @property
    def yielded(self) -> float:
        """Mean number of tokens per row since the last pass, over the rows that got any."""
        counts = [len(tokens) for tokens in self._tokens if tokens]
        return sum(counts) / len(counts) if counts else 0.0

    def record_pass(self, fed: Sequence[int], seconds: float, forward_s: float) -> None:
        """Record a pass that fed `fed[b]` tokens in row b and took `seconds`, of which the model took `forward_s`."""
        self._fed, self._seconds, self._forward_s = fed, seconds, forward_s

    def record_token(self, row: int, token: int, source: str) -> None:
        """Record a token of a row; padding is not counted."""
        self._tokens[row].append(token)
        self._sources[row].append(source)

    def end(self) -> None:
        """Report the last pass."""
        steps = [
            Step(self.passes, tokens, sources, max(1, fed), self._seconds)
            for tokens, sources, fed in zip(self._tokens, self._sources, self._fed, strict=True)
            if tokens
        ]
        if steps:
            self._stats.add(*steps, forward_s=self._forward_s)
        self._tokens, self._sources = [[] for _ in self._tokens], [[] for _ in self._sources]
        self.passes += 1


class BeamLogits(Generic[CacheT]):
    """Provides the logits after the beams of B prompts, k each; prompt b has the beams b * k to b * k + k - 1.

    The empty cache will hold trunk and tree of each prompt. Nothing is drafted after excluded ids (EOS, padding);
    `sources` are B texts whose tokens may recur, besides the prompts themselves.

    Figures are added to `stats` as if the beams of a prompt were one text: a beam step counts as one token per prompt,
    however many beams it extends; the tokens fed in a pass are those of all beams of a prompt together.
    """

    def __init__(
        self,
        prompts: Texts,
        num_beams: int,
        config: LookaheadConfig,
        runner: BranchRunner[CacheT],
        cache: CacheT,
        stats: Stats,
        excluded: Collection[int] = (),
        sources: Texts = (),
    ) -> None:
        self.runner, self.cache, self.num_beams = runner, cache, num_beams
        recycler = Recycler()  # logits of one prompt help the others
        self.rows = [
            BeamRow(prompt, num_beams, BeamGuesser(config, num_beams, excluded, recycler, source))
            for prompt, source in zip(prompts, sources or [()] * len(prompts), strict=True)
        ]
        self._prompts = prompts
        self._fed = 0  # cache slots that the last pass took after the longest row
        self._held = [1] * len(self.rows)  # cached nodes before that pass; after prefill, the root alone
        self._meter = PassMeter(stats, len(self.rows))
        self._last_pass: tuple[float, Sequence[int], float] = 0.0, [], 0.0  # start, tokens fed, model seconds

    def prefill(self) -> torch.Tensor:
        """Run the prompts; return the logits after them, `[B * k, V]`, the same for all beams of a prompt."""
        self._last_pass = perf_counter(), [len(prompt) for prompt in self._prompts], 0.0
        logits = self.runner.prefill(self._prompts, self.cache)  # [B, V]
        for row, row_logits in zip(self.rows, logits, strict=True):
            row.learn(row_logits[None])
        return self._answer()

    def reorder(self, beams: Sequence[int]) -> None:
        """Let beam i continue what was beam `beams[i]`, of the same prompt."""
        for number, row in enumerate(self.rows):
            first = number * self.num_beams
            row.reorder([beam - first for beam in beams[first : first + self.num_beams]])

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append to each beam its token; return the logits after them, `[B * k, V]`."""
        for number, row in enumerate(self.rows):
            row.lengthen(tokens[number * self.num_beams :][: self.num_beams])
        if not all(row.known for row in self.rows):
            self._pass()
        return self._answer()

    def report(self) -> None:
        """Report the last pass, with the time of the beam steps that it served; call it at the end, too."""
        start, fed, forward_s = self._last_pass
        self._meter.record_pass(fed, perf_counter() - start, forward_s)
        self._meter.end()

    def leave_rows(self) -> None:
        """Expand the cache to one row per beam, as plain decoding leaves it; the search cannot continue after that."""
        self.cache.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(self.num_beams))
        paths = [row.branches.path(node) for row in self.rows for node in row.beams]
        self.cache.keep(paths, self._fed, [held for held in self._held for _ in range(self.num_beams)])

    def _pass(self) -> None:
        self.report()
        start = perf_counter()
        self.cache.keep([row.prune() for row in self.rows], self._fed, self._held)
        for row in self.rows:
            row.grow(self.runner.room(row.position))
        trees, self._held = [row.tree for row in self.rows], [row.seen for row in self.rows]
        logits = self.runner.extend(trees, self._held, self.cache)  # [B, S, V]
        self._fed = logits.shape[1]
        fed = [len(tree) - held for tree, held in zip(trees, self._held, strict=True)]
        self._last_pass = start, fed, self.runner.pass_time.wall_s
        for row, row_logits in zip(self.rows, logits, strict=True):
            row.learn(row_logits)

    def _answer(self) -> torch.Tensor:
        for number in range(len(self.rows)):
            self._meter.record_token(number, -1, "beam" if self._meter.passes else "prefill")
        return torch.cat([row.logits for row in self.rows])
