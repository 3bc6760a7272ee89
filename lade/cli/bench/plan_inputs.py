"""The model and the hardware of `lade bench plan`, as the command line has them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from lade.bench.forecast.roofline import BANDWIDTH_SHARE, BYTES, DEVICES, FLOPS_SHARE, Roofline, cache_bytes_of
from lade.bench.forecast.shared import INTERCONNECTS, PARTS, Sharing
from lade.cli.options.grouping import in_panel
from lade.errors import ConfigError

_MOST = 10**12
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
_UNITS = {"params": "", "bandwidth": "b/s", "flops": "flops|flop/s|flops/s"}
_SUCH_AS = {"params": "7e9, 7B or 500M", "bandwidth": "3.35e12 or 900GB/s", "flops": "990e12 or 990T"}
_QUANTITY = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*([kmgbtp]?)(?:{unit})?"


_model, _hardware = in_panel("Model"), in_panel("Hardware")


@dataclass(frozen=True)
class HardwareSpec:
    """The model and the hardware to estimate, as the command line has them.

    Attributes:
        params, dtype: of the model.
        bandwidth, flops: of the hardware; None: of the device.
        device: name of a known one.
        layers, kv_heads, head_dim, cached: what a cache of keys and values needs; `cached` 0: there is none.
        devices, interconnect: how many decode together, and what is between them.
        overhead: seconds of each pass.
        bandwidth_share, flops_share: of the peaks, what passes reach.
    """

    params: Annotated[str, _model(metavar="P", help="Parameters, such as 7e9 or 7B.")]
    dtype: Annotated[str, _model(metavar="NAME", help="Of the weights: bf16, fp16, fp32, fp8, int8, int4.")] = "bf16"
    bandwidth: Annotated[
        str | None, _hardware(metavar="B", help="Peak bytes per second, such as 3.35e12 or 3.35TB/s.")
    ] = None
    flops: Annotated[
        str | None, _hardware(metavar="F", help="Peak operations per second, dense, in this dtype: 990e12 or 990T.")
    ] = None
    device: Annotated[
        str | None,
        _hardware(metavar="NAME", help="Peaks from a datasheet: a100-80gb, h100-pcie, h100-sxm, h200, l4, l40s."),
    ] = None
    layers: Annotated[int | None, _model(metavar="L", help="With --cached: layers of the model.")] = None
    kv_heads: Annotated[int | None, _model(metavar="H", help="With --cached: heads with keys and values.")] = None
    head_dim: Annotated[int | None, _model(metavar="D", help="With --cached: size of a head.")] = None
    cached: Annotated[int, _model(metavar="P", help="Tokens in the cache, which every pass reads.")] = 0
    devices: Annotated[int, _hardware(metavar="P", help="2, 4 or 8 that decode one text together; needs --layers.")] = 1
    interconnect: Annotated[str, _hardware(metavar="NAME", help="Between them: nvlink or pcie.")] = "nvlink"
    overhead: Annotated[
        float, _hardware(metavar="S", help="Seconds of a pass that overlap with nothing: launches, ...")
    ] = 0.0
    bandwidth_share: Annotated[
        float, _hardware(metavar="X", show_default=False, help="Of the peak, what passes reach. Default 0.8.")
    ] = BANDWIDTH_SHARE
    flops_share: Annotated[
        float, _hardware(metavar="X", show_default=False, help="Of the peak, what passes reach. Default 0.6.")
    ] = FLOPS_SHARE

    def roofline(self) -> Roofline:
        """The cost of its steps.

        Raises:
            ConfigError: a value is out of range or missing.
        """
        params, (bandwidth, flops) = quantity("params", self.params), self._peaks()
        cache_bytes, shares = self._cache_bytes(), (self.bandwidth_share, self.flops_share)
        try:
            return Roofline(params, self.dtype, bandwidth, flops, cache_bytes, self.overhead, *shares)
        except ConfigError as problem:  # its fields are spelt otherwise than the options
            name = problem.field.removesuffix("_s").replace("_", "-")
            raise ConfigError(name, problem.value, problem.remedy) from problem

    def sharing(self) -> Sharing | None:
        """The devices that decode together; None for a single one.

        Raises:
            ConfigError: a value is not known, or missing.
        """
        if self.devices == 1:
            return None
        if self.devices not in PARTS:
            raise ConfigError("devices", self.devices, f"give 1, or one of {', '.join(map(str, PARTS))}")
        if self.interconnect not in INTERCONNECTS:
            raise ConfigError("interconnect", self.interconnect, f"give one of {', '.join(INTERCONNECTS)}")
        if self.layers is None:
            raise ConfigError("devices", self.devices, "give --layers too: they say how often devices exchange results")
        return Sharing(self.devices, INTERCONNECTS[self.interconnect], self.layers)

    def _peaks(self) -> tuple[float, float]:
        """Bandwidth and operations per second: as given, or of the device."""
        if self.device is not None and self.device not in DEVICES:
            raise ConfigError("device", self.device, f"give one of {', '.join(DEVICES)}, or --bandwidth and --flops")
        known = DEVICES[self.device] if self.device is not None else None
        bandwidth = quantity("bandwidth", self.bandwidth) if self.bandwidth is not None else None
        flops = quantity("flops", self.flops) if self.flops is not None else None
        if known is not None and flops is None and BYTES.get(self.dtype, 2.0) != 2.0:
            remedy = f"the figure known for {self.device} is for 16 bits: give that for {self.dtype}"
            raise ConfigError("flops", None, remedy)
        for name, value in (("bandwidth", bandwidth), ("flops", flops)):
            if value is None and known is None:
                raise ConfigError(name, None, f"give a number such as {_SUCH_AS[name]}, or a device with --device")
        assert known is not None or (bandwidth is not None and flops is not None)
        return bandwidth or known.bandwidth, flops or known.flops  # type: ignore[union-attr]

    def _cache_bytes(self) -> float:
        sizes = {"layers": self.layers, "kv-heads": self.kv_heads, "head-dim": self.head_dim}
        for name, value in {**sizes, "cached": self.cached or None}.items():
            if value is not None and not 1 <= value <= _MOST:
                raise ConfigError(name, value, f"give a whole number >= 1 and <= {_MOST}")
        missing = [name for name, value in sizes.items() if value is None]
        if self.cached and missing:
            needed = " ".join(f"--{name}" for name in missing)
            raise ConfigError("cached", self.cached, f"give {needed} too: they say how large its keys and values are")
        unused = sizes.keys() - missing - ({"layers"} if self.devices > 1 else set())
        if not self.cached and unused:
            raise ConfigError("cached", self.cached, f"without cached tokens nothing uses --{min(unused)}")
        if not self.cached or self.dtype not in BYTES:  # a dtype unknown is refused with all the rest
            return 0.0
        assert self.layers is not None and self.kv_heads is not None and self.head_dim is not None
        return cache_bytes_of(self.dtype, self.cached, self.layers, self.kv_heads, self.head_dim)


def quantity(name: str, text: str) -> float:
    """A number as people write it: 7e9, 7B, 500M, 3.35TB/s, 990 TFLOPS.

    Args:
        name: params, bandwidth or flops; it decides which unit may follow.
        text: as given.

    Raises:
        ConfigError: it is no number > 0.
    """
    found = re.fullmatch(_QUANTITY.format(unit=_UNITS[name]), text.strip().lower(), re.ASCII)
    value = float(found[1]) * _PREFIXES[found[2]] if found else math.nan
    if not 0.0 < value < math.inf:
        raise ConfigError(name, text, f"give a number > 0, such as {_SUCH_AS[name]}")
    return value
