"""The public object of the MTP layers' backend."""

from __future__ import annotations

from lade.backends.mtp.load import examine, layer_of, save_layer
from lade.backends.mtp.runner import MtpRunner
from lade.model.runner import Backend


class MtpBackend(Backend):
    """Multi-token prediction layers of checkpoints; see `lade.model.joint`."""

    layer_of = staticmethod(layer_of)
    examine = staticmethod(examine)
    save_layer = staticmethod(save_layer)
    runner_of = MtpRunner


BACKEND = MtpBackend()
