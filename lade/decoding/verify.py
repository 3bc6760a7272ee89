"""Verification: a walk from the root along the tokens that the model itself chooses.

For one-hot guesses this is sequential rejection sampling: a guess is accepted with the probability that the model
gives it, and where it is rejected the token already drawn is the sample. So greedy decoding and sampling are one code
path (arXiv 2402.02057, algorithm 4 and appendix B, on a trie).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lade.decoding.choose import Choose
from lade.decoding.tree import ROOT, TokenTree


@dataclass(frozen=True)
class Verdict:
    """What a walk accepted.

    Attributes:
        path: `[A]`, nodes whose keys and values stay in the cache, the root first.
        tokens: `[A]`, the token chosen at each node of the path. The last one is not in the cache: it is the next root.
        sources: `[A]`, who proposed each token; `bonus` for the last one where nobody did.
        done: whether a stop rule ended the row with the last token.
    """

    path: list[int]
    tokens: list[int]
    sources: list[str]
    done: bool


def walk(tree: TokenTree, choose: Choose, emit: Callable[[int], bool]) -> Verdict:
    """Choose at the root; while a child carries the chosen token, descend and choose there.

    Args:
        tree: the step's candidates.
        choose: the chooser, opened on the logits of `tree`. Called once per emitted token.
        emit: takes each token as soon as it is chosen and says whether a stop rule ends the row there, so that
            neither chooser nor stop rules see a token that plain decoding would not have reached.
    """
    path, tokens, sources = [ROOT], list[int](), list[str]()
    while True:
        token = choose(path[-1])
        child = tree.child(path[-1], token)
        tokens.append(token)
        sources.append("bonus" if child is None else tree.sources[child])
        done = emit(token)
        if done or child is None:
            return Verdict(path, tokens, sources, done)
        path.append(child)
