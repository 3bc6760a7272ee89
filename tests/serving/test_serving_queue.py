"""Places in the queue, held before a request is prepared, and what a snapshot says of queue and rows."""

import threading
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from serving_toys import LLAMA, PAD, SOON, VOCABULARY, FailsAt, Gate, alone, at_rest, new_tokens, random_ids
from spies import answered, watched

from lade import ConfigError, Engine, EngineClosedError, EngineFullError, UnsupportedArgumentError
from lade.hf import refusals
from lade.serving import engine as engine_module
from lade.serving.scheduler import Scheduler
from lade.testing import toy_model


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.opened.set()


def expected(seed, **arguments):
    return alone(LLAMA, random_ids(4, seed), **arguments)


# --- places ----------------------------------------------------------------------------------------------------------


def test_a_place_is_a_request_that_waits():
    with Engine(LLAMA, max_rows=1, max_waiting=1) as engine:
        with engine.reserve() as first, engine.reserve() as second:
            assert repr(first) == "QueueSlot(free)" and engine.snapshot().waiting == 2
            with pytest.raises(EngineFullError, match=r"^the queue is full \(2 waiting\): .*larger max_waiting"):
                engine.reserve()
            with pytest.raises(EngineFullError, match=r"^the queue is full \(2 waiting\)"):
                engine.add(random_ids(4), max_new_tokens=2)
            second.release()
            handle = engine.add(random_ids(4, 1), place=first, max_new_tokens=9)
            assert (
                first.handle is handle and repr(first) == "QueueSlot(taken)" and repr(second) == "QueueSlot(released)"
            )
        assert new_tokens(handle, random_ids(4, 1)) == expected(1, max_new_tokens=9)
        assert engine.snapshot().waiting == 0


def test_as_many_get_a_place_as_can_be_served_or_wait(gate):
    """However fast they come: rows that are free when a burst begins are not lost to it."""
    with Engine(LLAMA, max_rows=2, max_waiting=2) as engine:

        def ask(seed):
            try:
                return engine.add(random_ids(4, seed), on_step=gate, max_new_tokens=5)
            except EngineFullError:
                return None

        with ThreadPoolExecutor(10) as pool:
            handles = list(pool.map(ask, range(10)))
        assert sum(handle is not None for handle in handles) == 4
        gate.opened.set()
        for seed, handle in enumerate(handles):
            if handle is not None:
                assert new_tokens(handle, random_ids(4, seed)) == expected(seed, max_new_tokens=5)


def test_the_row_of_a_request_that_has_ended_is_free(gate, monkeypatch):
    """Also before the decoding thread has noticed: clients ask again as soon as they have their answer."""
    places = []

    def ask(scheduler):
        if handle.done() and not places:
            places.extend([scheduler.reserve(), scheduler.reserve()])

    with Engine(LLAMA, max_rows=1, max_waiting=1) as engine:
        handle = engine.add(random_ids(4), on_step=gate, max_new_tokens=5)
        watched(monkeypatch, Scheduler, "_forget_ended", ask)
        gate.opened.set()
        assert new_tokens(handle, random_ids(4)) == expected(0, max_new_tokens=5)
        at_rest(engine)
        assert len(places) == 2
        for place in places:
            place.release()


def test_free_rows_are_no_places_where_the_next_one_lacks_room():
    reached, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def on_step(step):
        reached.release()
        assert go_on.acquire(timeout=SOON)

    with Engine(LLAMA, max_rows=8, max_tokens=25, max_waiting=1) as engine:
        engine.add(random_ids(4), on_step=on_step, lookahead=None, max_new_tokens=12)
        assert reached.acquire(timeout=SOON)
        engine.add(random_ids(4), lookahead=None, max_new_tokens=12)
        go_on.release(2)
        assert all(reached.acquire(timeout=SOON) for _ in range(2)), "between two steps the second one was looked at"
        try:
            with pytest.raises(EngineFullError, match=r"^the queue is full \(1 waiting\)"):
                engine.reserve()
        finally:
            go_on.release(100)


def test_a_place_that_was_not_used_is_free_again():
    with Engine(LLAMA, max_rows=1, max_waiting=1) as engine:
        for _ in range(5):
            with engine.reserve() as place, pytest.raises(UnsupportedArgumentError):
                engine.add(random_ids(4), place=place, num_beams=3, max_new_tokens=5)
            with pytest.raises(UnsupportedArgumentError):
                engine.add(random_ids(4), num_beams=3, max_new_tokens=5)
        assert engine.snapshot().waiting == 0
        with engine.reserve(), engine.reserve():
            assert engine.snapshot().waiting == 2


def test_a_place_is_good_for_one_request_of_its_own_engine():
    with Engine(LLAMA) as engine, Engine(LLAMA) as other:
        with engine.reserve() as place:
            engine.add(random_ids(4), place=place, max_new_tokens=2)
            for wrong in (engine, other):
                with pytest.raises(ConfigError, match=r"place=.* is not valid: give a slot that reserve\(\)"):
                    wrong.add(random_ids(4), place=place, max_new_tokens=2)
        with engine.reserve() as place, pytest.raises(ConfigError, match="of this engine returned"):
            other.add(random_ids(4), place=place, max_new_tokens=2)


