"""The interface of backends, and the choice among them: a generation's runner, and the processes that decode it."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from lade.model import joint
from lade.model.facts import ModelFacts, tensor_parallel_size
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner, input_device


class Backend:
    """Operations that the core asks of any backend; the defaults do nothing. Subclasses add specific ones."""

    def refusal(self, facts: ModelFacts, config: PretrainedConfig) -> str:
        """Return the reason why this backend cannot serve a model exactly; empty if it can.

        Args:
            facts: facts about the model.
            config: configuration of its decoder.
        """
        return ""

    def runner(
        self,
        facts: ModelFacts,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        *,
        own_cache: bool,
        captures: bool,
    ) -> EagerRunner | None:
        """Return this backend's runner for a model; None if it has none for it.

        Args:
            facts: facts about the model.
            plan: the model's mask format.
            generation_config: the final generation config, see `EagerRunner`.
            own_cache: false if decoding continues a user's cache.
            captures: false if the caller needs every pass launched eagerly.
        """
        return None


def runner_for(
    facts: ModelFacts,
    plan: MaskPlan,
    generation_config: GenerationConfig,
    *,
    own_cache: bool = True,
    captures: bool = True,
) -> EagerRunner:
    """Return the runner for a model: that of several processes if there are any, else captured passes, else eager ones.

    Args:
        facts: facts about the model, a decoder without an encoder that `lade.supports`.
        plan: the model's mask format.
        generation_config: the final generation config, see `EagerRunner`.
        own_cache: false if decoding continues a user's cache, which has no fixed addresses.
        captures: false if every pass has to be launched eagerly.

    Raises:
        UnsupportedArgumentError: the processes that decode the model cannot serve these passes.
    """
    candidates = [joint.loaded("processes")]
    if captures and input_device(facts.model).type == "cuda":
        candidates.append(joint.load("cuda_graphs"))
    for backend in filter(None, candidates):
        runner: EagerRunner | None = backend.runner(
            facts, plan, generation_config, own_cache=own_cache, captures=captures
        )
        if runner is not None:
            return runner
    return EagerRunner(facts.model, plan, generation_config, facts)


def processes_of(model: Any) -> Any | None:
    """Return the backend if several processes may decode a model; None if this process certainly decodes it alone."""
    if not isinstance(model, PreTrainedModel):
        return None
    return joint.load("processes") if tensor_parallel_size(model) > 1 else joint.loaded("processes")
