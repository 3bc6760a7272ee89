"""A tiny random model with a byte-level tokenizer, saved as users have them: in a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_hub import FakeHub
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from lade.cli.main import app

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 512


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)


def printable(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids: list[int] = tokenizer("".join(map(chr, range(97, 123))) + " ,.")["input_ids"]
    return ids


def only_printable(model: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Zero rows of the head never win against a best of random ones: what the model says survives de- and encoding."""
    keep = torch.zeros(len(tokenizer), 1)
    keep[printable(tokenizer)] = 1.0
    model.lm_head.weight.data *= keep
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "llama"
    only_printable(LlamaForCausalLM(config), tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def unsupported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    tokenizer = byte_tokenizer()
    config = GPTNeoConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]],
        num_heads=4, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "neo"
    only_printable(GPTNeoForCausalLM(config), tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def templated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(folder, path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def lade() -> Callable[..., Any]:
    """Run the shell in this process: `lade("info", "--json")`."""

    def run(*arguments: object, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture
def plain(model: LlamaForCausalLM) -> Callable[[list[int], int], list[int]]:
    """The new tokens of plain `model.generate`."""

    def run(ids: list[int], max_new_tokens: int) -> list[int]:
        output = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False)
        return output[0, len(ids) :].tolist()

    return run


@pytest.fixture
def hub(folder: Path, templated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Two revisions of one model, the second with a chat template."""
    made = FakeHub({"some/model": {"main": folder, "v2": templated}})
    with made.running():
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # it would know another hub
        yield made


@pytest.fixture
def edited() -> Callable[..., Path]:
    """A copy of a model folder with fields of its json files changed: `generation_config={"do_sample": True}`."""

    def copy(folder: Path, target: Path, **changes: dict[str, Any]) -> Path:
        shutil.copytree(folder, target)
        for name, fields in changes.items():
            file = target / f"{name}.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
        return target

    return copy
