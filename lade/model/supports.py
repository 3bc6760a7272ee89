"""`lade.supports`: which models can be decoded exactly, and the reason why others are refused."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from lade.errors import UnsupportedModelError
from lade.model.capture_blockers import GIVE_INSIDE, wraps_model
from lade.model.config import decoder_config, field, window_too_short
from lade.model.facts import (
    CACHE_NAMES,
    ModelFacts,
    adapters,
    is_invariant,
    is_one_graph,
    needs_synced_passes,
    tensor_parallel_size,
)
from lade.model.inputs import INDEXED, LAYER_TYPES, OWN_ATTENTION, RECURRENT_TYPES, MaskPlan, plan_for
from lade.model.registry import Role
from lade.native import COMPILER_REMEDY, WITHOUT, library

MASK_PER_LAYER_TYPE = frozenset(
    """
    cohere2 cohere2_moe cwm exaone4 exaone_moe gemma2 gemma3_text gemma4_text gemma4_unified_text gpt_oss llama4_text
    olmo3 qwen2 qwen3 smollm3 vaultgemma
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
ONE_MASK = frozenset(
    """
    axk2 bloom codegen cohere deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 falcon gemma glm glm4 glm_moe_dsa gpt2
    gpt_bigcode gpt_neox gptj granite granitemoe helium hunyuan_v1_dense hy_v4 llama mistral mixtral nemotron olmo olmo2
    olmoe opt persimmon phi phi3 qwen3_moe stablelm starcoder2
    """.split()  # noqa: SIM905
)
RECURRENT = frozenset(
    """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2
    nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba2
    """.split()  # noqa: SIM905
)
RECURRENT_MASK_PER_LAYER_TYPE = frozenset({"lfm3"})
"""Families whose trees are compared with `model.generate` by this package's tests, by `config.model_type`."""
ENCODER_DECODERS = frozenset(
    "bart blenderbot m2m_100 marian mbart mt5 pegasus t5 umt5 whisper".split()  # noqa: SIM905
)
"""Tested encoder-decoder families; their decoders alone, such as `BartForCausalLM`, are not tested."""

_SLOTS_OF_ALIBI = "its ALiBi biases depend on the cache slot, not on the position"
REFUSED = {
    "doge": "its attention selects keys by score, and breaks ties by the number of keys",
    "gpt_neo": "its local attention layers mask by cache slot and ignore the mask of a tree",
    "mpt": _SLOTS_OF_ALIBI,
    **dict.fromkeys(
        ["inkling_text", "inkling2_text"], "its attention's biases depend on the cache slot, not on the position"
    ),
    "glm5_next_text": "its indexer pools keys by cache slot, not by position",
    **dict.fromkeys(
        ["qwen4_exp", "qwen4_exp_text"],
        "its embeddings hash the last two or three tokens, which in a tree depend on the path",
    ),
    "deepseek_v4": "its attention compresses windows that close by cache slot, not by position",
    "zamba": "its recurrent states have a layout of their own, one per head",
    "zaya": "it mixes the keys and values of a token with those of the token before",
    **dict.fromkeys(["nllb-moe", "switch_transformers"], "its experts drop tokens of a pass beyond their capacity"),
}
PLAIN_REMEDY = 'use plain model.generate, or lookahead="auto", which falls back to it'


_MTP_COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Configuration fields with the number of MTP layers in a checkpoint."""


@dataclass(frozen=True)
class MtpSupport:
    """MTP layers of a model's checkpoint: truthy if they can be used.

    Attributes:
        reason: reason why they cannot be used; empty if they can.
        layers: number of layers in the checkpoint; the first one drafts.
        nbytes: memory of the first layer in bytes, loaded or not.
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


_NOT_SEARCHED = MtpSupport("they are not searched for if the model is not supported")


