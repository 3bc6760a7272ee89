"""Beam search of several prompts through `lade.generate` against `model.generate`."""

import warnings

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from same_as_plain import PAD, PAPER, VOCABULARY, assert_same_beams, assert_same_cache, both, padded
from transformers import LogitsProcessor, StoppingCriteria
from transformers.cache_utils import DynamicCache

import lade
from lade import FallbackWarning, LookaheadConfig, Memory, Stats, UnsupportedArgumentError
from lade.decoding.beams.logits import BeamLogits
from lade.model.facts import CACHE
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.testing import toy_model

MODELS = {family: toy_model(family) for family in ("llama", "qwen3", "gpt2")}
RAGGED = [[1, 2, 3, 4, 5, 1, 2, 3], [7, 8, 9], [4], [6, 5, 6, 5, 6]]


def assert_same(model, prompts, lookahead=PAPER, **arguments):
    return assert_same_beams(model, lookahead, **{**padded(prompts), "pad_token_id": PAD, "seed": 11, **arguments})


configs = st.builds(
    LookaheadConfig,
    window=st.integers(0, 8),
    ngram=st.integers(2, 6),
    guesses=st.integers(0, 6),
    prompt_ngrams=st.booleans(),
)
prompts_of_any_length = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@settings(max_examples=examples(14))
@given(
    family=st.sampled_from(sorted(MODELS)),
    config=configs,
    prompts=st.lists(prompts_of_any_length, min_size=2, max_size=4),
    num_beams=st.integers(2, 5),
    new_tokens=st.integers(1, 30),
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
            {"encoder_repetition_penalty": 1.5, "suppress_tokens": [1, 2]},
        ]
    ),
    data=st.data(),
)
def test_any_batch_of_beam_searches_is_that_of_transformers(
    family, config, prompts, num_beams, new_tokens, eos, sampling, early_stopping, length_penalty, processors, data
):
    stats = Stats()
    ours = assert_same(
        MODELS[family],
        prompts,
        config,
        stats=stats,
        num_beams=num_beams,
        num_return_sequences=data.draw(st.integers(1, num_beams)),
        max_new_tokens=new_tokens,
        eos_token_id=eos,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        **sampling,
        **processors,
    )
    assert stats.generations == len(prompts)
    assert stats.new_tokens == len(prompts) * len(ours.scores)
    assert sum(stats.accepted) == stats.new_tokens - stats.generations
    assert len(stats.accepted) == len(stats.step_tokens) == stats.steps
    assert stats.steps % len(prompts) == 0


@pytest.mark.parametrize("way", [lade.generate, lade.decode])
def test_plain_searches_are_counted_in_the_same_way(way):
    """Without a guess every step of every prompt takes a pass."""
    model, ours, plain = MODELS["llama"], Stats(), Stats()
    arguments = {**padded(RAGGED), "num_beams": 3, "max_new_tokens": 20, "num_return_sequences": 2}
    for stats, lookahead in ((ours, LookaheadConfig(0, 2, 0)), (plain, None)):
        if way is lade.generate:
            lade.generate(model, lookahead=lookahead, stats=stats, **arguments)
        else:
            model.generate(custom_generate=lade.decode, lookahead=lookahead, stats=stats, **arguments)
    assert plain.generations == ours.generations == len(RAGGED)
    assert plain.new_tokens == ours.new_tokens == 20 * len(RAGGED)
    assert plain.accepted == ours.accepted


@pytest.mark.one_in(12)
@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_prompts_that_finish_at_different_times(early_stopping, sampling):
    model = MODELS["llama"]
    first = model.generate(**padded(RAGGED), num_beams=3, max_new_tokens=30, pad_token_id=0)[:, 8:]
    arguments = {"eos_token_id": [int(first[0, 4]), int(first[1, 17])], "early_stopping": early_stopping}
    ours = assert_same(model, RAGGED, num_beams=3, do_sample=sampling, **arguments)
    written = (ours.beam_indices >= 0).sum(dim=1).tolist()
    assert len(set(written)) > 1, "all ended at once"


