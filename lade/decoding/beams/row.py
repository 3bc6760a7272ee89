"""The beams of one prompt: paths of its token tree, with the logits at its nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lade.decoding.beams.guesses import BeamGuesser, top_follows
from lade.decoding.beams.tree import Branches
from lade.decoding.tree import ROOT, TokenTree


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
