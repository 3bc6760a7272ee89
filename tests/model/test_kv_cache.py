"""The cache: ragged rows, and compaction that equals a prefill of the kept tokens."""

import pytest
import torch
from effort import examples
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


def without_the_rest(tree: TokenTree, nodes: list[int]) -> TokenTree:
    """A tree of these nodes alone, ascending, each with its parent."""
    numbers = {node: number for number, node in enumerate(nodes)}
    left = TokenTree(tree.ids[ROOT])
    for node in nodes[1:]:
        left.add(numbers[tree.parents[node]], tree.ids[node], "pool")
    return left


additions = st.lists(st.tuples(st.integers(0, 20), tokens), max_size=12)


@settings(max_examples=examples(25))
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
        for kept, again in zip(cache.layers, fresh.layers, strict=True):
            assert torch.allclose(kept.keys[:, :, : len(text)], again.keys[:, :, : len(text)], atol=1e-9)
            assert torch.allclose(kept.values[:, :, : len(text)], again.values[:, :, : len(text)], atol=1e-9)
        text.append(int(plain.argmax()))


@settings(max_examples=examples(15))
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


# --- rows of several lengths ----------------------------------------------------------------------------------------


def filled(*lengths, seed=0):
    """A cache of two layers with random keys and values, and what is in them by row and layer."""
    cache = TreeCache()
    states = [torch.randn(len(lengths), 2, max(lengths), 4, generator=torch.Generator().manual_seed(seed))] * 2
    for index, keys in enumerate(states):
        cache.update(keys + index, -keys - index, index)
    cache.keep([list(range(length)) for length in lengths], fed=max(lengths))
    assert cache.lengths == list(lengths)
    return cache, [
        [keys[row, :, :length] + index for index, keys in enumerate(states)] for row, length in enumerate(lengths)
    ]


def assert_holds(cache, rows):
    for index, layer in enumerate(cache.layers):
        assert layer.lengths == [row[index].shape[1] for row in rows]
        for number, row in enumerate(rows):
            length = row[index].shape[1]
            assert torch.equal(layer.keys[number, :, :length], row[index])
            assert torch.equal(layer.values[number, :, :length], -row[index])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 5), st.data())
def test_of_what_a_row_held_before_a_path_may_drop_tokens_too(lengths, fed, data):
    cache, rows = filled(*lengths)
    new = torch.randn(len(lengths), 2, fed, 4)
    for index in range(2 if fed else 0):
        cache.update(new + index, -new - index, index)
    held = [data.draw(st.integers(0, length)) for length in lengths]
    paths = [sorted(data.draw(st.sets(st.integers(0, own + fed - 1)))) if own + fed else [] for own in held]
    cache.keep(paths, fed, held)
    expected = []
    for number, (row, length, own, path) in enumerate(zip(rows, lengths, held, paths, strict=True)):
        states = [torch.cat([row[i], new[number] + i], dim=1) for i in range(2)]  # [H, length + fed, D]
        left = [*range(length - own), *(length - own + node for node in path)]
        expected.append([state[:, left] for state in states])
    assert_holds(cache, expected)


@settings(max_examples=examples(15))
@given(
    family=st.sampled_from(sorted(MODELS)),
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=3),
    data=st.data(),
)
def test_trees_that_are_fed_bit_by_bit_say_what_each_of_their_texts_says_alone(family, prompts, data):
    """Before each pass every tree loses some branches, in the cache too, and gets others."""
    runner, cache = runner_for(family), TreeCache()
    runner.prefill(prompts, cache)
    trees, held, fed = [TokenTree(prompt[-1]) for prompt in prompts], [1] * len(prompts), 0
    for _ in range(3):
        ends = [data.draw(st.sets(st.integers(0, len(tree) - 1), min_size=1)) for tree in trees]
        left = [
            sorted({node for end in own for node in path_to(tree, end)}) for tree, own in zip(trees, ends, strict=True)
        ]
        cache.keep(left, fed, held)
        trees = [without_the_rest(tree, nodes) for tree, nodes in zip(trees, left, strict=True)]
        held, fed = [len(tree) for tree in trees], 0
        for tree in trees:
            for parent, token in data.draw(additions):
                tree.add(parent % len(tree), token, "pool")
        if held == [len(tree) for tree in trees]:
            continue  # nothing to feed
        logits = runner.extend(trees, held, cache)  # [B, S, V]
        fed = logits.shape[1]
        for row, (prompt, tree, own) in enumerate(zip(prompts, trees, held, strict=True)):
            for node in range(own, len(tree)):
                text = prompt[:-1] + [tree.ids[n] for n in path_to(tree, node)]
                assert torch.allclose(logits[row, node - own], runner.prefill([text], TreeCache())[0], atol=1e-9)


def test_prefill_of_rows_of_any_length_equals_that_of_each():
    for family in MODELS:
        runner, cache = runner_for(family), TreeCache()
        texts = [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4], [7, 8, 9, 10], [11]]
        seen = {}

        def hook(same_prompt, start, logits, seen=seen):
            seen[tuple(same_prompt)] = (start, logits)

        logits = runner.prefill(texts, cache, hook)
        assert cache.lengths == [4, 2, 4, 4, 1]
        assert sorted(seen) == [(0, 2), (1,), (3,), (4,)]
        for number, text in enumerate(texts):
            alone, logits_of = TreeCache(), {}
            expected = runner.prefill(
                [text], alone, lambda same_prompt, start, logits, logits_of=logits_of: logits_of.update({start: logits})
            )
            assert torch.allclose(logits[number], expected[0], atol=1e-9)
            start, shown = next(shown for same_prompt, shown in seen.items() if number in same_prompt)
            assert start == 0 and torch.allclose(shown, logits_of[0], atol=1e-9)
            for joined, layer in zip(cache.layers, alone.layers, strict=True):
                size = len(text)
                assert torch.allclose(joined.keys[number, :, :size], layer.keys[0, :, :size], atol=1e-9)
                assert torch.allclose(joined.values[number, :, :size], layer.values[0, :, :size], atol=1e-9)


def test_growing_copies_seldom():
    cache, _ = filled(5, 300)
    buffers = set()
    for _ in range(600):
        cache.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
        cache.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 1)
        buffers.add(cache.layers[1].values.data_ptr())
        cache.keep([[0], [0]], fed=3)
    assert cache.lengths == [605, 900]
    assert len(buffers) < 10
