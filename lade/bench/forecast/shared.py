"""What a forward pass would cost on several devices that decode one text together.

Tensor parallelism divides the pass, and adds two exchanges a layer, one message that announces it, and nothing else:

    t_TP(S) = t(S) / P + 2 L (latency + 2 (P - 1) / P x S x hidden x 2 bytes / bandwidth) + message

Lookahead parallelism has each device feed a part of the tree, and what was read of the parts brought together; this is
greedy decoding, for which 28 bytes a node do:

    t_LP(S) = t(largest part of S) + latency + (P - 1) x part x 28 bytes / bandwidth + message
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lade.bench.forecast.roofline import Roofline

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
        """Of a pass that feeds `size` tokens, the layers being split."""
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
        """Of a tree of `size` nodes; straight between sizes measured, and a fair share more beyond the last."""
        import numpy as np  # late: the help reads this file, and comes without it

        known = ((1.0, 1.0), *PARTS[self.devices])
        between = np.interp(size, [fed for fed, _ in known], [part for _, part in known])
        return float(between) + max(0.0, size - known[-1][0]) / self.devices