def passes_of(monkeypatch):
    """A list that comes to hold, for each pass over trees, its rows, and how much of them the cache held."""
    passes, extend = [], EagerRunner.extend

    def watched(self, trees, held, cache):
        passes.append((list(cache.lengths), list(held)))
        return extend(self, trees, held, cache)

    monkeypatch.setattr(EagerRunner, "extend", watched)
    return passes


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", MODELS)
def test_one_pass_serves_several_beam_steps_of_all_prompts(family, monkeypatch):
    passes, stats = passes_of(monkeypatch), Stats()
    assert_same(MODELS[family], RAGGED, num_beams=4, max_new_tokens=60, stats=stats)
    assert {len(lengths) for lengths, _ in passes} == {len(RAGGED)}, "a row for each prompt, not for each beam"
    assert stats.steps == len(passes) * len(RAGGED)
    assert stats.tokens_per_step > 1.2
    assert len(set(stats.step_tokens[: len(RAGGED)])) > 1, "every row is said to feed what the largest does"
    assert 0 < stats.forward_s < stats.decode_s


@pytest.mark.slow
def test_rows_keep_to_their_own_length(monkeypatch):
    """What the beams of a prompt have in common is cached once, and no row has slots for another's padding."""
    passes = passes_of(monkeypatch)
    ours = assert_same(MODELS["llama"], [[1, 2, 3], list(range(1, 40))], num_beams=4, max_new_tokens=100)
    trunks = [[length - held for length, held in zip(*each, strict=True)] for each in passes]
    assert all(short < long for short, long in trunks)
    assert trunks[-1][0] > 3 + 20 and trunks[-1][1] > 39 + 20, "the trunks do not grow"
    assert trunks[-1][0] < 3 + len(ours.scores)


def test_what_the_model_said_of_one_prompt_is_guessed_behind_another(monkeypatch):
    model, grown = MODELS["llama"], []
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    first = int(model.generate(**padded(prompts[1:]), num_beams=2, max_new_tokens=1)[0, -1])
    prompts[0].append(first)  # so what follows it is known when the second prompt's best beam takes it
    run = BeamLogits._pass

    def watched(self):
        run(self)
        grown.append(self.rows[1].branches)

    monkeypatch.setattr(BeamLogits, "_pass", watched)
    assert_same(model, prompts, LookaheadConfig(1, 3, 0), num_beams=2, max_new_tokens=2)
    (branches,) = grown
    assert max(branches.tree.depths) == 2, "nothing is guessed behind the first tokens"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("config", [LookaheadConfig(0, 5, 7), LookaheadConfig(7, 5, 0), LookaheadConfig(0, 2, 0)])
def test_window_and_pool_can_be_left_out(config):
    stats = Stats()
    assert_same(MODELS["gpt2"], RAGGED, config, stats=stats, num_beams=3)
    if not (config.window or config.guesses):
        assert stats.accepted == [1] * 39 * len(RAGGED)
        assert max(stats.step_tokens) <= 3, "nothing but the beams' own tokens"


def test_prompts_that_are_alike():
    for sampling in (False, True):
        ours = assert_same(MODELS["llama"], [[1, 2, 3]] * 3, num_beams=3, do_sample=sampling)
        first, *others = ours.sequences
        assert all(torch.equal(first, other) for other in others) != sampling


