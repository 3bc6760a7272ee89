import math

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner

from lade.errors import InputError
from training import evaluate
from training.corpus import Document
from training.export import export
from training.plan import Shape
from training.tokens import EOS_ID, train_tokenizer
from training.train import app, prepare, train
from training.trainer import Trainer

TEXT = "def area(width, height):\n    return width * height\n" * 5


def test_the_corpus_is_made_once_and_kept(root, tmp_path):
    shape = Shape(vocab_tokens=300)
    tokenizer, corpus = prepare(tmp_path / "work", root, [], shape)
    again, kept = prepare(tmp_path / "work", root, [], shape)
    assert (corpus.ids == kept.ids).all()
    assert again.get_vocab() == tokenizer.get_vocab()
    assert (corpus.ids[corpus.ends - 1] == EOS_ID).all()
    with pytest.raises(InputError, match="use a fresh work folder"):
        prepare(tmp_path / "work", root / "pkg", [], shape)


def test_a_run_from_source_files_to_a_folder_that_transformers_loads(root, tmp_path, plan):
    shape = Shape(vocab_tokens=300, hidden=16, intermediate=32, layers=1, heads=2, kv_heads=1, context_tokens=32)
    tokenizer, corpus = prepare(tmp_path / "work", root, [], shape)
    trainer = Trainer(corpus, plan, shape)
    train(trainer, tmp_path / "work" / "checkpoint.pt", 0.0, Console(quiet=True))
    export(trainer.model, tokenizer, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    text = "def f(a):\n    return a  # é\n"
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out")(text, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True) == text
    assert model.generate(**inputs, max_new_tokens=2, eos_token_id=None).shape[1] == inputs["input_ids"].shape[1] + 2


def test_a_finished_run_is_not_trained_further(corpus, tmp_path, plan, shape, monkeypatch):
    checkpoint = tmp_path / "checkpoint.pt"
    train(Trainer(corpus, plan, shape), checkpoint, 60.0, Console(quiet=True))
    again = Trainer(corpus, plan, shape)
    monkeypatch.setattr(again, "step", lambda: pytest.fail("there was nothing left to read"))
    train(again, checkpoint, 60.0, Console(quiet=True))
    assert again.progress.tokens == plan.total_tokens


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [(app, ["--work", "w", "--out", "o", "--root", "."], "corpus root"), (evaluate.app, ["."], "model folder")],
)
def test_bad_input_is_one_line_and_exit_code_two(command, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1


def test_a_model_without_an_opinion_needs_log2_of_the_vocabulary_per_token():
    shape = Shape(vocab_tokens=280, hidden=16, intermediate=32, layers=1, heads=2, kv_heads=1, context_tokens=16)
    tokenizer = train_tokenizer([TEXT], shape.vocab_tokens, shape.context_tokens)
    model = LlamaForCausalLM(shape.config())
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    tokens = len(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert tokens > 3 * shape.context_tokens  # several windows, the last one partly filled
    bits = evaluate.bits_per_byte(model, tokenizer, [Document("a.py", TEXT)])
    assert bits == pytest.approx(tokens * math.log2(shape.vocab_tokens) / len(TEXT), rel=1e-5)
