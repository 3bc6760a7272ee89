"""Verification: a walk from the root along the tokens that the model itself chooses.

For one-hot drafts this is sequential rejection sampling: a drafted token is accepted with the probability that the
model gives it, and where it is rejected the token already drawn is the sample. So greedy decoding and sampling share
one code path (arXiv 2402.02057, algorithm 4 and appendix B, on a trie).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lade.decoding.tree import ROOT, TokenTree

Choose = Callable[[int], int]
"""Maps a node to the token chosen after it."""


class Chooser(Protocol):
    """Chooses the next token from logits.

    Tokens are chosen once each, in the order of the text. So stateful processors see what they would see in plain
    decoding, and a random generator is advanced equally often.
    """

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """Choose at every node of one step, without waiting for the device.

        Args:
            logits: `[S, V]`, one row per node, in the model's dtype.
            depths: `[S]`, depth of each node.

        Returns:
            `[S]` ids on the device; None if the choice is the argmax, or is made node by node.
        """

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        """Return the function that chooses at a node of one step, for use in `walk`.

        Args:
            logits: `[S, V]`, one row per node, in the model's dtype.
            ids: `[S]`, the ids returned by `choose_all`; if that was None, the argmax at each node.
            tokens: the row's prompt and output so far; it grows during the walk.
        """


class Greedy:
    """Takes the argmax, for all nodes at once."""

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> None:
        """See `Chooser.choose_all`."""

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `Chooser.bind`."""
        return ids.__getitem__


@dataclass
class Verdict:
    """The result of a walk; after an error, of the part before it.

    Attributes:
        path: `[A]`, nodes whose keys and values stay in the cache, the root first.
        tokens: `[A]`, the token emitted at each node of the path. The last one is not in the cache: it is the next
            root. After an error the last node of the path has none.
        sources: the source that proposed each token; `bonus` for the last one if it was not drafted.
        done: whether a stop rule ended the row at the last token.
    """

    path: list[int] = field(default_factory=[ROOT].copy)
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    done: bool = False


def walk(tree: TokenTree, choose: Choose, emit: Callable[[int], bool], verdict: Verdict | None = None) -> Verdict:
    """Choose at the root; while a child carries the chosen token, descend and choose there.

    Args:
        tree: the token tree of the step.
        choose: the chooser, bound to the logits of `tree`. Called once per emitted token.
        emit: takes each token as soon as it is chosen and returns whether a stop rule ends the row there, so that
            neither chooser nor stop rules see a token that plain decoding would not have reached.
        verdict: an empty verdict that grows during the walk, so that the caller knows what was accepted if `choose` or
            `emit` raises; None creates one.
    """
    verdict = Verdict() if verdict is None else verdict
    while True:
        node = verdict.path[-1]
        token = choose(node)
        child = tree.children.get((node, token))
        verdict.done = emit(token)
        verdict.tokens.append(token)
        verdict.sources.append("bonus" if child is None else tree.sources[child])
        if verdict.done or child is None:
            return verdict
        verdict.path.append(child)
