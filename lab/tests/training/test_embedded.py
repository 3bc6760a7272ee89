import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade.embedded import model_path, prompts

MODEL_MAX_BYTES = 16_000_000


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32, local_files_only=True)


def test_the_weights_are_bf16_and_at_most_16_mb_and_the_ids_are_those_of_the_tokenizer(model, tokenizer):
    assert (model_path() / "model.safetensors").stat().st_size <= MODEL_MAX_BYTES
    assert AutoModelForCausalLM.from_pretrained(model_path(), local_files_only=True).dtype == torch.bfloat16
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    for settings_ in (model.config, model.generation_config):
        assert (settings_.bos_token_id, settings_.eos_token_id, settings_.pad_token_id) == ids
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 1024
    assert not model.generation_config.do_sample


@settings(max_examples=examples(50), deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    # What spells a special token is one: that is no text that comes back.
    if not any(token in text for token in tokenizer.all_special_tokens):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.one_in(6)
@pytest.mark.parametrize("prompt", prompts())
def test_the_greedy_continuation_of_a_prompt_does_not_loop(model, tokenizer, prompt):
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=120, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    assert len(ids) > 60
    assert len(set(grams)) / len(grams) > 0.7
