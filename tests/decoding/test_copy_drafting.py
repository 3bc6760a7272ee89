"""Guesses from a text that the row may follow: expected ones, and copies of its own."""

import random
from collections.abc import Sequence

import pytest
from effort import examples
from growing import begun, writer_of, written
from hypothesis import given, settings
from hypothesis import strategies as st
from made_clock import TimedRunner

from lade import LookaheadConfig
from lade.decoding.drafting.adaptive import drafter_for, ranked
from lade.decoding.drafting.copy_drafting import ANCHOR, LONGEST_CHAIN, Agreement, DoubtedAgreement, OwnText, Prediction
from lade.decoding.drafting.drafter import Guess
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.tree import TokenTree
from lade_lab.fakes import FunctionRunner

VOCABULARY, PROMPT = 400, [1, 2, 3]
CYCLE = list(range(10, 24))
BUDGET = LookaheadConfig(budget=12)


def noise(seed: int, length: int = 120) -> list[int]:
    return random.Random(seed).choices(range(10, VOCABULARY), k=length)


ANSWER = noise(0)
CHANGED = [token + 1 if place in (20, 60, 90) else token for place, token in enumerate(ANSWER)]
EDITED = [*ANSWER[:30], 5, 6, 7, *ANSWER[30:70], *ANSWER[80:]]
"""Three tokens more, and ten less: the answer takes away the ones and brings back the others."""


def decoded(prompt: Sequence[int], answer: Sequence[int], *sources: object, config: LookaheadConfig = BUDGET):
    """Stats, and the name of each token's source."""
    text = [*prompt, *answer]
    runner = FunctionRunner(writer_of(text, VOCABULARY), VOCABULARY)
    tokens, names, stats = written(prompt, len(text), drafter_for(config, sources=sources), runner)
    assert tokens == text
    return stats, names


@pytest.mark.parametrize(("expected", "least"), [(ANSWER, 11.5), (CHANGED, 8), (EDITED, 5)])
def test_a_step_yields_most_of_what_it_feeds_where_the_answer_is_what_was_expected(expected, least):
    stats, names = decoded(PROMPT, ANSWER, Prediction(expected))
    assert stats.tokens_per_step >= least
    assert names.count("prediction") > 0.75 * len(names)


def test_noise_is_fed_less_and_less():
    # Half of it are the answer's own tokens, in another order, so that places are found all the time.
    wrong = random.Random(1).sample(ANSWER, 60) + noise(2, 60)
    source, fed = Prediction(wrong), []
    for end in range(1, len(ANSWER) + 1):
        fed.append(sum(len(guess.tokens) for guess in source.guesses([*PROMPT, *ANSWER[:end]])))
    assert sum(fed[-40:]) < sum(fed[:40]) / 2
    stats, _ = decoded(PROMPT, ANSWER, Prediction(wrong))
    assert stats.tokens_per_step < 1.2


def test_a_place_is_found_again_behind_each_change():
    source = Prediction(CHANGED)
    for end in (1, 18, 20):
        (guess,) = source.guesses([*PROMPT, *ANSWER[:end]])
    assert list(guess.tokens[:3]) == CHANGED[20:23]
    (guess,) = source.guesses([*PROMPT, *ANSWER[:21]])  # one was exchanged for another
    assert list(guess.tokens[:3]) == ANSWER[21:24]
    likely = guess.scores[0]
    (guess,) = source.guesses([*PROMPT, *ANSWER[:24]])
    assert list(guess.tokens[:3]) == ANSWER[24:27] and guess.scores[0] > likely


def test_a_chain_ends_before_what_is_never_guessed_and_has_a_greatest_length():
    assert [list(guess.tokens) for guess in Prediction([7, 8, 9, 2, 8], {2}).guesses([1, 7])] == [[8, 9]]
    source, text = Prediction(noise(3, 300)), noise(3, 300)
    for end in range(1, 200):
        (guess,) = source.guesses([1, *text[:end]])
    assert len(guess.tokens) == len(guess.scores) == LONGEST_CHAIN
    assert source.guesses([1, *text]) == [], "nothing is left"
    assert Prediction([]).guesses([1, 7]) == []


def test_likelihoods_are_those_of_late_and_short_matches_are_doubted_from_the_first_miss_to_a_long_match():
    agreement = Agreement()
    assert agreement.probability(0) < agreement.probability(1) < agreement.probability(8) < agreement.probability(99)
    for hit, bound in ((True, 0.95), (False, 0.3)):
        for _ in range(200):
            agreement.learn(5, hit)
        assert (agreement.probability(5) > bound) is hit
    assert agreement.probability(4) == agreement.probability(7) != agreement.probability(8)
    agreement, hopeful = DoubtedAgreement(), Agreement()
    short = range(4)
    assert [agreement.probability(length) for length in short] == [hopeful.probability(length) for length in short]
    agreement.learn(0, hit=False)
    assert all(agreement.probability(length) < 0.5 * hopeful.probability(length) for length in short)
    for agreed in range(8):
        assert agreement.probability(1) < 0.4
        agreement.learn(agreed, hit=True)
    assert all(agreement.probability(length) >= hopeful.probability(length) for length in short)
    agreement.learn(8, hit=False)
    assert agreement.probability(1) == hopeful.probability(1), "one change is no reason to doubt the text again"


