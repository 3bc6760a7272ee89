"""Token Recycling: what was likely after a token the last time is guessed after it the next time.

    matrix      token -> its likeliest successors, of the last row of logits at this token, accepted or not
    template    (0) (1) (2) (0,0) (0,1) (1,0) ...      ranks along each path; fixed, the likeliest paths first

Source: Luo, Wang, Zhu, Zhang, Zhang, Yang, Xu, "Turning Trash into Treasure: Accelerating Inference of Large Language
Models with Token Recycling", ACL 2025, arXiv 2408.08696. There eight successors are kept and the template is searched
once for a model; here six are kept, as for all methods of this library, and the template follows from how often, about,
a successor of each rank is right.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.kernels.layout import TOKEN, WIDTH, Ints
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict

RIGHT = (0.5, 0.14, 0.07, 0.04, 0.03, 0.02)
"""How often a successor of each rank is right, about."""


class TokenRecyclingDrafter(Drafter):
    """Drafts for one row; see `Drafter`.

    Args:
        budget: tokens fed in a step, the root included.
    """

    wants_prompt_entries = learns_prompts = True

    def __init__(self, budget: int) -> None:
        self._template = template(budget - 1)
        self._successors: dict[int, list[int]] = {}

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:
        """See `Drafter`."""
        self._recycle(tokens[start:], entries)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """The template, as far as successors are known."""
        tree, nodes = TokenTree(context[-1], max_depth), dict[tuple[int, ...], int | None]({(): ROOT})
        for path in self._template:
            parent = nodes.get(path[:-1])
            successors = self._successors.get(tree.ids[parent], ()) if parent is not None else ()
            if path[-1] < len(successors):
                nodes[path] = tree.add(parent, successors[path[-1]], "recycled")
        return Draft(tree, wants_entries=True)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        assert readout.entries is not None
        self._recycle(draft.tree.ids, readout.entries)

    def _recycle(self, tokens: Sequence[int], entries: Ints) -> None:
        for token, row in zip(tokens, (entries & TOKEN).tolist(), strict=False):
            self._successors[token] = [successor for successor in row if successor != TOKEN]


def template(size: int) -> list[tuple[int, ...]]:
    """The `size` likeliest paths, each by the ranks along it; parents come before their children."""
    paths: list[tuple[int, ...]] = []
    open_paths: list[tuple[float, tuple[int, ...]]] = [(-RIGHT[0], (0,))]
    while len(paths) < size:
        chance, path = heapq.heappop(open_paths)
        paths.append(path)
        heapq.heappush(open_paths, (chance * RIGHT[0], (*path, 0)))
        if path[-1] + 1 < WIDTH:
            sibling = chance / RIGHT[path[-1]] * RIGHT[path[-1] + 1]
            heapq.heappush(open_paths, (sibling, (*path[:-1], path[-1] + 1)))
    return paths
