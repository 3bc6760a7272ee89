import math

import pytest
import torch

from training.batch_order import RowOrder
from training.loops import TOLERATED, loop_loss, make_loops


def test_a_looping_row_is_text_first_and_then_repeats_it(corpus):
    rows = RowOrder(corpus, 64, seed=1).batch(0, 6)
    loops = make_loops(rows, [1, 2])
    for row, ids, earlier, looping in zip(rows, loops.ids, loops.earlier, loops.looping, strict=True):
        punished = int(looping.float().argmax())
        assert looping[punished:].all() and not looping[:punished].any()
        period = punished - int(earlier[punished])
        close = punished - TOLERATED  # the circle closes where a token occurs again
        assert torch.equal(ids[: close + 1], row[: close + 1])
        assert torch.equal(ids[close:], ids[close - period : -period])


def test_loops_depend_on_rows_and_seed_alone(corpus):
    rows = RowOrder(corpus, 64, seed=1).batch(0, 6)
    before = rows.clone()
    assert torch.equal(make_loops(rows, [1, 2]).ids, make_loops(rows, [1, 2]).ids)
    assert not torch.equal(make_loops(rows, [1, 2]).ids, make_loops(rows, [1, 3]).ids)
    assert torch.equal(rows, before)


def test_the_penalty_is_nothing_where_a_repetition_has_half_the_probability_of_a_round_before():
    earlier, looping = torch.tensor([[0, 0, 0, 1]]), torch.tensor([[False, False, True, True]])
    halved = torch.tensor([[0.8, 0.2, 0.4, 0.1]]).log()
    assert loop_loss(halved, earlier, looping).item() == pytest.approx(0.0, abs=1e-6)
    louder = torch.tensor([[0.8, 0.2, 0.9, 0.1]]).log()
    assert loop_loss(louder, earlier, looping).item() == pytest.approx(-math.log(1 - 0.5) / 2)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert loop_loss(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64), nothing).item() == 0.0


def test_the_penalty_moves_the_repetition_and_not_what_it_repeats():
    log_probs = torch.tensor([[0.8, 0.9]]).log().requires_grad_()
    loop_loss(log_probs, torch.tensor([[0, 0]]), torch.tensor([[False, True]])).backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 0] == 0 and log_probs.grad[0, 1] > 0
