"""`lade.invariant`: what it changes, tries, refuses and undoes."""

import copy
import ctypes
import pickle
import re
from functools import reduce

import accelerate
import pytest
import torch
from inside import attention_name_of
from pretend import short_trials, torch_threads, use_threads
from spies import failing, watched
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import lade
from lade.backends.cpu import kernels
from lade.backends.cpu.invariant import attention, functions, make_invariant
from lade.backends.cpu.invariant.attention import attention_of, invariant_attention
from lade.backends.cpu.invariant.functions import times_logistic
from lade.backends.cpu.invariant.trials import TokenIndex, first_difference
from lade.backends.cpu.invariant.weights import (
    NO_PADDING,
    PaddedRows,
    RowPadding,
    _joined,
    call_padded,
    cancelling,
    pad_rows,
    padding_for,
    padding_of,
)
from lade.backends.cpu.invariant_marker import invariance_of
from lade.backends.cpu.packing import linear, pack
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for, panel_product
from lade.backends.cpu.packing.weight import PanelWeight, in_panels
from lade.testing import toy_model

pytestmark = pytest.mark.by_processor

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def unknown(monkeypatch, own_cache):
    """Trials are short, and no verdict is known."""
    short_trials(monkeypatch)


def state_of(model: nn.Module) -> list[object]:
    kinds = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    return [*kinds, set(vars(model)), attention_name_of(model)]


def test_it_is_undone_without_a_trace():
    model = toy_model(dtype=HALF)
    before, weights = state_of(model), {name: id(weight) for name, weight in model.named_parameters()}
    assert lade.invariant(model) is model
    assert attention_name_of(model) == attention.NAME and state_of(model) != before
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    assert lade.invariant(model) is model  # once more
    assert lade.variant(model) is model
    assert state_of(model) == before
    assert lade.variant(model) is model and state_of(model) == before


