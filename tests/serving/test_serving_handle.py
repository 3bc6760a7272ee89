"""Handles: steps and results for those who wait in threads, and for those who wait in coroutines."""

import asyncio
import gc
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from inside import steps_of, watchers_of
from serving_toys import LLAMA, SOON, FailsAt, alone, random_ids
from spies import watched

from lade import Engine, Stats, Step
from lade.serving.handle import Handle


def step(index, *tokens):
    return Step(index, list(tokens), ["bonus"] * len(tokens), 1, 0.5)


@pytest.fixture
def handle():
    """One that no engine knows; the tests are its engine."""
    cancelled = []
    made = Handle(lambda each: not cancelled.append(each), stats=Stats(), seed=3)
    made.cancelled = cancelled
    return made


def test_steps_are_there_as_soon_as_they_are_told(handle):
    seen = iter(handle)
    for index in range(3):
        handle.add_step(step(index, index, index + 10), 0.25)
        assert next(seen) == step(index, index, index + 10)
    assert handle.tokens == [0, 10, 1, 11, 2, 12] and not handle.done()
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    handle.end("result")
    assert list(seen) == [] and handle.done() and handle.result(0) == "result"
    assert [each.index for each in handle] == [0, 1, 2], "from the first one on, for whoever comes late"
    assert (handle.stats.new_tokens, handle.stats.decode_s, handle.stats.forward_s) == (6, 1.0, 0.5)


def test_whoever_waits_for_the_end_alone_is_woken_by_nothing_else(handle, monkeypatch):
    """Each time it is woken it would take a pass's time from the thread that decodes."""
    wakings = watched(monkeypatch, handle._changed, "notify_all", lambda: len(steps_of(handle)))
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        stack.callback(handle.end, "result")  # whatever happens, nobody waits for ever
        result = pool.submit(handle.result)
        for index in range(3):
            handle.add_step(step(index, index), 0.0)
        assert wakings == []
        steps = pool.submit(list, handle)
        for index in range(3, 3000):  # until the reader waits
            handle.add_step(step(index, index), 0.0)
            if wakings:
                break
            time.sleep(0.01)
        assert wakings == [index + 1], "one who waits for steps, too"
    assert result.result(SOON) == "result" and len(steps.result(SOON)) == index + 1


def test_whoever_waits_is_woken_by_the_end(handle):
    with ThreadPoolExecutor(2) as pool:
        steps, result = pool.submit(list, handle), pool.submit(handle.result)
        time.sleep(0.02)
        assert not steps.done() and not result.done()
        handle.end(None)
        assert steps.result(SOON) == []
        with pytest.raises(CancelledError):
            result.result(SOON)


def test_an_error_comes_behind_the_steps_before(handle):
    handle.add_step(step(0, 5), 0.0)
    handle.end(LookupError("a user's own"))
    seen = iter(handle)
    assert next(seen).tokens == [5]
    with pytest.raises(LookupError, match="a user's own"):
        next(seen)
    with pytest.raises(LookupError, match="a user's own"):
        handle.result(0)


@pytest.mark.parametrize(("first", "then"), [(None, "result"), ("result", None), (None, LookupError()), ("a", "b")])
def test_only_the_first_end_counts(handle, first, then):
    handle.end(first)
    handle.end(then)
    if first is None:
        with pytest.raises(CancelledError):
            handle.result(0)
    else:
        assert handle.result(0) == first


def test_a_step_whose_on_step_fails_is_there_all_the_same():
    def fails(step):
        raise LookupError

    handle = Handle(lambda each: True, stats=Stats(), seed=None, on_step=fails)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(next, iter(handle))
        time.sleep(0.02)
        with pytest.raises(LookupError):
            handle.add_step(step(0, 4), 0.0)
        assert seen.result(SOON).tokens == [4]
    assert handle.tokens == [4] and handle.stats.new_tokens == 1


# --- coroutines ------------------------------------------------------------------------------------------------------


async def collected(handle):
    return [each async for each in handle]


