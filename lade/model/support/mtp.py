"""Whether a model's checkpoint has MTP layers; their backend is imported only where it may have some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lade.model import joint
from lade.model.facts import ModelFacts

COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields of a configuration that tell how many MTP layers a checkpoint has."""


def why_not_looked_for(facts: ModelFacts) -> str:
    """Return why a model's files are not searched for MTP layers; empty if they are. Nothing is imported or read."""
    model: Any = facts.model
    if model.config.is_encoder_decoder:
        return "MTP layers are run for decoders alone, and the model has an encoder"
    if getattr(model, "_tp_size", None) or getattr(model, "_pp_stage", None) is not None:
        return "the model is split over processes"
    if len({weight.device for weight in facts.weights}) > 1:
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


def mtp_support(facts: ModelFacts) -> MtpSupport:
    """Return whether a model's checkpoint has MTP layers that can be used, and what they take. Nothing is loaded.

    Args:
        facts: those of a transformers model that `lade.supports`.
    """
    if reason := why_not_looked_for(facts):
        return MtpSupport(reason)
    support: MtpSupport = joint.load("mtp").examine(facts.model, MtpSupport)
    return support


NOT_LOOKED_FOR = MtpSupport("they are not looked for where a model cannot be served")
