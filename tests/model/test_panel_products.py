"""Products of rows by weights in panels: one chain of sums for each output, however many rows there are."""

from functools import partial

import pytest
import torch
from pretend import use_threads

from lade.backends.cpu.invariant.weights import _drawn, _order, cancelling
from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing import panel_products
from lade.backends.cpu.packing import weight as packing
from lade.backends.cpu.packing.panel_products import has_tiles
from lade.backends.cpu.packing.weight import DOT_PANEL, TILE_PANEL, PanelWeight, has_dots, out_of_panels

pytestmark = pytest.mark.skipif(not kernel("attend").available, reason="the compiled kernels are missing")
HALF = torch.bfloat16
NO_TILES = pytest.mark.skipif(not kernel("multiply_few_by_tiles", "amx").available, reason="no tiles (AMX) here")
TILES = pytest.param((TILE_PANEL, "amx"), id="tiles", marks=NO_TILES)
DEFINITION = pytest.param((TILE_PANEL, "reference"), id="tiles by definition")
DOTS = pytest.param((DOT_PANEL, ""), id="dots", marks=pytest.mark.skipif(not has_dots(), reason="no AVX512-BF16 here"))
SHAPES = [(64, 32), (70, 33), (96, 64), (97, 65), (33, 7), (130, 1000), (70, 2500)]
"""Outputs and inputs: of the last there are several chunks."""


class Way:
    """Lays weights out, and multiplies rows by them, by some instructions."""

    def __init__(self, panel: int, instructions: str) -> None:
        self.panel, self.instructions = panel, instructions
        self.in_panels = partial(packing.in_panels, panel=panel)
        self.most_rows = 70 if instructions == "reference" else 500  # that takes long

    def product(self, x, packed, bias, outputs):
        if self.instructions == "reference":
            return panel_products.tile_product(x, packed, bias, outputs, "reference")
        return panel_products.panel_product(x, PanelWeight(packed, outputs, x.shape[-1]), bias)


@pytest.fixture(params=[TILES, DEFINITION, DOTS])
def way(request):
    return Way(*request.param)


