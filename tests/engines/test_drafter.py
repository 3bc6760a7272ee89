"""Drafts for other engines, without one: logits of a model are replayed."""

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from pretend import typed
from replay import logits, plainly, replay, toy, tree_of

import lade
from lade.decoding.kernels.layout import WIDTH

COUNT = 60


@cache
def plain(number, count=COUNT):
    return plainly(toy()[1][number], count)


def drafter(**settings):
    return lade.EngineDrafter(toy()[0].config.vocab_size, **{"price": 0.0, **settings})


def a_prompt(number=0):
    return toy()[1][number]


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("with_rows", [False, True])
def test_the_tokens_are_those_of_plain_decoding(trees, with_rows):
    result = replay(drafter(trees=trees), logits, a_prompt(), COUNT, with_rows=with_rows)
    assert result.tokens == plain(0)
    assert result.per_step > (1.6 if with_rows else 1.2)


def test_rows_teach_more_than_tokens_and_trees_hold_more_than_chains():
    steps = []
    for trees, with_rows in ((True, True), (False, True), (False, False)):
        replayed = [replay(drafter(trees=trees), logits, prompt, COUNT, with_rows=with_rows) for prompt in toy()[1]]
        steps.append(sum(each.steps for each in replayed))
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("trees", [False, True])
def test_a_cut_draft_teaches_what_the_same_shorter_draft_does(trees):
    cut, short = drafter(trees=trees), drafter(trees=trees)
    one = replay(cut, logits, a_prompt(), 40, most=8, fed=3)
    other = replay(short, logits, a_prompt(), 40, most=3)
    assert one.tokens == other.tokens == plain(0)[:40]
    for ours, theirs in zip(table_of(cut.memory), table_of(short.memory), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def table_of(memory):
    """The keys and rows of a memory, in order; its weights may differ in what was looked up."""
    young = memory.snapshot().young
    return young[np.lexsort((young[:, 1], young[:, 0]))]


def test_a_tree_s_mask_is_that_of_the_project_s_own_trees():
    mine = drafter(trees=True)
    for number in range(2):
        replay(mine, logits, a_prompt(number), 60, most=16)
    mine.begin("again", a_prompt())
    (draft,) = mine.propose(["again"], 16)
    assert len(set(draft.parents)) < len(draft) == 16  # it branches
    of_parents = [1.0, *draft.scores]
    assert all(of_parents[parent + 1] > score for parent, score in zip(draft.parents, draft.scores, strict=True))
    np.testing.assert_array_equal(draft.mask(), np.asarray(tree_of(a_prompt(), draft).closure()))


def test_a_shared_memory_serves_all_requests_and_one_of_a_tenant_only_that_tenant():
    mine, theirs = drafter(), lade.Memory()
    first = replay(mine, logits, a_prompt(), COUNT, begin={"memory": theirs})
    assert len(mine.memory) == 0 < len(theirs)
    stranger = replay(mine, logits, a_prompt(), COUNT)
    again = replay(mine, logits, a_prompt(), COUNT, begin={"memory": theirs})
    assert again.steps < first.steps == stranger.steps


def test_tokens_are_rows_that_are_sure_of_them_where_no_logits_come():
    mine = drafter()
    mine.begin("a", [1, 2, 3, 4, 5])
    assert not len(mine.memory.lookup([3, 4])[0])
    mine.learn("a", [6, 7])
    for text, following in (([3, 4], 5), ([4, 5], 6), ([5, 6], 7)):
        of_logits, of_text = mine.memory.lookup(text)
        assert {int(row[0]) & 0x1FFFFF for row in (*of_logits, *of_text)} == {following}
        assert len(of_logits) == 2


def test_requests_of_one_call_are_drafted_each_within_its_budget_and_never_what_is_excluded():
    mine = drafter()
    for name in "abc":
        mine.begin(name, [1, 2, 3] * 5)
    drafts = mine.propose(["c", "a", "b"], [0, 2, 5])
    assert [len(draft) for draft in drafts] == [0, 2, 5]
    assert [len(draft) for draft in mine.propose(["a", "b"], 3)] == [3, 3]
    mine = drafter(excluded=[3])
    mine.begin("a", [1, 2, 3] * 5)
    mine.begin("b", [2, 3, 1] * 5)
    assert all(3 not in draft.ids for draft in mine.propose(["a", "b"], 6))
    small = lade.EngineDrafter(3, memory=mine.memory, price=0.0)
    small.begin("a", [1, 2])
    assert all(token < 3 for token in small.propose(["a"], 6)[0].ids)


@pytest.mark.parametrize("trees", [False, True])
def test_a_higher_price_makes_shorter_drafts_and_what_rows_teach_longer_ones(trees):
    sizes = []
    for price in (0.0, 0.05, 0.3):
        mine = drafter(price=price, trees=trees)
        replay(mine, logits, a_prompt(), 60)
        sizes.append(replay(mine, logits, a_prompt(1), 60).fed)
    assert sizes[0] > sizes[1] > sizes[2]
    taught, untaught = drafter(price=0.08, trees=trees), drafter(price=0.08, trees=trees)
    for each, with_rows in ((taught, True), (untaught, False)):
        each.begin("a", [1, 2, 3])
        for _ in range(100):
            (draft,) = each.propose(["a"], 8)
            ids = [5, *draft.ids]
            rows = each.read_rows(torch.zeros(len(draft) + 1, 8)) if with_rows else None
            each.learn("a", [ids[0]], rows)
    assert taught._with_rows > 0.99
    assert untaught._with_rows < 0.01


def test_a_request_goes_on_where_its_tokens_were_not_drafted():
    """As after a preemption, whose drafts are dropped, or a step that was cut to one token."""
    mine = drafter()
    mine.begin("a", [1, 2, 3, 4, 1, 2])
    mine.propose(["a"], 4)
    mine.learn("a", [9, 8, 7])
    mine.learn("a", [6])
    assert list(mine.text("a")) == [1, 2, 3, 4, 1, 2, 9, 8, 7, 6]
    assert mine.propose(["a"], 4)[0].ids is not None
    mine.end("a")
    assert mine.requests == []


WRONG = {
    "unknown request": (lambda d: d.propose(["b"], 3), "request='b' is not known: begin it first"),
    "unknown to learn": (lambda d: d.learn("b", [1]), "request='b' is not known"),
    "unknown to end": (lambda d: d.end("b"), "request='b' is not known"),
    "begun twice": (lambda d: d.begin("a", [1]), "request='a' has begun already: end it first"),
    "empty prompt": (lambda d: d.begin("b", []), "prompt is float64 of shape .0.: give a flat list"),
    "prompt of texts": (lambda d: d.begin("b", ["x"]), "prompt is .* give a flat list of token ids"),
    "nested prompt": (lambda d: d.begin("b", [[1, 2]]), "prompt is int64 of shape .1, 2.: give a flat list"),
    "id too large": (lambda d: d.begin("b", [1, 10]), "prompt has the id 10: ids are from 0 to 9"),
    "negative id": (lambda d: d.learn("a", [-1]), "tokens has the id -1: ids are from 0 to 9"),
    "no tokens": (lambda d: d.learn("a", []), "tokens is float64"),
    "budgets too few": (lambda d: d.propose(["a"], []), "budgets has 0 entries for 1 requests"),
    "negative budget": (lambda d: d.propose(["a"], -1), "budgets has -1: give whole numbers"),
    "half a budget": (lambda d: d.propose(["a"], [0.5]), "budgets has 0.5: give whole numbers"),
    "rows of logits": (lambda d: d.learn("a", [1], np.zeros((1, 10), np.float32)), "rows are float32 of shape .1, 10."),
    "rows as lists": (lambda d: d.learn("a", [1], [[1] * WIDTH]), "rows are list: give int32"),
    "too many rows": (lambda d: d.learn("a", [1], np.zeros((4, WIDTH), np.int32)), "rows has 4, where 1 to 3 are"),
    "too few rows": (lambda d: d.learn("a", [3, 1, 2], np.zeros((1, WIDTH), np.int32)), "rows has 1, where 3 to 3 are"),
    "logits of a batch": (lambda d: d.read_rows(torch.zeros(1, 2, 3)), "logits are torch.float32 of shape .1, 2, 3."),
    "whole numbers": (lambda d: d.read_rows(torch.zeros(2, 3).int()), "logits are torch.int32"),
    "fed nothing": (lambda d: d.observe(0, 1, 1.0), "fed=0 is not valid"),
    "emitted": (lambda d: d.observe(1, -1, 1.0), "emitted=-1 is not valid"),
    "no time": (lambda d: d.observe(1, 1, 0.0), "seconds=0.0 is not valid"),
    "endless": (lambda d: d.observe(1, 1, float("nan")), "seconds=nan is not valid"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_and_changes_nothing(case):
    call, message = WRONG[case]
    mine = lade.EngineDrafter(10, price=0.0)
    mine.begin("a", [1, 2, 3, 1, 2, 3, 1, 2])
    (draft,) = mine.propose(["a"], 2)
    assert draft.ids == [3, 1]
    with pytest.raises(lade.InputError, match=message):
        call(mine)
    assert mine.requests == ["a"]
    mine.learn("a", [3, 1, 2], np.zeros((3, WIDTH), np.int32))  # the draft is still there


@pytest.mark.parametrize("settings", [{"vocabulary": 0}, {"vocabulary": 2.5}, {"price": -1.0}, {"price": float("inf")}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(lade.ConfigError, match=next(iter(settings))):
        lade.EngineDrafter(**{"vocabulary": 10, **settings})


def test_a_chain_s_nodes_are_the_likeliest_children():
    """The first of each node's children in a tree is the next of the chain, as far as the tree has it."""
    chain, tree = drafter(), drafter(trees=True)
    for each in (chain, tree):
        replay(each, logits, a_prompt(), 60, with_rows=False, most=0)
        each.begin("again", a_prompt())
    (one,), (other,) = chain.propose(["again"], 12), tree.propose(["again"], 60)
    assert len(one) == 12
    node, firsts = -1, []
    while node in other.parents:
        node = other.parents.index(node)
        firsts.append(other.ids[node])
    assert len(firsts) >= 3
    assert firsts[:12] == one.ids[: len(firsts)]


def test_the_example_engine_yields_the_same_tokens_in_fewer_passes(capsys, monkeypatch):
    folder = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(folder))
    typed(monkeypatch, "own_engine.py")
    runpy.run_path(str(folder / "own_engine.py"))
    said = capsys.readouterr().out
    assert said.startswith("the same tokens, 60 passes without drafts and ")
    assert int(said.split()[-3]) < 60
