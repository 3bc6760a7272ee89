"""A new source of guesses: a class with `guesses`, handed to the factory, and every method drafts from it."""

from collections.abc import Callable, Iterable, Sequence

import pytest

from lade import LookaheadConfig, Stats
from lade.decoding.drafting.drafter import Guess
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.decoding.verify import Greedy
from lade.testing import FunctionRunner, ListCache, nearly_flat_cost

VOCABULARY, PROMPT, LENGTH = 40, [1, 2, 3], 43
ADAPTIVE, BUDGET, PAPER = LookaheadConfig(), LookaheadConfig(budget=12), LookaheadConfig(0, 5, 3)


def follow(text: Sequence[int]) -> int:
    """A text that hardly ever repeats itself, so that nothing in it helps to guess it."""
    return hash((5, *text)) % VOCABULARY


def plain_text() -> list[int]:
    text = list(PROMPT)
    while len(text) < LENGTH:
        text.append(follow(text))
    return text


class ExpectedText:
    """Guesses that the rest of a text comes that is known beforehand."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def guesses(self, context: Sequence[int]) -> Iterable[Guess]:
        yield Guess(self.text[len(context) :][:8], "expected")


def decoded(config: LookaheadConfig, source: ExpectedText) -> tuple[list[int], list[str], Stats]:
    drafter = drafter_for(config, cost=nearly_flat_cost(), sources=[source])
    row = Row(PROMPT, drafter, Greedy(), lambda tokens: len(tokens) >= LENGTH)
    loop = DecodeLoop([row], FunctionRunner(follow, VOCABULARY), ListCache(), Stats())
    names = [name for steps in loop.run() for step in steps for name in step.sources]
    return row.tokens, names, loop.stats


@pytest.mark.parametrize("config", [BUDGET, PAPER])
def test_guesses_of_a_new_source_are_drafted_and_accepted(config):
    text, names, stats = decoded(config, ExpectedText(plain_text()))
    assert text == plain_text()
    assert names.count("expected") > len(names) / 2
    assert stats.tokens_per_step > 3


def test_where_sizes_are_chosen_it_takes_what_the_memory_leaves():
    text, names, _ = decoded(ADAPTIVE, ExpectedText(plain_text()))
    assert text == plain_text() and "expected" in names


@pytest.mark.parametrize("config", [ADAPTIVE, BUDGET, PAPER])
@pytest.mark.parametrize("spoil", [lambda token: (token + 1) % VOCABULARY, lambda token: 0])
def test_a_source_that_is_wrong_changes_nothing(config: LookaheadConfig, spoil: Callable[[int], int]):
    text, names, _ = decoded(config, ExpectedText([spoil(token) for token in plain_text()]))
    assert text == plain_text()
    assert names.count("expected") <= 3


@pytest.mark.parametrize(("config", "most"), [(LookaheadConfig(budget=5), 5), (LookaheadConfig(0, 3, 2), 5)])
def test_sizes_stay_those_of_the_method(config: LookaheadConfig, most: int):
    assert max(decoded(config, ExpectedText(plain_text()))[2].step_tokens) <= most
