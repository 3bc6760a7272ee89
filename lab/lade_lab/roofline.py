"""Roofline cost of a forward pass, on one device or several.

    t(S)  |                    /       a pass reads all weights and the cache once, whatever it feeds (flat),
          |                  /         and multiplies by every weight for each token it feeds (rising):
          |________________/           the slower of the two decides, as long as both overlap
          |                ^ ridge
          +------------------- S, tokens fed

What is left out makes real passes slower: attention's own arithmetic, activations, kernels that do not overlap.

Tensor parallelism divides the pass, and adds two exchanges a layer, one message that announces it, and nothing else:

    t_TP(S) = t(S) / P + 2 L (latency + 2 (P - 1) / P x S x hidden x 2 bytes / bandwidth) + message

Lookahead parallelism has each device feed a part of the tree, and what was read of the parts brought together; this is
greedy decoding, for which 28 bytes a node do:

    t_LP(S) = t(largest part of S) + latency + (P - 1) x part x 28 bytes / bandwidth + message
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lade.errors import ConfigError

FREE = 1.2
"""A pass of several tokens is called free if it takes at most this many times as long as a pass of one."""

_MOST = 1e30  # so that no product of two quantities leaves the numbers

BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.6
"""Assumed share of the datasheet's peaks that passes reach; not measured."""

BYTES = {
    "float64": 8.0, "fp64": 8.0, "float32": 4.0, "fp32": 4.0, "bfloat16": 2.0, "bf16": 2.0, "float16": 2.0,
    "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5,
}  # fmt: skip
"""Bytes per weight, by dtype, without the scales of quantised weights."""

_CACHE_BYTES_AT_LEAST = 2.0  # models with quantized weights keep keys and values in 16 bits


@dataclass(frozen=True)
class Device:
    """A vendor's peaks.

    Attributes:
        bandwidth: bytes per second, of the memory that holds the weights.
        flops: floating point operations per second with 16-bit numbers, dense.
        source: where they are from.
    """

    bandwidth: float
    flops: float
    source: str


_SPARSE = "dense is half of the figure with sparsity"
DEVICES = {
    "a100-80gb": Device(2.039e12, 312e12, "NVIDIA A100 datasheet, SXM 80 GB"),
    "h100-pcie": Device(2.0e12, 756e12, f"NVIDIA H100 datasheet, PCIe 80 GB; {_SPARSE}"),
    "h100-sxm": Device(3.35e12, 989e12, f"NVIDIA H100 datasheet, SXM 80 GB; {_SPARSE}"),
    "h200": Device(4.8e12, 989e12, f"NVIDIA H200 datasheet, SXM; {_SPARSE}"),
    "l4": Device(300e9, 121e12, f"NVIDIA L4 datasheet; {_SPARSE}"),
    "l40s": Device(864e9, 362e12, "NVIDIA L40S datasheet"),
}


@dataclass(frozen=True)
class Roofline:
    """The cost of a forward pass by the number of tokens it feeds.

    Args:
        params: parameters that a pass reads and multiplies by; of a mixture of experts this depends on the tokens.
        dtype: of the weights, one of `BYTES`.
        bandwidth: peak, bytes per second.
        flops: peak, operations per second, for numbers of this dtype, without sparsity.
        cache_bytes: keys and values of the tokens cached, which every pass reads; see `cache_bytes_of`.
        overhead_s: seconds of each pass that overlap with nothing, such as launching kernels.
        bandwidth_share, flops_share: of the peaks, what passes reach.

    Raises:
        ConfigError: one of them is out of range.

    >>> roofline = Roofline(7e9, "bfloat16", bandwidth=3.35e12, flops=990e12)
    >>> round(roofline.ridge)
    222
    """

    params: float
    dtype: str
    bandwidth: float
    flops: float
    cache_bytes: float = 0.0
    overhead_s: float = 0.0
    bandwidth_share: float = BANDWIDTH_SHARE
    flops_share: float = FLOPS_SHARE

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ConfigError("dtype", self.dtype, f"give one of {', '.join(BYTES)}")
        for name in ("params", "bandwidth", "flops"):
            value = getattr(self, name)
            _require(name, value, 1.0 <= value <= _MOST, f"give a number > 0, from 1 to {_MOST:g}")
        for name in ("cache_bytes", "overhead_s"):
            value = getattr(self, name)
            _require(name, value, 0.0 <= value <= _MOST, f"give a number >= 0, up to {_MOST:g}")
        for name in ("bandwidth_share", "flops_share"):
            _require(name, getattr(self, name), 0.0 < getattr(self, name) <= 1.0, "give a number > 0 and <= 1")

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.params * BYTES[self.dtype]

    @property
    def memory_s(self) -> float:
        """Seconds that a pass reads for, however many tokens it feeds."""
        return (self.weight_bytes + self.cache_bytes) / (self.bandwidth * self.bandwidth_share)

    @property
    def token_s(self) -> float:
        """Seconds that a pass computes for each token it feeds: a multiplication and an addition for each weight."""
        return 2.0 * self.params / (self.flops * self.flops_share)

    @property
    def ridge(self) -> float:
        """Tokens fed at which a pass computes for as long as it reads; below 1 it always computes for longer."""
        return self.memory_s / self.token_s

    def seconds(self, size: float) -> float:
        """t(S), of a pass that feeds `size` tokens."""
        return max(self.memory_s, self.token_s * size) + self.overhead_s

    def relative(self, size: float) -> float:
        """t(S) / t(1)."""
        return self.seconds(size) / self.seconds(1)

    @property
    def free(self) -> int:
        """The largest size whose pass takes at most `FREE` times as long as that of one token."""
        return max(1, math.floor((FREE * self.seconds(1) - self.overhead_s) / self.token_s + 1e-9))


