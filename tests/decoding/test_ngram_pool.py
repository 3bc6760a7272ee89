"""The n-gram pool."""

from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting.lookahead import NGramPool

ngrams = st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=60)


@given(ngrams, st.integers(0, 4), st.integers(1, 5))
def test_it_never_exceeds_its_bounds(learned, guesses, max_keys):
    pool = NGramPool(3, guesses, max_keys=max_keys)
    for ngram in learned:
        pool.learn([ngram], "pool")
        assert len(pool) <= guesses * max_keys
        assert all(len(pool.lookup(token)) <= guesses for token in range(7))


@given(ngrams, st.integers(1, 4))
def test_it_holds_the_most_recently_seen_continuations(learned, guesses):
    pool = NGramPool(3, guesses)
    pool.learn(learned, "pool")
    for token in range(7):
        recent: list[tuple[int, ...]] = []
        for key, *rest in reversed(learned):
            if key == token and tuple(rest) not in recent:
                recent.append(tuple(rest))
        assert [guess for guess, _ in pool.lookup(token)] == recent[:guesses]


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=5), max_size=40), st.integers(1, 5))
def test_no_continuation_begins_another(learned, guesses):
    pool = NGramPool(4, guesses)
    for ngram in learned:
        pool.learn([ngram], "pool")
        for token in range(3):
            held = [guess for guess, _ in pool.lookup(token)]
            assert len(held) <= guesses and all(1 <= len(guess) <= 3 for guess in held)
            assert not any(a != b and b[: len(a)] == a for a in held for b in held)
        newest = pool.lookup(ngram[0])[0][0]
        assert newest[: len(ngram) - 1] == tuple(ngram[1:4])


def test_a_shorter_sighting_refreshes_the_longer_one():
    pool = NGramPool(4, 2)
    pool.learn([(1, 2, 3, 4)], "text")
    pool.learn([(1, 5)], "pool")
    pool.learn([(1, 2, 3)], "pool")
    assert pool.lookup(1) == [((2, 3, 4), "text"), ((5,), "pool")]
    pool.learn([(1, 5, 6, 7)], "prompt")
    assert pool.lookup(1) == [((5, 6, 7), "prompt"), ((2, 3, 4), "text")]


@given(ngrams)
def test_nothing_follows_an_excluded_id(learned):
    pool = NGramPool(3, 4, excluded={0, 5})
    pool.learn(learned, "pool")
    for token in range(7):
        for guess, _ in pool.lookup(token):
            assert token not in (0, 5) and not {0, 5} & set(guess)


def test_a_key_that_was_not_extended_for_long_goes_first():
    pool = NGramPool(2, 2, max_keys=2)
    pool.learn([(1, 2), (3, 4), (1, 5), (6, 7)], "pool")
    assert pool.lookup(3) == []
    assert [guess for guess, _ in pool.lookup(1)] == [(5,), (2,)]
