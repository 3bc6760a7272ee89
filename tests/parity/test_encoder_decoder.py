"""Encoder-decoder models: their decoders are fed trees, and write what plain decoding writes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparing import CONFIGS, Listener, assert_alike, assert_refused, assert_same, assert_same_beams, lookahead, plain
from encoder_decoders import CHECKED, END, FAILING, LISTED, PAD, START, USUAL, EncoderDecoder, article
from peft import LoraConfig, get_peft_model
from torch.nn.functional import pad
from transformers import Florence2Config, Florence2ForConditionalGeneration, StoppingCriteriaList

import lade
from lade.backends.encoder_decoder import source_of
from lade.backends.trials.tree_check import worst_error
from lade.model.facts import CACHE
from lade.model.prepared import Prepared, custom_generate_for
from lade.model.supports import ENCODER_DECODERS

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in LISTED for backend in ("sdpa", "eager")]
BART, T5 = USUAL[:2]


@pytest.mark.one_in(36)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_it_writes_what_plain_decoding_writes(case, backend, watch):
    model = case.build(backend)
    assert lade.supports(model)
    expected = plain(model, article(20))
    assert len(set(expected[0].tolist())) > 9, "the text puts nothing to the test"
    assert not torch.equal(expected, plain(model, article(20, seed=1))), "the encoder does nothing"
    stats = assert_same(model, article(20), CONFIGS[:3] if backend == "sdpa" else CONFIGS[:2])
    assert stats.tokens_per_step > 1 and watch.branched and watch.moved
    assert_same(model, article(1, seed=2))


@pytest.mark.one_in(40)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_the_logits_at_every_node_are_those_of_plain_passes(case, backend):
    model = case.build(backend, seed=2)
    assert worst_error(model, lade.supports(model).require(), beyond=20) < 1e-10


def test_every_listed_family_is_tested():
    assert {case.model_type for case in LISTED} | {"whisper"} == ENCODER_DECODERS


# --- what decides about tokens ---------------------------------------------------------------------------------------


def _words(model: Any) -> tuple[int, int]:
    """Two tokens of the text that the model writes, the later one once it has written for a while."""
    text = plain(model, article(20))[0].tolist()
    return text[3], next(token for place, token in enumerate(text) if place > 20 and token not in text[:20])


PROCESSING = {
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 12},
    "sampling of everything": {"do_sample": True, "top_p": 0.95, "typical_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "the encoder's text": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": END, "max_new_tokens": 30},
    "suppressed": {"suppress_tokens": [11, 12], "begin_suppress_tokens": [13], "bad_words_ids": [[14, 15]]},
    "least": {"min_new_tokens": 40, "eos_token_id": [5, 6, 17]},
    "longest": {"max_length": 25, "max_new_tokens": None},
}


@pytest.mark.one_in(60)
@pytest.mark.parametrize("name", PROCESSING)
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_processors_see_the_decoders_text_alone(case, name):
    model, arguments = case.build(), PROCESSING[name]
    for seed in (1, 2):
        assert_same(model, article(20), [CONFIGS[seed % 2]], seed, **arguments)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_what_ends_a_text(case):
    model = case.build()
    first, later = _words(model)
    assert_same(model, article(20), CONFIGS[:2], eos_token_id=later)
    assert_same(model, article(20), eos_token_id=[first, later])
    seen: list[list[list[int]]] = []

    def until(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        seen[-1].append(input_ids[0].tolist())
        return (input_ids[:, -1] == later) & (input_ids.shape[1] > 10)

    outputs = []
    for decode in (plain, lookahead):
        seen.append([])
        outputs.append(decode(model, article(20), stopping_criteria=StoppingCriteriaList([until])))
    assert torch.equal(*outputs) and seen[0] == seen[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_a_decoder_that_is_given_a_beginning(case):
    model, words = case.build(), article(9, seed=5)
    for beginning in (words, torch.cat([torch.tensor([[START]]), words], dim=1)):  # transformers puts the start before
        arguments = {"decoder_input_ids": beginning, "max_new_tokens": 40}
        expected = plain(model, article(20), **arguments)
        assert expected.shape == (1, 50) and expected[0, 1:10].tolist() == words[0].tolist()
        assert_same(model, article(20), CONFIGS[:2], **arguments)
        assert_same(model, article(20), decoder_attention_mask=torch.ones_like(beginning), **arguments)
    padding = {"decoder_input_ids": words, "decoder_attention_mask": (words != words[0, 0]).long()}
    assert_refused(model, article(20), "decoder_attention_mask with padding", lade.UnsupportedArgumentError, **padding)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_an_encoder_whose_input_is_padded(case, side):
    model = case.build()
    ids = pad(article(14), (0, 6) if side == "right" else (6, 0), value=PAD)
    mask = (ids != PAD).long()
    expected = plain(model, ids, attention_mask=mask)
    assert not torch.equal(expected, plain(model, ids)), "the mask does nothing"
    assert_same(model, ids, CONFIGS[:2], attention_mask=mask)
    assert_same(model, ids)  # no mask: transformers makes none


@pytest.mark.slow
@pytest.mark.parametrize("case", [BART, T5], ids=str)
def test_an_encoder_that_has_run_before_or_was_fed_embeddings(case):
    model, ids = case.build(), article(20)
    with torch.no_grad():
        outputs = model.get_encoder()(input_ids=ids, return_dict=True)
        embeddings = model.get_input_embeddings()(ids)
    assert_same(model, None, encoder_outputs=outputs, attention_mask=torch.ones_like(ids))
    assert_same(model, None, inputs_embeds=embeddings)


@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_returned(beams):
    """Of beams the cache has a row for each."""
    model, ids = BART.build(), article(20)
    arguments = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 30}
    expected, ours = (decode(model, ids, num_beams=beams, **arguments) for decode in (plain, lookahead))
    assert_alike(ours, expected)
    assert ours.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == 30
    for part in ("self_attention_cache", "cross_attention_cache"):
        layers = [getattr(each.past_key_values, part).layers for each in (ours, expected)]
        for layer, other in zip(*layers, strict=True):
            torch.testing.assert_close([layer.keys, layer.values], [other.keys, other.values])
    with pytest.raises(lade.UnsupportedArgumentError, match=f"{CACHE} cannot be used"):
        lookahead(model, ids, past_key_values=expected.past_key_values, decoder_input_ids=ours.sequences)


def test_guesses_come_from_the_encoders_text():
    """Of a text that copies it, the first words are guessed at once."""
    model, ids, sources = BART.build(), article(20), []
    text = plain(model, ids)[:, 1:41]
    for step in lade.stream(model, input_ids=text, lookahead=lade.LookaheadConfig(0, 5, 5), max_new_tokens=20):
        sources += step.sources
    assert "prompt" in sources


def test_positions_end_where_plain_decoding_ends():
    model = BART.build(max_position_embeddings=40)
    assert_same(model, article(20), CONFIGS[:2], max_new_tokens=39)
    for decode in (plain, lookahead):
        with pytest.raises(IndexError):
            decode(model, article(20), max_new_tokens=45)


# --- several rows ----------------------------------------------------------------------------------------------------


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """Inputs of these lengths, padded on the right as encoders' are, and their mask."""
    rows = [article(length, seed=10 + row) for row, length in enumerate(lengths)]
    ids = torch.cat([pad(row, (0, max(lengths) - row.shape[1]), value=PAD) for row in rows])
    return {"ids": ids, "attention_mask": (ids != PAD).long()}