def cache_bytes_of(dtype: str, cached: int, layers: int, kv_heads: int, head_dim: int) -> float:
    """Bytes of keys and values: in the dtype of the weights, or in 16 bits where that has fewer.

    Args:
        dtype: one of `BYTES`.
        cached: tokens.
        layers: of the model.
        kv_heads: heads that have keys and values of their own.
        head_dim: size of a head.
    """
    return 2.0 * cached * layers * kv_heads * head_dim * max(BYTES[dtype], _CACHE_BYTES_AT_LEAST)


def _require(name: str, value: object, fits: bool, remedy: str) -> None:
    if not fits:
        raise ConfigError(name, value, remedy)


STATE_BYTES, READOUT_BYTES = 2, 28
MESSAGE_S = 1e-4
"""Assumed of the message that announces a pass, between processes of one host."""


@dataclass(frozen=True)
class Interconnect:
    """A link between devices, as exchanges reach it; assumed, not measured.

    Attributes:
        bandwidth: bytes per second.
        latency_s: of one exchange.
    """

    bandwidth: float
    latency_s: float


INTERCONNECTS = {"nvlink": Interconnect(200e9, 12e-6), "pcie": Interconnect(20e9, 35e-6)}

PARTS = {
    2: ((15.6, 9.5), (31.3, 17.9), (62.6, 33.9), (124.2, 65.5), (246.6, 126.2), (491.3, 251.7)),
    4: ((15.6, 6.8), (31.3, 11.3), (62.6, 19.9), (124.2, 36.7), (246.6, 66.6), (491.3, 132.3)),
    8: ((15.6, 5.9), (31.3, 8.7), (62.6, 13.5), (124.2, 22.6), (246.6, 37.3), (491.3, 73.2)),
}
"""By the number of devices: mean tokens fed, and mean size of the largest part, as docs/several-devices.md has them."""


@dataclass(frozen=True)
class Sharing:
    """Several devices.

    Attributes:
        devices: P, one of `PARTS`.
        interconnect: between them.
        layers: L, of the model.
    """

    devices: int
    interconnect: Interconnect
    layers: int

    def tensor_parallel_s(self, roofline: Roofline, size: float) -> float:
        """Seconds of a pass that feeds `size` tokens with the layers split."""
        count, link = self.devices, self.interconnect
        hidden = math.sqrt(roofline.params / (12 * self.layers))
        sent = 2 * (count - 1) / count * size * hidden * STATE_BYTES
        exchanges = 2 * self.layers * (link.latency_s + sent / link.bandwidth)
        return (roofline.seconds(size) - roofline.overhead_s) / count + roofline.overhead_s + exchanges + MESSAGE_S

    def lookahead_parallel_s(self, roofline: Roofline, size: float) -> float:
        """The same, the tree being cut."""
        part, link = self.largest_part(size), self.interconnect
        sent = (self.devices - 1) * part * READOUT_BYTES
        return roofline.seconds(part) + link.latency_s + sent / link.bandwidth + MESSAGE_S

    def largest_part(self, size: float) -> float:
        """Largest part of a tree of `size` nodes; linear between measured sizes, an equal share beyond the last."""
        import numpy as np  # late: the help reads this file, and comes without it

        known = ((1.0, 1.0), *PARTS[self.devices])
        between = np.interp(size, [fed for fed, _ in known], [part for _, part in known])
        return float(between) + max(0.0, size - known[-1][0]) / self.devices
