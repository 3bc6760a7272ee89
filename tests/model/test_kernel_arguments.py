"""What compiled kernels are given: they are told addresses, so callers refuse whatever they were not compiled for."""

import copy
import ctypes

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend import short_trials
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trees import attention

import lade
from lade import native
from lade.backends.cpu.invariant import functions
from lade.backends.cpu.invariant.attention import PlacedMask, invariant_attention
from lade.backends.cpu.packing.integers import Int8Linear, int8_codes
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for, panel_product
from lade.backends.cpu.packing.weight import HugePages, PanelWeight, has_block_kernels, in_panels
from lade.decoding import readout
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.kernels import native_tree, tables
from lade.decoding.kernels.layout import LONGEST, WIDTH
from lade.decoding.readout import read
from lade.native.kernel import LONG_LIST, ArrayType, NativeKernel
from lade.testing import toy_model

HALF, FLOATS = torch.bfloat16, (torch.float32, torch.bfloat16, torch.float16)
REALS = st.sampled_from([*FLOATS, torch.float64, torch.int64])
DTYPES = st.one_of(REALS, st.just(torch.complex64))
SHAPES = st.lists(st.integers(0, 4), max_size=3)
COLUMNS = st.integers(1, 70)
ROUNDING = {torch.float32: 2e-6, HALF: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}


class Other(torch.Tensor):
    """Of a class that may compute in its own way."""


def turned(tensor):
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def amid_others(tensor):
    """Every second number of a larger tensor, from the second on."""
    wider = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 7) if tensor.dim() else tensor.new_ones(3)
    wider[..., 1::2] = tensor
    return wider[..., 1::2].view(tensor.shape)


def repeated(tensor):
    return tensor[..., :1].expand(tensor.shape)


LAYOUTS = st.sampled_from([torch.clone, turned, amid_others, repeated])
PLAIN = {"as it is": lambda tensor: tensor}
ELSEWHERE = {
    "on meta": lambda tensor: tensor.to("meta"),
    "of another class": lambda tensor: tensor.as_subclass(Other),
    "without numbers": lambda tensor: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(tensor),
}
WITH_GRADIENTS = {"with gradients": lambda tensor: tensor.requires_grad_(tensor.is_floating_point())}
KINDS = st.sampled_from([*PLAIN] * 5 + [*ELSEWHERE, *WITH_GRADIENTS])


def made(kind, tensor):
    return {**PLAIN, **ELSEWHERE, **WITH_GRADIENTS}[kind](tensor)


@st.composite
def tensors(draw, shapes=SHAPES, columns=COLUMNS, dtypes=DTYPES, layouts=LAYOUTS):
    """Numbers of any dtype, lying in memory in any way."""
    shape = (*draw(shapes), draw(columns))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return draw(layouts)(torch.randn(shape, generator=generator).mul_(3).to(draw(dtypes)))


def found_or_refused(door):
    """What a door gives; None where it refuses."""
    try:
        return door()
    except ValueError as refusal:
        assert any(words in str(refusal) for words in ("given", "a kernel", "has no gradients")), refusal
        return None


def assert_near(found, expected, sums=1):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    error = sums * ROUNDING.get(found.dtype, 0)
    torch.testing.assert_close(found, expected, rtol=error, atol=error, equal_nan=True)


# Norms and activations


@settings(max_examples=examples(300))
@given(tensors(columns=st.sampled_from([1, 31, 32, 33, 40, 64])), st.data())
def test_a_norm_is_right_or_refused(x, data):
    alike = data.draw(st.booleans())
    dtype = x.dtype if alike else data.draw(DTYPES)
    size = x.shape[-1] if alike else data.draw(st.sampled_from([32, 33, 40, 64]))
    weight = data.draw(LAYOUTS)(torch.rand(size).to(dtype) + 1)
    of_x, of_weight = data.draw(KINDS), data.draw(KINDS)
    served = size == x.shape[-1] >= 32 and x.dtype == dtype in (torch.float32, HALF) and weight.is_contiguous()
    served = served and {of_x, of_weight} == {"as it is"}
    given = made(of_x, x), made(of_weight, weight)
    found = functions._normalised(*given, 1e-5, functions.AsLlama) if functions._takes(*given) else None
    assert (found is not None) == served
    if found is not None:
        numbers = x.double()
        expected = weight.double() * numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + 1e-5)
        assert_near(found, expected.to(x.dtype))


