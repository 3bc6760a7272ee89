"""What a run reports of itself: sums that stay right however long it is, and the share of drafts that were accepted."""

import logging
import random
import time
from collections import Counter

import pytest
import torch
from pretend import cost_of_passes

import lade
from lade.announcements import announce, announced_if_slow, contention
from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.stats import KEPT_STEPS, Stats, Step, Surroundings
from lade.testing import toy_model


def step(fed, sources, index=1, seconds=0.5):
    return Step(index, list(range(len(sources))), sources, fed, seconds)


def ran(sizes):
    """Stats of one generation whose steps fed and emitted so many tokens, the last of them a bonus token each."""
    stats = Stats()
    stats.add(step(9, ["prefill"], index=0))
    for index, (fed, emitted) in enumerate(sizes, start=1):
        stats.add(step(fed, ["memory"] * (emitted - 1) + ["bonus"], index), forward_s=0.25)
    return stats


def test_totals_and_the_histogram_are_of_all_steps_and_the_lists_of_the_last_65536():
    draw = random.Random(0)
    sizes = [(draw.randint(4, 9), draw.randint(1, 3)) for _ in range(KEPT_STEPS + 1000)]
    stats = ran(sizes)
    assert KEPT_STEPS == 65_536 and stats.steps == len(sizes)
    assert list(zip(stats.step_tokens, stats.accepted, strict=True)) == sizes[1000:]
    assert stats.fed_tokens == sum(fed for fed, _ in sizes) != sum(stats.step_tokens)
    assert stats.accepted_tokens == sum(emitted for _, emitted in sizes) == stats.new_tokens - stats.generations
    assert stats.tokens_per_step == stats.accepted_tokens / len(sizes) != sum(stats.accepted) / len(sizes)
    assert stats.histogram == Counter(sizes)


def test_drafts_are_what_was_fed_beside_the_root_and_accepted_where_they_were_emitted():
    stats = Stats()
    stats.add(step(9, ["prefill"], index=0))
    assert stats.acceptance_rate == 0.0, "nothing was drafted"
    stats.add(step(5, ["window", "pool", "bonus"]))
    stats.add(step(5, ["memory", "memory"]))  # a stop rule cut the text after a draft: there is no bonus token
    stats.add(step(1, ["bonus"]))
    assert (stats.draft_tokens, stats.accepted_draft_tokens) == (8, 4)
    assert stats.acceptance_rate == 0.5
    beams = Stats()
    beams.add(step(12, ["beam", "beam"]))
    assert (beams.draft_tokens, beams.acceptance_rate, beams.tokens_per_step) == (0, 0.0, 2.0), "none of their own"


def test_merged_figures_are_those_of_one_run_after_the_other():
    sizes = [(4, 2), (6, 1), (4, 2), (1, 1)]
    both = ran(sizes)
    for each in (step(9, ["prefill"], index=0), step(4, ["pool", "bonus"])):
        both.add(each, forward_s=0.25)
    first, second = ran(sizes), ran([(4, 2)])
    second.fallback = "a reason"
    first.merge(second)
    assert first.fallback == "a reason"
    first.merge(Stats())
    assert first.fallback == "a reason", "the last one, not the last run's"
    both.fallback = first.fallback
    assert first == both and second == Stats(**{**vars(ran([(4, 2)])), "fallback": "a reason"})


def test_merging_keeps_the_lists_short_too(monkeypatch):
    monkeypatch.setattr("lade.stats.KEPT_STEPS", 3)
    stats = ran([(4, 2), (5, 1)])
    stats.merge(ran([(6, 3), (7, 1)]))
    assert (stats.step_tokens, stats.accepted) == ([5, 6, 7], [1, 3, 1])
    assert stats.tokens_per_step == pytest.approx(7 / 4) and sum(stats.histogram.values()) == 4


