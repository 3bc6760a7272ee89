"""The engine on passes that are captured: the same tokens, as rows come and go, and when memory runs out.

On the CPU a tape stands in for CUDA graphs; tests marked `gpu` have real ones.
"""

import warnings

import pytest
import torch
from effort import examples
from families import family
from graphed import Graphs, shapes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import batch_of, buffers_in, cache_of, rows_of, runner_of
from pretend import NO_CUDA, pool_for
from serving_toys import LLAMA, PAPER, VOCABULARY, Driven, alone, check_overflow, random_ids
from spies import answered, failing, watched
from test_serving_machine import Requests, model_of

import lade
from lade import Engine, InputError, LookaheadConfig
from lade.backends.cuda_graphs.buffers import Buffers, CudaCapture, EagerReplay
from lade.backends.cuda_graphs.fallback_cache import FallbackCache
from lade.backends.cuda_graphs.pool import BufferPool, capture_setup, new_pool, pool_of
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.config import resolve
from lade.errors import CaptureWarning
from lade.hf import job
from lade.model.cache_layers import TreeLayer
from lade.model.inputs import batch_bucket, key_bucket, step_bucket
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.serving.capacity import Capacity, Need, default_max_tokens, largest_tree
from lade.serving.request import PLAIN
from lade.testing import toy_model

CPU = torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch):
    made = Graphs(CPU)
    made.serve(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        yield made


class Full:
    """Device memory that runs out: static buffers of more slots in all cannot be allocated."""

    def __init__(self, monkeypatch):
        self.slots, self.wanted = 10**9, []
        make = Buffers.__init__

        def made(buffers, layers, rows, slots):
            self.wanted.append((rows, slots))
            if rows * slots > self.slots:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} x {slots}\nand more")
            make(buffers, layers, rows, slots)

        monkeypatch.setattr(Buffers, "__init__", made)


@pytest.fixture
def memory(monkeypatch):
    return Full(monkeypatch)


move_to = StaticCache.move_to


# --- rows that come and go --------------------------------------------------------------------------------------------


class GraphedRequests(Requests):
    """The same, on captured passes."""

    limits = (600, 1600, 10**6)
    graphs = Graphs(CPU)  # buffers and tapes go from example to example, as they go from generation to generation

    def drive(self, *limits):
        with pytest.MonkeyPatch.context() as patch:
            self.graphs.serve(patch)
            driven = Driven(model_of(self.name), *limits)
        assert isinstance(cache_of(driven.batch), FallbackCache)
        return driven


class TestGraphedRequests(GraphedRequests.TestCase):
    settings = settings(max_examples=examples(5), stateful_step_count=15)


@pytest.mark.slow
class TestManyGraphedRequests(GraphedRequests.TestCase):
    settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_rows_join_and_leave_static_buffers(graphs):
    driven = Driven(LLAMA)
    handles = []
    for number in range(7):
        handles.append(driven.add(random_ids(3 + number, number), PAPER, max_new_tokens=6 + 9 * (number % 3)))
        driven.advance(2)
    driven.finish()
    rows = {rows for rows, _, _ in shapes_of(graphs.pool(LLAMA))}
    steps = sum(handle.stats.steps for handle in handles)
    assert {2, 4} <= rows <= {1, 2, 4, 8} and 0 < graphs.counted.replayed < steps
    assert graphs.counted.recorded < graphs.counted.replayed


def test_what_was_captured_serves_the_requests_that_come_later(graphs):
    driven, recorded = Driven(LLAMA, max_rows=2), []
    for _ in range(3):
        for seed in range(2):
            driven.add(random_ids(5, seed), PAPER, max_new_tokens=20)
        driven.finish()
        recorded.append(graphs.counted.recorded)
        assert cache_of(driven.batch).room == (0, 0)
        (entry,) = buffers_in(graphs.pool(LLAMA))
        assert entry.idle
    assert recorded[1] == recorded[2], "the first time buffers grow, which loses what was captured on the old ones"


