"""Logits for beam search: all beams of a prompt are paths of one token tree, which a pass extends where it is needed.

What a beam step is, which tokens and beams it takes, is decided by whoever asks. Here the questions are answered: the
tokens that lengthen the beams come in, the logits behind them go out. Where the tree has these nodes already, no pass
is needed. Otherwise the new tokens are fed, and guesses of the beam steps after them:

    trunk, in the cache           tree, in the cache too             fed by the next pass
    Once upon a time there was ─┬─ a ─── little ─┬─ girl           ┬─ who ─── ...
                                │                └─ boy            ├─ named ─ ...
                                └─ an ── old ───── man             └─ called

What the beams have in common is cached once, not once a beam; and a guess that was not taken stays in the tree for as
long as some beam may still get to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch

from lade.config import LookaheadConfig
from lade.decoding.beam_guesses import BeamGuesser, top_follows
from lade.decoding.branches import Branches
from lade.decoding.engine import Cache
from lade.decoding.tree import ROOT, TokenTree
from lade.stats import Stats, Step

CacheT = TypeVar("CacheT", bound=Cache)
CacheT_contra = TypeVar("CacheT_contra", bound=Cache, contravariant=True)


class BeamRunner(Protocol[CacheT_contra]):
    """Runs the model on one row; see `lade.decoding.engine.Runner`."""

    forward_s: float

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        ...

    def prefill(self, rows: Sequence[Sequence[int]], cache: CacheT_contra) -> torch.Tensor:
        """Feed what is not cached yet of rows of equal length; logits of the last token, `[B, V]`."""
        ...

    def extend(self, tree: TokenTree, cached: int, cache: CacheT_contra) -> torch.Tensor:
        """Feed the nodes of a tree from number `cached` on; those before are last in the cache. Logits `[S, V]`."""
        ...


class BeamMeter:
    """Reports each pass to `stats` once it is known how many beam steps it served: when the next one begins."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._passes = self._served = self._fed = 0
        self._start = self._forward_s = 0.0

    def begin(self) -> None:
        """A pass begins, and the one before has served its last step."""
        self.end()
        self._start = perf_counter()

    def ran(self, fed: int, forward_s: float) -> None:
        """The model was fed so many tokens, in so many seconds."""
        self._fed, self._forward_s = fed, forward_s

    def answered(self) -> None:
        """A beam step got its logits."""
        self._served += 1

    def end(self) -> None:
        """No further step is served by the last pass."""
        if not self._served:
            return
        kind = "beam" if self._passes else "prefill"
        step = Step(self._passes, [-1] * self._served, [kind] * self._served, self._fed, perf_counter() - self._start)
        self._stats.add(step, forward_s=self._forward_s)
        self._passes, self._served = self._passes + 1, 0


class BeamLogits(Generic[CacheT]):
    """Answers what follows the beams of one prompt.

    Args:
        prompt: ids, at least one.
        num_beams: k.
        config: sizes, see `BeamGuesser`.
        runner: runs the model.
        cache: empty; it will hold the trunk and the tree.
        stats: is added to, as if this were one text: a beam step counts as one token, however many beams it lengthens;
            the tokens fed in a pass are those of all beams together.
        excluded: ids (end of sequence, padding) behind which nothing is guessed.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        num_beams: int,
        config: LookaheadConfig,
        runner: BeamRunner[CacheT],
        cache: CacheT,
        stats: Stats,
        excluded: Collection[int] = (),
    ) -> None:
        self.runner, self.cache = runner, cache
        self.branches = Branches.of(prompt)
        self.beams = [ROOT] * num_beams  # the node that each beam ends with
        self._scores = [0.0] * num_beams  # log-probabilities of the beams without processors; only guesses need them
        self._logits: dict[int, torch.Tensor] = {}  # `[V]` behind each node that was fed and that a beam may get to
        self._guesser = BeamGuesser(config, num_beams, excluded)
        self._meter = BeamMeter(stats)

    def prefill(self) -> torch.Tensor:
        """Run the prompt; the logits behind it, `[k, V]`, the same for all beams."""
        prompt = self.branches.trunk + self.branches.tree.ids
        self._meter.begin()
        logits = self.runner.prefill([prompt], self.cache)  # [1, V]
        self._meter.ran(len(prompt), 0.0)
        self._guesser.learn_text(prompt)
        self._take_in(logits)
        return self._answer()

    def reorder(self, beams: Sequence[int]) -> None:
        """Beam i goes on from what was beam `beams[i]`."""
        self.beams = [self.beams[beam] for beam in beams]
        self._scores = [self._scores[beam] for beam in beams]

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        """Lengthen each beam by its token; the logits behind them, `[k, V]`."""
        for beam, token in enumerate(tokens):
            follows = self.branches.follows[self.beams[beam]]
            self._scores[beam] += dict(follows).get(token, follows[-1][1])
            child = self.branches.tree.add(self.beams[beam], token, "beam")
            assert child is not None  # the tree itself has no greatest depth
            self.beams[beam] = child
        if not all(node in self._logits for node in self.beams):
            self._pass()
        return self._answer()

    def finish(self, *, as_rows: bool) -> None:
        """Report the last pass; `as_rows` gives the cache a row for each beam, as plain decoding leaves it."""
        self._meter.end()
        if as_rows:
            self.cache.batch_select_indices(torch.zeros(len(self.beams), dtype=torch.long))
            self.cache.keep([self.branches.path(node) for node in self.beams], fed=len(self.branches.follows))

    def _pass(self) -> None:
        self._meter.begin()
        self._prune()
        branches = self.branches
        depth = branches.tree.depths[self.beams[0]]  # all beams are equally long
        room = self.runner.room(len(branches.trunk) + depth)
        self._guesser.learn_text(branches.trunk)
        self._guesser.grow(branches, dict(zip(self.beams, self._scores, strict=True)), room)
        logits = self.runner.extend(branches.tree, len(self.branches.follows), self.cache)  # [S, V]
        self._meter.ran(logits.shape[0], self.runner.forward_s)
        self._take_in(logits)

    def _prune(self) -> None:
        fed = len(self.branches.follows)
        pruned = self.branches.prune(self.beams)
        self.cache.keep([pruned.kept], fed)
        self.beams = [pruned.numbers[node] for node in self.beams]
        left = [node for node in self._logits if node in pruned.numbers and self.branches.follows[pruned.numbers[node]]]
        # Copied, since a single row would hold the memory of the whole pass that it comes from.
        rows = torch.stack([self._logits[node] for node in left]) if left else ()
        self._logits = {pruned.numbers[node]: row for node, row in zip(left, rows, strict=True)}

    def _take_in(self, logits: torch.Tensor) -> None:
        """Note what a pass said at the nodes it was fed: `[S, V]`."""
        first = len(self.branches.follows)
        self._logits.update(enumerate(logits, start=first))
        self.branches.follows += top_follows(logits, self._guesser.kept)
        self._guesser.learn(self.branches, first)

    def _answer(self) -> torch.Tensor:
        self._meter.answered()
        return torch.stack([self._logits[node] for node in self.beams])
