"""Codes in blocks: products have the bits of their definition, whatever the shape, the rows and the instructions."""

import copy
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_codes import FORMATS, MADE_HERE, STEPS, drawn_codes
from pretend import torch_threads
from torch import nn

from lade.backends.cpu.kernels import At, Stages, dtype_code, kernel
from lade.backends.cpu.packing import weight
from lade.backends.cpu.packing.blocks import _fused, quantised
from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.weight import PREPARED_ROWS, HugePages, PanelWeight, code_groups, has_block_kernels
from lade.errors import UnsupportedModelError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INSTRUCTIONS = ["plain", "avx2", "avxvnni", "avx512", "avx512vnni"]
with_each = pytest.mark.parametrize(
    "instructions", [each for each in INSTRUCTIONS if kernel("multiply_int8", each).available]
)
needs_library = pytest.mark.skipif(not has_block_kernels(), reason="the compiled kernels are missing")
of_each_format = pytest.mark.parametrize("name", FORMATS)
EDGES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 40]


def inputs_of(rows, inputs, dtype, generator=None):
    """Rows of many sizes: near the middle between two codes, the largest, the least and zeros among them."""
    x = torch.randn(rows, inputs, generator=generator) * 10 ** torch.linspace(-2, 2, rows)[:, None]
    ties = (torch.arange(inputs) * 37 % 254 - 126.5) * torch.tensor([1, 1 - 2**-23, 1 + 2**-23])[:, None]
    ties[:, ::32] = 127
    x[: min(3, rows)] = ties[:rows]
    x[4:5] = torch.finfo(dtype).tiny * torch.rand(inputs, generator=generator)
    x[5:6] = 0
    return x.to(dtype)


# Products


