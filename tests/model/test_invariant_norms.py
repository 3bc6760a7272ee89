"""Norms of invariant models: what they were, in one call, and the same bits wherever a row stands."""

import copy

import pytest
import torch
from pretend import torch_threads
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lade.backends.cpu import kernels
from lade.backends.cpu.invariant.functions import AsGemma, AsLlama, AsWhole, InvariantNorm, _normalised, replace_norms
from lade.model.module_changes import restore

DTYPES = [torch.bfloat16, torch.float32]


class MultipliedRMSNorm(nn.Module):
    """Weights in float32, rounded once."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        numbers = x.float()
        return (self.weight.float() * (numbers * torch.rsqrt(numbers.pow(2).mean(-1, True) + self.eps))).to(x.dtype)


class DoubledRMSNorm(LlamaRMSNorm):
    """None of the three."""

    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class GatedRMSNorm(LlamaRMSNorm):
    """Given a gate, too."""

    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states if gate is None else hidden_states * gate)


def layer_of(kind, size, dtype):
    torch.manual_seed(size)
    layer = kind(size).to(dtype)
    layer.weight.data.normal_(1, 0.3)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 40, 47, 768])
@pytest.mark.parametrize("kind, own", [(LlamaRMSNorm, AsLlama), (MultipliedRMSNorm, AsWhole), (GemmaRMSNorm, AsGemma)])
@torch.no_grad()
def test_a_norm_stays_what_it_was(kind, own, size, dtype):
    layer = layer_of(kind, size, dtype)
    x = (torch.randn(3, 5, size) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]).to(dtype)
    before, model = layer(x), nn.ModuleList([layer])
    replace_norms(model)
    alike = (AsLlama, AsWhole) if dtype == torch.float32 and own is not AsGemma else own
    assert isinstance(layer, alike)
    found = layer(x)
    torch.testing.assert_close(found, before, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(copy.deepcopy(layer)(x), found)
    restore(model)
    assert type(layer) is kind and torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 47, 61])
def test_a_row_has_the_same_bits_wherever_it_stands(size, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "_MANY", 100)
    x, weight = torch.randn(40, size).to(dtype), torch.randn(size).to(dtype)
    with torch_threads(1):
        alone = torch.cat([_normalised(row, weight, 1e-5, AsLlama) for row in x.split(1)])
    with torch_threads(3):
        shared = _normalised(x.view(5, 8, size), weight, 1e-5, AsLlama)
    assert torch.equal(shared.view(40, size), alone)
    assert torch.equal(_normalised(x[7:], weight, 1e-5, AsLlama), alone[7:])
    turned = _normalised(x.t().contiguous().t(), weight, 1e-5, AsLlama)
    assert torch.equal(turned, alone), "rows that do not lie side by side"


def test_what_is_no_number_stays_in_its_row():
    x, weight = torch.randn(4, 40), torch.ones(40)
    whole = _normalised(x, weight, 1e-5, AsLlama)
    x[2, 39] = torch.nan
    found = _normalised(x, weight, 1e-5, AsLlama)
    assert found[2].isnan().all() and torch.equal(found[[0, 1, 3]], whole[[0, 1, 3]])


@torch.no_grad()
def test_what_is_another_norm_is_left_alone():
    others = [
        layer_of(DoubledRMSNorm, 64, torch.float32),
        GatedRMSNorm(64),
        LlamaRMSNorm(16),
        nn.LayerNorm(64),
        LlamaRMSNorm(64).half(),
    ]
    replace_norms(nn.ModuleList(others))
    assert not any(isinstance(each, InvariantNorm) for each in others)


def test_inputs_of_another_dtype_go_the_layers_own_way():
    layer = layer_of(LlamaRMSNorm, 64, torch.bfloat16)
    replace_norms(nn.ModuleList([layer]))
    x = torch.randn(2, 64)
    assert torch.equal(layer(x), LlamaRMSNorm.forward(layer, x)) and layer(x).dtype == torch.float32
