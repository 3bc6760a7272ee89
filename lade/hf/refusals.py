"""What of `generate`'s arguments can be served. Anything else is refused before any work is done."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from lade.config import Lookahead, LookaheadConfig
from lade.errors import ConfigError, InputError, UnsupportedArgumentError
from lade.hf.media import WHY, is_empty, names_media, says_text
from lade.model.position_limits import LEARNED_POSITIONS
from lade.model.runner import EagerRunner
from lade.model.slot_patches import padding_counts_from
from lade.model.support.padding_check import counts_padding
from lade.model.support.supports import is_listed
from lade.model.user_cache import can_borrow, why_unfit

REMEDY = 'leave it out, use plain model.generate, or lookahead="auto", which falls back to it'
KNOWN_MODEL_KWARGS = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
)
REFUSED_OUTPUTS = ("output_attentions", "output_hidden_states")
FOREIGN_CACHES = frozenset({"quantized", "offloaded", "offloaded_static"})


def resolve(lookahead: Lookahead) -> tuple[LookaheadConfig | None, bool]:
    """What `lookahead=` means.

    Returns:
        The config (None for plain decoding), and whether to fall back to plain decoding where it cannot be served.

    Raises:
        ConfigError: it is none of a `LookaheadConfig`, "auto" and None.
    """
    if lookahead is None or isinstance(lookahead, LookaheadConfig):
        return lookahead, False
    if lookahead == "auto":
        return LookaheadConfig(), True
    raise ConfigError("lookahead", lookahead, 'give a LookaheadConfig, "auto", or None for plain decoding')


def checked_paddings(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    modes: Collection[GenerationMode] = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
) -> list[int]:
    """All checks that any way of decoding needs; takes what `generate` prepared.

    Args:
        model: the causal language model.
        prompts: `[B, L]` int64.
        logits_processor: see `generate`.
        generation_config: the final one.
        model_kwargs: attention mask, positions, cache; of each prompt as many alike rows as there are beams.
        modes: generation modes that are served.

    Returns:
        `[B]`, how many padding columns stand left of each prompt.

    Raises:
        InputError: no decoding could continue the prompt.
        UnsupportedArgumentError: lookahead decoding cannot.
    """
    refuse_arguments(model, logits_processor, generation_config, model_kwargs, modes)
    check_prompt(model, prompts)
    mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    beams = generation_config.num_beams or 1
    paddings = left_paddings(prompts, None if mask is None else mask[::beams])
    check_padding(model, max(paddings), generation_config.max_length)
    if positions is not None:
        for axis in positions if positions.ndim == 3 else positions[None]:  # of time, height and width in some models
            check_positions(axis[::beams].expand(len(paddings), -1), paddings)
    elif any(paddings) and not hasattr(model.base_model, "build_alibi_tensor"):  # ALiBi goes by the mask
        refuse("left padding", "transformers sees no position_ids in this model's forward, and would count the padding")
    return paddings


def refuse_arguments(
    model: PreTrainedModel,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    modes: Collection[GenerationMode],
) -> None:
    """Raise `UnsupportedArgumentError` for what lookahead decoding does not serve; takes what `generate` prepared."""
    mode = generation_config.get_generation_mode()
    if mode not in modes:
        refuse(_mode_arguments(mode, generation_config), "greedy decoding, sampling and beam search are accelerated")
    if "inputs_embeds" in model_kwargs:
        refuse("inputs_embeds", "n-grams are made of token ids; give input_ids")
    if any(isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) for processor in logits_processor):
        refuse(f"guidance_scale={generation_config.guidance_scale}", "it runs the model a second time at each token")
    for name in REFUSED_OUTPUTS:
        if generation_config.return_dict_in_generate and getattr(generation_config, name):
            refuse(f"{name}=True", "a pass over a tree has no such tensors of one token at a time")
    refuse_media(model_kwargs)
    for name, value in model_kwargs.items():
        if name not in KNOWN_MODEL_KWARGS and not is_empty(value) and not says_text(model, name, value):
            refuse(name, "its values for tokens ahead of the text are not known")
    _refuse_cache(generation_config, model_kwargs)


def refuse_media(arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedArgumentError` for a prompt with images, videos or sounds.

    Args:
        arguments: of `generate`, or what it made of them.
    """
    for name, value in arguments.items():
        if names_media(name) and not is_empty(value):
            refuse(name, WHY)


