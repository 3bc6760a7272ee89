"""Layers in few calls: the bits of their parts' own calls, and the parts' own way wherever that may differ."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from integer_toys import assert_texts_are_plains
from pretend import use_threads
from small_models import small_model
from spies import answered
from torch import nn
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

import lade
from lade.backends.cpu.invariant import chained_decoder
from lade.backends.cpu.invariant.chained_decoder import ChainedDecoder
from lade.backends.cpu.invariant.fused import Fused, FusedLayer, FusedProjections, GatedBlock
from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing import panel_products
from lade.backends.cpu.packing.weight import PREPARED_ROWS, has_dots
from lade.model.facts import CACHE
from lade.model.kv_cache import TreeCache

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(not kernel("attend").available, reason="the compiled kernels are missing")
needs_dots = pytest.mark.skipif(not has_dots(), reason="no dot products")
KINDS = [(weights, dtype) for weights in ("int8", "int4") for dtype in (torch.float32, HALF)]
KINDS.append(pytest.param(None, HALF, marks=needs_dots))
with_each = pytest.mark.parametrize(("weights", "dtype"), KINDS)
FAMILIES = {
    "llama": ("llama", {}),
    "biases": ("llama", {"mlp_bias": True, "attention_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 7}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 7}),
    "granite": ("granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.7}),
}
WITH_LAYERS = ("llama", "biases", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")  # others scale what they add up


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch):
    """Processors with AMX have dot products, too, which are what bfloat16 layers are fused with."""
    monkeypatch.setattr(panel_products, "has_tiles", lambda: False)


def built(family="llama", dtype=torch.float32, **more):
    kind, own = FAMILIES[family]
    model = small_model(kind, dtype, **{"hidden_size": 64, "initializer_range": 0.3, **own, **more})
    torch.manual_seed(0)
    for parameter in model.parameters():  # biases, and the weights of norms
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape).to(dtype)
    return model


def made_anew(family="llama", weights="int4", dtype=torch.float32, **more):
    return lade.invariant(lade.pack(built(family, dtype, **more), weights=weights, min_weights=1))


MADE = {}


def made(*given, **more):
    """A copy of a model that is tried once for all tests; its layers share no calls."""
    key = repr((given, more))
    if key not in MADE:
        MADE[key] = made_anew(*given, **more)
    return copy.deepcopy(MADE[key])


def count(model, kind) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def first(model, kind):
    return next(module for module in model.modules() if isinstance(module, kind))


def calls_of(module):
    """The calls that a module has prepared."""
    return module._calls


def runs_of(model):
    """The runs of layers that a decoder computes in one call each."""
    return model.model._stack.runs


def apart(model):
    """A copy whose modules make all their calls."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, Fused | ChainedDecoder):
            module.__class__ = module.original
    return other


def rows_of(block, *shape, dtype):
    x = torch.randn(*shape, block.gate_proj.in_features, generator=torch.Generator().manual_seed(3))
    return (x * 10 ** torch.linspace(-2, 1, x.shape[-2])[:, None]).to(dtype)


def outputs(model, ids, cache=None, **more):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **more)


@pytest.mark.one_in(2)
@with_each
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "quick_gelu"])
@torch.no_grad()
def test_a_block_has_the_bits_of_its_layers(weights, dtype, activation, monkeypatch):
    block = first(made("llama", weights, dtype, hidden_act=activation, num_hidden_layers=1), GatedBlock)
    for threads in (1, 2, 3):
        use_threads(monkeypatch, threads)
        for rows in (1, 2, 3, 16, 17, PREPARED_ROWS, PREPARED_ROWS + 1):
            x = rows_of(block, 1, rows, dtype=dtype)
            assert torch.equal(block(x), block.original.forward(block, x)), (threads, rows)
    assert block(x[0, 0]).shape == x[0, 0].shape and block(x[:, :0]).shape == (1, 0, x.shape[-1])
    turned = rows_of(block, 4, 6, dtype=dtype).transpose(0, 1)
    assert torch.equal(block(turned), block(turned.contiguous()))
    assert max(key[1] for key in calls_of(block).known) == PREPARED_ROWS


