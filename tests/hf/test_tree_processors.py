"""Choices made for all nodes at once, on the device: the tokens, and the generator, of choices made one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend import NO_CUDA, chosen_at_once
from same_as_plain import CONFIGS, assert_same_tokens
from spies import failing, watched
from test_sampling import MODELS
from transformers import LogitsProcessorList
from transformers.generation import logits_process

import lade
from lade import LookaheadConfig
from lade.hf import processors as hf_row
from lade.hf.batch_rules import ROW_WISE_PROCESSORS
from lade.hf.processors import (
    TEXT_FREE_PROCESSORS,
    BatchedChooser,
    ProcessedChooser,
    Record,
    Transcript,
    are_text_free,
    direct_call,
    prefers_batched,
)
from lade.hf.sampling import LoneSampler

MADE = {
    "EpsilonLogitsWarper": (0.02,),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
    "MinPLogitsWarper": (0.1,),
    "SuppressTokensLogitsProcessor": ([3, 5, 8],),
    "TemperatureLogitsWarper": (0.7,),
    "TopKLogitsWarper": (7,),
    "TopPLogitsWarper": (0.8,),
    "TypicalLogitsWarper": (0.6,),
}
warpers = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.6]),
        "top_k": st.sampled_from([1, 3, 20, 100]),
        "top_p": st.sampled_from([0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.05, 0.3]),
        "typical_p": st.sampled_from([0.4, 0.95]),
        "epsilon_cutoff": st.sampled_from([1e-3, 0.02]),
        "eta_cutoff": st.sampled_from([1e-3, 0.02]),
        "repetition_penalty": st.sampled_from([0.8, 1.2]),
    },
)
IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3], [0, 0, 7, 4, 5, 9, 2, 3], [0, 1, 2, 3, 4, 5, 1, 2]])
MASK = (IDS != 0).long()


def made(name: str) -> Any:
    return getattr(logits_process, name)(*MADE[name])


class Wanting:
    def __call__(self, input_ids, scores, more=1.0):
        return more * scores


def sampled(lookahead=LookaheadConfig(), **arguments):  # noqa: B008 - it is never changed
    """A sample of the first text by the first model."""
    lade.generate(MODELS["llama"], input_ids=IDS[:1], do_sample=True, lookahead=lookahead, **arguments)


@pytest.fixture
def at_once(monkeypatch):
    """As on a GPU; counts the choosers."""
    chosen_at_once(monkeypatch, True)
    return watched(monkeypatch, BatchedChooser, "__init__")


@pytest.mark.parametrize("name", sorted(TEXT_FREE_PROCESSORS))
def test_each_row_is_what_it_is_alone_whatever_the_text(name):
    assert name in ROW_WISE_PROCESSORS
    scores = 3 * torch.randn(20, 500, generator=torch.Generator().manual_seed(3))
    scores[4, :50], scores[5, 7] = -torch.inf, scores[5].max()
    before = scores.clone()
    together = made(name)(torch.empty(20, 0, dtype=torch.long), scores)
    assert torch.equal(scores, before), "the logits are read afterwards"
    for row, text in enumerate(torch.randint(0, 500, (20, 9))):
        assert torch.equal(together[row : row + 1], made(name)(text[None], scores[row : row + 1].clone()))


def test_only_those_are_asked_at_once():
    class Own(logits_process.TemperatureLogitsWarper):
        """A user's, who may have changed anything but the name."""

    Own.__name__ = "TemperatureLogitsWarper"
    for name in MADE:
        assert are_text_free(LogitsProcessorList([made(name)]))
    for other in (Own(0.5), logits_process.MinLengthLogitsProcessor(3, 1), lambda ids, scores: scores):
        assert not are_text_free(LogitsProcessorList([made("TopKLogitsWarper"), other]))
    assert are_text_free(LogitsProcessorList())
    assert prefers_batched(torch.device("cuda")) and not prefers_batched(torch.device("cpu"))


@settings(max_examples=examples(40))
@given(
    family=st.sampled_from(sorted(MODELS)),
    config=CONFIGS,
    warped=warpers,
    suppressed=st.sampled_from([None, [2, 9]]),
    new_tokens=st.integers(1, 40),
    eos=st.sampled_from([None, [5, 17]]),
    seed=st.integers(0, 1000),
    at_once=st.booleans(),
)
def test_the_tokens_and_the_generator_are_plains(family, config, warped, suppressed, new_tokens, eos, seed, at_once):
    model = MODELS[family]
    arguments = {"max_new_tokens": new_tokens, "eos_token_id": eos, "suppress_tokens": suppressed, **warped}
    with pytest.MonkeyPatch.context() as patched:
        chosen_at_once(patched, at_once)
        assert_same_tokens(model, config, seed=seed, input_ids=IDS[:1], do_sample=True, **arguments)


