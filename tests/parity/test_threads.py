"""Several threads on one model at a time, as plain `model.generate` allows: each gets its text, and the model stays."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from comparing import PAPER, assert_alike, batch, build, lookahead, plain, prompt
from effort import now_and_then
from families import family
from graphed import Graphs
from inside import buffers_in
from transformers import BloomForCausalLM

import lade
from lade.backends.cuda_graphs import pool as model_pools
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.hf.plain import metered
from lade.model.module_changes import hooked

FAMILIES = ("llama", "bloom", "llama4_text", "gemma2")


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads take turns after every few operations."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


def at_once(jobs: list[Callable[[], Any]], rounds: int = 1) -> list[list[Any]]:
    """What each job returned in each round; all begin a round together."""
    start = threading.Barrier(len(jobs))

    def work(job: Callable[[], Any]) -> list[Any]:
        results = []
        for _ in range(rounds):
            start.wait(60)
            results.append(job())
        return results

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        return [future.result(60) for future in futures]


class Appearance:
    """All attributes of a model's modules, the values of its weights, and how many hooks there are."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.attributes = [dict(vars(module)) for module in model.modules()]
        self.sizes = [len(value) for each in self.attributes for value in each.values() if isinstance(value, dict)]
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def check(self, model: torch.nn.Module) -> None:
        now = Appearance(model)
        assert now.sizes == self.sizes, "hooks or modules are left over"
        for before, after in zip(self.attributes, now.attributes, strict=True):
            assert before.keys() == after.keys()
            assert all(after[name] is value for name, value in before.items())
        assert all(torch.equal(now.weights[name], weight) for name, weight in self.weights.items())