def test_copies_are_invariant_too():
    model = lade.invariant(toy_model(dtype=torch.float32))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(ids).logits
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert invariance_of(copied) == invariance_of(model)
            assert torch.equal(copied(ids).logits, expected)
            assert isinstance(copied.lm_head, PaddedRows) and padding_of(copied.lm_head) == padding_of(model.lm_head)
            lade.variant(copied)
            assert type(copied.lm_head) is nn.Linear


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sums of rows, from the first number to the last, in float32."""
    return reduce(torch.add, x.float().unbind(-1))[:, None]


def lone_rows_differ(x: torch.Tensor) -> torch.Tensor:
    """A kernel that sums otherwise for a row by itself."""
    return summed(x.flip(-1) if len(x) == 1 else x)


def odd_rows_differ(x: torch.Tensor) -> torch.Tensor:
    return summed(x.flip(-1) if len(x) % 2 else x)


def many_rows_differ(x: torch.Tensor) -> torch.Tensor:
    return summed(x.flip(-1) if len(x) > 32 or len(x) % 4 else x)


def rows_differ_from(*numbers: int):
    """A kernel that sums otherwise for these numbers of rows."""
    return lambda x: summed(x.flip(-1) if len(x) in numbers else x)


def rows_see_each_other(x: torch.Tensor) -> torch.Tensor:
    return x / x.abs().max()


@pytest.mark.parametrize(
    ("layer", "padding"),
    [
        (summed, NO_PADDING),
        (lone_rows_differ, RowPadding(least=2)),
        (odd_rows_differ, RowPadding(2, 2)),
        (many_rows_differ, RowPadding(4, 4, most=32)),
        (rows_differ_from(500), RowPadding(most=128)),
        (rows_differ_from(*range(129, 1000)), RowPadding(most=128)),
        (rows_differ_from(1, 104, *range(129, 1000)), RowPadding(2, 2, most=96)),
        (rows_differ_from(78, *range(129, 1000)), RowPadding(most=64)),
        (rows_differ_from(*range(61, 1000)), RowPadding(most=48)),
        (rows_see_each_other, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
def test_the_trial_of_rows_finds_the_least_padding(layer, padding, dtype):
    def weighted(x: torch.Tensor) -> torch.Tensor:
        return layer(x.float() * weight.float()).to(dtype)

    weight = cancelling(torch.empty(1, 48, dtype=dtype))[0]
    assert padding_for(weighted, 48, dtype) == padding


@pytest.mark.parametrize(
    ("paddings", "padding"),
    [
        ([RowPadding(8, 8, most=96), RowPadding(32, 32)], RowPadding(32, 32, most=96)),
        ([RowPadding(most=48), RowPadding(32, 32, most=64)], RowPadding(32, 32, most=32)),
        ([RowPadding(most=48), RowPadding(multiple=64)], None),
        ([RowPadding(most=32), RowPadding(64)], None),
        ([RowPadding(), None], None),
    ],
)
def test_one_padding_does_for_several_products(paddings, padding):
    assert _joined(paddings) == padding


@pytest.mark.parametrize(
    ("rows", "fed"), [(1, [4]), (2, [4]), (4, [4]), (5, [6]), (6, [6]), (8, [8]), (9, [8, 4]), (21, [8, 8, 6])], ids=str
)
def test_rows_are_fed_in_pieces_with_rows_of_zeros_that_are_taken_off(rows, fed):
    seen, x = [], torch.randn(1, rows, 3)

    def layer(x):
        seen.append(x.reshape(-1, 3).clone())
        return 2 * x, x.sum(-1)

    doubled, sums = call_padded(layer, x, RowPadding(4, 2, most=8))
    assert list(map(len, seen)) == fed and not torch.cat(seen)[rows:].any()
    assert torch.equal(doubled.view_as(x), 2 * x) and torch.equal(sums.view(1, rows), x.sum(-1))
    assert torch.equal(call_padded(lambda rows: rows + 1, x, RowPadding(most=8)), x + 1)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
def test_the_last_tokens_of_a_batch_are_rows_like_any(dtype):
    """They do not lie one behind another; PyTorch has another kernel for that, above all where there is a bias."""
    layer, states = nn.Linear(32, 48).to(dtype), torch.randn(4, 9, 32).to(dtype)
    pad_rows(layer, RowPadding(4, 4))
    assert torch.equal(layer(states[:, -1:]), layer(states[:, -1].clone())[:, None])


@pytest.mark.usefixtures("known_processor")
def test_rows_of_a_batch_that_are_multiplied_apart_are_caught_and_named(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = PhiForCausalLM(PhiConfig(**sizes, vocab_size=48, dtype=HALF)).to(HALF).eval()
    nn.init.normal_(model.lm_head.bias)
    lade.invariant(model)
    monkeypatch.setattr("lade.backends.cpu.invariant.weights.pad_rows", lambda layer, padding: None)
    monkeypatch.setattr("lade.backends.cpu.invariant.trials.ModelTrial.first_mismatch", lambda self: None)
    with pytest.raises(lade.UnsupportedModelError, match="'lm_head' is the first part"):
        lade.invariant(model)


OF_LOGISTIC = {"silu": functions.SILU, "gelu_tanh": functions.GELU_TANH, "quick_gelu": functions.QUICK_GELU}


@pytest.mark.parametrize("function", ["gelu", *OF_LOGISTIC])
def test_activations_are_what_they_are_wherever_a_number_stands(function):
    known = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }
    logistic, x = OF_LOGISTIC.get(function), 3 * torch.randn(4001, dtype=torch.float32)
    ours = functions.gelu if logistic is None else lambda x: functions.times_logistic(x, *logistic)
    for dtype, tolerance in ((torch.float32, 1e-6), (HALF, 8e-3), (torch.float16, 1e-3)):
        numbers = x.to(dtype)
        whole = ours(numbers)
        exact = known[function](numbers.double()).to(dtype)
        torch.testing.assert_close(whole.float(), exact.float(), rtol=tolerance, atol=tolerance)
        if dtype != torch.float32:  # nearly all are rounded to the nearest
            assert (whole == exact)[numbers > -3].float().mean() > 0.99
        for size in (1, 7, 31, 48, 1000):
            assert torch.equal(torch.cat([ours(part) for part in numbers.split(size)]), whole)
        assert torch.equal(ours(numbers[::3]), whole[::3])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_what_is_times_a_logistic_function_is_so_at_the_ends_too(dtype):
    x = torch.tensor([torch.nan, torch.inf, 1e30, 200.0, 88.0, -80.0, -1e30, 0.0, -0.0, 1e-30]).to(dtype)
    found = times_logistic(x)
    torch.testing.assert_close(found, nn.functional.silu(x), equal_nan=True, rtol=1e-2, atol=0.0)
    assert found[-2].signbit() and times_logistic(-x[1:2]).isnan()
    assert torch.equal(
        times_logistic(x[1:], 1.6, 0.07), torch.where(x[1:] > 80, x[1:], times_logistic(x[1:], 1.6, 0.07))
    )


def test_threads_share_the_numbers_and_change_nothing(monkeypatch):
    x = 3 * torch.randn(200_001)
    alone = times_logistic(x)
    use_threads(monkeypatch, 3)
    shared = watched(monkeypatch, functions, "run_on_team", lambda *args, **_: args[2])
    assert torch.equal(times_logistic(x), alone) and shared == [3]


def test_a_smaller_team_than_was_asked_for_does_all_the_work(monkeypatch):
    x, query, key = torch.randn(200_001), torch.randn(1, 4, 70, 32), torch.randn(1, 2, 90, 32)
    rows, weight = torch.randn(40, 640).to(HALF), torch.randn(640, 640).to(HALF)

    def all_work() -> list[torch.Tensor]:
        found = [times_logistic(x), invariant_attention(nn.Identity(), query, key, key, None)[0]]
        if not panel_for(HALF):
            return found
        panels = PanelWeight(in_panels(weight, panel=panel_for(HALF)), 640, 640)
        return found + [panel_product(rows[:n], panels, None) for n in (3, 40)]

    expected, entered = all_work(), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def enter_alone(address, place, threads, flags):
        entered.append(threads)
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)(place)

    use_threads(monkeypatch, 3)
    monkeypatch.setattr(kernels, "_entrance", lambda: ctypes.cast(enter_alone, ctypes.c_void_p).value)
    monkeypatch.setattr(kernels, "TEAM", kernels.ThreadTeam())  # that of the process may rest
    assert all(map(torch.equal, all_work(), expected))
    assert entered == [3] * len(expected)


@pytest.mark.parametrize(
    ("padding", "said"),
    [
        (None, r"layer 'model.layers.0.self_attn.q_proj' \(Linear in float32\)"),
        (NO_PADDING, r"'model.layers.0.self_attn.\w_proj' is the first part"),
    ],
    ids=["never alike", "without padding"],
)
def test_a_layer_whose_rows_differ_is_named_and_nothing_has_changed(padding, said, monkeypatch):
    model = toy_model(dtype=torch.float32)
    before = state_of(model)
    monkeypatch.setattr("lade.backends.cpu.invariant.weights.padding_for", lambda *args: padding)
    with pytest.raises(lade.UnsupportedModelError, match=said):
        lade.invariant(model)
    assert state_of(model) == before


class OtherBesideOthers(nn.Module):
    """An activation that is another one where there are several tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = nn.functional.silu(x)
        return found if x.shape[1] == 1 else found * 1.001


