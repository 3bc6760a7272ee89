"""The one place where MTP layers are looked for; what loads them is imported only where a model may have some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lade.config import LookaheadConfig
from lade.decoding.mtp import FIXED_PASSES, MtpHabits, MtpPasses
from lade.errors import UnsupportedArgumentError
from lade.model.runner import EagerRunner
from lade.model.tensor_parallel import tensor_parallel_size

if TYPE_CHECKING:
    from lade.backends.mtp.load import Loaded

REMEDY = "leave out mtp=True, and the memory drafts alone"


def mtp_passes(runner: EagerRunner, configs: Sequence[LookaheadConfig], kind: str) -> MtpPasses | None:
    """What makes the passes of a model's MTP layer for the rows of one batch; None where none are made.

    Args:
        runner: makes the model's passes.
        configs: of the rows.
        kind: of text; what is learned of one kind is not used for another.

    Raises:
        UnsupportedArgumentError: a config insists on MTP layers, and there are none that can be used.
    """
    wanting = [config for config in configs if config.mtp is not False and config.adaptive]
    if not wanting:
        return None
    found = layer_of(runner)
    if isinstance(found, str):
        if any(config.mtp for config in wanting):
            raise UnsupportedArgumentError(f"mtp=True cannot be used: {found}", REMEDY)
        return None
    from lade.backends.mtp.runner import MtpRunner

    layer = MtpRunner(runner.model, found, runner.facts.cache_name or "past_key_values")
    fixed = FIXED_PASSES if all(config.budget is not None for config in wanting) else None
    return MtpPasses(layer, found.habits.setdefault(kind, MtpHabits()), runner.clock, fixed)


def layer_of(runner: EagerRunner) -> Loaded | str:
    """The MTP layer of a runner's model, or why there is none that can be used."""
    if type(runner) is not EagerRunner:
        return f"passes of {type(runner).__name__} do not show the states that MTP layers are fed with"
    return loaded_layer(runner.model)


def loaded_layer(model: Any) -> Loaded | str:
    """The MTP layer of a model, loaded now if it never was, or why there is none that can be used."""
    if reason := why_none(model):
        return reason
    from lade.backends.mtp.find import NoLayersError
    from lade.backends.mtp.load import loaded

    try:
        return loaded(model)
    except NoLayersError as problem:
        return f"{type(model).__name__} {problem}"


def why_none(model: Any) -> str:
    """Why a model's MTP layers are not even looked for; empty if they are."""
    if model.config.is_encoder_decoder:
        return "MTP layers are run for decoders alone, and it has an encoder"
    if tensor_parallel_size(model) > 1:
        return "its head is split over processes (tensor parallelism)"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "its weights lie on several devices"
    if not speaks_of_layers(model):
        return f"{type(model).__name__} is configured without MTP layers"
    return ""


def speaks_of_layers(model: Any) -> bool:
    """Whether a configuration or a class speaks of MTP layers at all, before anything is imported or read."""
    config = model.config.get_text_config(decoder=True)
    counts = [getattr(config, name, None) for name in COUNTS]
    if any(count == 0 for count in counts):
        return False
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return any(isinstance(count, int) for count in counts) or any("mtp" in pattern for pattern in ignored)


COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields of a configuration that tell how many MTP layers there are."""
