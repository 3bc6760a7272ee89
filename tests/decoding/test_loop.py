"""The loop, on functions instead of models: any text function, any W, N, G, any batch."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import random_texts
import torch
from growing import begun
from hypothesis import given
from hypothesis import strategies as st
from random_texts import Follow

from lade import LookaheadConfig, Stats
from lade.decoding.drafting.adaptive import drafter_for
from lade.decoding.drafting.controller import common_progress
from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.loop import DecodeLoop
from lade.decoding.readout import Readout
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Choose, Greedy, Verdict
from lade_lab.fakes import FunctionRunner, ListCache, nearly_flat_cost

VOCABULARY = 12
follow_of = partial(random_texts.follow_of, vocabulary=VOCABULARY)
paper = st.builds(
    LookaheadConfig,
    window=st.integers(0, 6),
    ngram=st.integers(2, 6),
    guesses=st.integers(0, 6),
    prompt_ngrams=st.booleans(),
    seed=st.integers(0, 3),
)
adaptive = st.builds(
    LookaheadConfig,
    budget=st.one_of(st.none(), st.integers(1, 40)),
    prompt_ngrams=st.booleans(),
    seed=st.integers(0, 3),
)
configs = st.one_of(paper, adaptive)
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)


def plain(follow: Follow, prompt: Sequence[int], new_tokens: int, eos: int | None = None) -> list[int]:
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(follow(text))
        if text[-1] == eos:
            break
    return text


def loop_for(
    prompts: list[list[int]], config: LookaheadConfig, follow: Follow, new_tokens: Sequence[int], eos: int | None = None
) -> tuple[DecodeLoop[ListCache], list[Row]]:
    def stop_at(length: int) -> Callable[[Sequence[int]], bool]:
        return lambda tokens: len(tokens) >= length or tokens[-1] == eos

    excluded = () if eos is None else (eos,)
    budget = begun(nearly_flat_cost()) if config.method.sizes_trees else None
    rows = [
        Row(prompt, drafter_for(config, excluded, budget=budget), Greedy(), stop_at(len(prompt) + new))
        for prompt, new in zip(prompts, new_tokens, strict=True)
    ]
    return DecodeLoop(list(rows), FunctionRunner(follow, VOCABULARY), ListCache(len(rows)), Stats(), budget), rows


@given(configs, prompts, st.integers(1, 3), st.integers(0, 50), st.integers(1, 40), st.sampled_from([None, 3]))
def test_any_window_ngram_and_guesses_give_the_plain_text(config, prompt, order, salt, new_tokens, eos):
    follow = follow_of(order, salt)
    loop, (row,) = loop_for([prompt], config, follow, [new_tokens], eos)
    steps = [step for (step,) in loop.run()]
    expected = plain(follow, prompt, new_tokens, eos)
    assert row.tokens == expected
    assert [token for step in steps for token in step.tokens] == expected[len(prompt) :]
    assert loop.cache.rows == [expected[:-1]]
    assert sum(loop.stats.accepted) == loop.stats.new_tokens - 1 == len(expected) - len(prompt) - 1
    assert len(steps) == loop.stats.steps + 1


@given(configs, st.lists(prompts, min_size=2, max_size=4), st.integers(1, 2), st.integers(0, 9), st.data())
def test_rows_of_a_batch_accept_at_their_own_pace(config, prompts, order, salt, data):
    new_tokens = data.draw(st.lists(st.integers(1, 25), min_size=len(prompts), max_size=len(prompts)))
    follow = follow_of(order, salt)
    loop, rows = loop_for(prompts, config, follow, new_tokens)
    for _ in loop.run():
        for text, cached in zip(loop.rows, loop.cache.rows, strict=False):
            assert cached == text.tokens[:-1]
    for row, prompt, new in zip(rows, prompts, new_tokens, strict=True):
        assert row.tokens == plain(follow, prompt, new)


def test_plain_decoding_is_the_empty_tree_and_nobody_guesses_past_the_end_of_the_context():
    loop, _ = loop_for([[0, 1]], LookaheadConfig(0, 2, 0), follow_of(1, 1), [20])
    list(loop.run())
    assert loop.stats.step_tokens == [1] * 19
    assert loop.stats.accepted == [1] * 19
    follow = follow_of(1, 4)
    loop, (row,) = loop_for([[1, 2, 3]], LookaheadConfig(5, 4, 5), follow, [30])
    loop.runner.max_length = 20
    list(loop.run())
    assert row.tokens == plain(follow, [1, 2, 3], 30)
    assert loop.stats.step_tokens[-12:] == [1] * 12


class Roots(Drafter):
    """Feeds roots alone, some of which teach, and tells when its row has ended."""

    def __init__(self, teaches: Sequence[bool] = (), ended: list[object] | None = None) -> None:
        self.teaches, self.ended, self.seen, self.observed = list(teaches), ended, list[int](), 0

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        teaches = not self.teaches or self.teaches[len(self.seen)]
        return Draft(TokenTree(context[-1]), teaches=teaches)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        self.seen.append(len(readout.argmax_ids))

    def observe(self, emitted: int, seconds: float) -> None:
        self.observed += 1

    def end(self) -> None:
        if self.ended is not None:
            self.ended.append((self, self.observed))


class Looking:
    """Takes the argmax of the logits, one by one."""

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> None:
        pass

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        return lambda node: int(logits[node].argmax())


@pytest.mark.parametrize(("chooser", "read"), [(Greedy(), [1, 1, 1, 1]), (Looking(), [0, 1, 1, 0])])
def test_logits_are_read_for_those_who_look_at_what_is_read(chooser, read):
    follow, drafter = follow_of(2, 1), Roots([False, True, True, False])
    row = Row([1, 2], drafter, chooser, lambda tokens: len(tokens) == 7)
    list(DecodeLoop([row], FunctionRunner(follow, VOCABULARY), ListCache(1)).run())
    assert row.tokens == plain(follow, [1, 2], 5)
    assert drafter.seen == read


def test_drafters_are_told_the_end_of_their_rows_once_each_after_its_last_step():
    ended: list[object] = []
    drafters = [Roots(ended=ended) for _ in range(4)]
    rows = [
        Row([1, 2], drafter, Greedy(), lambda tokens, length=length: len(tokens) == length)
        for drafter, length in zip(drafters, (5, 3, 7, 5), strict=True)
    ]
    list(DecodeLoop(rows, FunctionRunner(follow_of(2, 1), VOCABULARY), ListCache(4)).run())
    assert ended == [(drafters[1], 0), (drafters[0], 2), (drafters[3], 2), (drafters[2], 4)]


class Told:
    """A budget that is told what a step brought, and how far the rows were when it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sequence[int] | None] = []
        self.brought: list[float] = []

    def decide(self, candidates: Sequence[Sequence[float]], emitted: Sequence[int] | None = None) -> None:
        self.asked.append(emitted)

    def observe(self, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int, prepared: bool) -> None:
        self.brought.append(emitted)