@pytest.mark.one_in(4)
@with_each
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_has_the_bits_of_its_parts(weights, dtype, family, monkeypatch):
    """Passes of a row and of several, in one piece and behind a cache, with padding and without."""
    model = made(family, weights, dtype, num_hidden_layers=3)
    assert count(model, GatedBlock) == count(model, FusedProjections) == 3
    assert count(model, FusedLayer) == 3 * (family in WITH_LAYERS)
    other, generator = apart(model), torch.Generator().manual_seed(1)
    for threads, rows, tokens in ((3, 1, 9), (1, 3, 5), (1, 1, PREPARED_ROWS), (3, 2, PREPARED_ROWS // 2)):
        use_threads(monkeypatch, threads)
        ids = torch.randint(1, 48, (rows, tokens + 4), generator=generator)
        mask = torch.ones_like(ids)
        mask[rows // 2 :, : 2 * (rows > 1)] = 0
        for pieces in (ids.split([4, tokens], 1), ids.split([tokens, 3, 1], 1)):
            caches, seen = (DynamicCache(), DynamicCache()), 0
            for piece in pieces:
                seen += piece.shape[1]
                found, expected = (
                    each(piece, past_key_values=cache, attention_mask=mask[:, :seen]).logits
                    for each, cache in zip((model, other), caches, strict=True)
                )
                assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)), (rows, tokens, len(pieces))


@pytest.mark.parametrize(("family", "dtype"), list(zip(FAMILIES, [torch.float32, HALF] * 4, strict=True)), ids=str)
def test_families_write_the_text_of_plain_decoding(family, dtype):
    assert_texts_are_plains(made(family, dtype=dtype))


def test_parts_of_other_kinds_are_left_alone():
    assert count(lade.invariant(built()), Fused) == 0, "its weights are not packed"
    for activation in ("gelu", "relu"):
        model = made(hidden_act=activation)
        assert count(model, GatedBlock) == count(model, FusedLayer) == 0 < count(model, FusedProjections)
    model = lade.pack(built(), weights="int4", keep=["v_proj"], min_weights=1)
    assert count(lade.invariant(model), FusedProjections) == 0


@pytest.mark.parametrize(("kind", "fused"), [("glm4_moe", 2), ("stablelm", 0)])
def test_where_a_part_of_each_head_is_turned_projections_go_their_own_way(kind, fused):
    sizes = {"hidden_size": 64, "head_dim": 16, "partial_rotary_factor": 0.5, "first_k_dense_replace": 2}
    model = lade.invariant(lade.pack(small_model(kind, **sizes), weights="int4", min_weights=1))
    assert count(model, FusedProjections) == fused, "of these the trial gives whole heads, which they take"
    assert same(fed(model, IDS, [2, 1, 2]), fed(apart(model), IDS, [2, 1, 2]))


def test_a_block_that_computes_something_else_is_left_alone(monkeypatch):
    def swapped(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    monkeypatch.setattr(LlamaMLP, "forward", swapped)
    assert count(made_anew(), GatedBlock) == 0


PARTS = [
    "self_attn", "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp", "mlp.gate_proj", "mlp.down_proj",
    "mlp.act_fn", "input_layernorm", "post_attention_layernorm",
]  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("name", PARTS)
def test_hooks_of_parts_are_heard(name):
    model, seen = made(), list[str]()
    before, part = outputs(model, IDS).logits, model.model.layers[1].get_submodule(name)

    def doubled(module, given, out):
        seen.append(name)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    handle = part.register_forward_hook(doubled)
    found = outputs(model, IDS).logits
    assert seen == [name] and not torch.equal(found, before)
    assert torch.equal(found, outputs(apart(model), IDS).logits)
    handle.remove()
    assert torch.equal(outputs(model, IDS).logits, before)
    other = copy.deepcopy(model)
    part.forward = lambda *args, **kwargs: seen.append("own") or type(part).forward(part, *args, **kwargs)
    assert torch.equal(outputs(model, IDS).logits, before) and seen[-1] == "own"
    assert torch.equal(outputs(other, IDS).logits, before)


def test_parts_that_are_replaced_are_called():
    model = made()
    before, attention = outputs(model, IDS).logits, model.model.layers[0].self_attn
    attention.v_proj = nn.Linear(attention.v_proj.in_features, attention.v_proj.out_features)
    found = outputs(model, IDS).logits
    assert torch.equal(found, outputs(apart(model), IDS).logits) and not torch.equal(found, before)


def test_parts_that_are_replaced_by_others_of_their_kind_are_fused_anew():
    model, other = made_anew(weights="int4"), made(weights="int8", initializer_range=0.5)
    before, layer = outputs(model, IDS).logits, model.model.layers[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layer.self_attn, name, other.model.layers[0].self_attn.get_submodule(name))
    found = outputs(model, IDS).logits
    assert torch.equal(found, outputs(apart(model), IDS).logits) and not torch.equal(found, before)
    assert calls_of(layer).known, "the layer is still made by two calls"
    other = model.model.layers[1]
    assert calls_of(layer).known is not calls_of(other).known, "which have other kernels"


EDITS = {
    "epsilon": lambda norm: setattr(norm, "variance_epsilon", 0.5),
    "assigned data": lambda norm: setattr(norm.weight, "data", norm.weight.data * 2),
    "written": lambda norm: norm.weight.data.mul_(2),
    "copied": lambda norm: norm.weight.data.copy_(torch.arange(norm.weight.numel())),
    "strided": lambda norm: setattr(norm.weight, "data", torch.stack([norm.weight.data, norm.weight.data], 1)[:, 0]),
    "expanded": lambda norm: setattr(
        norm.weight, "data", norm.weight.data.new_full((1,), 2.0).expand(norm.weight.shape)
    ),
    "another dtype": lambda norm: setattr(norm.weight, "data", norm.weight.data.double()),
    "another parameter": lambda norm: setattr(norm, "weight", nn.Parameter(norm.weight.detach() * 2)),
    "tied": lambda norm: setattr(norm, "weight", first(norm.root, FusedLayer).post_attention_layernorm.weight),
    "hook": lambda norm: norm.register_forward_hook(lambda module, given, out: out * 2),
    "own forward": lambda norm: setattr(norm, "forward", lambda x: x * 2),
}


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("input_layernorm", torch.float32),
        ("post_attention_layernorm", HALF),
        ("self_attn.q_norm", HALF),
        ("self_attn.k_norm", torch.float32),
    ],
)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_norm_is_followed_in_passes_of_every_size(edit, part, dtype):
    if edit == "tied" and "self_attn" in part:
        pytest.skip("norms of heads have another size")
    model = made("qwen3", "int8", dtype)
    ids = torch.randint(1, 40, (1, PREPARED_ROWS + 20), generator=torch.Generator().manual_seed(0))
    for kind in (DynamicCache, TreeCache):
        outcome(model, ids[:, :9], [4, 5], kind)  # calls are prepared
    norm = model.model.layers[0].get_submodule(part)
    object.__setattr__(norm, "root", model)
    EDITS[edit](norm)
    expected = outcome(model, ids, [ids.shape[1]], TreeCache)
    for kind, sizes in ((TreeCache, [1] * 3 + [ids.shape[1] - 3]), (DynamicCache, [8, 60, ids.shape[1] - 68])):
        found = outcome(model, ids, sizes, kind)
        assert type(found) is type(expected) and (isinstance(found, str) or torch.equal(found, expected)), sizes


