"""An MTP layer is trained as it drafts, and written as lade and transformers read it."""

from types import SimpleNamespace

import pytest
import torch
from mtp_toys import Text, llama, needs_mtp
from transformers import LlamaForCausalLM

import lade
from lade.backends.mtp.backend import MtpRunner
from lade.backends.mtp.load import layer_of
from lade.decoding.kernels.native_tree import Frontier
from lade.model.runner import EagerRunner
from training.mtp import export_layer, losses, new_layer, train_layer, unrolled, written_texts


@pytest.fixture
def model():
    toy = llama(2, dtype=torch.float32)
    toy.config.bos_token_id = 1
    return toy


def test_levels_are_what_drafting_computes(model):
    layer = new_layer(model).eval()
    ids = torch.randint(1, 48, (1, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
        levels = unrolled(layer, model, ids, states, 3)
    mtp = SimpleNamespace(
        layers=[layer], embed_tokens=model.model.embed_tokens, shared_head=model.lm_head,
        rotary_emb=model.model.rotary_emb, has_per_layer_rope=False,
        use_shared_post_norm=False, config=model.config, _project_to_logits=model.lm_head,
    )  # fmt: skip
    passes = EagerRunner(model, lade.supports(model).plan, model.generation_config)
    runner = MtpRunner(passes, SimpleNamespace(mtp=mtp, packed=False))
    tokens = ids[0].tolist()
    row = Text(tokens[:12])
    with torch.no_grad(), runner.reading([row]):
        model(input_ids=ids[:, :11])
    runner.predict([row], None)
    runner.look([row], [Frontier([1], [0], [tokens[12]], [1], [0.5], 1.5)], None)
    runner.look([row], [Frontier([2], [1], [tokens[13]], [2], [0.5], 1.5)], None)
    for level, output in enumerate(runner._held[row].outputs, start=1):
        torch.testing.assert_close(output, levels[level - 1][0, 10 + level - level], atol=1e-5, rtol=1e-4)


def test_training_lowers_the_loss_and_leaves_the_model_alone(model, monkeypatch):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    texts = written_texts(model, 16, 24)
    assert texts.shape == (16, 24) and (texts[:, 0] == 1).all()
    layer = new_layer(model)
    first = sum(each.item() for each in losses(layer, model, texts, shares=None)[0])
    kept: list[int] = []
    monkeypatch.setattr("training.mtp.KEEP_SECONDS", 0.5)
    train_layer(layer, model, texts, seconds=2.0, keep=lambda: kept.append(1))
    assert kept
    assert sum(each.item() for each in losses(layer, model, texts, shares=None)[0]) < first
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@needs_mtp
def test_what_is_written_is_found_and_drafts(model, tmp_path, caplog):
    model.save_pretrained(tmp_path / "base")
    layer = new_layer(model, seed=3)
    export_layer(layer, tmp_path / "base", tmp_path / "out")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    loaded.generation_config.eos_token_id = None
    assert "UNEXPECTED" not in caplog.text
    own = dict(layer_of(loaded).mtp.layers[0].named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in layer.named_parameters())
    ids = torch.tensor([[1, 5, 6]])
    config = lade.LookaheadConfig(budget=6, mtp=True)
    expected = loaded.generate(ids, max_new_tokens=20)
    assert torch.equal(lade.generate(loaded, ids, max_new_tokens=20, lookahead=config), expected)