def test_on_a_cpu_they_get_no_text_and_no_copy_of_the_logits(monkeypatch):
    def see(processor, input_ids, scores):
        return (input_ids.shape[1], scores.data_ptr())

    seen = watched(monkeypatch, logits_process.TemperatureLogitsWarper, "__call__", see)
    made = watched(monkeypatch, hf_row.TextFreeChooser, "__init__", lambda chooser, *_, **__: chooser)
    sampled(max_new_tokens=5, temperature=0.7)
    assert len(made) == 1 and [length for length, _ in seen] == [0] * 5
    logits = torch.randn(3, 20)
    made[0].bind(logits, [0, 0, 0], [1])(1)
    assert seen[-1][1] == logits[1].data_ptr()


def test_a_list_is_called_as_transformers_calls_it():
    """In its order; and one that wants more than it gets is refused in the same words."""
    ids, scores = torch.zeros(1, 4, dtype=torch.long), torch.randn(1, 30)
    processors = LogitsProcessorList(
        [made("TemperatureLogitsWarper"), made("MinPLogitsWarper"), lambda _, scores: -scores]
    )
    assert torch.equal(direct_call(processors)(ids, scores), processors(ids, scores))
    assert torch.equal(direct_call(LogitsProcessorList())(ids, scores), scores)
    wanting = LogitsProcessorList([Wanting()])
    with pytest.raises(ValueError, match="all the required parameters") as theirs:
        wanting(ids, scores)
    with pytest.raises(ValueError, match="all the required parameters") as ours:
        direct_call(wanting)(ids, scores)
    assert str(ours.value) == str(theirs.value)


def test_it_is_what_was_tried(at_once):
    sampled(max_new_tokens=5, temperature=0.7)
    assert len(at_once) == 1
    least = {"min_new_tokens": 3, "eos_token_id": 7}
    sampled(max_new_tokens=5, **least)
    assert len(at_once) == 1, "how long the text is must be asked node by node"
    more = {"return_dict_in_generate": True, "output_scores": True}
    sampled(max_new_tokens=5, **more)
    assert len(at_once) == 1, "so must scores that are to be handed out"
    lade.generate(MODELS["llama"], input_ids=IDS[:1], max_new_tokens=5, do_sample=False)
    assert len(at_once) == 1, "the argmax needs no chooser"


@pytest.mark.slow
@pytest.mark.parametrize("config", [LookaheadConfig(7, 5, 7), LookaheadConfig(budget=24)])
def test_trees_are_those_of_choices_made_one_by_one(config, monkeypatch):
    """What is learned of a step is what the model says, not what was drawn."""
    seen = []
    for at_once in (True, False):
        chosen_at_once(monkeypatch, at_once)
        stats = lade.Stats()
        for seed in range(3):
            torch.manual_seed(seed)
            sampled(config, max_new_tokens=60, temperature=0.8, stats=stats)
        seen.append((stats.step_tokens, stats.accepted))
    assert seen[0] == seen[1]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("config", [LookaheadConfig(7, 5, 7), LookaheadConfig(budget=24), LookaheadConfig()])
@pytest.mark.parametrize("arguments", [{"temperature": 0.3}, {"top_p": 0.8, "temperature": 0.5}, {"top_k": 3}])
def test_batches(at_once, config, arguments):
    arguments = {"do_sample": True, "max_new_tokens": 40, "eos_token_id": 5, "pad_token_id": 0, **arguments}
    for seed in range(4):
        assert_same_tokens(MODELS["llama"], config, seed=seed, input_ids=IDS, attention_mask=MASK, **arguments)
    assert len(at_once) == 12


def test_greedy_with_processors(at_once):
    arguments = {"do_sample": False, "max_new_tokens": 40, "suppress_tokens": list(range(20, 60))}
    for config in (LookaheadConfig(7, 5, 7), LookaheadConfig(budget=24)):
        expected = assert_same_tokens(MODELS["qwen3"], config, input_ids=IDS[:1], **arguments)
    assert not torch.equal(expected, MODELS["qwen3"].generate(input_ids=IDS[:1], do_sample=False, max_new_tokens=40))
    assert len(at_once) == 2


