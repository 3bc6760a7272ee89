import math

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from training.corpus import Document
from training.evaluate import app, bits_per_byte
from training.plan import Shape
from training.tokens import train_tokenizer

TEXT = "def area(width, height):\n    return width * height\n" * 5


def test_a_model_without_an_opinion_needs_log2_of_the_vocabulary_per_token():
    shape = Shape(vocab_tokens=280, hidden=16, intermediate=32, layers=1, heads=2, kv_heads=1, context_tokens=16)
    tokenizer = train_tokenizer([TEXT], shape.vocab_tokens, shape.context_tokens)
    model = LlamaForCausalLM(shape.config())
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    tokens = len(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert tokens > 3 * shape.context_tokens  # several windows, the last one partly filled
    bits = bits_per_byte(model, tokenizer, [Document("a.py", TEXT)])
    assert bits == pytest.approx(tokens * math.log2(shape.vocab_tokens) / len(TEXT), rel=1e-5)


def test_a_folder_without_a_model_is_one_line_and_exit_code_two(tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: model folder")
    assert result.stderr.count("\n") == 1
