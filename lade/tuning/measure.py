"""Times the model's own forward pass over dummy trees of several sizes.

The cache is this module's own. A few tokens are really run; copies of their keys and values fill it up to the length
wanted, since their content does not change what a pass costs, and running 256 tokens through a large model on a CPU
takes longer than all that is to be measured.

A curve is measured at one length of the cache. At other lengths passes cost more or less, by much the same factor for
all sizes (`lade doctor --cached 1024` shows it), and `StepCost.observe` follows it.

Nothing else is touched: no hook, no setting, no generator of torch's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from time import perf_counter

from lade.decoding.drafting.step_cost import KNOTS, StepCost, fast_quantile
from lade.decoding.tree import ROOT, TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner

SIZES = (1, 8, 32, 2, 4, 16, 64, 128)
"""In this order: should the time be over early, the first ones tell most."""
CACHED_TOKENS = 256
BUDGET_S = 1.0
ROUNDS = 9

_ALWAYS = 2  # sizes measured whatever they take: one point makes no curve
_PREFIX_TOKENS = 4
_DEPTH = 7


class StepTimer:
    """Times single passes.

    Args:
        runner: runs the model; its `pass_time` is what a pass took, and changes.
        vocabulary: V, number of token ids that the model knows.
        largest: the largest size that will be timed.
        cached: tokens in the cache; fewer where the model's positions end before.
        batch: B, rows that are all equal.
    """

    def __init__(
        self,
        runner: EagerRunner,
        *,
        vocabulary: int,
        largest: int,
        cached: int = CACHED_TOKENS,
        batch: int = 1,
    ) -> None:
        depth = runner.room(0)
        self.cached = cached if depth is None else min(cached, max(1, depth - _DEPTH))
        self.largest = min(largest, vocabulary)  # nodes must have tokens of their own, else the tree would merge them
        self._runner, self._batch, self._reader = runner, batch, runner.reader
        self._tokens = random.Random(0).sample(range(vocabulary), self.largest)
        self._text = [self._tokens[i % self.largest] for i in range(self.cached)]
        self._room = runner.room(self.cached)
        if self._room == 0:
            self.largest = 1
        self._cache = runner.host(self._filled(), self.cached + self.largest)
        for size in runner.pass_sizes(self.largest):
            self(min(size, self.largest))  # captures it, which is not to count

    def __call__(self, size: int) -> float:
        """Undisturbed seconds of one pass that feeds `size` tokens a row, 1 to `largest`."""
        tree = self._tree(size)
        trees, rows = [tree] * self._batch, [[*self._text, tree.ids[ROOT]]] * self._batch
        if self._reader is None:
            self._runner.forward(trees, rows, self._cache)
        else:  # as greedy decoding does; steps that need whole rows of logits are soon found to take longer
            self._reader.readouts(trees, rows, self._cache, wants_entries=True)
        self._cache.keep([[]] * self._batch, fed=size)
        return self._runner.pass_time.undisturbed_s

    def close(self) -> None:
        """Give back what it has taken; it is of no use then."""
        self._cache.reset()

    def _tree(self, size: int) -> TokenTree:
        """Chains that hang from the root: all tokens differ, as in a real step, so that all experts are used."""
        depth = _DEPTH if self._room is None else min(_DEPTH, self._room)
        tree = TokenTree(self._tokens[0])
        for start in range(1, size, depth or 1):
            tree.add_path(self._tokens[start : min(size, start + depth)], "pool")
        return tree

    def _filled(self) -> TreeCache:
        """Run some tokens and multiply their keys and values: `cached` of them, and room for the largest pass."""
        cache, prefix = self._runner.tree_cache(), self._text[:_PREFIX_TOKENS]
        self._runner.eager().prefill([prefix] * self._batch, cache)
        cache.repeat(self.cached + self.largest - len(prefix))
        cache.keep([[]] * self._batch, fed=self.largest)
        return cache


def samples_of(
    timer: Callable[[int], float],
    sizes: Sequence[int],
    *,
    budget_s: float = BUDGET_S,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[tuple[int, float]]:
    """Time the sizes in turn, so that a drift of the machine's speed meets all of them.

    A size that would not end in time is left out: then the smaller ones are measured more often.

    Args:
        timer: seconds of a pass of this size.
        sizes: some of `KNOTS`; the first two are measured once whatever they take.
        budget_s: seconds for all of it.
        rounds: greatest number of passes of each size.
        clock: returns the time in seconds.

    Yields:
        A size and what a pass took, as soon as it is known.
    """
    deadline = clock() + budget_s
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        measured = False
        for number, size in enumerate(sizes):
            must = number < _ALWAYS and not samples[size]
            if must or clock() + _expected(samples, size) <= deadline:
                samples[size].append(timer(size))
                measured = True
                yield size, samples[size][-1]
        if not measured:
            return


def measure_step_cost(
    runner: EagerRunner,
    *,
    vocabulary: int,
    cached: int = CACHED_TOKENS,
    batch: int = 1,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = perf_counter,
) -> StepCost:
    """Measure what a pass costs by its size.

    Args:
        runner: runs the model.
        vocabulary: V, number of token ids that the model knows.
        cached: tokens in the cache while it is measured; fewer if the model has no positions for them.
        batch: B, rows that are all equal.
        budget_s: seconds for all passes but those of the cache's first tokens; the first two sizes take what they take.
        clock: returns the time in seconds.

    >>> cost = measure_step_cost(runner, vocabulary=32000)
    >>> cost.seconds(16) / cost.seconds(1)
    1.3
    """
    sizes = SIZES if runner.parts == 1 else (*SIZES, KNOTS[-1])  # several processes feed a part of each tree
    before = runner.pass_time
    samples: dict[int, list[float]] = {}
    with closing(StepTimer(runner, vocabulary=vocabulary, largest=max(sizes), cached=cached, batch=batch)) as timer:
        feasible = [size for size in sizes if size <= timer.largest]
        for size, seconds in samples_of(timer, feasible, budget_s=budget_s, clock=clock):
            samples.setdefault(size, []).append(seconds)
    runner.pass_time = before
    return StepCost.of(samples, measured_at=time.time())


def _expected(samples: Mapping[int, Sequence[float]], size: int) -> float:
    """Seconds that a pass of this size will take, as far as is known."""
    if samples[size]:
        return fast_quantile(samples[size])
    return StepCost.of(samples).seconds(size) if any(samples.values()) else 0.0
