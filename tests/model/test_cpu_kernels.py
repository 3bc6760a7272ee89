"""Compiled kernels: the same bits for all instructions that this processor has, and those of their definition."""

from contextlib import contextmanager

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import lade
from lade.backends.cpu import kernels
from lade.backends.cpu.invariant import attention, functions, make_invariant
from lade.backends.cpu.invariant.attention import PlacedMask
from lade.backends.cpu.packing import panel_products
from lade.backends.cpu.packing import weight as packed
from lade.backends.cpu.packing.blocks import BlockCodes
from lade.backends.cpu.packing.weight import DOT_PANEL, HugePages, PanelWeight, in_panels
from lade.testing import toy_model

ALL = ["plain", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "reference"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.skipif(not kernels.kernel("attend").available, reason="the compiled kernels are missing")


def with_each(name: str) -> pytest.MarkDecorator:
    """Every set of instructions that a kernel is compiled for and this processor has."""
    found = [each for each in ALL if kernels.kernel(name, each).available]
    return pytest.mark.parametrize("instructions", found)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def assert_same_bits(call, instructions: str) -> None:
    """What a call gives by these instructions alone is what it gives by the best."""
    expected = call()
    with by(instructions, attention, functions):
        assert torch.equal(bits(call()), bits(expected))


@contextmanager
def by(instructions: str, *modules, only: str = ""):
    """Have these modules find kernels, or `only` this one, by these instructions."""

    def find(name: str, given: str = "") -> kernels.CpuKernel:
        return kernels.kernel(name, instructions if only in ("", name) else given)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "kernel", find)
        yield


def coded(values: torch.Tensor) -> PanelWeight:
    """Signed codes of a weight in panels, with scales of one."""
    scale = torch.ones(len(values), -(-values.shape[1] // 32), dtype=torch.bfloat16)
    packed = BlockCodes("int8", 8, values.add(128).to(torch.uint8), scale).in_panels(HugePages())
    assert packed is not None
    return packed


def drawn(data, *shape: int, dtypes=tuple(FLOATS)) -> torch.Tensor:
    """Numbers of many sizes, zeros and equal ones among them."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator) * 10 ** data.draw(st.sampled_from([-2.0, 0.0, 1.0]))
    if data.draw(st.booleans()):
        x = x.round()
    return x.to(data.draw(st.sampled_from(dtypes)))


@with_each("attend")
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_attention_has_the_same_bits(instructions, data):
    sizes = st.integers(1, 3)
    rows, kv_heads, group = (data.draw(sizes) for _ in range(3))
    step = data.draw(st.sampled_from([1, 2, 5, 16, 20]))
    keys = step + data.draw(st.sampled_from([0, 1, 15, 16, 17, 60, 64, 100]))
    size, value_size = (data.draw(st.sampled_from([1, 4, 7, 8, 16, 24, 31, 32, 40, 64])) for _ in range(2))
    query = drawn(data, rows, kv_heads * group, step, size)
    key, value = drawn(data, rows, kv_heads, keys, size), drawn(data, rows, kv_heads, keys, value_size)
    allowed = torch.ones(rows, 1, step, keys, dtype=torch.bool).tril(keys - step)
    allowed = allowed & (torch.rand(allowed.shape) < data.draw(st.sampled_from([0.7, 2])))
    mask = PlacedMask.of(allowed, torch.arange(keys).expand(rows, -1))
    cap, sinks = data.draw(st.sampled_from([None, 5.0])), data.draw(st.booleans())
    sinks = drawn(data, kv_heads * group) if sinks else None
    assert_same_bits(lambda: attention.attention_of(query, key, value, mask, size**-0.5, cap, sinks), instructions)


@with_each("normalise")
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_norms_have_the_same_bits(instructions, data):
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(32, 150))
    x = drawn(data, rows, columns, dtypes=FLOATS[:2])
    weight = drawn(data, columns).to(x.dtype)
    kind = data.draw(st.sampled_from([functions.AsLlama, functions.AsWhole, functions.AsGemma]))
    assert_same_bits(lambda: functions._normalised(x, weight, 1e-6, kind), instructions)


@with_each("logistic_product")
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_activations_have_the_same_bits(instructions, data):
    x, cubic = drawn(data, data.draw(st.integers(0, 200))), data.draw(st.sampled_from([0.0, 0.07]))
    assert_same_bits(lambda: functions.times_logistic(x, 1.6, cubic), instructions)


@with_each("quantise_rows")
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_all_numbers_of_two_bytes_are_read_alike(instructions, dtype):
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.where(numbers.isfinite(), numbers, 1).view(-1, 64)
    weight = coded(torch.eye(64, dtype=torch.int16))  # sums are the codes
    with by(instructions, packed, only="quantise_rows"):
        found = weight.product(x)
    assert torch.equal(found, coded(torch.eye(64, dtype=torch.int16)).product(x))


@with_each("multiply_int8")
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_results_are_rounded_as_torch_does(instructions, dtype):
    """Sums are zero, and biases all numbers of two bytes, those halfway between two of them and those beside."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halfway = (numbers + numbers.roll(-1)) / 2
    bias = torch.cat([numbers, halfway, halfway.nextafter(numbers), halfway.nextafter(numbers.roll(-1))])
    values, x = torch.zeros(len(bias), 1, dtype=torch.int16), torch.zeros(1, 1)
    weight = coded(values)
    weight.instructions = instructions
    out = weight.product(x, bias, dtype)
    expected = (bias + 0.0).to(dtype)  # a zero is positive
    assert torch.equal(out[0].isnan(), expected.isnan())
    assert torch.equal(bits(out[0].nan_to_num(7)), bits(expected.nan_to_num(7)))


@with_each("multiply_few")
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_products_of_bfloat16_have_the_same_bits(instructions, data):
    rows, outputs, inputs = (data.draw(st.integers(1, most)) for most in (40, 70, 200))
    half = FLOATS[1:2]
    weight, x = (drawn(data, each, inputs, dtypes=half) for each in (outputs, rows))
    bias = drawn(data, outputs, dtypes=half) if data.draw(st.booleans()) else None

    def product(kernel_of: str) -> torch.Tensor:
        laid_out = PanelWeight(in_panels(weight, panel=DOT_PANEL), outputs, inputs)
        laid_out.instructions = kernel_of
        return laid_out.product(x, bias)

    assert torch.equal(bits(product(instructions)), bits(product("reference")))


def test_a_kernel_that_is_missing_says_what_to_install():
    missing = kernels.CpuKernel("attend", "avx1024")
    assert not missing.available
    with pytest.raises(lade.UnsupportedModelError, match="'attend' is missing; install a C"):
        missing(0)


@torch.no_grad()
def test_without_the_library_models_are_packed_by_torch_and_not_made_invariant(monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    for module in (kernels, make_invariant, packed, panel_products):
        monkeypatch.setattr(module, "kernel", kernels.CpuKernel)
    monkeypatch.setattr(panel_products, "has_tiles", panel_products.has_tiles.__wrapped__)
    model, ids = toy_model(dtype=torch.float32), torch.arange(1, 9)[None]
    assert panel_products.panel_for(torch.bfloat16) == 0
    assert make_invariant.refusal(model)
    with pytest.raises(lade.UnsupportedModelError, match="compiled kernels are missing; install a C"):
        lade.invariant(model)
    expected = model(ids).logits
    torch.testing.assert_close(lade.pack(model, min_weights=1)(ids).logits, expected)
