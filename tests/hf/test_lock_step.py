"""Batches whose rows are shown together, as plain decoding shows them: processors and criteria that users wrote."""

import functools

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from same_as_plain import CONFIGS, EVERYTHING, MODELS, PAD, PAPER, PROMPTS, assert_same_cache, padded, random_texts
from spies import watched
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers import SynthIDTextWatermarkingConfig as SynthID
from transformers.generation.streamers import BaseStreamer

import lade
from lade import LookaheadConfig, Stats
from lade.clock import Duration, ThreadClock
from lade.decoding import lock_step as lock_step_row
from lade.decoding.drafting.controller import Controller
from lade.model.runner import EagerRunner
from lade.testing import toy_model

ROUNDING = {"rtol": 1e-4, "atol": 1e-4}  # of float32, over a temperature


class Mixing(LogitsProcessor):
    """A row's scores depend on its number, on the other rows' scores and texts, and on how often it was asked."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append((input_ids.clone(), scores.clone()))
        rows = torch.arange(len(scores))[:, None] * torch.arange(scores.shape[1]).remainder(3)
        return scores + 0.3 * scores.roll(1, 0) - 0.1 * rows - 0.5 * (len(self.shown) + input_ids.sum()).remainder(2)


class Quorum(StoppingCriteria):
    """Ends rows by what the rows before them say, and the batch in the end."""

    def __init__(self, every):
        self.every, self.shown = every, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append((input_ids.clone(), scores[-1].clone() if scores else torch.zeros(1)))
        return (input_ids[:, -1] + input_ids.roll(1, 0)[:, -1]).remainder(self.every) == 0


class Listener(BaseStreamer):
    def __init__(self):
        self.shown = []

    def put(self, value):
        self.shown.append((value.clone(), torch.zeros(1)))

    def end(self):
        self.shown.append((torch.tensor([-1]), torch.zeros(1)))


def outcome(generate, seed, said, **arguments):
    """What comes back, what was shown to whom, and the generator's state."""
    listener = Listener() if said.get("streamed") else None
    processors = [Mixing()] if said.get("mixing") else []
    criteria = [Quorum(said["every"])] if said.get("every") else []
    arguments |= {"streamer": listener} if listener else {}
    arguments |= {"logits_processor": processors, "stopping_criteria": StoppingCriteriaList(criteria)}
    torch.manual_seed(seed)
    output = generate(pad_token_id=PAD, **arguments)
    shown = [each.shown for each in (*processors, *criteria, listener) if each]
    return output, shown, torch.get_rng_state()


def assert_same(model, lookahead=PAPER, *, seed=0, stats=None, said, **arguments):
    """Plain's output, calls in plain's order, and plain's generator; returns plain's output."""
    plain, plain_shown, plain_state = outcome(model.generate, seed, said, **arguments)
    generate = functools.partial(lade.generate, model, lookahead=lookahead, stats=stats)
    ours, our_shown, our_state = outcome(generate, seed, said, **arguments)
    assert type(ours) is type(plain)
    if not isinstance(plain, torch.Tensor):
        assert_same_cache(ours.past_key_values, plain.past_key_values, arguments.get("attention_mask"))
        torch.testing.assert_close((ours.scores, ours.logits), (plain.scores, plain.logits), **ROUNDING)
        plain, ours = plain.sequences, ours.sequences
    assert torch.equal(ours, plain) and torch.equal(our_state, plain_state)
    assert len(our_shown) == len(plain_shown)
    for ours_here, plain_here in zip(our_shown, plain_shown, strict=True):
        assert [ids.tolist() for ids, _ in ours_here] == [ids.tolist() for ids, _ in plain_here]
        our_scores, plain_scores = ([scores for _, scores in here] for here in (ours_here, plain_here))
        torch.testing.assert_close(our_scores, plain_scores, **ROUNDING)
    return plain


