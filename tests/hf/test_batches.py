"""Batches through `lade.generate` against `model.generate`: left-padded prompts, rows that end when they end."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import hooks_of
from pretend import cost_of_passes
from same_as_plain import (
    CONFIGS,
    MODELS,
    PAD,
    PAPER,
    PROMPTS,
    VOCABULARY,
    assert_same_tokens,
    padded,
    processing,
    random_texts,
)
from spies import answered, failing, watched
from transformers import GenerationConfig

import lade
from lade import LookaheadConfig, Memory, Stats, TreeCache, UnsupportedArgumentError
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.controller import Controller
from lade.hf.sampling import Draws
from lade.model.facts import CACHE
from lade.model.runner import EagerRunner
from lade.testing import toy_model
from lade_lab.fakes import nearly_flat_cost


def assert_same(model, lookahead=PAPER, **arguments):
    """Plain's ids and generator; returns the ids."""
    return assert_same_tokens(model, lookahead, **{"pad_token_id": PAD, **arguments}).tolist()


def lengths_of(ids, width, eos):
    """New tokens of each row, its end of sequence included."""
    new = [row[width:] for row in ids]
    return [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in new]


@settings(max_examples=examples(36))
@given(
    family=st.sampled_from(sorted(MODELS)),
    config=CONFIGS,
    texts=PROMPTS,
    new_tokens=st.integers(1, 40),
    eos=st.sampled_from([[5], [3, 17, 40]]),
    sampling=st.sampled_from(
        [
            {},
            {"do_sample": True},
            {"do_sample": True, "temperature": 0.5, "top_k": 10},
            {"do_sample": True, "num_return_sequences": 2, "top_p": 0.8},
        ]
    ),
    seed=st.integers(0, 1000),
)
def test_any_batch_is_plains_batch(family, config, texts, new_tokens, eos, sampling, seed):
    stats, prepared = Stats(), padded(texts)
    arguments = {"max_new_tokens": new_tokens, "eos_token_id": eos, **sampling}
    ids = assert_same(MODELS[family], config, seed=seed, stats=stats, **prepared, **arguments)
    assert stats.generations == len(ids) == len(texts) * sampling.get("num_return_sequences", 1)
    assert stats.new_tokens == sum(lengths_of(ids, prepared["input_ids"].shape[1], eos))
    assert sum(stats.accepted) == stats.new_tokens - stats.generations
    assert len(stats.accepted) == len(stats.step_tokens) == stats.steps


def of_its_row(batch, input_ids):
    """For `prefix_allowed_tokens_fn`: what may follow depends on the row's number."""
    return [token for token in range(VOCABULARY) if (token + int(input_ids[-1]) + batch) % 3]


tokens = st.integers(0, VOCABULARY - 1)
options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 25), "eos_token_id": st.lists(tokens, min_size=1, max_size=3, unique=True)},
    optional={
        **processing(VOCABULARY),
        "encoder_repetition_penalty": st.sampled_from([0.7, 1.3]),
        "encoder_no_repeat_ngram_size": st.integers(1, 2),
        "prefix_allowed_tokens_fn": st.just(of_its_row),
        "top_p": st.just(0.7),
        "typical_p": st.just(0.6),
    },
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")
@settings(max_examples=examples(60))
@given(texts=PROMPTS, config=CONFIGS, arguments=options, repeats=st.integers(1, 3), seed=st.integers(0, 50))
def test_processors_are_asked_row_by_row(texts, config, arguments, repeats, seed):
    if "do_sample" in arguments:
        arguments["num_return_sequences"] = repeats
    torch.manual_seed(seed)
    try:
        MODELS["llama"].generate(pad_token_id=PAD, **padded(texts), **arguments)
    except (RuntimeError, ValueError):  # constraints leave no token, be it in a row that has ended
        return
    assert_same(MODELS["llama"], config, seed=seed, **padded(texts), **arguments)


# --- padding, rows that end, rows that are alike ---------------------------------------------------------------------