@dataclass(frozen=True)
class Support:
    """Result of `supports`: truthy if the model can be decoded exactly.

    Attributes:
        model: class name of the model.
        reason: reason for the refusal; empty if the model is supported.
        plan: mask format of the model; None if it is not supported.
        mtp: multi-token prediction layers of its checkpoint, or the reason why they cannot be used.
        fused: reason why passes over trees are not fused into few kernels; empty if they are, unless a trial finds that
            their logits differ, which is logged.
    """

    model: str
    reason: str = ""
    plan: MaskPlan | None = None
    mtp: MtpSupport = _NOT_SEARCHED
    fused: str = "passes are fused on CUDA devices only"

    @property
    def method(self) -> str:
        """Method of `lookahead="auto"`: "adaptive", or "lookahead" where the compiled kernels are missing."""
        return "lookahead" if library() is None else "adaptive"

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        lack = "" if self.method == "adaptive" else f"; the compiled kernels are missing, so {WITHOUT}"
        return f"{self.model}: {self.reason or 'supported' + lack}"

    def __repr__(self) -> str:
        return f"Support({self})"

    def require(self) -> MaskPlan:
        """Return the plan, or raise `UnsupportedModelError`."""
        if self.plan is None:
            raise UnsupportedModelError(str(self), PLAIN_REMEDY)
        return self.plan


class _Refuses(Protocol):
    def refusal(self, facts: ModelFacts, config: PretrainedConfig) -> str: ...


class _InvariantModels(_Refuses, Protocol):
    def can_be_invariant(self, model: nn.Module) -> bool: ...


class _SplitModels(_Refuses, Protocol):
    def has_team(self, model: PreTrainedModel) -> bool: ...
    def has_parts(self, model: PreTrainedModel) -> bool: ...
    def leads(self, model: Any) -> bool: ...
    def decoding_plainly(self, model: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[None]: ...
    def refuse_plain_steps(self, model: Any) -> None: ...


class _Fusion(Protocol):
    def fusion_refusal(self, facts: ModelFacts, plan: MaskPlan) -> str: ...


class _MtpFiles(Protocol):
    def examine(self, model: PreTrainedModel) -> MtpSupport: ...


class _Trials(Protocol):
    def check(self, model: PreTrainedModel, config: PretrainedConfig) -> Support: ...
    def linear_refusal(self, facts: ModelFacts) -> str: ...
    def training_refusal(self, facts: ModelFacts) -> str: ...
    def depends_on_padding(self, model: PreTrainedModel) -> bool: ...


SPLIT_MODELS: Role[_SplitModels] = Role("split models")
INVARIANT_MODELS: Role[_InvariantModels] = Role("invariant models")
FUSION: Role[_Fusion] = Role("fused passes")
MTP_FILES: Role[_MtpFiles] = Role("MTP files")
TRIALS: Role[_Trials] = Role("trials")
Results = dict[Hashable, tuple[list[Callable[[], Any]], Support]]
"""Results of checks by the state that they depend on, with references to the foreign code involved."""
_checked: WeakKeyDictionary[PreTrainedModel, Results] = WeakKeyDictionary()


def supports(model: Any) -> Support:
    """Return whether `lade` decodes a model exactly.

    Untested code, that is an unlisted architecture or foreign code on a listed one, is checked once on the model
    itself: a small tree against plain decoding. Linear layers other than torch's own, such as quantised ones, are each
    tried once, and training mode by three small passes at every call.

    Args:
        model: a transformers model, also inside a wrapper of PEFT or `torch.compile`.

    Returns:
        A truthy `Support`, or a falsy one with the reason.

    >>> if not lade.supports(model): print(lade.supports(model).reason)
    """
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel) or not inner.can_generate():
        hint = f" itself: {GIVE_INSIDE}" if wraps_model(inner) else ""
        return Support(type(inner).__name__, f"it is not a transformers model with a language modeling head{hint}")
    facts = ModelFacts.of(inner)
    support = support_by(facts, model)
    if support and {weight.device.type for weight in facts.weights} == {"cuda"}:
        support = replace(support, fused=FUSION.load().fusion_refusal(facts, support.require()))
    if not support:
        return support
    reason = mtp_search_refusal(facts)
    return replace(support, mtp=MtpSupport(reason) if reason else MTP_FILES.load().examine(inner))


