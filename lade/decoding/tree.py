"""The token tree of one step: all tokens fed to the model at once, defined by `parents`.

    root ─┬─ a ─── b          ids      = [root, a, b, c]
          └─ c                parents  = [-1,   0, 1, 0]
                              position = P + depth of a node
                              mask     = a node sees the cache, its ancestors and itself

Window cells and guesses are all candidates for the continuation of the root. Candidates with a common prefix share
its nodes, as the model computes the same for both; so any node may be accepted, whichever source proposed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROOT = 0


class TokenTree:
    """A trie of candidate continuations of the current token.

    Args:
        root: id of the current token, which is accepted but not in the cache yet.
        max_depth: deepest node that may be added (positions end with the context); None for no limit.

    Attributes:
        children: nodes by their parent and token.
    """

    def __init__(self, root: int, max_depth: int | None = None) -> None:
        self.ids = [root]
        self.parents = [-1]
        self.depths = [0]
        self.sources = ["bonus"]  # never reported: the root is accepted before it is fed
        self.max_depth = max_depth
        self.children: dict[tuple[int, int], int] = {}

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> TokenTree:
        """Return a tree without branches, whose root is the first of these tokens."""
        tree, depths = cls(tokens[0]), range(len(tokens))
        tree.extend(tokens[1:], depths[:-1], depths[1:], source)
        return tree

    def __len__(self) -> int:
        """Return S, the number of tokens to feed."""
        return len(self.ids)

    def add(self, parent: int | None, token: int, source: str) -> int | None:
        """Return the child of `parent` with this token, added if missing; None if it were deeper than `max_depth`."""
        if parent is None:
            return None
        node = self.children.get((parent, token))
        if node is not None:
            return node
        depth = self.depths[parent] + 1
        if self.max_depth is not None and depth > self.max_depth:
            return None
        node = len(self.ids)
        self.ids.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.sources.append(source)
        self.children[parent, token] = node
        return node

    def add_path(self, tokens: Sequence[int], source: str) -> list[int]:
        """Add a guess, the tokens after the root; return its nodes, without those beyond `max_depth`."""
        node: int | None = ROOT
        nodes = [node := self.add(node, token, source) for token in tokens]
        return [node for node in nodes if node is not None]

    def extend(self, ids: Sequence[int], parents: Sequence[int], depths: Sequence[int], source: str) -> None:
        """Add several new nodes at once, parents before their children."""
        first = len(self.ids)
        self.children.update(zip(zip(parents, ids, strict=True), range(first, first + len(ids)), strict=True))
        self.ids += ids
        self.parents += parents
        self.depths += depths
        self.sources += [source] * len(ids)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with this token; None if there is none."""
        return self.children.get((node, token))

    def closure(self) -> npt.NDArray[np.bool_]:
        """Return the ancestor closure, `[S, S]`: true where the row's node sees the column's node.

        Each node's ancestors are the bits of one Python integer, which is fast enough without compiled code.
        """
        size, masks, bit = len(self.ids), [1], 1
        for parent in self.parents[1:]:
            bit += bit
            masks.append(masks[parent] | bit)
        width = 8 * -(-size // 64)
        if width == 8:  # made at once
            packed = np.array(masks, "<u8").view(np.uint8)
        else:
            packed = np.frombuffer(b"".join([mask.to_bytes(width, "little") for mask in masks]), np.uint8)
        return np.unpackbits(packed.reshape(size, width), axis=1, count=size, bitorder="little").view(np.bool_)