class Recorder(LogitsProcessor):
    """Sees every call, and bends the scores of all rows by what it has seen of the first."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.tolist(), scores))
        return scores + 0.5 * (int(input_ids[0, -1]) % 3) * torch.arange(scores.shape[-1]).remainder(5)


class Ended(StoppingCriteria):
    """Ends a text that says the same token twice, and all texts once many have the same last token."""

    def __call__(self, input_ids, scores, **kwargs):
        last = input_ids[:, -1]
        return (last == input_ids[:, -2]) | ((last == last.mode().values).sum() > 10)


def test_a_processor_of_the_user_sees_the_same_calls():
    recorders = []
    for lookahead in (None, PAPER):
        recorders.append(Recorder())
        lade.generate(
            MODELS["llama"],
            **padded(RAGGED),
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
    """A prompt whose texts have all been ended goes on until the others have been, too."""
    lengths = set()
    for family, model in MODELS.items():
        ours = assert_same(model, RAGGED, num_beams=4, stopping_criteria=[Ended()], max_new_tokens=60)
        lengths |= {(family, int(row)) for row in (ours.beam_indices >= 0).sum(dim=1)}
    assert len(lengths) > len(MODELS)


def test_beams_that_no_token_may_follow():
    allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * (batch + 2) + 3) % VOCABULARY]}
    assert_same(MODELS["llama"], RAGGED, num_beams=3, max_new_tokens=20, **allowed)


def test_a_vocabulary_smaller_than_the_beams_need():
    model = toy_model(vocabulary=5)
    for sampling in ({}, {"do_sample": True}):
        assert_same(model, [[1, 2, 3], [4], [2, 2]], num_beams=8, max_new_tokens=30, **sampling)


@pytest.mark.parametrize("lengths", [(20, 30), (31, 5), (31, 31), (1, 1, 28)])
def test_up_to_the_last_position(lengths):
    model = toy_model("gpt2", positions=32)
    prompts = [[n % 9 + 1 for n in range(length)] for length in lengths]
    assert_same(model, prompts, num_beams=4, max_new_tokens=33 - max(lengths))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("sequences", [1, 3])
def test_sequences_alone_whichever_way(sequences, sampling):
    model = MODELS["llama"]
    arguments = {**padded(RAGGED), "num_beams": 3, "max_new_tokens": 12, "do_sample": sampling}
    arguments |= {"num_return_sequences": sequences}
    torch.manual_seed(3)
    plain = model.generate(**arguments)
    for ours in (
        lambda: lade.generate(model, **arguments, lookahead=PAPER),
        lambda: model.generate(**arguments, custom_generate=lade.decode, lookahead=PAPER),
        lambda: model.generate(**arguments, custom_generate=lade.decoder(), lookahead=PAPER),
        lambda: lade.generate(model, **arguments, lookahead=None),
    ):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", lade.FallbackWarning)
            assert torch.equal(ours(), plain)


def test_the_cache_that_is_given_back_is_that_of_the_running_beams():
    (plain, _), (ours, _) = both(
        MODELS["llama"], **padded([[1, 2, 3], [7, 8, 9]]), pad_token_id=PAD, num_beams=4, max_new_tokens=30
    )
    assert_same_cache(ours.past_key_values, plain.past_key_values)
    _, (ours, _) = both(MODELS["llama"], **padded(RAGGED), pad_token_id=PAD, num_beams=2)
    assert ours.past_key_values is None and "past_key_values" not in ours, "it has no slots for padding"


REFUSED = {
    f"{CACHE} for a batch": {"past_key_values": TreeCache()},
    f"{CACHE} .* batch": {"past_key_values": DynamicCache()},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "use_cache=False": {"use_cache": False},
    "guidance_scale": {"guidance_scale": 1.5},
    "attention_mask that ends with 0": {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
    "attention_mask of zeros": {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])},
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2], [3, 4, 5]])},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_served_is_refused_before_any_work(said, monkeypatch):
    monkeypatch.setattr(EagerRunner, "prefill", None)
    arguments = {**padded([[1, 2, 3], [4, 5, 6]]), "num_beams": 3, "max_new_tokens": 10, **REFUSED[said]}
    with pytest.raises(UnsupportedArgumentError, match=f"(?s){said}.*lookahead="):
        lade.generate(toy_model(attention="eager"), lookahead=PAPER, **arguments)


@pytest.mark.parametrize(("name", "config"), [("budget", {"budget": 8}), ("memory", {"memory": Memory()})])
def test_what_only_the_adaptive_method_knows_is_refused(name, config):
    with pytest.raises(UnsupportedArgumentError, match=f"^{name} with num_beams"):
        lade.generate(
            MODELS["llama"], **padded(RAGGED), num_beams=2, max_length=12, lookahead=LookaheadConfig(**config)
        )


def test_an_error_on_the_way_leaves_stats_of_what_was_done():
    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 8 + 4:
                raise RuntimeError("the user's own")
            return scores

    stats = Stats()
    arguments = {"num_beams": 2, "max_new_tokens": 10, "logits_processor": [Failing()]}
    with pytest.raises(RuntimeError, match="the user's own"):
        lade.generate(MODELS["llama"], **padded(RAGGED), lookahead=PAPER, stats=stats, **arguments)
    assert stats.new_tokens == 5 * len(RAGGED) and sum(stats.accepted) == 4 * len(RAGGED)


@pytest.mark.parametrize("through", ["lade.generate", "custom_generate"])
def test_on_a_cpu_auto_leaves_them_to_transformers(through, monkeypatch):
    """There lookahead is known to make them slower."""
    monkeypatch.setattr(EagerRunner, "extend", None)
    arguments = {**padded(RAGGED), "num_beams": 2, "max_new_tokens": 10}
    call, model = lade.generate, toy_model()  # a model of its own, since a fallback is reported once per model
    if through == "custom_generate":
        call, arguments = type(model).generate, {**arguments, "custom_generate": lade.decode}
    with pytest.warns(FallbackWarning, match=f"num_beams=2 for {len(RAGGED)} prompts is slower"):
        ours = call(model, **arguments, lookahead="auto")
    plain = model.generate(**padded(RAGGED), num_beams=2, max_new_tokens=10)
    assert torch.equal(ours, plain)