@with_each
@of_each_format
@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_the_kernel_has_the_bits_of_its_definition(instructions, name, data):
    rows, outputs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    step = STEPS[name]
    inputs = step * data.draw(st.integers(1, 640 // step))
    seed = data.draw(st.integers(0, 2**31))
    codes, generator = drawn_codes(name, outputs, inputs, seed), torch.Generator().manual_seed(seed)
    x = inputs_of(rows, inputs, data.draw(st.sampled_from(DTYPES)), generator)
    bias = torch.randn(outputs, generator=generator) if data.draw(st.booleans()) else None
    dtype, packed = data.draw(st.sampled_from(DTYPES)), codes.in_panels(HugePages())
    packed.instructions = instructions
    with torch_threads(data.draw(st.integers(1, 3))):
        found = packed.product(x, bias, dtype)
    assert torch.equal(found, codes.product(x, bias, dtype))


@of_each_format
def test_the_definition_is_the_product_of_both_factors(name):
    codes, x = drawn_codes(name, 40, 512), torch.randn(9, 512)
    values, steps = quantised(x)
    exact = (values * steps).flatten(1).double() @ codes.dense(torch.float64).t()
    found = codes.product(x, None, torch.float32)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (found - x.double() @ codes.dense(torch.float64).t()).norm() < 0.02 * exact.norm()


@with_each
@of_each_format
def test_the_largest_sums_are_exact(instructions, name):
    codes = drawn_codes(name, 20, 768)
    largest = {"q4_1": 15, "q4_k": 15, "q5_1": 31, "q5_k": 31, "q6_k": 159}.get(name, 2**codes.bits - 1)
    values = torch.full_like(codes.values, 96 if name == "q6_k" else 0)
    values[::2], values[1, 5] = largest, largest
    codes = replace(codes, values=values)
    x = torch.full((37, 768), 3.0)
    x[::2] *= -1
    packed = codes.in_panels(HugePages())
    packed.instructions = instructions
    found = packed.product(x)
    assert torch.equal(found, codes.product(x, None, x.dtype))
    exact = x.double() @ codes.dense(torch.float64).t()
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@needs_library
@of_each_format
@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_number_of_rows(name):
    packed = drawn_codes(name, 96, 768).in_panels(HugePages())
    x = torch.randn(40, 768) * 10 ** torch.linspace(-2, 2, 40)[:, None]
    together = packed.product(x)
    for rows in range(1, 41):
        assert torch.equal(packed.product(x[:rows]), together[:rows])
        assert torch.equal(packed.product(x[rows - 1 : rows]), together[rows - 1 : rows])


@needs_library
def test_many_rows_are_split_as_few_are():
    codes, x = drawn_codes("int8", 50, 6080), torch.randn(600, 6080)
    assert torch.equal(codes.in_panels(HugePages()).product(x), codes.product(x, None, x.dtype))


@needs_library
@torch.no_grad()
def test_what_is_not_finite_does_not_become_so():
    packed, x = drawn_codes("int8", 70, 200).in_panels(HugePages()), torch.randn(20, 200)
    expected = packed.product(x)
    x[3, 199], x[18, 0], x[7, 5] = float("nan"), float("inf"), -float("inf")
    found = packed.product(x)
    finite = [row for row in range(20) if row not in (3, 7, 18)]
    assert torch.equal(found[finite], expected[finite]) and not found[[3, 7, 18]].isfinite().any()


@needs_library
def test_calls_are_kept_for_few_rows_alone():
    codes = drawn_codes("int8", 70, 64)
    packed = codes.in_panels(HugePages())
    for rows in (3, 3, 4, PREPARED_ROWS, PREPARED_ROWS + 1, 1000):
        x = torch.randn(rows, 64)
        assert torch.equal(packed.product(x), codes.product(x, None, x.dtype)), rows
    assert sorted(rows for rows, *_ in packed._prepared) == [3, 4, PREPARED_ROWS]


@needs_library
def test_what_kernels_cannot_read_is_refused():
    packed = drawn_codes("int4", 8, 32).in_panels(HugePages())
    for x, bias in ((torch.randn(2, 32), torch.randn(7)), (torch.randn(2, 32, device="meta"), None)):
        with pytest.raises(ValueError, match="the panel product was given"):
            packed.product(x, bias)
    with pytest.raises(ValueError, match="outputs is 17: these panels have up to 16"):
        PanelWeight(packed.panels, 17, 32, codes="int4")


# Rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [1, 16, 63, 64, 65, 777])
@needs_library
@torch.no_grad()
def test_inputs_are_rounded_to_the_same_codes(inputs, dtype):
    blocks, packed = -(-inputs // 64), drawn_codes("int8", 16, inputs).in_panels(HugePages())
    for rows in EDGES:
        x, stages = inputs_of(rows, inputs, dtype), Stages()
        laid_out = packed.add_rows(stages, rows, At(1), dtype_code(dtype))
        memory = torch.empty(stages.size, dtype=torch.int8)
        stages.run((memory.data_ptr(), x.data_ptr()))
        expected, steps = quantised(torch.nn.functional.pad(x, (0, -inputs % 64)))
        together = code_groups().together_for(rows)
        codes = memory[: laid_out.facts.offset].view(-1, blocks, together, 2, 32).permute(0, 2, 1, 3, 4)
        assert torch.equal(codes.reshape(-1, 2 * blocks, 32)[:rows], expected)
        facts = memory[laid_out.facts.offset :].view(torch.int32)[: len(codes) * together * 8 * blocks]
        facts = facts.view(-1, 2 * blocks, together, 4).transpose(1, 2).reshape(-1, 2 * blocks, 4)[:rows]
        sums = expected.sum(-1, dtype=torch.int32)
        assert torch.equal(-facts[..., 0], sums)
        assert torch.equal(-facts[..., 1], expected[..., :16].sum(-1, dtype=torch.int32))
        floats = facts.contiguous().view(torch.float32)
        assert torch.equal(floats[..., 2:3], steps) and torch.equal(floats[..., 3], steps[..., 0] * sums)


def test_a_product_and_a_sum_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3000, generator=generator)
    c = -(a * b) * (1 + torch.randint(-3, 4, (3000,), generator=generator) * 2.0**-23)
    c[::3] = torch.randn(1000, generator=generator) * 1e8
    for x, y, z, found in zip(a, b, c, _fused(a, b, c), strict=True):
        exact = Fraction(x.item()) * Fraction(y.item()) + Fraction(z.item())
        near = [found.item(), *(np.nextafter(np.float32(found.item()), np.float32(to)).item() for to in (-1e38, 1e38))]
        assert min(abs(Fraction(each) - exact) for each in near) == abs(Fraction(found.item()) - exact)
    one, tiny = torch.tensor([1.0]), torch.tensor([2.0**-24])
    assert _fused(tiny, one + 2**-23, one).item() == 1 + 2**-23  # float64 alone would see a tie
    assert _fused(tiny, one, one).item() == 1


# Layout


OF_ANY_SHAPE = [(1, 33), (7, 3), (300, 64), (64, 300), (130, 777)]
SHAPES = [(name, (outputs, 768)) for name in FORMATS for outputs in (1, 16, 33)]


@pytest.mark.parametrize(("name", "shape"), [*SHAPES, *product(MADE_HERE, OF_ANY_SHAPE)], ids=str)
def test_panels_hold_the_codes(name, shape):
    codes = drawn_codes(name, *shape)
    packed = codes.in_panels(HugePages())
    if packed is None:
        pytest.skip("the compiled kernels are missing")
    found = codes.without_values().out_of_panels(packed).tensors()
    assert packed.panels.data_ptr() % 64 == 0
    assert found.keys() == codes.tensors().keys()
    assert all(torch.equal(found[each], tensor) for each, tensor in codes.tensors().items())


@needs_library
@pytest.mark.parametrize(("name", "bits"), [*zip(FORMATS, (8.5, 4.5, 8.5, 4.5, 5, 9, 5, 9, 9), strict=True)])
def test_weights_take_so_many_bits(name, bits):
    assert drawn_codes(name, 64, 512).in_panels(HugePages()).panels.nbytes == 64 * 512 * bits / 8


@needs_library
@torch.no_grad()
def test_a_layer_says_what_it_cannot_be_fed():
    layer = Int8Linear(nn.Linear(30, 70), keep=False)
    assert layer.weight.dtype == torch.int8 and layer.nbytes == layer.weight.nbytes == 5 * 17 * 64
    with pytest.raises(UnsupportedModelError, match="a Tensor on meta; give it an ordinary tensor on the CPU"):
        layer(torch.randn(3, 30, device="meta"))
    kept = Int8Linear(nn.Linear(30, 70), keep=True)
    kept.weight = kept.weight  # as transformers ties weights, of whatever size they are when packed


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
