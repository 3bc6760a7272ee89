"""Products of rows by weights in panels: one chain of sums for each output, however many rows there are."""

import pytest
import torch

from lade.model.invariant.row_trial import _drawn, _order, cancelling
from lade.model.kernels.tiles import has_tiles
from lade.model.packing import tiles
from lade.model.packing.panels import in_panels, out_of_panels
from lade.model.packing.tiles import tile_product

pytestmark = pytest.mark.skipif(not has_tiles(), reason="this processor has no tiles (AMX)")

HALF = torch.bfloat16
SHAPES = [(64, 32), (70, 33), (96, 64), (97, 65), (33, 7), (130, 1000), (200, 2500)]
"""Outputs and inputs: of the last there are several chunks."""


def drawn(outputs: int, inputs: int, rows: int = 500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, a weight and a bias; of sums little more is left than what was rounded in them."""
    generator = torch.Generator().manual_seed(1)
    half = _drawn((rows, inputs // 2), generator)
    x = torch.cat([half, -half, torch.zeros(rows, inputs % 2)], 1)[:, _order(inputs)]
    weight = cancelling(torch.empty(outputs, inputs, dtype=HALF))
    return x.to(HALF), weight, torch.randn(outputs, generator=generator).to(HALF)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_an_output_has_the_same_bits_beside_any_rows(outputs, inputs, biased, monkeypatch):
    x, weight, bias = drawn(outputs, inputs)
    panels, bias = in_panels(weight), bias if biased else None
    assert torch.equal(out_of_panels(panels, outputs, inputs), weight)
    expected = tile_product(x, panels, bias, outputs)
    for rows in (*range(1, 71), 200):
        for first in (0, 500 - rows):
            found = tile_product(x[first : first + rows], panels, bias, outputs)
            assert torch.equal(found, expected[first : first + rows]), rows
    monkeypatch.setattr(tiles, "_MANY", 1)
    for threads in (2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows in (1, 16, 17, 500):
            assert torch.equal(tile_product(x[:rows], panels, bias, outputs), expected[:rows]), (threads, rows)


def test_the_trial_of_orders_can_tell_them_apart():
    """Sums over the inputs in another order are others: so equal bits say something."""
    x, weight, _ = drawn(130, 1000)
    found = tile_product(x, in_panels(weight), None, 130)
    turned = tile_product(x.flip(-1).contiguous(), in_panels(weight.flip(-1).contiguous()), None, 130)
    assert (found != turned).float().mean() > 0.5


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 16, 33, 70])
def test_outputs_are_the_sums(outputs, inputs, rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, inputs, generator=generator).to(HALF)
    weight, bias = (torch.randn(*shape, generator=generator).to(HALF) for shape in ((outputs, inputs), (outputs,)))
    found = tile_product(x, in_panels(weight), bias, outputs)
    assert found.shape == (rows, 1, outputs)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [5, 40])
def test_sums_are_rounded_to_the_nearest_after_the_bias_is_added(rows):
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(rows, 64, generator=generator).to(HALF), torch.randn(64, generator=generator).to(HALF)
    bias[:4] = torch.tensor([2**-8, 3 * 2**-8, 2**-8 + 2**-15, -(2**-8)])  # halfway, to the even one: down, up, ...
    x[:2, :4], x[3, 5], x[3, 6], x[3, 7], x[4, 8] = 1.0, torch.inf, -torch.inf, torch.nan, 3.3e38
    bias[8] = 3.3e38
    expected = (x.float() + bias.float()).to(HALF)
    expected[3] = torch.nan  # infinity times zero
    found = tile_product(x, in_panels(torch.eye(64, dtype=HALF)), bias, 64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [3, 16, 20, 300])
def test_nothing_beside_the_rows_is_read_or_written(rows):
    x, weight, bias = drawn(70, 33, rows)
    around = torch.full((rows * 33 + 2000,), torch.nan, dtype=HALF)
    inner = around[1000:-1000].view(rows, 33)
    inner.copy_(x)
    out = torch.full((rows * 70 + 2000,), 7.0, dtype=HALF)
    biases = torch.full((70 + 100,), torch.nan, dtype=HALF)
    biases[:70] = bias
    tiles._multiply(inner, in_panels(weight), biases[:70], out[1000:-1000].view(rows, 70))
    assert (out[:1000] == 7).all() and (out[-1000:] == 7).all()
    assert torch.equal(out[1000:-1000].view(rows, 70), tile_product(x, in_panels(weight), bias, 70))


def test_what_fills_panels_up_is_zero():
    panels = in_panels(torch.ones(70, 33, dtype=HALF))
    assert panels.shape == (2, 2, 4, 16, 32)
    assert panels.sum() == 70 * 33 and panels[0].count_nonzero() == 64 * 33


def test_no_rows_have_no_outputs():
    assert tile_product(torch.empty(0, 33, dtype=HALF), in_panels(torch.ones(70, 33, dtype=HALF)), None, 70).shape == (
        0,
        70,
    )


def test_rows_that_do_not_lie_one_behind_the_other():
    x, weight, bias = drawn(70, 65, 60)
    panels = in_panels(weight)
    apart, turned = x.view(20, 3, 65)[:, 1], x.t().contiguous().t()
    assert torch.equal(tile_product(apart, panels, bias, 70), tile_product(apart.contiguous(), panels, bias, 70))
    assert torch.equal(tile_product(turned, panels, bias, 70), tile_product(x, panels, bias, 70))
