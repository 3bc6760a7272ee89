"""Beam search through `lade.generate` against `model.generate`, of one prompt and of several."""

import functools

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from same_as_plain import PAD, PAPER, PAPERS, VOCABULARY, assert_same_beams, assert_same_cache, both, padded, windowed
from spies import answered, failing, watched
from transformers import LogitsProcessor
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import lade
from lade import FallbackWarning, LookaheadConfig, Memory, Stats, UnsupportedArgumentError
from lade.decoding.beams.logits import BeamLogits, BeamRow
from lade.model.facts import CACHE
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.testing import toy_model

MODELS = {family: toy_model(family) for family in ("llama", "qwen3", "gpt2")}
MODELS["mistral"] = windowed()
MODELS["qwen3-eager"] = toy_model("qwen3", attention="eager")  # which makes NaN of padding in float64
LLAMA = MODELS["llama"]
IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])
ONE = [IDS[0].tolist()]
RAGGED = [*ONE, [7, 8, 9], [4], [6, 5, 6, 5, 6]]
one_or_several = pytest.mark.parametrize("prompts", [ONE, RAGGED], ids=["one", "several"])


def assert_same(model, prompts=ONE, lookahead=PAPER, **arguments):
    return assert_same_beams(model, lookahead, **{**padded(prompts), "pad_token_id": PAD, "seed": 11, **arguments})


prompts_of_any_length = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@settings(max_examples=examples(32))
@given(
    family=st.sampled_from(sorted(MODELS)),
    config=PAPERS,
    prompts=st.lists(prompts_of_any_length, min_size=1, max_size=4),
    num_beams=st.integers(2, 6),
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
            {"encoder_repetition_penalty": 1.5, "suppress_tokens": [1, 2]},
        ]
    ),
    data=st.data(),
)
def test_any_beam_search_is_that_of_transformers(
    family, config, prompts, num_beams, new_tokens, eos, sampling, early_stopping, length_penalty, processors, data
):
    stats, prompts = Stats(), prompts[:1] if family == "qwen3-eager" else prompts
    arguments = {"num_beams": num_beams, "num_return_sequences": data.draw(st.integers(1, num_beams))}
    arguments |= {"max_new_tokens": new_tokens, "eos_token_id": eos, "early_stopping": early_stopping}
    arguments |= {"length_penalty": length_penalty, **sampling, **processors}
    ours = assert_same(MODELS[family], prompts, config, stats=stats, **arguments)
    assert stats.generations == len(prompts)
    assert stats.new_tokens == len(prompts) * len(ours.scores)
    assert sum(stats.accepted) == stats.new_tokens - stats.generations
    assert len(stats.accepted) == len(stats.step_tokens) == stats.steps
    assert stats.steps % len(prompts) == 0


@pytest.mark.parametrize("way", [lade.generate, lade.decode])
def test_plain_searches_are_counted_in_the_same_way(way):
    """Without a guess every step of every prompt takes a pass."""
    ours, plain = Stats(), Stats()
    call = (
        functools.partial(LLAMA.generate, custom_generate=way) if way is lade.decode else functools.partial(way, LLAMA)
    )
    for stats, lookahead in ((ours, LookaheadConfig(0, 2, 0)), (plain, None)):
        given = {"num_beams": 3, "max_new_tokens": 20, "num_return_sequences": 2}
        call(lookahead=lookahead, stats=stats, **padded(RAGGED), **given)
    assert plain.generations == ours.generations == len(RAGGED)
    assert plain.new_tokens == ours.new_tokens == 20 * len(RAGGED)
    assert plain.accepted == ours.accepted


@pytest.mark.one_in(12)
@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_prompts_that_finish_at_different_times(early_stopping, sampling):
    first = LLAMA.generate(**padded(RAGGED), num_beams=3, max_new_tokens=30, pad_token_id=0)[:, 8:]
    arguments = {"eos_token_id": [int(first[0, 4]), int(first[1, 17])], "early_stopping": early_stopping}
    ours = assert_same(LLAMA, RAGGED, num_beams=3, do_sample=sampling, **arguments)
    written = (ours.beam_indices >= 0).sum(dim=1).tolist()
    assert len(set(written)) > 1, "all ended at once"


@pytest.fixture
def passes(monkeypatch):
    """For each pass over trees its rows, and how much of them the cache held."""

    def see(runner, trees, held, cache):
        return (list(cache.lengths), list(held))

    return watched(monkeypatch, EagerRunner, "extend", see)