def test_a_row_that_joins_finds_its_place_where_it_is(graphs):
    """The others' keys and values stay where they are as long as there is room."""
    driven = Driven(LLAMA)
    for number in range(3):
        driven.add(random_ids(3 + number, number), None, max_new_tokens=40)
    driven.advance(2)
    buffers = cache_of(driven.batch).current.buffers
    assert buffers.rows == 8
    for number in (3, 4):
        driven.add(random_ids(3 + number, number), None, max_new_tokens=40)
        driven.advance()
    assert cache_of(driven.batch).current.buffers is buffers and len(rows_of(driven.batch)) == 5
    driven.finish()


def test_slots_that_no_query_sees_are_never_seen(graphs, monkeypatch):
    """What lies after the last slot that passes read is poisoned, and so are rows beyond those of the pass."""

    def poison(runner, trees, rows, captured):
        for group in rows.buffers.groups:
            group[:, captured.shape.rows :] = torch.nan
            group[:, :, :, captured.shape.keys : -1] = torch.nan
        return rows.buffers.rows - captured.shape.rows

    def clean(logits, runner, trees, rows, captured):
        for group in rows.buffers.groups:
            group.nan_to_num_(0.0)

    answered(monkeypatch, GraphRunner, "_replay", clean)
    poisoned = watched(monkeypatch, GraphRunner, "_replay", poison)
    driven = Driven(LLAMA, max_rows=3)
    for number in range(6):
        driven.add(random_ids(3 + number, number), PAPER, max_new_tokens=5 + 7 * (number % 4))
        driven.advance(2)
    driven.finish()
    assert max(poisoned) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_text_whose_numbers_overflow_does_not_touch_the_others(first, graphs):
    check_overflow(first=first)


def served_by(pool, monkeypatch):
    """Have all passes captured on the buffers of one pool."""
    monkeypatch.setattr(job, "runner_for", lambda facts, *given: GraphRunner(facts.model, *given, pool))


@pytest.fixture
def pool(monkeypatch):
    """That of a model, as it has one on a CUDA device."""
    made = new_pool(LLAMA, EagerReplay)
    pool_for(monkeypatch, LLAMA, made)
    served_by(made, monkeypatch)
    return made


def test_weights_that_have_moved_between_two_bursts_are_captured_again(monkeypatch):
    """What was captured reads memory that others use by now."""
    model = toy_model("llama", vocabulary=VOCABULARY)
    pool = new_pool(model, EagerReplay)
    served_by(pool, monkeypatch)
    driven = Driven(model)
    for number in range(3):
        expected = alone(model, random_ids(5), max_new_tokens=12)
        handle = driven.add(random_ids(5), PAPER, max_new_tokens=12)
        driven.finish(expected=False)
        assert handle.tokens == expected
        (entry,) = buffers_in(pool)
        assert entry.setup == capture_setup(model), number
        for parameter in model.parameters():
            parameter.data = parameter.data.flip(-1).clone()


def test_what_is_left_from_before_is_free_for_an_engine(pool):
    driven = Driven(LLAMA)
    driven.add(random_ids(5), PAPER, max_new_tokens=9)
    driven.finish()
    assert len(buffers_in(pool)) == 1
    with Engine(LLAMA, max_tokens=10**6):
        assert len(buffers_in(pool)) == 1, "its size is given"
        with Engine(LLAMA):
            assert buffers_in(pool) == []


def test_closing_an_engine_frees_its_buffers(pool):
    with Engine(LLAMA) as engine:
        assert engine.add(random_ids(5), lookahead=PAPER, max_new_tokens=9).result(30.0) is not None
    assert buffers_in(pool) == [] and runner_of(batch_of(engine)).device == CPU


def test_between_two_bursts_an_engine_can_give_back_its_buffers(pool):
    driven = Driven(LLAMA)
    for _ in range(2):
        driven.add(random_ids(5), PAPER, max_new_tokens=9)
        driven.advance()
        lade.release(LLAMA)  # those in use stay
        driven.finish()
        assert len(buffers_in(pool)) == 1
        lade.release(LLAMA)
        assert buffers_in(pool) == []


# --- capacity --------------------------------------------------------------------------------------------------------

needs = st.lists(st.builds(Need, st.integers(1, 300), st.integers(1, 128)), min_size=1, max_size=9)


