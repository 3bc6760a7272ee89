"""Rows of recurrent layers that come and go: their states stay theirs, and the others are not copied."""

from __future__ import annotations

import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lade.backends.recurrent.layer import RecurrentLayer

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
