"""A new source of guesses: a class with `guesses`, handed to the factory, and every method drafts from it."""

from collections.abc import Callable, Iterable, Sequence

import pytest
from growing import begun, written
from made_clock import TimedRunner

from lade import Drafter, LookaheadConfig, Stats
from lade.decoding.drafting.adaptive import drafter_for
from lade.decoding.drafting.drafter import Guess
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.drafting.user_sources import SourcedDrafter, UserSource

VOCABULARY, PROMPT, LENGTH = 40, [1, 2, 3], 43
ADAPTIVE, BUDGET, PAPER = LookaheadConfig(), LookaheadConfig(budget=12), LookaheadConfig(0, 5, 3)


def follow(text: Sequence[int]) -> int:
    """A text that hardly ever repeats itself, so that nothing in it helps to guess it."""
    return hash((5, *text)) % VOCABULARY


def text_of(length: int = LENGTH, prompt: Sequence[int] = PROMPT) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(follow(text))
    return text


class ExpectedText:
    """Guesses that the rest of a text comes that is known beforehand."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def guesses(self, context: Sequence[int]) -> Iterable[Guess]:
        yield Guess(self.text[len(context) :][:8], "expected")


def flat_cost() -> StepCost:
    """Up to 16 tokens cost what one costs, as where reading the weights takes all the time."""
    return StepCost.of({1: [1e-3], 16: [1e-3], 128: [4e-3]})


def decoded(config: LookaheadConfig, expected: Sequence[int]) -> tuple[list[str], Stats]:
    """The name of each token's source, and stats."""
    budget = begun(flat_cost()) if config is ADAPTIVE else None
    drafter = drafter_for(config, budget=budget, sources=[ExpectedText(expected)])
    runner = TimedRunner(follow, VOCABULARY, flat_cost())
    tokens, names, stats = written(PROMPT, LENGTH, drafter, runner, budget)
    assert tokens == text_of()
    return names, stats


@pytest.mark.parametrize("config", [BUDGET, PAPER])
def test_guesses_of_a_new_source_are_drafted_and_accepted(config: LookaheadConfig):
    names, stats = decoded(config, text_of())
    assert names.count("expected") > len(names) / 2
    assert stats.tokens_per_step > 3


def test_where_sizes_are_chosen_it_takes_what_the_memory_leaves():
    assert "expected" in decoded(ADAPTIVE, text_of())[0]


@pytest.mark.parametrize("config", [ADAPTIVE, BUDGET, PAPER])
@pytest.mark.parametrize("spoil", [lambda token: (token + 1) % VOCABULARY, lambda token: 0])
def test_a_source_that_is_wrong_changes_nothing(config: LookaheadConfig, spoil: Callable[[int], int]):
    names, _ = decoded(config, [spoil(token) for token in text_of()])
    assert names.count("expected") <= 3


@pytest.mark.parametrize(("config", "most"), [(LookaheadConfig(budget=5), 5), (LookaheadConfig(0, 3, 2), 5)])
def test_sizes_stay_those_of_the_method(config: LookaheadConfig, most: int):
    assert max(decoded(config, text_of())[1].step_tokens) <= most


class Known(Drafter):
    """Proposes what comes, or what does not, and says nothing about its confidence."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def propose(self, request: object, tokens: Sequence[int], most: int) -> list[Sequence[int]]:
        return [self.text[len(tokens) :][:most]]


def with_drafter(
    drafter: Drafter | None, now: Callable[[], float] = lambda: 0.0, prompt: Sequence[int] = PROMPT
) -> Stats:
    """Decode 400 tokens by the default method on a machine where 16 tokens cost what one costs."""
    sources = [] if drafter is None else [UserSource(drafter, VOCABULARY, sized=True, now=now)]
    budget = begun(flat_cost())
    own = drafter_for(ADAPTIVE, vocabulary=VOCABULARY, budget=budget, sources=sources)
    runner = TimedRunner(follow, VOCABULARY, flat_cost())
    tokens, _, stats = written(prompt, 400, SourcedDrafter(own, sources), runner, budget)
    assert tokens == text_of(400, prompt)
    return stats


def test_a_drafter_without_scores_is_trusted_as_it_is_seen_to_be_right():
    stats = with_drafter(Known(text_of(480)))
    assert stats.accepted_tokens / stats.steps > 10
    assert stats.accepted[2] > 2  # and soon


def test_one_that_is_wrong_costs_next_to_nothing():
    """Of several texts together: a single one takes 2 % more or less as its trees happen to lie."""
    with_s = without_s = 0.0
    for first in range(6):
        prompt = [first, *PROMPT]
        wrong = Known([(token + 1) % VOCABULARY for token in text_of(480, prompt)])
        with_s += with_drafter(wrong, prompt=prompt).decode_s
        without_s += with_drafter(None, prompt=prompt).decode_s
    assert with_s < 1.03 * without_s


def test_a_slow_drafter_is_asked_now_and_then():
    asked, clock = [], [0.0]

    class Slow(Known):
        def propose(self, request: object, tokens: Sequence[int], most: int) -> list[Sequence[int]]:
            asked.append(len(tokens))
            clock[0] += 1.0  # a pass takes 1 ms
            return []

    with_drafter(Slow(()), now=lambda: clock[0])
    assert 16 <= len(asked) < 60