def _refuse_cache(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    cache = model_kwargs.get("past_key_values")
    if model_kwargs.get("use_cache") is False:
        refuse("use_cache=False", "a token tree needs the KV cache")
    if generation_config.cache_implementation in FOREIGN_CACHES:
        refuse(
            f"cache_implementation={generation_config.cache_implementation!r}",
            "lookahead decoding keeps a cache of its own on the model's device",
        )
    if getattr(cache, "_is_user_defined", False) and not can_borrow(cache):
        refuse(
            f"past_key_values of type {type(cache).__name__}",
            "it has no room for a tree; give a DynamicCache or a lade.TreeCache",
        )


def with_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with `stop_strings` as a criterion, since transformers hands a callable no tokenizer for them.

    They may come from a generation_config as well. Without a tokenizer they stay, for transformers to ask for one.
    """
    if _setting(model, arguments, "token_healing"):
        refuse("token_healing=True", "transformers does not hand on the tokenizer that it needs")
    tokenizer, strings = arguments.get("tokenizer"), _setting(model, arguments, "stop_strings")
    if tokenizer is None or strings is None:
        return arguments
    changed = dict(arguments)
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    if not any(type(each) is StopStringCriteria for each in criteria):  # else transformers takes the user's own alone
        criteria.append(StopStringCriteria(tokenizer, strings))
    changed["stopping_criteria"] = criteria
    given = arguments.get("generation_config")
    if getattr(given, "stop_strings", None) is not None:
        changed["generation_config"] = copy.deepcopy(given)
        changed["generation_config"].stop_strings = None
    if "stop_strings" in arguments or model.generation_config.stop_strings is not None:
        changed["stop_strings"] = None  # an argument goes before what the model's generation_config says
    return changed


def _setting(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> Any:
    """What a field of the final generation_config will be: an argument, None included, else what a config says."""
    if name in arguments:
        return arguments[name]
    given = getattr(arguments.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given


def _mode_arguments(mode: GenerationMode, config: GenerationConfig) -> str:
    """The arguments that led to a generation mode, for the error."""
    names = ("do_sample", "num_beams", "num_beam_groups", "prompt_lookup_num_tokens", "penalty_alpha", "dola_layers")
    values = {name: getattr(config, name, None) for name in names}
    told = [f"{name}={value!r}" for name, value in values.items() if value is True or value not in (None, False, 1)]
    return ", ".join(told) or f"generation mode {mode.value}"


def refuse(what: str, why: str) -> None:
    """Raise the `UnsupportedArgumentError` for an argument."""
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding: {why}", REMEDY)


def check_ids(arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` for a prompt that is no tensor of ids, such as a text.

    Args:
        arguments: of `generate`.
    """
    for name in ("inputs", "input_ids"):
        if not isinstance(value := arguments.get(name), torch.Tensor | None):
            raise InputError(why_no_ids(name, value))


def why_no_ids(name: str, value: object) -> str:
    """What is wrong with a prompt that is no tensor of ids, and the remedy."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, str):
        return (
            f"{name} is a text, {reprlib.repr(first)}: encode it with the tokenizer: "
            'tokenizer(text, return_tensors="pt").input_ids'
        )
    if isinstance(value, Mapping):
        return f"{name} is a {type(value).__name__}: give what it holds as arguments, **{name}"
    return f"{name} is a {type(value).__name__}: give ids as an int64 tensor [batch, length]"


def check_prompt(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Raise `InputError` for a prompt that no decoding could continue.

    Args:
        model: the causal language model.
        input_ids: `[B, L]` int64.
    """
    if input_ids.ndim != 2 or torch.is_floating_point(input_ids):
        raise InputError(
            f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}: "
            "give ids as int64 [batch, length]"
        )
    if input_ids.shape[1] == 0:
        raise InputError("input_ids is empty: give at least one token, for instance the tokenizer's bos_token_id")
    embeddings: Any = model.get_input_embeddings()
    vocabulary: int = embeddings.weight.shape[0]
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InputError(
            f"input_ids has the id {wrong}, outside the model's vocabulary of {vocabulary}: "
            "encode the prompt with the model's own tokenizer"
        )
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    if config.model_type in LEARNED_POSITIONS and length and input_ids.shape[1] > length:
        raise InputError(
            f"input_ids has {input_ids.shape[1]} tokens, but {type(model).__name__} has positions for {length}: "
            "shorten the prompt"
        )


