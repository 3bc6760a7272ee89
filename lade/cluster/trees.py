"""Token trees in messages, and the digest by which processes find out that they would feed different ones.

Two trees of equal size with other tokens give a wrong text without any error: each layer of a split model would add up
partial results of different tokens. So with each tree goes a digest, and who receives it compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from lade.decoding.tree import TokenTree

Flat = tuple[list[int], list[int]]
"""Ids and parents of the nodes of a tree."""


def flat(tree: TokenTree) -> Flat:
    """A tree as it is sent."""
    return tree.ids, tree.parents


def grown(ids: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """The tree that was sent."""
    tree = TokenTree(ids[0])
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tree.extend(ids[1:], parents[1:], depths[1:], "sent")
    return tree


def digest(trees: Sequence[TokenTree], lengths: Sequence[int]) -> int:
    """Of trees, and of how many tokens are cached before each of them."""
    numbers = [number for tree in trees for number in (len(tree), *tree.ids, *tree.parents)]
    return zlib.crc32(np.array([*numbers, *lengths], dtype=np.int64).tobytes())
