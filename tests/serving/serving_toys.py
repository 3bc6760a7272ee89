"""Helpers of these tests: what plain decoding gives for one prompt, and a batch that is driven by hand."""

import functools
import threading
import time
from collections import deque
from dataclasses import replace

import torch
from inside import cache_of, result_of, rows_of

from lade import Stats, supports
from lade.backends.cuda_graphs.fallback_cache import FallbackCache
from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.config import LookaheadConfig, resolve
from lade.serving.batch import EngineBatch
from lade.serving.handle import Handle
from lade.serving.request import RequestOptions, prepare
from lade.testing import toy_model

VOCABULARY, PAD = 48, 0
LLAMA = toy_model("llama", vocabulary=VOCABULARY)
PAPER = LookaheadConfig(5, 4, 5)
METHODS = (None, "auto", PAPER, LookaheadConfig(0, 3, 4), LookaheadConfig(4, 2, 0), LookaheadConfig(budget=12))
ENOUGH = 10**6
SOON = 60.0
KNOWN_TO_THE_QUEUE = (
    *("rows", "max_rows", "waiting", "max_waiting", "displaced"),
    *("max_slots", "max_prefix_bytes", "closed"),
)


class Gate:
    """An `on_step` that lets the engine go on when told to."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, step):
        self.reached.set()
        assert self.opened.wait(SOON)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "lade.Engine"]


def at_rest(engine):
    """A snapshot when all is done: a handle has ended a moment before."""
    end = time.monotonic() + SOON
    while engine.snapshot().rows and time.monotonic() < end:
        time.sleep(0.001)
    return engine.snapshot()


def random_ids(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, length), generator=generator)


def alone(model, ids, seed=0, **arguments):
    """The new tokens of `model.generate` for this prompt alone."""
    torch.manual_seed(seed)
    return model.generate(input_ids=ids, **{"pad_token_id": PAD, **arguments})[0, ids.shape[1] :].tolist()


@functools.lru_cache(256)
def _alone_once(model, ids, seed, arguments):
    return alone(model, torch.tensor([ids]), seed, **dict(arguments))


def finished(handle):
    """The handle, once its request has ended well."""
    handle.result(SOON)
    return handle


def new_tokens(handle, ids):
    """Those of a handle's result."""
    output = handle.result(SOON)
    assert output.shape[0] == 1 and output[0, : ids.shape[1]].tolist() == ids[0].tolist()
    return output[0, ids.shape[1] :].tolist()


def oddly(input_ids, scores):
    """A processor of a user's own: it looks at all of the text."""
    wave = torch.arange(scores.shape[1]).remainder(3 + int(input_ids.sum()) % 4)
    return scores + 0.5 * wave


class FailsAt:
    """A processor or criterion that raises when so many tokens have been written."""

    def __init__(self, prompt, written, problem=None):
        self.length = prompt.shape[1] + written
        self.problem = problem or RuntimeError(f"at {written}")

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise self.problem
        return scores


class FailingCriterion(FailsAt):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__(input_ids, scores)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def check_zeros(cache):
    """Behind each row's end, and in rows of nobody."""
    if cache.room == (0, 0):
        return
    for group in cache.buffers.groups:
        lengths = [*cache.lengths, *[0] * (cache.buffers.rows - len(cache.lengths))]
        for row, length in enumerate(lengths):
            assert not group[:, row, :, length:].any()