def outcome(model, ids, sizes, kind):
    """The logits of a text that is fed in pieces, or the kind of error."""
    cache, found = kind(), []
    try:
        for piece in ids.split(sizes, 1):
            found.append(outputs(model, piece, cache).logits)
    except Exception as problem:
        return type(problem).__name__
    return torch.cat(found, 1)


def test_global_hooks_are_heard():
    model, seen = made(), []
    expected = outputs(model, IDS).logits
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, out: seen.append(type(module)))
    try:
        found = outputs(model, IDS).logits
    finally:
        handle.remove()
    assert torch.equal(found, expected)
    assert sum(issubclass(kind, nn.Linear) or "Linear" in kind.__name__ for kind in seen) == 15


def test_layers_of_one_shape_share_their_stages():
    model = lade.pack(built(num_hidden_layers=3), weights="int4", min_weights=1)
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    model = lade.invariant(model)
    assert torch.equal(outputs(model, IDS).logits, outputs(apart(model), IDS).logits)
    first, second, third = (calls_of(layer).known for layer in model.model.layers)
    assert first is third and first is not second
    assert len({id(calls_of(layer.mlp).known) for layer in model.model.layers}) == 1


def test_rows_that_autocast_would_cast_go_the_parts_own_way():
    model = made(dtype=HALF)
    embedded = torch.randn(1, 3, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=HALF):
        found, expected = (each(inputs_embeds=embedded).logits for each in (model, apart(model)))
    assert torch.equal(found, expected)


def test_hidden_states_and_attentions_can_be_asked_for():
    model = made()
    found, expected = (outputs(each, IDS, output_hidden_states=True) for each in (model, apart(model)))
    assert len(found.hidden_states) == 3 and all(map(torch.equal, found.hidden_states, expected.hidden_states))


