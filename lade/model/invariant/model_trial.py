"""A whole model on trial: a pass over a tree against passes over single tokens, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lade.decoding.tree import ROOT, TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner
from lade.model.support.tree_check import PlainDecoding
from lade.model.token_embeddings import token_embeddings

PATHS = ((0, 1, 2, 3, 4, 5), (0, 1, 6, 7), (8, 9), (8, 10, 11), (12,))
"""Of the tree: indices into random tokens."""
KEPT = PATHS[1]  # whose keys must move forward
FOLLOWING = 13

Outputs = list[tuple[str, torch.Tensor]]
"""What the modules of a model returned, in the order in which they did, by their names."""


class ModelTrial:
    """A text, and a tree behind it.

    Args:
        model: a decoder-only model.
        plan: how it takes its masks.
        tokens: length of the text.
    """

    def __init__(self, model: PreTrainedModel, plan: MaskPlan, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        vocabulary: int = token_embeddings(model).weight.shape[0]
        ids = torch.randint(vocabulary, (tokens,), generator=generator).tolist()
        nodes = torch.randperm(vocabulary, generator=generator).repeat(FOLLOWING + 1)[: FOLLOWING + 1].tolist()
        self._model, self._text, self._following = model, ids, nodes[FOLLOWING]
        self._paths = [tuple(nodes[i] for i in path) for path in PATHS]
        self._kept = tuple(nodes[i] for i in KEPT)
        self._runner = EagerRunner(model, plan, model.generation_config)
        self._tree = TokenTree(ids[-1])
        for path in self._paths:
            self._tree.add_path(path, "pool")

    @torch.no_grad()
    def differing(self) -> str | None:
        """The first module whose output differs; None if all logits are equal."""
        cache = self._prefilled()
        logits = self._runner.forward([self._tree], [self._text], cache)[0]  # [S, V]
        plain: dict[tuple[int, ...], PlainDecoding] = {(): PlainDecoding(self._model, self._text)}
        for path in self._prefixes():
            if path:
                plain[path] = plain[path[:-1]].after(path[-1])
            if not torch.equal(plain[path].logits, logits[self._node(path)]):
                return self._first_module(path)
        cache.keep([[self._node(self._kept[:depth]) for depth in range(len(self._kept) + 1)]], fed=len(self._tree))
        text = [*self._text, *self._kept, self._following]
        after = self._runner.forward([TokenTree(self._following)], [text], cache)[0, ROOT]
        expected = plain[self._kept].after(self._following).logits
        return None if torch.equal(expected, after) else "the cache behind an accepted path"

    def _prefixes(self) -> Sequence[tuple[int, ...]]:
        found = [path[:depth] for path in self._paths for depth in range(len(path) + 1)]
        return sorted(dict.fromkeys(found), key=len)

    def _node(self, path: Sequence[int]) -> int:
        node = ROOT
        for token in path:
            child = self._tree.child(node, token)
            assert child is not None
            node = child
        return node

    def _prefilled(self) -> TreeCache:
        cache = self._runner.tree_cache()
        self._runner.prefill([self._text[:-1]], cache)
        return cache

    def _first_module(self, path: Sequence[int]) -> str:
        """The first module whose output at the end of a path is another one in the tree."""
        cache = self._prefilled()
        with recorded(self._model) as of_tree:
            self._runner.forward([self._tree], [self._text], cache)
        plain = PlainDecoding(self._model, self._text[:-1]) if not path else PlainDecoding(self._model, self._text)
        for token in path[:-1]:
            plain = plain.after(token)
        with recorded(self._model) as of_token:
            plain.after(path[-1] if path else self._text[-1])
        return first_difference(of_token, of_tree, len(self._tree), self._node(path))


@contextmanager
def recorded(model: nn.Module) -> Iterator[Outputs]:
    """What each module returns while the context lasts."""
    outputs: Outputs = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, torch.Tensor):
            outputs.append((name, first.clone()))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(note, name)).remove)
        yield outputs


def first_difference(of_token: Outputs, of_tree: Outputs, nodes: int, node: int) -> str:
    """The first module that gives a token another result in a tree of so many nodes.

    Args:
        of_token: of a pass over the token.
        of_tree: of the tree's.
        nodes: of the tree.
        node: where the token stands in it.
    """
    for (name, alone), (_, together) in zip(of_token, of_tree, strict=False):
        one, row = _row(alone, 1, 0), _row(together, nodes, node)
        if one is not None and row is not None and one.shape == row.shape and not torch.equal(one, row):
            return name
    return "no module by itself"


def _row(states: torch.Tensor, tokens: int, token: int) -> torch.Tensor | None:
    """What an output `[1, S, ...]` or `[S, ...]` says of a token; None of one of another shape."""
    if states.ndim > 1 and states.shape[:2] == (1, tokens):
        return states[0, token]
    return states[token] if states.ndim and states.shape[0] == tokens else None
