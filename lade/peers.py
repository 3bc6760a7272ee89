"""Other methods that need no training, as drafters: `Suffix`, `TokenRecycling`, `PromptLookup` and `Jacobi`.

They are written from their papers, on this library's verification: whatever they draft, the tokens are those of plain
decoding. Alone they show what each method brings; beside the default method they are one more source of drafts.

>>> config = lade.LookaheadConfig(sources=[lade.peers.Suffix(budget=16)], only=True)
>>> lade.generate(model, **inputs, lookahead=config)

One object serves any number of texts, as every `lade.Drafter` does. Unless asked to keep something, it begins each text
with nothing.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Generic, TypeVar

from lade.decoding.drafting.controller import LARGEST
from lade.decoding.kernels.layout import WIDTH
from lade.decoding.tree import TokenTree
from lade.drafter import Continuation, Drafter
from lade.errors import ConfigError, whole_number

__all__ = ["Jacobi", "PromptLookup", "Suffix", "TokenRecycling"]

Node = tuple[int, int, float]
"""A drafted token: its parent's number (0 is the last token of the text), its id, the probability that it is right."""


def _paths(nodes: Sequence[Node]) -> list[Continuation]:
    """Return the path from the root to each leaf of a tree whose nodes, numbered from 1, come after their parents."""
    inner = {parent for parent, _, _ in nodes}
    return [_path(nodes, leaf) for leaf in range(1, len(nodes) + 1) if leaf not in inner]


def _path(nodes: Sequence[Node], number: int) -> Continuation:
    tokens, chances = list[int](), list[float]()
    while number:
        number, token, chance = nodes[number - 1]
        tokens.append(token)
        chances.append(chance)
    return Continuation(tokens[::-1], chances[::-1])


LONGEST_PART = 23  # tokens of a part of the text at most: of its end and of what followed, together


@dataclass(slots=True)
class Trie:
    """A part of a text, which begins at the root: how often it occurs, and by what it is followed."""

    occurrences: int = 0
    followed: dict[int, Trie] = field(default_factory=dict)


def _counted(ends: Sequence[Trie], token: int, times: int = 1) -> list[Trie]:
    """Count the parts that end with a token behind these ends of a text; return the longer text's ends.

    Ends are by their length, the trie's root first. With `times` -1 a text that was counted is forgotten.
    """
    longer = []
    for end in ends[:LONGEST_PART]:
        part = end.followed.setdefault(token, Trie())
        part.occurrences += times
        if not part.occurrences:
            del end.followed[token]
        longer.append(part)
    return [ends[0], *longer]


def _followed(ends: Sequence[Trie], token: int) -> list[Trie]:
    """Return the ends of the longer text as far as they occur, without counting it."""
    return [*ends[:1], *(end.followed[token] for end in ends[:LONGEST_PART] if token in end.followed)]


class _SuffixText:
    """One text: its own trie, and its ends there and in the trie of earlier answers."""

    def __init__(self, earlier: Trie) -> None:
        self.length, self.answer = 0, list[int]()
        self._tries = [[Trie()], [earlier]]  # each with the ends of the text, by their length

    def read(self, tokens: Iterable[int]) -> None:
        """Count the parts of this text that end with each of these tokens."""
        for token in tokens:
            own, earlier = self._tries
            self._tries = [_counted(own, token), _followed(earlier, token)]
            self.length += 1

    def ends(self, forced: Sequence[int]) -> list[Trie]:
        """Return all ends of the text and forced tokens behind it that something followed, the longest first."""
        tries = self._tries
        for token in forced:
            tries = [_followed(ends, token) for ends in tries]
        return [end for ends in tries for end in reversed(ends[1:]) if end.followed]


Text = TypeVar("Text")


class _Peer(Drafter, Generic[Text]):
    """Keeps something for each text; draws nothing but from generators of its own."""

    _draws = False

    def __init__(self, budget: int = 16) -> None:
        self.budget = self.continuations = whole_number("budget", budget, 1, LARGEST)
        self._texts: dict[Hashable, Text] = {}

    def end(self, request: Hashable) -> None:
        """Forget the text."""
        del self._texts[request]