def test_another_attention_is_asked_for():
    model = made()
    expected = outputs(apart(model), IDS).logits
    model.set_attn_implementation("eager")
    assert torch.allclose(outputs(model, IDS).logits, expected, atol=1e-3)
    model.set_attn_implementation("lade_invariant")
    assert torch.equal(outputs(model, IDS).logits, expected)


def test_a_weight_that_was_kept_and_written_into_is_packed_anew():
    model = lade.invariant(lade.pack(built(), weights="int4", keep_original=True, min_weights=1))
    assert count(model, FusedLayer) == 2 and count(model, ChainedDecoder) == 0
    for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.k_proj", "self_attn.o_proj"):
        before = outputs(model, IDS).logits
        with torch.no_grad():
            model.model.layers[1].get_submodule(name).weight.mul_(2)
        found = outputs(model, IDS).logits
        assert torch.equal(found, outputs(apart(model), IDS).logits) and not torch.equal(found, before)


def test_a_bias_that_does_not_fit_is_refused():
    for name in ("mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj"):
        model = made("biases")
        outputs(model, IDS)
        layer = model.model.layers[1].get_submodule(name)
        layer.bias = nn.Parameter(torch.zeros(3))
        with pytest.raises(lade.UnsupportedModelError, match="the bias of a packed layer"):
            outputs(model, IDS)


def test_it_refuses_what_its_parts_refuse():
    model = made()
    block = first(model, GatedBlock)
    with pytest.raises(lade.UnsupportedModelError, match="no gradients"):
        block(rows_of(block, 3, dtype=torch.float32).requires_grad_())
    with pytest.raises(lade.UnsupportedModelError, match="no gradients"):
        model(inputs_embeds=torch.randn(1, 3, 64).requires_grad_())
    with torch.no_grad(), pytest.raises(RuntimeError, match="mat1 and mat2"):
        block(torch.randn(3, block.gate_proj.in_features + 1))
    with torch.autocast("cpu", dtype=HALF), pytest.raises(lade.UnsupportedModelError, match="autocast"):
        outputs(model, IDS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_weights_of_their_own(copied):
    model = made_anew()
    expected = outputs(model, IDS).logits
    again = copied(model)
    calls = [calls_of(module) for module in again.modules() if isinstance(module, Fused)]
    assert len(calls) == 6 and not any(each.known or each.survey for each in calls)
    del model
    assert torch.equal(outputs(again, IDS).logits, expected)
    lade.variant(again)
    assert count(again, Fused) == 0


# All layers in one call


@pytest.fixture
def ahead(monkeypatch):
    """For each pass whose first layer was asked to compute all: whether it did."""
    return answered(monkeypatch, chained_decoder._Run, "made", lambda out, *_: out is not None)


def fed(model, ids, sizes, cache=None, **more):
    """Logits of a text that is fed in pieces, and keys and values of all layers."""
    cache = TreeCache() if cache is None else cache
    found = [outputs(model, piece, cache, **more).logits for piece in ids.split(sizes, 1)]
    used = cache.get_seq_length()
    return [*found, *(states[:, :, :used] for layer in cache.layers for states in (layer.keys, layer.values))]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.one_in(4)
@with_each
@pytest.mark.parametrize("family", WITH_LAYERS)
def test_a_decoder_has_the_bits_of_its_layers(weights, dtype, family, monkeypatch, ahead):
    model = made(family, weights, dtype, num_hidden_layers=3)
    assert count(model, ChainedDecoder) == 1
    other = apart(model)
    with torch.no_grad():
        fits = model.model.is_fit()
    runs = len(runs_of(model))
    assert fits and runs == (3 if family == "gemma2" else 1)
    for threads, rows, sizes in ((1, 1, [4, 1, 9, 1]), (3, 3, [2, 5, 1, 20]), (3, 1, [3, PREPARED_ROWS, 1])):
        use_threads(monkeypatch, threads)
        ids, done = torch.randint(1, 48, (rows, sum(sizes))), len(ahead)
        assert same(fed(model, ids, sizes), fed(other, ids, sizes)), (rows, sizes)
        assert ahead[done:] == [False] * runs + [True] * runs * (len(sizes) - 1), "the first pass allocates the cache"


def test_trees_and_texts_are_fed_in_one_call(monkeypatch, ahead):
    """A pass over a tree has a mask of its own, and a generation grows its cache now and then."""
    monkeypatch.setattr("lade.model.cache_layers.SPARE_TOKENS", 16)
    for family in ("llama", "mistral"):
        model = made(family, max_position_embeddings=2048)
        del ahead[:]
        given = {"input_ids": IDS, "max_new_tokens": 70, "do_sample": False}
        expected = apart(model).generate(**given)
        for lookahead in (lade.LookaheadConfig(4, 3, 4), lade.LookaheadConfig(budget=16)):
            stats = lade.Stats()
            assert torch.equal(lade.generate(model, lookahead=lookahead, stats=stats, **given), expected)
            assert stats.tokens_per_step > 1.1
        assert sum(ahead) > 0.8 * len(ahead) > 50 and ahead.count(False) > 4, "two first passes, and where caches grow"


def test_requests_of_an_engine_are_fed_in_one_call(ahead):
    model = made()
    prompts = torch.randint(1, 48, (5, 9), generator=torch.Generator().manual_seed(0))
    expected = [model.generate(prompt[None], max_new_tokens=20, do_sample=False)[0, 9:].tolist() for prompt in prompts]
    with lade.Engine(model, max_rows=3) as engine:
        handles = [engine.add(prompt.tolist(), max_new_tokens=20, do_sample=False) for prompt in prompts]
        assert [handle.result()[0, 9:].tolist() for handle in handles] == expected
    assert sum(ahead) > 10


class Interrupting(StoppingCriteria):
    """Does something once, amid a call."""

    def __init__(self, do, after):
        self.do, self.after = do, after

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] == self.after:
            self.do()
        return torch.zeros(len(ids), dtype=torch.bool)