def test_an_activation_that_rounds_by_place_is_caught_and_named(monkeypatch):
    def left_as_they_are(model):
        for layer in model.model.layers:
            layer.mlp.act_fn = OtherBesideOthers()

    monkeypatch.setattr(make_invariant, "replace_activations", left_as_they_are)
    with pytest.raises(lade.UnsupportedModelError, match=r"'model.layers.\d.mlp.act_fn' is the first part"):
        lade.invariant(toy_model(dtype=torch.float32))


def test_attention_that_keeps_no_order_is_caught(monkeypatch):
    def shifted_by_number(query, *states):
        return attention_of(query, *states) + query.shape[2]

    monkeypatch.setattr(attention, "attention_of", shifted_by_number)
    with pytest.raises(lade.UnsupportedModelError, match="does not keep its summation order"):
        lade.invariant(toy_model(dtype=torch.float32))


def test_the_first_difference_is_that_of_the_innermost_module():
    x, y, places = torch.zeros(1, 1, 4), torch.zeros(1, 3, 4), (TokenIndex(1, 1), TokenIndex(1, 3, 2))
    other = y.clone()
    other[0, 2, 1] = 1
    alone = [("a", x), ("b.inner", x), ("b", x)]
    tree = [("a", y), ("b.inner", other), ("b", other)]
    assert first_difference(alone, tree, *places) == "b.inner"
    assert first_difference(alone, tree, places[0], TokenIndex(1, 3, 1)) is None
    rows = other.unflatten(1, (3, 1)).flatten(0, 1)  # [3, 1, 4]
    for batch in (rows, rows[:, 0]):
        assert first_difference([("a", x)], [("a", batch)], places[0], TokenIndex(3, 1)) == "a"


