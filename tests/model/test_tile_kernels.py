"""Products by tiles (AMX), by the instructions where a processor has them and by their definition everywhere."""

import pytest
import torch
from pretend import use_threads

from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing import panel_products
from lade.backends.cpu.packing import weight as packing
from lade.backends.cpu.packing.panel_products import has_tiles, tile_product
from lade.backends.cpu.packing.weight import in_panels

HALF = torch.bfloat16
SHAPES = [(1, 64, 64), (1, 33, 7), (7, 3, 33), (16, 300, 64), (17, 64, 300), (33, 130, 777), (70, 40, 2500)]
"""Rows, outputs and inputs: of the last there are several chunks."""
pytestmark = pytest.mark.skipif(not kernel("attend").available, reason="the compiled kernels are missing")


@pytest.fixture(params=["reference", "amx"])
def instructions(request):
    if not kernel("multiply_few_by_tiles", request.param).available:
        pytest.skip("this processor has no tiles (AMX)")
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(panel_products, "_MANY", 1)
    use_threads(monkeypatch, request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_are_the_sums(shape, biased, instructions, threads):
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(each, inputs, generator=generator).to(HALF) for each in (rows, outputs))
    bias = torch.randn(outputs, generator=generator).to(HALF) if biased else None
    found = tile_product(x, in_panels(weight), bias, outputs, instructions)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


def test_an_output_has_the_same_bits_beside_any_rows(instructions):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(each, 2100, generator=generator).to(HALF) for each in (70, 70))
    packed = in_panels(weight)
    expected = tile_product(x, packed, None, 70, instructions)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 65):
        assert torch.equal(tile_product(x[70 - rows :], packed, None, 70, instructions), expected[70 - rows :]), rows


@pytest.mark.parametrize("rows", [3, 16, 20, 70])
def test_nothing_beside_the_rows_is_read_or_written(rows, instructions):
    x, weight = torch.randn(rows, 33).to(HALF), torch.randn(70, 33).to(HALF)
    around = torch.full((rows * 33 + 2000,), torch.nan, dtype=HALF)
    inner = around[1000:-1000].view(rows, 33).copy_(x)
    out = torch.full((rows * 70 + 2000,), 7.0, dtype=HALF)
    panel_products._multiply(inner, in_panels(weight), None, out[1000:-1000].view(rows, 70), instructions)
    assert (out[:1000] == 7).all() and (out[-1000:] == 7).all()
    assert torch.equal(out[1000:-1000].view(rows, 70), tile_product(x, in_panels(weight), None, 70, instructions))


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