class Suffix(_Peer[_SuffixText]):
    """SuffixDecoding: draft what followed the ends of the text before, the likeliest first.

    A trie holds all parts of prompt and answer up to a length, and how often each occurs. The ends of the text are
    nodes of it; below each of them hangs what followed. Of all lengths of the end the one is taken whose tree promises
    most tokens.

    Source: Oliaro, Jia, Campos, Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
    NeurIPS 2025, arXiv 2411.04975, section 4. Here a tree is as large as the budget, however short the match.

    Args:
        budget: tokens fed in a step at most, the root included. From 1 to 128.
        keep_tokens: how many tokens of earlier answers are drafted from too, the latest ones: the paper's global tree.
            A token takes about 4 KB. 0 keeps none.

    Raises:
        ConfigError: a value is no whole number in its range.
    """

    name = "suffix"

    def __init__(self, budget: int = 16, *, keep_tokens: int = 0) -> None:
        super().__init__(budget)
        self.keep_tokens = whole_number("keep_tokens", keep_tokens, 0)
        self._earlier, self._answers, self._lock = Trie(), deque[list[int]](), Lock()

    def begin(self, request: Hashable, prompt: Sequence[int]) -> None:
        """Read the prompt."""
        text = self._texts[request] = _SuffixText(self._earlier)
        with self._lock:
            text.read(prompt)

    def propose(self, request: Hashable, tokens: Sequence[int], most: int) -> list[Continuation]:
        """Propose the tree that promises most tokens; of equal ones that of the longest end."""
        text = self._texts[request]
        with self._lock:
            found = [self._likeliest(end) for end in text.ends(tokens[text.length :])]
        return _paths(max(found, key=lambda each: each[0], default=(0.0, []))[1])

    def learn(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Read tokens of the answer."""
        text = self._texts[request]
        text.answer += tokens
        with self._lock:
            text.read(tokens)

    def end(self, request: Hashable) -> None:
        """Forget the text; keep its answer if asked to, and forget the oldest ones in its place."""
        answer = self._texts.pop(request).answer[-self.keep_tokens :] if self.keep_tokens else []
        with self._lock:
            self._count(answer, 1)
            self._answers.append(answer)
            while sum(map(len, self._answers)) > self.keep_tokens:
                self._count(self._answers.popleft(), -1)

    def _count(self, answer: Sequence[int], times: int) -> None:
        ends = [self._earlier]
        for token in answer:
            ends = _counted(ends, token, times)

    def _likeliest(self, end: Trie) -> tuple[float, list[Node]]:
        """Return the likeliest continuations of an end, and the sum of their probabilities."""
        order, promise, nodes = count(), 0.0, list[Node]()
        waiting: list[tuple[float, int, Node, Trie]] = []
        opened: Trie | None = end
        chance = 1.0
        while len(nodes) < self.budget - 1:
            if opened is not None:
                total = sum(part.occurrences for part in opened.followed.values())
                for token, part in opened.followed.items():
                    share = part.occurrences / total
                    heapq.heappush(waiting, (-chance * share, next(order), (len(nodes), token, share), part))
            if not waiting:
                break
            negative, _, node, opened = heapq.heappop(waiting)
            chance = -negative
            promise += chance
            nodes.append(node)
        return promise, nodes


RIGHT = (0.5, 0.14, 0.07, 0.04, 0.03, 0.02)  # approximate acceptance rate of a successor by its rank


def template(size: int) -> list[tuple[int, ...]]:
    """Return the `size` likeliest paths, each by the ranks along it; parents come before their children."""
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-RIGHT[0], (0,))]
    while len(paths) < size:
        chance, path = heapq.heappop(waiting)
        paths.append(path)
        heapq.heappush(waiting, (chance * RIGHT[0], (*path, 0)))
        if path[-1] + 1 < WIDTH:
            sibling = chance / RIGHT[path[-1]] * RIGHT[path[-1] + 1]
            heapq.heappush(waiting, (sibling, (*path[:-1], path[-1] + 1)))
    return paths


class TokenRecycling(_Peer[dict[int, Sequence[int]]]):
    """Token Recycling: draft what the model found likely after a token when it last saw it, accepted or not.

        matrix      token -> its likeliest successors, of the last row of logits at this token
        template    (0) (1) (2) (0,0) (0,1) (1,0) ...      ranks along each path; fixed, the likeliest paths first

    Source: Luo, Wang, Zhu, Zhang, Zhang, Yang, Xu, "Turning Trash into Treasure: Accelerating Inference of Large
    Language Models with Token Recycling", ACL 2025, arXiv 2408.08696. There eight successors are kept and the template
    is searched once for a model; here six are kept, and the template follows from how often, about, a successor of each
    rank is right.

    Args:
        budget: tokens fed in a step at most, the root included. From 1 to 128.
        keep: whether a text begins with the matrix that earlier ones have left.

    Raises:
        ConfigError: a value is out of its range.
    """

    name = "recycled"

    def __init__(self, budget: int = 16, *, keep: bool = False) -> None:
        if not isinstance(keep, bool):
            raise ConfigError("keep", keep, "give True or False")
        super().__init__(budget)
        self._template = template(self.budget - 1)
        self._kept: dict[int, Sequence[int]] | None = {} if keep else None

    def begin(self, request: Hashable, prompt: Sequence[int]) -> None:
        """Begin with an empty matrix, or with the one that was kept."""
        self._texts[request] = {} if self._kept is None else self._kept

    def propose(self, request: Hashable, tokens: Sequence[int], most: int) -> list[Continuation]:
        """Propose the template, as far as successors are known."""
        matrix, nodes = self._texts[request], list[Node]()
        numbers: dict[tuple[int, ...], int] = {(): 0}
        for path in self._template:
            parent, rank = numbers.get(path[:-1]), path[-1]
            if parent is None:
                continue
            successors = matrix.get(nodes[parent - 1][1] if parent else tokens[-1], ())
            if rank < len(successors):
                nodes.append((parent, successors[rank], RIGHT[rank]))
                numbers[path] = len(nodes)
        return _paths(nodes)

    def observe_prompt(self, request: Hashable, tokens: Sequence[int], likely: Sequence[Sequence[int]]) -> None:
        """Enter the successors of the prompt's tokens."""
        self._texts[request].update(zip(tokens, likely, strict=True))

    def observe(
        self, request: Hashable, tokens: Sequence[int], parents: Sequence[int], likely: Sequence[Sequence[int]]
    ) -> None:
        """Enter the successors of all tokens fed."""
        self._texts[request].update(zip(tokens, likely, strict=True))


LENGTHS = (4, 3, 2, 1)  # lengths of the n-grams that are looked up, in this order
GUESSED = 16  # tokens taken from one place, at most
PLACES = 64  # occurrences looked at per n-gram: the latest


class PromptLookup(_Peer[tuple[list[int], defaultdict[tuple[int, ...], list[int]]]]):
    """Prompt lookup decoding: draft what followed the last few tokens where they occurred before.

    Source: Saxena, "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding: the first place that
    is found, for the longest n-gram that is found at all. Here all places are merged into one tree, until it is full.

    Args:
        budget: tokens fed in a step at most, the root included. From 1 to 128.

    Raises:
        ConfigError: it is no whole number in its range.
    """

    name = "lookup"

    def begin(self, request: Hashable, prompt: Sequence[int]) -> None:
        """Note the places of the prompt's n-grams."""
        self._texts[request] = [], defaultdict(list)
        self.learn(request, prompt)

    def propose(self, request: Hashable, tokens: Sequence[int], most: int) -> list[Sequence[int]]:
        """Propose continuations of the longest matches, the latest first."""
        places, paths, tree = self._texts[request][1], list[Sequence[int]](), TokenTree(tokens[-1])
        for length in LENGTHS:
            found = places.get(tuple(tokens[-length:]), ()) if length <= len(tokens) else ()
            for place in reversed(found[-PLACES:]):
                size, room = len(tree), min(GUESSED, self.budget - len(tree))
                path = tokens[place : place + room]
                tree.add_path(path, self.name)
                if len(tree) > size:
                    paths.append(path)
        return paths

    def learn(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Note where each n-gram ends that one of these tokens follows."""
        text, places = self._texts[request]
        for token in tokens:
            for length in LENGTHS:
                if length <= len(text):
                    places[tuple(text[-length:])].append(len(text))
            text.append(token)


class _Chain:
    """One text: its guesses, and what was proposed of them."""

    def __init__(self, prompt: Sequence[int], seed: int) -> None:
        self.length, self.emitted = len(prompt), 0
        self.prompt, self.rng = prompt, random.Random(seed)
        self.guesses: list[int] = []
        self.proposed: list[int] = []

    def fill(self, known: Sequence[int], size: int) -> None:
        """Set the guesses: those known, and tokens of the prompt drawn at random up to the chain's length."""
        self.guesses = [*known[:size], *self.rng.choices(self.prompt, k=max(0, size - len(known)))]


class Jacobi(_Peer[_Chain]):
    """Jacobi decoding: one chain of guesses, which each pass replaces by what the model chose at them.

        fed         r ── g1 ── g2 ── g3        the current token, K guesses
        chosen      c0   c1    c2    c3        c0 is right; c1 is too if g1 = c0, and so on: A tokens are accepted
        next        c[A] ── c[A+1] ── ...      the choices after them are the new guesses, and A new ones join

    It is the baseline of the lookahead paper (arXiv 2402.02057, section 2): right tokens are often found at the wrong
    place, and this method forgets them with the next pass.

    Source: Santilli, Severino, Postolache, Maiorca, Mancusi, Marin, Rodolà, "Accelerating Transformer Inference for
    Translation via Parallel Decoding", ACL 2023, arXiv 2305.10427, algorithm 1, on a block that moves along with the
    text.

    Args:
        guesses: K, length of the chain. From 1 to 127.
        seed: seeds the guesses for places that no pass has reached, which are drawn from the ids of the prompt.

    Raises:
        ConfigError: a value is no whole number in its range.
    """

    name = "jacobi"

    def __init__(self, guesses: int = 8, *, seed: int = 0) -> None:
        self.guesses = whole_number("guesses", guesses, 1, LARGEST - 1)
        self.seed = whole_number("seed", seed, 0)
        super().__init__(budget=self.guesses + 1)

    def begin(self, request: Hashable, prompt: Sequence[int]) -> None:
        """Fill the chain with tokens of the prompt."""
        chain = self._texts[request] = _Chain(prompt, self.seed)
        chain.fill([], self.guesses)

    def propose(self, request: Hashable, tokens: Sequence[int], most: int) -> list[list[int]]:
        """Propose the chain; forced tokens behind the text take the place of its first guesses."""
        chain = self._texts[request]
        forced = tokens[chain.length :]
        chain.guesses[: len(forced)] = forced
        chain.proposed = chain.guesses[:]
        return [chain.guesses[len(forced) :]]

    def learn(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Note how far the text has come."""
        chain = self._texts[request]
        chain.emitted = len(tokens)
        chain.length += len(tokens)

    def observe(
        self, request: Hashable, tokens: Sequence[int], parents: Sequence[int], likely: Sequence[Sequence[int]]
    ) -> None:
        """Take the model's choices along the chain as the new guesses; places that were not fed keep theirs."""
        chain = self._texts[request]
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        chosen, node = [likely[0][0]], 0
        for guess in chain.proposed:
            if (child := children.get((node, guess))) is None:
                break
            node = child
            chosen.append(likely[node][0])
        chain.fill([*chosen, *chain.guesses[len(chosen) :]][chain.emitted :], self.guesses)
