"""Random trees and what attention over them is, by brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from lade.backends.tree_attention.tree_mask import TreeInputs, TreeMask
from lade.decoding.tree import TokenTree
from lade.model.inputs import AttentionSpan, StepInputs

CPU = torch.device("cpu")


def tree_of(parents: list[int]) -> TokenTree:
    """A root, and one more node for each number; it hangs from the node of that number, modulo those there are."""
    tree = TokenTree(0)
    for parent in parents:
        tree.add(parent % len(tree), len(tree), "pool")
    return tree


def sees(tree: TokenTree, node: int, other: int) -> bool:
    """Whether `other` is `node` or one of its ancestors."""
    while node > other:
        node = tree.parents[node]
    return node == other


@dataclass(frozen=True)
class Case:
    """One pass over trees of several rows, or over the rest of one tree."""

    trees: list[TokenTree]
    lengths: list[int]
    span: AttentionSpan = field(default_factory=AttentionSpan)
    cached: int = 0
    """Nodes of the only tree that are cached already."""

    @property
    def dense(self) -> StepInputs:
        return StepInputs.of(self.trees, self._lengths(), CPU, [self.cached] * len(self.trees))

    @property
    def inputs(self) -> TreeInputs:
        return TreeInputs.of(self.trees, self._lengths(), CPU, self.cached)

    def _lengths(self) -> list[int]:
        return [length + self.cached for length in self.lengths]

    def mask(self, device: torch.device = CPU) -> TreeMask:
        slots = self.inputs.slots
        moved = {name: value.to(device) for name, value in vars(slots).items() if isinstance(value, torch.Tensor)}
        return TreeMask(type(slots)(**moved, width=slots.width), self.span)

    def allowed(self) -> torch.Tensor:
        """What each query sees, `[B, S, K]`, one by one."""
        nodes, first = max(map(len, self.trees)), max(self.lengths)
        allowed = torch.zeros(len(self.trees), nodes, first + nodes, dtype=torch.bool)
        for row, (tree, length) in enumerate(zip(self.trees, self.lengths, strict=True)):
            for query in range(nodes):
                fills_up = query >= len(tree)  # by a copy of the root, which sees the text and itself
                position = length + (0 if fills_up else tree.depths[query])
                for slot in range(length):
                    allowed[row, query, slot] = self._near(position, slot)
                for node in range(0 if fills_up else len(tree)):
                    near = self._near(position, length + tree.depths[node])
                    allowed[row, query, first + node] = near and sees(tree, query, node)
                allowed[row, query, first + query] = True
        return allowed[:, self.cached :]

    def states(self, kv_heads: int, group: int, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Random queries, keys and values."""
        rows, step, slots = self.allowed().shape
        shapes = [(kv_heads * group, step), (kv_heads, slots), (kv_heads, slots)]
        return [torch.randn(rows, *shape, dim, dtype=dtype) for shape in shapes]

    def _near(self, query: int, key: int) -> bool:
        if self.span.window:
            return query - key < self.span.window
        return not self.span.chunk or query // self.span.chunk == key // self.span.chunk


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention `[B, S, H, Dv]` in float64; keys that a row's queries do not see may be anything."""
    group = query.shape[1] // key.shape[1]
    seen = allowed.any(dim=1)[:, None, :, None]  # [B, 1, K, 1]
    key, value = (states.double().masked_fill(~seen, 0).repeat_interleave(group, dim=1) for states in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, None], -math.inf)
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


REACHES = st.one_of(
    st.just(AttentionSpan()),
    st.integers(1, 20).map(lambda window: AttentionSpan(window=window)),
    st.integers(1, 20).map(lambda chunk: AttentionSpan(chunk=chunk)),
)


@st.composite
def cases(draw: st.DrawFn, most_nodes: int = 40, longest: int = 60) -> Case:
    """Batches of trees, or the rest of one."""
    parents = st.lists(st.integers(0, most_nodes), max_size=most_nodes - 1)
    trees = [tree_of(each) for each in draw(st.lists(parents, min_size=1, max_size=3))]
    lengths = [draw(st.integers(0, longest)) for _ in trees]
    cached = draw(st.integers(0, len(trees[0]) - 1)) if len(trees) == 1 else 0
    return Case(trees, lengths, draw(REACHES), cached)