def drawn(outputs: int, inputs: int, rows: int = 500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, a weight and a bias; of sums little more is left than what was rounded in them."""
    generator = torch.Generator().manual_seed(1)
    half = _drawn((rows, inputs // 2), generator)
    x = torch.cat([half, -half, torch.zeros(rows, inputs % 2)], 1)[:, _order(inputs)]
    weight = cancelling(torch.empty(outputs, inputs, dtype=HALF))
    return x.to(HALF), weight, torch.randn(outputs, generator=generator).to(HALF)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_an_output_has_the_same_bits_beside_any_rows(outputs, inputs, way, monkeypatch):
    many = way.most_rows
    x, weight, bias = drawn(outputs, inputs, many)
    packed = way.in_panels(weight)
    assert torch.equal(out_of_panels(packed, outputs, inputs), weight)
    expected = way.product(x, packed, bias, outputs)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 65, many // 2):
        for first in (0, many - rows):
            found = way.product(x[first : first + rows], packed, bias, outputs)
            assert torch.equal(found, expected[first : first + rows]), rows
    monkeypatch.setattr(panel_products, "_MANY", 1)
    monkeypatch.setattr(packing, "DOTS", packing.DOTS._replace(least_bytes=1))
    monkeypatch.setattr(packing, "_MANY_INPUTS", 1)
    for threads in (3, 7):
        use_threads(monkeypatch, threads)
        for rows in (1, 16, 17, many):
            assert torch.equal(way.product(x[:rows], packed, bias, outputs), expected[:rows]), (threads, rows)


def test_the_trial_of_orders_can_tell_them_apart(way):
    """Sums over the inputs in another order are others: so equal bits say something."""
    x, weight, _ = drawn(130, 1000)
    found = way.product(x, way.in_panels(weight), None, 130)
    turned = way.product(x.flip(-1).contiguous(), way.in_panels(weight.flip(-1).contiguous()), None, 130)
    assert (found != turned).float().mean() > 0.5


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 16, 33, 70])
def test_outputs_are_the_sums(outputs, inputs, rows, way):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, inputs, generator=generator).to(HALF)
    weight, bias = (torch.randn(*shape, generator=generator).to(HALF) for shape in ((outputs, inputs), (outputs,)))
    found = way.product(x, way.in_panels(weight), bias, outputs)
    assert found.shape == (rows, 1, outputs)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [5, 40])
def test_sums_are_rounded_to_the_nearest_after_the_bias_is_added(rows, way):
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(rows, 64, generator=generator).to(HALF), torch.randn(64, generator=generator).to(HALF)
    bias[:4] = torch.tensor([2**-8, 3 * 2**-8, 2**-8 + 2**-15, -(2**-8)])  # halfway, to the even one: down, up, ...
    x[:2, :4], x[3, 5], x[3, 6], x[3, 7], x[4, 8] = 1.0, torch.inf, -torch.inf, torch.nan, 3.3e38
    bias[8] = 3.3e38
    expected = (x.float() + bias.float()).to(HALF)
    expected[3] = torch.nan  # infinity times zero
    found = way.product(x, way.in_panels(torch.eye(64, dtype=HALF)), bias, 64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [3, 16, 20, 300])
def test_nothing_beside_the_rows_is_read_or_written(rows, way):
    x, weight, bias = drawn(70, 33, rows)
    around = torch.full((rows * 33 + 2000,), torch.nan, dtype=HALF)
    inner = around[1000:-1000].view(rows, 33)
    inner.copy_(x)
    out = torch.full((rows * 70 + 2000,), 7.0, dtype=HALF)
    biases = torch.full((70 + 100,), torch.nan, dtype=HALF)
    biases[:70] = bias
    inside = out[1000:-1000].view(rows, 70)
    if way.panel == TILE_PANEL:
        panel_products._multiply(inner, way.in_panels(weight), biases[:70], inside, way.instructions)
    else:
        PanelWeight(way.in_panels(weight), 70, 33)._multiply(inner, biases[:70], inside)
    assert (out[:1000] == 7).all() and (out[-1000:] == 7).all()
    assert torch.equal(out[1000:-1000].view(rows, 70), way.product(x, way.in_panels(weight), bias, 70))


@pytest.mark.parametrize(("panel", "shape"), [(TILE_PANEL, (2, 2, 4, 16, 32)), (DOT_PANEL, (5, 2, 1, 16, 32))])
def test_what_fills_panels_up_is_zero(panel, shape):
    packed = packing.in_panels(torch.ones(70, 33, dtype=HALF), panel=panel)
    assert packed.shape == shape
    assert packed.sum() == 70 * 33 and packed[0].count_nonzero() == panel * 33


def test_no_rows_have_no_outputs(way):
    packed = way.in_panels(torch.ones(70, 33, dtype=HALF))
    assert way.product(torch.empty(0, 33, dtype=HALF), packed, None, 70).shape == (0, 70)


def test_rows_that_do_not_lie_one_behind_the_other(way):
    x, weight, bias = drawn(70, 65, 60)
    packed = way.in_panels(weight)
    apart, turned = x.view(20, 3, 65)[:, 1], x.t().contiguous().t()
    assert torch.equal(way.product(apart, packed, bias, 70), way.product(apart.contiguous(), packed, bias, 70))
    assert torch.equal(way.product(turned, packed, bias, 70), way.product(x, packed, bias, 70))


def test_tiles_are_compared_with_their_definition_before_they_are_used(monkeypatch, caplog):
    """A processor with tiles, whose products are made up: of the definition, or with a fault."""
    assert all(panel_products._products_agree(*shape, "reference") for shape in panel_products._TRIAL)
    own_product, own_kernel = panel_products.tile_product, panel_products.kernel
    monkeypatch.setattr(panel_products, "kernel", lambda name, _="": own_kernel(name, "reference"))
    assert has_tiles.__wrapped__()
    assert not caplog.records

    def wrong(x, packed, bias, outputs, instructions):
        found = own_product(x, packed, bias, outputs, instructions)
        return found if instructions == "reference" else found.roll(1, -1)

    monkeypatch.setattr(panel_products, "tile_product", wrong)
    with caplog.at_level("INFO"):
        assert not has_tiles.__wrapped__()
    assert "AMX tiles give wrong results" in caplog.text


def test_groups_of_rows_hold_all_rows():
    for groups in (packing.DOTS, packing.WIDE_CODES, packing.NARROW_CODES):
        for rows in range(1, 100):
            together = groups.together_for(rows)
            assert together >= rows if rows <= groups.sizes[-1] else together == groups.together
