"""Makes a larger model that computes the same function: a small model's text at a large model's cost.

Speed on real text needs a model that writes real text, and the small ones that are at hand cost nothing to run. So the
small model is put into the corner of a larger one:

    hidden   x | 0      new hidden values are zero: nothing writes them, neither embeddings nor o_proj nor down_proj
    heads    h | *      new heads attend to noise; o_proj ignores them
    width    a | *      new feed-forward values are noise; down_proj ignores them
    layers   L, then layers of noise whose o_proj and down_proj are zero: they add 0 to the residual stream

Zeros lower the mean square in a norm by the factor f of the widening. With f a power of four everything needed to put
that right is exact in binary: `rms_norm_eps` / f makes the norm's output larger by sqrt(f), its weight / sqrt(f) undoes
it. Heads with norms of their own (Qwen3) get queries and keys / sqrt(f), which with the smaller eps changes nothing.
What remains are sums taken in another order, since kernels split longer rows elsewhere.
"""

from __future__ import annotations

import copy
import os
from math import isqrt

import torch
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from lade.bench.inflation.llama_weights import part_of
from lade.bench.inflation.search import Sizes, Wanted, choose
from lade.errors import ConfigError, UnsupportedModelError
from lade.model.facts import parts_of

SUPPORTED = LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
NOISE = 0.035
"""New weights are uniform in ± this, which is a standard deviation of 0.02: usual sizes, and nothing can overflow."""


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    params: float | None = 500e6,
    *,
    layers: int | None = None,
    hidden_factor: int | None = None,
    intermediate_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Return a larger model of the same class with the same logits, up to the order of sums.

    So greedy texts are the small model's, except that near ties, common in bfloat16, may go the other way. The sizes
    not given are chosen: hidden size and heads grow by the same power of four, the head size and the vocabulary stay,
    layers are 12 to 32 where possible and the feed-forward width takes the rest.

    New weights are noise wherever the function allows it. The others, about a third of the model, are zeros in memory
    of their own: they are read and multiplied like any.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 for causal language modelling; left as it is.
        params: wanted number of parameters, tied ones counted once; met within 3 %. None if all sizes are given.
        layers: number of layers, at least the model's.
        hidden_factor: by which hidden size and heads grow: 1, 4, 16, ...
        intermediate_size: feed-forward width, at least the model's.
        dtype: of the weights; None for the model's.
        device: where to build it, weight by weight; None for the model's.
        seed: of the noise; torch's global generator is left as it was.

    Returns:
        A model in evaluation mode, with a copy of the small one's generation config.

    Raises:
        ConfigError: a size is smaller than the model's, the sizes and `params` disagree, or they do not fit in memory.
        UnsupportedModelError: the model is of another architecture, quantized, or has adapters.

    >>> large = lade.bench.inflate(small, params=500e6, dtype=torch.bfloat16)
    """
    _require_llama(model)
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise ConfigError("dtype", dtype, "give torch.bfloat16, float16, float32 or float64")
    dtype = dtype or model.dtype
    device = torch.device(device or model.device)
    _check_memory(params or 0.0, dtype, device)
    sizes = choose(model, Wanted(params, hidden_factor, layers, intermediate_size))
    large = _skeleton(type(model), _grown_config(model, sizes, dtype))
    _fill(large, model, _Filler(sizes.hidden_factor, dtype, device, seed))
    _complete(large, model, device)
    return large


def _complete(large: PreTrainedModel, model: PreTrainedModel, device: torch.device) -> None:
    """Take over what is no weight; the mode is that of evaluation."""
    for name, buffer in model.named_buffers():  # rotary frequencies go by the head size, which stays
        _put(large, name, buffer.detach().clone().to(device))
    large.tie_weights()
    large.generation_config = copy.deepcopy(model.generation_config)
    large.eval()


def _require_llama(model: PreTrainedModel) -> None:
    """Refuse what is not exactly one of the known classes with the weights that its config promises."""
    if type(model) not in SUPPORTED:
        names = ", ".join(cls.__name__ for cls in SUPPORTED)
        raise UnsupportedModelError(f"{type(model).__name__} cannot be inflated", f"give one of {names}")
    remedy = "load the model without quantization, adapters or offloading"
    wrapped = any(part is not weight for weight in model.parameters() for part in parts_of(weight))
    if wrapped or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError("a quantized model cannot be inflated", remedy)
    promised = {name: weight.shape for name, weight in _skeleton(type(model), model.config).named_parameters()}
    actual = {n: w.shape for n, w in model.named_parameters() if w.is_floating_point() and not w.is_meta}
    for name in {**promised, **actual}:
        if promised.get(name) != actual.get(name):
            raise UnsupportedModelError(f"{name} is not the weight that the model's config promises", remedy)


def _check_memory(params: float, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` for more weights than the memory can hold: filling it would stop the machine."""
    if device.type == "cuda":
        _, room = torch.cuda.mem_get_info(device)
    elif hasattr(os, "sysconf"):
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:  # Windows does not say
        return
    most = room / dtype.itemsize
    if params > most:
        raise ConfigError("params", params, f"the memory of {device} holds {most:.2g} in {dtype}: give fewer")


def _skeleton(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = cls(copy.deepcopy(config))
    return model


def _grown_config(model: PreTrainedModel, sizes: Sizes, dtype: torch.dtype) -> PretrainedConfig:
    """The small model's config with larger sizes; the head size is their ratio, or given, and stays."""
    config = copy.deepcopy(model.config)
    added = sizes.layers - config.num_hidden_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [*config.layer_types, *["full_attention"] * added]
    config.num_hidden_layers = sizes.layers
    config.hidden_size *= sizes.hidden_factor
    config.num_attention_heads *= sizes.hidden_factor
    config.num_key_value_heads *= sizes.hidden_factor
    config.intermediate_size = sizes.intermediate_size
    config.rms_norm_eps /= sizes.hidden_factor
    config.dtype = dtype
    config.name_or_path = ""  # it is not the model of that folder any more
    return config


class _Filler:
    """Makes the weights of the larger model, one by one."""

    def __init__(self, factor: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shrink = 1 / isqrt(factor)  # exact: the factor is a power of four
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def grown(self, name: str, shape: torch.Size, small: torch.Tensor | None, shrunk: bool) -> torch.nn.Parameter:
        """A weight of this shape with the small model's, if it has one, in its first rows and columns."""
        part = part_of(name)
        scale = self.shrink if part.norm or shrunk else 1.0
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        if part.filling == "noise":
            weight.uniform_(-NOISE, NOISE, generator=self.generator)
        else:  # zeros too are written: pages never written would share one physical page, and reading them be cheap
            weight.fill_(scale if part.filling == "ones" else 0.0)
        if small is not None:
            corner = tuple(slice(size) for size in small.shape)
            weight[corner] = small.to(self.device, self.dtype) * scale
        return torch.nn.Parameter(weight)


def _fill(large: PreTrainedModel, small: PreTrainedModel, filler: _Filler) -> None:
    """Replace every weight of the skeleton; heads are appended in whole groups, so old ones keep their partners."""
    own = dict(small.named_parameters())
    normed = {name.rsplit(".", 2)[0] for name in own if name.endswith(".q_norm.weight")}
    for name, weight in list(large.named_parameters()):
        attention, projection = name.rsplit(".", 2)[:2]
        shrunk = attention in normed and projection in ("q_proj", "k_proj")
        _put(large, name, filler.grown(name, weight.shape, own.get(name), shrunk))


def _put(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer by its full name."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