@given(st.booleans(), st.lists(st.integers(3, 30), min_size=1, max_size=5), st.integers(0, 50))
def test_a_budget_is_told_the_progress_of_a_call_or_of_the_mean_row(waits_for_all, new_tokens, salt):
    rows = [[salt, number] for number in range(len(new_tokens))]
    loop, _ = loop_for(rows, LookaheadConfig(0, 3, 2), follow_of(1, salt), new_tokens)
    told = Told()
    loop.budget, loop.waits_for_all = told, waits_for_all
    for emitted in loop.run():
        if emitted[0].index == 0:
            continue
        counts = [len(step.tokens) for step in emitted]
        if waits_for_all:
            asked = told.asked[-1]
            after = [before + count for before, count in zip(asked, counts, strict=True)]
            assert told.brought[-1] == pytest.approx(common_progress(after) - common_progress(asked))
        else:
            assert told.asked[-1] is None and told.brought[-1] == pytest.approx(sum(counts) / len(counts))
        assert min(counts) - 1e-9 <= told.brought[-1] <= max(counts) + 1e-9
    assert told.brought


@pytest.mark.parametrize(
    ("config", "accepted"), [(LookaheadConfig(0, 3, 2), [3] * 10), (LookaheadConfig(4, 6, 4), [6])]
)
def test_a_full_match_is_longer_than_the_guess_while_the_window_fills_too(config, accepted):
    """A guess of N-1 tokens yields N: the bonus token is not thrown away."""
    loop, _ = loop_for([[0, 1, 2] * 4], config, lambda text: (text[-1] + 1) % 3, [31])
    list(loop.run())
    assert loop.stats.accepted[: len(accepted)] == accepted