@pytest.mark.parametrize("other", ["another order", "drawn"])
def test_noise_costs_hardly_anything(other):
    """Of passes of a small model, and a tenth of a plain one for the library.

    A word of every third is common, so that places are found all the time.
    """
    rng = random.Random(7)
    answer = [rng.choice([10, 11, 12, 13]) if place % 3 == 0 else token for place, token in enumerate(noise(8, 400))]
    wrong = rng.sample(answer, len(answer)) if other == "another order" else rng.choices(range(10, VOCABULARY), k=400)
    text, seconds = [*PROMPT, *answer], []
    for sources in ([], [Prediction(wrong)]):
        cost = StepCost.of({size: [1e-3 * times] for size, times in ((1, 1.0), (2, 1.3), (16, 2.2), (128, 4.0))})
        runner, budget = TimedRunner(writer_of(text, VOCABULARY), VOCABULARY, cost, own_s=1e-4), begun(cost)
        drafter = drafter_for(LookaheadConfig(), budget=budget, sources=sources)
        assert written(PROMPT, len(text), drafter, runner, budget)[0] == text
        seconds.append(runner.clock.wall_s)
    assert seconds[1] < 1.01 * seconds[0]


def test_copies_from_the_prompt_are_drafted_as_long_chains():
    """The prompt's code comes again with a word exchanged; a memory alone knows what follows a few tokens."""
    prompt = random.Random(4).choices(range(10, 18), k=200)
    answer = [77 if place % 50 == 49 else token for place, token in enumerate(prompt)]
    wide = LookaheadConfig(budget=24)
    alone, _ = decoded(prompt, [*prompt[:8], *answer[8:]], config=wide)
    copying, names = decoded(prompt, [*prompt[:8], *answer[8:]], OwnText(), config=wide)
    assert copying.tokens_per_step > 1.3 * alone.tokens_per_step
    assert names.count("text") > len(names) / 2


def test_a_copy_is_recognised_by_its_last_tokens_only_from_before_them_or_in_what_an_encoder_was_fed():
    source, text = OwnText(), noise(5, 30)
    assert source.guesses(text) == [], "a text does not continue itself at its end"
    assert source.guesses([*text, *text[: ANCHOR - 1]]) == []
    (guess,) = source.guesses([*text, *text[:ANCHOR]])
    assert list(guess.tokens) == [*text[ANCHOR:], *text[:ANCHOR]][: len(guess.tokens)]
    (guess,) = OwnText(noise(6, 30)).guesses([1, *noise(6, 30)[3 : 3 + ANCHOR]])
    assert list(guess.tokens[:4]) == noise(6, 30)[3 + ANCHOR : 7 + ANCHOR]


@settings(max_examples=examples(60))
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=6), st.data())
def test_another_text_than_was_shown_before_is_followed_like_a_new_one(pieces, data):
    """Rows that go in lock-step show what they expect to write, and may take it back."""
    source, context = OwnText(), [0]
    for piece in pieces:
        kept = data.draw(st.integers(1, len(context)))
        context = context[:kept] + piece
        for guess in source.guesses(context):
            assert len(guess.tokens) == len(guess.scores)
            starts = range(len(context) - len(guess.tokens) + 1)
            assert any(context[at : at + len(guess.tokens)] == list(guess.tokens) for at in starts)


@settings(max_examples=examples(60))
@given(st.booleans(), st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2]), min_size=60, max_size=90), st.randoms())
def test_a_list_that_has_grown_is_followed_like_another_one_with_the_same_tokens(encoded, changes, luck):
    """One that has grown by one token while nothing is followed takes a shorter way. The text says the same again and
    again, with tokens exchanged, or left out.
    """
    before = CYCLE if encoded else []
    short, long, context, phrase = OwnText(before), OwnText(before), [CYCLE[0]], iter(CYCLE * 20)
    for change in changes:
        context += [next(phrase) if change == 0 else luck.randrange(5) for _ in range(luck.choice([1, 1, 1, 1, 3]))]
        if change == 1:
            next(phrase)
        assert short.guesses(context) == long.guesses(list(context))


columns = st.lists(st.floats(0.001, 1.0), max_size=12).map(lambda scores: sorted(scores, reverse=True))


@settings(max_examples=examples(80))
@given(st.lists(st.tuples(columns, st.integers(0, 99)), max_size=3), st.data())
def test_every_size_of_a_ranking_is_a_tree_of_that_size(chains, data):
    rng = random.Random(data.draw(st.integers(0, 99)))
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < 15:
        path = (*rng.choice(paths), rng.randrange(2))
        if path not in paths:
            paths.append(path)
    memory = sorted((rng.random() for _ in paths[1:]), reverse=True)
    guesses = [Guess(random.Random(seed).choices(range(2), k=len(scores)), "it", scores) for scores, seed in chains]
    max_depth, most = data.draw(st.one_of(st.none(), st.integers(0, 9))), data.draw(st.integers(1, 40))
    ranking = ranked([1.0, *memory], paths, guesses, most=most, max_depth=max_depth)
    assert len(ranking.scores) <= most and ranking.scores[0] == 1.0
    assert ranking.scores == sorted(ranking.scores, reverse=True)
    for size in range(1, len(ranking.scores) + 1):
        tree = TokenTree(0)
        for path in paths[: ranking.grown[size - 1]]:
            tree.add_path(path, "memory")
        ranking.hang(tree, size)
        assert len(tree) == size


def test_a_guess_of_the_memory_too_is_reported_under_the_name_of_the_one_that_ranked_it():
    ranking = ranked([1.0, 0.2], [(), (7,)], [Guess([7, 8], "prediction", [0.9, 0.8])], most=9, max_depth=None)
    assert ranking.scores == [1.0, 0.9, 0.8]
    tree = TokenTree(0)
    ranking.hang(tree, 3)
    assert tree.ids == [0, 7, 8] and tree.sources[1:] == ["prediction"] * 2
