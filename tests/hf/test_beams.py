"""Beam search through `lade.generate` against `model.generate`: texts, scores, origins of the beams, generator."""

import warnings

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from same_as_plain import PAPER, VOCABULARY, assert_same_beams, assert_same_cache, both
from transformers import LogitsProcessor, MistralConfig, MistralForCausalLM, StoppingCriteria
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import lade
from lade import LookaheadConfig, Memory, Stats, UnsupportedArgumentError
from lade.decoding.beams.logits import BeamRow
from lade.model.facts import CACHE
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.testing import toy_model


def windowed_mistral():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = MistralForCausalLM(
            MistralConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                sliding_window=7,
                initializer_range=0.5,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model.double().eval()


MODELS = {
    "llama": toy_model("llama"),
    "qwen3": toy_model("qwen3", attention="eager"),
    "gpt2": toy_model("gpt2"),
    "mistral": windowed_mistral(),
}
IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


def assert_same(model, ids=IDS, lookahead=PAPER, **arguments):
    return assert_same_beams(model, lookahead, input_ids=ids, **arguments)


configs = st.builds(
    LookaheadConfig,
    window=st.integers(0, 8),
    ngram=st.integers(2, 6),
    guesses=st.integers(0, 6),
    prompt_ngrams=st.booleans(),
)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@settings(max_examples=examples(24))
@given(
    family=st.sampled_from(sorted(MODELS)),
    config=configs,
    prompt=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12),
    num_beams=st.integers(2, 8),
    new_tokens=st.integers(1, 40),
    eos=st.sampled_from([None, 5, [3, 17, 40]]),
    sampling=st.sampled_from([{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.6, "top_k": 20}]),
    early_stopping=st.sampled_from([True, False, "never"]),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    processors=st.sampled_from(
        [
            {},
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 2},
            {"min_length": 20, "bad_words_ids": [[7], [9, 4]]},
            {"repetition_penalty": 0.8, "suppress_tokens": [1, 2]},
        ]
    ),
    data=st.data(),
)
def test_any_beam_search_is_that_of_transformers(
    family, config, prompt, num_beams, new_tokens, eos, sampling, early_stopping, length_penalty, processors, data
):
    stats = Stats()
    ours = assert_same(
        MODELS[family],
        torch.tensor([prompt]),
        config,
        stats=stats,
        seed=11,
        num_beams=num_beams,
        num_return_sequences=data.draw(st.integers(1, num_beams)),
        max_new_tokens=new_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        **sampling,
        **processors,
    )
    assert stats.new_tokens == len(ours.scores) and stats.generations == 1
    assert sum(stats.accepted) == stats.new_tokens - 1
    assert len(stats.accepted) == len(stats.step_tokens) == stats.steps


@pytest.mark.one_in(24)
@pytest.mark.parametrize("num_beams", [2, 4, 8])
@pytest.mark.parametrize("family", MODELS)
def test_one_pass_serves_several_beam_steps(family, num_beams):
    """A repeated prompt: what followed its tokens is in the recycled logits soon."""
    stats = Stats()
    assert_same(MODELS[family], num_beams=num_beams, max_new_tokens=100, stats=stats)
    assert stats.tokens_per_step > 1.2
    assert max(stats.accepted) >= 3
    assert 0 < stats.forward_s < stats.decode_s


@pytest.mark.one_in(4)
@pytest.mark.parametrize("config", [LookaheadConfig(0, 5, 7), LookaheadConfig(7, 5, 0), LookaheadConfig(0, 2, 0)])
def test_window_and_pool_can_be_left_out(config):
    stats = Stats()
    assert_same(MODELS["llama"], lookahead=config, num_beams=4, stats=stats)
    if not (config.window or config.guesses):
        assert stats.accepted == [1] * 39
        assert max(stats.step_tokens) <= 4, "nothing but the beams' own tokens"


def test_what_a_step_feeds_is_bounded_by_the_config():
    stats = Stats()
    num_beams, config = 3, LookaheadConfig(4, 4, 2)
    assert_same(MODELS["llama"], lookahead=config, num_beams=num_beams, stats=stats)
    played, pooled = (num_beams + config.window) * 3, num_beams * config.guesses * 3
    assert max(stats.step_tokens) <= num_beams + played + pooled


