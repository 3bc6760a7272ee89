"""Whatever a cache's layers own follows the rows: after each operation, all tensors are those of a text fed alone.

The tensors are found by walking through the layers' attributes, so one that is new, and that an operation forgets, is
found, too.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same, lookahead, plain, prompt
from families import family
from graphed import Graphs
from transformers import GenerationConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

import lade
from lade.backends.recurrent.layer import RecurrentLayer, RecurrentTreeLayer, TokenCounter
from lade.decoding.tree import TokenTree
from lade.model.cache_layers import TreeLayer
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.server.sampling_parameters import Penalties

KINDS = {
    "llama": {TreeLayer},
    "deepseek_v32": {TreeLayer},  # with keys of an indexer
    "falcon_h1": {RecurrentTreeLayer},
    "qwen3_5_text": {RecurrentLayer, TreeLayer},
    "mamba2": {RecurrentLayer, TokenCounter},
}
TEXTS = [prompt(length, seed)[0].tolist() for seed, length in enumerate((9, 14, 11))]
Found = dict[tuple[int, str], torch.Tensor]


def model_of(name: str) -> Any:
    case = family(name)
    return case.build(**({"index_topk": 64} if "index_topk" in case.extra else {}))  # all keys are seen


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest) -> EagerRunner:
    model = model_of(request.param)
    return EagerRunner(model, lade.supports(model).require(), GenerationConfig())


def tensors(thing: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All that lie in a layer, by where they are; what only a pass needs is empty between passes."""
    if isinstance(thing, torch.Tensor):
        yield name, thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(thing, CacheLayerMixin | LinearAttentionCacheLayerMixin):
        yield from tensors(vars(thing))


def of_row(cache: TreeCache, row: int) -> Found:
    """What the layers hold of a row: of what has a place for each token, the tokens that there are."""
    length, found = cache.lengths[row], Found()
    for number, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        for name, tensor in tensors(layer):
            by_token = keys is not None and tensor.ndim == 4 and tensor.shape[2] == keys.shape[2]
            found[number, name] = tensor[row, :, :length] if by_token else tensor[row]
    return found


def fed(runner: EagerRunner, text: list[int]) -> TreeCache:
    cache = TreeCache()
    runner.prefill([text], cache)
    return cache


def assert_holds(runner: EagerRunner, cache: TreeCache, texts: list[list[int]]) -> None:
    assert cache.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        expected, found = of_row(fed(runner, text), 0), of_row(cache, row)
        assert found.keys() == expected.keys()
        for place, tensor in expected.items():
            assert torch.allclose(found[place], tensor, rtol=1e-4, atol=1e-4), place


def joined(runner: EagerRunner) -> TreeCache:
    """A cache of all texts, that came one by one."""
    cache = TreeCache()
    for text in TEXTS:
        cache.take(fed(runner, text))
    return cache


def saved(cache: TreeCache) -> TreeCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded: TreeCache = torch.load(file, weights_only=False)
    return loaded


def growing(cache: TreeCache) -> TreeCache:
    cache.reserve(5, 600)
    return cache


def keeping(runner: EagerRunner, cache: TreeCache) -> None:
    """Of a tree on each row the path to its last node is kept."""
    trees = [TokenTree(5 + row) for row in range(3)]
    for tree in trees:
        tree.add_path([7, 8], "pool")
        tree.add_path([9, 10, 11], "pool")
    logits = runner.forward(trees, TEXTS, cache)
    cache.keep([[0, 3, 4, 5]] * 3, logits.shape[1])


KEPT = [[*text, 5 + row, 9, 10, 11] for row, text in enumerate(TEXTS)]
OPERATIONS: dict[str, tuple[Callable[[EagerRunner, TreeCache], None], list[list[int]]]] = {
    "keep": (keeping, KEPT),
    "leave": (lambda runner, cache: cache.leave(0), [TEXTS[2], TEXTS[1]]),
    "select": (lambda runner, cache: cache.batch_select_indices(torch.tensor([2, 0])), [TEXTS[2], TEXTS[0]]),
    "reorder": (lambda runner, cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [TEXTS[1], TEXTS[1], TEXTS[0]]),
    "repeat": (lambda runner, cache: cache.batch_repeat_interleave(2), [text for text in TEXTS for _ in range(2)]),
}
COPIES = [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), saved, growing]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_all_tensors_follow_their_rows(runner, name):
    """On the cache itself and on copies of it; then one more step, for buffers that were joined before."""
    operation, texts = OPERATIONS[name]
    caches = [joined(runner), *(make(joined(runner)) for make in COPIES)]
    for cache in caches:
        operation(runner, cache)
        assert_holds(runner, cache, texts)
        if len(texts) == len(TEXTS):
            again = copy.deepcopy(cache)
            keeping(runner, again)
            assert_holds(runner, again, [[*text, 5 + row, 9, 10, 11] for row, text in enumerate(texts)])