def test_coroutines_wait_without_blocking_anyone(handle):
    async def main():
        readers = [asyncio.create_task(collected(handle)) for _ in range(3)]
        ticks, free = threading.Semaphore(0), []

        def tell():
            for index in range(20):
                free.append(ticks.acquire(timeout=SOON / 20))  # each waits for another turn of the loop
                handle.add_step(step(index, index), 0.0)
            handle.end("result")

        thread = threading.Thread(target=tell)
        thread.start()
        while not all(reader.done() for reader in readers):
            ticks.release()
            await asyncio.sleep(0.001)
        thread.join()
        assert all(free), "a reader that waits holds the loop up"
        assert all([each.index for each in reader.result()] == list(range(20)) for reader in readers)
        assert [each.index for each in await collected(handle)] == list(range(20)), "it has ended already"
        assert not watchers_of(handle)

    asyncio.run(main())


def test_a_coroutine_is_told_of_an_error_and_of_a_cancellation():
    async def main(result):
        handle = Handle(lambda each: True, stats=Stats(), seed=None)
        reader = asyncio.create_task(collected(handle))
        await asyncio.sleep(0.01)
        handle.add_step(step(0, 1), 0.0)
        await asyncio.sleep(0.01)
        await asyncio.to_thread(handle.end, result)
        return await reader

    with pytest.raises(LookupError):
        asyncio.run(main(LookupError()))
    assert [each.tokens for each in asyncio.run(main(None))] == [[1]]


def test_a_cancelled_task_leaves_nothing_with_the_handle(handle):
    async def main():
        reader = asyncio.create_task(collected(handle))
        await asyncio.sleep(0.01)
        assert len(watchers_of(handle)) == 1
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert not watchers_of(handle)

    asyncio.run(main())


def test_a_reader_that_stops_early_leaves_nothing_with_the_handle(handle):
    async def main():
        async for _ in handle:
            break
        gc.collect()
        await asyncio.sleep(0.01)

    handle.add_step(step(0, 1), 0.0)
    asyncio.run(main())
    assert not watchers_of(handle)


def test_a_loop_that_was_closed_does_not_hurt(handle):
    """Its reader never said goodbye."""
    loop = asyncio.new_event_loop()
    steps = handle.__aiter__()
    waits = loop.create_task(anext(steps))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    handle.add_step(step(0, 1), 0.0)
    handle.end("result")
    assert handle.result(0) == "result"
    waits._log_destroy_pending = False  # what this test is about
    del waits, steps


def test_threads_and_coroutines_read_one_engine():
    async def main(engine):
        handles = [engine.add(random_ids(4 + seed, seed), max_new_tokens=25) for seed in range(6)]
        texts = await asyncio.gather(*map(collected, handles[:4]), *(asyncio.to_thread(list, each) for each in handles))
        for number, steps in enumerate(texts):
            seed = number if number < 4 else number - 4
            tokens = [token for each in steps for token in each.tokens]
            assert tokens == alone(LLAMA, random_ids(4 + seed, seed), max_new_tokens=25)
        failing = engine.add(random_ids(4), logits_processor=[FailsAt(random_ids(4), 3)], max_new_tokens=9)
        with pytest.raises(RuntimeError, match="at 3"):
            await collected(failing)
        assert failing.tokens == alone(LLAMA, random_ids(4), max_new_tokens=9)[: len(failing.tokens)]

    with Engine(LLAMA) as engine:
        asyncio.run(main(engine))


@pytest.mark.parametrize(
    ("end", "state"),
    [("result", "finished"), (None, "cancelled"), (RuntimeError("no memory"), "failed: RuntimeError('no memory')")],
)
def test_its_repr_says_how_it_stands(handle, end, state):
    assert repr(handle) == "Handle(waiting, 0 tokens)"
    handle.add_step(step(0, 5, 6), 0.0)
    assert repr(handle) == "Handle(running, 2 tokens)"
    handle.end(end)
    assert repr(handle) == f"Handle({state}, 2 tokens)"


def test_a_loop_is_woken_once_a_pass_for_all_requests_of_it(monkeypatch):
    rows = 8

    async def main(engine):
        loop, told = asyncio.get_running_loop(), []
        calls = watched(monkeypatch, loop, "call_soon_threadsafe")
        handles = [engine.add(random_ids(4, seed), lookahead=None, max_new_tokens=30) for seed in range(rows)]
        for text in await asyncio.gather(*map(collected, handles)):
            told += text
        monkeypatch.undo()
        return len(calls), len(told)

    with Engine(LLAMA, max_rows=rows) as engine:
        engine.add(random_ids(4), max_new_tokens=3).result(SOON)
        before = engine.snapshot().passes
        calls, told = asyncio.run(main(engine))
        passes = engine.snapshot().passes - before
    assert told == 30 * rows and calls <= passes + 2, (calls, passes)
