"""The recurrent backend."""

from __future__ import annotations

from lade.backends.recurrent.cores import CorePatches
from lade.backends.recurrent.refeeding import RefedCache, RefeedingRunner
from lade.model.backend import Backend
from lade.model.cache_layers import Recurrence
from lade.model.facts import ModelFacts
from lade.model.runner import EagerRunner


class RecurrentBackend(Backend):
    """Token trees through recurrent layers, see `lade.model.joint`."""

    def of(self, facts: ModelFacts) -> Recurrence:
        """Return the patches with which a model's recurrent layers process token trees."""
        return CorePatches(facts)

    def refeeding(self, runner: EagerRunner) -> tuple[RefeedingRunner, RefedCache]:
        """Return a runner for trees kept over several passes, and its empty cache."""
        return RefeedingRunner(runner), RefedCache()


BACKEND = RecurrentBackend()
