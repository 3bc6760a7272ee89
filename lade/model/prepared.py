"""The inputs of one generation, as `model.generate` has prepared them: prompts, masks, special ids, media arguments.

    input_ids        0  0  5  9  7        -  -  -          embeddings instead of ids
    attention_mask   0  0  1  0  1        1  1  1
    text                   5     7        0  0  0          a placeholder id for each embedding

Padding on the left and gaps in the mask are not part of the text. Processors and criteria see the columns as given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from lade.errors import InputError, UnsupportedArgumentError
from lade.model.config import token_embeddings
from lade.model.facts import CACHE, ModelFacts
from lade.model.kv_cache import RowCache
from lade.model.registry import Role


class _Encoders(Protocol):
    def source_of(self, prepared: Prepared, number: int) -> list[int]: ...


class _UserCaches(Protocol):
    def can_borrow(self, cache: Any) -> bool: ...
    def lacks_indexer(self, cache: Any, facts: ModelFacts) -> bool: ...
    def unfit_reason(self, cache: Cache, length: int, max_length: int) -> str: ...
    def borrow(self, cache: Cache) -> RowCache: ...
    def prepare_for_plain(self, cache: Any, model: nn.Module) -> None: ...
    def output_cache(self, prepared: Prepared, ids: torch.Tensor, ours: Cache | None) -> Cache | None: ...


ENCODERS: Role[_Encoders] = Role("encoders")
USER_CACHES: Role[_UserCaches] = Role("user caches")


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return V, the number of token embeddings: smaller ids can be fed."""
    return int(token_embeddings(model).weight.shape[0])


def check_shape(input_ids: torch.Tensor) -> None:
    """Raise `InputError` unless the ids are `[B, L]` with at least one token."""
    if input_ids.ndim != 2 or torch.is_floating_point(input_ids):
        raise InputError(
            f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}: "
            "give ids as int64 [batch, length]"
        )
    if input_ids.shape[1] == 0:
        raise InputError("input_ids is empty: give at least one token, for instance the tokenizer's bos_token_id")


def special_ids(generation_config: GenerationConfig) -> set[int]:
    """Return the ids after which nothing is drafted: EOS and padding."""
    return ids_of(generation_config.eos_token_id) | ids_of(generation_config.pad_token_id)


def placeholder_ids(model: PreTrainedModel) -> set[int]:
    """Return the ids that stand for images, video and audio in a multimodal model's prompts, and never for text."""
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    return {value for name in names if isinstance(value := getattr(model.config, name, None), int)}


def ids_of(tokens: Any) -> set[int]:
    """Return one id, several or None, as `generate` takes them, as a set."""
    several = tokens.flatten().tolist() if isinstance(tokens, torch.Tensor) else tokens
    return {int(token) for token in (several if isinstance(several, list) else [several]) if token is not None}


MEDIA_PREFIXES = tuple(
    "pixel_ image video audio input_features input_values high_res_pixel_ mm_encoder_outputs".split()  # noqa: SIM905
)
"""Prefixes of the arguments of `generate` that hold images, video, audio or features of these."""
TOKEN_TYPE_ARGUMENTS = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
"""Token type arguments. In multimodal models 0 stands for text; in others such ids have embeddings of their own."""