@settings(max_examples=examples(200))
@given(tensors(columns=st.integers(0, 70)), KINDS)
def test_numbers_times_a_logistic_function_are_right_or_refused(x, kind):
    found = found_or_refused(lambda: functions.times_logistic(made(kind, x)))
    wants_none = kind == "as it is" or (kind == "with gradients" and not x.is_floating_point())
    assert (found is not None) == (x.dtype in FLOATS and wants_none)
    if found is not None:
        numbers = x.detach().double()
        assert_near(found.detach(), (numbers * numbers.sigmoid()).to(x.dtype))


def outcome(layer, x):
    """What a layer gives, or that it raises."""
    try:
        return layer(x)
    except (RuntimeError, TypeError, ValueError):
        return None


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # fake tensors read it
@settings(max_examples=examples(200))
@given(
    tensors(columns=st.sampled_from([40, 41]), dtypes=REALS),
    KINDS,
    st.sampled_from(FLOATS),
    st.sampled_from([*FLOATS, torch.float64]),
    st.data(),
)
def test_a_layer_of_an_invariant_model_takes_what_it_took_before(x, kind, before, after, data):
    """Whatever it is cast to and given: what the kernel does not take goes the layer's own way."""
    make = data.draw(
        st.sampled_from([lambda: LlamaRMSNorm(40), lambda: GemmaRMSNorm(40), lambda: copy.copy(ACT2FN["silu"])])
    )
    ours = nn.ModuleList([make().to(before)])
    functions.replace_norms(ours)
    functions.replace_activations(ours)
    assert isinstance(ours[0], (functions.InvariantNorm, functions.InvariantActivation)) or before == torch.float16
    own, ours = make().to(after), ours.to(after)[0]
    found, expected = outcome(ours, made(kind, x)), outcome(own, made(kind, x.clone()))
    assert (found is None) == (expected is None)
    if found is not None and not found.is_meta and not isinstance(found, FakeTensor):
        assert found.requires_grad == expected.requires_grad
        assert_near(found.detach(), expected.detach())


@pytest.mark.by_processor
@pytest.mark.parametrize(
    ("before", "after"),
    [(torch.float32, torch.float16), (torch.float32, HALF), (HALF, torch.float16), (HALF, torch.float32)],
    ids=str,
)
@torch.no_grad()
def test_a_model_that_is_cast_after_it_was_made_invariant_goes_on(before, after, monkeypatch):
    short_trials(monkeypatch)
    ids = torch.arange(1, 20)[None]
    expected = toy_model(dtype=before).to(after)(ids).logits
    model = lade.invariant(toy_model(dtype=before)).to(after)
    found = model(ids).logits
    assert found.dtype == after
    spread = expected.float().std().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=200 * torch.finfo(after).eps * spread)
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    with pytest.warns(lade.FallbackWarning, match="call lade.invariant"):
        assert torch.equal(lade.generate(model, input_ids=ids, max_new_tokens=8, do_sample=False), plain)


@pytest.mark.by_processor
@torch.no_grad()
def test_an_invariant_model_says_what_it_cannot_become(monkeypatch):
    short_trials(monkeypatch)
    model, ids = lade.invariant(toy_model(dtype=torch.float32)), torch.arange(1, 9)[None]
    with pytest.raises(ValueError, match=r"torch.float64, but is for 16 and 32 bits: call lade.variant\(model\)"):
        model.double()(ids)
    with pytest.raises(ValueError, match=r"on meta, but is for the CPU: call lade.variant\(model\)"):
        model.float().to("meta")(ids.to("meta"))


# Attention


@settings(max_examples=examples(300))
@given(st.data())
def test_attention_is_right_or_refused(data):
    sizes = st.integers(1, 3)
    rows, kv_heads, group, step = (data.draw(sizes) for _ in range(4))
    keys, size, value_size = (
        step + data.draw(st.integers(0, 70)),
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 40)),
    )
    shapes = [[rows, kv_heads * group, step, size], [rows, kv_heads, keys, size], [rows, kv_heads, keys, value_size]]
    wrong = data.draw(st.sampled_from([None] * 3 + [(state, place) for state in range(3) for place in range(4)]))
    if wrong is not None:
        shapes[wrong[0]][wrong[1]] = data.draw(st.integers(0, 3))
    right = shapes[1][:3] == shapes[2][:3] and shapes[0][0] == shapes[1][0] and shapes[0][3] == shapes[1][3] > 0
    right = right and shapes[1][1] > 0 == shapes[0][1] % shapes[1][1] and shapes[1][2] >= shapes[0][2] > 0
    dtypes, layouts = [data.draw(DTYPES) for _ in range(3)], [data.draw(LAYOUTS) for _ in range(3)]
    states = [
        layout(torch.randn(shape)).to(dtype) for layout, shape, dtype in zip(layouts, shapes, dtypes, strict=True)
    ]
    states = [state if min(state.shape) == 0 else layout(state) for layout, state in zip(layouts, states, strict=True)]
    kinds = [data.draw(KINDS) for _ in range(3)]
    given_states = [made(kind, state) for kind, state in zip(kinds, states, strict=True)]
    found = found_or_refused(lambda: invariant_attention(nn.Identity(), *given_states, None)[0])
    served = right and set(kinds) == {"as it is"} and all(dtype in FLOATS for dtype in dtypes)
    if found is not None and not found.numel():
        return
    assert (found is not None) == served
    if found is not None:
        allowed = torch.ones(shapes[0][0], shapes[0][2], shapes[1][2], dtype=torch.bool).tril(
            shapes[1][2] - shapes[0][2]
        )
        expected = attention(*(state.double() for state in states), allowed, shapes[0][3] ** -0.5)
        assert_near(found, expected.to(dtypes[0]), sums=10)


