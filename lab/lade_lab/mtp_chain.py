"""Chains of a checkpoint's MTP layer, as transformers, vLLM and SGLang draft them."""

from __future__ import annotations

from collections.abc import Sequence

from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.kernels.layout import Doubles, Ints
from lade.decoding.kernels.native_tree import Frontier
from lade.decoding.tree import TokenTree


class MtpChain:
    """The likeliest token after the last one, and after that, by an MTP layer alone; see `PredictedTree`."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.tokens: list[int] = []

    def begin_step(self, context: Sequence[int], max_depth: int | None) -> Frontier:
        """See `PredictedTree`."""
        self.tokens = []
        return Frontier([0], [0], [context[-1]], [0], [1.0], 1.0)

    def suggested(self, nodes: Sequence[int]) -> list[int]:
        """See `PredictedTree`."""
        return []

    def add_predictions(self, frontier: Frontier, tokens: Ints, odds: Doubles) -> Frontier:
        """See `PredictedTree`."""
        self.tokens.append(int(tokens[0, 0]))
        length = len(self.tokens)
        if length == self._depth:
            return Frontier([], [], [], [], [], 1.0 + length)
        return Frontier([length], [length - 1], self.tokens[-1:], [length], [1.0], 1.0 + length)


class MtpChainDrafter(Drafter):
    """Feeds a chain of the checkpoint's MTP layer, as transformers, vLLM and SGLang do; see `Drafter`."""

    def __init__(self, depth: int) -> None:
        self.mtp: MtpChain = MtpChain(depth)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """The chain that the layer has predicted for this step; it teaches nothing."""
        tree = TokenTree(context[-1], max_depth)
        tree.add_path(self.mtp.tokens, "mtp")
        return Draft(tree, teaches=False)
