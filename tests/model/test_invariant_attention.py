"""`lade_invariant`: right, and each query's bits are the same whatever else is in the pass."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import Case, attention, cases, tree_of

from lade.model.attention_span import AttentionSpan
from lade.model.invariant.attention_trial import Heads, attention_keeps_order
from lade.model.invariant_attention import attention as module
from lade.model.invariant_attention import sums
from lade.model.invariant_attention.attention import invariant_attention
from lade.model.invariant_attention.placed_mask import PlacedMask, placed_mask
from lade.model.invariant_attention.sums import weighted_sums

LAYER = torch.nn.Identity()


def placed(case: Case) -> PlacedMask:
    inputs = case.dense
    return PlacedMask.of(inputs.mask(case.span), inputs.key_positions)


def states(case: Case, kv_heads: int, group: int, dim: int = 8) -> list[torch.Tensor]:
    rows, step, slots = case.allowed().shape
    shapes = [(rows, kv_heads * group, step, dim), (rows, kv_heads, slots, dim), (rows, kv_heads, slots, dim)]
    return [torch.randn(shape) for shape in shapes]


@given(
    cases(most_nodes=12, longest=150), st.integers(1, 2), st.integers(1, 3), st.sampled_from([None, 3.0]), st.booleans()
)
def test_it_is_attention(case, kv_heads, group, softcap, with_sinks):
    query, key, value = states(case, kv_heads, group)
    sinks = torch.randn(query.shape[1]) if with_sinks else None
    expected = attention(*(each.double() for each in (query, key, value)), case.allowed(), 8**-0.5, softcap, sinks)
    found, _ = invariant_attention(LAYER, query, key, value, placed(case), softcap=softcap, s_aux=sinks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("known_processor")
@settings(max_examples=examples(40))
@given(cases(most_nodes=12, longest=150), st.sampled_from([1, 5]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_node_has_the_bits_of_its_path_alone(case, group, dtype):
    """Each row's path is put into slots of its own, in order, as plain decoding has it."""
    query, key, value = (each.to(dtype) for each in states(case, 2, group, dim=16))
    mask, allowed = placed(case), case.allowed()
    found, _ = invariant_attention(LAYER, query, key, value, mask, softcap=5.0)
    for row, tree in enumerate(case.trees):
        for node in range(len(tree) - case.cached):
            seen = allowed[row, node].nonzero()[:, 0]
            positions = mask.positions[row, seen]
            width = int(positions[-1]) + 1
            alone_key, alone_value = (torch.zeros(1, 2, width, 16, dtype=dtype) for _ in range(2))
            alone_key[0, :, positions], alone_value[0, :, positions] = key[row][:, seen], value[row][:, seen]
            visible = torch.zeros(1, 1, 1, width, dtype=torch.bool)
            visible[..., positions] = True
            alone_mask = PlacedMask.of(visible, torch.arange(width)[None])
            one = query[row : row + 1, :, node : node + 1]
            alone, _ = invariant_attention(LAYER, one, alone_key, alone_value, alone_mask, softcap=5.0)
            assert torch.equal(alone[0, 0], found[row, node])