def left_paddings(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """How many padding columns stand left of each row's prompt.

    Args:
        input_ids: `[B, L]`.
        attention_mask: `[B, L]` of 0 and 1, or None for no padding.

    Raises:
        UnsupportedArgumentError: every token of a row is masked, or one behind another that is not.
    """
    if attention_mask is None:
        return [0] * input_ids.shape[0]
    if attention_mask.shape != input_ids.shape:
        refuse(f"an attention_mask of shape {list(attention_mask.shape)}", "it must have one column a token")
    paddings = []
    for mask in attention_mask.tolist():
        if not any(mask):
            refuse("an attention_mask of zeros", "there is no text to continue")
        paddings.append(next(i for i, unmasked in enumerate(mask) if unmasked))
        if not all(mask[paddings[-1] :]):
            refuse("an attention_mask with gaps", "only padding on the left can be taken off")
    return paddings


def check_padding(model: PreTrainedModel, padding: int, max_length: int) -> None:
    """Refuse left padding where plain decoding counts it as text."""
    limit = padding_counts_from(model.config.get_text_config(decoder=True))
    if padding and limit is not None and max_length >= limit:
        refuse("left padding", f"from {limit} tokens on this model counts the padding; give the prompt without it")
    if padding and not is_listed(model) and counts_padding(model):
        refuse("left padding", "plain decoding counts it as text on this model; give the prompt without it")


def check_cache(cache: Any, paddings: Sequence[int], length: int) -> None:
    """Refuse a user's cache from which we cannot decode as plain decoding does.

    Args:
        cache: the user's; any other passes.
        paddings: `[B]`, of each prompt: there are no slots for padding, and rows of a batch would differ in length.
        length: L, columns of the prompts.
    """
    if not getattr(cache, "_is_user_defined", False):
        return
    if len(paddings) > 1:
        refuse("past_key_values for a batch", "its rows come to have lengths of their own; leave it out")
    if any(paddings):
        refuse("left padding with past_key_values", "our cache has no slots for padding; give the prompt without it")
    if reason := why_unfit(cache, length):
        refuse("past_key_values", reason)


def check_switch(runner: EagerRunner, prompt_length: int, max_length: int) -> None:
    """Refuse a text that crosses the length at which an old transformers loses it."""
    switch = runner.positions.longrope_switch
    if switch is not None and prompt_length <= switch < max_length and runner.drops_cache_wrongly():
        refuse(f"max_length={max_length}", f"beyond {switch} tokens this transformers loses the text: upgrade it")


def check_positions(position_ids: torch.Tensor, paddings: Sequence[int]) -> None:
    """Refuse `position_ids` `[B, L]` that do not count on from the first token that is no padding."""
    for row, padding in zip(position_ids, paddings, strict=True):
        given = row[padding:]
        if not torch.equal(given, torch.arange(given.shape[-1], device=given.device)):
            refuse("position_ids", "positions ahead of the text are known only where they count on from 0")
