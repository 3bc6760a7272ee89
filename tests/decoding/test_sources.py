"""A new source of guesses: a class with `guesses`, handed to the factory, and every method drafts from it."""

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from made_clock import MadeClock

from lade import LookaheadConfig, Stats
from lade.clock import Duration
from lade.decoding.drafting.drafter import Guess
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Greedy
from lade.testing import FunctionRunner, ListCache
from lade.tuning.step_cost import StepCost

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


def flat_cost() -> StepCost:
    """Up to 16 tokens cost what one costs, as where reading the weights takes all the time."""
    return StepCost.of({1: [1e-3], 16: [1e-3], 128: [4e-3]})


class TimedRunner(FunctionRunner):
    """Whose passes take what they are expected to take, by its clock, whatever else the machine has to do."""

    clock: MadeClock

    def __init__(self) -> None:
        super().__init__(follow, VOCABULARY)
        self.clock, self.cost = MadeClock(), flat_cost()

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: ListCache) -> torch.Tensor:
        seconds = self.cost.seconds(max(map(len, trees)))
        self.pass_time = Duration(seconds, seconds)
        self.clock.run(seconds)
        return super().forward(trees, rows, cache)


@pytest.fixture
def runner() -> TimedRunner:
    return TimedRunner()


def decoded(config: LookaheadConfig, source: ExpectedText, runner: TimedRunner) -> tuple[list[int], list[str], Stats]:
    drafter = drafter_for(config, cost=flat_cost(), sources=[source])
    row = Row(PROMPT, drafter, Greedy(), lambda tokens: len(tokens) >= LENGTH)
    loop = DecodeLoop([row], runner, ListCache(), Stats())
    names = [name for steps in loop.run() for step in steps for name in step.sources]
    return row.tokens, names, loop.stats


@pytest.mark.parametrize("config", [BUDGET, PAPER])
def test_guesses_of_a_new_source_are_drafted_and_accepted(config: LookaheadConfig, runner: TimedRunner):
    text, names, stats = decoded(config, ExpectedText(plain_text()), runner)
    assert text == plain_text()
    assert names.count("expected") > len(names) / 2
    assert stats.tokens_per_step > 3


def test_where_sizes_are_chosen_it_takes_what_the_memory_leaves(runner: TimedRunner):
    text, names, _ = decoded(ADAPTIVE, ExpectedText(plain_text()), runner)
    assert text == plain_text() and "expected" in names


@pytest.mark.parametrize("config", [ADAPTIVE, BUDGET, PAPER])
@pytest.mark.parametrize("spoil", [lambda token: (token + 1) % VOCABULARY, lambda token: 0])
def test_a_source_that_is_wrong_changes_nothing(
    config: LookaheadConfig, spoil: Callable[[int], int], runner: TimedRunner
):
    text, names, _ = decoded(config, ExpectedText([spoil(token) for token in plain_text()]), runner)
    assert text == plain_text()
    assert names.count("expected") <= 3


@pytest.mark.parametrize(("config", "most"), [(LookaheadConfig(budget=5), 5), (LookaheadConfig(0, 3, 2), 5)])
def test_sizes_stay_those_of_the_method(config: LookaheadConfig, most: int, runner: TimedRunner):
    assert max(decoded(config, ExpectedText(plain_text()), runner)[2].step_tokens) <= most