def mtp_search_refusal(facts: ModelFacts) -> str:
    """Return why a model's files are not searched for MTP layers; empty if they are. Nothing is imported or read."""
    model: Any = facts.model
    if library() is None:
        return f"the compiled kernels are missing: {COMPILER_REMEDY}"
    if model.config.is_encoder_decoder:
        return "MTP layers are supported for decoders only, and the model has an encoder"
    if getattr(model, "_tp_size", None) or getattr(model, "_pp_stage", None) is not None:
        return "the model is sharded over processes"
    devices = {weight.device for weight in facts.weights}
    if len(devices) > 1:
        return "the model's weights lie on several devices"
    if any(device.type == "meta" for device in devices):
        return "the model's weights are offloaded"
    config = model.config.get_text_config(decoder=True)
    counts = [count for name in _MTP_COUNTS if isinstance(count := getattr(config, name, None), int)]
    dropped = model._keys_to_ignore_on_load_unexpected or ()
    if 0 in counts or not (counts or any("mtp" in pattern for pattern in dropped)):
        return f"{type(model).__name__} is configured without MTP layers"
    if (split := SPLIT_MODELS.loaded()) is not None and split.has_parts(model):
        return "each process of lade.parallel has the hidden states of a part of the tree only"
    return ""


def support_by(facts: ModelFacts, wrapped: Any) -> Support:
    """Return the result of `supports` for a model that has been surveyed already."""
    model = facts.model
    name, config = type(model).__name__, decoder_config(model)
    reason = (
        _refusal_of_architecture(facts, config)
        or _refusal_of_setup(facts, config)
        or ("" if (peft := adapters()) is None else peft.adapter_refusal(wrapped, facts))
        # trials decide about linear layers and training mode, unless both are ordinary
        or ("" if facts.has_only_known_layers else TRIALS.load().linear_refusal(facts))
        or (TRIALS.load().training_refusal(facts) if facts.training else "")
    )
    if reason:
        return Support(name, reason)
    foreign = _foreign_code(facts)
    if not foreign and is_listed(model, config):
        try:
            plan = plan_for(config, by_layer_type=takes_masks_by_layer_type(config))
        except ValueError as problem:
            return Support(name, f"it {problem}")
        return Support(name, plan=replace(plan, pads=True))
    known = _checked.setdefault(model, {})
    state = (config._attn_implementation, model.dtype, *map(id, foreign))
    things, support = known.get(state, ([], None))
    # An id may have been reused by another object.
    if support is None or any(thing() is None for thing in things):
        support = TRIALS.load().check(model, config)
        known[state] = (list(map(_reference, foreign)), support)
    return support


def _foreign_code(facts: ModelFacts) -> list[Any]:
    """Return `ModelFacts.foreign`, without the configurations that encoder and decoder may have of their own."""
    return [thing for thing in facts.foreign if not (facts.has_encoder and isinstance(thing, PretrainedConfig))]


def _reference(thing: Any) -> Callable[[], Any]:
    """Return a weak reference, or for objects without one a function that returns None."""
    try:
        return ref(thing)
    except TypeError:
        return lambda: None


def may_be_shared(model: Any) -> bool:
    """Return whether several processes may decode a model; false only if this process certainly decodes it alone."""
    if not isinstance(model, PreTrainedModel):
        return False
    split = SPLIT_MODELS.loaded()
    return tensor_parallel_size(model) > 1 or (split is not None and split.has_team(model))