@pytest.mark.one_in(8)
@one_or_several
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral"])
def test_one_pass_serves_several_beam_steps_of_all_prompts(family, prompts, passes):
    """Repeated prompts: what followed their tokens is in the recycled logits soon."""
    stats = Stats()
    assert_same(MODELS[family], prompts, num_beams=4, max_new_tokens=100, stats=stats)
    assert {len(lengths) for lengths, _ in passes} == {len(prompts)}, "a row for each prompt, not for each beam"
    assert stats.steps == len(passes) * len(prompts)
    assert stats.tokens_per_step > 1.2
    sizes = set(stats.step_tokens[: len(prompts)])
    assert len(sizes) > 1 or len(prompts) == 1, "every row is said to feed what the largest does"
    assert 0 < stats.forward_s < stats.decode_s


@pytest.mark.slow
def test_rows_keep_to_their_own_length(passes):
    """What the beams of a prompt have in common is cached once, and no row has slots for another's padding."""
    ours = assert_same(LLAMA, [[1, 2, 3], list(range(1, 40))], num_beams=4, max_new_tokens=100)
    trunks = [[length - held for length, held in zip(*each, strict=True)] for each in passes]
    assert all(short < long for short, long in trunks)
    assert trunks[-1][0] > 3 + 20 and trunks[-1][1] > 39 + 20, "the trunks do not grow"
    assert trunks[-1][0] < 3 + len(ours.scores)


def test_what_the_model_said_of_one_prompt_is_guessed_behind_another(monkeypatch):
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    first = int(LLAMA.generate(**padded(prompts[1:]), num_beams=2, max_new_tokens=1)[0, -1])
    prompts[0].append(first)  # so what follows it is known when the second prompt's best beam takes it
    grown = answered(monkeypatch, BeamLogits, "_pass", lambda _, logits: logits.rows[1].branches)
    assert_same(LLAMA, prompts, LookaheadConfig(1, 3, 0), num_beams=2, max_new_tokens=2)
    (branches,) = grown
    assert max(branches.tree.depths) == 2, "nothing is guessed behind the first tokens"


@pytest.mark.one_in(4)
@one_or_several
@pytest.mark.parametrize("config", [LookaheadConfig(0, 5, 7), LookaheadConfig(7, 5, 0), LookaheadConfig(0, 2, 0)])
def test_window_and_pool_can_be_left_out(config, prompts):
    stats = Stats()
    assert_same(MODELS["gpt2"], prompts, config, stats=stats, num_beams=3)
    if not (config.window or config.guesses):
        assert stats.accepted == [1] * 39 * len(prompts)
        assert max(stats.step_tokens) <= 3, "nothing but the beams' own tokens"


def test_what_a_step_feeds_is_bounded_by_the_config():
    stats, num_beams, config = Stats(), 3, LookaheadConfig(4, 4, 2)
    assert_same(LLAMA, ONE, config, num_beams=num_beams, stats=stats)
    played, pooled = (num_beams + config.window) * 3, num_beams * config.guesses * 3
    assert max(stats.step_tokens) <= num_beams + played + pooled


def test_prompts_that_are_alike():
    for sampling in (False, True):
        ours = assert_same(LLAMA, [[1, 2, 3]] * 3, num_beams=3, do_sample=sampling)
        first, *others = ours.sequences
        assert all(torch.equal(first, other) for other in others) != sampling


