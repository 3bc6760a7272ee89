"""Trial passes on models that the tests do not cover, see `lade.model.registry`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PretrainedConfig, PreTrainedModel

from lade.backends.trials.lengths import LONGEST_PROBE_TOKENS, named_lengths
from lade.backends.trials.linear_check import linear_refusal
from lade.backends.trials.tree_check import can_be_padded, depends_on_padding, tolerance, training_refusal, worst_error
from lade.model.config import field
from lade.model.masks import plan_for
from lade.model.supports import TRIALS, Support, has_listed_decoder, takes_masks_by_layer_type


def check(model: PreTrainedModel, config: PretrainedConfig) -> Support:
    """Try the possible mask formats of a model; the first one that is exact is its plan."""
    name, listed = type(model).__name__, has_listed_decoder(model, config)
    lengths = _windows(config) if listed else named_lengths(model)
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    if longest and lengths[longest] > LONGEST_PROBE_TOKENS and not listed:
        what = f"its {longest} of {lengths[longest]} tokens is too long to be checked"
        return Support(name, f"{what}, and this package does not test it")
    reach = max((length for length in lengths.values() if length <= LONGEST_PROBE_TOKENS), default=0)
    findings = []
    for by_layer_type in _mask_formats(config, listed=listed):
        try:
            plan = plan_for(config, by_layer_type=by_layer_type)
            error = worst_error(model, plan, beyond=reach)
        except Exception as problem:  # noqa: BLE001 - any failure of an unknown model is the reason to refuse it
            findings.append(f"{type(problem).__name__}: {problem}".splitlines()[0])
            continue
        if error <= tolerance(model):
            return Support(name, plan=replace(plan, pads=can_be_padded(model, plan)))
        findings.append(f"logits differ by {error:.2g} standard deviations")
    reason = f"a tree pass does not equal plain passes on it ({'; '.join(findings)})"
    return Support(name, reason)


def _windows(config: PretrainedConfig) -> dict[str, int]:
    """Return the window and chunk sizes of a listed architecture."""
    values = {name: field(config, name) for name in ("sliding_window", "attention_chunk_size")}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def _mask_formats(config: PretrainedConfig, *, listed: bool) -> Sequence[bool]:
    """Return the candidates for `by_layer_type`."""
    if listed:
        return (takes_masks_by_layer_type(config),)
    return (True, False) if field(config, "layer_types") else (False,)


class TrialsBackend:
    """Models that the tests do not cover, see `lade.model.registry`."""

    check = staticmethod(check)
    linear_refusal = staticmethod(linear_refusal)
    training_refusal = staticmethod(training_refusal)
    depends_on_padding = staticmethod(depends_on_padding)


BACKEND = TrialsBackend()
TRIALS.fill(BACKEND)
