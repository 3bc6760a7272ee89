"""A forked process has no engine's thread: what is left there of an engine says so, and nothing waits for ever."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
from itertools import chain

import pytest
from forked import in_fork
from inside import lock_of
from serving_toys import LLAMA, SOON, Gate, alone, finished, new_tokens, random_ids

import lade
from lade import Engine, EngineClosedError, LadeError, LookaheadConfig, Memory
from lade.locks import ForkSafeLock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
IDS = random_ids(4)


@contextlib.contextmanager
def held(*locks):
    """Another thread holds these."""
    holds, done = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            holds.set()
            done.wait(SOON)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(SOON)
    yield
    done.set()
    thread.join()


@pytest.fixture
def engine():
    with Engine(LLAMA, max_rows=1) as engine:
        yield engine


@pytest.fixture
def ended(engine):
    return finished(engine.add(IDS, max_new_tokens=9))


@pytest.fixture
def going_on(engine):
    """A request in the middle of its answer; all of an engine's locks are taken."""
    gate = Gate()
    handle = engine.add(IDS, max_new_tokens=30, on_step=gate)
    assert gate.reached.wait(SOON)
    with held(lock_of(engine), handle._changed):
        yield handle
    gate.opened.set()
    assert new_tokens(handle, IDS) == alone(LLAMA, IDS, max_new_tokens=30), "the first process is not affected"


async def read_by_a_coroutine(handle):
    return [step.tokens async for step in handle]


USES = {
    "add": lambda engine, handle: engine.add(IDS, max_new_tokens=3),
    "result": lambda engine, handle: handle.result(),
    "steps": lambda engine, handle: [step.tokens for step in handle],
    "coroutine": lambda engine, handle: asyncio.run(read_by_a_coroutine(handle)),
    "cancel": lambda engine, handle: handle.cancel(),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("use", USES)
def test_what_would_wait_for_ever_raises(use, engine, going_on):
    name, message = in_fork(lambda: USES[use](engine, going_on))
    assert name == EngineClosedError.__name__
    assert f"in process {os.getpid()}" in message and "forked" in message
    assert message.endswith(": make a new lade.Engine in this process")


def test_an_engine_can_be_closed(engine, going_on):
    def close():
        with engine:
            engine.close()
        return engine._finalizer.alive

    assert in_fork(close) is False
    # as does what Python calls when an engine is collected, or at its end
    assert in_fork(lambda: [engine._finalizer(), engine._finalizer.alive]) == [None, False]


def test_what_had_ended_before_is_there(engine, ended, going_on):
    def look():
        tokens = new_tokens(ended, IDS)
        assert ended.done() and not going_on.done() and going_on.tokens and not ended.cancel()
        assert [token for step in ended for token in step.tokens] == tokens
        assert [*chain.from_iterable(asyncio.run(read_by_a_coroutine(ended)))] == tokens
        return tokens

    with held(ended._changed):
        assert in_fork(look) == alone(LLAMA, IDS, max_new_tokens=9)


@pytest.mark.slow
def test_a_new_engine_serves_in_the_forked_process(engine, going_on):
    def serve():
        gc.collect()
        with Engine(LLAMA) as own:
            return new_tokens(own.add(IDS, max_new_tokens=12), IDS)

    assert in_fork(serve) == alone(LLAMA, IDS, max_new_tokens=12)


def test_locks_of_the_library_are_free_in_the_forked_process():
    memory, lock = Memory(), ForkSafeLock()
    config = LookaheadConfig(budget=9, memory=memory)

    def generate():
        with lock, lock:
            return lade.generate(LLAMA, IDS, max_new_tokens=12, lookahead=config)[0, IDS.shape[1] :].tolist()

    with held(memory._writing, lock):
        assert in_fork(generate) == alone(LLAMA, IDS, max_new_tokens=12)
    assert generate() == alone(LLAMA, IDS, max_new_tokens=12)


def test_a_plain_stream_says_that_it_ends_where_it_was_begun():
    stream = lade.stream(LLAMA, IDS, max_new_tokens=40, lookahead=None)
    tokens = next(stream).tokens

    def read():
        return [step.tokens for step in stream]

    name, message = in_fork(read)
    assert name == LadeError.__name__ and message.endswith("start a new stream in this process")
    assert [*tokens, *chain.from_iterable(read())] == alone(LLAMA, IDS, max_new_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "engine.close()", "engine = None; gc.collect()"])
def test_an_interpreter_ends_that_was_forked_beside_an_engine(end):
    code = f"""
import gc, os, signal, sys, lade
from lade.testing import toy_model
engine = lade.Engine(toy_model("llama"))
engine.add([1, 2], max_new_tokens=5).result()
if os.fork() == 0:
    signal.alarm(100)
    {end}
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
assert engine.add([1, 2], max_new_tokens=5).result().shape == (1, 7)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
