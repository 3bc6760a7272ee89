"""Refusals of generations that are not supported, the fallback to plain decoding, and warnings."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from lade.errors import (
    FallbackWarning,
    InputError,
    PrecisionWarning,
    UnsupportedArgumentError,
    UnsupportedError,
    UnsupportedModelError,
)
from lade.locks import ForkSafeLock
from lade.model.config import LEARNED_POSITIONS, decoder_config, dtype_name
from lade.model.facts import CACHE, CACHE_NAMES, ModelFacts, is_invariant, tensor_parallel_size
from lade.model.inputs import FULL, MaskPlan
from lade.model.kv_cache import TreeCache
from lade.model.prefill import MEDIA, PreparedPrompts
from lade.model.prepared import (
    USER_CACHES,
    Prepared,
    PromptTexts,
    check_shape,
    has_more_than_text,
    is_unset,
    marks_only_text,
    placeholder_ids,
    refuse,
)
from lade.model.runner import SLOTS, EagerRunner, input_device
from lade.model.supports import INVARIANT_MODELS, TRIALS, is_listed, support_by, unwrap
from lade.stats import Stats

KNOWN_MODEL_KWARGS = frozenset(
    """
    attention_mask cache_position decoder_attention_mask inputs_embeds logits_to_keep position_ids use_cache
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
) | set(CACHE_NAMES)
_ON_DEVICE = "lookahead decoding keeps keys and values of the whole text on the model's device"
FOREIGN_CACHES = {
    "quantized": "it rounds keys and values later than they are cached, so a tree would see other values",
    "offloaded": _ON_DEVICE,
    "offloaded_static": _ON_DEVICE,
}


def check(
    prepared: Prepared,
    modes: Collection[GenerationMode] = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
    plan: MaskPlan | None = None,
) -> tuple[MaskPlan, PromptTexts, PreparedPrompts | None]:
    """Make all checks that every way of decoding needs.

    Args:
        prepared: inputs prepared by `generate`.
        modes: generation modes that the caller supports.
        plan: the model's mask format if known; None to check the model.

    Returns:
        The model's mask format; the texts; and the prepared prompts, if prefill needs more than the texts.

    Raises:
        InputError: no decoding method could continue the prompt.
        UnsupportedModelError, UnsupportedArgumentError: lookahead decoding does not support it.
    """
    plan = support_by(prepared.facts, prepared.wrapper).require() if plan is None else plan
    encoded = prepared.facts.has_encoder
    model, prompts, embeddings = prepared.model, prepared.prompts, prepared.embeddings
    images = not encoded and has_more_than_text(model, prepared.model_kwargs)
    _refuse_arguments(prepared, modes, images=images)
    _refuse_caches(prepared, plan)
    if encoded:
        _check_prompts(prepared, ())
        _check_decoder(prepared)
        return plan, PromptTexts.without_padding(prompts), None
    if prompts.shape[1] or embeddings is None:
        _check_prompts(prepared, placeholder_ids(model) if images or prepared.user_cache is not None else ())
    texts = PromptTexts.of(prepared)
    _check_padding(prepared.facts, texts.padding, prepared.generation_config)
    if texts.has_gaps:
        _check_gaps(prepared.facts, plan)
    images = images or not _check_positions(prepared, texts)
    _check_user_cache(prepared, texts)
    whole = images or texts.has_gaps or embeddings is not None
    return plan, texts, MEDIA.load().prompts(prepared, texts) if whole else None


def _refuse_arguments(prepared: Prepared, modes: Collection[GenerationMode], *, images: bool) -> None:
    """Refuse arguments that are never supported, and unknown ones unless the prompts have media, `images`."""
    config = prepared.generation_config
    mode = config.get_generation_mode()
    if mode not in modes:
        refuse(_mode_arguments(mode, config), "greedy decoding, sampling and beam search are accelerated")
    if any(isinstance(each, UnbatchedClassifierFreeGuidanceLogitsProcessor) for each in prepared.logits_processor):
        refuse(f"guidance_scale={config.guidance_scale}", "it runs the model a second time at each token")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            refuse(f"{name}=True", "a pass over a tree has no such tensors for a single token")
    if images:
        return
    known = KNOWN_MODEL_KWARGS | {"encoder_outputs"} if prepared.facts.has_encoder else KNOWN_MODEL_KWARGS
    for name, value in prepared.model_kwargs.items():
        if name not in known and not is_unset(value) and not marks_only_text(prepared.model, name, value):
            refuse(name, "its values for tokens ahead of the text are not known")


