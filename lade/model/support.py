"""Which models can be served exactly, and why not the others. A model we cannot serve exactly is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lade.errors import UnsupportedModelError
from lade.model.adapters import why_adapted_otherwise
from lade.model.attention import MaskPlan
from lade.model.layer_trial import why_inexact
from lade.model.probe import tolerance, worst_error
from lade.model.reach import Reach, chunked, everything, sliding
from lade.model.tree_attention import NAME as TREE_ATTENTION

MASK_PER_LAYER_TYPE = frozenset(
    """
    cohere2 exaone4 gemma2 gemma3_text gpt_oss llama4_text olmo3 qwen2 qwen3 smollm3
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
ONE_MASK = frozenset(
    """
    bloom codegen cohere deepseek_v2 deepseek_v3 ernie4_5 falcon gemma glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite
    granitemoe helium hunyuan_v1_dense llama mistral mixtral nemotron olmo olmo2 olmoe opt persimmon phi phi3 qwen3_moe
    stablelm starcoder2
    """.split()  # noqa: SIM905
)
"""Families whose trees are compared with `model.generate` by this package's tests, by `config.model_type`."""

REFUSED = {
    "gpt_neo": "its local attention layers mask by cache slot and ignore the mask of a tree",
    "mpt": "its ALiBi biases go by cache slot, not by position",
}
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
LONGEST_PROBE_TOKENS = 1024
PLAIN_REMEDY = 'use plain model.generate, or lookahead="auto", which falls back to it'

_probed: WeakKeyDictionary[PreTrainedModel, dict[str, Support]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Support:
    """The answer of `supports`: truthy where the model can be served.

    Attributes:
        model: class name of the model.
        reason: why not; empty where it can be served.
        plan: how the model takes its masks; None where it cannot be served.
    """

    model: str
    reason: str = ""
    plan: MaskPlan | None = None

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"{self.model}: " + (self.reason or "supported")

    def __repr__(self) -> str:
        return f"Support({self})"

    def require(self) -> MaskPlan:
        """The plan, or `UnsupportedModelError`."""
        if self.plan is None:
            raise UnsupportedModelError(str(self), PLAIN_REMEDY)
        return self.plan


def supports(model: Any) -> Support:
    """Whether `lade` decodes this model exactly.

    An architecture that this package does not test is checked once by a small forward pass on the model itself: a tree
    against plain passes. Linear layers that are not torch's own, such as quantised ones, are each tried once.

    Args:
        model: a transformers model; one wrapped by PEFT or `torch.compile` is looked into.

    Returns:
        A truthy `Support`, or a falsy one with the reason.

    >>> if not lade.supports(model): print(lade.supports(model).reason)
    """
    wrapped, model = model, unwrap(model)
    name = type(model).__name__
    reason = _refusal(model) or _refusal_of_wrapper(wrapped, model) or why_inexact(model)
    if reason:
        return Support(name, reason)
    config = model.config.get_text_config(decoder=True)
    if _is_listed(model, config):
        return Support(name, plan=_plan(config, by_layer_type=config.model_type in MASK_PER_LAYER_TYPE))
    known = _probed.setdefault(model, {})
    key = f"{config._attn_implementation} {model.dtype}"
    if key not in known:
        known[key] = _probe(model, config)
    return known[key]


def unwrap(model: Any) -> Any:
    """The transformers model inside PEFT's and `torch.compile`'s wrappers."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_listed(model: PreTrainedModel) -> bool:
    """Whether it is of an architecture that this package tests; others are checked on the model itself."""
    return _is_listed(model, model.config.get_text_config(decoder=True))


def _refusal(model: Any) -> str:
    """Why a model cannot be served whatever its masks; empty if there is no such reason."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return "it is not a transformers model with a language modeling head"
    config = model.config.get_text_config(decoder=True)
    return _refusal_of_architecture(model, config) or _refusal_as_it_is_set_up(model, config)


def _refusal_of_architecture(model: PreTrainedModel, config: PretrainedConfig) -> str:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model, and token trees need a decoder-only one"
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    if getattr(config, "alibi", False):
        return "its ALiBi biases go by cache slot, not by position"
    if getattr(model, "_is_stateful", False) or _foreign_layers(config):
        kinds = ", ".join(_foreign_layers(config)) or "a recurrent state"
        return f"its layers ({kinds}) carry a state that the branches of a token tree cannot share"
    return ""


def _refusal_as_it_is_set_up(model: PreTrainedModel, config: PretrainedConfig) -> str:
    backend = config._attn_implementation or "eager"
    if backend not in ("sdpa", "eager", TREE_ATTENTION):
        return f'its attention kernel {backend!r} takes no tree mask: load it with attn_implementation="sdpa"'
    if backend == TREE_ATTENTION and not model._can_set_attn_implementation():
        remedy = 'load it with attn_implementation="eager"'
        return f"its attention does not go through transformers' interface, so it does not know {backend!r}: {remedy}"
    if getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision"):
        return "its attention is bidirectional"
    if model.training and _drops_out(model, config):
        return "it is in training mode, where dropout makes every pass differ: call model.eval()"
    return ""


def _refusal_of_wrapper(wrapped: Any, model: PreTrainedModel) -> str:
    return why_adapted_otherwise(wrapped, model)


def _foreign_layers(config: PretrainedConfig) -> list[str]:
    return sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)


def _drops_out(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    modules = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    return modules or bool(getattr(config, "attention_dropout", 0.0))


def _is_listed(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    ours = type(model).__module__.startswith("transformers.models.")  # remote code may borrow a model_type
    return ours and config.model_type in MASK_PER_LAYER_TYPE | ONE_MASK and model.config is config


def _plan(config: PretrainedConfig, *, by_layer_type: bool) -> MaskPlan:
    reaches: dict[str, Reach] = {}
    window = getattr(config, "sliding_window", None)
    if not by_layer_type:
        reaches["attention"] = sliding(window) if window else everything
    for kind in sorted(set(config.layer_types)) if by_layer_type else ():
        match kind:
            case "sliding_attention":
                reaches[kind] = sliding(config.sliding_window)
            case "chunked_attention":
                reaches[kind] = chunked(config.attention_chunk_size)
            case _:
                reaches[kind] = everything
    backend = config._attn_implementation
    return MaskPlan(
        reaches, by_layer_type, additive=backend not in ("sdpa", TREE_ATTENTION), compact=backend == TREE_ATTENTION
    )


def _probe(model: PreTrainedModel, config: PretrainedConfig) -> Support:
    """Try the ways in which a model may take its masks; the first one that is exact is the plan."""
    name = type(model).__name__
    reach = max((getattr(config, field, None) or 0) for field in ("sliding_window", "attention_chunk_size"))
    if reach > LONGEST_PROBE_TOKENS:
        reason = f"its attention window of {reach} tokens is too long to be checked, and this package does not test it"
        return Support(name, reason)
    findings = []
    for by_layer_type in (True, False) if getattr(config, "layer_types", None) else (False,):
        plan = _plan(config, by_layer_type=by_layer_type)
        try:
            error = worst_error(model, plan, beyond=reach)
        except Exception as problem:  # noqa: BLE001 - any failure of an unknown model on a tree is the reason to refuse it
            findings.append(f"{type(problem).__name__}: {problem}".splitlines()[0])
            continue
        if error <= tolerance(model.dtype):
            return Support(name, plan=plan)
        findings.append(f"logits differ by {error:.2g} standard deviations")
    reason = f"a tree pass does not equal plain passes on it ({'; '.join(findings)})"
    return Support(name, reason)