def test_hooks_in_the_middle_of_a_call_are_heard(ahead):
    """Passes of one call rely on its first one, but for hooks."""
    model, heard, done = made(), [], 5
    ahead.clear()

    def hook():
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *args: heard.append(1))

    lade.generate(
        model, input_ids=IDS, max_new_tokens=20, do_sample=False, lookahead=lade.LookaheadConfig(budget=1),
        stopping_criteria=StoppingCriteriaList([Interrupting(hook, IDS.shape[1] + done)]),
    )  # fmt: skip
    assert len(heard) == 20 - done and ahead == [False] + [True] * (done - 1)


@pytest.mark.parametrize("what", ["hook", "norm", "layer", "list"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_changes_between_two_passes_is_followed(what, family, ahead):
    types = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]} if family == "gemma3" else {}
    model = made(family, num_hidden_layers=3, **types)
    ids, cache = torch.randint(1, 48, (1, 12), generator=torch.Generator().manual_seed(0)), TreeCache()
    donor = made(family, initializer_range=0.5).model.layers[0].mlp
    ahead.clear()
    fed(model, ids[:, :6], [4, 2], cache)
    first, layer, last = model.model.layers
    if what == "hook":
        layer.mlp.act_fn.register_forward_hook(lambda module, given, out: out * 2)
    elif what == "norm":
        layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight.detach() * 2)
    elif what == "layer":
        layer.mlp = donor
    else:
        model.model.layers = nn.ModuleList([layer, first, last])
    other, more = apart(model), copy.deepcopy(cache)
    assert same(fed(model, ids[:, 6:], [1, 5], cache), fed(other, ids[:, 6:], [1, 5], more))
    runs = 1 + bool(types)
    assert ahead == [False] * runs + [True] * runs + [True, True] * runs * (what != "hook")


def test_other_caches_and_passes_without_one_are_no_different(ahead):
    model = made()
    other = apart(model)
    ahead.clear()
    for kind in (DynamicCache, TreeCache):
        assert same(fed(model, IDS, [2, 1, 2], kind()), fed(other, IDS, [2, 1, 2], kind()))
    assert ahead == [False] * 3 + [False, True, True]
    assert torch.equal(outputs(model, IDS, use_cache=False).logits, outputs(other, IDS, use_cache=False).logits)
    assert not ahead[-1]


