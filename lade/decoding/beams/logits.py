"""Logits for beam search: all beams of a prompt are paths of one token tree.

What a beam step is, which tokens and beams it takes, is decided by the caller. Here its requests are served: the tokens
that lengthen the beams come in, the logits after them go out. If the tree has these nodes already, no forward pass is
needed. Otherwise the new tokens are fed, and guesses of the beam steps after them:

    trunk, in the cache           tree, in the cache too             fed by the next pass
    Once upon a time there was ─┬─ a ─── little ─┬─ girl           ┬─ who ─── ...
                                │                └─ boy            ├─ named ─ ...
                                └─ an ── old ───── man             └─ called

What the beams have in common is cached once, not once a beam; and a guess that was not taken stays in the tree for as
long as some beam may still get to it.

Several prompts have a tree each, and each a row of the cache. They take their beam steps together, so a pass is needed
as soon as one tree lacks a node; the others then use it to look further ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch

from lade.clock import Duration
from lade.config import LookaheadConfig
from lade.decoding.beams.drafting import BeamGuesser, Recycler, top_follows
from lade.decoding.beams.tree import Branches
from lade.decoding.tree import ROOT, TokenTree
from lade.stats import Stats, Step


class BeamRow:
    """One prompt of a beam search.

    Args:
        prompt: ids, at least one.
        num_beams: k.
        guesser: guesses for this row.

    Attributes:
        branches: the trunk and the tree.
        beams: `[k]`, the node that each beam ends with.
    """

    def __init__(self, prompt: Sequence[int], num_beams: int, guesser: BeamGuesser) -> None:
        self.branches = Branches.of(prompt)
        self.beams = [ROOT] * num_beams
        self._scores = [0.0] * num_beams  # log-probabilities of the beams without processors; only guesses need them
        self._guesser = guesser
        guesser.learn_text(prompt)

    @property
    def tree(self) -> TokenTree:
        """Its first nodes, `seen` of them, are in the cache."""
        return self.branches.tree

    @property
    def seen(self) -> int:
        """How many nodes a pass has seen."""
        return len(self.branches.follows)

    @property
    def position(self) -> int:
        """Where the last tokens of the beams lie; beams are equally long."""
        return len(self.branches.trunk) + self.tree.depths[self.beams[0]]

    @property
    def known(self) -> bool:
        """Whether the logits after the beams are known without a forward pass."""
        return all(node in self.branches.logits for node in self.beams)

    @property
    def logits(self) -> torch.Tensor:
        """After the beams, `[k, V]`."""
        return torch.stack([self.branches.logits[node] for node in self.beams])

    def reorder(self, beams: Sequence[int]) -> None:
        """Beam i continues what was beam `beams[i]`."""
        self.beams = [self.beams[beam] for beam in beams]
        self._scores = [self._scores[beam] for beam in beams]

    def lengthen(self, tokens: Sequence[int]) -> None:
        """Add its token to each beam."""
        for beam, token in enumerate(tokens):
            follows = self.branches.follows[self.beams[beam]]
            self._scores[beam] += dict(follows).get(token, follows[-1][1])
            child = self.tree.add(self.beams[beam], token, "beam")
            assert child is not None  # the tree itself has no greatest depth
            self.beams[beam] = child

    def prune(self) -> list[int]:
        """Drop what no beam can use any more; the nodes that stay in the cache, in their numbers before."""
        pruned = self.branches.prune(self.beams)
        self.beams = [pruned.numbers[node] for node in self.beams]
        return pruned.kept

    def grow(self, room: int | None) -> None:
        """Add guesses after the beams, at most `room` levels of them; None for no limit."""
        self._guesser.learn_text(self.branches.trunk)
        self._guesser.grow(self.branches, dict(zip(self.beams, self._scores, strict=True)), room)

    def learn(self, logits: torch.Tensor) -> None:
        """Take the logits `[S, V]` of a forward pass at the nodes that were not seen yet; further rows mean nothing."""
        first, new = self.seen, logits[: len(self.tree) - self.seen]
        self.branches.learn(new, top_follows(new, self._guesser.kept))
        self._guesser.learn(self.branches, first)


class BeamCache(Protocol):
    """Keys and values of B rows; see `lade.decoding.loop.KVCache`."""

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """Of the tokens that came last, `fed` and before them in each row `held` ones, keep those of its path."""
        ...

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        ...


CacheT = TypeVar("CacheT", bound=BeamCache)
CacheT_contra = TypeVar("CacheT_contra", bound=BeamCache, contravariant=True)


class BeamRunner(Protocol[CacheT_contra]):
    """Runs the model; see `lade.decoding.loop.Runner`."""

    @property
    def pass_time(self) -> Duration:
        """What the last pass spent in the model."""
        ...

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        ...

    def prefill(self, rows: Sequence[Sequence[int]], cache: CacheT_contra) -> torch.Tensor:
        """Feed rows of any length; logits of each row's last token, `[B, V]`."""
        ...

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: CacheT_contra) -> torch.Tensor:
        """Feed one tree a row, without its first nodes, `held[b]` of them: the row ends with these. `[B, S, V]`."""
        ...


