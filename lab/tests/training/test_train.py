import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lade.errors import InputError
from training.export import export
from training.plan import Shape
from training.tokens import EOS_ID
from training.train import app, prepare, train
from training.trainer import Trainer


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


def test_bad_input_is_one_line_and_exit_code_two(tmp_path):
    arguments = ["--work", str(tmp_path / "w"), "--out", str(tmp_path / "o"), "--root", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: corpus root")
    assert result.stderr.count("\n") == 1