def test_whoever_leaves_while_a_request_is_prepared_is_not_decoded_for(monkeypatch):
    with Engine(LLAMA) as engine:
        place = engine.reserve()
        answered(monkeypatch, engine_module, "prepare", lambda *_, **__: place.cancel())
        with pytest.raises(CancelledError, match="its place was released"):
            engine.add(random_ids(4), place=place, max_new_tokens=5)
        with pytest.raises(CancelledError, match="its place was released"):
            engine.add(random_ids(4), place=place, max_new_tokens=5)
        assert engine.snapshot().requests == {} and engine.snapshot().waiting == 0


def test_cancelling_a_place_cancels_the_request_that_took_it(gate):
    with Engine(LLAMA) as engine:
        with engine.reserve() as place:
            handle = engine.add(random_ids(4), place=place, on_step=gate, max_new_tokens=200)
        assert not handle.done(), "the end of the block leaves it alone"
        place.cancel()
        gate.opened.set()
        with pytest.raises(CancelledError):
            handle.result(SOON)
        assert engine.snapshot().requests == {"cancelled": 1} and handle.reason == "cancelled"


def test_a_closed_engine_has_no_places():
    engine = Engine(LLAMA)
    place = engine.reserve()
    engine.close()
    with pytest.raises(EngineClosedError, match="was closed"):
        engine.add(random_ids(4), place=place, max_new_tokens=5)
    with pytest.raises(EngineClosedError, match="was closed"):
        engine.reserve()
    place.release()
    assert engine.snapshot().closed and engine.problem is None


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_adds_up():
    eos = expected(2, max_new_tokens=20)[7]
    asked = [(seed, {"max_new_tokens": 12 + seed, "lookahead": None if seed == 5 else "auto"}) for seed in range(6)]
    asked[2][1].update(eos_token_id=eos, max_new_tokens=20)
    steps = []
    with Engine(LLAMA, max_rows=3) as engine:
        more = {"pad_token_id": PAD, "on_step": steps.append}
        handles = [engine.add(random_ids(4, seed), **more, **arguments) for seed, arguments in asked]
        failing = engine.add(random_ids(4), logits_processor=[FailsAt(random_ids(4), 1)], max_new_tokens=5, **more)
        for handle in handles:
            handle.result(SOON)
        with pytest.raises(RuntimeError):
            failing.result(SOON)
        told = at_rest(engine)
    every = [*handles, failing]
    assert told.requests == Counter(handle.reason for handle in every) == {"length": 5, "eos": 1, "error": 1}
    assert told.prompt_tokens == sum(handle.prompt_tokens for handle in every) == 28
    assert told.new_tokens == sum(len(handle.tokens) for handle in every)
    assert told.sources == Counter(source for step in steps for source in step.sources)
    decoding = [step for step in steps if step.index]
    assert (told.steps, told.fed_tokens) == (len(decoding), sum(step.fed for step in decoding))
    assert max(handle.stats.steps for handle in every) <= told.passes <= told.steps
    assert 0 < told.forward_s < told.decode_s and told.prefill_s > 0
    assert (told.rows, told.waiting, told.slots, told.room) == (0, 0, 0, 0)
    assert (told.max_rows, told.max_waiting, told.max_slots) == (3, 1024, engine.max_tokens)


def test_a_snapshot_never_waits(gate):
    """While a step is being made, too."""
    with Engine(LLAMA, max_rows=1) as engine:
        handles = [engine.add(random_ids(4), on_step=gate, max_new_tokens=9) for _ in range(3)]
        assert gate.reached.wait(SOON)
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(engine.snapshot).result(SOON)
        assert (told.rows, told.waiting, told.closed) == (1, 2, False)
        gate.opened.set()
        seen = []
        handles.append(engine.add(random_ids(4), on_step=lambda step: seen.append(engine.snapshot()), max_new_tokens=9))
        for handle in handles:
            handle.result(SOON)
        assert any(0 < told.slots <= told.room <= told.max_slots for told in seen)


# --- preparing -------------------------------------------------------------------------------------------------------


def test_a_model_is_looked_through_once(monkeypatch):
    model = toy_model("llama", vocabulary=VOCABULARY)
    with Engine(model) as engine:
        asked = watched(monkeypatch, refusals, "support_by", lambda facts, it: it)
        engine.add(random_ids(4), max_new_tokens=2).result(SOON)
        assert not asked
        model.train()
        engine.add(random_ids(4), max_new_tokens=2).result(SOON)
        assert asked == [model], "what training mode does to it is another question each time"


# --- order -----------------------------------------------------------------------------------------------------------


TURNS = {
    "scopes": ([(None, scope) for scope in ("a", "a", "a", "b", "a", None, "b", None)], 2, [0, 3, 5, 1, 6, 7, 4]),
    "clients": ([("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("a", "4"), ("b", None)], None, [0, 3, 1, 5, 2, 4]),
}
"""Clients and scopes as they ask, the one that leaves, and the order in which they are served."""


@pytest.mark.parametrize("of", TURNS)
def test_scopes_are_served_in_turn_and_clients_however_many_scopes_they_have(of, gate):
    """One of them has asked for more, and before the others."""
    told, (asked, leaves, order) = [], TURNS[of]
    with Engine(LLAMA, max_rows=1) as engine:
        engine.add(random_ids(3), on_step=gate, max_new_tokens=1)
        assert gate.reached.wait(SOON)
        handles = [
            engine.add(
                random_ids(3), client=client, scope=scope, on_step=lambda step, n=n: told.append(n), max_new_tokens=1
            )
            for n, (client, scope) in enumerate(asked)
        ]
        assert leaves is None or handles.pop(leaves).cancel()
        gate.opened.set()
        for handle in handles:
            handle.result(SOON)
    assert told == order