def unwrap(model: Any) -> Any:
    """Return the transformers model inside wrappers of PEFT and `torch.compile`."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_listed(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Return whether a model's architecture is tested, given its decoder's config; others are checked on the model."""
    # T5's decoder has a copy.
    own = model.config is config or (model.config.is_encoder_decoder and type(model.config) is type(config))
    return own and has_listed_decoder(model, config)


def _refusal_of_architecture(facts: ModelFacts, config: PretrainedConfig) -> str:
    if getattr(type(facts.model), "_sample", None) is not GenerationMixin._sample:
        return "its class overrides the choice of tokens (_sample)"
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    if getattr(config, "alibi", False):
        return _SLOTS_OF_ALIBI
    return _refusal_of_recurrence(facts, config)


def _refusal_of_recurrence(facts: ModelFacts, config: PretrainedConfig) -> str:
    """Return why its recurrent layers, or other layers than usual attention, are not supported; empty if they are."""
    model: PreTrainedModel = facts.model
    types = set(field(config, "layer_types") or ())
    if types & INDEXED and not facts.indexers:
        return f"its layers ({', '.join(types & INDEXED)}) select keys by an unknown method"
    kinds, listed = sorted(types - LAYER_TYPES), config.model_type in RECURRENT
    if not (kinds or getattr(model, "_is_stateful", False) or listed):
        return ""
    if not listed and not (RECURRENT_TYPES.issuperset(kinds) and facts.recurrent):
        named = ", ".join(kinds) or "a recurrent state"
        return f"its layers ({named}) carry a state that the branches of a token tree cannot share"
    if facts.cache_name is None:
        return f"its forward takes no cache under a known name ({', '.join(CACHE_NAMES)})"
    if getattr(model, "_use_kernels", False):
        return "its kernels replace layers, and do not support trees: load it without use_kernels"
    return ""


def _refusal_of_setup(facts: ModelFacts, config: PretrainedConfig) -> str:
    model: PreTrainedModel = facts.model
    if getattr(model, "_pp_stage", None) is not None:
        return "it is split into pipeline stages (pp_size), of which each process has only one: load it with device_map"
    if (tensor_parallel_size(model) > 1 or needs_synced_passes(model)) and (
        reason := SPLIT_MODELS.load().refusal(facts, config)
    ):
        return reason
    backend = config._attn_implementation or "eager"
    ours = backend in OWN_ATTENTION
    if not (ours or backend in ("sdpa", "eager")) or (ours and (facts.has_encoder or facts.indexers)):
        return f'its attention kernel {backend!r} takes no tree mask: load it with attn_implementation="sdpa"'
    if ours and not model._can_set_attn_implementation():
        remedy = 'load it with attn_implementation="eager"'
        return f"its attention does not use transformers' interface, so it does not support {backend!r}: {remedy}"
    if is_invariant(model) and (reason := INVARIANT_MODELS.load().refusal(facts, config)):
        return reason
    if any(map(is_one_graph, facts.compiled)):
        return "it is compiled with fullgraph=True, and the cache of a tree breaks graphs: compile it without that"
    if field(config, "use_bidirectional_attention") not in (None, False, "vision"):  # "vision": among image tokens only
        return "its attention is bidirectional"
    if window := window_too_short(config):
        return f"its {window} is less than two tokens, and transformers' cache does not apply so short a window"
    return ""


def has_listed_decoder(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Return whether its language model, in a multimodal model a part of it, is of a listed architecture."""
    ours = type(model).__module__.startswith("transformers.models.")  # remote code may borrow a model_type
    listed = ENCODER_DECODERS if model.config.is_encoder_decoder else MASK_PER_LAYER_TYPE | ONE_MASK | RECURRENT
    return ours and config.model_type in listed


def takes_masks_by_layer_type(config: PretrainedConfig) -> bool:
    """Return whether a listed architecture takes its masks by layer type."""
    return config.model_type in MASK_PER_LAYER_TYPE | RECURRENT_MASK_PER_LAYER_TYPE
