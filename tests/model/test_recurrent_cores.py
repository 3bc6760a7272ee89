"""Recurrent layers: their cores along each path of trees, and rows that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lifted import float32_lifted
from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update
from transformers.models.jamba.modeling_jamba import mamba_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update, torch_recurrent_gated_delta_rule
from trees import tree_of

from lade.backends.recurrent.backend import delta_rule, mamba2, selective_scan
from lade.backends.recurrent.layer import RecurrentLayer, TreePass, convolution, gather_columns
from lade.decoding.tree import TokenTree

ROWS, HEADS, KEYS, VALUES, CHANNELS, WIDTH = 2, 4, 3, 5, 6, 4
TOLERANCE = 1e-10
trees = st.lists(st.lists(st.integers(0, 20), max_size=12).map(tree_of), min_size=ROWS, max_size=ROWS)


@pytest.fixture(scope="module", autouse=True)
def everything_in_float64() -> Iterator[None]:
    with float32_lifted():
        yield


def no_original(*args: object, **kwargs: object) -> None:
    raise AssertionError("the function for a text was called for a tree")


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype == right.dtype == torch.float64
    return torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


def path_to(tree: TokenTree, node: int) -> list[int]:
    """The nodes from the root to this one."""
    return [] if node < 0 else [*path_to(tree, tree.parents[node]), node]


def uniform(*shape: int) -> torch.Tensor:
    return 2 * torch.rand(shape, dtype=torch.float64) - 1


def assert_paths(
    several: list[TokenTree],
    outputs: torch.Tensor,
    folding: Any,
    state: torch.Tensor,
    step: Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Feeding each path token by token gives the same outputs `[B, S, ...]`, and the states that folding gives.

    Args:
        several: the trees.
        outputs: of the core.
        folding: of the core.
        state: `[B, ...]`, of the text.
        step: of a state `[1, ...]`, a row and a node, the node's output and the state after it.
    """
    for row, tree in enumerate(several):
        for node in range(len(tree)):
            single = state[row : row + 1].clone()
            for each in path_to(tree, node):
                output, single = step(single, row, each)
            assert close(output.squeeze(), outputs[row, node].squeeze())
            last = torch.tensor([node if number == row else 0 for number in range(ROWS)])
            whole = state.clone()
            folding.fold(whole, last)
            assert close(whole[row], single[0])