def test_a_decoder_that_changes_states_between_layers_has_them_computed_one_by_one(monkeypatch, ahead):
    """As those that add features of images to the states of some layers."""
    model = made(num_hidden_layers=3)
    other = apart(model)

    def adding(self, input_ids=None, cache=None, **more):
        x = self.embed_tokens(input_ids)
        first = cache.get_seq_length()
        positions = self.rotary_emb(x, torch.arange(first, first + x.shape[1])[None])
        for number, layer in enumerate(self.layers):
            x = layer(x + 0.5 * (number == 1), position_embeddings=positions, attention_mask=None, **{CACHE: cache})
        return BaseModelOutputWithPast(self.norm(x))

    monkeypatch.setattr(LlamaModel, "forward", adding)
    caches = TreeCache(), TreeCache()
    ahead.clear()
    for piece in IDS.split([2, 1, 2], 1):
        with torch.no_grad():
            found, expected = (each.model(piece, cache)[0] for each, cache in zip((model, other), caches, strict=True))
        assert torch.equal(found, expected) and caches[0].lengths == caches[1].lengths
    assert ahead == [False, True], "it is not tried again"


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_layers_of_several_types_are_computed_in_runs(family, ahead):
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    more = {"layer_types": types, "sliding_window": 4, "num_hidden_layers": 4, "use_sliding_window": True}
    model = made(family, **{name: value for name, value in more.items() if family == "qwen2" or name[:4] != "use_"})
    ahead.clear()
    ids, other = torch.randint(1, 48, (2, 17), generator=torch.Generator().manual_seed(0)), apart(model)
    assert same(fed(model, ids, [4, 1, 9, 3]), fed(other, ids, [4, 1, 9, 3]))
    assert ahead == [False] * 3 + [True] * 9
    given = {"input_ids": ids[:1], "max_new_tokens": 25, "do_sample": False}
    expected = model.generate(**given)
    for lookahead in (lade.LookaheadConfig(4, 3, 4), lade.LookaheadConfig(budget=16)):
        assert torch.equal(lade.generate(model, lookahead=lookahead, **given), expected)


def test_a_decoder_whose_trial_fails_is_left_alone(monkeypatch):
    monkeypatch.setattr(chained_decoder, "float_bits", lambda number: 0)  # scores are all zero
    model = made_anew()
    assert count(model, FusedLayer) == 2 and count(model, ChainedDecoder) == 0


def test_threads_may_call_a_model_at_once():
    model = made(num_hidden_layers=3)
    prompts = torch.randint(1, 48, (4, 1, 7), generator=torch.Generator().manual_seed(0))
    given = {"max_new_tokens": 30, "do_sample": False, "lookahead": lade.LookaheadConfig(budget=8)}
    expected = [lade.generate(model, input_ids=prompt, **given) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: lade.generate(model, input_ids=prompt, **given), prompts))
    assert same(found, expected)


def test_passes_with_gradients_are_followed_by_others(ahead):
    model = made()
    expected = fed(model, IDS, [2, 1, 2])
    model.model.layers = model.model.layers[:]  # a new list, seen first by a pass with gradients enabled
    with pytest.raises(lade.UnsupportedModelError, match="no gradients"):
        model(IDS)
    done = len(ahead)
    assert same(fed(model, IDS, [2, 1, 2]), expected) and ahead[done:] == [False, True, True]


def test_a_cache_of_another_model_is_refused_as_torch_does(ahead):
    cache = TreeCache()
    fed(made("llama", num_attention_heads=8, num_key_value_heads=8), IDS, [3, 2], cache)
    for model in (made(), made("qwen3")):
        ahead.clear()
        with pytest.raises(RuntimeError, match="size"):
            outputs(model, IDS[:, :1], copy.deepcopy(cache))
        assert ahead == [False]


def test_few_shapes_are_kept(monkeypatch):
    monkeypatch.setattr(chained_decoder, "MOST_SHAPES", 3)
    model = made()
    other, ids = apart(model), torch.randint(1, 48, (1, 40), generator=torch.Generator().manual_seed(0))
    assert same(fed(model, ids, [4, 1, 2, 3, 4, 5, 1, 20]), fed(other, ids, [4, 1, 2, 3, 4, 5, 1, 20]))
    assert len(runs_of(model)[0]._known) == 3


def test_weights_that_are_moved_are_found():
    """Amid a call, whose passes rely on its first one, as well."""
    model = made()
    given = {"max_new_tokens": 20, "do_sample": False, "lookahead": lade.LookaheadConfig(budget=1)}
    expected = lade.generate(model, input_ids=IDS, **given)
    criteria = StoppingCriteriaList([Interrupting(model.share_memory, IDS.shape[1] + 5)])
    assert torch.equal(lade.generate(model, input_ids=IDS, stopping_criteria=criteria, **given), expected)
    (run,) = runs_of(model).values()
    assert run._addresses == [each.data_ptr() for each in run._storages]