def _end_of_some(model: Any, rows: dict[str, torch.Tensor]) -> int:
    """A token with which some rows end early, and at different steps."""
    texts = plain(model, **rows)[:, 1:].tolist()
    ends = {token: [text.index(token) if token in text else 40 for text in texts] for text in texts for token in text}
    return max(ends, key=lambda token: (len(set(ends[token])), min(ends[token])))


@pytest.mark.one_in(20)
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_rows_that_end_at_different_steps(case):
    model, rows = case.build(), padded(20, 7, 13, 2)
    end = _end_of_some(model, rows)
    expected = plain(model, **rows, eos_token_id=end)
    assert len({row.index(end) if end in row else -1 for row in expected.tolist()}) > 2
    assert_same(model, **rows, configs=CONFIGS[:3], eos_token_id=end)
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": end, "lookahead": CONFIGS[0]}
    ours = model.generate(rows["ids"], attention_mask=rows["attention_mask"], custom_generate=lade.decode, **arguments)
    assert torch.equal(ours, expected)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_samples_of_several_rows(case):
    model, rows = case.build(), padded(9, 16)
    common = {"eos_token_id": _end_of_some(model, rows), "max_new_tokens": 40}
    for arguments in (
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.7, "encoder_repetition_penalty": 1.4, "repetition_penalty": 1.2},
        {"encoder_no_repeat_ngram_size": 2, "num_return_sequences": 1, "forced_bos_token_id": 9},
    ):
        assert_same(model, **rows, **{**common, **arguments})


