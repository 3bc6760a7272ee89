"""The attention `lade_tree` where its kernel does not run, and the mask that knows its tree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inside import attention_name_of, force_attention
from small_models import small_model
from trees import CPU, Case, attention, cases, tree_of

import lade
from lade.backends.tree_attention import backend as module
from lade.backends.tree_attention.backend import NAME, kernel_for, tree_attention
from lade.backends.tree_attention.tree_mask import TreeMask
from lade.model.inputs import FULL, AttentionSpan, MaskPlan, StepInputs
from lade.testing import toy_model


class Layer(torch.nn.Module):
    """What the interface wants to know of an attention layer."""

    def __init__(self, groups: int, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


@given(
    cases(most_nodes=12, longest=12), st.integers(1, 2), st.integers(1, 3), st.sampled_from([None, 3.0]), st.booleans()
)
def test_a_tree_without_a_kernel(case, kv_heads, group, softcap, with_sinks):
    query, key, value = case.states(kv_heads, group, dtype=torch.float64)
    sinks = torch.randn(query.shape[1], dtype=torch.float64) if with_sinks else None
    expected = attention(query, key, value, case.allowed(), 8**-0.5, softcap, sinks)
    found, weights = tree_attention(Layer(group), query, key, value, case.mask(), softcap=softcap, s_aux=sinks)
    assert weights is None and found.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["causal", "boolean", "additive", "bidirectional"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_an_ordinary_pass(kind, softcap):
    """Masks as transformers makes them for SDPA: none for causal attention, boolean, or a user's own to be added."""
    slots = 6
    query, key, value = (torch.randn(2, heads, slots, 8, dtype=torch.float64) for heads in (4, 2, 2))
    allowed = torch.ones(2, slots, slots, dtype=torch.bool)
    allowed = allowed if kind == "bidirectional" else allowed.tril()
    mask = None
    if kind in ("boolean", "additive"):
        allowed = allowed.clone()
        allowed[1, 2:, :2] = False  # left padding
        mask = allowed[:, None]
    if kind == "additive":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    layer, arguments = Layer(2, is_causal=kind != "bidirectional"), {"scaling": 0.2, "softcap": softcap}
    sinks = None if softcap is None else torch.randn(4, dtype=torch.float64)
    expected = attention(query, key, value, allowed, 0.2, softcap, sinks)
    torch.testing.assert_close(tree_attention(layer, query, key, value, mask, s_aux=sinks, **arguments)[0], expected)
    other = Layer(2, is_causal=not layer.is_causal)  # a call may say it otherwise
    arguments["is_causal"] = layer.is_causal
    torch.testing.assert_close(tree_attention(other, query, key, value, mask, s_aux=sinks, **arguments)[0], expected)


def test_one_token_sees_the_whole_cache():
    query, key, value = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (1, 5, 5))
    allowed = torch.ones(1, 1, 5, dtype=torch.bool)
    for softcap in (None, 3.0):
        found, _ = tree_attention(Layer(1), query, key, value, None, softcap=softcap)
        torch.testing.assert_close(found, attention(query, key, value, allowed, 8**-0.5, softcap))


def test_a_position_bias_beside_a_soft_cap_is_refused():
    states = [torch.randn(1, 2, 3, 8) for _ in range(3)]
    with pytest.raises(ValueError, match="position bias"):
        tree_attention(Layer(1), *states, None, softcap=3.0, position_bias=torch.zeros(1, 2, 3, 3))


def test_padded_rows_and_gradients_are_those_of_sdpa():
    model = toy_model(attention="sdpa")
    ids = torch.randint(1, 16, (2, 9))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    results = []
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = model(ids, attention_mask=padding).logits
        logits[:, -1].sum().backward()
        results.append([logits, *(each.grad.clone() for each in model.parameters() if each.grad is not None)])
    assert len(results[0]) > 5
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens", [1, 9])
def test_static_caches_of_plain_decoding(tokens):
    model = toy_model(attention="sdpa")
    texts = []
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        ids = torch.arange(1, tokens + 1)[None]
        texts.append(model.generate(ids, do_sample=False, max_new_tokens=12, cache_implementation="static"))
    assert torch.equal(*texts)