def test_padding_is_inferred_as_transformers_does():
    ids = padded(random_texts(3, 9, 6))["input_ids"]
    assert_same(MODELS["llama"], input_ids=ids, max_new_tokens=20)
    without = assert_same(MODELS["llama"], input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
    masked = assert_same(MODELS["llama"], **padded(random_texts(3, 9, 6)), max_new_tokens=20)
    assert without != masked, "here the padding was text"


@pytest.mark.parametrize("budget", [None, 16])
def test_padding_is_neither_fed_nor_seen(budget):
    """The embedding of the padding is poisoned; plain decoding of each row alone tells what must come out."""
    model, texts = toy_model(seed=1), random_texts(4, 11, 7)
    arguments = {"max_new_tokens": 30, "suppress_tokens": [PAD]}  # nor written
    alone = [model.generate(torch.tensor([text]), **arguments)[0, len(text) :].tolist() for text in texts]
    with torch.no_grad():
        model.get_input_embeddings().weight[PAD] = torch.nan
    config = PAPER if budget is None else LookaheadConfig(budget=budget)
    output = lade.generate(model, **padded(texts), pad_token_id=PAD, lookahead=config, **arguments)
    assert output[:, 11:].tolist() == alone


def test_unused_slots_of_the_cache_are_seen_by_nobody(monkeypatch):
    """Before each pass all slots that hold nothing are poisoned: those behind all rows, and the ends of shorter rows.

    The latter lie within what attention reads, where a weight of zero makes zero of any number, but not of NaN.
    """

    def poison(runner, trees, rows, cache):
        for layer in cache.layers:
            for buffer in (layer.keys, layer.values):
                buffer[:, :, max(cache.lengths) :] = torch.nan
                for row, length in enumerate(cache.lengths):
                    buffer[row, :, length : max(cache.lengths)] = 1e6
        return sum(max(cache.lengths) - length for length in cache.lengths)

    poisoned = watched(monkeypatch, EagerRunner, "forward", poison)
    for family in ("llama", "gpt2"):
        assert_same(MODELS[family], **padded(random_texts(4, 11, 7)), max_new_tokens=40)
    assert sum(poisoned) > 0


@pytest.fixture(scope="module")
def ending():
    """Four prompts of which one text goes on to the end, and others end early."""
    texts = random_texts(6, 6, 6, 6)
    plain = MODELS["llama"].generate(torch.tensor(texts), max_new_tokens=40)[:, 6:]
    eos = [int(plain[0, 3]), int(plain[2, 9])]
    return {**padded(texts), "max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": PAD}


@pytest.fixture
def passes(monkeypatch):
    """Shapes of all that is fed, prefill first."""

    def shape(model, *args, **named):
        return tuple((args[0] if args else named["input_ids"]).shape)

    return watched(monkeypatch, type(MODELS["llama"]), "__call__", shape)


def test_rows_that_have_ended_are_not_fed(passes, ending):
    ids = assert_same(MODELS["llama"], **ending)
    assert 40 in (ends := lengths_of(ids, 6, ending["eos_token_id"])) and min(ends) < 10
    passes.clear()
    stats = Stats()
    lade.generate(MODELS["llama"], lookahead=PAPER, stats=stats, **ending)
    rows = [shape[0] for shape in passes[1:]]
    assert rows[0] == 4 and rows[-1] < 4 and rows == sorted(rows, reverse=True)
    assert sum(rows) == stats.steps


def test_prompts_are_fed_together_those_that_are_alike_once_and_those_of_very_unlike_lengths_apart(passes):
    short, long = random_texts(5, 9)
    texts = [long, short, long, random_texts(9, seed=3)[0], short]
    arguments = {**padded(texts), "max_new_tokens": 4, "pad_token_id": PAD}
    lade.generate(MODELS["llama"], lookahead=PAPER, **arguments)
    assert passes[0] == (3, 9) and passes[1][0] == 5
    passes.clear()
    lade.generate(MODELS["llama"], lookahead=PAPER, do_sample=True, num_return_sequences=3, **arguments)
    assert passes[0] == (3, 9) and passes[1][0] == 15
    passes.clear()
    assert_same(MODELS["llama"], **padded(random_texts(4, 90, 7, 84)), max_new_tokens=10)
    assert passes[0] == (4, 90), "plain decoding's own"
    assert passes[10:12] == [(2, 7), (2, 90)]


@pytest.mark.parametrize("lengths", [(6, 6, 6), (6, 3, 9)])
def test_rows_that_are_fed_together_need_no_joining(lengths, monkeypatch):
    failing(monkeypatch, TreeCache, "join", AssertionError("nothing to join"))
    assert_same(MODELS["llama"], **padded(random_texts(*lengths)), max_new_tokens=10)


@pytest.mark.parametrize("chunk", [1, 4])
def test_prefill_in_chunks(chunk):
    assert_same(MODELS["llama"], **padded(random_texts(3, 9, 9, 6)), prefill_chunk_size=chunk, max_new_tokens=20)


@pytest.mark.parametrize("width", [5, 20, 30, 31])
def test_up_to_the_last_position(width):
    model = toy_model("gpt2", positions=32)
    texts = random_texts(width, max(1, width - 7), max(1, width - 2))
    assert_same(model, **padded(texts), max_new_tokens=33 - width)


def test_each_row_takes_several_tokens_a_pass_at_its_own_pace():
    stats = Stats()
    assert_same(MODELS["llama"], **padded(random_texts(4, 11, 7)), max_new_tokens=200, stats=stats)
    assert stats.tokens_per_step > 1.3
    assert 0 < stats.forward_s < stats.decode_s and stats.prefill_s > 0


def test_seconds_are_counted_once_a_pass(monkeypatch):
    steps = watched(monkeypatch, Stats, "add", lambda stats, *of_pass, forward_s=0.0: of_pass)
    lade.generate(MODELS["llama"], **padded(random_texts(4, 7)), max_new_tokens=10, lookahead=PAPER)
    assert len(steps[0]) == len(steps[1]) == 2
    monkeypatch.undo()
    stats = Stats()
    for of_pass in steps:
        stats.add(*of_pass, forward_s=1e-3)
    assert stats.decode_s == pytest.approx(sum(of_pass[0].seconds for of_pass in steps[1:]))
    assert stats.forward_s == pytest.approx(1e-3 * (len(steps) - 1))
    assert stats.prefill_s == steps[0][0].seconds


def test_noise_is_dropped_when_the_last_row_has_used_it(monkeypatch):
    """Blocks are kept for as many tokens as the first row is ahead of the last one that goes on."""
    taken = answered(monkeypatch, Draws, "take", lambda _, draws, row: (len(draws.noise), draws))
    texts = random_texts(6, 6, 6)
    torch.manual_seed(0)
    first = MODELS["llama"].generate(torch.tensor(texts), do_sample=True, max_new_tokens=60)[:, 6:].tolist()
    ends = {token: lengths_of(first, 0, [token]) for token in range(VOCABULARY)}
    eos = next(token for token, lengths in ends.items() if min(lengths) < 10 and max(lengths) > 30)
    arguments = {"do_sample": True, "max_new_tokens": 60, "eos_token_id": eos}
    ids = assert_same(MODELS["llama"], LookaheadConfig(0, 2, 0), **padded(texts), **arguments)
    assert lengths_of(ids, 6, [eos]) == ends[eos]
    assert max(kept for kept, _ in taken) == 1 and not len(taken[0][1].noise), "here all rows go in step"


# --- drafting --------------------------------------------------------------------------------------------------------


def test_rows_share_the_memory_that_is_given():
    """The second row says what the first one has said, so it has much to gain."""
    memory, alone, together = Memory(), Stats(), Stats()
    ids = torch.tensor(random_texts(8) * 2)
    for shared, stats in ((None, alone), (memory, together), (memory, together)):
        config = LookaheadConfig(budget=16, memory=shared)
        lade.generate(MODELS["llama"], ids, max_new_tokens=60, lookahead=config, stats=stats)
    assert len(memory) > 60 and alone.steps > 1.2 * together.steps / 2


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("told", [{}, {"repetition_penalty": 1.1}, {"stopping_criteria": [lambda ids, scores: False]}])
def test_prompts_are_read_where_a_batch_finds_it_worth_it(read, told, monkeypatch):
    """Or where the memory outlasts it. A row by itself always does."""
    monkeypatch.setattr(Controller, "reads_logits", read)
    rows = watched(monkeypatch, AdaptiveDrafter, "learn_prompt", lambda drafter, *_: drafter)
    several, one = padded(random_texts(9, 4, 6)), padded(random_texts(9))
    for texts, memory, expected in ((several, None, 3 * read), (several, Memory(), 3), (one, None, 1)):
        rows.clear()
        assert_same(MODELS["llama"], LookaheadConfig(memory=memory), **texts, **told, max_new_tokens=6)
        assert len(set(rows)) == expected


def test_a_batch_goes_by_how_far_its_rows_are_and_an_engine_does_not(monkeypatch):
    """The caller waits for the slowest row; an engine has other requests for a place that gets free."""
    told = watched(monkeypatch, Controller, "decide", lambda controller, found, emitted=None: emitted)
    texts = random_texts(9, 4, 6)
    assert_same(MODELS["llama"], LookaheadConfig(), **padded(texts), max_new_tokens=6)
    assert told[0] == [1, 1, 1] and min(told[-1]) > 1
    told.clear()
    with lade.Engine(MODELS["llama"], max_rows=3) as engine:
        for handle in [engine.add(text, max_new_tokens=6, do_sample=False) for text in texts]:
            handle.result()
    assert told and not any(told)


def test_the_cost_of_a_pass_is_that_of_a_batch(monkeypatch, ending):
    asked, observed = [], []

    def cost_of(batch):
        asked.append(batch)
        cost = nearly_flat_cost()
        monkeypatch.setattr(cost, "observe", lambda size, seconds, prepared=False: observed.append((batch, size)))
        return cost

    cost_of_passes(monkeypatch, cost_of)

    def see(runner, trees, rows, cache):
        return (len(rows), max(map(len, trees)))

    largest = watched(monkeypatch, EagerRunner, "forward", see)
    assert_same(MODELS["llama"], "auto", **ending)
    assert asked[0] == 4 and asked == sorted(asked, reverse=True) and asked[-1] <= 2
    assert [size for _, size in observed] == [size for _, size in largest], "once a pass, by the largest tree"
    assert all(rows <= batch < 2 * max(rows, 2) for (batch, _), (rows, _) in zip(observed, largest, strict=True))


# --- what comes back, and what is refused ----------------------------------------------------------------------------


def test_the_end_of_sequence_pads_where_no_padding_is_given():
    texts = random_texts(6, 6, 6)
    eos = int(MODELS["llama"].generate(torch.tensor(texts), max_new_tokens=10)[1, 9])
    config = GenerationConfig(max_new_tokens=30, eos_token_id=eos)
    plain = MODELS["llama"].generate(torch.tensor(texts), generation_config=config)
    ours = lade.generate(MODELS["llama"], torch.tensor(texts), generation_config=config, lookahead=PAPER)
    assert torch.equal(ours, plain) and ours[1, -1] == eos


@pytest.mark.parametrize("way", ["lade.generate", "custom_generate"])
def test_a_cache_of_ones_own_has_no_rows_of_different_lengths(way):
    model, arguments = MODELS["llama"], {**padded(random_texts(4, 9)), "max_new_tokens": 8, "pad_token_id": PAD}
    cache = TreeCache()

    def ours(lookahead):
        if way == "lade.generate":
            return lade.generate(model, lookahead=lookahead, past_key_values=cache, **arguments)
        return model.generate(custom_generate=lade.decode, lookahead=lookahead, past_key_values=cache, **arguments)

    with pytest.raises(UnsupportedArgumentError, match=f"{CACHE} for a batch"):
        ours(PAPER)
    expected = model.generate(**arguments)
    with pytest.warns(lade.FallbackWarning, match=f"{CACHE} for a batch"):
        assert torch.equal(ours("auto"), expected)


@pytest.mark.parametrize("lookahead", [PAPER, "auto", None])
def test_a_batch_is_not_streamed(lookahead):
    for arguments in (padded(random_texts(4, 9)), {"input_ids": torch.ones(1, 3, dtype=torch.long), "do_sample": True}):
        more = {"num_return_sequences": 2} if "do_sample" in arguments else {}
        with pytest.raises(
            UnsupportedArgumentError, match="a batch of 2 rows cannot be streamed; stream one at a time"
        ):
            lade.stream(MODELS["llama"], lookahead=lookahead, max_new_tokens=5, **arguments, **more)


@pytest.mark.parametrize(("second", "said"), [([1, 1, 0], "that ends with 0"), ([0, 0, 0], "of zeros")])
def test_a_mask_that_leaves_no_text_to_continue(second, said):
    ids, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 1], second])
    with pytest.raises(UnsupportedArgumentError, match=f"an attention_mask {said}"):
        lade.generate(MODELS["llama"], ids, attention_mask=mask, max_new_tokens=5, lookahead=PAPER)


