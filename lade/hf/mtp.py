"""The one place where MTP layers are looked for; their backend is imported only where a model may have some.

They are run where one process makes eager passes of a decoder that lies on one device, for texts alone. Beams, batches
in lock-step, prompts with images, encoder-decoders, split models and captured passes draft from the memory alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lade.config import LookaheadConfig
from lade.decoding.mtp import FIXED_PASSES, MtpHabits, MtpPasses
from lade.errors import UnsupportedArgumentError
from lade.model.facts import ModelFacts
from lade.model.runner import EagerRunner

COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields of a configuration that tell how many MTP layers a checkpoint has."""
_BACKEND = "lade.backends.mtp"


def refuse_mtp(configs: Sequence[LookaheadConfig], reason: str) -> None:
    """Raise `UnsupportedArgumentError` where a config insists on MTP layers."""
    if any(config.mtp for config in configs):
        raise UnsupportedArgumentError(f"mtp=True cannot be used: {reason}", "leave it out: the memory drafts alone")


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
    loaded: Any = why_not_run(runner) or why_not_looked_for(runner.model)
    if not loaded:
        loaded = importlib.import_module(f"{_BACKEND}.load").layer_of(runner.model)
    if isinstance(loaded, str):
        refuse_mtp(wanting, loaded)
        return None
    make = importlib.import_module(f"{_BACKEND}.runner").MtpRunner
    layer = make(runner.model, loaded, runner.facts.cache_name or "past_key_values")
    fixed = FIXED_PASSES if all(config.budget is not None for config in wanting) else None
    return MtpPasses(layer, loaded.habits.setdefault(kind, MtpHabits()), runner.clock, fixed)


def why_not_run(runner: EagerRunner) -> str:
    """Return why a runner's passes cannot feed MTP layers; empty if they can."""
    if type(runner) is not EagerRunner:
        return f"passes of a {type(runner).__name__} do not show the states that MTP layers are fed with"
    return ""


def why_not_looked_for(model: Any) -> str:
    """Return why a model's files are not searched for MTP layers; empty if they are. Nothing is imported or read."""
    if model.config.is_encoder_decoder:
        return "MTP layers are run for decoders alone, and the model has an encoder"
    if getattr(model, "_tp_size", None) or getattr(model, "_pp_stage", None) is not None:
        return "the model is split over processes"
    if len({weight.device for weight in ModelFacts.of(model).weights}) > 1:
        return "the model's weights lie on several devices"
    config = model.config.get_text_config(decoder=True)
    counts = [count for name in COUNTS if isinstance(count := getattr(config, name, None), int)]
    dropped = model._keys_to_ignore_on_load_unexpected or ()
    if 0 in counts or not (counts or any("mtp" in pattern for pattern in dropped)):
        return f"{type(model).__name__} is configured without MTP layers"
    return ""


@dataclass(frozen=True)
class MtpSupport:
    """MTP layers of a model's checkpoint: truthy where they can be used.

    Attributes:
        reason: why they cannot be; empty where they can.
        layers: how many the checkpoint has; the first one drafts.
        nbytes: memory that it takes, or would take, in bytes.
        loaded: whether it is in memory.
    """

    reason: str = ""
    layers: int = 0
    nbytes: int = 0
    loaded: bool = False

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        what = f"{self.layers} in its checkpoint, the first takes {self.nbytes / 2**20:,.1f} MiB"
        return f"no MTP layers: {self.reason}" if self.reason else f"MTP layers: {what}"


def mtp_support(model: Any) -> MtpSupport:
    """Return whether a model's checkpoint has MTP layers that can be used, and what they take. Nothing is loaded.

    Args:
        model: a transformers model that `lade.supports`.
    """
    if reason := why_not_looked_for(model):
        return MtpSupport(reason)
    support: MtpSupport = importlib.import_module(f"{_BACKEND}.load").examine(model, MtpSupport)
    return support
