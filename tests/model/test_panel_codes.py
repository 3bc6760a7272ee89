"""Int8 codes in panels: exact sums, rounded as oneDNN's are, whatever the shape, the rows and the threads."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lade.backends.cpu.kernels import dtype_code, kernel
from lade.backends.cpu.packing import weight
from lade.backends.cpu.packing.int8 import Codes, Int8Linear, quantised
from lade.backends.cpu.packing.panel_products import has_tiles, panel_for
from lade.backends.cpu.packing.panel_weight import PREPARED_ROWS, PanelWeight, initial_sums
from lade.backends.cpu.packing.panels import (
    DOT_PANEL,
    TILE_PANEL,
    has_dots,
    in_panels,
    out_of_panels,
    row_groups,
)
from lade.backends.cpu.packing.weight import HugePages
from lade.backends.cpu.worker_threads import At, Room, Stages
from lade.errors import UnsupportedModelError

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="this processor has no tiles (AMX)")
needs_dots = pytest.mark.skipif(not has_dots(torch.int8), reason="the compiled kernels are missing")
own_panels = pytest.mark.parametrize(
    "panel", [pytest.param(TILE_PANEL, marks=needs_tiles), pytest.param(DOT_PANEL, marks=needs_dots)]
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(64, 64), (1, 33), (7, 3), (300, 64), (64, 300), (130, 777), (96, 2000)]
EDGES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 40]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def inputs_of(rows, inputs, dtype):
    """Rows of many sizes: near the middle between two codes, the largest, the least and zeros among them."""
    x = torch.randn(rows, inputs) * 10 ** torch.linspace(-2, 2, rows)[:, None]
    ties = (torch.arange(inputs) * 37 % 254 - 126.5) * torch.tensor([1, 1 - 2**-23, 1 + 2**-23])[:, None]
    ties[:, 0] = 127
    x[: min(3, rows)] = ties[:rows]
    x[3:4] = torch.finfo(dtype).max * torch.rand(inputs)
    x[4:5] = torch.finfo(dtype).tiny * torch.rand(inputs)
    x[5:6] = 0
    return x.to(dtype)


def by_numbers(x, codes, bias):
    """As the layer multiplies elsewhere: exact sums, rounded to float32, times both scales, plus the bias."""
    values, scale = quantised(x)
    sums = (values.double() @ codes.values.double().t()).float()
    y = sums.mul_(codes.scale).mul_(scale)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def by_own(panel, x, codes, bias):
    packed, start = in_panels(codes.values, HugePages(), panel), initial_sums(codes.values)
    return PanelWeight(packed, *codes.values.shape, steps=codes.scale, start=start).product(x, bias)


def same(found, expected):
    return torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@own_panels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_results_have_the_bits_of_exact_sums(panel, shape, dtype, threads):
    outputs, inputs = shape
    codes = Codes.of(torch.randn(outputs, inputs))
    rows_tried = [*range(1, 41), 200] if threads == 1 else EDGES
    for rows, bias in itertools.product(rows_tried, (None, torch.randn(outputs).to(dtype))):
        x = inputs_of(rows, inputs, dtype)
        assert same(by_own(panel, x, codes, bias), by_numbers(x, codes, bias)), rows


@own_panels
@torch.no_grad()
def test_the_largest_sums_are_exact(panel, threads):
    values = torch.full((70, 6080), 127, dtype=torch.int8)
    values[::3] = -127
    values[1, 7] = 126
    codes = Codes(values, torch.rand(70))
    x = torch.full((150, 6080), 3.0)
    x[::2] *= -1
    x[:, -1] *= 0.5
    assert torch.equal(by_own(panel, x, codes, None), by_numbers(x, codes, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [1, 16, 63, 64, 65, 777])
@pytest.mark.parametrize("panel", [DOT_PANEL, TILE_PANEL])
@pytest.mark.skipif(not kernel("attend").available, reason="the compiled kernels are missing")
@torch.no_grad()
def test_inputs_are_rounded_to_the_same_codes(inputs, dtype, panel, threads):
    unsigned, blocks = panel == DOT_PANEL, -(-inputs // 64)
    values = torch.zeros(panel, inputs, dtype=torch.int8)
    weight = PanelWeight(
        in_panels(values, panel=panel), panel, inputs, steps=torch.ones(panel), start=initial_sums(values)
    )
    for rows in EDGES:
        x, stages, room = inputs_of(rows, inputs, dtype), Stages(), Room(1)
        laid_out = weight.add_rows(stages, room, rows, At(0), dtype_code(dtype), "reference")
        memory = torch.empty(room.size, dtype=torch.int8)
        stages.run((x.data_ptr(), memory.data_ptr()))
        codes = memory[: laid_out.scales.offset]
        scales = memory[laid_out.scales.offset :].view(torch.float32)[:rows]
        expected, scale = quantised(x)
        together = row_groups().together_for(rows) if unsigned else min(rows, 16)
        found = codes.view(-1, blocks, together, 64).transpose(1, 2).reshape(-1, 64 * blocks)[:rows]
        found = found.bitwise_xor(-128) if unsigned else found  # the zero point is taken off
        assert torch.equal(found[:, :inputs], expected) and not found[:, inputs:].any()
        assert torch.equal(scales, scale[:, 0])


@own_panels
def test_calls_are_kept_for_few_rows_alone(panel):
    codes = Codes.of(torch.randn(70, 64))
    packed = in_panels(codes.values, panel=panel)
    weight = PanelWeight(packed, 70, 64, steps=codes.scale, start=initial_sums(codes.values))
    for rows in (3, 3, 4, PREPARED_ROWS, PREPARED_ROWS + 1, 1000):
        x = torch.randn(rows, 64)
        assert torch.equal(weight.product(x), by_numbers(x, codes, None)), rows
    assert sorted(rows for rows, *_ in weight._prepared) == [3, 4, PREPARED_ROWS]


@own_panels
@torch.no_grad()
def test_what_is_not_finite_does_not_become_so(panel):
    codes = Codes.of(torch.randn(70, 200))
    x = torch.randn(20, 200)
    expected = by_own(panel, x, codes, None)
    x[3, 199], x[18, 0], x[7, 5] = float("nan"), float("inf"), -float("inf")
    found = by_own(panel, x, codes, None)
    finite = [row for row in range(20) if row not in (3, 7, 18)]
    assert torch.equal(found[finite], expected[finite]) and not found[[3, 7, 18]].isfinite().any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("panel", [TILE_PANEL, DOT_PANEL])
def test_panels_hold_the_codes_and_zeros(shape, panel):
    values = torch.randint(-127, 128, shape, dtype=torch.int8)
    packed = in_panels(values, HugePages(), panel)
    assert packed.shape == (-(-shape[0] // panel), -(-shape[1] // 64), panel // 16, 16, 64)
    assert packed.data_ptr() % 64 == 0
    assert torch.equal(out_of_panels(packed, *shape), values)
    assert packed.count_nonzero() == values.count_nonzero()
    if shape == (130, 777):
        output, tile = divmod(64 + 3 * 16, panel)
        assert packed[output, 2, tile // 16, 5, 4 * 7 + 2] == values[64 + 3 * 16 + 7, 2 * 64 + 5 * 4 + 2]


@pytest.mark.skipif(not panel_for(torch.int8), reason="neither tiles nor dot products here")
@torch.no_grad()
def test_a_layer_takes_panels_and_says_what_it_cannot_be_fed():
    layer = Int8Linear(nn.Linear(30, 70), keep=False)
    assert layer.weight.shape[2:] == ((4 if has_tiles() else 1), 16, 64) and layer.weight.dtype == torch.int8
    with pytest.raises(UnsupportedModelError, match="a Tensor on meta; give it an ordinary tensor on the CPU"):
        layer(torch.randn(3, 30, device="meta"))
    kept = Int8Linear(nn.Linear(30, 70), keep=True)
    kept.weight = kept.weight  # as transformers ties weights, of whatever size they are when packed
    assert layer.nbytes == (2 * 64 if has_tiles() else 5 * 16) * 64 + 70 * 4


def test_sums_begin_with_what_inputs_of_zero_add_and_fill_a_panel_up():
    values = torch.tensor([[1, 2, 3], [-4, 5, 0]], dtype=torch.int8)
    assert initial_sums(values).tolist() == [-128 * 6, -128, *[0] * 14]


def test_memory_is_handed_out_piece_by_piece():
    pages = HugePages()
    pieces = [pages.take(size) for size in (64, 128, weight.CHUNK - 256, 4096, weight.CHUNK + 64, 64)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0 and not piece[:64].any() and not piece[-64:].any()
        piece[:64], piece[-64:] = number + 1, number + 1
    assert all((piece[[0, -1]] == number + 1).all() for number, piece in enumerate(pieces))
    assert [len(piece) for piece in pieces[:2]] == [64, 128]
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == 64
    assert len(copy.deepcopy(pages)._left) == 0