said = st.fixed_dictionaries(
    {"mixing": st.booleans(), "every": st.sampled_from([0, 5, 17]), "streamed": st.booleans()}
).filter(lambda said: any(said.values()))
options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 30)},
    optional={
        "eos_token_id": st.sampled_from([[5], [3, 17, 40]]),
        "do_sample": st.just(True),
        "temperature": st.sampled_from([0.4, 0.9]),
        "repetition_penalty": st.just(1.3),
        "return_dict_in_generate": st.just(True),
        "output_scores": st.booleans(),
        "output_logits": st.just(True),
        "max_time": st.just(1000.0),
    },
)


@pytest.mark.filterwarnings("ignore:.*temperature.*:UserWarning", "ignore:.*generation flags.*:UserWarning")
@settings(max_examples=examples(40))
@given(
    family=st.sampled_from(sorted(MODELS)),
    config=CONFIGS,
    texts=PROMPTS,
    said=said,
    arguments=options,
    repeats=st.integers(1, 2),
    seed=st.integers(0, 100),
)
def test_rows_are_shown_together(family, config, texts, said, arguments, repeats, seed):
    if "do_sample" in arguments:
        arguments["num_return_sequences"] = repeats
    else:
        arguments.pop("temperature", None)
    assert_same(MODELS[family], config, seed=seed, said=said, **padded(texts), **arguments)


CRITERION = {"every": 997}  # which ends nothing
MIXING = {"mixing": True}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("config", [PAPER, LookaheadConfig(budget=16)], ids=["paper", "budget"])
def test_each_row_looks_ahead_at_its_own_pace(config):
    """So they need as many passes as the slowest row needs alone, whatever each is shown."""
    texts, stats, alone = random_texts(4, 9, 6), Stats(), []
    assert_same(MODELS["llama"], config, stats=stats, said=CRITERION, **padded(texts), max_new_tokens=150)
    for text in texts:
        alone.append(Stats())
        lade.generate(MODELS["llama"], torch.tensor([text]), lookahead=config, max_new_tokens=150, stats=alone[-1])
    slowest = max(each.steps for each in alone)
    assert slowest < 135 and stats.steps / len(texts) < 1.1 * slowest
    assert stats.generations == 3 and stats.new_tokens == 450 and sum(stats.accepted) == 447
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert 0 < stats.forward_s < stats.decode_s and stats.prefill_s > 0


def test_what_is_chosen_against_the_argmax_is_verified_in_the_tree_too():
    """A processor that forbids the likeliest token: then a branch of the tree is the text, or nothing is."""
    stats, texts = Stats(), padded(random_texts(4, 9))
    assert_same(MODELS["llama"], LookaheadConfig(budget=24), stats=stats, said=MIXING, **texts, max_new_tokens=200)
    assert stats.accepted_draft_tokens > 0


def test_padding_after_the_end_of_a_row_costs_no_passes_of_its_own(monkeypatch):
    """Scores of rows that have ended are the model's, after padding that it is fed."""
    texts = random_texts(6, 6, 6)
    first = MODELS["llama"].generate(torch.tensor(texts), max_new_tokens=80)[:, 6:]
    eos = int(first[0, 9])

    def see(runner, trees, held, cache):
        return [len(tree) - own for tree, own in zip(trees, held, strict=True)]

    sizes = watched(monkeypatch, EagerRunner, "extend", see)
    stats, arguments = Stats(), {**padded(texts), "max_new_tokens": 80, "eos_token_id": eos, **EVERYTHING}
    ids = assert_same(MODELS["llama"], LookaheadConfig(budget=8), stats=stats, said={}, **arguments)
    new = ids[:, 6:]
    lengths = [int((row == eos).nonzero()[0]) + 1 if eos in row else 80 for row in new]
    assert min(lengths) <= 10 and max(lengths) > 40
    assert stats.new_tokens == sum(lengths), "padding does not count"
    assert len(sizes) < 0.9 * max(lengths) and max(map(max, sizes)) <= 8


def test_a_row_that_is_far_ahead_waits(monkeypatch):
    monkeypatch.setattr(lock_step_row, "MOST_HELD", 4)
    held = watched(monkeypatch, EagerRunner, "extend", lambda runner, trees, own, cache: max(own))
    config, texts = LookaheadConfig(budget=6), random_texts(4, 9, 6)
    assert_same(MODELS["llama"], config, said=CRITERION, **padded(texts), max_new_tokens=100)
    assert 4 < max(held) < 4 + 6