class BeamMeter:
    """Reports each forward pass to `stats` once it is known how many beam steps it served: when the next one begins."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._passes = self._served = 0
        self._fed: Sequence[int] = ()
        self._start = self._forward_s = 0.0

    def begin(self) -> None:
        """A pass begins, and the one before has served its last step."""
        self.end()
        self._start = perf_counter()

    def ran(self, fed: Sequence[int], forward_s: float) -> None:
        """The model was fed `fed[b]` tokens in row b, and took `forward_s` seconds."""
        self._fed, self._forward_s = fed, forward_s

    def answered(self) -> None:
        """A beam step got its logits."""
        self._served += 1

    def end(self) -> None:
        """No further step is served by the last pass."""
        if not self._served:
            return
        tokens, sources = [-1] * self._served, ["beam" if self._passes else "prefill"] * self._served
        seconds = perf_counter() - self._start
        steps = [Step(self._passes, tokens, sources, fed, seconds) for fed in self._fed]
        self._stats.add(*steps, forward_s=self._forward_s)
        self._passes, self._served = self._passes + 1, 0


class BeamLogits(Generic[CacheT]):
    """Gives the logits after the beams of B prompts.

    Beams are numbered through: those of prompt b are b * k to b * k + k - 1.

    Args:
        prompts: B of them; ids, at least one.
        num_beams: k, of each prompt.
        config: sizes, see `BeamGuesser`.
        runner: runs the model.
        cache: empty; it will hold trunk and tree of each prompt.
        stats: is added to, as if the beams of a prompt were one text: a beam step counts as one token of each prompt,
            however many beams it lengthens; the tokens fed in a pass are those of all beams of a prompt together.
        excluded: ids (end of sequence, padding) after which nothing is guessed.
        sources: B texts whose tokens may come again, beside those of the prompts; none unless given.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        num_beams: int,
        config: LookaheadConfig,
        runner: BeamRunner[CacheT],
        cache: CacheT,
        stats: Stats,
        excluded: Collection[int] = (),
        sources: Sequence[Sequence[int]] = (),
    ) -> None:
        self.runner, self.cache, self.num_beams = runner, cache, num_beams
        recycler = Recycler()  # logits of one prompt help the others
        self.rows = [
            BeamRow(prompt, num_beams, BeamGuesser(config, num_beams, excluded, recycler, source))
            for prompt, source in zip(prompts, sources or [()] * len(prompts), strict=True)
        ]
        self._prompts = prompts
        self._fed = 0  # slots that the last pass took after the longest row
        self._held = [1] * len(self.rows)  # nodes that were in the cache before it; at first the root is the last token
        self._meter = BeamMeter(stats)

    def prefill(self) -> torch.Tensor:
        """Run the prompts; the logits after them, `[B * k, V]`, the same for all beams of a prompt."""
        self._meter.begin()
        logits = self.runner.prefill(self._prompts, self.cache)  # [B, V]
        self._meter.ran([len(prompt) for prompt in self._prompts], 0.0)
        for row, row_logits in zip(self.rows, logits, strict=True):
            row.learn(row_logits[None])
        return self._answer()

    def reorder(self, beams: Sequence[int]) -> None:
        """Beam i continues what was beam `beams[i]`, which is of the same prompt."""
        for number, row in enumerate(self.rows):
            first = number * self.num_beams
            row.reorder([beam - first for beam in beams[first : first + self.num_beams]])

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        """Lengthen each beam by its token; the logits after them, `[B * k, V]`."""
        for number, row in enumerate(self.rows):
            row.lengthen(tokens[number * self.num_beams :][: self.num_beams])
        if not all(row.known for row in self.rows):
            self._pass()
        return self._answer()

    def report(self) -> None:
        """Report the last pass; no other may follow."""
        self._meter.end()

    def leave_rows(self) -> None:
        """Give the cache a row for each beam, as plain decoding leaves it; the search cannot be continued then."""
        self.cache.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(self.num_beams))
        paths = [row.branches.path(node) for row in self.rows for node in row.beams]
        self.cache.keep(paths, self._fed, [held for held in self._held for _ in range(self.num_beams)])

    def _pass(self) -> None:
        self._meter.begin()
        self.cache.keep([row.prune() for row in self.rows], self._fed, self._held)
        for row in self.rows:
            row.grow(self.runner.room(row.position))
        trees, self._held = [row.tree for row in self.rows], [row.seen for row in self.rows]
        logits = self.runner.extend(trees, self._held, self.cache)  # [B, S, V]
        self._fed = logits.shape[1]
        fed = [len(tree) - held for tree, held in zip(trees, self._held, strict=True)]
        self._meter.ran(fed, self.runner.pass_time.wall_s)
        for row, row_logits in zip(self.rows, logits, strict=True):
            row.learn(row_logits)

    def _answer(self) -> torch.Tensor:
        self._meter.answered()
        return torch.cat([row.logits for row in self.rows])