def test_a_consumer_that_stops_early_leaves_tokens_and_cache_agreeing():
    loop, (row,) = loop_for([[1, 2, 1, 2]], LookaheadConfig(7, 5, 7), follow_of(1, 2), [50])
    run = loop.run()
    for _ in range(4):
        next(run)
    run.close()
    assert loop.cache.rows[0] == row.tokens[:-1]
    assert row.tokens == plain(follow_of(1, 2), [1, 2, 1, 2], len(row.tokens) - 4)


def counting_loop(
    period: int = 7, stop: Callable[[Sequence[int]], bool] = lambda tokens: False
) -> tuple[DecodeLoop[ListCache], Row, list[int]]:
    """One that accepts several tokens a step, its row, and the tokens that its stop rule has been called with."""
    prompt, seen = [0, 1, 2, 3, 4, 5, 6, 0, 1], list[int]()
    drafter = drafter_for(LookaheadConfig(0, 4, 4))
    row = Row(prompt, drafter, Greedy(), lambda tokens: stop(tokens) or bool(seen.append(tokens[-1])))
    runner = FunctionRunner(lambda text: (text[-1] + 1) % period, VOCABULARY)
    return DecodeLoop([row], runner, ListCache(), Stats()), row, seen


@pytest.mark.parametrize("problem", [RuntimeError("a user's own"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", range(1, 10))
def test_an_error_amid_a_step_leaves_the_accepted_tokens_in_the_cache_and_no_others(at, problem):
    calls = []

    def stop(tokens: Sequence[int]) -> bool:
        calls.append(tokens[-1])
        if len(calls) == at:
            raise problem
        return False

    loop, row, _ = counting_loop(stop=stop)
    yielded = []
    with pytest.raises(type(problem)) as caught:
        for (step,) in loop.run():
            yielded += step.tokens
    assert caught.value is problem and loop.runner.passes < max(2, at)
    assert loop.cache.rows[0] == row.tokens[:-1] and loop.settled == loop.cache.lengths
    assert loop.stats.new_tokens == at - 1, "all that were emitted before"
    if isinstance(problem, Exception) or at == 1:
        assert yielded == calls[:-1]
    assert row.problem is None


def test_a_pass_that_fails_is_not_text():
    loop, row, _ = counting_loop()
    forward, run = loop.runner.forward, loop.run()
    first = next(run)

    def fails(trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: ListCache) -> None:
        forward(trees, rows, cache)
        raise MemoryError("no more")

    loop.runner.forward = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError, match="no more"):
        next(run)
    assert loop.cache.lengths > loop.settled == [len(row.tokens) - 1]
    assert row.written == first[0].tokens


def test_an_isolated_row_ends_with_the_tokens_before_its_error():
    def stop(tokens: Sequence[int]) -> bool:
        if len(seen) == 3:
            raise problem
        return False

    loop, row, seen = counting_loop(stop=stop)
    other, problem = counting_loop()[1], RuntimeError("a user's own")
    loop.rows.append(other)
    loop.cache.rows.append([])
    loop.isolate = True
    run = loop.prefill()
    failed, complete = loop.step()
    assert row.problem is problem and loop.rows == [other]
    assert run[0].tokens + failed.tokens == seen and len(seen) == 3
    assert len(complete.tokens) > len(failed.tokens)
    assert loop.cache.rows == [other.tokens[:-1]]