def encoder_decoder():
    sizes = {"d_model": 16, "vocab_size": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    return BartForConditionalGeneration(BartConfig(**sizes, **layers, dtype=torch.float32)).eval()


def bloom():
    return BloomForCausalLM(BloomConfig(n_layer=1, n_head=2, hidden_size=16, vocab_size=32)).eval()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: toy_model(dtype=torch.float64), "it is in float64"),
        (lambda: toy_model(dtype=HALF).train(), "training mode"),
        (lambda: toy_model(dtype=HALF).to("meta"), "it is on meta"),
        (lambda: nn.Linear(4, 4), "not a transformers model that generates"),
        (lambda: "a name", "str cannot be made invariant: it is not a transformers model"),
        (lambda: torch.compile(toy_model(dtype=HALF), backend="eager"), "it is compiled"),
        (encoder_decoder, "it has an encoder"),
        (bloom, "does not use transformers' attention interface"),
    ],
)
def test_what_cannot_be_made_invariant_is_refused(make, reason):
    with pytest.raises(lade.UnsupportedModelError, match=reason):
        lade.invariant(make())


def test_another_number_of_threads_is_decoded_plainly():
    model = lade.invariant(toy_model(dtype=HALF))
    with torch_threads(torch.get_num_threads() + 1) as threads:
        support = lade.supports(model)
        assert not support and re.search(f"for {threads} threads?, but torch now uses {threads + 1}", support.reason)
        ids = torch.arange(1, 9)[None]
        with pytest.warns(lade.FallbackWarning, match="call lade.invariant"):
            ours = lade.generate(model, input_ids=ids, max_new_tokens=5)
        assert torch.equal(ours, model.generate(ids, max_new_tokens=5))
    assert lade.supports(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.half(), "invariant in bfloat16, but is now in float16: call lade.invariant"),
        (lambda model: model.set_attn_implementation("sdpa"), "attention implementation was changed"),
        (lambda model: setattr(model, "more", nn.Linear(2, 2)), r"with \d+ modules, but now has \d+: call lade"),
        (lambda model: model.compile(backend="eager"), "compilers choose other kernels: leave it uncompiled"),
        (
            lambda model: model.resize_token_embeddings(64, mean_resizing=False),
            r"changing \d+ modules, of which only \d+ are",
        ),
        (
            lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.SiLU()),
            r"by changing \d+ modules, .*: call lade",
        ),
    ],
    ids=["dtype", "attention", "modules", "compiled", "embeddings", "activation"],
)
def test_what_has_changed_since_the_trial_is_found(change, reason):
    model = lade.invariant(toy_model(dtype=HALF))
    change(model)
    support = lade.supports(model)
    assert not support and re.search(reason, support.reason)
    ids = torch.arange(1, 9)[None]
    with pytest.raises(lade.UnsupportedModelError, match=reason):
        lade.generate(model, input_ids=ids, max_new_tokens=5, lookahead=lade.LookaheadConfig())
    if "call" in reason:
        assert lade.supports(lade.invariant(model))