def model_and_rows(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and two prompts that plain decoding can decode together."""
    if name == "llama4_text":
        return family(name).build(), batch(9, 9)  # its temperature rises at once, also by padding
    return build(family(name)), batch(6, 9)


def check_threads(name: str, *, new: int, rounds: int, **more: dict[str, Any]) -> None:
    """One text by the adaptive method, one by the paper's, a batch, what else is asked for, and plain decoding."""
    model, padded = model_and_rows(name)
    memory, stats = lade.Memory(), lade.Stats()
    ways: list[dict[str, Any]] = [
        {"ids": prompt(10), "config": lade.LookaheadConfig(budget=16, memory=memory)},
        {"ids": prompt(13, seed=1), "config": PAPER},
        {**padded, "config": "auto"},
        *more.values(),
    ]
    bare = [{argument: value for argument, value in way.items() if argument != "config"} for way in ways]
    expected = [plain(model, **way, max_new_tokens=new) for way in bare]
    appearance = Appearance(model)
    jobs = [functools.partial(lookahead, model, **way, max_new_tokens=new, stats=stats) for way in ways]
    results = at_once([*jobs, functools.partial(plain, model, **bare[0], max_new_tokens=new)], rounds)
    for result, right in zip(results, [*expected, expected[0]], strict=True):
        assert all(torch.equal(ids, right) for ids in result)
    assert stats.tokens_per_step > 1, "no guess was ever right"
    appearance.check(model)


@contextmanager
def interrupted(model: Any, interruption: Callable[[], Any]) -> Iterator[list[Any]]:
    """Let another thread do something in the middle of this thread's first passes: prefill, and two over trees."""
    here, results = threading.get_ident(), []

    def interrupt(module: Any, args: Any) -> None:
        if threading.get_ident() == here and len(results) < 3:
            with ThreadPoolExecutor(1) as pool:
                results.append(pool.submit(interruption).result(60))

    handle = model.get_input_embeddings().register_forward_pre_hook(interrupt)
    yield results
    handle.remove()
    assert len(results) == 3


@pytest.mark.one_in(10)
@pytest.mark.parametrize("config", [None, lade.LookaheadConfig(budget=16), PAPER], ids=["plain", "adaptive", "paper"])
@pytest.mark.parametrize("name", [*FAMILIES, *now_and_then("qwen3_5_text", "falcon_h1", "jamba")])
def test_another_thread_calls_the_model_in_the_middle_of_a_pass(name, config):
    """Plain logits are bit for bit those without it: nothing of a pass over a tree reaches another thread."""
    model, one, other = model_and_rows(name)[0], prompt(10), prompt(13, seed=1)
    wanted = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    expected, before = plain(model, one, max_new_tokens=12), plain(model, other, **wanted)
    appearance, stats = Appearance(model), lade.Stats()
    theirs = functools.partial(lookahead, model, other, config, **wanted)
    with interrupted(model, theirs) as results:
        ours = lookahead(model, one, lade.LookaheadConfig(budget=16), max_new_tokens=12, stats=stats)
    appearance.check(model)
    assert torch.equal(ours, expected) and stats.tokens_per_step > 1
    bound = 1e-3 if config else 0.0
    for result in [*results, plain(model, other, **wanted)]:
        assert_alike(result, before, rtol=bound, atol=bound)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_thread_gets_its_text_and_the_model_stays_as_it_was(name):
    check_threads(name, new=14, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_also_beside_a_beam_search_and_again_and_again(name):
    beams = {"ids": prompt(11, seed=2), "config": PAPER, "num_beams": 2}
    again = {"ids": prompt(40, seed=3), "config": lade.LookaheadConfig(budget=9), "prefill_chunk_size": 7}
    check_threads(name, new=24, rounds=3, beams=beams, again=again)


@pytest.mark.parametrize("name", ["bloom", "llama4_text"])
def test_a_model_can_be_copied_while_and_after_others_use_it(name):
    """A copy made in the middle of a pass knows nothing of that pass."""
    model, ids = family(name).build(), prompt(10)
    expected = plain(model, ids, max_new_tokens=12)
    copies: list[Any] = []

    def copied(module: Any, args: Any) -> None:
        copies.append(copy.deepcopy(model) if len(copies) == 2 else None)  # not in prefill

    handle = model.get_output_embeddings().register_forward_pre_hook(copied)
    lookahead(model, ids, PAPER, max_new_tokens=12)
    handle.remove()
    copies = [copies[2], copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in copies:
        twin.get_output_embeddings()._forward_pre_hooks.clear()
        assert torch.equal(plain(twin, ids, max_new_tokens=12), expected)
        assert torch.equal(lookahead(twin, ids, PAPER, max_new_tokens=12), expected)


def test_only_passes_of_the_own_thread_are_counted():
    model, ids, stats = family("llama").build(), prompt(10), lade.Stats()
    with interrupted(model, functools.partial(plain, model, ids, max_new_tokens=9)), metered(model, stats):
        plain(model, ids, max_new_tokens=20)
    assert (stats.generations, stats.new_tokens, stats.steps) == (1, 20, 19)


@pytest.mark.foreign_code
def test_a_model_that_counts_slots_in_a_thread_of_its_own_is_refused():
    """What holds for the thread that decodes does not reach it: its texts would be wrong."""
    model, ids = family("llama4_text").build(), prompt(10)
    expected, forward = plain(model, ids, max_new_tokens=9), model.forward

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.no_grad()(forward), *args, **kwargs).result(60)

    model.forward = functools.wraps(forward)(elsewhere)
    with pytest.raises(lade.UnsupportedModelError, match="not called from the decoding thread"):
        lookahead(model, ids, PAPER, max_new_tokens=9)
    with pytest.warns(lade.FallbackWarning, match="not called from the decoding thread"):
        assert torch.equal(lookahead(model, ids, "auto", max_new_tokens=9), expected)


def test_a_pass_over_a_tree_inside_another_one_is_refused():
    model, inside = family("bloom").build(), []

    def nested(module: Any, args: Any) -> None:
        inside.append(len(inside))
        if len(inside) == 3:
            lookahead(model, prompt(5), PAPER, max_new_tokens=4)

    model.get_input_embeddings().register_forward_pre_hook(nested)
    with pytest.raises(RuntimeError, match=r"inside another one|expanded size"):  # older transformers fail in prefill
        lookahead(model, prompt(10), PAPER, max_new_tokens=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama4_text"])
def test_threads_replay_passes_of_their_own(name, monkeypatch):
    model, graphs = family(name).build(), Graphs(torch.device("cpu")).serve(monkeypatch)
    pool = graphs.pool(model)
    prompts = [prompt(length, seed=length) for length in (9, 10)]
    expected = [plain(model, ids, max_new_tokens=9) for ids in prompts]
    jobs = [functools.partial(lookahead, model, ids, PAPER, max_new_tokens=9) for ids in prompts]
    for results, right in zip(at_once(jobs), expected, strict=True):
        assert all(torch.equal(ids, right) for ids in results)
    assert graphs.counted.replayed > graphs.counted.recorded > 0
    assert len(buffers_in(pool)) == 1, "idle buffers are kept"


def test_threads_may_check_an_unknown_model_at_once():
    class Own(BloomForCausalLM):
        """Of nobody's list, so a tree is tried on it."""

    model = family("bloom").build()
    model.__class__ = Own
    found = [support for results in at_once([functools.partial(lade.supports, model)] * 3) for support in results]
    assert all(found), found


def test_a_model_has_one_pool_whichever_thread_is_first(monkeypatch):
    class Slow(model_pools.BufferPool):
        def __init__(self, *args: Any) -> None:
            time.sleep(0.02)
            super().__init__(*args)

    monkeypatch.setattr(model_pools, "BufferPool", Slow)
    model = family("llama").build()
    found = at_once([functools.partial(model_pools.pool_of, model, torch.device("cpu")) for _ in range(4)])
    assert len({id(each) for (each,) in found}) == 1


def test_hooks_of_other_threads_keep_no_pass_from_being_captured():
    model = family("llama").build()
    with hooked(model.get_decoder(), after=lambda output: None):
        assert capture_refusal(model) == ""
    handle = model.get_decoder().register_forward_hook(lambda *args: None)
    assert "hooks" in capture_refusal(model)
    handle.remove()
