"""Other methods as drafters: prompt lookup, SuffixDecoding, Token Recycling, chains of a checkpoint's MTP layer.

Source: Saxena, "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding: the first place that is
found, for the longest n-gram that is found at all. Here all places are merged into one tree, until it is full.

A trie holds all parts of prompt and output up to a length, and how often each occurs. The ends of the text so far are
nodes of it; below each of them hangs what followed. Of all lengths of the end the one is taken whose tree promises
most.

Source: Oliaro, Jia, Campos, Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS
2025, arXiv 2411.04975, section 4; with the text of the request itself, which the paper calls its local tree, and if
asked for with the answers to earlier requests, its global tree. Trees are as large as the budget however short the
match.

    matrix      token -> its likeliest successors, of the last row of logits at this token, accepted or not
    template    (0) (1) (2) (0,0) (0,1) (1,0) ...      ranks along each path; fixed, the likeliest paths first

Source: Luo, Wang, Zhu, Zhang, Zhang, Yang, Xu, "Turning Trash into Treasure: Accelerating Inference of Large Language
Models with Token Recycling", ACL 2025, arXiv 2408.08696. There eight successors are kept and the template is searched
once for a model; here six are kept, as for all methods of this library, and the template follows from how often, about,
a successor of each rank is right.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from lade.decoding.drafting.drafter import Draft, Drafter, Unseen
from lade.decoding.kernels.layout import TOKEN, WIDTH, Doubles, Ints
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict

LENGTHS = (4, 3, 2, 1)
"""Lengths of the n-grams that are looked up, in this order."""
GUESSED = 16
"""Tokens taken from one place, at most."""
PLACES = 64
"""Occurrences kept per n-gram: the latest."""


class PromptLookupDrafter(Drafter):
    """Drafts for one row; see `Drafter`.

    Args:
        budget: tokens fed in a step, the root included.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._read = budget, 0
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # where what follows begins

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self._note(tokens)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """Return a tree of continuations of the longest matches, filled up to the budget."""
        tree = TokenTree(context[-1], max_depth)
        for length in LENGTHS:
            places = self._places.get(tuple(context[-length:]), ()) if length <= len(context) else ()
            for place in reversed(places[-PLACES:]):
                room = min(GUESSED, self._budget - len(tree))
                if room <= 0:
                    return Draft(tree)
                tree.add_path(context[place : place + room], "lookup")
        return Draft(tree)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._note(context)

    def _note(self, tokens: Sequence[int]) -> None:
        """Note where each n-gram ends that some token follows."""
        for end in range(max(1, self._read), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._places[tuple(tokens[end - length : end])].append(end)
        self._read = len(tokens)


LONGEST = 24
"""Tokens of a part of the text, at most: of its end and of what followed together."""


@dataclass
class Part:
    """A part of the text: how often it occurs, and by what it is followed."""

    occurrences: int = 0
    followed: dict[int, Part] = field(default_factory=dict)


class SuffixDrafter(Drafter):
    """Drafts for one row; see `Drafter`.

    Args:
        budget: tokens fed in a step, the root included.
        earlier: trie of the answers to earlier requests, to which this one's is added at its end; None for none.
    """

    def __init__(self, budget: int, earlier: Part | None = None) -> None:
        self._budget, self._earlier = budget, earlier
        self._ends = [Part()]  # of the text so far, by their length
        self._others = [] if earlier is None else [earlier]  # the same in the trie of earlier answers
        self._answer: list[int] = []

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self._read(tokens)
        self._answer += tokens[prompt_length:]

    def end(self) -> None:
        """See `Drafter`."""
        if self._earlier is not None:
            ends = [self._earlier]
            for token in self._answer:
                ends = _counted(ends, token)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """The tree that promises most tokens; of equal ones that of the longest end."""
        ends = [*reversed(self._ends[1:]), *reversed(self._others[1:])]
        found = [self._likeliest(end) for end in ends if end.followed]
        _, guesses = max(found, key=lambda each: each[0], default=(0.0, []))
        tree, nodes = TokenTree(context[-1], max_depth), list[int | None]([ROOT])
        for parent, token in guesses:
            nodes.append(tree.add(nodes[parent], token, "suffix"))
        return Draft(tree)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._read(verdict.tokens)
        self._answer += verdict.tokens

    def _read(self, tokens: Iterable[int]) -> None:
        """Count all parts that end with each of these tokens."""
        for token in tokens:
            self._ends = _counted(self._ends, token)
            known = [end.followed[token] for end in self._others[: LONGEST - 1] if token in end.followed]
            self._others = [*self._others[:1], *known]

    def _likeliest(self, end: Part) -> tuple[float, list[tuple[int, int]]]:
        """The likeliest continuations: their probabilities' sum, and each one's parent (0 for the root) and token."""
        order, promise, guesses = count(), 0.0, list[tuple[int, int]]()
        open_parts = [(-1.0, next(order), end, 0)]
        waiting: list[tuple[float, int, int, int, Part]] = []
        while len(guesses) < self._budget - 1 and (open_parts or waiting):
            if open_parts:
                chance, _, part, node = open_parts.pop()
                total = sum(next_part.occurrences for next_part in part.followed.values())
                for token, next_part in part.followed.items():
                    share = chance * next_part.occurrences / total
                    heapq.heappush(waiting, (share, next(order), node, token, next_part))
                continue
            chance, _, parent, token, part = heapq.heappop(waiting)
            promise -= chance
            guesses.append((parent, token))
            open_parts.append((chance, next(order), part, len(guesses)))
        return promise, guesses


def _counted(ends: list[Part], token: int) -> list[Part]:
    """Count all parts that end with a token behind these ends of a text; return the longer text's ends."""
    longer = [end.followed.setdefault(token, Part()) for end in ends[: LONGEST - 1]]
    for part in longer:
        part.occurrences += 1
    return [ends[0], *longer]


RIGHT = (0.5, 0.14, 0.07, 0.04, 0.03, 0.02)
"""Approximate acceptance rate of a successor by rank."""


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


class MtpChain:
    """The likeliest token after the last one, and after that, by an MTP layer alone; see `PredictedTree`.

    Args:
        depth: tokens of the chain, one for each pass of the layer.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.tokens: list[int] = []

    def begin(self, context: Sequence[int], max_depth: int | None) -> bool:
        """See `PredictedTree`."""
        self.tokens = []
        return True

    def grow(self) -> float:
        """See `PredictedTree`."""
        return 1.0 + len(self.tokens)

    def unseen(self, most: int) -> list[Unseen]:
        """See `PredictedTree`."""
        length = len(self.tokens)
        return [Unseen(length, length - 1, self.tokens[-1], length, 1.0)] if 0 < length < self._depth else []

    def candidates(self, node: int) -> list[int]:
        """See `PredictedTree`."""
        return []

    def hear(self, nodes: Sequence[Unseen], tokens: Ints, odds: Doubles) -> None:
        """See `PredictedTree`."""
        self.tokens.append(int(tokens[0, 0]))


class MtpChainDrafter(Drafter):
    """Feeds a chain of the checkpoint's MTP layer, as transformers, vLLM and SGLang do; see `Drafter`.

    Args:
        depth: tokens drafted in a step.
    """

    def __init__(self, depth: int) -> None:
        self.mtp: MtpChain = MtpChain(depth)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """The chain that the layer has predicted for this step; it teaches nothing."""
        tree = TokenTree(context[-1], max_depth)
        tree.add_path(self.mtp.tokens, "mtp")
        return Draft(tree, teaches=False)
