"""The cost of a batch that loses rows."""

from lade.tuning.step_cost import REFRESH_S, BatchCost, StepCost


def made():
    """A cost, and the curves it has required: a pass takes a millisecond a row."""
    curves = {}

    def cost_of(rows):
        curves[rows] = StepCost.of({1: [1e-3 * rows], 64: [2e-3 * rows]})
        return curves[rows]

    return BatchCost(cost_of, 7), curves


def test_it_is_the_curve_of_as_many_rows_as_are_left():
    cost, curves = made()
    assert cost.table[1] == 7e-3
    for rows in (6, 5):
        cost.resize(rows)
    assert list(curves) == [7], "five to eight rows share a curve"
    for rows in (4, 2, 1, 0):
        cost.resize(rows)
    assert list(curves) == [7, 4, 2, 1], "and no rows cost nothing that one would need to know"
    assert (cost.table, cost.marginals, cost.corners) == (curves[1].table, curves[1].marginals, curves[1].corners)


def test_a_pass_is_learned_of_as_many_rows_as_took_part():
    cost, curves = made()
    before = list(curves[7].table)
    cost.resize(4)
    for _ in range(20):
        cost.observe(64, 5 * REFRESH_S)
    assert curves[4].table[64] > 10e-3
    assert curves[7].table == before
