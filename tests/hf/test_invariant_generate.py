"""An invariant model in 16 bits: every token and every score is bit for bit that of plain `model.generate`."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pretend import short_trials
from same_as_plain import EVERYTHING, PAPER, padded

import lade
from lade.testing import toy_model

pytestmark = pytest.mark.by_processor

COLD = lade.LookaheadConfig(budget=24)
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def model():
    """Made once: no test here changes it."""
    with pytest.MonkeyPatch.context() as patch:
        short_trials(patch)
        yield lade.invariant(toy_model(dtype=HALF))


def prompt(length, seed=0):
    return torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(seed))


def assert_equal_bits(ours, plain):
    assert torch.equal(ours.sequences, plain.sequences)
    for one, other in ((ours.logits, plain.logits), (ours.scores, plain.scores)):
        assert len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("length", [5, 130])
def test_greedy(model, length):
    arguments = {"max_new_tokens": 70, "do_sample": False, **EVERYTHING}
    plain, stats = model.generate(prompt(length), **arguments), lade.Stats()
    for config in (PAPER, COLD):
        ours = lade.generate(model, input_ids=prompt(length), lookahead=config, stats=stats, **arguments)
        assert_equal_bits(ours, plain)
    assert stats.tokens_per_step > 1.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lade.PrecisionWarning")
def test_the_same_texts_part_without_it():
    """So that equality says something: the very model, before and after."""
    parted = [0, 0]
    model = toy_model(dtype=HALF, seed=3)
    for number in range(2):
        for seed in range(2):
            arguments = {"max_new_tokens": 60, "do_sample": False, **EVERYTHING}
            plain = model.generate(prompt(9, seed), **arguments)
            ours = lade.generate(model, input_ids=prompt(9, seed), lookahead=PAPER, **arguments)
            parted[number] += not all(map(torch.equal, ours.logits, plain.logits))
        lade.invariant(model)
    assert parted == [2, 0]


def test_samples(model):
    arguments = {"max_new_tokens": 50, "do_sample": True, "temperature": 0.8, **EVERYTHING}
    torch.manual_seed(5)
    plain = model.generate(prompt(20), **arguments)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert_equal_bits(lade.generate(model, input_ids=prompt(20), lookahead=PAPER, **arguments), plain)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rows", [1, 2])
def test_beams(model, rows):
    ids = torch.cat([prompt(50, seed) for seed in range(rows)])
    arguments = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, output_scores=True, **arguments)
    ours = lade.generate(model, input_ids=ids, lookahead=PAPER, output_scores=True, **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(ours.sequences_scores, plain.sequences_scores)
    assert len(ours.scores) == len(plain.scores) and all(map(torch.equal, ours.scores, plain.scores))


def test_a_batch_is_its_rows_and_each_row_is_its_prompt_alone(model):
    lengths, arguments = (61, 7, 90, 3), {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    rows = padded([prompt(length, length)[0].tolist() for length in lengths])
    plain = model.generate(**rows, **arguments, **EVERYTHING)
    ours = lade.generate(model, **rows, lookahead=PAPER, **arguments, **EVERYTHING)
    assert_equal_bits(ours, plain)
    for row, length in enumerate(lengths):
        alone = model.generate(prompt(length, length), **arguments, **EVERYTHING)
        assert torch.equal(alone.sequences[0, length:], plain.sequences[row, max(lengths) :])
        assert all(torch.equal(one[0], batch[row]) for one, batch in zip(alone.logits, plain.logits, strict=True))


@pytest.mark.slow
def test_prompts_in_pieces_and_a_cache_to_go_on_with(model):
    arguments = {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(prompt(90), **arguments, **EVERYTHING)
    for size in (1, 50, 64):
        cut = model.generate(prompt(90), prefill_chunk_size=size, **arguments, **EVERYTHING)
        assert_equal_bits(cut, plain)
    cache = lade.TreeCache()
    first = lade.generate(model, input_ids=prompt(90), past_key_values=cache, lookahead=PAPER, **arguments)
    second = lade.generate(model, input_ids=first, past_key_values=cache, lookahead=PAPER, **arguments)
    assert torch.equal(second, model.generate(prompt(90), max_new_tokens=40, do_sample=False))


def test_an_engine_and_a_stream(model):
    arguments = {"max_new_tokens": 30, "do_sample": False}
    with lade.Engine(model, max_rows=3) as engine:
        prompts = [prompt(length) for length in (3, 62, 100, 20)]
        handles = [engine.add(ids, lookahead=PAPER, **arguments) for ids in prompts]
        for ids, handle in zip(prompts, handles, strict=True):
            assert torch.equal(handle.result(), model.generate(ids, **arguments))
    streamed = [token for step in lade.stream(model, prompt(20), lookahead=PAPER, **arguments) for token in step.tokens]
    assert streamed == model.generate(prompt(20), **arguments)[0, 20:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_toy(family, dtype, packed):
    toy = toy_model(family, dtype=dtype, seed=1)
    if packed and dtype != torch.float16:  # which few processors pack
        lade.pack(toy, min_weights=1)
    lade.invariant(toy)
    arguments = {"max_new_tokens": 100, "do_sample": False, **EVERYTHING}
    for length in (1, 58, 200):
        plain = toy.generate(prompt(length), **arguments)
        for config in (PAPER, COLD, lade.LookaheadConfig()):
            assert_equal_bits(lade.generate(toy, input_ids=prompt(length), lookahead=config, **arguments), plain)
    together = toy.generate(torch.cat([prompt(58), prompt(58, 1), prompt(58), prompt(58, 2)]), **arguments)
    alone = toy.generate(prompt(58), **arguments)
    assert all(torch.equal(rows[2], one[0]) for rows, one in zip(together.logits, alone.logits, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters():
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = lade.invariant(get_peft_model(toy_model(dtype=HALF), lora).eval())
    arguments = {"max_new_tokens": 60, "do_sample": False, **EVERYTHING}
    plain = adapted.generate(input_ids=prompt(30), **arguments)
    assert_equal_bits(lade.generate(adapted, input_ids=prompt(30), lookahead=PAPER, **arguments), plain)