def with_other_weights(model):
    model.load_state_dict(toy_model(dtype=torch.float32, seed=1).state_dict())


def with_others_own_weights(model):
    model.load_state_dict(toy_model(dtype=torch.float32, seed=1).state_dict(), assign=True)


def in_shared_memory(model):
    model.share_memory().requires_grad_(False)


@pytest.mark.parametrize("change", [with_other_weights, with_others_own_weights, in_shared_memory])
@pytest.mark.parametrize("packed", [False, True])
def test_what_changes_weights_alone_leaves_a_model_invariant(change, packed):
    model = toy_model(dtype=torch.float32)
    lade.invariant(lade.pack(model, min_weights=1) if packed else model)
    if packed and change is not in_shared_memory:
        with pytest.raises(lade.UnsupportedModelError, match=r"cannot be replaced; call lade.unpack"):
            change(model)
        return
    change(model)
    ids = torch.arange(1, 20)[None]
    plain = model.generate(ids, max_new_tokens=30, do_sample=False)
    paper = lade.LookaheadConfig(4, 3, 4)
    assert torch.equal(lade.generate(model, input_ids=ids, max_new_tokens=30, do_sample=False, lookahead=paper), plain)


def dispatch(model):
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def with_layer_forward(model):
    head = model.lm_head
    head.forward = lambda x, forward=head.forward: forward(x)


