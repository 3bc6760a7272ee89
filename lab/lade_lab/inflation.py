"""Function-preserving inflation of a Llama to a wanted number of parameters.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isqrt, log, prod
from typing import Literal

import torch
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from lade.errors import ConfigError, UnsupportedModelError
from lade.model.facts import inner_tensors

Axis = Literal["vocabulary", "hidden", "heads", "feed_forward", "head"]
"""Unit of a dimension: tokens, hidden values, values of all heads, feed-forward values, values of one head."""

Filling = Literal["noise", "zeros", "ones"]


@dataclass(frozen=True)
class Part:
    """One kind of weight.

    Attributes:
        axes: what the dimensions of its weight count, outputs first; a bias has the first of them.
        filling: what its new entries hold. `zeros` where they would be added to the residual stream, `noise` where
            they read zeros or are read by zeros.
        norm: whether it is the norm of a hidden state.
    """

    axes: tuple[Axis, ...]
    filling: Filling
    norm: bool = False

    def grown(self, shape: Sequence[int], factor: int, intermediate_size: int) -> tuple[int, ...]:
        """The shape after widening; what counts tokens or the values of one head stays."""
        grow = {"hidden": factor, "heads": factor}
        return tuple(
            intermediate_size if axis == "feed_forward" else size * grow.get(axis, 1)
            for size, axis in zip(shape, self.axes, strict=False)  # a bias has fewer dimensions than axes
        )


_PROJECTION_IN = Part(("heads", "hidden"), "noise")
_FEED_FORWARD_IN = Part(("feed_forward", "hidden"), "noise")
_HIDDEN_NORM = Part(("hidden",), "ones", norm=True)
_HEAD_NORM = Part(("head",), "ones")

PARTS = {
    "embed_tokens": Part(("vocabulary", "hidden"), "zeros"),
    "q_proj": _PROJECTION_IN,
    "k_proj": _PROJECTION_IN,
    "v_proj": _PROJECTION_IN,
    "o_proj": Part(("hidden", "heads"), "zeros"),
    "gate_proj": _FEED_FORWARD_IN,
    "up_proj": _FEED_FORWARD_IN,
    "down_proj": Part(("hidden", "feed_forward"), "zeros"),
    "q_norm": _HEAD_NORM,
    "k_norm": _HEAD_NORM,
    "input_layernorm": _HIDDEN_NORM,
    "post_attention_layernorm": _HIDDEN_NORM,
    "norm": _HIDDEN_NORM,
    "lm_head": Part(("vocabulary", "hidden"), "noise"),
}
"""By the name of the module that holds the weight."""


def part_of(name: str) -> Part:
    """The part that a parameter belongs to.

    Args:
        name: as in `named_parameters`, for example `model.layers.0.mlp.up_proj.weight`.
    """
    return PARTS[name.split(".")[-2]]


TOLERANCE = 0.03
"""Share of the wanted parameters by which the total may miss them."""

FEED_FORWARD_RATIO = 3.3
FEWEST_LAYERS, MOST_LAYERS = 12, 32
"""Proportions of published models of 0.1 to 8 billion parameters: feed-forward width over hidden size, layers."""

WIDTH_STEPS = 64, 8, 1
"""Feed-forward widths are a multiple of the first of these that comes near enough: kernels like round widths."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the larger model.

    Attributes:
        hidden_factor: by which the hidden size and the numbers of heads grow; a power of four.
        layers: of the larger model, those of the small one included.
        intermediate_size: feed-forward width.
    """

    hidden_factor: int
    layers: int
    intermediate_size: int


@dataclass(frozen=True)
class Wanted:
    """Sizes asked for; None where they are to be chosen.

    `check` raises ConfigError for a size below the model's own or a factor that is no power of four.
    """

    params: float | None
    hidden_factor: int | None = None
    layers: int | None = None
    intermediate_size: int | None = None

    def check(self, model: PreTrainedModel) -> None:
        """Refuse what the model cannot grow to."""
        own, config = model.num_parameters(), model.config
        if self.params is not None and not own <= self.params < inf:
            raise ConfigError("params", self.params, f"the model has {own} parameters, give at least as many")
        if self.hidden_factor is not None and not _is_power_of_four(self.hidden_factor):
            raise ConfigError("hidden_factor", self.hidden_factor, "give a power of four, 1, 4, 16 and so on")
        for field, value, least in (
            ("layers", self.layers, config.num_hidden_layers),
            ("intermediate_size", self.intermediate_size, config.intermediate_size),
        ):
            if value is not None and value < least:
                raise ConfigError(field, value, f"the model itself has {least}, give at least as many")


@dataclass(frozen=True)
class Growth:
    """Parameters of a widened model, as a function of its layers and feed-forward width.

    Attributes:
        outside: parameters of the embeddings, the head and the last norm.
        layer: parameters of a layer without its feed-forward width.
        width: parameters of a layer for each value of its feed-forward width.
    """

    outside: int
    layer: int
    width: int

    @classmethod
    def of(cls, model: PreTrainedModel, factor: int) -> Growth:
        """Counted from the model's own weights; tied ones count once."""
        outside = layer = width = 0
        for name, weight in model.named_parameters():
            part = part_of(name)
            count = prod(part.grown(weight.shape, factor, 1))
            if "feed_forward" in part.axes[: weight.dim()]:
                width += count if ".layers.0." in name else 0
            elif ".layers." in name:
                layer += count if ".layers.0." in name else 0
            else:
                outside += count
        return cls(outside, layer, width)

    def total(self, layers: int, intermediate_size: int) -> int:
        """Parameters in all."""
        return self.outside + layers * (self.layer + self.width * intermediate_size)

    def intermediate_size(self, params: float, layers: int) -> float:
        """The feed-forward width that makes the total `params`; below one where that is impossible."""
        return ((params - self.outside) / layers - self.layer) / self.width


