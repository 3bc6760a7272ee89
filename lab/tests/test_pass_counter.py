"""Figures of transformers' own methods, from the passes they made."""

import pytest

from lade_lab.harness.arms import Meter, Pass


def test_what_a_pass_emitted_is_by_how_much_the_cache_grew_until_the_next_one():
    meter = Meter(None)
    meter.begin, meter.end = 10.0, 16.0
    meter.passes = [Pass(0, 5, 10.5, 11.0), Pass(5, 4, 12.0, 12.5), Pass(8, 4, 13.0, 13.5), Pass(9, 1, 14.0, 15.0)]
    stats = meter.stats(prompt_tokens=5, new_tokens=6)
    assert (stats.generations, stats.new_tokens, stats.steps) == (1, 6, 3)
    assert (stats.step_tokens, stats.accepted) == ([4, 4, 1], [3, 1, 1])
    assert (stats.fed_tokens, stats.accepted_tokens) == (9, 5)
    assert stats.histogram == {(4, 3): 1, (4, 1): 1, (1, 1): 1}
    assert (stats.draft_tokens, stats.accepted_draft_tokens) == (6, 2)
    assert (stats.prefill_s, stats.decode_s, stats.forward_s) == pytest.approx((2.0, 4.0, 2.0))


def test_a_text_of_one_token_has_no_steps():
    meter = Meter(None)
    meter.begin, meter.end = 10.0, 11.0
    meter.passes = [Pass(0, 5, 10.5, 10.75)]
    stats = meter.stats(prompt_tokens=5, new_tokens=1)
    assert (stats.generations, stats.new_tokens, stats.steps, stats.tokens_per_step) == (1, 1, 0, 0.0)
    assert (stats.prefill_s, stats.decode_s, stats.forward_s) == (1.0, 0.0, 0.0)
