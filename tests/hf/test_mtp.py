"""Drafting with a checkpoint's MTP layer: the tokens of plain decoding, whatever the layer is worth."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mtp_toys import heard, llama, llama_with_mtp, load
from same_as_plain import assert_same_tokens
from transformers import AutoTokenizer

import lade
from lade import ConfigError, Grammar, LookaheadConfig, Memory, Stats, UnsupportedArgumentError
from lade.clock import Duration, WallClock
from lade.decoding.drafting.controller import FixedBudget
from lade.decoding.kernels.layout import MTP_WIDTH
from lade.decoding.loop import DecodeLoop
from lade.decoding.mtp import MtpHabits, MtpPasses, Predictions
from lade.embedded import model_path
from lade.hf import session
from lade.testing import toy_model

BUDGET = LookaheadConfig(budget=10, mtp=True)
NEW = 40
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
PROMPTS = {
    "input_ids": torch.tensor([[0, 0, 0, 3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [0, 0, 0, 0, 0, 0, 7, 9]]),
    "attention_mask": torch.tensor([[0] * 3 + [1] * 5, [1] * 8, [0] * 6 + [1] * 2]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its layer is random, so that hardly a prediction is accepted."""
    return llama_with_mtp(tmp_path_factory.mktemp("mtp"))


def users(input_ids, scores):
    """A user's processor: it forbids what stood four tokens before."""
    return scores.scatter(1, input_ids[:, -4:-3], float("-inf")) if input_ids.shape[1] > 4 else scores


WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.6},
    "penalised": {"repetition_penalty": 1.3},
    "sampled and penalised": {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2, "top_k": 9},
    "users": {"logits_processor": [users]},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "config", [BUDGET, LookaheadConfig(mtp=True), LookaheadConfig(budget=24, mtp=True, memory=Memory())]
)
def test_one_row(model, way, config):
    assert_same_tokens(model, config, input_ids=PROMPT, max_new_tokens=NEW, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", [BUDGET, LookaheadConfig()])
def test_batches(model, way, config):
    if way == "users":  # rows that others' processors see together go in lock-step
        config = LookaheadConfig(budget=10)
    end = int(model.generate(**PROMPTS, max_new_tokens=NEW)[1, 20])
    assert_same_tokens(model, config, **PROMPTS, max_new_tokens=NEW, eos_token_id=end, pad_token_id=0, **WAYS[way])


def test_float32_and_chunked_prompts(tmp_path):
    model = llama_with_mtp(tmp_path, dtype=torch.float32)
    assert_same_tokens(model, BUDGET, input_ids=PROMPT.repeat(1, 4), max_new_tokens=NEW, prefill_chunk_size=5)
    assert heard(model)


def test_streams_callables_caches_and_predictions(model):
    plain = model.generate(PROMPT, max_new_tokens=NEW)
    steps = list(lade.stream(model, PROMPT, max_new_tokens=NEW, lookahead=BUDGET))
    assert [token for step in steps for token in step.tokens] == plain[0, 8:].tolist()
    assert torch.equal(model.generate(PROMPT, max_new_tokens=NEW, custom_generate=lade.decode, lookahead=BUDGET), plain)
    cache = lade.TreeCache()
    first = lade.generate(model, PROMPT, max_new_tokens=20, lookahead=BUDGET, past_key_values=cache)
    rest = lade.generate(model, first, max_new_tokens=NEW - 20, lookahead=BUDGET, past_key_values=cache)
    assert torch.equal(rest, plain)
    stats, predicted = Stats(), {"prediction": plain[0, 8:].tolist()}
    ours = lade.generate(model, PROMPT, max_new_tokens=NEW, lookahead=BUDGET, stats=stats, **predicted)
    assert torch.equal(ours, plain) and stats.tokens_per_step > 4


def test_grammars(tmp_path):
    model, tokenizer = llama_with_mtp(tmp_path, vocabulary=4096), AutoTokenizer.from_pretrained(model_path())
    grammar = Grammar.regex("(ab|c)+-[0-9]{3}")
    for arguments in ({}, {"do_sample": True, "temperature": 1.3}):
        arguments |= {"max_new_tokens": 40, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        torch.manual_seed(1)
        plain = model.generate(PROMPT, logits_processor=[grammar.processor(tokenizer)], **arguments)
        torch.manual_seed(1)
        own = {"grammar": grammar, "tokenizer": tokenizer, "lookahead": BUDGET}
        assert torch.equal(lade.generate(model, PROMPT, **own, **arguments), plain)


@pytest.mark.parametrize("more", [{}, {"prefix_cache": 2**22}, {"max_rows": 2, "max_tokens": 150}])
def test_engines(model, more):
    """Rows join and leave, share prompts that are kept, and make room for each other."""
    asked = [(PROMPT[:, : 4 + number % 4], {"max_new_tokens": 20 + 5 * number}) for number in range(6)]
    asked += [(PROMPT.repeat(1, times), {"max_new_tokens": 20}) for times in (6, 7)]
    for _, arguments in asked[2::3]:
        arguments |= {"do_sample": True, "temperature": 0.7}
    with lade.Engine(model, **more) as engine:
        config = LookaheadConfig(budget=8, mtp=True)
        handles = [engine.add(ids, lookahead=config, seed=seed, **given) for seed, (ids, given) in enumerate(asked)]
        handles[1].cancel()
        for number, (handle, (ids, arguments)) in enumerate(zip(handles, asked, strict=True)):
            torch.manual_seed(number)
            assert number == 1 or torch.equal(handle.result(60), model.generate(ids, **arguments)), number


# ---------------------------------------------------------------------------------------------- what layers are worth


class KnowsTexts:
    """A layer that knows what comes, or says that something else does: predictions are never in doubt.

    Args:
        texts: what plain decoding writes; a row's text begins one of them.
        lies: whether to predict what does not come.
    """

    may_gather = False

    def __init__(self, texts, *, lies=False):
        self.texts, self.lies, self.known, self.trees = texts, lies, set(), {}

    def reading(self, rows):
        self.known |= set(map(id, rows))
        return self.watching()

    def watching(self):
        return torch.no_grad()

    def accept(self, rows, paths, fed):
        pass

    def knows(self, row):
        return id(row) in self.known

    def retain(self, rows):
        pass

    def leave(self, row):
        self.known.discard(id(row))

    def predict(self, rows, candidates):
        self.trees = {id(row): [()] for row in rows}
        return self._said([(row, ()) for row in rows])

    def look(self, rows, frontiers, candidates):
        asked = []
        for row, own in zip(rows, frontiers, strict=True):
            tree = self.trees[id(row)]
            paths = [(*tree[parent], token) for parent, token in zip(own.parents, own.tokens, strict=True)]
            tree += paths
            asked += [(row, path) for path in paths]
        return self._said(asked)

    def _said(self, asked):
        tokens, odds = np.full((len(asked), MTP_WIDTH), -1, np.int32), np.full((len(asked), MTP_WIDTH), -5.0)
        for place, (row, path) in enumerate(asked):
            before = [*row.tokens, *path]
            text = next((text for text in self.texts if text[: len(before)] == before), [])
            token = text[len(before)] if len(text) > len(before) else 1
            tokens[place, 0], odds[place, 0] = (token + 7) % 48 if self.lies else token, 9.0
        return Predictions(tokens, odds)


@pytest.fixture
def drafted_by(monkeypatch):
    """Has all texts be drafted with a layer of a test's own."""

    def use(layer, habits=None, fixed=3, clock=None):
        passes = MtpPasses(layer, habits or MtpHabits(), clock or WallClock(), fixed)
        monkeypatch.setattr("lade.hf.job._mtp_passes", lambda *_: passes)
        return passes

    return use


MODEL = toy_model("llama", dtype=torch.float64)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_layer_that_knows_the_text_yields_a_token_for_each_pass_and_one_more(drafted_by, depth):
    plain = MODEL.generate(PROMPT, max_new_tokens=120)
    drafted_by(KnowsTexts(plain.tolist()), fixed=depth)
    steps = list(lade.stream(MODEL, PROMPT, max_new_tokens=120, lookahead=LookaheadConfig(budget=depth + 1, mtp=True)))
    assert [token for step in steps for token in step.tokens] == plain[0, 8:].tolist()
    settled = steps[1 + len(steps) // 4 : -1]
    assert np.mean([len(step.tokens) == depth + 1 for step in settled]) > 0.9
    assert {source for step in settled for source in step.sources} <= {"mtp", "memory", "bonus"}


def test_rows_of_a_batch_share_passes_of_a_layer_that_knows_their_texts(drafted_by):
    plain, stats = MODEL.generate(**PROMPTS, max_new_tokens=120, pad_token_id=0), Stats()
    starts = [3, 0, 6]
    drafted_by(KnowsTexts([row[start:] for row, start in zip(plain.tolist(), starts, strict=True)]))
    config = LookaheadConfig(budget=4, mtp=True)
    ours = lade.generate(MODEL, **PROMPTS, max_new_tokens=120, pad_token_id=0, lookahead=config, stats=stats)
    assert torch.equal(ours, plain)
    assert stats.tokens_per_step > 3.5


class Gathers(KnowsTexts):
    """A layer whose passes take a made-up time with either part of the head."""

    def __init__(self, texts, clock, seconds):
        super().__init__(texts)
        self.clock, self.seconds = clock, seconds

    def predict(self, rows, candidates):
        self.gathered = candidates is not None
        self.clock.seconds = self.seconds[self.gathered]
        self.may_gather = True  # the first pass computes the whole head, as a hot list has to be made
        return super().predict(rows, candidates)


class Told(WallClock):
    """Whatever is timed has taken as long as it is told."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def since(self, moment):
        return Duration(self.seconds, self.seconds, 0)


@pytest.mark.parametrize("seconds", [{True: 0.1, False: 0.3}, {True: 0.3, False: 0.1}], ids=["part", "whole"])
def test_the_cheaper_part_of_the_head_is_computed(drafted_by, seconds):
    plain, clock = MODEL.generate(PROMPT, max_new_tokens=80), Told()
    layer, habits = Gathers(plain.tolist(), clock, seconds), MtpHabits()
    drafted_by(layer, habits, clock=clock)
    ours = lade.generate(MODEL, PROMPT, max_new_tokens=80, lookahead=LookaheadConfig(budget=4, mtp=True))
    assert torch.equal(ours, plain)
    assert layer.gathered == (seconds[True] < seconds[False])
    assert habits.gathered.seconds(1) == pytest.approx(seconds[True], rel=0.02)
    assert habits.cost.seconds(8) == pytest.approx(seconds[False], rel=0.02)


@pytest.mark.one_in(3)
def test_passes_are_no_price_of_nodes_and_their_rate_outlasts_texts(drafted_by, monkeypatch):
    plain, habits, observed = MODEL.generate(PROMPT, max_new_tokens=80), MtpHabits(), []
    passes = drafted_by(KnowsTexts(plain.tolist()), habits, clock=Told(0.5))
    assert passes.spent_s == 0.0

    class Observes:
        def decide(self, candidates, emitted):
            pass

        def observe(self, fed, emitted, seconds, forward_s, *, rows, prepared):
            observed.append((passes.spent_s, seconds, forward_s))

    monkeypatch.setattr(session, "DecodeLoop", lambda *args, **named: DecodeLoop(*args[:4], Observes(), **named))
    lade.generate(MODEL, PROMPT, max_new_tokens=80, lookahead=LookaheadConfig(budget=4, mtp=True))
    assert all(seconds == forward_s for spent_s, seconds, forward_s in observed if spent_s == 1.5)
    assert sum(spent_s == 1.5 for spent_s, *_ in observed) > 5, "three passes of half a second each"
    assert MtpPasses(KnowsTexts([]), habits, Told(0.5)).rate == passes.rate > 0.0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("budget", [8, 4, 16])
def test_a_layer_that_lies_costs_little_once_it_is_known(drafted_by, budget):
    """After 250 tokens steps yield at least 0.97 of those of the memory alone."""
    prompts = [torch.tensor([ids]) for ids in ([7, 7, 2, 30], [1, 2, 3, 4], [11, 5], [40, 3, 3])]
    known = [MODEL.generate(ids, max_new_tokens=240)[0].tolist() for ids in (PROMPT, *prompts)]

    def yielded(mtp):
        stats = Stats()
        for ids in prompts:
            config = LookaheadConfig(budget=budget, mtp=mtp)
            lade.generate(MODEL, ids, max_new_tokens=240, lookahead=config, stats=stats)
        return stats.tokens_per_step

    alone = yielded(mtp=False)
    passes = drafted_by(KnowsTexts(known, lies=True))
    lade.generate(MODEL, PROMPT, max_new_tokens=240, lookahead=LookaheadConfig(budget=budget, mtp=True))
    assert passes.weights.trust[0] < MtpHabits().weights.trust[0]
    assert yielded(mtp=True) >= 0.97 * alone


def test_promises_are_what_is_yielded(drafted_by, monkeypatch):
    """Once a layer is known, the scores of what is fed sum up to what steps yield, to within a tenth."""
    prompts = [PROMPT + shift for shift in range(4)]
    layer = SometimesWrong([text for ids in prompts for text in MODEL.generate(ids, max_new_tokens=200).tolist()])
    drafted_by(layer)
    promised = []

    def noting(budget, scores, alone=None):
        promised.append(sum(scores))
        return len(scores)

    monkeypatch.setattr(FixedBudget, "choose", noting)
    stats = Stats()
    for ids in prompts:
        stats.reset()
        promised.clear()
        lade.generate(MODEL, ids, max_new_tokens=200, lookahead=LookaheadConfig(budget=8, mtp=True), stats=stats)
    assert stats.tokens_per_step > 1.8
    assert np.mean(promised) == pytest.approx(stats.tokens_per_step, rel=0.1)


class SometimesWrong(KnowsTexts):
    """A layer that is right with a probability of 0.6, and says so."""

    def _said(self, asked):
        said = super()._said(asked)
        for place, (row, path) in enumerate(asked):
            if hash((len(row.tokens) + len(path), *row.tokens[:4])) % 5 > 2:
                said.tokens[place, 0] = (said.tokens[place, 0] + 5) % 48
        said.odds[:, 0] = np.log(0.6 / 0.4)
        return said


# ------------------------------------------------------------------------------------------------ what users may ask


def test_where_passes_do_not_pay_no_states_are_kept_until_shortly_before_the_next_trial(drafted_by):
    plain, layer, watched = MODEL.generate(PROMPT, max_new_tokens=400), KnowsTexts([], lies=True), []
    layer.watching = lambda: watched.append(1) or torch.no_grad()
    layer.reading = lambda rows: layer.known.update(map(id, rows)) or torch.no_grad()
    habits = MtpHabits(gains=[0.0] * 5, refused=1, tokens=3.0, seconds=1.0)
    habits.cost.observe(1, 10.0)
    drafted_by(layer, habits, fixed=None, clock=Told(10.0))
    steps = list(lade.stream(MODEL, PROMPT, max_new_tokens=400, lookahead=BUDGET))
    assert [token for step in steps for token in step.tokens] == plain[0, 8:].tolist()
    assert len(steps) > 150 and 0.1 < len(watched) / len(steps) < 0.5


@pytest.mark.parametrize("rows", [(True,), (False,), (True, True), (True, False)])
def test_while_drafting_is_paused_in_all_rows_no_states_are_kept(rows):
    layer, watched = KnowsTexts([]), []
    layer.watching = lambda: watched.append(1) or torch.no_grad()
    passes = MtpPasses(layer, MtpHabits(), WallClock())
    paused = [SimpleNamespace(drafter=SimpleNamespace(rests=rests, mtp=None)) for rests in rows]
    passes.draft(paused, [None] * len(rows))
    with passes.watching():
        assert bool(watched) == (not all(rows))


def test_transformers_own_argument_is_understood(model):
    plain, stats = model.generate(PROMPT, max_new_tokens=NEW), Stats()
    assert torch.equal(lade.generate(model, PROMPT, max_new_tokens=NEW, use_mtp=True, stats=stats), plain)
    assert stats.fallback is None and stats.steps
    with pytest.raises(ConfigError, match="use_mtp=True asks for"):
        lade.generate(model, PROMPT, max_new_tokens=9, use_mtp=True, lookahead=LookaheadConfig(mtp=False))


def test_without_a_layer_it_is_refused_with_the_reason(tmp_path):
    with pytest.raises(UnsupportedArgumentError, match="mtp=True cannot be used: LlamaForCausalLM is configured with"):
        lade.generate(MODEL, PROMPT, max_new_tokens=9, lookahead=BUDGET)
    assert "configured without MTP layers" in lade.supports(MODEL).mtp.reason and lade.supports(MODEL)
    llama(2).save_pretrained(tmp_path)
    model = load(tmp_path)
    model.config.num_mtp_layers = 1
    with pytest.raises(UnsupportedArgumentError, match="has no weights of MTP layers in its files"):
        lade.generate(model, PROMPT, max_new_tokens=9, lookahead=BUDGET)
    assert torch.equal(lade.generate(model, PROMPT, max_new_tokens=9), model.generate(PROMPT, max_new_tokens=9))


def test_where_it_is_not_run_the_memory_drafts_alone(model):
    beams = {"num_beams": 2, "max_new_tokens": 12}
    ours = lade.generate(model, PROMPT, lookahead=LookaheadConfig(), **beams)
    assert torch.equal(ours, model.generate(PROMPT, **beams))
    with pytest.raises(UnsupportedArgumentError, match="mtp with num_beams"):
        lade.generate(model, PROMPT, lookahead=LookaheadConfig(mtp=True), **beams)
    with pytest.raises(UnsupportedArgumentError, match="mtp=True cannot be used: rows in lock-step"):
        lade.generate(model, **PROMPTS, logits_processor=[users], lookahead=BUDGET, pad_token_id=0, max_new_tokens=9)


def test_switched_off_nothing_is_loaded(tmp_path):
    model = llama_with_mtp(tmp_path)
    lade.generate(model, PROMPT, max_new_tokens=9, lookahead=LookaheadConfig(mtp=False))
    assert not lade.supports(model).mtp.loaded and lade.supports(model).mtp.layers == 1
    lade.generate(model, PROMPT, max_new_tokens=9)
    assert lade.supports(model).mtp.loaded


def test_the_field_is_checked():
    with pytest.raises(ConfigError, match="give True, False, or None"):
        LookaheadConfig(mtp="yes")
    with pytest.raises(ConfigError, match="belongs to the adaptive method"):
        LookaheadConfig(window=3, mtp=True)
    assert LookaheadConfig(window=3, mtp=False).mtp is False