def test_what_is_read_of_the_encoders_text():
    """Each row's own, without padding, and nothing where the decoder's ids mean other words."""
    rows, beginning = padded(5, 3), {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 2}

    def sources(prepared: Prepared) -> list[list[int]]:
        return [source_of(prepared, number) for number in range(len(prepared.input_ids))]

    def read(case: EncoderDecoder, **arguments: Any) -> Any:
        return case.build().generate(custom_generate=custom_generate_for(sources), **{**beginning, **arguments})

    words = [rows["ids"][0].tolist(), rows["ids"][1, :3].tolist()]
    given = {"input_ids": rows["ids"], "attention_mask": rows["attention_mask"]}
    assert read(BART, **given) == [words[0], words[0], words[1], words[1]]
    assert read(LISTED[-1], **given) == [[]] * 4
    assert read(BART, inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64)) == [[]] * 2


@pytest.mark.slow
@pytest.mark.measured_cost
@pytest.mark.parametrize("case", [BART, LISTED[-1]], ids=str)
def test_what_its_passes_cost_is_measured(case):
    model, rows = case.build(), padded(20, 7, 13)
    assert_same(model, rows["ids"][:1], [lade.LookaheadConfig()])
    assert_same(model, **rows, configs=[lade.LookaheadConfig()])


# --- beams -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(40)
@pytest.mark.parametrize(("case", "backend"), CASES[:-2])  # transformers 5.17 fails with a decoder's own vocabulary
def test_its_beams_are_plains(case, backend):
    model, common = case.build(backend), {"num_beams": 4, "max_new_tokens": 40}
    end = _words(model)[1]
    assert assert_same_beams(model, article(20), **common).tokens_per_step > 1, "no guess was ever taken"
    assert_same_beams(model, article(20), **common, eos_token_id=end, num_return_sequences=3, length_penalty=2.0)
    forced = {"forced_bos_token_id": 7, "forced_eos_token_id": END, "no_repeat_ngram_size": 3}
    assert_same_beams(model, article(20), **common, eos_token_id=END, **forced, early_stopping=True)
    assert_same_beams(model, article(12, seed=1), **common, do_sample=True, decoder_input_ids=article(5, seed=3))


@pytest.mark.one_in(20)
@pytest.mark.parametrize("case", LISTED[:-1], ids=str)
def test_beams_of_several_prompts(case):
    model, rows = case.build(), padded(20, 7, 13)
    common = {"num_beams": 3, "max_new_tokens": 30, "attention_mask": rows["attention_mask"]}
    assert_same_beams(model, rows["ids"], **common, num_return_sequences=2, eos_token_id=_end_of_some(model, rows))


@pytest.mark.slow
def test_beams_copy_from_the_encoders_text():
    model, config = BART.build(), lade.LookaheadConfig(0, 5, 5)
    copied = plain(model, article(20), num_beams=3, max_new_tokens=40)[:, 1:]
    steps = [
        assert_same_beams(model, copied, config, num_beams=3, max_new_tokens=30).steps
        for config in (config, replace(config, prompt_ngrams=False))
    ]
    assert steps[0] < steps[1]


# --- rows that have to be shown together -----------------------------------------------------------------------------