@pytest.mark.parametrize("width", [20, 30, 31])
def test_up_to_the_last_position(width):
    model = toy_model("gpt2", positions=32)
    texts = random_texts(width, max(1, width - 7), max(1, width - 2))
    for said in (MIXING, CRITERION):
        assert_same(model, said=said, **padded(texts), max_new_tokens=33 - width)


def test_watermarks_that_remember_all_texts():
    """Transformers' own, whose state is that of the batch."""
    config = SynthID(keys=[1, 2, 3], ngram_len=3, context_history_size=16)
    arguments = {**padded(random_texts(4, 9)), "max_new_tokens": 30, "do_sample": True}
    first = assert_same(MODELS["llama"], said={}, watermarking_config=config, **arguments)
    assert not torch.equal(first, assert_same(MODELS["llama"], said={}, **arguments))


class Broken(Mixing):
    def __call__(self, input_ids, scores):
        if len(self.shown) == 9:
            raise RuntimeError("user's own")
        return super().__call__(input_ids, scores)


def test_an_error_of_a_users_own_reaches_the_user():
    listener, stats = Listener(), Stats()
    arguments = {**padded(random_texts(4, 9)), "pad_token_id": PAD, "max_new_tokens": 20, "streamer": listener}
    with pytest.raises(RuntimeError, match="user's own"):
        lade.generate(MODELS["llama"], lookahead=PAPER, logits_processor=[Broken()], stats=stats, **arguments)
    assert listener.shown[-1][0].tolist() == [-1], "nobody waits for its end"
    assert stats.new_tokens == 18


def test_a_streamer_of_a_single_row_complains_as_in_plain_decoding(letters):
    for way in (MODELS["llama"].generate, lambda **rest: lade.generate(MODELS["llama"], lookahead=PAPER, **rest)):
        with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
            way(**padded(random_texts(4, 9)), streamer=TextStreamer(letters), max_new_tokens=5)


def test_what_a_pass_yielded_is_learned_with_what_it_fed_and_took(monkeypatch):
    """Which is known when no further token is served by it. A pass over roots alone yields a token, and no more."""
    told, looked = [], []

    def observe(budget, fed, emitted, seconds, forward_s, *, rows, prepared):
        told.append((fed, emitted, rows))
        budget._skipping = None

    def skip_drafting(budget):
        if budget._skipping is None:
            budget._skipping = len(looked) % 2 == 0  # every other pass feeds roots alone
            looked.append(not budget._skipping)
        return budget._skipping

    monkeypatch.setattr(Controller, "observe", observe)
    monkeypatch.setattr(Controller, "skip_drafting", skip_drafting)
    texts = padded([[5, 6, 7] * 4, [8, 9] * 6])
    assert_same(MODELS["llama"], LookaheadConfig(), said=CRITERION, **texts, max_new_tokens=60)
    wide = [emitted for fed, emitted, _ in told if fed > 1]
    assert {rows for _, _, rows in told} == {2} and len(told) == len(looked)
    assert {emitted for fed, emitted, _ in told if fed == 1} == {1.0} and max(wide) > 1.0


@pytest.mark.parametrize("said", [{}, CRITERION], ids=["on their own", "shown together"])
def test_sizes_of_batches_are_chosen_without_the_waiting_for_a_processor(said, monkeypatch):
    usual = ThreadClock.since

    def busy(clock, start):
        took = usual(clock, start)
        return Duration(took.wall_s + 100.0, took.running_s)

    def see(budget, fed, emitted, seconds, forward_s, **_):
        return forward_s, seconds

    monkeypatch.setattr(ThreadClock, "since", busy)
    told = watched(monkeypatch, Controller, "observe", see)
    stats, texts = Stats(), padded(random_texts(4, 9))
    assert_same(MODELS["llama"], LookaheadConfig(), stats=stats, said=said, **texts, max_new_tokens=8)
    assert told and all(0.0 < forward_s <= seconds < 50.0 for forward_s, seconds in told)
    assert stats.decode_s > stats.forward_s > 100.0
