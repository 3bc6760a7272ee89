"""The cache: ragged rows, and compaction that equals a prefill of the kept tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lade import TreeCache, supports
from lade.decoding.tree import ROOT, TokenTree
from lade.model.runner import EagerRunner
from lade.testing import toy_model

VOCABULARY = 48
MODELS = {family: toy_model(family, vocabulary=VOCABULARY) for family in ("llama", "gpt2")}
tokens = st.integers(0, VOCABULARY - 1)


def runner_for(family: str) -> EagerRunner:
    model = MODELS[family]
    return EagerRunner(model, supports(model).require(), model.generation_config)


def random_tree(root: int, pairs: list[tuple[int, int]]) -> TokenTree:
    tree = TokenTree(root)
    for parent, token in pairs:
        tree.add(parent % len(tree), token, "pool")
    return tree


def path_to(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while path[-1] != ROOT:
        path.append(tree.parents[path[-1]])
    return path[::-1]


additions = st.lists(st.tuples(st.integers(0, 20), tokens), max_size=12)


@settings(max_examples=25)
@given(
    family=st.sampled_from(sorted(MODELS)),
    prompt=st.lists(tokens, min_size=1, max_size=6),
    steps=st.lists(st.tuples(additions, st.integers(0, 20)), min_size=1, max_size=4),
)
def test_compaction_equals_a_prefill_of_the_kept_path(family, prompt, steps):
    runner, cache, text = runner_for(family), TreeCache(), list(prompt)
    if len(text) > 1:
        runner.prefill([text[:-1]], cache)
    for pairs, choice in steps:
        tree = random_tree(text[-1], pairs)
        if not cache.layers:
            return
        logits = runner.forward([tree], [text], cache)[0]
        path = path_to(tree, choice % len(tree))
        cache.keep([path], fed=len(tree))
        text += [tree.ids[node] for node in path[1:]]

        fresh = TreeCache()
        plain = runner.prefill([text], fresh)[0]
        assert torch.allclose(logits[path[-1]], plain, atol=1e-9)
        assert cache.lengths == fresh.lengths == [len(text)]
        for kept, anew in zip(cache.layers, fresh.layers, strict=True):
            assert torch.allclose(kept.keys[:, :, : len(text)], anew.keys[:, :, : len(text)], atol=1e-9)
            assert torch.allclose(kept.values[:, :, : len(text)], anew.values[:, :, : len(text)], atol=1e-9)
        text.append(int(plain.argmax()))


@settings(max_examples=15)
@given(
    family=st.sampled_from(sorted(MODELS)),
    rounds=st.lists(st.lists(st.tuples(additions, st.integers(0, 20)), min_size=3, max_size=3), min_size=1, max_size=3),
)
def test_rows_with_lengths_of_their_own_do_not_see_each_other(family, rounds):
    """Three rows keep paths of different lengths; each row's logits are those it has alone."""
    runner, cache = runner_for(family), TreeCache()
    texts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    runner.prefill([text[:-1] for text in texts], cache)
    for additions_of in rounds:
        trees = [random_tree(text[-1], pairs) for text, (pairs, _) in zip(texts, additions_of, strict=True)]
        logits = runner.forward(trees, texts, cache)  # [B, S, V]
        paths = [path_to(tree, pick % len(tree)) for tree, (_, pick) in zip(trees, additions_of, strict=True)]
        cache.keep(paths, fed=logits.shape[1])
        for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            texts[row] += [tree.ids[node] for node in path[1:]]
            alone = runner.prefill([texts[row]], TreeCache())[0]
            assert torch.allclose(logits[row, path[-1]], alone, atol=1e-9)
            texts[row].append(int(alone.argmax()))
        assert cache.lengths == [len(text) - 1 for text in texts]


def test_rows_can_leave_the_batch():
    runner, cache = runner_for("llama"), TreeCache()
    texts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    runner.prefill([text[:-1] for text in texts], cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    trees = [TokenTree(9), TokenTree(3)]
    logits = runner.forward(trees, [texts[2], texts[0]], cache)[:, 0]
    alone = [runner.prefill([texts[row]], TreeCache())[0] for row in (2, 0)]
    assert torch.allclose(logits, torch.stack(alone), atol=1e-9)


def test_it_grows_without_losing_anything():
    cache = TreeCache()
    states = torch.randn(1, 2, 700, 4)
    for start in range(0, 700, 7):
        piece = states[:, :, start : start + 7]
        keys, values = cache.update(piece, 2 * piece, 0)
    assert torch.equal(keys, states) and torch.equal(values, 2 * states)
    assert cache.get_seq_length() == 700


def test_it_is_an_ordinary_cache_to_transformers():
    model = MODELS["llama"]
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = model.generate(ids, max_new_tokens=12)
    cache = TreeCache()
    first = model.generate(ids, max_new_tokens=5, past_key_values=cache)
    assert cache.lengths == [8]
    assert torch.equal(model.generate(first, max_new_tokens=7, past_key_values=cache), expected)


def test_crop_takes_minus_the_number_of_tokens():
    cache = TreeCache()
    cache.update(torch.randn(1, 1, 5, 2), torch.randn(1, 1, 5, 2), 0)
    cache.crop(-2)
    assert cache.lengths == [3]
    with pytest.raises(ValueError, match="give minus the number"):
        cache.crop(2)
    cache.reset()
    assert cache.lengths == [0]
