"""Half precision: the same text but for near ties, of which users are warned, and no work that nobody asked for."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from transformers import DynamicCache, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

import lade
from lade import native
from lade.backends.cpu.invariant_marker import Invariance, set_invariance
from lade.hf.refusals import precision_note
from lade.model.facts import is_invariant
from lade.testing import toy_model

REMEDY = "`lade.invariant(model)`" if native.library() else "loading the model in float32"
# Relative spacing of numbers: 2**-8 for bfloat16 and 2**-11 for float16; sums over a few layers lose some of them.
ROUNDING = {torch.bfloat16: 16 * 2**-8, torch.float16: 16 * 2**-11}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("seed", range(4))
def test_the_first_differing_token_is_a_near_tie(dtype, seed):
    model = toy_model(dtype=dtype, seed=seed)
    ids = torch.randint(48, (1, 10), generator=torch.Generator().manual_seed(seed))
    plain = model.generate(ids, max_new_tokens=100, return_dict_in_generate=True, output_logits=True)
    with pytest.warns(lade.PrecisionWarning):
        ours = lade.generate(model, input_ids=ids, max_new_tokens=100)
    differing = (plain.sequences != ours).nonzero()
    if len(differing):
        position = int(differing[0, 1])
        logits = plain.logits[position - ids.shape[1]][0]
        gap = logits[plain.sequences[0, position]] - logits[ours[0, position]]
        assert 0 <= gap <= ROUNDING[dtype] * logits.abs().max()


def test_the_head_runs_on_the_last_token_of_the_prompt_only():
    model, fed = toy_model(), []
    model.lm_head.register_forward_hook(lambda module, args, output: fed.append(output.shape[1]))
    stats = lade.Stats()
    paper = lade.LookaheadConfig(7, 5, 7)
    lade.generate(model, input_ids=torch.ones(1, 30, dtype=torch.long), max_new_tokens=10, stats=stats, lookahead=paper)
    assert fed == [1, *stats.step_tokens]


# The warning


IDS = torch.tensor([[1, 2, 1, 2, 1]])
NEW = {"max_new_tokens": 6, "do_sample": False}


def by_engine(model, **arguments):
    with lade.Engine(model) as engine:
        engine.add(IDS, **NEW, **arguments).result(60.0)


WAYS = {
    "generate": lambda model, **given: lade.generate(model, IDS, **NEW, **given),
    "stream": lambda model, **given: list(lade.stream(model, IDS, **NEW, **given)),
    "enable": lambda model, **given: lade.enable(model).generate(IDS, **NEW, **given),
    "decode": lambda model, **given: model.generate(IDS, custom_generate=lade.decode, **NEW, **given),
    "batch": lambda model, **given: lade.generate(model, IDS.repeat(2, 1), **NEW, **given),
    "lock-step": lambda model, **given: lade.generate(
        model, IDS.repeat(2, 1), return_dict_in_generate=True, output_scores=True, **NEW, **given
    ),
    "beams": lambda model, **given: lade.generate(model, IDS, num_beams=2, **NEW, **given),
    "engine": by_engine,
}


def told(run):
    """The warnings of some calls, with the file that each points at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [(each.category, str(each.message), each.filename) for each in caught]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_told_of_once_and_never_where_it_is_decoded_plainly(way, dtype):
    model = toy_model(dtype=dtype)
    assert told(lambda: WAYS[way](model, lookahead=None)) == []
    ((category, text, place),) = told(lambda: (WAYS[way](model), WAYS[way](model), WAYS["generate"](model)))
    assert (category, place) == (lade.PrecisionWarning, __file__)
    name = str(dtype).removeprefix("torch.")
    assert text == (
        f"{name}: where two tokens score almost equally the output may differ from `generate`; {REMEDY} prevents it"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_model_is_told_of_where_the_tokens_are_the_same(dtype):
    model = toy_model(dtype=dtype)
    assert told(lambda: [way(model) for way in WAYS.values()]) == []


def test_a_fallback_says_nothing_of_precision():
    model = toy_model(dtype=torch.bfloat16)
    arguments = {**NEW, "return_dict_in_generate": True, "output_hidden_states": True}
    found = told(lambda: lade.generate(model, IDS, **arguments))
    assert [category for category, _, _ in found] == [lade.FallbackWarning]
    assert [category for category, _, _ in told(lambda: WAYS["generate"](model))] == [lade.PrecisionWarning]


def test_it_is_once_a_model_and_no_model_is_kept_for_it():
    models, way = [toy_model(dtype=torch.bfloat16) for _ in range(2)], WAYS["generate"]
    assert len(told(lambda: [way(model) for model in models])) == 2
    assert told(lambda: way(models[0].float())) == told(lambda: way(models[0].bfloat16())) == []
    assert len(told(lambda: way(copy.deepcopy(models[1])))) == 1
    gone = weakref.ref(models.pop())
    gc.collect()
    assert gone() is None


def test_an_error_made_of_it_leaves_all_as_it_was():
    model, cache = toy_model(dtype=torch.bfloat16), DynamicCache()
    with pytest.raises(lade.PrecisionWarning):
        lade.generate(model, IDS, past_key_values=cache, **NEW)
    assert cache.get_seq_length() == 0
    lade.generate(model, IDS, past_key_values=cache, **NEW)
    assert cache.get_seq_length() == IDS.shape[1] + NEW["max_new_tokens"] - 1


def test_an_invariant_model_is_not_told_of_until_it_is_variant_again():
    model = toy_model(dtype=torch.bfloat16)
    set_invariance(model, Invariance(1, torch.bfloat16, 0, None, None))
    assert precision_note(model) == ""
    with torch.autocast("cpu", torch.bfloat16):
        assert "leaving out torch.autocast prevents it" in precision_note(model)
    other = toy_model(dtype=torch.bfloat16)
    set_invariance(other, Invariance(1, torch.bfloat16, 0, None, None))
    set_invariance(other, None)
    assert f"{REMEDY} prevents it" in precision_note(other)


@pytest.mark.parametrize("model", [toy_model(dtype=torch.float32), toy_model()], ids=["float32", "float64"])
def test_autocast_counts_where_it_changes_anything(model):
    with torch.autocast("cpu", torch.bfloat16):
        note = precision_note(model)
    assert note == "" if model.dtype is torch.float64 else note.startswith("bfloat16: ") and "autocast" in note


def test_the_remedy_is_one_that_there_is():
    sizes = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    encoding = T5ForConditionalGeneration(T5Config(**sizes)).bfloat16().eval()
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, state_size=4))
    compiled = torch.compile(toy_model(dtype=torch.float16), backend="eager")
    for model in (encoding, recurrent.half().eval(), compiled):
        assert precision_note(model).endswith("; loading the model in float32 prevents it")


