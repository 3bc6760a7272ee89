"""Verification: a walk from the root along the tokens that the model itself chooses.

For one-hot guesses this is sequential rejection sampling: a guess is accepted with the probability that the model
gives it, and where it is rejected the token already drawn is the sample. So greedy decoding and sampling are one code
path (arXiv 2402.02057, algorithm 4 and appendix B, on a trie).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lade.decoding.choose import Choose
from lade.decoding.tree import ROOT, TokenTree


@dataclass
class Verdict:
    """What a walk has accepted; after an error, what it had accepted by then.

    Attributes:
        path: `[A]`, nodes whose keys and values stay in the cache, the root first.
        tokens: `[A]`, the token emitted at each node of the path. The last one is not in the cache: it is the next
            root. After an error there is none for the last node of the path.
        sources: for each token who proposed it; `bonus` for the last one where nobody did.
        done: whether a stop rule ended the row with the last token.
    """

    path: list[int] = field(default_factory=lambda: [ROOT])
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    done: bool = False


def walk(tree: TokenTree, choose: Choose, emit: Callable[[int], bool], verdict: Verdict | None = None) -> Verdict:
    """Choose at the root; while a child carries the chosen token, descend and choose there.

    Args:
        tree: the step's candidates.
        choose: the chooser, opened on the logits of `tree`. Called once per emitted token.
        emit: takes each token as soon as it is chosen and says whether a stop rule ends the row there, so that
            neither chooser nor stop rules see a token that plain decoding would not have reached.
        verdict: a new one, which grows with the walk, so that the caller knows what was accepted when `choose` or
            `emit` raises. None: one is made.

    Returns:
        The verdict.
    """
    verdict = Verdict() if verdict is None else verdict
    while True:
        node = verdict.path[-1]
        token = choose(node)
        child = tree.child(node, token)
        verdict.done = emit(token)
        verdict.tokens.append(token)
        verdict.sources.append("bonus" if child is None else tree.sources[child])
        if verdict.done or child is None:
            return verdict
        verdict.path.append(child)