class Recorder(LogitsProcessor):
    """Sees every call, and bends the scores by what it has seen."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.tolist(), scores))
        return scores + 0.5 * (len(self.calls) % 3) * torch.arange(scores.shape[-1]).remainder(5)


class Twice(StoppingCriteria):
    """Ends a text that says the same token three times in a row."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] == input_ids[:, -2]) & (input_ids[:, -1] == input_ids[:, -3])


def test_a_processor_of_the_user_sees_the_same_calls():
    recorders = []
    for lookahead in (None, PAPER):
        recorders.append(Recorder())
        lade.generate(
            MODELS["llama"],
            IDS,
            lookahead=lookahead,
            num_beams=3,
            max_new_tokens=30,
            logits_processor=[recorders[-1]],
        )
    plain, ours = (recorder.calls for recorder in recorders)
    assert [texts for texts, _ in plain] == [texts for texts, _ in ours]
    torch.testing.assert_close([scores for _, scores in plain], [scores for _, scores in ours])


@pytest.mark.slow
def test_criteria_of_the_user():
    for model in MODELS.values():
        assert_same(model, num_beams=4, stopping_criteria=[Twice()], max_new_tokens=60, pad_token_id=0)


def test_beams_that_no_token_may_follow():
    """One token allowed at a time: all beams but one are impossible, and are asked about all the same."""
    allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 7 + 3) % VOCABULARY]}
    assert_same(MODELS["llama"], num_beams=4, max_new_tokens=20, **allowed)


def test_a_vocabulary_smaller_than_the_beams_need():
    model = toy_model(vocabulary=5)
    for sampling in ({}, {"do_sample": True}):
        assert_same(model, torch.tensor([[1, 2, 3]]), seed=5, num_beams=8, max_new_tokens=30, **sampling)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [1, 5])
def test_padding_on_the_left_is_taken_off(padding):
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), IDS], dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    for family in ("llama", "gpt2", "mistral"):  # eager attention gives NaN in plain decoding of padding in float64
        ours = assert_same(MODELS[family], ids, num_beams=3, attention_mask=mask, no_repeat_ngram_size=3)
        assert ours.past_key_values is None


@pytest.mark.parametrize("length", [5, 20, 30, 31])
def test_up_to_the_last_position(length):
    model = toy_model("gpt2", positions=32)
    ids = torch.arange(length)[None] % 9
    assert_same(model, ids, num_beams=4, max_new_tokens=33 - length)


def test_sequences_alone():
    for arguments in ({}, {"num_return_sequences": 3}):
        plain = MODELS["llama"].generate(IDS, num_beams=3, max_new_tokens=30, **arguments)
        ours = lade.generate(MODELS["llama"], IDS, num_beams=3, max_new_tokens=30, lookahead=PAPER, **arguments)
        assert torch.equal(ours, plain)


def test_the_three_ways_agree():
    model, arguments = MODELS["llama"], {"num_beams": 3, "max_new_tokens": 30}
    plain = model.generate(IDS, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lade.FallbackWarning)
        for ours in (
            lade.generate(model, IDS, **arguments),
            model.generate(IDS, custom_generate=lade.decode, lookahead=PAPER, **arguments),
            model.generate(IDS, custom_generate=lade.decoder(), **arguments),
            lade.generate(model, IDS, lookahead=None, **arguments),
        ):
            assert torch.equal(ours, plain)


def test_the_cache_that_is_given_back_is_that_of_the_running_beams():
    (plain, _), (ours, _) = both(MODELS["llama"], input_ids=IDS, num_beams=4, max_new_tokens=30)
    assert_same_cache(ours.past_key_values, plain.past_key_values)


def test_a_tree_cache_of_the_user_is_filled():
    cache = TreeCache()
    lade.generate(MODELS["llama"], IDS, num_beams=2, max_new_tokens=10, past_key_values=cache, lookahead=PAPER)
    assert cache.lengths == [IDS.shape[1] + 9] * 2


@pytest.mark.slow
def test_what_the_beams_have_in_common_is_cached_once():
    """The cache must stay near the length of one text, not of as many as there are beams."""
    rows, slots = set(), []
    extend = EagerRunner.extend

    def watched(self, trees, held, cache):
        rows.add(len(cache.lengths))
        slots.append((cache.lengths[0], cache.lengths[0] - held[0]))
        return extend(self, trees, held, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerRunner, "extend", watched)
        assert_same(MODELS["llama"], num_beams=8, max_new_tokens=100)
    assert rows == {1}
    assert slots[-1][1] > IDS.shape[1] + 20, "the trunk does not grow"