def test_first_tokens_are_copied_with_all_that_belongs_to_them(runner):
    cache = joined(runner)
    if cache.recurrent:
        with pytest.raises(ValueError, match="states cannot go back"):
            cache.copy_row(1, 6)
        return
    assert_holds(runner, cache.copy_row(1, 6), [TEXTS[1][:6]])
    cache.crop(-2)
    assert_holds(runner, cache, [text[:-2] for text in TEXTS])


def test_rows_of_several_caches_take_all_along(runner):
    cache, parts = TreeCache(), [fed(runner, text) for text in TEXTS]
    cache.join(parts, [(2, 0), (0, 0), (1, 0)])
    assert_holds(runner, cache, [TEXTS[2], TEXTS[0], TEXTS[1]])
    assert not [found for part in parts for layer in part.layers for found in tensors(layer)], "they are emptied"


def test_nothing_is_left_of_a_layer_that_forgets(runner):
    cache = joined(runner)
    assert {type(layer) for layer in cache.layers} in KINDS.values()
    for layer in cache.layers:
        layer.reset()
        assert not list(tensors(layer))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama", "deepseek_v32", "falcon_h1", "qwen3_5_text"])
def test_what_begins_in_inference_mode_goes_on_outside_of_it(name):
    """And the other way round, rows that come and go included: what a cache keeps is ordinary tensors."""
    model, cache = model_of(name), TreeCache()
    with torch.inference_mode():
        text = lookahead(model, prompt(9), max_new_tokens=20, past_key_values=cache)
    for _ in range(2):
        text = torch.cat([text, prompt(4)], dim=1)
        expected = plain(model, text, max_new_tokens=20)
        text = lookahead(model, text, max_new_tokens=20, past_key_values=cache)
        assert torch.equal(text, expected)
    runner = EagerRunner(model, lade.supports(model).require(), GenerationConfig())
    with torch.inference_mode():
        cache = joined(runner)
        cache.batch_select_indices(torch.tensor([0, 1, 2]))
        copied = saved(copy.deepcopy(cache))
        one = TreeCache()
        one.join([cache], [(0, 0), (0, 1), (0, 2)])
    for each in (one, copied):
        keeping(runner, each)
        assert_holds(runner, each, KEPT)


@pytest.mark.parametrize("name", ["llama", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_a_stream_may_be_read_in_either_mode(name):
    model, tokens = model_of(name), list[int]()
    penalties = {"logits_processor": [Penalties(0.1, 0.1, prompt_length=9)], "max_new_tokens": 30}
    expected = plain(model, prompt(9), **penalties)[0, 9:].tolist()
    steps = lade.stream(model, prompt(9), lookahead=lade.LookaheadConfig(budget=12), do_sample=False, **penalties)
    for number in itertools.count():
        with torch.inference_mode(number % 2 == 0):
            step = next(steps, None)
        if step is None:
            break
        tokens += step.tokens
    assert tokens == expected


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_captured_passes_are_replayed_in_either_mode(name, monkeypatch):
    """Their buffers stay from one generation to the next."""
    graphs, model = Graphs(torch.device("cpu")).serve(monkeypatch), model_of(name)
    for inferring in (True, False, True):
        with torch.inference_mode(inferring):
            assert_same(model, prompt(9), [lade.LookaheadConfig(budget=12)], max_new_tokens=20)
    assert graphs.counted.replayed > graphs.counted.recorded


def test_a_copy_takes_no_more_than_what_is_used(runner):
    cache = fed(runner, TEXTS[0])
    used = sum(tensor.nbytes for tensor in of_row(cache, 0).values())
    size = len(pickle.dumps(copy.deepcopy(cache)))
    cache.take(fed(runner, TEXTS[1]))
    cache.leave(1)
    assert used < len(pickle.dumps(cache)) < 2 * size < 2 * (used + 20_000)
