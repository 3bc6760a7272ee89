"""The loop, on functions instead of models: any text function, any W, N, G, any batch."""

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from lade import LookaheadConfig, Stats
from lade.decoding.choose import Greedy
from lade.decoding.drafting import drafter_for
from lade.decoding.engine import Engine
from lade.decoding.row import Row
from lade.testing import FunctionRunner, ListCache, nearly_flat_cost

VOCABULARY = 12
Follow = Callable[[Sequence[int]], int]
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


def follow_of(order: int, salt: int) -> Follow:
    """A text function that looks back `order` tokens: the lower, the sooner it repeats itself."""

    def follow(text: Sequence[int]) -> int:
        return hash((salt, *text[-order:])) % VOCABULARY

    return follow


def plain(follow: Follow, prompt: Sequence[int], new_tokens: int, eos: int | None = None) -> list[int]:
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(follow(text))
        if text[-1] == eos:
            break
    return text


def engine_for(
    prompts: list[list[int]], config: LookaheadConfig, follow: Follow, new_tokens: Sequence[int], eos: int | None = None
) -> tuple[Engine[ListCache], list[Row]]:
    def stop_at(length: int) -> Callable[[Sequence[int]], bool]:
        return lambda tokens: len(tokens) >= length or tokens[-1] == eos

    excluded = () if eos is None else (eos,)
    rows = [
        Row(prompt, drafter_for(config, excluded, cost=nearly_flat_cost()), Greedy(), stop_at(len(prompt) + new))
        for prompt, new in zip(prompts, new_tokens, strict=True)
    ]
    return Engine(list(rows), FunctionRunner(follow, VOCABULARY), ListCache(len(rows)), Stats()), rows


@given(configs, prompts, st.integers(1, 3), st.integers(0, 50), st.integers(1, 40), st.sampled_from([None, 3]))
def test_any_window_ngram_and_guesses_give_the_plain_text(config, prompt, order, salt, new_tokens, eos):
    follow = follow_of(order, salt)
    engine, (row,) = engine_for([prompt], config, follow, [new_tokens], eos)
    steps = [step for (step,) in engine.run()]
    expected = plain(follow, prompt, new_tokens, eos)
    assert row.tokens == expected
    assert [token for step in steps for token in step.tokens] == expected[len(prompt) :]
    assert engine.cache.rows == [expected[:-1]]
    assert sum(engine.stats.accepted) == engine.stats.new_tokens - 1 == len(expected) - len(prompt) - 1
    assert len(steps) == engine.stats.steps + 1


@given(configs, st.lists(prompts, min_size=2, max_size=4), st.integers(1, 2), st.integers(0, 9), st.data())
def test_rows_of_a_batch_accept_at_their_own_pace(config, prompts, order, salt, data):
    new_tokens = data.draw(st.lists(st.integers(1, 25), min_size=len(prompts), max_size=len(prompts)))
    follow = follow_of(order, salt)
    engine, rows = engine_for(prompts, config, follow, new_tokens)
    for _ in engine.run():
        for text, cached in zip(engine.rows, engine.cache.rows, strict=False):
            assert cached == text.tokens[:-1]
    for row, prompt, new in zip(rows, prompts, new_tokens, strict=True):
        assert row.tokens == plain(follow, prompt, new)


def test_a_periodic_text_comes_several_tokens_a_step():
    engine, _ = engine_for([[0, 1, 2, 3]], LookaheadConfig(5, 4, 5), lambda text: (text[-1] + 1) % 7, [80])
    list(engine.run())
    assert engine.stats.tokens_per_step > 3


def test_plain_decoding_is_the_empty_tree():
    engine, _ = engine_for([[0, 1]], LookaheadConfig(0, 2, 0), follow_of(1, 1), [20])
    list(engine.run())
    assert engine.stats.step_tokens == [1] * 19
    assert engine.stats.accepted == [1] * 19


def test_a_full_match_is_longer_than_the_guess():
    """A guess of N-1 tokens yields N: the bonus token is not thrown away."""
    engine, _ = engine_for([[0, 1, 2] * 4], LookaheadConfig(0, 3, 2), lambda text: (text[-1] + 1) % 3, [31])
    list(engine.run())
    assert engine.stats.accepted == [3] * 10


def test_guesses_are_verified_while_the_window_still_fills():
    engine, _ = engine_for([[0, 1, 2] * 4], LookaheadConfig(4, 6, 4), lambda text: (text[-1] + 1) % 3, [13])
    list(engine.run())
    assert engine.stats.accepted[0] == 6


def test_nobody_guesses_past_the_end_of_the_context():
    follow = follow_of(1, 4)
    engine, (row,) = engine_for([[1, 2, 3]], LookaheadConfig(5, 4, 5), follow, [30])
    engine.runner.max_length = 20
    list(engine.run())
    assert row.tokens == plain(follow, [1, 2, 3], 30)
    assert engine.stats.step_tokens[-12:] == [1] * 12


def test_a_consumer_that_stops_early_leaves_tokens_and_cache_agreeing():
    engine, (row,) = engine_for([[1, 2, 1, 2]], LookaheadConfig(7, 5, 7), follow_of(1, 2), [50])
    run = engine.run()
    for _ in range(4):
        next(run)
    run.close()
    assert engine.cache.rows[0] == row.tokens[:-1]
    assert row.tokens == plain(follow_of(1, 2), [1, 2, 1, 2], len(row.tokens) - 4)
