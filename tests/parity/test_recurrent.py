"""Recurrent and hybrid families: plain decoding's tokens, and its logits at every node."""

from __future__ import annotations

import pytest
from comparing import CONFIGS, Watch, assert_same, prompt
from families import RECURRENT_FAMILIES, Family

import lade
from lade.model.support.supports import RECURRENT
from lade.model.support.tree_check import worst_error

CASES = [pytest.param(case, id=str(case)) for case in RECURRENT_FAMILIES]


@pytest.mark.parametrize("case", CASES)
def test_it_writes_what_plain_decoding_writes(case: Family, watch: Watch) -> None:
    model = case.build()
    assert lade.supports(model)
    stats = assert_same(model, prompt(20), CONFIGS[:3], max_new_tokens=60)
    assert stats.tokens_per_step > 1, "no guess was ever accepted"
    assert watch.branched and watch.moved, "the trees were chains: nothing was put to the test"


@pytest.mark.parametrize("case", CASES)
def test_the_logits_at_every_node_are_those_of_plain_passes(case: Family) -> None:
    model = case.build(seed=2)
    assert worst_error(model, lade.supports(model).require()) < 1e-3  # transformers' functions compute in float32


def test_every_listed_family_is_tested() -> None:
    assert {case.model_type for case in RECURRENT_FAMILIES} == RECURRENT
