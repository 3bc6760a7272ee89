"""Methods of others: exact whatever they guess, and each guesses what its paper says."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mtp_toys import llama_with_mtp

from lade import LookaheadConfig, Stats
from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.loop import DecodeLoop
from lade.decoding.readout import Readout, read
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Greedy, Verdict
from lade.hf.session import Session
from lade.model.prepared import custom_generate_for
from lade_lab.fakes import FunctionRunner, ListCache
from lade_lab.peers import MtpChainDrafter, PromptLookupDrafter, SuffixDrafter, TokenRecyclingDrafter, template

VOCABULARY = 12
PEERS: list[Callable[[int], Drafter]] = [PromptLookupDrafter, SuffixDrafter, TokenRecyclingDrafter]


def decoded(
    follow: Callable[[Sequence[int]], int],
    prompt: list[int],
    new_tokens: int,
    drafter: Drafter,
    room: int | None = None,
) -> tuple[list[int], Stats]:
    end, stats = len(prompt) + new_tokens, Stats()
    row = Row(prompt, drafter, Greedy(), lambda tokens: len(tokens) >= end)
    for _ in DecodeLoop([row], FunctionRunner(follow, VOCABULARY, room), ListCache(), stats).run():
        pass
    return row.tokens, stats


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tokens from the root to each node, the root's left out."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        found.append(() if parent < 0 else (*found[parent], token))
    return set(found[1:])


@pytest.mark.parametrize("peer", PEERS)
@given(
    salt=st.integers(0, 50),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
    new_tokens=st.integers(1, 40),
    budget=st.integers(1, 20),
    tight=st.booleans(),
)
def test_they_write_what_plain_decoding_writes(peer, salt, prompt, new_tokens, budget, tight):
    """At the end of the model's positions, too; and never feed more than they may."""

    def follow(text: Sequence[int]) -> int:
        return hash((salt, *text[-2:])) % VOCABULARY

    text = list(prompt)
    for _ in range(new_tokens):
        text.append(follow(text))
    found, stats = decoded(follow, prompt, new_tokens, peer(budget), len(text) if tight else None)
    assert found == text
    assert all(fed <= budget for fed in stats.step_tokens) and sum(stats.accepted) == new_tokens - 1


@pytest.mark.parametrize("peer", PEERS)
def test_a_text_that_goes_in_circles_is_guessed(peer):
    circle = [3, 1, 4, 0, 5, 9, 2, 6]
    after = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    _, stats = decoded(lambda text: after.get(text[-1], 0), circle * 2, 64, peer(8))
    assert stats.tokens_per_step > 2.0


def after(drafter: Drafter, text: list[int]) -> set[tuple[int, ...]]:
    drafter.begin(text, len(text))
    return paths(drafter.draft(text, None).tree)


def test_prompt_lookup_takes_the_longest_match_and_the_latest_place_first():
    text = [1, 2, 3, 7, 0, 2, 3, 8, 0, 9, 3, 6, 0, 1, 2, 3]
    assert after(PromptLookupDrafter(2), text) == {(7,)}, "three tokens agree there"
    assert after(PromptLookupDrafter(3), text) == {(7,), (7, 0)}
    wide = after(PromptLookupDrafter(40), text)
    assert {(7,), (8,), (6,)} <= wide and (7, 0, 2, 3, 8) in wide
    assert after(PromptLookupDrafter(2), [2, 8, 2, 6, 2]) == {(6,)}, "the latest of two places"


def test_suffix_guesses_what_followed_most_often_and_by_the_longest_end_that_is_surest():
    often = [5, 1, 0, 5, 2, 0, 5, 2, 0, 5, 2, 0, 5]
    assert after(SuffixDrafter(3), often) == {(2,), (2, 0)}
    assert (1,) in after(SuffixDrafter(20), often)
    assert after(SuffixDrafter(2), [8, 5, 1, 9, 5, 2, 9, 5, 2, 8, 5]) == {(1,)}, "2 is commoner, but not after 8, 5"


def test_token_recycling_remembers_the_last_row_of_each_token_of_the_tree_too():
    drafter, logits = TokenRecyclingDrafter(4), torch.zeros(2, VOCABULARY)
    logits[0, [7, 8]], logits[1, [3, 4]] = torch.tensor([9.0, 8.0]), torch.tensor([9.0, 8.0])
    entries = read(logits).entries
    assert entries is not None
    drafter.learn_prompt([0, 1], 0, entries)
    assert paths(drafter.draft([0, 1], None).tree) == {(3,), (4,)}, "nothing is known of 3"
    tree = TokenTree(1)
    tree.add_path([3], "recycled")
    drafter.learn([0, 1, 5], Draft(tree), Readout([0, 0], entries[::-1].copy()), Verdict())
    assert paths(drafter.draft([1, 3], None).tree) == {(7,), (8,)}, "3 was rejected, and is known"
    assert paths(drafter.draft([0, 1], None).tree) == {(3,), (3, 7), (4,)}


@given(st.integers(0, 80))
def test_the_template_is_a_tree_of_the_likeliest_paths(size):
    paths = template(size)
    assert len(set(paths)) == len(paths) == size
    assert all(path[:-1] in paths[:place] or len(path) == 1 for place, path in enumerate(paths))
    assert all((*path[:-1], path[-1] - 1) in paths[:place] for place, path in enumerate(paths) if path[-1])


def test_chains_of_the_checkpoints_layer_are_verified(tmp_path: Path) -> None:
    """The same tokens as plain decoding, and as many drafted in each step as passes were asked for."""
    model, prompt = llama_with_mtp(tmp_path), torch.tensor([[3, 1, 4, 1, 5]])
    arguments = {"max_new_tokens": 30, "do_sample": False}
    make = functools.partial(Session, config=LookaheadConfig(), stats=Stats(), drafter=MtpChainDrafter(3))
    steps = list(model.generate(prompt, **arguments, custom_generate=custom_generate_for(make)))
    assert [token for step in steps for token in step.tokens] == model.generate(prompt, **arguments)[0, 5:].tolist()
    assert {step.fed for step in steps[1:]} == {4}
