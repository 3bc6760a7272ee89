"""`lade_invariant`: right, and each query's bits are the same whatever else is in the pass."""

from functools import reduce

import pytest
import torch
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pretend import use_threads
from trees import Case, attention, cases, tree_of

from lade.backends.cpu.invariant import attention as module
from lade.backends.cpu.invariant import attention as work
from lade.backends.cpu.invariant.attention import PlacedMask, invariant_attention, placed_mask
from lade.backends.cpu.invariant.trials import Heads, attention_keeps_order
from lade.model.inputs import AttentionSpan

LAYER = torch.nn.Identity()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCES)


def placed(case: Case) -> PlacedMask:
    inputs = case.dense
    return PlacedMask.of(inputs.mask(case.span), inputs.key_positions)


@given(
    cases(most_nodes=12, longest=150), st.integers(1, 2), st.integers(1, 3), st.sampled_from([None, 3.0]), st.booleans()
)
@example(Case([tree_of([number // 8 for number in range(200)])], [70]), 1, 2, None, False)  # is cut into pieces
def test_it_is_attention(case, kv_heads, group, softcap, with_sinks):
    query, key, value = case.states(kv_heads, group)
    sinks = torch.randn(query.shape[1]) if with_sinks else None
    expected = attention(*(each.double() for each in (query, key, value)), case.allowed(), 8**-0.5, softcap, sinks)
    found, _ = invariant_attention(LAYER, query, key, value, placed(case), softcap=softcap, s_aux=sinks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=examples(40))
@given(
    cases(most_nodes=12, longest=150), st.sampled_from([1, 5]), st.sampled_from([7, 16, 40]), st.sampled_from(DTYPES)
)
def test_a_node_has_the_bits_of_its_path_alone(case, group, dim, dtype):
    """Each row's path is put into slots of its own, in order, as plain decoding has it."""
    query, key, value = (each.to(dtype) for each in case.states(2, group, dim))
    mask, allowed = placed(case), case.allowed()
    found, _ = invariant_attention(LAYER, query, key, value, mask, softcap=5.0)
    for row, tree in enumerate(case.trees):
        for node in range(len(tree) - case.cached):
            seen = allowed[row, node].nonzero()[:, 0]
            positions = mask.positions[row, seen]
            width = int(positions[-1]) + 1
            alone_key, alone_value = (torch.zeros(1, 2, width, dim, dtype=dtype) for _ in range(2))
            alone_key[0, :, positions], alone_value[0, :, positions] = key[row][:, seen], value[row][:, seen]
            visible = torch.zeros(1, 1, 1, width, dtype=torch.bool)
            visible[..., positions] = True
            alone_mask = PlacedMask.of(visible, torch.arange(width)[None])
            one = query[row : row + 1, :, node : node + 1]
            alone, _ = invariant_attention(LAYER, one, alone_key, alone_value, alone_mask, softcap=5.0)
            assert torch.equal(alone[0, 0], found[row, node])


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
    given = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    mask = placed_mask(batch_size=2, q_length=1, kv_length=5, q_offset=4, attention_mask=given)
    assert mask.positions.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert mask[0, 0, 0].tolist() == [False, False, True, True, True]


def test_masks_of_unknown_positions_are_refused():
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="without the positions of keys"):
        invariant_attention(LAYER, query, query, query, torch.zeros(1, 1, 3, 3))
    with pytest.raises(ValueError, match="neither dropout nor"):
        invariant_attention(LAYER, query, query, query, None, dropout=0.1)


ATTENTION = work.attention_of  # which a test replaces
HEADS = Heads(queries=6, keys=2, size=32)


@pytest.fixture
def few_texts(monkeypatch):
    monkeypatch.setattr("lade.backends.cpu.invariant.trials.TEXTS", (60, 257))


def test_the_trial_passes(few_texts):
    assert attention_keeps_order(HEADS) and attention_keeps_order(HEADS._replace(size=128))


def reversed_for_few(query, key, value, mask, *rest):
    """Of a few queries from the last key to the first."""
    if query.shape[2] < 8:
        key, value, mask = key.flip(2), value.flip(2), PlacedMask.of(mask.allowed.flip(-1)[:, None], mask.positions)
    return ATTENTION(query, key, value, mask, *rest)


def as_matrix_products(query, key, value, mask, scale, *rest):
    """Whose order of summation is anybody's."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    allowed = mask.allowed[:, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scale).transpose(1, 2)


def blind_beside_others(query, key, value, mask, *rest):
    """A query sees what the one before it sees, too."""
    allowed = torch.cat([mask.allowed[:, :1], mask.allowed[:, 1:] | mask.allowed[:, :-1]], 1)
    return ATTENTION(query, key, value, PlacedMask.of(allowed[:, None], mask.positions), *rest)


@pytest.mark.parametrize("broken", [reversed_for_few, as_matrix_products, blind_beside_others])
def test_the_trial_catches(few_texts, monkeypatch, broken):
    monkeypatch.setattr(module, "attention_of", broken)
    assert not attention_keeps_order(HEADS)


def test_values_are_summed_from_the_first_key_to_the_last():
    """Of a query of zeros all weights are 1."""
    value = torch.randn(1, 1, 150, 24) * torch.logspace(-3, 3, 150)[:, None]
    expected = reduce(torch.add, value[0, 0]) / 150
    found, _ = invariant_attention(LAYER, torch.zeros(1, 1, 1, 8), torch.randn(1, 1, 150, 8), value, None)
    assert torch.equal(found[0, 0, 0], expected)


def drawn(dtype, size, value_size, *, tokens=70):
    """Queries of three heads for each of keys, and a longer cache of which a part is used, at odd places."""
    query = torch.randn(2, 6, tokens, size).to(dtype)
    cached, values = (torch.randn(2, 2, 203, width + 3).to(dtype) for width in (size, value_size))
    return query, cached[:, :, 1:200, 3:], values[:, :, 1:200, 1:-2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "value_size"), [(1, 1), (8, 24), (17, 31), (32, 32), (80, 16), (33, 96), (128, 65)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bits_do_not_depend_on_places_pieces_and_threads(dtype, size, value_size, softcap, monkeypatch):
    query, key, value = drawn(dtype, size, value_size)
    sinks = torch.randn(6)
    found, _ = invariant_attention(LAYER, query, key, value, None, softcap=softcap, s_aux=sinks)
    copied = key.clone(), value.transpose(2, 3).contiguous().transpose(2, 3)
    monkeypatch.setattr(work, "_ROWS", 12)
    monkeypatch.setattr(work, "_MANY", 1)
    use_threads(monkeypatch, 3)
    elsewhere, _ = invariant_attention(LAYER, query, *copied, None, softcap=softcap, s_aux=sinks)
    assert torch.equal(found, elsewhere)
    for token in (0, 1, 33, 69):
        seen = [each[:, :, : 130 + token] for each in (key, value)]
        alone, _ = invariant_attention(LAYER, query[:, :, [token]], *seen, None, softcap=softcap, s_aux=sinks)
        assert torch.equal(alone[:, 0], found[:, token])
    exact = exact_attention(query, key, value, softcap, sinks)
    torch.testing.assert_close(found.double(), exact.to(dtype).double(), rtol=TOLERANCES[dtype], atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 20, 32, 40])
def test_queries_are_read_where_they_lie_and_results_written_in_their_dtype(dtype, size):
    """As modelling code has them: token by token, parts of something wider."""
    query, key, value = drawn(dtype, size, 24, tokens=9)
    wider = torch.full((2, 9, 7, size + 3), torch.nan, dtype=dtype)
    wider[:, :, 1:, 2:-1] = query.transpose(1, 2)
    found, _ = invariant_attention(LAYER, query, key, value, None)
    elsewhere, _ = invariant_attention(LAYER, wider[:, :, 1:, 2:-1].transpose(1, 2), key, value, None)
    assert torch.equal(found, elsewhere) and found.dtype == dtype
    unrounded, _ = invariant_attention(LAYER, query.float(), key, value, None)
    assert unrounded.dtype == torch.float32 and torch.equal(found, unrounded.to(dtype))


def exact_attention(query, key, value, softcap, sinks):
    step, slots = query.shape[2], key.shape[2]
    allowed = torch.ones(len(query), step, slots, dtype=torch.bool).tril(slots - step)
    states = (each.double() for each in (query, key, value))
    return attention(*states, allowed, query.shape[-1] ** -0.5, softcap, sinks)


def test_numbers_that_are_none_stay_with_their_query():
    query, key, value = drawn(torch.float32, 16, 24)
    found, _ = invariant_attention(LAYER, query, key, value, None)
    query[:, :, 4, 3] = torch.nan
    query[:, :, 5, 3] = torch.inf
    beside, _ = invariant_attention(LAYER, query, key, value, None)
    others = [token for token in range(70) if token not in (4, 5)]
    assert torch.equal(found[:, others], beside[:, others]) and beside[:, 4:6].isnan().all()


def test_float16_is_read_as_it_is():
    """All its numbers: each query sees one row of them."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(1, 1, -1, 64)
    numbers = torch.where(numbers.isfinite(), numbers, 1)
    query = torch.zeros(1, 1, numbers.shape[2], 8)
    own = PlacedMask.of(torch.eye(numbers.shape[2], dtype=torch.bool)[None, None], torch.arange(numbers.shape[2])[None])
    found, _ = invariant_attention(LAYER, query, query, numbers, own)
    assert torch.equal(found.transpose(1, 2), numbers.float())
    none = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=torch.float16)[None, None, None]
    found, _ = invariant_attention(LAYER, query[:, :, :1], query[:, :, :1], none, None)
    assert torch.equal(found[0, 0, 0].isnan(), none[0, 0, 0].isnan()) and torch.equal(
        found[..., :2], none[..., :2].float()
    )
