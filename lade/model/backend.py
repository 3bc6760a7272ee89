"""The interface of backends, and the runner of a generation: one of a backend, or the eager one."""

from __future__ import annotations

from transformers import GenerationConfig, PretrainedConfig

from lade.model import joint
from lade.model.facts import ModelFacts
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner, input_device


class Backend:
    """What any backend may do for the core; by default nothing. Each adds what the core asks of it alone."""

    def refusal(self, facts: ModelFacts, config: PretrainedConfig) -> str:
        """Return why this backend keeps a model from being served exactly; empty where it does not.

        Args:
            facts: what the call knows of the model.
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
        """Return the runner that this backend has for a model; None where it leaves the passes to others.

        Args:
            facts: what the call knows of the model.
            plan: how the model takes its masks.
            generation_config: see `EagerRunner`.
            own_cache: False where the user's cache is decoded on.
            captures: False where the caller needs every pass to be launched by itself.
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
    """Return the runner that makes a model's passes: several processes' first, captured passes next, else eager ones.

    Args:
        facts: what the call knows of the model, a decoder without an encoder that `lade.supports`.
        plan: how the model takes its masks.
        generation_config: see `EagerRunner`.
        own_cache: False where the user's cache is decoded on, which has no fixed addresses.
        captures: False where each pass has to be launched by itself.

    Raises:
        UnsupportedArgumentError: the processes that decode the model cannot serve these passes.
    """
    concerned = [joint.loaded("processes")]
    if captures and input_device(facts.model).type == "cuda":
        concerned.append(joint.load("cuda_graphs"))
    for backend in filter(None, concerned):
        runner: EagerRunner | None = backend.runner(
            facts, plan, generation_config, own_cache=own_cache, captures=captures
        )
        if runner is not None:
            return runner
    return EagerRunner(facts.model, plan, generation_config, facts)