class Recorder(LogitsProcessor):
    """Sees every call, and bends the scores of all rows by how many it has seen and by the first row's text."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.tolist(), scores))
        bend = (len(self.calls) + int(input_ids[0, -1])) % 3
        return scores + 0.5 * bend * torch.arange(scores.shape[-1]).remainder(5)


@one_or_several
def test_a_processor_of_the_user_sees_the_same_calls(prompts):
    recorders = Recorder(), Recorder()
    for lookahead, recorder in zip((None, PAPER), recorders, strict=True):
        given = {"num_beams": 3, "max_new_tokens": 30, "logits_processor": [recorder]}
        lade.generate(LLAMA, **padded(prompts), lookahead=lookahead, **given)
    plain, ours = (recorder.calls for recorder in recorders)
    assert [texts for texts, _ in plain] == [texts for texts, _ in ours]
    torch.testing.assert_close([scores for _, scores in plain], [scores for _, scores in ours])


def ended(input_ids, scores, **kwargs):
    """Ends a text that says the same token twice, and all texts once many have the same last token."""
    last = input_ids[:, -1]
    return (last == input_ids[:, -2]) | ((last == last.mode().values).sum() > 10)


@pytest.mark.slow
@one_or_several
def test_criteria_of_the_user(prompts):
    """A prompt whose texts have all been ended goes on until the others have been, too."""
    lengths = set()
    for family in ("llama", "qwen3", "gpt2"):
        criteria = {"stopping_criteria": [ended], "max_new_tokens": 60}
        ours = assert_same(MODELS[family], prompts, num_beams=4, **criteria)
        lengths |= {(family, int(row)) for row in (ours.beam_indices >= 0).sum(dim=1)}
    assert len(lengths) > 3 or prompts is ONE


@one_or_several
def test_beams_that_no_token_may_follow(prompts):
    """One token allowed at a time: all beams but one are impossible, and are asked about all the same."""
    allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * (batch + 2) + 3) % VOCABULARY]}
    assert_same(LLAMA, prompts, num_beams=4, max_new_tokens=20, **allowed)


@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4], [2, 2]]], ids=["one", "several"])
def test_a_vocabulary_smaller_than_the_beams_need(prompts):
    for sampling in ({}, {"do_sample": True}):
        assert_same(toy_model(vocabulary=5), prompts, num_beams=8, max_new_tokens=30, **sampling)


@pytest.mark.parametrize("lengths", [(5,), (20,), (31,), (20, 30), (31, 5), (31, 31), (1, 1, 28)])
def test_up_to_the_last_position(lengths):
    prompts = [[n % 9 + 1 for n in range(length)] for length in lengths]
    assert_same(toy_model("gpt2", positions=32), prompts, num_beams=4, max_new_tokens=33 - max(lengths))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("sequences", [1, 3])
@one_or_several
def test_sequences_alone_whichever_way(prompts, sequences, sampling):
    arguments = {**padded(prompts), "num_beams": 3, "num_return_sequences": sequences}
    arguments |= {"max_new_tokens": 12, "do_sample": sampling}
    torch.manual_seed(3)
    plain = LLAMA.generate(**arguments)
    for ours in (
        lambda: lade.generate(LLAMA, **arguments, lookahead=PAPER),
        lambda: LLAMA.generate(**arguments, custom_generate=lade.decode, lookahead=PAPER),
        lambda: LLAMA.generate(**arguments, custom_generate=lade.decoder(), lookahead=PAPER),
        lambda: lade.generate(LLAMA, **arguments, lookahead=None),
    ):
        torch.manual_seed(3)
        assert torch.equal(ours(), plain)


@pytest.mark.parametrize("prompts", [ONE, [[1, 2, 3], [7, 8, 9]]], ids=["one", "several"])
def test_the_cache_that_is_given_back_is_that_of_the_running_beams(prompts):
    (plain, _), (ours, _) = both(LLAMA, **padded(prompts), pad_token_id=PAD, num_beams=4, max_new_tokens=30)
    assert_same_cache(ours.past_key_values, plain.past_key_values)


def test_no_cache_with_slots_for_padding_is_given_back_and_one_of_the_user_is_filled():
    _, (ours, _) = both(LLAMA, **padded(RAGGED), pad_token_id=PAD, num_beams=2)
    assert ours.past_key_values is None and "past_key_values" not in ours
    cache = TreeCache()
    lade.generate(LLAMA, IDS, num_beams=2, max_new_tokens=10, past_key_values=cache, lookahead=PAPER)
    assert cache.lengths == [IDS.shape[1] + 9] * 2


def test_only_logits_that_some_beam_may_ask_for_are_held(monkeypatch):
    def look(_, row):
        assert all(row.branches.follows[node] for node in row.branches.logits)
        return len(row.branches.logits)

    held = answered(monkeypatch, BeamRow, "prune", look)
    assert_same(LLAMA, num_beams=4, max_new_tokens=60)
    assert 0 < max(held) < 60


def test_a_model_with_its_own_way_to_reorder_caches(monkeypatch):
    """Such a method is preferred by transformers, and knows nothing of a token tree."""

    def reorder(self, cache, beam_idx):
        cache.reorder_cache(beam_idx.flip(0))
        return cache

    plain = LLAMA.generate(IDS, num_beams=3, max_new_tokens=20)
    monkeypatch.setattr(type(LLAMA), "_reorder_cache", reorder, raising=False)
    ours = lade.generate(LLAMA, IDS, num_beams=3, max_new_tokens=20, lookahead=PAPER)
    assert torch.equal(ours, plain)


class Quiet(BaseStreamer):
    def put(self, value):
        raise AssertionError("nothing may be streamed")

    def end(self):
        """Readers are let go all the same."""


@pytest.mark.parametrize("lookahead", ["auto", PAPER])
def test_beams_are_not_streamed_even_if_the_checkpoint_asks_for_them(lookahead):
    asking, given = toy_model(), {"num_beams": 2, "lookahead": lookahead}
    asking.generation_config.num_beams = 2
    for refused in (
        lambda: lade.stream(LLAMA, IDS, **given),
        lambda: lade.generate(LLAMA, IDS, streamer=Quiet(), **given),
        lambda: LLAMA.generate(IDS, custom_generate=lade.decoder(streamer=Quiet()), max_new_tokens=5, **given),
        lambda: lade.stream(asking, IDS, max_new_tokens=5, lookahead=lookahead),
    ):
        with pytest.raises(UnsupportedArgumentError, match="num_beams=2 cannot be streamed"):
            refused()
    assert list(lade.stream(asking, IDS, max_new_tokens=5, num_beams=1))


ALIKE = [[1, 2, 3], [4, 5, 6]]
ATTENTIONS = {"output_attentions": True, "return_dict_in_generate": True}
REFUSED = [
    (ONE, CACHE, {CACHE: DynamicCache()}),
    (ONE, "output_attentions", ATTENTIONS),
    (ONE, "use_cache=False", {"use_cache": False}),
    (ONE, "guidance_scale", {"guidance_scale": 1.5}),
    (ALIKE, f"{CACHE} for a batch", {CACHE: TreeCache()}),
    (ALIKE, f"{CACHE} .* batch", {CACHE: DynamicCache()}),
    (ALIKE, "output_attentions", ATTENTIONS),
    (ALIKE, "attention_mask that ends with 0", {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}),
    (ALIKE, "attention_mask of zeros", {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}),
    (ALIKE, "position_ids", {"position_ids": torch.tensor([[0, 1, 2], [3, 4, 5]])}),
]


@pytest.mark.parametrize(("prompts", "said", "more"), REFUSED)
def test_what_cannot_be_served_is_refused_before_any_work(prompts, said, more):
    model = toy_model(attention="eager")
    arguments = {**padded(prompts), "num_beams": 3, "max_new_tokens": 10, **more}
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, EagerRunner, "prefill", AssertionError("it was begun"))
        with pytest.raises(UnsupportedArgumentError, match=f"(?s){said}.*lookahead="):
            lade.generate(model, lookahead=PAPER, **arguments)
    if said == CACHE or prompts is ALIKE:
        return  # transformers itself has no use for such a cache, and leaves all batches on a CPU to itself
    with pytest.warns(FallbackWarning, match=said):
        ours = lade.generate(model, lookahead="auto", **arguments)
    plain = model.generate(**arguments)
    if arguments.get("return_dict_in_generate"):
        ours, plain = ours.sequences, plain.sequences
    assert torch.equal(ours, plain)


@one_or_several
@pytest.mark.parametrize(("name", "config"), [("budget", {"budget": 8}), ("memory", {"memory": Memory()})])
def test_what_only_the_adaptive_method_knows_is_refused(name, config, prompts):
    with pytest.raises(UnsupportedArgumentError, match=f"^{name} with num_beams"):
        lade.generate(LLAMA, **padded(prompts), num_beams=2, max_length=12, lookahead=LookaheadConfig(**config))


@one_or_several
def test_an_error_on_the_way_leaves_stats_of_what_was_done(prompts):
    def fail(input_ids, scores):
        if input_ids.shape[1] == IDS.shape[1] + 4:
            raise RuntimeError("the user's own")
        return scores

    stats, arguments = Stats(), {"num_beams": 2, "max_new_tokens": 10, "logits_processor": [fail]}
    with pytest.raises(RuntimeError, match="the user's own"):
        lade.generate(LLAMA, **padded(prompts), lookahead=PAPER, stats=stats, **arguments)
    assert stats.new_tokens == 5 * len(prompts) and sum(stats.accepted) == 4 * len(prompts)


@pytest.mark.parametrize("through", ["lade.generate", "custom_generate"])
def test_on_a_cpu_auto_leaves_those_of_several_prompts_to_transformers(through, passes):
    """There lookahead is known to make them slower."""
    arguments, model = {**padded(RAGGED), "num_beams": 2, "max_new_tokens": 10}, toy_model()  # which is told of anew
    plain = model.generate(**arguments)
    with pytest.warns(FallbackWarning, match=f"num_beams=2 for {len(RAGGED)} prompts is slower"):
        if through == "custom_generate":
            ours = model.generate(**arguments, custom_generate=lade.decode, lookahead="auto")
        else:
            ours = lade.generate(model, **arguments, lookahead="auto")
    assert torch.equal(ours, plain) and not passes