# Exact on request


@pytest.mark.skipif(not native.library(), reason="no compiled kernels here")
@pytest.mark.by_processor
def test_an_enabled_model_can_be_made_exact_and_as_it_was_again(caplog):
    model = toy_model(dtype=torch.bfloat16)
    with caplog.at_level("INFO", "lade"):
        assert lade.enable(model, exact=True) is model
    assert "batch-invariant kernels" in caplog.text
    assert not told(lambda: model.generate(IDS, **NEW))  # no warning: nothing can diverge
    ours = model.generate(IDS, max_new_tokens=60, do_sample=False)
    assert torch.equal(ours, model.generate(IDS, max_new_tokens=60, do_sample=False, lookahead=None))
    lade.disable(model)
    assert "generate" not in vars(model) and not is_invariant(model)
    lade.disable(lade.enable(lade.invariant(model), exact=True))
    assert is_invariant(model), "as it was"
    model = toy_model(dtype=torch.float32)
    lade.enable(model, exact=True)
    assert not is_invariant(model), "nothing is to be gained"


def test_what_cannot_be_made_exact_is_an_error():
    model = MambaForCausalLM(MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=1)).eval().bfloat16()
    with pytest.raises(lade.UnsupportedModelError, match="cannot be made invariant"):
        lade.enable(model, exact=True)
    assert "generate" not in vars(model)
