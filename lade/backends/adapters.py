"""PEFT adapters: which ones look beyond a single token, and the values they get for one generation only.

Most adapters change a layer's weight, or its output token by token. Some look at all tokens of a pass, which differ
between a tree and plain decoding. Others get values from hooks that are installed only while PEFT's `generate` runs.
PEFT is not imported: its layers and hooks are recognised by their modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lade.model.facts import ADAPTERS, ModelFacts
from lade.model.runner import input_device

ACTIVATED = (
    "its adapter is an activated LoRA (alora_invocation_tokens), which counts the tokens of each pass: "
    "use an ordinary LoRA, or choose another adapter with set_adapter"
)
SEVERAL = "PEFT's adapter_names are for a whole batch, whose rows are fed separately here: give one prompt at a time"
UNSUPPORTED_ADAPTERS = {
    "POLY": "its adapter (Poly) takes the task_ids of its rows with each call",
    "SHADOW": "its adapter (Shadow) keeps a cache of its own",
    "XLORA": "its adapter (X-LoRA) runs the model twice at each token",
}
"""Reasons by `peft_type` for adapters that change the passes of the whole model."""
MIXING = frozenset({"lily"})
TOKEN_WISE = frozenset(
    """
    adalora beft boft bone c3a deft delora fourierft frod glora gralora hira hra ia3 ln_tuning loha lokr lora miss oft
    osf peanut psoft pvera randlora road shira supertuning tinylora trainable_tokens unilora vblora vera waveft
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Packages in `peft.tuners`: those whose layers look at all tokens of a pass, and those that the tests compare with
`model.generate`. Layers of any other package are tried."""
CALL_VALUES = frozenset({"adapter_names", "alora_offsets"})
"""Values that PEFT's hooks pass to its layers during one generation."""
ROWS = 16
TOLERANCE, HALF_TOLERANCE = 1e-3, 2e-2


def adapter_refusal(wrapped: Any, facts: ModelFacts) -> str:
    """Return why a model's adapters treat a token in a tree differently from the token alone; empty if they do not."""
    model: PreTrainedModel = facts.model
    config = getattr(wrapped, "active_peft_config", None)
    # While PEFT generates with such an adapter, it replaces the model's input preparation.
    prepares = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(config, "is_prompt_learning", False) or prepares is not model:
        return "its adapter puts learned tokens before the prompt, whose positions are not known here"
    kind = getattr(config, "peft_type", "")
    kind = str(getattr(kind, "value", kind))
    return UNSUPPORTED_ADAPTERS.get(kind, "") or _hook_refusal(facts) or _layer_refusal(facts)


def call_values(model: nn.Module) -> list[str]:
    """Return the names of values that PEFT's hooks pass to its layers in the present generation, if any."""
    return sorted({name for _, _, values in _hooks(ModelFacts.of(model)) for name in values if name in CALL_VALUES})


def remove_call_hooks(model: nn.Module) -> None:
    """Remove PEFT's per-call hooks. PEFT forgets that if a generation fails, and then every later one fails too."""
    for module, number, values in list(_hooks(ModelFacts.of(model))):
        if CALL_VALUES & values.keys():
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _hooks(facts: ModelFacts) -> Iterator[tuple[nn.Module, int, dict[str, Any]]]:
    """Yield PEFT's forward pre-hooks: the layer, the id of the hook, and the values that it passes."""
    for module in facts.hooked:
        for number, hook in module._forward_pre_hooks.items():
            if _is_peft(getattr(hook, "func", hook)):
                yield module, number, getattr(hook, "keywords", {})


def _is_peft(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == "peft"


def _hook_refusal(facts: ModelFacts) -> str:
    """Return why PEFT's present hooks prevent exact decoding; empty if they do not."""
    for _, _, values in _hooks(facts):
        if "alora_offsets" in values:
            return ACTIVATED
        if "adapter_names" not in values:
            return "its adapter changes the inputs of its layers from pass to pass"
        if len(values["adapter_names"]) > 1:
            return SEVERAL
    return ""


def _layer_refusal(facts: ModelFacts) -> str:
    if not any(map(_is_peft, facts.kinds)):
        return ""
    model: PreTrainedModel = facts.model
    for name, layer in model.named_modules():
        if not _is_peft(type(layer)) or "base_layer" not in layer._modules:
            continue
        if not layer.active_adapters or layer.disable_adapters or layer.merged:
            continue
        if _is_activated(layer):
            return ACTIVATED
        kind = type(layer).__module__.split(".")[2]
        if kind in MIXING or (kind not in TOKEN_WISE and _mixes_tokens(layer, model)):
            return f"its adapter ({kind}, of layer {name!r}) mixes the tokens of a pass"
    return ""


def _is_activated(layer: Any) -> bool:
    variants = getattr(layer, "lora_variant", {})  # classes or instances of them
    active = [variants[adapter] for adapter in layer.active_adapters if adapter in variants]
    return any(getattr(it, "__name__", type(it).__name__).startswith("ALora") for it in active)


def _mixes_tokens(layer: Any, model: PreTrainedModel) -> bool:
    """Return whether an adapter, but not its base layer, gives a token another output beside other tokens."""
    base = layer.get_base_layer()
    features = getattr(base, "in_features", getattr(base, "nx", None))
    if not isinstance(features, int):
        return False  # embeddings only look up, and experts belong to the model
    tolerance = TOLERANCE if model.dtype.itemsize > 2 else HALF_TOLERANCE
    adapted, bare = (_difference_beside_others(one, features, model) for one in (layer, base))
    return adapted > tolerance >= bare


@torch.no_grad()
def _difference_beside_others(layer: Any, features: int, model: PreTrainedModel) -> float:
    """Return how much the output for the first token changes when others are added, relative to its norm."""
    device = next((part.device for part in layer.parameters() if part.device.type != "meta"), input_device(model))
    rows = torch.randn(1, ROWS, features, generator=torch.Generator().manual_seed(0)).to(device, model.dtype)
    among, alone = (layer(rows[:, :count])[0, 0].double() for count in (ROWS, 1))
    return float((among - alone).norm() / alone.norm())


class AdaptersBackend:
    """PEFT's adapters, see `lade.model.registry`."""

    adapter_refusal = staticmethod(adapter_refusal)
    call_values = staticmethod(call_values)
    remove_call_hooks = staticmethod(remove_call_hooks)


ADAPTERS.fill(AdaptersBackend())