@pytest.mark.parametrize("hook", [dispatch, with_layer_forward])
@torch.no_grad()
def test_layers_with_hooks_are_neither_made_invariant_nor_restored(hook):
    """Hooks hold on to what a layer's class was when they came."""
    ids, model = torch.arange(1, 9)[None], toy_model(dtype=torch.float32)
    hook(model)
    before = state_of(model)
    with pytest.raises(lade.UnsupportedModelError, match=r"has hooks.*remove_hook_from_submodules"):
        lade.invariant(model)
    assert state_of(model) == before
    model = lade.invariant(toy_model(dtype=torch.float32))
    expected = model(ids).logits
    hook(model)
    after = state_of(model)
    with pytest.raises(lade.UnsupportedModelError, match=r"layer '\S+' has hooks.*remove_hook_from_submodules"):
        lade.variant(model)
    assert state_of(model) == after and torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_what_accelerate_leaves_behind_of_its_hooks_is_no_hindrance():
    ids, model = torch.arange(1, 9)[None], toy_model(dtype=torch.float32)
    expected = model(ids).logits
    for change in (lade.invariant, lade.variant):
        dispatch(model)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert "forward" in vars(model.lm_head)
        change(model)
    assert torch.equal(model(ids).logits, expected) and type(model.lm_head) is nn.Linear
    dispatch(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert lade.pack(model, min_weights=1)(ids).logits.shape == expected.shape


@pytest.fixture(scope="module")
def wide_model():
    """Packed layers of several numbers of inputs, for which kernels have several ways to sum; few of each."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 640, "intermediate_size": 4160, "num_hidden_layers": 1, "num_attention_heads": 10}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, dtype=HALF)).to(HALF).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "faster_panel", lambda shapes: 0)  # what is faster is not the subject
        return lade.pack(model, min_weights=1)


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 33, 129, 299])
def test_a_prompt_rounds_alike_however_it_is_cut(wide_model, first):
    if not invariance_of(wide_model):
        lade.invariant(wide_model)
    ids = torch.randint(64, (1, 300), generator=torch.Generator().manual_seed(1))
    whole = wide_model(ids).logits
    before = wide_model(ids[:, :first])
    behind = wide_model(ids[:, first:], past_key_values=before.past_key_values)
    assert torch.equal(torch.cat([before.logits, behind.logits], 1), whole)


needs_panels = pytest.mark.skipif(not panel_for(HALF), reason="neither tiles (AMX) nor AVX512-BF16 here")
needs_float16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="oneDNN has no float16 product for this processor"
)


def packed_parts(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@needs_panels
def test_in_panels_a_packed_layer_is_fed_all_rows_at_once(wide_model):
    parts = packed_parts(lade.invariant(wide_model))
    assert {part.in_features for part in parts} == {640, 4160}
    assert all(part.panel and padding_of(part) == NO_PADDING for part in parts)
    assert not any(part.panel for part in packed_parts(lade.variant(wide_model)))


@needs_panels
@torch.no_grad()
@pytest.mark.parametrize("keep", [False, True])
def test_weights_in_panels_are_kept_once_and_come_back(keep):
    ids, model = torch.arange(1, 9)[None], toy_model("gpt2", dtype=HALF)  # whose layers have biases and turned weights
    weights = copy.deepcopy(model.state_dict())
    expected = lade.pack(model, keep_original=keep, min_weights=1)(ids).logits
    lade.invariant(model)
    parts, logits = packed_parts(model), model(ids).logits
    assert all(part.panel for part in parts)
    assert all((part.weight.data_ptr() == part._packed.data_ptr()) != part.keeps_original for part in parts)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(part.panel for part in packed_parts(copied))
        assert torch.equal(copied(ids).logits, logits)
    lade.variant(model)
    for state in (copied.state_dict(), model.state_dict(), lade.unpack(lade.variant(copied)).state_dict()):
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    assert torch.equal(model(ids).logits, expected)


@needs_panels
def test_interrupted_while_weights_move_a_model_is_what_it_was(monkeypatch):
    model = lade.pack(toy_model(dtype=HALF), min_weights=1)
    weights = copy.deepcopy(model.state_dict())
    failing(monkeypatch, linear, "in_panels", KeyboardInterrupt, calls={3})
    with pytest.raises(KeyboardInterrupt):
        lade.invariant(model)
    assert not any(part.panel for part in packed_parts(model))
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def without_panels(patch):
    patch.setattr(linear, "panel_for", lambda dtype: 0)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=needs_float16), HALF])
def test_without_products_for_its_dtype_the_layout_of_a_packed_layer_stays(dtype, monkeypatch):
    if dtype == HALF:
        without_panels(monkeypatch)
    model = lade.invariant(lade.pack(toy_model(dtype=dtype), min_weights=1))
    assert not any(part.panel for part in packed_parts(model))


@needs_panels
def test_a_copy_that_is_revived_without_products_for_panels_has_the_other_layout(monkeypatch):
    model = lade.invariant(lade.pack(toy_model(dtype=HALF), min_weights=1))
    pickled = pickle.dumps(model)
    without_panels(monkeypatch)
    revived = pickle.loads(pickled)
    assert not any(part.panel for part in packed_parts(revived))
    assert torch.equal(revived.lm_head.dense_weight(), model.lm_head.dense_weight())


@needs_panels
def test_a_product_in_panels_that_depends_on_its_rows_is_caught(monkeypatch):
    def product(x, weight, bias):
        found = panel_product(x, weight, bias)
        return found if x.numel() == x.shape[-1] else -panel_product(-x, weight, bias) + x.amax()

    monkeypatch.setattr(linear, "panel_product", product)
    model = lade.pack(toy_model(dtype=HALF), min_weights=1)
    with pytest.raises(lade.UnsupportedModelError, match="rounds a token differently"):
        lade.invariant(model)
    assert not any(part.panel for part in packed_parts(model)), "it is as it was"


def test_packed_layers_are_padded():
    model = lade.pack(toy_model(dtype=HALF), min_weights=1)
    lade.invariant(model)
    with pytest.raises(lade.UnsupportedModelError, match=r"lade.variant"):
        lade.unpack(model)
    lade.unpack(lade.variant(model))
    assert type(model.lm_head) is nn.Linear
    lade.invariant(model)
    with pytest.raises(lade.UnsupportedModelError, match=r"lade.variant"):
        lade.pack(model, min_weights=1)
