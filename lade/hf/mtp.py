"""The one place where MTP layers are looked for; their backend is imported only where a model may have some.

They are run where one process makes eager passes of a decoder that lies on one device, for texts alone. Beams, batches
in lock-step, prompts with images, encoder-decoders, split models and captured passes draft from the memory alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from lade.config import LookaheadConfig
from lade.decoding.mtp import FIXED_PASSES, MtpHabits, MtpPasses
from lade.errors import ConfigError, UnsupportedArgumentError
from lade.model import joint
from lade.model.runner import EagerRunner
from lade.model.support.mtp import why_not_looked_for


def refuse_mtp(configs: Sequence[LookaheadConfig], reason: str) -> None:
    """Raise `UnsupportedArgumentError` where a config insists on MTP layers."""
    if any(config.mtp for config in configs):
        raise UnsupportedArgumentError(f"mtp=True cannot be used: {reason}", "leave it out: the memory drafts alone")


def with_use_mtp(generation_config: GenerationConfig, config: LookaheadConfig) -> LookaheadConfig:
    """Return the config that transformers' `use_mtp=True` means: the same, but with `mtp=True`.

    Args:
        generation_config: the prepared one, a copy of this call's own; its `use_mtp` is taken out, since transformers
            would decode by its own loop, which for a sample draws otherwise than plain decoding.
        config: the method and its sizes.

    Raises:
        ConfigError: the config leaves MTP layers out.
    """
    if not getattr(generation_config, "use_mtp", None):
        return config
    if config.mtp is False:
        raise ConfigError("mtp", False, "use_mtp=True asks for the model's MTP layers: leave out one of the two")
    generation_config.use_mtp = None
    return replace(config, mtp=True)


def mtp_passes(runner: EagerRunner, configs: Sequence[LookaheadConfig], kind: str) -> MtpPasses | None:
    """Return what makes the passes of a model's MTP layer for the rows of one batch; None where there are none.

    Args:
        runner: makes the model's passes.
        configs: those of the rows, one each.
        kind: kind of text; what is learned of one kind is not used for another.

    Raises:
        UnsupportedArgumentError: a config insists on MTP layers, and there are none that can be used.
    """
    wanting = [config for config in configs if config.mtp is not False and config.adaptive]
    if not wanting:
        return None
    loaded: Any = why_not_run(runner) or why_not_looked_for(runner.facts)
    if not loaded:
        loaded = joint.load("mtp").layer_of(runner.model)
    if isinstance(loaded, str):
        refuse_mtp(wanting, loaded)
        return None
    layer = joint.load("mtp").runner_of(runner.model, loaded, runner.facts.cache_name or "past_key_values")
    fixed = FIXED_PASSES if all(config.budget is not None for config in wanting) else None
    return MtpPasses(layer, loaded.habits.setdefault(kind, MtpHabits()), runner.clock, fixed)


def why_not_run(runner: EagerRunner) -> str:
    """Return why a runner's passes cannot feed MTP layers; empty if they can."""
    if type(runner) is not EagerRunner:
        return f"passes of a {type(runner).__name__} do not show the states that MTP layers are fed with"
    return ""
