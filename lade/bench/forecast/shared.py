"""What a forward pass would cost on several devices that decode one text together.

Tensor parallelism divides the pass, and adds two exchanges a layer, one message that announces it, and nothing else:

    t_TP(S) = t(S) / P + 2 L (latency + 2 (P - 1) / P x S x hidden x 2 bytes / bandwidth) + message

Lookahead parallelism has each device feed a part of the tree, and the logits of the parts brought together:

    t_LP(S) = t(largest part of S) + latency + (P - 1) x part x vocabulary x 2 bytes / bandwidth + message
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lade.bench.forecast.roofline import Roofline

VOCABULARY, LOGIT_BYTES, STATE_BYTES = 128_000, 2, 2
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
    2: ((13.9, 9.0), (29.4, 17.2), (59.7, 33.8), (106.6, 57.5)),
    4: ((13.9, 6.9), (29.4, 11.8), (59.7, 21.2), (106.6, 33.7)),
    8: ((13.9, 6.5), (29.4, 9.7), (59.7, 15.4), (106.6, 22.3)),
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
        sent = (self.devices - 1) * part * VOCABULARY * LOGIT_BYTES
        return roofline.seconds(part) + link.latency_s + sent / link.bandwidth + MESSAGE_S

    def largest_part(self, size: float) -> float:
        """Of a tree of `size` nodes; straight between sizes measured, and a fair share more beyond the last."""
        import numpy as np  # late: the help reads this file, and comes without it

        known = ((1.0, 1.0), *PARTS[self.devices])
        between = np.interp(size, [fed for fed, _ in known], [part for _, part in known])
        return float(between) + max(0.0, size - known[-1][0]) / self.devices
