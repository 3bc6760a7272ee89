"""Checkpoints whose files hold nonsense: one line where they do not load. No code of theirs runs."""

import pickle

import pytest
import torch
from safetensors.torch import load_file
from test_cli_errors import fails
from transformers import AutoModelForCausalLM

UNLOADABLE = [
    ("config", "dtype", "x", "attribute 'x'"),
    ("config", "hidden_act", "x", "'x'"),
    ("config", "pad_token_id", 99999, "adding_idx"),
    ("config", "use_cache", "x", "'use_cache'"),
    ("generation_config", "max_new_tokens", 0, "max_new_tokens"),
    ("generation_config", "early_stopping", "x", "early_stopping"),
    ("generation_config", "eos_token_id", "x", "eos_token_id"),
]
"""What transformers refuses by itself, all but the last, which it would fail with at the first token."""
HARMLESS = {
    "eos_token_id": [99999, -1, 0],
    "pad_token_id": -1,
    "suppress_tokens": [99999],
    "no_repeat_ngram_size": -1,
    "bad_words_ids": [[3]],
    "sequence_bias": [[[4], -1.0]],
    "temperature": 0.0,
    "typical_p": 5,
    "watermarking_config": {"greenlist_ratio": 0.3},
    "anything": "x",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("file", "field", "value", "words"), UNLOADABLE)
def test_what_transformers_does_not_load_is_one_line(lade, folder, tmp_path, edited, file, field, value, words):
    copy = edited(folder, tmp_path / "broken", **{file: {field: value}})
    fails(lade("generate", "-m", copy, "-p", "x", "-n", 3), "broken", words, f"{file}.json")


def test_sizes_that_are_not_those_of_the_weights(lade, folder, tmp_path, edited):
    copy = edited(folder, tmp_path / "m", config={"intermediate_size": 80})
    fails(lade("info", "-m", copy), "sizes in its config.json", "weights")


def test_what_plain_decoding_can_live_with_is_left_alone(report, folder, tmp_path, edited, tokenizer):
    copy = edited(folder, tmp_path / "m", generation_config=HARMLESS)
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    expected = AutoModelForCausalLM.from_pretrained(copy).generate(ids, max_new_tokens=12, do_sample=False)
    found = report("generate", "-m", copy, "-p", "hello", "-n", 12)
    assert found["token_ids"] == expected[0, ids.shape[1] :].tolist()


# --- nothing of a checkpoint runs ------------------------------------------------------------------------------------


def test_no_code_of_a_checkpoint_runs_unasked(lade, folder, tmp_path, edited):
    marker = tmp_path / "it-ran"
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": ["own.Own", None]}
    for model_type in ("llama", "of-its-own"):
        copy = edited(folder, tmp_path / model_type, config={"auto_map": names, "model_type": model_type})
        (copy / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
        (copy / "custom_generate").mkdir()
        (copy / "custom_generate" / "generate.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
        result = lade("generate", "-m", copy, "-p", "hello", "-n", 3)
        if model_type == "llama":
            assert result.exit_code == 0, result.output
        else:
            fails(result, "of-its-own")
        assert not marker.exists()


class _Payload(str):
    def __reduce__(self):
        return open, (str(self), "w")


def test_no_pickle_of_a_checkpoint_is_run(lade, folder, tmp_path, edited):
    marker, copy = tmp_path / "it-ran", edited(folder, tmp_path / "m")
    pickle.loads(pickle.dumps(_Payload(marker))).close()
    assert marker.exists(), "the payload does nothing"
    marker.unlink()
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save({**weights, "model.norm.weight": _Payload(marker)}, copy / "pytorch_model.bin")
    fails(lade("generate", "-m", copy, "-p", "hello", "-n", 3), "model")
    assert not marker.exists()
    torch.save(weights, copy / "pytorch_model.bin")
    assert lade("generate", "-m", copy, "-p", "hello", "-n", 3).exit_code == 0