def _check_decoder(prepared: Prepared) -> None:
    """Refuse arguments that are supported only without an encoder."""
    mask = prepared.model_kwargs.get("decoder_attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        refuse("a decoder_attention_mask with padding", "plain decoding may count it; give decoder_input_ids without")
    if prepared.generation_config.prefill_chunk_size is not None:
        refuse("prefill_chunk_size", "transformers cuts the encoder's mask as well")


def _refuse_caches(prepared: Prepared, plan: MaskPlan) -> None:
    """Refuse caches that cannot hold a tree."""
    kind, cache = prepared.generation_config.cache_implementation, prepared.user_cache
    if prepared.model_kwargs.get("use_cache") is False:
        refuse("use_cache=False", "a token tree needs the KV cache")
    if kind in FOREIGN_CACHES:
        refuse(f"cache_implementation={kind!r}", FOREIGN_CACHES[kind])
    if cache is None:
        return
    user_caches = USER_CACHES.load()
    if not plan.attends:
        what = f"{prepared.cache_name} on a model whose layers are all recurrent"
        refuse(what, "the length of its states is unknown, so plain decoding feeds the whole prompt again")
    if not isinstance(cache, TreeCache) and prepared.facts.recurrent:
        what = f"{CACHE} of type {type(cache).__name__} on a model with recurrent layers"
        refuse(what, "its states cannot advance along a path of a tree; give a lade.TreeCache")
    if prepared.facts.has_encoder:
        refuse(CACHE, "a token tree in a decoder needs its own cache besides the encoder's")
    if user_caches.lacks_indexer(cache, prepared.facts):
        what = f"{CACHE} of type {type(cache).__name__} on a model with indexers"
        refuse(what, "it holds no indexer keys; give DynamicCache(config=model.config) or a lade.TreeCache")
    if not user_caches.can_borrow(cache):
        refuse(
            f"{CACHE} of type {type(cache).__name__}",
            "it cannot be copied from; give a DynamicCache, a StaticCache or a lade.TreeCache on the model's device",
        )


def _mode_arguments(mode: GenerationMode, config: GenerationConfig) -> str:
    """Return the arguments that selected a generation mode, for the error message."""
    names = "do_sample num_beams num_beam_groups prompt_lookup_num_tokens use_mtp penalty_alpha dola_layers"
    values = {name: getattr(config, name, None) for name in names.split()}
    given = [f"{name}={value!r}" for name, value in values.items() if value is True or value not in (None, False, 1)]
    return ", ".join(given) or f"generation mode {mode.value}"


def _check_prompts(prepared: Prepared, placeholders: Collection[int]) -> None:
    """Raise `InputError` for prompts `[P, L]` that no decoding could continue. Synchronizes with the device once.

    Placeholder ids may be outside the vocabulary, as they are never embedded.
    """
    model, prompts = prepared.model, prepared.prompts
    check_shape(prompts)
    if placeholders:
        prompts = prompts.masked_fill(torch.isin(prompts, prompts.new_tensor(sorted(placeholders))), 0)
    vocabulary = prepared.vocabulary
    low, high = torch.stack(prompts.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"input_ids has the id {low if low < 0 else high}, outside the model's vocabulary of {vocabulary}: "
            "encode the prompt with the model's own tokenizer"
        )
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    if config.model_type in LEARNED_POSITIONS and length and prompts.shape[1] > length:
        raise InputError(
            f"input_ids has {prompts.shape[1]} tokens, but {type(model).__name__} has positions for {length}: "
            "shorten the prompt"
        )


def _check_gaps(facts: ModelFacts, plan: MaskPlan) -> None:
    """Refuse masked tokens within the text where plain decoding counts them."""
    what = "an attention_mask with gaps"
    if facts.recurrent or not is_listed(facts.model, decoder_config(facts.model)):
        refuse(what, "plain decoding of this model may count masked tokens; give the text without them")
    if any(span != FULL for span in plan.spans.values()):
        refuse(what, "plain decoding counts masked tokens in the windows of this model; give the text without them")


def _check_padding(facts: ModelFacts, padding: int, generation_config: GenerationConfig) -> None:
    """Refuse left padding where plain decoding counts it as text."""
    if not padding:
        return
    model, limit = facts.model, facts.positions.longrope_switch  # models that drop their cache there count slots
    if facts.uses_slots:
        limit = SLOTS.load().padding_matters_from(facts) or limit
    if limit is not None and generation_config.max_length >= limit:
        refuse("left padding", f"from {limit} tokens on this model counts the padding; give the prompt without it")
    if generation_config.prefill_chunk_size is not None and facts.recurrent:
        chunks = f"prefill_chunk_size={generation_config.prefill_chunk_size} with left padding"
        refuse(chunks, "recurrent layers depend on chunk boundaries, and count padding in some; leave one of them out")
    unknown = not is_listed(model, decoder_config(model)) or facts.recurrent
    if unknown and tensor_parallel_size(model) > 1:
        refuse("left padding", "checking whether this model counts it would take passes of all its processes")
    if unknown and TRIALS.load().depends_on_padding(model):
        refuse("left padding", "plain decoding counts it as text on this model; give the prompt without it")


def _check_user_cache(prepared: Prepared, texts: PromptTexts) -> None:
    """Refuse a user's cache that lookahead decoding cannot continue as plain decoding does."""
    cache = prepared.user_cache
    if cache is None:
        return
    if len(texts.ids) > 1:
        refuse(f"{CACHE} for a batch", "the lengths of its rows will differ; leave it out")
    if texts.padding:
        refuse(
            f"masked tokens or padding with {CACHE}",
            "lade's cache has no slots for padding; give the prompt without it",
        )
    if prepared.embeddings is not None and cache.get_seq_length():
        refuse(f"inputs_embeds with {CACHE}", "it is unknown which of them are cached; leave one of them out")
    max_length = prepared.generation_config.max_length + texts.width - texts.shown
    if reason := USER_CACHES.load().unfit_reason(cache, texts.width, max_length):
        refuse(CACHE, reason)


def refuse_slow_beams(prepared: Prepared) -> None:
    """For "auto", raise `UnsupportedArgumentError` for beam search that lookahead decoding is known to slow down.

    A pass for several searches feeds some fifty tokens for each of them. On a CPU that costs more than it saves.
    """
    prompts, beams = len(prepared.prompts), prepared.beams
    if prepared.input_ids.device.type == "cpu" and prompts > 1 and beams > 1:
        raise UnsupportedArgumentError(
            f"num_beams={beams} for {prompts} prompts is slower with lookahead decoding on a CPU",
            "give a LookaheadConfig to use it anyway",
        )


def check_switch(runner: EagerRunner, prompt_length: int, max_length: int) -> None:
    """Refuse a text that crosses the length at which an old transformers loses it."""
    switch = runner.positions.longrope_switch
    if switch is not None and prompt_length <= switch < max_length and runner.switch.drops_cache_wrongly():
        refuse(f"max_length={max_length}", f"beyond {switch} tokens this transformers loses the text: upgrade it")


def _check_positions(prepared: Prepared, texts: PromptTexts) -> bool:
    """Return whether positions count up from 0; refuse others, unless they follow an image in the cache."""
    positions = prepared.model_kwargs.get("position_ids")
    if positions is None:
        # ALiBi and recurrent layers derive positions from the mask.
        by_mask = prepared.facts.has_alibi or prepared.facts.recurrent
        if texts.padding and not by_mask:
            why = "this model's forward takes no position_ids, so transformers would count the padding"
            refuse("left padding", why)
        return True
    axes = positions if positions.ndim == 3 else positions[None]  # of time, height and width in some models
    are_consecutive = all(
        _are_consecutive(axis[:: prepared.beams].expand(len(texts.ids), -1), texts.columns) for axis in axes
    )
    if not are_consecutive and positions.ndim == 2:
        refuse("position_ids", "positions ahead of the text are known only if they count up from 0")
    return are_consecutive


def _are_consecutive(position_ids: torch.Tensor, columns: Sequence[Sequence[int]]) -> bool:
    """Return whether `position_ids` `[B, L]` count up from 0 in the text's columns."""
    rows = zip(position_ids.tolist(), columns, strict=True)
    return all([row[column] for column in seen] == list(range(len(seen))) for row, seen in rows)


logger = logging.getLogger(__name__)

LIBRARIES = frozenset({"lade", "transformers", "transformers_modules", "torch", "peft", "contextlib", "functools"})
"""Packages skipped to find the user's line for a warning; `transformers_modules` holds code of checkpoints."""

HALF = frozenset({torch.bfloat16, torch.float16})

_warned: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()
_warning = ForkSafeLock()


def fall_back(model: Any, problem: UnsupportedError, stats: Stats | None, *, allowed: bool = True) -> None:
    """Report the fallback to plain decoding: a log record, `stats.fallback`, a warning once per model and reason.

    The model is without wrappers. Unless falling back is `allowed`, as with `lookahead="auto"`, the problem is raised.
    """
    if not allowed:
        raise problem
    message = f"running at normal speed: {problem.reason}"
    if isinstance(problem, UnsupportedModelError):
        name = type(model).__name__
        message = f"{name} is not supported, running at normal speed: {problem.reason.removeprefix(f'{name}: ')}"
    logger.info("%s", message)
    if stats is not None:
        stats.fallback = problem.reason
    if _is_first(model, re.sub(r"\d+", "", problem.reason)):  # numbers may differ from call to call
        warnings.warn(message, FallbackWarning, stacklevel=_user_stacklevel())


def _is_first(model: PreTrainedModel, subject: str) -> bool:
    """Return True for the first call with this model and subject; a copy of a model is another model."""
    with _warning:
        subjects = _warned.setdefault(model, set())
        is_first = subject not in subjects
        subjects.add(subject)
    return is_first


def warn_of_precision(prepared: Prepared) -> None:
    """Issue the `PrecisionWarning` of a model about to be accelerated, at the user's line; see `precision_note`.

    Call it after all refusals, and before anything is fed or borrowed, as the warning may be turned into an error.
    """
    note = precision_note(prepared.wrapper, prepared.model)
    if note:
        warnings.warn(note, PrecisionWarning, stacklevel=_user_stacklevel())


def precision_note(model: Any, inner: PreTrainedModel | None = None) -> str:
    """Return why accelerated output may differ from `generate`'s, and the remedy; empty if not, and at later calls."""
    inner = unwrap(model) if inner is None else inner
    device = input_device(inner).type
    cast = torch.is_autocast_enabled(device)
    is_exact = inner.dtype not in HALF or is_invariant(inner)
    if is_exact and not cast:
        return ""
    dtype = torch.get_autocast_dtype(device) if cast and inner.dtype is torch.float32 else inner.dtype
    if dtype not in HALF or not _is_first(inner, "precision"):
        return ""
    if is_exact:
        remedy = "leaving out torch.autocast"
    elif INVARIANT_MODELS.load().can_be_invariant(model):
        remedy = "`lade.invariant(model)`"
    else:
        remedy = "loading the model in float32"
    may_differ = "where two tokens score almost equally the output may differ from `generate`"
    return f"{dtype_name(dtype)}: {may_differ}; {remedy} prevents it"


def _user_stacklevel() -> int:
    """Return the `stacklevel` that makes a warning of the caller point at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