def test_an_error_leaves_nothing_broken():
    def fail(batch, input_ids):
        if len(input_ids) > 12:
            raise RuntimeError("user's own")
        return list(range(VOCABULARY))

    arguments = padded(random_texts(4, 9))
    with pytest.raises(RuntimeError, match="user's own"):
        lade.generate(MODELS["llama"], max_new_tokens=9, lookahead=PAPER, prefix_allowed_tokens_fn=fail, **arguments)
    assert not hooks_of(MODELS["llama"])
    assert_same(MODELS["llama"], **arguments, max_new_tokens=9)


def test_plain_batches_fill_stats_too(ending):
    ours, plain, fallen = Stats(), Stats(), Stats()
    ids = lade.generate(MODELS["llama"], lookahead=PAPER, stats=ours, **ending)
    lade.generate(MODELS["llama"], lookahead=None, stats=plain, **ending)
    with pytest.warns(lade.FallbackWarning):
        unserved = {"past_key_values": TreeCache(), **ending}
        MODELS["llama"].generate(custom_generate=lade.decode, stats=fallen, **unserved)
    lengths = lengths_of(ids.tolist(), 6, ending["eos_token_id"])
    for stats in (ours, plain, fallen):
        assert (stats.generations, stats.new_tokens) == (4, sum(lengths))
    assert plain.steps == fallen.steps == sum(lengths) - 4 and plain.accepted == [1] * plain.steps
    assert 0 < plain.forward_s <= plain.decode_s
