"""How many layers, and how wide, for a wanted number of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, log, prod

from transformers import PreTrainedModel

from lade.bench.inflation.llama_weights import part_of
from lade.errors import ConfigError

TOLERANCE = 0.03
"""Share of the wanted parameters by which the total may miss them."""

FEED_FORWARD_RATIO = 3.3
FEWEST_LAYERS, MOST_LAYERS = 12, 32
"""What published models of 0.1 to 8 billion parameters look like: feed-forward width over hidden size, layers."""

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

    Args:
        model: the small model.
        wanted: what is given; the rest is chosen.

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
    """How far from usual proportions: 0 for the most usual."""
    ratio = sizes.intermediate_size / (hidden * sizes.hidden_factor)
    return abs(log(ratio / FEED_FORWARD_RATIO)) + 2 * max(0.0, log(FEWEST_LAYERS / sizes.layers))


def _is_power_of_four(number: int) -> bool:
    return number > 0 and 4 ** round(log(number, 4)) == number