@pytest.mark.parametrize("by_channel", [False, True], ids=["GDN", "KDA"])
@settings(max_examples=examples(20), deadline=None)
@given(trees, st.integers(0, 10**6))
def test_the_delta_rule(by_channel, several, seed):
    torch.manual_seed(seed)
    tree_pass, size = TreePass(several), max(map(len, several))
    key_heads = HEADS if by_channel else HEADS // 2
    query, key = (uniform(ROWS, size, key_heads, KEYS) for _ in range(2))
    value, beta = uniform(ROWS, size, HEADS, VALUES), 1 + uniform(ROWS, size, HEADS)
    g = -1.5 * (1 + uniform(ROWS, size, HEADS, *([KEYS] if by_channel else [])))
    state = uniform(ROWS, HEADS, KEYS, VALUES)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    core = partial(delta_rule, tree_pass, no_original)
    outputs, folding = core(query, key, value, g=g, beta=beta, initial_state=state, **options)
    single = recurrent_kimi_delta_attention if by_channel else torch_recurrent_gated_delta_rule

    def step(state: torch.Tensor, row: int, node: int) -> tuple[torch.Tensor, torch.Tensor]:
        token = [each[row : row + 1, node : node + 1] for each in (query, key, value)]
        token[:2] = (each.repeat_interleave(HEADS // key_heads, dim=2) for each in token[:2])  # else not in older ones
        decay, rate = (each[row : row + 1, node : node + 1] for each in (g, beta))
        output, after = single(*token, g=decay, beta=rate, initial_state=state, **options)
        return output, after

    assert_paths(several, outputs, folding, state, step)


@settings(max_examples=examples(20), deadline=None)
@given(trees, st.integers(0, 10**6))
def test_mamba_2(several, seed):
    torch.manual_seed(seed)
    tree_pass, size = TreePass(several), max(map(len, several))
    inputs, dt = uniform(ROWS, size, HEADS, VALUES), uniform(ROWS, size, HEADS)
    keys, queries = (uniform(ROWS, size, 2, KEYS) for _ in range(2))
    decay, skip, bias = -(1 + uniform(HEADS)), uniform(HEADS), uniform(HEADS)
    state = uniform(ROWS, HEADS, VALUES, KEYS)
    options = {"chunk_size": 8, "dt_softplus": True, "dt_limit": (0.6, 0.7), "initial_states": state}
    given = inputs, dt, decay, keys, queries
    outputs, folding = mamba2(tree_pass, no_original, *given, D=skip, dt_bias=bias, **options)

    def step(state: torch.Tensor, row: int, node: int) -> tuple[torch.Tensor, torch.Tensor]:
        wide = [each[:, None].expand(-1, VALUES) for each in (dt[row, node], skip, bias)]
        x, key, query = (each[row : row + 1, node] for each in (inputs, keys, queries))
        wide_decay = decay[:, None, None].expand(-1, VALUES, KEYS)
        output = mamba2_selective_state_update(
            state, x, wide[0][None], wide_decay, key, query, wide[1], dt_bias=wide[2], dt_softplus=True
        )
        return output, state

    assert_paths(several, outputs, folding, state, step)


@settings(max_examples=examples(20), deadline=None)
@given(trees, st.integers(0, 10**6))
def test_mamba_1(several, seed):
    torch.manual_seed(seed)
    tree_pass, size = TreePass(several), max(map(len, several))
    inputs, dt, gates = (uniform(ROWS, CHANNELS, size) for _ in range(3))
    keys, queries = (uniform(ROWS, KEYS, size) for _ in range(2))
    decay, skip, bias = -(1 + uniform(CHANNELS, KEYS)), uniform(CHANNELS), uniform(CHANNELS)
    state = tree_pass.state = uniform(ROWS, CHANNELS, KEYS)
    given = inputs, dt, decay, keys, queries, skip, gates, bias
    outputs, folding = selective_scan(tree_pass, no_original, *given, delta_softplus=True, return_last_state=True)

    def step(state: torch.Tensor, row: int, node: int) -> tuple[torch.Tensor, torch.Tensor]:
        one = [each[row : row + 1, :, node] for each in (inputs, dt, keys, queries, gates)]
        output = mamba_selective_state_update(
            state, one[0], one[1], decay, one[2], one[3], skip, z=one[4], dt_bias=bias, dt_softplus=True
        )
        return output, state

    assert_paths(several, outputs.mT, folding, state, step)


@settings(max_examples=examples(20), deadline=None)
@given(trees, st.integers(0, 10**6))
def test_convolutions(several, seed):
    torch.manual_seed(seed)
    tree_pass, size = TreePass(several), max(map(len, several))
    cached, inputs = uniform(ROWS, CHANNELS, WIDTH), uniform(ROWS, CHANNELS, size)
    weight, bias = uniform(CHANNELS, WIDTH), uniform(CHANNELS)
    windows = tree_pass.windows(WIDTH, WIDTH, inputs.device)
    whole = torch.cat([cached, inputs], dim=-1)
    outputs = convolution(tree_pass, no_original, whole, weight, bias, activation="silu")
    for row, tree in enumerate(several):
        for node in range(len(tree)):
            state = cached[row : row + 1].clone()
            for each in path_to(tree, node):
                token = inputs[row : row + 1, :, each : each + 1]
                expected = causal_conv1d_update(token, state, weight, bias, "silu")
            assert close(expected[0, :, 0], outputs[row, :, node])
            assert torch.equal(gather_columns(whole.mT.contiguous(), windows[:, node])[row].mT, state[0])


operations = st.lists(
    st.tuples(st.sampled_from(["take", "leave", "reserve", "select"]), st.integers(0, 9)), min_size=1, max_size=12
)


def layer_of(number: float) -> RecurrentLayer:
    """One row, after a text of one token."""
    layer = RecurrentLayer()
    layer.update_conv_state(torch.full((1, 3, 1), number), conv_kernel_size=2)
    layer.update_recurrent_state(torch.full((1, 2, 2), -number))
    return layer


def states_of(layer: RecurrentLayer) -> tuple[torch.Tensor, torch.Tensor]:
    conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    assert conv is not None and recurrent is not None
    return conv, recurrent


@settings(max_examples=examples(30), deadline=None)
@given(operations)
def test_each_row_has_the_states_that_it_came_with(steps):
    layer, rows = layer_of(1), [1]
    for step, (what, number) in enumerate(steps, start=2):
        if what == "take":
            layer.take(layer_of(step))
            rows.append(step)
        elif what == "reserve":
            layer.reserve(number, 0)
        elif what == "select":
            chosen = [row for row in range(len(rows)) if row != number]
            if chosen:
                layer.batch_select_indices(torch.tensor(chosen[::-1]))
                rows = [rows[row] for row in chosen[::-1]]
        elif len(rows) > 1:
            row = number % len(rows)
            layer.leave(row)
            rows[row] = rows[-1]
            rows.pop()
        for state, sign in zip(states_of(layer), (1, -1), strict=True):
            assert state.flatten(1)[:, -1].tolist() == [sign * row for row in rows]


def test_a_row_that_joins_where_there_is_room_moves_no_other():
    layer = layer_of(1)
    layer.reserve(3, 0)
    before = [state.data_ptr() for state in states_of(layer)]
    layer.take(layer_of(2))
    layer.leave(0)
    layer.take(layer_of(3))
    layer.take(layer_of(4))
    assert [state.data_ptr() for state in states_of(layer)] == before
    layer.take(layer_of(5))
    assert all(state.data_ptr() != old for state, old in zip(states_of(layer), before, strict=True))
    assert states_of(layer)[0][:, 0, -1].tolist() == [2, 3, 4, 5]
