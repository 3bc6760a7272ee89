"""Whether `lade_invariant` keeps its order of summation on this machine: tried for the heads of a model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from lade.decoding.tree import TokenTree
from lade.model.attention_span import FULL
from lade.model.invariant_attention.attention import invariant_attention
from lade.model.invariant_attention.placed_mask import PlacedMask
from lade.model.masks import StepInputs

TEXTS = (1, 17, 60, 64, 130, 257, 700)
"""Cached tokens."""
_NODES, _DEPTH = 40, 9


class Heads(NamedTuple):
    """The heads of a layer: of queries, of keys, and their sizes."""

    queries: int
    keys: int
    size: int
    value_size: int


@torch.no_grad()
def attention_keeps_order(heads: Heads) -> bool:
    """Whether each node of a tree gets the same bits as if it were fed alone, and each token of a text as in pieces.

    All is in float32, in which models of 16 bits are summed up, too: there, no difference is rounded away.

    Args:
        heads: of the layers.
    """
    generator = torch.Generator().manual_seed(0)
    return all(_agrees(heads, text, generator) for text in TEXTS)


def _agrees(heads: Heads, text: int, generator: torch.Generator) -> bool:
    tree = random_tree(_NODES, _DEPTH, generator)
    counts = ((heads.queries, heads.size), (heads.keys, heads.size), (heads.keys, heads.value_size))
    states = [torch.randn(1, count, text + len(tree), size, generator=generator) for count, size in counts]
    query, key, value = states
    inputs = StepInputs.of([tree], [text], torch.device("cpu"))
    mask = PlacedMask.of(inputs.mask(FULL), inputs.key_positions)
    found = _attention(query[:, :, text:], key, value, mask)
    for node, ancestors in enumerate(tree.closure()):
        path = [*range(text), *(text + np.flatnonzero(ancestors))]
        alone = _attention(query[:, :, [text + node]], key[:, :, path], value[:, :, path])
        if not torch.equal(alone[:, 0], found[:, node]):
            return False
    return _agrees_in_pieces(*(each[:, :, :text] for each in states))


def _agrees_in_pieces(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a text, `[1, heads, T, size]`, gets the same bits whole and in two pieces."""
    middle = query.shape[2] // 3 + 1
    first = _attention(query[:, :, :middle], key[:, :, :middle], value[:, :, :middle])
    second = _attention(query[:, :, middle:], key, value) if middle < query.shape[2] else first[:, :0]
    return torch.equal(torch.cat([first, second], 1), _attention(query, key, value))


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: PlacedMask | None = None
) -> torch.Tensor:
    return invariant_attention(torch.nn.Identity(), query, key, value, mask)[0]


def random_tree(nodes: int, deepest: int, generator: torch.Generator) -> TokenTree:
    """A tree of this many nodes with a path down to the greatest depth."""
    tree = TokenTree(0, max_depth=deepest)
    tree.add_path(range(1, deepest + 1), "pool")
    while len(tree) < nodes:
        parent = int(torch.randint(len(tree), (), generator=generator))
        tree.add(parent, len(tree), "pool")
    return tree
