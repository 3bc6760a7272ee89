"""The public object of the MTP layers' backend."""

from __future__ import annotations

from lade.backends.mtp.load import examine, layer_of
from lade.backends.mtp.runner import MtpRunner
from lade.decoding.mtp import MtpHabits
from lade.model.runner import MTP_LAYERS, EagerRunner
from lade.model.supports import MTP_FILES


class MtpBackend:
    """Multi-token prediction layers of checkpoints; see `lade.model.registry`."""

    examine = staticmethod(examine)

    def layer_for(self, runner: EagerRunner, kind: str) -> tuple[MtpRunner, MtpHabits] | str:
        """Return the layer of a runner's model and what texts of a kind have taught about it; or why there is none."""
        loaded = layer_of(runner.model)
        if isinstance(loaded, str):
            return loaded
        return MtpRunner(runner, loaded), loaded.habits.setdefault(kind, MtpHabits())


BACKEND = MtpBackend()
MTP_FILES.fill(BACKEND)
MTP_LAYERS.fill(BACKEND)