def test_explain_says_what_drafts_brought_what_passes_cost_what_stands_in_the_way_and_when_drafting_rested():
    stats = ran([(8, 3), (1, 1), (8, 2), (8, 2)])
    assert stats.explain().startswith("Drafted in 3 of 4 steps: drafts brought 1.0 tokens a step.")
    stats.surroundings = Surroundings({1: 0.5, 8: 0.55})
    assert "8 tokens takes 1.10 times as long as over one: about 0.9 times as fast" in stats.explain()
    poor = ran([(1, 1)] * 10)
    assert "lade.Memory()" in poor.explain()
    poor.surroundings = Surroundings(keeps_memory=True, contention="The machine is busy: ...")
    assert "lade.Memory()" not in poor.explain() and poor.explain().endswith("busy: ...")
    poor.setup_s = 7.0
    assert "7.0 s went into measuring" in poor.explain()
    poor.fallback = "GPTNeoForCausalLM has local attention"
    assert poor.explain().startswith("Running at normal speed: GPTNeoForCausalLM has local attention.")
    assert "Nothing to explain" in Stats().explain()
    stats = Stats()
    stats.add(Step(0, [1], ["prefill"], 3, 0.1))
    for index in range(1, 5):
        stats.add(Step(index, [1], ["bonus"], 1, 0.1, rested=index > 2), forward_s=0.1)
    assert stats.resting_steps == 2 and "Drafting rested in 2 steps" in stats.explain()
    other = Stats()
    other.merge(stats)
    assert other.resting_steps == 2


@pytest.mark.parametrize(
    ("threads", "cores", "load", "busy"),
    [(2, 2, 0.1, False), (2, 2, 2.0, False), (2, 2, 6.0, True), (1, 2, 9.0, False), (8, 2, 0.0, True)],
)
def test_threads_that_compete_for_cores_are_noticed(threads, cores, load, busy):
    assert bool(contention(threads, cores, load)) == busy
    assert ("torch.set_num_threads(1)" in contention(threads, cores, load)) == busy


def logger_at(level, monkeypatch, *, terminal=True):
    """A logger of this level, where what is printed is seen at a terminal, or not."""
    logger = logging.getLogger(f"lade.at_{level}")
    logger.setLevel(level)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    return logger


@pytest.mark.parametrize(("terminal", "level", "shown"), [(True, 30, 1), (False, 30, 0), (True, 20, 0)])
def test_an_announcement_is_one_line_where_nobody_sees_the_log(terminal, level, shown, capsys, monkeypatch):
    logger = logger_at(level, monkeypatch, terminal=terminal)
    announce(logger, "compiling")
    assert capsys.readouterr().err.count("lade: compiling\n") == shown


@pytest.mark.parametrize(
    ("takes_s", "level", "shown"), [(0.3, logging.WARNING, 1), (0.0, logging.WARNING, 0), (0.3, 20, 0)]
)
def test_slow_work_is_announced_unless_it_is_logged(monkeypatch, capsys, takes_s, level, shown):
    logger = logger_at(level, monkeypatch)
    with announced_if_slow(logger, "packing", after_s=0.1):
        time.sleep(takes_s)
    time.sleep(0.15)
    assert capsys.readouterr().err.count("lade: packing\n") == shown


def test_a_text_that_nothing_can_be_drafted_for_says_that_drafting_rests(monkeypatch):
    """Passes cost a plain one for each token more, so that hardly a draft pays."""
    dear = StepCost([1e-3 * knot for knot in KNOTS])
    cost_of_passes(monkeypatch, lambda batch: dear)
    model, stats = toy_model(), Stats()
    ids = torch.randint(1, 40, (1, 8), generator=torch.Generator().manual_seed(3))
    lade.generate(model, ids, max_new_tokens=120, do_sample=True, temperature=5.0, stats=stats)
    rested = stats.resting_steps
    assert 0 < rested <= stats.steps and "Drafting rested" in stats.explain()
    with lade.Engine(model) as engine:
        engine.add(ids, max_new_tokens=120, do_sample=True, temperature=5.0).result(60)
        assert engine.snapshot().resting_steps > 0
