"""Plain Jacobi decoding: exact, and a fixed point iteration."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade import Stats
from lade.decoding.loop import DecodeLoop
from lade.decoding.readout import Readout
from lade.decoding.row import Row
from lade.decoding.verify import Greedy, Verdict
from lade.errors import ConfigError
from lade_lab.fakes import FunctionRunner, ListCache
from lade_lab.jacobi import JacobiDrafter

VOCABULARY = 12


def decoded(
    follow: Callable[[Sequence[int]], int],
    prompt: list[int],
    new_tokens: int,
    drafter: JacobiDrafter,
    max_length: int | None = None,
) -> tuple[list[int], Stats]:
    end, stats = len(prompt) + new_tokens, Stats()
    row = Row(prompt, drafter, Greedy(), lambda tokens: len(tokens) >= end)
    loop = DecodeLoop([row], FunctionRunner(follow, VOCABULARY, max_length), ListCache(), stats)
    for _ in loop.run():
        pass
    return row.tokens, stats


def by_text(salt: int) -> Callable[[Sequence[int]], int]:
    return lambda text: hash((salt, *text[-2:])) % VOCABULARY


def by_place(text: Sequence[int]) -> int:
    """A cycle in the places of a text, whatever stands there."""
    return len(text) % 3


@given(
    salt=st.integers(0, 50),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    new_tokens=st.integers(1, 30),
    guesses=st.integers(1, 10),
    seed=st.integers(0, 3),
)
def test_it_writes_what_plain_decoding_writes(salt, prompt, new_tokens, guesses, seed):
    follow, text = by_text(salt), list(prompt)
    for _ in range(new_tokens):
        text.append(follow(text))
    found, stats = decoded(follow, prompt, new_tokens, JacobiDrafter(guesses, seed=seed))
    assert found == text
    assert set(stats.step_tokens) <= {guesses + 1} and sum(stats.accepted) == new_tokens - 1


def test_where_the_text_does_not_depend_on_the_guesses_one_pass_makes_all_of_them_right():
    _, stats = decoded(by_place, [7, 8], 25, JacobiDrafter(4))
    # One token and the chain that the pass found, then one token and a chain that is new again.
    assert stats.accepted == [1, 5] * 4
    _, stats = decoded(lambda text: 9, [7, 8], 13, JacobiDrafter(5))
    assert stats.accepted == [1, 6, 1, 4]


def test_the_choices_after_the_accepted_tokens_are_the_next_guesses():
    drafter = JacobiDrafter(3)
    drafter.begin([5, 6, 1], 2)
    assert len(drafter.chain) == 3 and set(drafter.chain) <= {5, 6}, "drawn from the prompt"
    drafter.chain = [2, 3, 4]
    draft = drafter.draft([5, 6, 1], None)
    tree = draft.tree
    assert (tree.ids, tree.parents) == ([1, 2, 3, 4], [-1, 0, 1, 2])
    verdict = Verdict([0, 1], [2, 9], ["window", "bonus"], False)
    drafter.learn([5, 6, 1, 2, 9], draft, Readout([2, 9, 10, 11]), verdict)
    assert drafter.chain[:2] == [10, 11]
    assert len(drafter.chain) == 3 and drafter.chain[2] in {5, 6}


def test_the_same_seed_draws_the_same_guesses():
    chains = []
    for seed in (0, 0, 1):
        drafter = JacobiDrafter(20, seed=seed)
        drafter.begin([*range(12), 3], 12)
        chains.append(drafter.chain)
    assert chains[0] == chains[1] != chains[2]


def test_at_the_end_of_the_context_the_chain_is_cut_and_filled_again():
    text, _ = decoded(by_place, [1, 1], 8, JacobiDrafter(6), max_length=10)
    assert text[2:] == [2, 0, 1, 2, 0, 1, 2, 0]
    drafter = JacobiDrafter(4)
    drafter.begin([3, 3], 1)
    draft = drafter.draft([3, 3], 2)
    assert len(draft.tree) == 3
    drafter.learn([3, 3, 5], draft, Readout([5, 6, 7]), Verdict([0], [5], ["bonus"], False))
    assert drafter.chain == [6, 7, 3, 3]


@pytest.mark.parametrize("guesses", [0, -1, True, 2.0])
def test_there_must_be_a_guess(guesses):
    with pytest.raises(ConfigError, match="guesses"):
        JacobiDrafter(guesses)
