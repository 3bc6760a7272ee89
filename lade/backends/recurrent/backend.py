"""The recurrent backend's public object; see `lade.model.joint`."""

from __future__ import annotations

from lade.backends.recurrent.cores import CorePatches
from lade.backends.recurrent.refeeding import RefedCache, RefeedingRunner
from lade.model.backend import Backend
from lade.model.cache_layers import Recurrence
from lade.model.facts import ModelFacts
from lade.model.runner import EagerRunner


class RecurrentBackend(Backend):
    """Token trees through recurrent layers."""

    def of(self, facts: ModelFacts) -> Recurrence:
        """Return how the recurrent layers of a model take part in passes over trees."""
        return CorePatches(facts)

    def refeeding(self, runner: EagerRunner) -> tuple[RefeedingRunner, RefedCache]:
        """Return a runner for trees that outlast a pass, and its empty cache."""
        return RefeedingRunner(runner), RefedCache()


BACKEND = RecurrentBackend()