def choose(model: PreTrainedModel, wanted: Wanted) -> Sizes:
    """The most usual proportions that have the wanted number of parameters.

    Raises:
        ConfigError: a size is out of range, or no sizes come within 3 % of `params`.
    """
    wanted.check(model)
    if wanted.params is None:
        return _as_given(wanted)
    hidden = model.config.hidden_size
    best = min(_candidates(model, wanted, wanted.params), key=lambda sizes: _oddity(sizes, hidden), default=None)
    if best is None:
        given = ", ".join(f"{k}={v}" for k, v in vars(wanted).items() if k != "params" and v is not None)
        raise ConfigError(
            "params",
            wanted.params,
            f"no total within {TOLERANCE:.0%} of it has {given}, give fewer sizes, or all three with params=None",
        )
    return best


def _as_given(wanted: Wanted) -> Sizes:
    """The three sizes, whatever they amount to."""
    factor, layers, width = wanted.hidden_factor, wanted.layers, wanted.intermediate_size
    if factor is None or layers is None or width is None:
        raise ConfigError("params", None, "give a number, or layers, hidden_factor and intermediate_size")
    return Sizes(factor, layers, width)


def _candidates(model: PreTrainedModel, wanted: Wanted, params: float) -> Iterator[Sizes]:
    """Sizes that come near enough."""
    own = model.config.num_hidden_layers
    for factor, growth in _growths(model, wanted.hidden_factor, params):
        for layers in [wanted.layers] if wanted.layers else range(own, max(own, MOST_LAYERS) + 1):
            for width in _widths(model, wanted.intermediate_size, growth.intermediate_size(params, layers)):
                if abs(growth.total(layers, width) - params) <= TOLERANCE * params:
                    yield Sizes(factor, layers, width)
                    break


def _growths(model: PreTrainedModel, factor: int | None, params: float) -> Iterator[tuple[int, Growth]]:
    """The factors to try, while the embeddings alone are not too large."""
    if factor is not None:
        yield factor, Growth.of(model, factor)
        return
    factor = 1
    while (growth := Growth.of(model, factor)).outside < params:
        yield factor, growth
        factor *= 4


def _widths(model: PreTrainedModel, given: int | None, ideal: float) -> Iterable[int]:
    """Feed-forward widths to try, the roundest first."""
    if given is not None:
        return [given]
    own: int = model.config.intermediate_size
    return [max(own, round(ideal / step) * step) for step in WIDTH_STEPS]


def _oddity(sizes: Sizes, hidden: int) -> float:
    """Return the distance from usual proportions; 0 for the most usual."""
    ratio = sizes.intermediate_size / (hidden * sizes.hidden_factor)
    return abs(log(ratio / FEED_FORWARD_RATIO)) + 2 * max(0.0, log(FEWEST_LAYERS / sizes.layers))


def _is_power_of_four(number: int) -> bool:
    return number > 0 and 4 ** round(log(number, 4)) == number


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
    _fill(large, model, Filler(sizes.hidden_factor, dtype, device, seed))
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
    wrapped = any(part is not weight for weight in model.parameters() for part in inner_tensors(weight))
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


class Filler:
    """Makes the weights of the larger model, one by one."""

    def __init__(self, factor: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shrink = 1 / isqrt(factor)  # exact: the factor is a power of four
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def grown(
        self, part: Part, shape: Sequence[int], small: torch.Tensor | None, shrunk: bool = False
    ) -> torch.nn.Parameter:
        """A weight of this shape with the small model's, if it has one, in its first rows and columns."""
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


def _fill(large: PreTrainedModel, small: PreTrainedModel, filler: Filler) -> None:
    """Replace every weight of the skeleton; heads are appended in whole groups, so old ones keep their partners."""
    own = dict(small.named_parameters())
    normed = {name.rsplit(".", 2)[0] for name in own if name.endswith(".q_norm.weight")}
    for name, weight in list(large.named_parameters()):
        attention, projection = name.rsplit(".", 2)[:2]
        shrunk = attention in normed and projection in ("q_proj", "k_proj")
        _put(large, name, filler.grown(part_of(name), weight.shape, own.get(name), shrunk))


def _put(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer by its full name."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
