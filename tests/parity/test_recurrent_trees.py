"""Random trees, one after the other, in batches: recurrent families without their float32, at every node."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from comparing import prompt
from effort import examples
from families import RECURRENT_FAMILIES, VOCABULARY, family
from hypothesis import given, settings
from hypothesis import strategies as st
from lifted import float32_lifted
from packaging import version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lade
from lade.backends.trials.tree_check import PlainDecoding, distance
from lade.decoding.tree import TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner

LIMITED = {"nemotron_h": {"time_step_min": 1.0}, "zamba2": {"time_step_min": 1.0}}
OFTEN = ("qwen3_5_text", "nemotron_h")
OLD = version.parse(transformers.__version__) < version.parse("5.23")
LIFTED = [  # in older versions some rotary embeddings cannot do without float32
    str(case)
    for case in RECURRENT_FAMILIES
    if case.model_type in CONFIG_MAPPING and not (OLD and str(case) in ("bamba", "zamba2", "falcon_h1"))
]
NAMES = [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in LIFTED]
parents = st.lists(st.integers(0, 9), max_size=7)


@functools.cache
def model_of(name: str) -> Any:
    case = family(name)
    return case.build(**LIMITED.get(name, {}))


def tree_of(root: int, chosen: list[int]) -> TokenTree:
    """A node for each number; it hangs from the node of that number, modulo those there are."""
    tree = TokenTree(root)
    for node, parent in enumerate(chosen, start=1):
        tree.add(parent % len(tree), (root + 7 * node) % VOCABULARY, "pool")
    return tree


def path_to(tree: TokenTree, node: int) -> list[int]:
    """The nodes from the root to this one."""
    return [] if node < 0 else [*path_to(tree, tree.parents[node]), node]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(12), deadline=None)
@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=3),
    st.lists(st.lists(parents, min_size=3, max_size=3), min_size=2, max_size=3),
    st.integers(0, 10**6),
)
def test_trees_of_several_rows(name, lengths, rounds, seed):
    model, generator = model_of(name), torch.Generator().manual_seed(seed)
    runner, cache = EagerRunner(model, lade.supports(model).require(), model.generation_config), TreeCache()
    with float32_lifted(), torch.no_grad():
        rows = [prompt(length, seed=row)[0].tolist() for row, length in enumerate(lengths)]
        runner.prefill([row[:-1] for row in rows], cache)
        texts = [PlainDecoding(model, row) for row in rows]
        for chosen in rounds:
            trees = [tree_of(row[-1], parents) for row, parents in zip(rows, chosen, strict=False)]
            logits = runner.forward(trees, rows, cache)
            kept = []
            for row, tree in enumerate(trees):
                nodes = {0: texts[row]}
                for node in range(1, len(tree)):
                    nodes[node] = nodes[tree.parents[node]].after(tree.ids[node])
                assert all(distance(text.logits, logits[row, node]) < 1e-10 for node, text in nodes.items())
                last = int(torch.randint(len(tree), (), generator=generator))
                kept.append(path_to(tree, last))
                following = int(torch.randint(VOCABULARY, (), generator=generator))
                rows[row] = [*rows[row], *(tree.ids[node] for node in kept[-1][1:]), following]
                texts[row] = nodes[last].after(following)
            cache.keep(kept, fed=max(map(len, trees)))