def test_a_large_tree_is_cut_into_pieces():
    case = Case([tree_of([number // 8 for number in range(200)])], [70])
    assert len(placed(case).pieces) > 1
    query, key, value = states(case, 1, 2)
    found, _ = invariant_attention(LAYER, query, key, value, placed(case))
    expected = attention(query.double(), key.double(), value.double(), case.allowed(), 8**-0.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("known_processor")
@pytest.mark.parametrize("window", [None, 70])
def test_a_text_may_be_padded_cut_and_windowed(window):
    """The last token of a text: alone, left of others' padding, and from a cache that has dropped what is too far."""
    span = AttentionSpan(window=window)
    query, key, value = (torch.randn(1, heads, 200, 16) for heads in (4, 2, 2))
    positions = torch.arange(200)[None]
    near = span(positions[:, -1:, None], positions[:, None])
    first = 0 if window is None else 200 - window
    found = []
    for pad, start in ((0, 0), (37, 0), (0, first)):
        allowed = torch.nn.functional.pad(near.expand(1, 1, 200), (pad, 0))[:, None, :, start:]
        placed_at = torch.nn.functional.pad(positions, (pad, 0), value=-1)[:, start:]
        padded = [torch.nn.functional.pad(each, (0, 0, pad, 0), value=7.0)[:, :, start:] for each in (key, value)]
        found.append(invariant_attention(LAYER, query[:, :, -1:], *padded, PlacedMask.of(allowed, placed_at))[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_query_that_sees_nothing_gets_zeros():
    allowed = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    allowed[:, :, 0] = False
    query, key, value = (torch.randn(1, 2, length, 8) for length in (3, 5, 5))
    found, _ = invariant_attention(LAYER, query, key, value, PlacedMask.of(allowed, torch.arange(5)[None]))
    assert not found[:, 0].any() and found[:, 1:].all()


def test_padding_on_the_left_has_no_positions():
    mask = placed_mask(2, 1, 5, q_offset=4, attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
    assert mask.positions.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert mask[0, 0, 0].tolist() == [False, False, True, True, True]


def test_masks_of_unknown_positions_are_refused():
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="does not say at which positions"):
        invariant_attention(LAYER, query, query, query, torch.zeros(1, 1, 3, 3))
    with pytest.raises(ValueError, match="no dropout"):
        invariant_attention(LAYER, query, query, query, None, dropout=0.1)


HEADS = Heads(queries=6, keys=2, size=32, value_size=32)


@pytest.fixture
def few_texts(monkeypatch):
    monkeypatch.setattr("lade.model.invariant.attention_trial.TEXTS", (60, 257))


@pytest.mark.usefixtures("known_processor")
def test_the_trial_passes(few_texts):
    assert attention_keeps_order(HEADS) and attention_keeps_order(HEADS._replace(size=128, value_size=128))


def test_another_order_of_summation_is_caught(few_texts, monkeypatch):
    """Of a few queries from the last key to the first."""
    right = module.weighted_sums

    def reversed_for_few(weights, value):
        return right(weights.flip(3), value.flip(2)) if weights.shape[2] < 8 else right(weights, value)

    monkeypatch.setattr(module, "weighted_sums", reversed_for_few)
    assert not attention_keeps_order(HEADS)


def test_a_matrix_product_in_place_of_sums_is_caught(few_texts, monkeypatch):
    def product(weights, value):
        return weights @ value, weights.sum(-1, keepdim=True)

    monkeypatch.setattr(module, "weighted_sums", product)
    assert not attention_keeps_order(HEADS)


def test_lone_queries_without_padding_are_caught(few_texts, monkeypatch):
    """Some kernels sum up small heads alike, but none all of them."""
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    monkeypatch.setattr(module, "ROWS", 1)
    assert not all(map(attention_keeps_order, (HEADS, HEADS._replace(size=128, value_size=128))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_right_whatever_lies_between_and_however_many_threads_there_are(dtype, monkeypatch):
    weights, cached = torch.rand(2, 3, 5, 150), torch.randn(2, 3, 200, 24).to(dtype)
    weights[..., ::7] = 0.0
    value = cached[:, :, 20:170]
    values, totals = weighted_sums(weights, value)
    torch.testing.assert_close(values.double(), weights.double() @ value.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(totals[..., 0].double(), weights.double().sum(-1), rtol=1e-5, atol=1e-5)
    kept = weights[0, 0, 0].nonzero()[:, 0]
    alone, total = weighted_sums(weights[:1, :1, :1, kept].contiguous(), value[:1, :1, kept])
    assert torch.equal(alone[0, 0, 0], values[0, 0, 0]) and torch.equal(total[0, 0, 0], totals[0, 0, 0])
    transposed, _ = weighted_sums(weights, value.transpose(2, 3).contiguous().transpose(2, 3))
    monkeypatch.setattr(sums, "_MANY", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    in_threads, _ = weighted_sums(weights, value)
    assert torch.equal(values, transposed) and torch.equal(values, in_threads)


def test_numbers_that_are_none_stay_with_their_query():
    weights, value = torch.rand(1, 1, 5, 150), torch.randn(1, 1, 150, 24)
    values, _ = weighted_sums(weights, value)
    weights[:, :, 4] = torch.nan
    beside, _ = weighted_sums(weights, value)
    assert torch.equal(values[:, :, :4], beside[:, :, :4]) and beside[:, :, 4].isnan().all()
