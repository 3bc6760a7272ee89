"""Tiny random models with a byte-level tokenizer, saved as users have them: in a folder."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer.main
from fake_hub import FakeHub
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from lade.backends.cpu.packing import pack as packing
from lade.cli import run as decoding
from lade.cli import terminal
from lade.cli.main import app

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT, SHORT = 512, 30
terminal.LINE_S = 600.0  # a busy machine adds no lines to outputs that are compared; `test_status` has its own


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Each byte is a token; the first one ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)
    made.chat_template = template
    return made


def word_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Words that carry their space, of which the decoder takes the first one off, as Llama's does; then `more`."""
    words = ["</s>", *(f"▁{word}" for word in ("the", "cat", "sat", "on", "a", "mat")), *more]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False)


def byte_model(kind: type[Any], config: type[Any], tokenizer: Any = None, seed: int = 3, **fields: Any) -> Any:
    """Random weights for the tokens of a byte tokenizer; a sequence of greedy tokens survives de- and encoding.

    Zero rows of the head never win against the best of random ones, so that the model writes letters only.
    """
    tokenizer = tokenizer or byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, pad_token_id=0, **fields))
    keep = torch.zeros(len(tokenizer), 1)
    keep[tokenizer("".join(map(chr, range(97, 123))) + " ,.")["input_ids"]] = 1.0
    model.lm_head.weight.data *= keep
    return model


def byte_llama(tokenizer: Any = None, seed: int = 3) -> LlamaForCausalLM:
    return byte_model(
        LlamaForCausalLM, LlamaConfig, tokenizer, seed, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        initializer_range=0.4,
    )  # fmt: skip


def saved(model: Any, factory: pytest.TempPathFactory, name: str, tokenizer: Any = None) -> Path:
    path = factory.mktemp("models") / name
    model.save_pretrained(path)
    (tokenizer or byte_tokenizer()).save_pretrained(path)
    return path


@pytest.fixture(autouse=True, scope="session")
def commands_made_once() -> Iterator[None]:
    """Typer makes all of them anew for each line that is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(byte_llama(), tmp_path_factory, "llama")


@pytest.fixture(scope="session")
def unsupported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    neo = byte_model(
        GPTNeoForCausalLM, GPTNeoConfig, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]],
        num_heads=4, max_position_embeddings=CONTEXT, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    return saved(neo, tmp_path_factory, "neo")


@pytest.fixture(scope="session")
def with_position_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that cannot run beyond its `SHORT` positions."""
    sizes = {"n_positions": SHORT, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return saved(byte_model(GPT2LMHeadModel, GPT2Config, **sizes), tmp_path_factory, "gpt2")


@pytest.fixture(scope="session")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(byte_llama(), tmp_path_factory, "chatty", byte_tokenizer(TEMPLATE))


@pytest.fixture(scope="session")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def lade() -> Callable[..., Any]:
    """Run the shell in this process: `lade("info", "--json")`."""

    def run(*arguments: object, stdin: str | bytes | None = None, env: Mapping[str, str] | None = None) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, env=env)

    return run


@pytest.fixture
def report(lade: Callable[..., Any]) -> Callable[..., Any]:
    """Run the shell and return what it prints with `--json`: `report("info")`."""

    def run(*arguments: object, code: int = 0, **given: Any) -> Any:
        result = lade(*arguments, "--json", **given)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

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


@pytest.fixture
def prompt_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of prompts: texts, or whole objects."""

    def write(*entries: str | dict[str, Any], name: str = "prompts.jsonl") -> Path:
        whole = ({"prompt": entry} if isinstance(entry, str) else entry for entry in entries)
        (tmp_path / name).write_text("".join(json.dumps(entry) + "\n" for entry in whole))
        return tmp_path / name

    return write


@pytest.fixture
def small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers of tiny models packed, too."""
    for name in ("pack", "packable"):
        monkeypatch.setattr(packing, name, functools.partial(getattr(packing, name), min_weights=1))


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something done at a step of a text, before it is told: of the text with that number, from 1, or of all."""
    original = decoding.stream

    def have(index: int | None, do: Callable[[], Any], text: int | None = None) -> None:
        texts = itertools.count(1)

        def stream(*args: Any, **named: Any) -> Iterator[Any]:
            number = next(texts)
            for step in original(*args, **named):
                if index in (None, step.index) and text in (None, number):
                    do()
                yield step

        monkeypatch.setattr(decoding, "stream", stream)

    return have


def press_ctrl_c() -> None:
    """Ctrl-C, as the terminal sends it."""
    signal.raise_signal(signal.SIGINT)