def test_the_generator_is_plains_after_every_step(at_once):
    """Whoever reads along may draw, or save the state, between two steps."""
    states = {}

    def spying(input_ids, scores, **kwargs):
        states[input_ids.shape[1]] = torch.get_rng_state()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    arguments = {"do_sample": True, "temperature": 0.2, "max_new_tokens": 60}
    torch.manual_seed(1)
    expected = MODELS["llama"].generate(input_ids=IDS[:1], stopping_criteria=[spying], **arguments)
    torch.manual_seed(1)
    text, longest = IDS[0].tolist(), 0
    for step in lade.stream(MODELS["llama"], input_ids=IDS[:1], lookahead=LookaheadConfig(budget=24), **arguments):
        text, longest = [*text, *step.tokens], max(longest, len(step.tokens))
        assert torch.equal(torch.get_rng_state(), states[len(text)])
    assert text == expected[0].tolist() and longest > 1 and len(at_once) == 1


def test_the_engine_draws_at_once_too(at_once):
    model, arguments = MODELS["llama"], {"do_sample": True, "temperature": 0.4, "top_k": 10, "max_new_tokens": 30}
    with lade.Engine(model, max_rows=3) as engine:
        prompts = [IDS[0], IDS[1, 2:], IDS[2, 1:]]
        handles = [engine.add(ids, seed=seed, **arguments) for seed, ids in enumerate(prompts)]
        answers = [handle.result() for handle in handles]
    for seed, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        torch.manual_seed(seed)
        assert torch.equal(answer, model.generate(input_ids=ids[None], **arguments))
    assert len(at_once) == 3


def test_an_error_at_once_ends_one_request_alone(at_once, monkeypatch):
    def several(warper, input_ids, scores):
        return warper.top_k == 7 and len(scores) > 1

    failing(monkeypatch, logits_process.TopKLogitsWarper, "__call__", ValueError("broken"), where=several)
    arguments = {"do_sample": True, "max_new_tokens": 20, "lookahead": LookaheadConfig(7, 5, 7)}
    with lade.Engine(MODELS["llama"], max_rows=2) as engine:
        good, bad = (engine.add(IDS[0], seed=0, top_k=top_k, **arguments) for top_k in (9, 7))
        with pytest.raises(ValueError, match="broken"):
            bad.result()
        assert good.result().shape == (1, IDS.shape[1] + 20)
    with pytest.raises(ValueError, match="broken"):
        lade.generate(MODELS["llama"], input_ids=IDS[:1], top_k=7, **arguments)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_distribution_fails_where_it_is_reached(wrong):
    """A node that nobody gets to may hold anything."""
    transcript, logits = Transcript(torch.tensor([[1, 2]])), torch.zeros(3, 8)
    logits[2, 4] = wrong
    chooser = BatchedChooser(LogitsProcessorList(), transcript, sampler=LoneSampler(), record=Record())
    torch.manual_seed(0)
    ahead = chooser.choose_all(logits, [0, 1, 1])
    assert ahead.tolist()[2] == -1
    choose = chooser.bind(logits, ahead.tolist(), [1, 2])
    torch.manual_seed(0)
    expected = ProcessedChooser(LogitsProcessorList(), transcript, sampler=LoneSampler(), record=Record())
    one_by_one = expected.bind(logits, [], [1, 2])
    assert [choose(0), choose(1)] == ahead.tolist()[:2]
    torch.manual_seed(0)
    assert [one_by_one(0), one_by_one(1)] == ahead.tolist()[:2]
    for choosing in (choose, one_by_one):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            choosing(2)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("config", [LookaheadConfig(7, 5, 7), LookaheadConfig(budget=24), LookaheadConfig()])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("arguments", [{"temperature": 0.3}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}])
def test_on_a_gpu_the_tokens_and_the_generator_are_plains(config, rows, arguments):
    model = lade.testing.toy_model("llama", dtype=torch.float32).cuda()
    given = {"input_ids": IDS[:rows].cuda(), "attention_mask": MASK[:rows].cuda(), "do_sample": True}
    given |= {"max_new_tokens": 40, "eos_token_id": 5, "pad_token_id": 0, **arguments}
    for seed in range(4):
        torch.manual_seed(seed)
        expected, state = model.generate(**given), torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        ours = lade.generate(model, lookahead=config, **given)
        assert torch.equal(ours, expected) and torch.equal(torch.cuda.get_rng_state(), state)