def _lowered(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that compares the rows of a batch."""
    return scores.index_fill(1, ids[:, -1].unique(), -1.0)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_rows_that_have_to_be_shown_together(case, sampled):
    model, rows = case.build(), padded(20, 9, 14)
    first = plain(model, **rows)
    given = {"do_sample": sampled, "max_new_tokens": 40, "eos_token_id": [END, int(first[1, 12])], "pad_token_id": PAD}
    for more in (
        {"logits_processor": [_lowered]},
        {"stopping_criteria": [lambda ids, scores: ids[:, -1] == int(first[0, 9])]},
        {"return_dict_in_generate": True, "output_scores": True},
    ):
        assert_same(model, **rows, **given, **more)
    assert lookahead(model, **rows, **given, return_dict_in_generate=True).past_key_values is None


def test_a_batch_gives_a_streamer_the_tokens_of_all_rows():
    """And takes fewer passes, as the rows' encoders have read what they write."""
    model, rows, stats = T5.build(), padded(20, 9), lade.Stats()
    ours, theirs = Listener(), Listener()
    expected = plain(model, **rows, streamer=theirs)
    assert torch.equal(lookahead(model, **rows, streamer=ours, stats=stats), expected)
    assert ours.heard == theirs.heard and stats.tokens_per_step > 1


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_engine_says_what_serves_it():
    with pytest.raises(lade.UnsupportedModelError, match=r"BartForConditionalGeneration: .* encoders' .*lade.generate"):
        lade.Engine(BART.build())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size cannot be used"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"decoder_inputs_embeds": torch.zeros(1, 1, 32)}, "decoder_inputs_embeds cannot be used"),
    ],
)
def test_arguments_that_are_refused(arguments, reason):
    with pytest.raises(lade.UnsupportedArgumentError, match=reason):
        lookahead(BART.build(), article(9), **arguments)


# --- architectures that are not listed -------------------------------------------------------------------------------


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_an_architecture_that_passes_the_check(case, checks):
    model = case.build("eager")
    assert lade.supports(model) and lade.supports(model) and len(checks) == 1
    assert_same(model, article(20), CONFIGS[:2], max_new_tokens=40)
    assert_same(model, **padded(20, 7), max_new_tokens=30)
    assert_same_beams(model, article(20), num_beams=3, max_new_tokens=20)


def test_an_architecture_that_fails_the_check():
    model = FAILING.build("eager")
    assert "a tree pass does not equal plain passes on it" in lade.supports(model).reason
    with pytest.warns(lade.FallbackWarning, match="does not equal plain passes"):
        assert_same(model, article(9), ["auto"])


def test_positions_that_nobody_asks_for_are_noticed(monkeypatch):
    """A decoder that reads its table in another way would see slots."""
    model = BART.build()
    twin = copy.deepcopy(model.model.decoder)
    forward = type(twin).forward
    monkeypatch.setattr(type(twin), "forward", lambda decoder, *given, **named: forward(twin, *given, **named))
    with pytest.raises(lade.UnsupportedModelError, match="did not see a tree's positions"):
        lookahead(model, article(9))


def test_a_class_around_a_listed_one_is_checked(checks):
    """What is known of Bart holds for its own class; another one may call it in its own way."""
    config = Florence2Config(
        text_config={**BART.build().config.to_dict(), "model_type": "bart"},
        vision_config={"depths": [1], "embed_dim": [16], "num_heads": [2], "num_groups": [2], "projection_dim": 32}
        | {"patch_size": [4], "patch_stride": [4], "patch_padding": [1], "patch_prenorm": [False]},
    )
    lade.supports(Florence2ForConditionalGeneration(config).eval())
    assert checks == ["Florence2ForConditionalGeneration"]


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [BART, T5], ids=str)
def test_an_adapter_for_encoder_decoders(case):
    """PEFT wraps these in a class of its own, whose `generate` prepares the encoder's input."""
    bare = plain(case.build(), article(20))
    targets = ["q_proj", "v_proj"] if case is BART else ["q", "v"]
    settings = LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, lora_alpha=64, init_lora_weights=False, target_modules=targets)
    torch.manual_seed(1)
    model = get_peft_model(case.build(), settings).double().eval()
    assert not torch.equal(plain(model, article(20)), bare), "the adapter does nothing"
    assert assert_same(model, article(20), max_new_tokens=40).tokens_per_step > 1
    assert_same(model, **padded(20, 7), max_new_tokens=20)
    assert_same_beams(model, article(9), num_beams=3, max_new_tokens=15)