class Driven:
    """A batch without threads: requests wait in a queue, and each call of `advance` is one step.

    After each step the limits are checked, and at the end that each request has the tokens of plain decoding, or their
    beginning where it was cancelled or has failed.
    """

    def __init__(self, model, prefill_tokens=512, max_rows=16, max_tokens=ENOUGH, **more):
        self.model = model
        limits = {"prefill_tokens": prefill_tokens, "max_rows": max_rows, "max_tokens": max_tokens, **more}
        self.batch = EngineBatch(model, supports(model).require(), **limits)
        self.waiting, self.asked = deque(), []
        self.seats = {}
        self.most_rows = 0

    def add(self, ids, lookahead=PAPER, *, seed=None, on_step=None, scope=None, prompt_logprobs=None, **arguments):
        options = RequestOptions(resolve(lookahead)[0], seed=seed, scope=scope, prompt_logprobs=prompt_logprobs)
        request = prepare(self.model, ids, {"pad_token_id": PAD, **arguments}, options=options)
        self.batch.running.capacity.check(request.need)
        logprobs = request.prompt_logprobs
        handle = Handle(self.cancel, stats=Stats(), seed=request.seed, on_step=on_step, prompt_logprobs=logprobs)
        self.waiting.append((request, handle))
        self.asked.append((handle, ids, handle.seed or 0 if seed is None else seed, arguments))
        return handle

    def cancel(self, handle):
        if handle.done():
            return False
        if handle in self.seats:
            self.seats[handle].cancelled = True
        else:
            self.waiting = deque(entry for entry in self.waiting if entry[1] is not handle)
            handle.end(None)
        return True

    def advance(self, times=1):
        for _ in range(times):
            while self.waiting and self.batch.running.has_room(self.waiting[0][0]):
                request, handle = self.waiting.popleft()
                self.seats[handle] = self.batch.running.add(request, handle)
            self.batch.advance()
            self.seats = {handle: seat for handle, seat in self.seats.items() if not handle.done()}
            self.check()

    def check(self):
        """No more than there may be, and nothing kept of those that have ended."""
        capacity, cache = self.batch.running.capacity, cache_of(self.batch)
        rows, slots = cache.room
        assert rows * slots <= max(capacity.max_tokens, 0)
        assert len(self.batch.running.active) <= capacity.max_rows
        assert {id(seat.handle) for seat in self.batch.running.active} == {id(handle) for handle in self.seats}
        assert len(rows_of(self.batch)) == len(self.batch.running.decoding)
        assert cache.lengths == ([len(row.tokens) - 1 for row in rows_of(self.batch)] or [0])
        told = self.batch.tally.snapshot(**dict.fromkeys(KNOWN_TO_THE_QUEUE, 0))
        assert (told.slots, told.room) == (sum(cache.lengths), rows * slots)
        if rows_of(self.batch) and self.batch._allocator.is_enough:
            needs, now = self.batch.running.needs(), max(cache.lengths)
            assert self.batch.running.next_preempted() is None
            assert replace(capacity, sizing=cache).suffices(cache.room, needs, now)
        if isinstance(cache, FallbackCache) and isinstance(cache.current, StaticCache):
            check_zeros(cache.current)
        self.most_rows = max(self.most_rows, len(rows_of(self.batch)))

    def finish(self, errors=0, expected=True):
        """Go on until all have ended, so many of them so far with an error.

        A test that expects other texts than those of plain decoding checks them itself.
        """
        for _ in range(10_000):
            if self.batch.idle and not self.waiting:
                break
            self.advance()
        else:
            raise AssertionError("it never ends")
        if not expected:
            return
        assert sum(isinstance(result_of(handle), BaseException) for handle, *_ in self.asked) == errors
        for handle, ids, seed, arguments in self.asked:
            whole = isinstance(result_of(handle), torch.Tensor)
            if whole or handle.tokens:
                plain = self.alone(ids, seed, arguments)
                assert handle.tokens == (plain if whole else plain[: len(handle.tokens)])

    def alone(self, ids, seed, arguments):
        """What plain decoding says, without what fails on purpose; once for each request of numbers alone."""
        own = [each for name in ("logits_processor", "stopping_criteria") for each in arguments.get(name, ())]
        if any(isinstance(each, FailsAt) for each in own):
            arguments = {"max_new_tokens": arguments["max_new_tokens"], "do_sample": arguments.get("do_sample", False)}
        if all(isinstance(value, int | float | None) for value in arguments.values()):
            return _alone_once(self.model, tuple(ids[0].tolist()), seed, tuple(arguments.items()))
        return alone(self.model, ids, seed, **arguments)


def check_overflow(*, first):
    """One token's embedding is no number: all that its row writes into the cache is none, and others get its place."""
    model, last = toy_model("llama", vocabulary=VOCABULARY, seed=1), VOCABULARY - 1
    arguments = {"max_new_tokens": 25, "suppress_tokens": [last]}
    texts = [random_ids(4 + 3 * number, number).clamp(max=last - 1) for number in range(6)]
    expected = [alone(model, ids, **arguments) for ids in texts]
    with torch.no_grad():
        model.get_input_embeddings().weight[last] = torch.nan
    driven = Driven(model, max_rows=3)
    handles = [driven.add(ids, None, **arguments) for ids in texts[: 0 if first else 2]]
    ids = torch.full((1, 30), last)
    broken = [driven.add(ids, None, max_new_tokens=new) for new in (8, 3)]
    handles += [driven.add(ids, None, **arguments) for ids in texts[len(handles) :]]
    driven.finish(expected=False)
    assert all(handle.done() for handle in broken)
    assert [handle.tokens for handle in handles] == expected