@given(needs, st.integers(1, 8), st.integers(1, 6000), st.data())
def test_static_room_for_texts_that_fit_is_enough_and_not_too_much(texts, max_rows, max_tokens, data):
    capacity = Capacity(max_rows, max_tokens, 1, StaticCache)
    if not capacity.fits(texts):
        return
    now = data.draw(st.integers(1, max(need.tokens for need in texts)))
    rows, slots = room = capacity.room(texts, now)
    assert capacity.suffices(room, texts, now) and rows * slots <= max_tokens and slots <= capacity.slots(texts)
    assert batch_bucket(rows) == rows >= len(texts) and key_bucket(slots) == slots, "as they will be made"
    assert slots > now + max(step_bucket(need.tree) for need in texts), "a pass finds room, and zeros after it"
    assert capacity.suffices(room, texts, capacity.longest(slots, texts))


@pytest.mark.parametrize(
    ("tokens", "tree", "slots"), [(127, 128, 256), (128, 128, 384), (120, 100, 256), (130, 66, 384), (120, 129, 384)]
)
def test_behind_a_text_there_is_room_for_what_a_pass_is_padded_to_and_for_a_zero(tokens, tree, slots):
    assert StaticCache.buffer_slots(tokens, tree) == slots


def test_rows_and_slots_are_counted_as_they_are_made():
    capacity = Capacity(8, 4 * 384, 1, StaticCache)
    text = Need(200, 128)
    assert capacity.slots([text]) == 384, "of 200 + 128 + 1"
    assert capacity.fits([text] * 4) and not capacity.fits([text] * 5)
    larger = Capacity(8, 7 * 384, 1, StaticCache)
    assert larger.fits([text] * 4) and not larger.fits([text] * 5), "which take eight rows"
    assert not capacity.fits([Need(300, 128)] * 4), "512 slots"
    assert Capacity(8, 4 * 384, 1).fits([Need(250, 128)] * 4)


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(
    max_tokens=st.integers(256, 2500),
    requests=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 60),
            st.sampled_from([None, "auto", PAPER, LookaheadConfig(budget=3), LookaheadConfig(12, 5, 12)]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_no_buffers_take_more_than_they_may(max_tokens, requests):
    with pytest.MonkeyPatch.context() as patch:
        Graphs(CPU).serve(patch)
        wanted = watched(patch, Buffers, "__init__", lambda buffers, layers, rows, slots: rows * slots)
        after = answered(patch, GraphRunner, "_prepare", lambda step, runner, fed, cache, **_: cache.buffers)
        before = watched(patch, GraphRunner, "_prepare", lambda runner, fed, cache, **_: cache.buffers)
        driven = Driven(LLAMA, max_tokens=max_tokens)
        for seed, (length, new, method) in enumerate(requests):
            try:
                driven.add(random_ids(length, seed), method, max_new_tokens=new)
            except InputError:
                config = resolve(method)[0] or PLAIN
                assert StaticCache.buffer_slots(length + new, largest_tree(config)) > max_tokens
        driven.finish()
    assert all(slots <= max_tokens for slots in wanted)
    assert all(now is then for now, then in zip(after, before, strict=True)), "a pass finds room"


def test_buffers_that_others_left_are_not_used_where_they_are_too_large(graphs, monkeypatch):
    acquired = answered(monkeypatch, BufferPool, "acquire")
    for limit, used in ((10_000, True), (1000, False)):
        runner = graphs.runner(LLAMA)
        others = runner.new_cache(tokens=1000)
        runner.prefill([[1, 2, 3]] * 4, others)
        buffers = others.current.buffers
        others.reset()
        acquired.clear()
        driven = Driven(LLAMA, max_tokens=limit)
        driven.add(random_ids(4), PAPER, max_new_tokens=9)
        driven.advance(2)
        assert (cache_of(driven.batch).current.buffers is buffers) is (buffers in acquired) is used
        assert all(each.rows * each.slots <= limit for each in acquired)
        driven.finish()


def test_what_is_free_on_a_device_is_shared_by_all_that_is_there_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    tokens = default_max_tokens({torch.device("cuda"): 10})
    assert 27.5 * tokens <= 0.8 * 1000 < 27.5 * (tokens + 1), "2.75 of it, in four fifths of what torch can have"


# --- when memory runs out --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 300, 600, 1100])
def test_texts_go_on_where_buffers_cannot_be_made(slots, graphs, memory):
    """The first ones of all, those with more rows, or those with more slots; later on there is memory again."""
    memory.slots = slots
    driven = Driven(LLAMA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            driven.add(random_ids(3 + number, number), PAPER, max_new_tokens=30 + number)
            driven.advance(2)
        assert isinstance(cache_of(driven.batch).current, TreeCache), "until all have ended"
        assert cache_of(driven.batch).room[1] < 200, "what it takes, and no bucket of it"
        assert buffers_in(graphs.pool(LLAMA)) == [], "what was there makes way"
        driven.finish()
    (warning,) = caught
    assert warning.category is CaptureWarning
    message = str(warning.message)
    assert "no memory" in message and "CUDA out of memory. Tried to allocate" in message and "and more" not in message
    assert "lade.release" in message and "fewer rows or tokens" in message
    memory.slots = 10**9
    driven.add(random_ids(3), PAPER, max_new_tokens=20)
    driven.advance()
    assert isinstance(cache_of(driven.batch).current, StaticCache)
    driven.finish()


def test_buffers_that_could_not_be_made_are_wanted_once(graphs, memory):
    memory.slots = 600
    driven = Driven(LLAMA)
    with pytest.warns(CaptureWarning):
        for number in range(4):
            driven.add(random_ids(3 + number, number), PAPER, max_new_tokens=30)
            driven.advance(2)
        driven.finish()
    assert [rows * slots > 600 for rows, slots in memory.wanted].count(True) == 1


def test_a_row_that_joins_has_buffers_made_once(graphs, memory):
    """As large as all need, the tree after the new row included."""
    driven = Driven(LLAMA)
    driven.add(random_ids(3), None, max_new_tokens=30)
    driven.advance(2)
    memory.wanted.clear()
    driven.add(random_ids(300, 1), PAPER, max_new_tokens=30)
    driven.advance(2)
    assert memory.wanted == [(4, 512)]
    driven.finish()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_texts_go_on_where_a_capture_runs_out_of_memory(at, graphs, monkeypatch):
    """Also where ending the capture fails, too, as it does on a device."""
    driven, captures = Driven(LLAMA), set()

    def where(runner, rows, captured):
        captures.add(captured.shape)
        if len(captures) <= at:
            return False
        for group in rows.buffers.groups:
            group[:, :, :, 100] = torch.nan  # a pass that is broken off leaves anything after the rows' ends
        return True

    problem = RuntimeError("the capture could not be ended")
    problem.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    failing(monkeypatch, GraphRunner, "_static_pass", problem, where=where)
    with pytest.warns(CaptureWarning, match=r"no memory .*CUDA out of memory") as caught:
        for number in range(4):
            driven.add(random_ids(3 + number, number), PAPER, max_new_tokens=30)
            driven.advance(2)
        driven.finish()
    assert len(caught) == 1 and graphs.pool(LLAMA).capture_failed_in is None


@pytest.mark.parametrize("joining", [True, False])
def test_rows_that_fit_nowhere_end_with_the_error(joining, graphs, memory, monkeypatch):
    """No row continues with keys and values that were lost on the way."""
    driven = Driven(LLAMA)
    handles = [driven.add(random_ids(3 + number, number), PAPER, max_new_tokens=40) for number in range(2)]
    driven.advance(2)
    with monkeypatch.context() as patch:
        patch.setattr(StaticCache, "move_to", move_without_memory)
        if joining:
            memory.slots = 0
            failing(patch, StaticCache, "take", torch.OutOfMemoryError("no more"))
            handles.append(driven.add(random_ids(9), PAPER, max_new_tokens=9))
        else:
            failing(patch, GraphRunner, "_prepare", torch.OutOfMemoryError("no more"))
        driven.advance(1 if joining else 9)  # without drafts, then one after the other
    for handle in handles:
        assert handle.done()
        with pytest.raises(torch.OutOfMemoryError, match="not even that"):
            handle.result(0)
    assert driven.batch.idle and cache_of(driven.batch).room == (0, 0)
    memory.slots = 10**9
    driven.add(random_ids(3), PAPER, max_new_tokens=20)
    driven.finish(errors=len(handles))


def move_without_memory(self, cache):
    """`StaticCache.move_to`, where the second layer of the new cache finds no memory."""
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, TreeLayer, "update", torch.OutOfMemoryError("not even that"), calls={2})
        move_to(self, cache)


# --- where nothing is captured ---------------------------------------------------------------------------------------


def test_after_a_capture_that_failed_rows_lie_in_a_cache_that_grows(graphs):
    model = family("mixtral").build()  # the host asks how many tokens chose an expert
    driven, arguments = Driven(model), {"max_new_tokens": 15, "do_sample": False}
    with pytest.warns(CaptureWarning, match="cannot be captured") as caught:
        for _ in range(2):
            for seed in range(3):
                driven.add(random_ids(5, seed), PAPER, **arguments)
            driven.finish()
    assert len(caught) == 1 and graphs.counted.recorded == 0
    assert isinstance(cache_of(driven.batch).current, TreeCache) and buffers_in(graphs.pool(model)) == []


def test_on_a_cpu_nothing_is_captured():
    assert type(runner_of(Driven(LLAMA).batch)) is EagerRunner


@pytest.mark.gpu
@NO_CUDA
def test_an_engine_is_served_by_graphs_on_a_device():
    device = torch.device("cuda")
    model = family("llama").build().to(device)
    texts = [random_ids(4 + number, number).to(device) for number in range(6)]
    expected = [model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0) for ids in texts]
    with Engine(model, max_rows=3, prefill_tokens=5) as engine:
        for _ in range(2):
            handles = [engine.add(ids, lookahead=PAPER, max_new_tokens=30, do_sample=False) for ids in texts]
            for handle, text in zip(handles, expected, strict=True):
                assert torch.equal(handle.result(60.0), text)
        pool = pool_of(model, device)
        (entry,) = buffers_in(pool)
        assert isinstance(entry.capture, CudaCapture) and {rows for rows, _, _ in shapes_of(pool)} >= {2, 4}
    assert buffers_in(pool) == [], "what it took was given back"


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("method", [PAPER, LookaheadConfig(budget=12)], ids=["paper", "budget"])
def test_a_step_of_all_rows_waits_for_the_device_once(method):
    model = family("llama").build().to("cuda")
    driven = Driven(model)
    for is_counted in (False, True):  # the first time captures
        for number in range(3):
            driven.add(random_ids(4 + number, number).to("cuda"), method, max_new_tokens=60, do_sample=False)
        driven.advance(2)
        if is_counted:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    driven.batch.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(rows_of(driven.batch)) == 3, "no row has left"
        driven.finish()
    assert len([w for w in caught if "synchronizing CUDA operation" in str(w.message)]) <= 5


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("where", ["buffers", "capture"])
def test_texts_go_on_where_a_device_has_no_memory(where, memory, monkeypatch):
    """The error is made up; the graphs, and the rows' way over the host, are not."""
    device = torch.device("cuda")
    model = family("llama").build().to(device)
    texts = [random_ids(4 + number, number).to(device) for number in range(4)]
    expected = [model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0) for ids in texts]
    if where == "capture":  # in the third one, after two calls
        failing(monkeypatch, GraphRunner, "_static_pass", torch.OutOfMemoryError("CUDA out of memory"), calls={9})
    else:
        memory.slots = 600
    driven = Driven(model)
    with pytest.warns(CaptureWarning, match="no memory") as caught:
        handles = []
        for ids in texts:
            handles.append(driven.add(ids, PAPER, max_new_tokens=40, do_sample=False))
            driven.advance(3)
        driven.finish()
    assert len(caught) == 1
    assert all(torch.equal(handle.result(0), text) for handle, text in zip(handles, expected, strict=True))


@pytest.mark.gpu
@NO_CUDA
def test_what_is_released_can_be_used_by_others():
    device = torch.device("cuda")
    model, ids = family("llama").build().to(device), random_ids(8).to(device)
    lade.generate(model, input_ids=ids, max_new_tokens=20, do_sample=False, lookahead=PAPER)
    before = torch.cuda.memory_reserved(device)
    assert shapes_of(pool_of(model, device))
    lade.release(model)
    assert torch.cuda.memory_reserved(device) < before and not buffers_in(pool_of(model, device))
    text = model.generate(ids, max_new_tokens=20, do_sample=False)
    ours = lade.generate(model, input_ids=ids, max_new_tokens=20, do_sample=False, lookahead=PAPER)
    assert torch.equal(ours, text)