def is_unset(value: Any) -> bool:
    """Return whether an argument has no effect, such as the `mm_encoder_outputs={}` of a text prompt."""
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def holds_media(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments of `generate`, as given or prepared, hold images, video or audio."""
    return any(name.startswith(MEDIA_PREFIXES) and not is_unset(value) for name, value in arguments.items())


def marks_only_text(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Return whether an argument of this name and value, `[B, L]`, merely marks all tokens of the prompt as text."""
    return _is_token_types(model, name, value) and not value.any()


def has_more_than_text(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Return whether a prompt has media inputs, or marks tokens as media whose features are cached already."""
    marked = (value.any() for name, value in arguments.items() if _is_token_types(model, name, value))
    return holds_media(arguments) or any(marked)


def _is_token_types(model: PreTrainedModel, name: str, value: Any) -> bool:
    if name not in TOKEN_TYPE_ARGUMENTS or not isinstance(value, torch.Tensor):
        return False
    return model.config.get_text_config(decoder=True) is not model.config  # else it is not multimodal


T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """The arguments that `model.generate(custom_generate=...)` passes to a callable; nothing has been fed yet.

    Attributes:
        model: the causal language model.
        input_ids: `[B, L]` int64, padded on the left; with beam search each prompt is repeated `num_beams` times.
        logits_processor, stopping_criteria: called once per emitted token.
        generation_config: the final, merged config.
        model_kwargs: attention mask, positions, cache and other arguments that `generate` prepared.
        wrapper: the model as the caller has it: a wrapper of PEFT or `torch.compile`, or `model` itself.
        inputs_tensor: input of the encoder of an encoder-decoder model, `[P, T]` ids or features; None if unknown.
        predictions: ids of the expected answer to each prompt, which drafts follow; empty for none.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    wrapper: Any
    inputs_tensor: torch.Tensor | None = None
    predictions: Sequence[Sequence[int]] = ()

    @property
    def positional(self) -> tuple[torch.Tensor, LogitsProcessorList, StoppingCriteriaList, GenerationConfig]:
        """The positional arguments of transformers' own decoding loops, after the model."""
        return self.input_ids, self.logits_processor, self.stopping_criteria, self.generation_config

    @cached_property
    def beams(self) -> int:
        """Number of beams per prompt; 1 without beam search."""
        return self.generation_config.num_beams or 1

    @cached_property
    def prompts(self) -> torch.Tensor:
        """The prompts, `[P, L]` int64: `input_ids` with each prompt once."""
        return self.input_ids[:: self.beams]

    @cached_property
    def vocabulary(self) -> int:
        """V, the number of token embeddings: smaller ids can be fed."""
        return vocabulary_of(self.model)

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts about the model, surveyed once per call."""
        return ModelFacts.of(self.model)

    def source_text(self, row: int) -> list[int]:
        """Return the ids that the encoder has read for one row, without padding; empty unless an encoder takes ids."""
        return ENCODERS.load().source_of(self, row) if self.facts.has_encoder else []

    @property
    def cache_name(self) -> str:
        """Name of the model's cache argument."""
        return self.facts.cache_name or CACHE

    @property
    def embeddings(self) -> torch.Tensor | None:
        """Input embeddings, `[P, L, H]`, that the decoder is fed instead of prompt ids; None if it is fed ids."""
        given: torch.Tensor | None = self.model_kwargs.get("inputs_embeds")
        return None if given is None or self.model.config.is_encoder_decoder else given[:: self.beams]

    @cached_property
    def user_cache(self) -> Cache | None:
        """The user's own; None for a cache made by transformers, which is empty."""
        cache: Any = self.model_kwargs.get(self.cache_name)
        return cache if getattr(cache, "_is_user_defined", False) else None

    @property
    def output_cache(self) -> Cache | None:
        """The empty cache that transformers has made for the output object; None where nobody gets it, or it cannot be
        filled: it holds states of recurrent layers, or is offloaded.
        """
        cache = self.model_kwargs.get(self.cache_name)
        wanted = self.user_cache is None and self.generation_config.return_dict_in_generate
        fits = wanted and not self.facts.recurrent and not self.facts.has_encoder
        return cache if fits and USER_CACHES.load().can_borrow(cache) else None


def custom_generate_for(
    use: Callable[[Prepared], T], wrapper: Any = None, predictions: Sequence[Sequence[int]] = ()
) -> Callable[..., T]:
    """Return a callable for `custom_generate=` that passes the inputs prepared by `model.generate` to `use`."""

    def custom_generate(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> T:
        arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        given_to = model if wrapper is None else wrapper
        return use(Prepared(*arguments, wrapper=given_to, inputs_tensor=inputs_tensor, predictions=predictions))

    return custom_generate


REMEDY = 'leave it out, use plain model.generate, or lookahead="auto", which falls back to it'
_PLACEHOLDER = 0
"""Stands in a text for each embedding that has no id; it is neither fed nor shown."""


@dataclass(frozen=True)
class PromptTexts:
    """The texts of P prompts, without padding.

    Attributes:
        ids: `[P]` lists of ids, one per text.
        columns: `[P]` sequences with the column of each id, ascending.
        width: L, the number of columns that plain decoding prefills.
        shown: number of columns that processors see: L, or 0 for embeddings without ids.
        padding: number of masked columns of the shortest text.
        has_gaps: whether any column is masked after one that is not.
    """

    ids: Sequence[list[int]]
    columns: Sequence[Sequence[int]]
    width: int
    shown: int
    padding: int = 0
    has_gaps: bool = False

    @classmethod
    def of(cls, prepared: Prepared) -> PromptTexts:
        """Extract the texts of a decoder's prompts.

        Raises:
            UnsupportedArgumentError: mask or embeddings do not match the ids.
        """
        prompts, kwargs, embeddings = prepared.prompts, prepared.model_kwargs, prepared.embeddings
        shown = width = prompts.shape[1]
        if embeddings is not None:
            width = embeddings.shape[1]
            if shown not in (0, width):
                refuse(f"inputs_embeds of {width} columns", f"input_ids have {shown} columns, which do not match")
            prompts = prompts if shown else prompts.new_full((len(prompts), width), _PLACEHOLDER)
        mask = kwargs.get("attention_mask")
        columns = _unmasked_columns(prompts, None if mask is None else mask[:: prepared.beams])
        ids = [[row[column] for column in seen] for row, seen in zip(prompts.tolist(), columns, strict=True)]
        padding = width - min(map(len, ids))
        has_gaps = padding > 0 and any(list(seen) != list(range(width - len(seen), width)) for seen in columns)
        return cls(ids, columns, width, shown, padding, has_gaps)

    @classmethod
    def without_padding(cls, prompts: torch.Tensor) -> PromptTexts:
        """Return the texts of prompts `[P, L]` without padding or gaps."""
        width = prompts.shape[1]
        return cls(prompts.tolist(), [range(width)] * len(prompts), width, width)

    def __len__(self) -> int:
        """Return P, the number of prompts."""
        return len(self.ids)

    @property
    def hidden(self) -> list[int]:
        """Columns that processors see of each prompt beyond its text, `[P]`; negative if they see fewer."""
        return [self.shown - len(text) for text in self.ids]


def _unmasked_columns(prompts: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Sequence[int]]:
    """Return the unmasked columns of each row of `[P, L]`, given its mask `[P, L]` of 0 and 1, or None for no mask."""
    rows, width = prompts.shape
    if attention_mask is None:
        return [range(width)] * rows
    if attention_mask.shape != prompts.shape:
        refuse(f"an attention_mask of shape {list(attention_mask.shape)}", "it must have one column per token")
    columns: list[Sequence[int]] = []
    for mask in attention_mask.tolist():
        if not any(mask):
            refuse("an attention_mask of zeros", "there is no text to continue")
        if not mask[-1]:
            refuse("an attention_mask that ends with 0", "plain decoding would continue after padding on the right")
        columns.append([column for column, seen in enumerate(mask) if seen])
    return columns


def refuse(what: str, why: str) -> None:
    """Raise `UnsupportedArgumentError` for an argument."""
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding: {why}", REMEDY)


def argument_of(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """Return a field of the final generation config: the argument if given, even None, else the value of a config."""
    if name in arguments:
        return arguments[name]
    configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def prompts_in(arguments: Mapping[str, Any]) -> Any:
    """Return the prompts among the arguments of `model.generate`, under any of their names; None if there are none."""
    names = "inputs", "input_ids", "inputs_embeds"
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)