def test_only_logits_that_some_beam_may_ask_for_are_held(monkeypatch):
    held = []

    def watched(self):
        kept = prune(self)
        held.append(len(self.branches.logits))
        assert all(self.branches.follows[node] for node in self.branches.logits)
        return kept

    prune = BeamRow.prune
    monkeypatch.setattr(BeamRow, "prune", watched)
    assert_same(MODELS["llama"], num_beams=4, max_new_tokens=60)
    assert 0 < max(held) < 60


def test_a_model_with_its_own_way_to_reorder_caches(monkeypatch):
    """Such a method is preferred by transformers, and knows nothing of a token tree."""

    def reorder(self, cache, beam_idx):
        cache.reorder_cache(beam_idx.flip(0))
        return cache

    plain = MODELS["llama"].generate(IDS, num_beams=3, max_new_tokens=20)
    monkeypatch.setattr(type(MODELS["llama"]), "_reorder_cache", reorder, raising=False)
    ours = lade.generate(MODELS["llama"], IDS, num_beams=3, max_new_tokens=20, lookahead=PAPER)
    assert torch.equal(ours, plain)


STREAMED = "num_beams=2 cannot be streamed"


class Quiet(BaseStreamer):
    def put(self, value):
        raise AssertionError("nothing may be streamed")

    def end(self):
        """Readers are let go all the same."""


@pytest.mark.parametrize("lookahead", ["auto", PAPER])
def test_beams_are_not_streamed(lookahead):
    model = MODELS["llama"]
    for refused in (
        lambda: lade.stream(model, IDS, num_beams=2, lookahead=lookahead),
        lambda: lade.generate(model, IDS, num_beams=2, lookahead=lookahead, streamer=Quiet()),
        lambda: model.generate(
            IDS, num_beams=2, custom_generate=lade.decoder(streamer=Quiet()), lookahead=lookahead, max_new_tokens=5
        ),
    ):
        with pytest.raises(lade.UnsupportedArgumentError, match=STREAMED):
            refused()


def test_beams_that_the_checkpoint_asks_for_are_not_streamed():
    model = toy_model()
    model.generation_config.num_beams = 2
    with pytest.raises(lade.UnsupportedArgumentError, match=STREAMED):
        lade.stream(model, IDS, max_new_tokens=5)
    assert list(lade.stream(model, IDS, max_new_tokens=5, num_beams=1))


REFUSED = {
    CACHE: {CACHE: DynamicCache()},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "use_cache=False": {"use_cache": False},
    "guidance_scale": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_served_is_refused_before_any_work(said):
    model = toy_model(attention="eager")
    arguments = {"input_ids": IDS, "num_beams": 3, "max_new_tokens": 10, **REFUSED[said]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerRunner, "prefill", None)
        with pytest.raises(lade.UnsupportedArgumentError, match=f"(?s){said}.*lookahead="):
            lade.generate(model, lookahead=PAPER, **arguments)
    if said == CACHE:
        return  # transformers itself has no use for it
    with pytest.warns(lade.FallbackWarning, match=said):
        ours = lade.generate(model, lookahead="auto", **arguments)
    plain = model.generate(**arguments)
    if arguments.get("return_dict_in_generate"):
        ours, plain = ours.sequences, plain.sequences
    assert torch.equal(ours, plain)


def test_an_error_on_the_way_leaves_stats_of_what_was_done():
    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == IDS.shape[1] + 4:
                raise RuntimeError("the user's own")
            return scores

    stats = Stats()
    with pytest.raises(RuntimeError, match="the user's own"):
        arguments = {"num_beams": 2, "max_new_tokens": 10, "logits_processor": [Failing()]}
        lade.generate(MODELS["llama"], IDS, lookahead=PAPER, stats=stats, **arguments)
    assert stats.new_tokens == 5 and sum(stats.accepted) == 4


@pytest.mark.parametrize(("name", "config"), [("budget", {"budget": 8}), ("memory", {"memory": Memory()})])
def test_what_only_the_adaptive_method_knows_is_refused(name, config):
    with pytest.raises(UnsupportedArgumentError, match=f"^{name} with num_beams"):
        lade.generate(MODELS["llama"], input_ids=IDS, num_beams=2, max_length=12, lookahead=LookaheadConfig(**config))
