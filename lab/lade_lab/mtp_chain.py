"""Chains of a checkpoint's MTP layer, as transformers, vLLM and SGLang draft them."""

from __future__ import annotations

from collections.abc import Sequence

from lade.decoding.drafting.drafter import Draft, Drafter, Unseen
from lade.decoding.kernels.layout import Doubles, Ints
from lade.decoding.tree import TokenTree


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