@pytest.mark.parametrize(
    "allowed",
    [
        torch.zeros(1, 1, 3, 5),
        torch.ones(1, 1, 3, 5, dtype=torch.uint8),
        torch.ones(1, 2, 3, 5, dtype=torch.bool),
        torch.ones(1, 1, 3, 5, dtype=torch.bool, device="meta"),
    ],
    ids=["float32", "uint8", "of each head", "on meta"],
)
def test_attention_takes_masks_of_bool_alone(allowed):
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    mask = PlacedMask.of(allowed, torch.arange(5)[None])
    with pytest.raises(ValueError, match=r"it takes masks \[B, 1, S, K\] of bool on the CPU"):
        invariant_attention(nn.Identity(), query, key, key, mask)


# Packed layers


@settings(max_examples=examples(200))
@given(tensors(columns=st.sampled_from([39, 40])), KINDS, st.sampled_from([PackedLinear, Int8Linear]), st.booleans())
@torch.no_grad()
def test_a_packed_layer_is_right_or_raises(x, kind, packed, biased):
    layer = nn.Linear(40, 70, bias=biased).requires_grad_(False)
    ours = packed(copy.deepcopy(layer), keep=False)
    found, expected = outcome(ours, made(kind, x)), outcome(layer, x)
    assert found is not None or expected is None or kind in ELSEWHERE
    if found is not None and not found.is_meta and not isinstance(found, FakeTensor):
        near = 0.05 if packed is Int8Linear else 1e-5
        torch.testing.assert_close(found.detach(), expected, rtol=near, atol=near * 3 * 40**0.5)