def test_dropout_is_sdpas():
    case = Case([tree_of([0, 0])], [4], AttentionSpan(window=3))
    query, key, value = case.states(2, 1, dtype=torch.float64)
    torch.manual_seed(0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=case.allowed()[:, None], dropout_p=0.5
    )
    torch.manual_seed(0)
    found, _ = tree_attention(Layer(1), query, key, value, case.mask(), dropout=0.5)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_dropout_beside_a_soft_cap_is_for_training():
    states = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    layer = Layer(1).eval()
    plain, dropped = (tree_attention(layer, *states, None, dropout=p, softcap=3.0)[0] for p in (0.0, 0.5))
    assert torch.equal(plain, dropped)
    trained = tree_attention(layer.train(), *states, None, dropout=0.5, softcap=3.0)[0]
    assert not torch.equal(plain, trained)


class FakeKernel:
    """Says that it serves whatever it is given, and what it was given."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def serves(self, *states: torch.Tensor) -> bool:
        return True

    def attend(self, *args: object, **kwargs: object) -> str:
        self.given.append((args, kwargs))
        return "found"


def test_a_kernel_gets_trees_and_nothing_else(monkeypatch):
    kernel = FakeKernel()
    monkeypatch.setattr(module, "_kernel", lambda: kernel)
    case = Case([tree_of([0, 0])], [4])
    query, key, value = case.states(2, 1, dtype=torch.float64)
    sinks = torch.randn(2, dtype=torch.float64)
    mask = case.mask()
    found = tree_attention(Layer(1), query, key, value, mask, scaling=0.3, softcap=5.0, s_aux=sinks)
    assert found == ("found", None) and mask._dense is None
    [((*given, given_mask), options)] = kernel.given
    assert given_mask is mask and options == {"scale": 0.3, "softcap": 5.0, "sinks": sinks}
    assert all(ours is theirs for ours, theirs in zip(given, (query, key, value), strict=True))

    tree_attention(Layer(1), query, key, value, case.allowed()[:, None])
    tree_attention(Layer(1), query, key, value, case.mask(), dropout=0.5)
    tree_attention(Layer(1), query, key, value, case.mask(), position_bias=torch.zeros(1, 2, 3, 7, dtype=torch.float64))
    tree_attention(Layer(1), query.requires_grad_(), key, value, case.mask())
    assert len(kernel.given) == 1
    with torch.no_grad():
        tree_attention(Layer(1), query, key, value, case.mask())
    assert len(kernel.given) == 2


def test_without_triton_there_is_no_kernel(monkeypatch):
    query = torch.randn(1, 1, 1, 16)
    monkeypatch.setattr(module, "HAS_TRITON", False)
    assert kernel_for(query, query, query) is None


def test_models_outside_of_the_interface_are_refused():
    """Their attention would add the boolean masks of `lade_tree` to the scores."""
    model = small_model("bloom", attention=NAME)
    assert attention_name_of(model) == NAME
    support = lade.supports(model)
    assert not support and "interface" in support.reason and "eager" in support.reason


def test_other_kernels_are_still_refused():
    model = toy_model()
    force_attention(model, "flex_attention")
    assert "flex_attention" in lade.supports(model).reason


@given(cases())
def test_it_is_what_each_query_sees(case):
    mask = case.mask()
    assert mask.shape == case.allowed()[:, None].shape and mask.dtype == torch.bool
    assert torch.equal(mask.dense(), case.allowed()[:, None])
    inputs, dense = case.inputs, case.dense
    assert torch.equal(dense.mask(case.span), mask.dense())
    assert torch.equal(inputs.ids, dense.ids) and torch.equal(inputs.positions, dense.positions)
    assert torch.equal(inputs.key_positions, dense.key_positions)


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 64, 65, 128])
def test_bits_fill_words_of_32(nodes):
    case = Case([tree_of(list(range(nodes - 1)))], [2])  # a chain: the last node sees all
    words = case.inputs.slots.ancestors
    assert words.dtype == torch.int32 and words.shape == (1, nodes, -(-nodes // 32))
    assert torch.equal(case.mask().dense(), case.allowed()[:, None])


@given(cases(most_nodes=6, longest=8), st.data())
def test_rows_may_begin_their_trees_in_slots_of_their_own(case, data):
    slots = case.inputs.slots
    firsts = [length + data.draw(st.integers(0, 3)) for length in slots.lengths.tolist()]
    nodes = slots.node_positions.shape[1]
    moved = type(slots)(
        **{**vars(slots), "firsts": torch.tensor(firsts, dtype=torch.int32), "width": max(firsts) + nodes + 2}
    )
    dense, plain = TreeMask(moved, case.span).dense(), case.mask().dense()
    assert dense.shape[-1] == moved.width
    for row, (length, first) in enumerate(zip(slots.lengths.tolist(), firsts, strict=True)):
        assert torch.equal(dense[row, ..., :length], plain[row, ..., :length])
        assert torch.equal(dense[row, ..., first : first + nodes], plain[row, ..., -nodes:])
        assert not dense[row, ..., length:first].any() and not dense[row, ..., first + nodes :].any()


def test_any_operation_gets_the_dense_mask():
    case = Case([tree_of([0, 0, 1])], [3], AttentionSpan(window=2))
    mask, dense = case.mask(), case.allowed()[:, None]
    assert torch.equal(~mask, ~dense) and torch.equal(mask[..., 1:], dense[..., 1:])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(mask.to(torch.float32), dense.float()) and mask.any() and type(mask.clone()) is torch.Tensor
    assert mask.sum() == dense.sum() and torch.cat([mask, mask]).shape[0] == 2
    states = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    found = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask)
    assert torch.equal(found, torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=dense))
    assert "TreeMask" in repr(mask)


def test_it_is_made_dense_once_and_only_when_somebody_looks():
    mask = Case([tree_of([0])], [3]).mask()
    assert mask._dense is None and mask.shape == (1, 1, 2, 5) and mask.device == CPU and mask.ndim == 4
    assert mask._dense is None and mask.dense() is mask.dense()


def test_a_plan_gives_one_to_each_layer_type():
    spans = {"full_attention": FULL, "sliding_attention": AttentionSpan(window=2)}
    masks, expected = (
        plan.masks(plan.inputs([tree_of([0, 0])], [4], CPU), torch.float32)
        for plan in (MaskPlan(spans, by_layer_type=True, additive=False, compact=compact) for compact in (True, False))
    )
    assert isinstance(masks, dict) and isinstance(expected, dict)
    assert masks.keys() == expected.keys()
    for kind, mask in masks.items():
        assert isinstance(mask, TreeMask) and torch.equal(mask.dense(), expected[kind])
    assert masks["full_attention"].slots is masks["sliding_attention"].slots


def test_rows_that_hold_nodes_get_dense_masks_unless_there_is_but_one():
    plan = MaskPlan({"attention": FULL}, by_layer_type=False, additive=False, compact=True)
    tree = tree_of([0, 0, 2])
    for held, expected in [([2], TreeMask), ([0, 0], TreeMask), ([2, 0], torch.Tensor)]:
        trees, lengths = [tree] * len(held), [5 + own for own in held]
        inputs, dense = plan.inputs(trees, lengths, CPU, held), StepInputs.of(trees, lengths, CPU, held)
        mask = plan.masks(inputs, torch.float32)
        assert type(mask) is expected and torch.equal(mask.clone(), dense.allowed[:, None])
        assert torch.equal(inputs.ids, dense.ids) and torch.equal(inputs.positions, dense.positions)


def test_the_kernel_gets_what_it_can_read():
    slots = Case([tree_of([0] * 39)], [4]).inputs.slots
    for name, wrong in [("lengths", slots.lengths.long()), ("ancestors", slots.ancestors.mT.contiguous().mT)]:
        with pytest.raises(ValueError, match=f"{name} is .* give contiguous int32"):
            type(slots)(**{**vars(slots), name: wrong})
