"""Fused passes give the logits of the model's own, and write what plain decoding writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_same, batch, lookahead, plain, prompt
from families import family
from graphed import Graphs, graphs_on
from spies import watched
from test_attention_families import DEVICES

import lade
from lade.backends.cuda_graphs import fused
from lade.backends.cuda_graphs.backend import BACKEND
from lade.backends.cuda_graphs.buffers import EagerReplay, StepShape
from lade.backends.cuda_graphs.fused import FusedDecoder, difference, fusion_refusal
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.decoding.tree import TokenTree
from lade.model.facts import ModelFacts

NAMES = ["llama", "mistral-window", "qwen2", "qwen3", "gemma3_text"]
OF_TWO_LAYERS = {"gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]}}
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    with graphs_on(device, monkeypatch, EagerReplay) as made:  # a tape does not see what an interpreter does
        yield made


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """Shapes of the fused passes that are made."""
    return watched(monkeypatch, FusedDecoder, "states", lambda decoder, inputs, buffers, shape: shape)


def built(name: str, device: torch.device, **overrides: Any) -> Any:
    overrides = {"dtype": torch.float32, "num_hidden_layers": 2, **OF_TWO_LAYERS.get(name, {}), **overrides}
    model: Any = family(name).build("sdpa", **overrides)
    torch.manual_seed(1)
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith(("bias", "norm.weight", "layernorm.weight")):
            torch.nn.init.normal_(weight, 1.0 if "norm" in weight_name and "gemma" not in name else 0.0, 0.3)
    return model.to(device)


def tree_of(tokens: int) -> TokenTree:
    tree = TokenTree(5)
    for start in range(1, tokens, 3):
        tree.add_path(list(range(start, min(tokens, start + 3))), "pool")
    return tree


@pytest.mark.parametrize(("name", "biased"), [*((name, False) for name in NAMES), *((name, True) for name in BIASED)])
def test_logits_of_trees_are_those_of_the_model(name, biased, device, graphs, passes):
    model = built(name, device, **(BIASED[name] if biased else {}))
    runner, found = graphs.runner(model), []
    own = GraphRunner(model, runner.plan, model.generation_config, graphs.pool(model), fuses=False)
    texts = [prompt(length, seed=length)[0].tolist() for length in (20, 33)]
    trees = [tree_of(13), tree_of(7)]
    for each in (own, runner):
        cache = each.new_cache(tokens=80)
        each.prefill([text[:-1] for text in texts], cache)
        rows = [[*text[:-1], tree.ids[0]] for text, tree in zip(texts, trees, strict=True)]
        logits = each.forward(trees, rows, cache).clone()
        found.append(torch.cat([part[: len(tree)] for part, tree in zip(logits, trees, strict=True)]))
        cache.keep([[0, 1, 2], [0]], fed=13)
        rows = [[*text[:-1], *(1, 2, 3)[:kept], 9] for text, kept in zip(texts, (3, 1), strict=True)]
        again = each.forward([TokenTree(9)] * 2, rows, cache).clone()  # reads keys and values of the tree
        found.append(again.flatten(0, 1))
        cache.reset()
        graphs.pool(model).free_idle()
    assert passes
    for expected, ours in ((found[0], found[2]), (found[1], found[3])):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "config"), list(zip(NAMES, CONFIGS, strict=False)))
def test_it_writes_what_plain_decoding_writes(name, config, device, graphs, passes):
    model, tokens = built(name, device), 16 if device.type == "cpu" else 60
    ids = prompt(20).to(device)
    expected = plain(model, ids, max_new_tokens=tokens)  # before its weights are laid out
    assert torch.equal(lookahead(model, ids, config, max_new_tokens=tokens), expected)
    assert torch.equal(plain(model, ids, max_new_tokens=tokens), expected), "the laid out weights compute differently"
    assert {shape.reads for shape in passes} == {True}
    found = []
    for decode in (plain, lookahead):
        torch.manual_seed(3)
        found.append(decode(model, ids, max_new_tokens=8, do_sample=True))
    assert torch.equal(*found)
    assert {shape.reads for shape in passes} == {True, False}


def test_rows_of_a_batch(device, graphs, passes):
    rows = {name: tensor.to(device) for name, tensor in batch(9, 5, 9).items()}
    assert_same(built("llama", device), **rows, max_new_tokens=12, pad_token_id=0)
    assert {shape.rows for shape in passes} >= {4}


def test_weights_take_no_more_memory_and_are_saved_as_before(device, tmp_path):
    model = built("qwen2", device)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    facts = ModelFacts.of(model)
    for _ in range(2):  # a second time nothing has to be moved
        decoder = fused.decoder_of(facts, lade.supports(model).require(), in_use=False)
        assert decoder is not None
    blocks = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(blocks.values()) == sum(weight.nbytes for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(weight.cpu(), before[name].cpu()) for name, weight in loaded.state_dict().items())
    with torch.no_grad():  # an edit of a parameter is an edit of what is multiplied
        model.model.layers[0].self_attn.k_proj.weight.fill_(3.0)
    width = model.model.layers[0].self_attn.q_proj.out_features
    assert decoder._layers[0].qkv[0][width].eq(3.0).all()


def test_weights_stay_where_they_are_while_passes_may_run(device):
    model = built("llama", device)
    facts, plan = ModelFacts.of(model), lade.supports(model).require()
    places = [weight.data_ptr() for weight in model.parameters()]
    assert fused.decoder_of(facts, plan, in_use=True) is None
    assert places == [weight.data_ptr() for weight in model.parameters()]
    assert fused.decoder_of(facts, plan, in_use=False) is not None
    assert fused.decoder_of(facts, plan, in_use=True) is not None, "they have been laid out already"


def test_a_pass_that_differs_is_not_used(device, graphs, monkeypatch, passes):
    model, ids = built("llama", device), prompt(20).to(device)
    monkeypatch.setattr(FusedDecoder, "logits", lambda self, states: self._head(states).roll(1, dims=-1))
    expected = plain(model, ids, max_new_tokens=12)
    for _ in range(2):
        assert torch.equal(lookahead(model, ids, PAPER, max_new_tokens=12), expected)
    assert len(passes) == 1, "it was tried again"


@pytest.mark.parametrize("scale", [1.0, torch.nan])
def test_differences_beyond_rounding_are_seen(scale):
    expected = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    assert not difference(expected + 1e-4, expected)
    assert difference(expected + 0.3 * scale, expected)


class OtherLinear(torch.nn.Linear):
    """A layer of another package."""


REFUSED = {
    "family": lambda model: None,
    "OtherLinear": lambda model: setattr(model.model.layers[0].mlp, "up_proj", OtherLinear(8, 8)),
    "linear ones": lambda model: setattr(model.model.layers[0].self_attn, "more", torch.nn.Linear(8, 8)),
    "replaced": lambda model: setattr(model.model.layers[0], "forward", model.model.layers[0].forward),
    "training": lambda model: model.train(),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "all in one": lambda model: model.model.norm.double(),
    "activation": lambda model: setattr(model.config, "hidden_act", "gelu"),
    "caps": lambda model: setattr(model.config, "final_logit_softcapping", 30.0),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_are_not_fused(why):
    model: Any = family("gpt2" if why == "family" else "llama").build("sdpa", dtype=torch.float32)
    plan = lade.supports(model).require()
    REFUSED[why](model)
    if why == "attention":
        plan = lade.supports(model).require()
    assert why in fusion_refusal(ModelFacts.of(model), plan)


def test_support_says_why_not(device):
    model = built("llama", device)
    assert lade.supports(model).fused == ("" if device.type == "cuda" else "passes are fused on CUDA devices only")
    eager: Any = family("llama").build("eager", dtype=torch.float32)
    assert "choose sdpa" in BACKEND.fusion_refusal(ModelFacts.of(eager), lade.supports(eager).require())