OF_70 = torch.linspace(-1, 1, 70)
BIASES = {
    "too short": OF_70[:69],
    "one number": OF_70[:1],
    "a column": OF_70[:, None],
    "float64": OF_70.double(),
    "bfloat16": OF_70.to(HALF),
    "strided": amid_others(OF_70),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("packed", [PackedLinear, Int8Linear])
@torch.no_grad()
def test_a_bias_that_does_not_fit_is_refused(packed, name):
    layer = packed(nn.Linear(40, 70), keep=False)
    layer.bias.data = BIASES[name]
    with pytest.raises(lade.UnsupportedModelError, match=r"bias of a packed layer .* lade.unpack\(model\)"):
        layer(torch.randn(70, 40))
    layer.bias.data = OF_70.clone()
    assert_near(layer(torch.zeros(3, 40)), OF_70.expand(3, -1).clone())


UNFIT = {
    "float32": (torch.randn(3, 40), None),
    "too wide": (torch.randn(3, 65).to(HALF), None),
    "no rows": (torch.tensor(1.0, dtype=HALF), None),
    "on meta": (torch.randn(3, 40, device="meta", dtype=HALF), None),
    "of another class": (torch.randn(3, 40).to(HALF).as_subclass(Other), None),
    "a bias in float32": (torch.randn(3, 40).to(HALF), OF_70),
    "a bias that is too short": (torch.randn(3, 40).to(HALF), OF_70[:69].to(HALF)),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("panel", [64, 16])
def test_products_in_panels_refuse_what_does_not_fit(name, panel):
    """On any processor: what fits goes on to kernels that some lack."""
    x, bias = UNFIT[name]
    panels = in_panels(torch.randn(70, 40).to(HALF), panel=panel)
    with pytest.raises(ValueError, match=r"the panel product was given x .* it takes bfloat16 on the CPU"):
        panel_product(x, PanelWeight(panels, 70, 40), bias)
    with pytest.raises(ValueError, match="up to"):
        PanelWeight(panels, 129, 40)


@settings(max_examples=examples(100))
@given(tensors(columns=st.sampled_from([39, 40]), dtypes=st.sampled_from(FLOATS)), st.booleans())
@pytest.mark.skipif(not panel_for(HALF), reason="neither tiles (AMX) nor AVX512-BF16 here")
def test_products_in_panels_are_right_or_refused(x, biased):
    weight, bias = torch.randn(70, 40).to(HALF), OF_70.to(HALF) if biased else None
    packed = PanelWeight(in_panels(weight, panel=panel_for(HALF)), 70, 40)
    found = found_or_refused(lambda: panel_product(x, packed, bias))
    assert (found is not None) == (x.dtype == HALF and x.shape[-1] == 40)
    if found is not None:
        expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0.1)


@settings(max_examples=examples(200))
@given(tensors(columns=st.integers(0, 70)), KINDS, DTYPES, st.sampled_from([70, 69, 1, 0]))
@pytest.mark.skipif(not has_block_kernels(), reason="the compiled kernels are missing")
@torch.no_grad()
def test_products_of_codes_are_right_or_refused(x, kind, bias_dtype, biases):
    inputs = x.shape[-1]
    codes, bias = int8_codes(torch.randn(70, max(inputs, 1))), torch.ones(biases).to(bias_dtype) if biases else None

    def product():
        panels = codes.in_panels(HugePages()).panels
        return PanelWeight(panels, 70, inputs, codes="int8").product(made(kind, x), bias)

    found, empty = found_or_refused(product), not x.numel()
    takes_x = inputs > 0 and kind not in ELSEWHERE and x.dtype in FLOATS
    takes_bias = not biases or (biases == 70 and bias_dtype in FLOATS)
    assert empty or (found is not None) == (takes_x and takes_bias)
    if found is not None and not empty:
        exact = x.detach().double() @ codes.dense(torch.float64).t() + (1 if biases else 0)
        bound = x.detach().double().abs().amax() * codes.scale.double().abs().amax() * inputs * 127 / 100 + 0.1
        assert ((found.double() - exact).abs() <= bound).all()


# Kernels that draft


@settings(max_examples=examples(100))
@given(
    tensors(
        shapes=st.lists(st.integers(0, 4), min_size=1, max_size=2), dtypes=st.sampled_from([*FLOATS, torch.float64])
    )
)
def test_logits_of_any_dtype_and_layout_are_read(logits):
    rows = logits.float().reshape(-1, logits.shape[-1]).contiguous()
    found = read(logits)
    assert found.argmax_ids == rows.argmax(-1).tolist()
    assert np.array_equal(found.entries, read(rows).entries)


KERNELS = [
    each
    for module in (readout, tables, native_tree)
    for each in vars(module).values()
    if isinstance(each, NativeKernel) and any(isinstance(kind, ArrayType) for kind in each.types)
]


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernels_that_draft_take_arrays_of_one_dtype_that_lie_in_one_piece(kernel):
    arrays = [kind for kind in kernel.types if isinstance(kind, ArrayType)]
    sizes = {place: kind.dimensions for place, kind in enumerate(kernel.types) if kind in arrays}
    assert sizes
    for place, dimensions in sizes.items():
        dtype = kernel.types[place].dtype
        arguments = [
            np.zeros((8,) * kind.dimensions, kind.dtype) if kind in arrays else [0] if kind is LONG_LIST else 1
            for kind in kernel.types
        ]
        for unfit in (
            arguments[place].astype(np.uint8),
            np.zeros((16,) * dimensions, dtype)[(slice(None, None, 2),) * dimensions],
            np.zeros((8,) * (3 - dimensions), dtype),
            [0] * 8,
        ):
            arguments[place] = unfit
            with pytest.raises(ctypes.ArgumentError, match="TypeError"):
                kernel(*arguments)


def test_a_memory_refuses_arrays_that_do_not_belong_together():
    memory = ContextMemory(2**16)
    for contexts, entries in ((3, 4), (4, 3)):
        arrays = np.zeros((contexts, LONGEST), np.int32), np.zeros((entries, WIDTH), np.int32)
        with pytest.raises(ValueError, match="do not belong together"):
            memory.learn(*arrays)
    with pytest.raises(ValueError, match="do not belong together"):
        memory.learn(np.zeros((3, LONGEST + 1), np.int32), np.zeros((3, WIDTH), np.int32))
