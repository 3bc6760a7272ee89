"""An engine that replays a model's logits: what each request gets is known, and so are the rows of every node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lade.decoding.tree import TokenTree
from lade.engines.drafter import EngineDrafter
from lade.testing import toy_model

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Logits `[V]` after a text, in float32."""


@cache
def toy() -> tuple[Any, list[list[int]]]:
    """A tiny model whose texts repeat themselves somewhat, and prompts for it."""
    drawn = torch.randint(24, (3, 24), generator=torch.Generator().manual_seed(0))
    return toy_model(vocabulary=24, seed=1), drawn.tolist()


@cache
def _logits(text: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = toy()[0](torch.tensor([text]), logits_to_keep=1).logits[0, -1]
    return found.float()


def logits(text: Sequence[int]) -> torch.Tensor:
    """Its logits `[V]` after a text."""
    return _logits(tuple(text))


def plainly(prompt: list[int], count: int) -> list[int]:
    """The tokens that plain decoding continues a prompt with."""
    out = toy()[0].generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def tree_of(prompt: Sequence[int], draft: Any) -> TokenTree:
    """A draft behind a prompt as a tree of the project's own."""
    tree = TokenTree(prompt[-1], None)
    for token, parent in zip(draft.ids, draft.parents, strict=True):
        tree.extend([token], [parent + 1], [tree.depths[parent + 1] + 1], "memory")
    return tree


@dataclass
class Replayed:
    """Counts of one request."""

    tokens: list[int]
    steps: int = 0
    fed: int = 0

    @property
    def per_step(self) -> float:
        return len(self.tokens) / self.steps


def replay(
    drafter: EngineDrafter,
    logits: Logits,
    prompt: Sequence[int],
    count: int,
    *,
    name: str = "request",
    most: int = 8,
    fed: int | None = None,
    with_rows: bool = True,
    begin: dict[str, object] | None = None,
) -> Replayed:
    """Greedy decoding of one request; of each draft the first `fed` tokens are fed, as engines cut them."""
    drafter.begin(name, prompt, **(begin or {}))
    text, result = list(prompt), Replayed([])
    while len(result.tokens) < count:
        (draft,) = drafter.propose([name], min(most, count - len(result.tokens) - 1))
        kept = len(draft) if fed is None else min(fed, len(draft))
        paths = [list[int]()]
        for token, parent in zip(draft.ids[:kept], draft.parents, strict=False):
            paths.append([*paths[parent + 1], token])
        rows = torch.stack([logits([*text, *path]) for path in paths])  # [1 + kept, V]
        choices, new, node = rows.argmax(-1).tolist(), list[int](), 0
        while True:
            new.append(choices[node])
            following = [*paths[node], choices[node]]
            if following not in paths:
                break
            node = paths.index(following)
        drafter.learn(name, new, drafter.read_rows(rows) if with_rows else None)
        text += new
        result.tokens += new
        result.steps += 1
        result.fed += len(paths)
    drafter.end(name)
    return result
