"""The inputs of one generation, as `model.generate` has prepared them: prompts, masks, special ids, media arguments.

    input_ids        0  0  5  9  7        -  -  -          embeddings instead of ids
    attention_mask   0  0  1  0  1        1  1  1
    text                   5     7        0  0  0          any id stands for an embedding

Padding on the left and gaps are no text. Processors and criteria are shown the columns as they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from lade.errors import UnsupportedArgumentError
from lade.model import joint
from lade.model.config import token_embeddings
from lade.model.facts import ModelFacts


def vocabulary_of(model: PreTrainedModel) -> int:
    """V: ids below it can be fed."""
    return int(token_embeddings(model).weight.shape[0])


def special_ids(generation_config: GenerationConfig) -> set[int]:
    """Ids after which nothing is drafted: end of sequence and padding."""
    return ids_of(generation_config.eos_token_id) | ids_of(generation_config.pad_token_id)


def placeholder_ids(model: PreTrainedModel) -> set[int]:
    """Ids that stand for images, videos and sounds in the prompts of a multimodal model; no text has them."""
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    return {value for name in names if isinstance(value := getattr(model.config, name, None), int)}


def ids_of(tokens: Any) -> set[int]:
    """One id, several, or None, as `generate` takes them."""
    several = tokens.flatten().tolist() if isinstance(tokens, torch.Tensor) else tokens
    return {int(token) for token in (several if isinstance(several, list) else [several]) if token is not None}


NAMES = ("pixel_", "image", "video", "audio", "input_features", "input_values", "high_res_pixel_", "mm_encoder_outputs")
"""How arguments of `generate` begin that hold pictures, films, sounds, or what was made of them."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""That are opened. Pillow knows dozens more; for EPS it has Ghostscript run the program that such a file is."""
KINDS_OF_TOKENS = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
"""In multimodal models 0 stands for text. In others such ids have embeddings of their own."""


def names_media(name: str) -> bool:
    """Whether an argument of that name holds anything else than text."""
    return name.startswith(NAMES)


def is_empty(value: Any) -> bool:
    """Whether an argument is as good as left out, such as the `mm_encoder_outputs={}` of a text prompt."""
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def holds_media(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of `generate`, or what it made of them, hold images, videos or sounds."""
    return any(names_media(name) and not is_empty(value) for name, value in arguments.items())


def says_text(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an argument only says that all tokens of the prompt are text.

    Args:
        model: the causal language model.
        name: name of the argument.
        value: its value, `[B, L]`.
    """
    return _says_kinds(model, name, value) and not value.any()


def has_more_than_text(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether a prompt has more than text in it, or only says so of some tokens, whose features are cached already.

    Args:
        model: the causal language model.
        arguments: what `generate` has prepared.
    """
    marked = (value.any() for name, value in arguments.items() if _says_kinds(model, name, value))
    return holds_media(arguments) or any(marked)


def _says_kinds(model: PreTrainedModel, name: str, value: Any) -> bool:
    if name not in KINDS_OF_TOKENS or not isinstance(value, torch.Tensor):
        return False
    return model.config.get_text_config(decoder=True) is not model.config  # else it is not multimodal


T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """The arguments that `model.generate(custom_generate=...)` passes to a callable; nothing has been fed yet.

    Attributes:
        model: the causal language model.
        input_ids: `[B, L]` int64, padded on the left; with beams each prompt stands there `num_beams` times.
        logits_processor: called once per emitted token.
        stopping_criteria: called once per emitted token.
        generation_config: the final, merged one.
        model_kwargs: attention mask, positions, cache and whatever else `generate` prepared.
        wrapper: the model as the caller has it: a wrapper of PEFT or `torch.compile`, or `model` itself.
        inputs_tensor: what the encoder of an encoder-decoder model was fed, `[P, T]` ids or anything else; None where
            it is not known.
        predictions: ids of the text that the answer to each prompt is expected to follow; empty where none is.
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
        """What transformers' own loops take after the model."""
        return self.input_ids, self.logits_processor, self.stopping_criteria, self.generation_config

    @property
    def beams(self) -> int:
        """Beams per prompt; 1 without beam search."""
        return self.generation_config.num_beams or 1

    @property
    def prompts(self) -> torch.Tensor:
        """`[P, L]` int64: `input_ids` with each prompt once."""
        return self.input_ids[:: self.beams]

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model is made of; looked at once a call."""
        return ModelFacts.of(self.model)

    def source_text(self, row: int) -> list[int]:
        """Return the ids that an encoder has read for one row, without padding; empty without an encoder of such ids.

        Args:
            row: its number among all that are decoded.
        """
        if not self.facts.has_encoder:
            return []
        ids: list[int] = joint.load("encoder_decoder").source_of(self, row)
        return ids

    @property
    def cache_name(self) -> str:
        """Under which name the model takes its cache."""
        return self.facts.cache_name or "past_key_values"

    @property
    def embeddings(self) -> torch.Tensor | None:
        """`[P, L, H]`, what a decoder is fed in place of the ids of its prompts; None where it is fed ids."""
        given: torch.Tensor | None = self.model_kwargs.get("inputs_embeds")
        return None if given is None or self.model.config.is_encoder_decoder else given[:: self.beams]

    @property
    def user_cache(self) -> Cache | None:
        """The `past_key_values` that the user gave; None for a cache that transformers made, which is empty."""
        cache: Any = self.model_kwargs.get(self.cache_name)
        return cache if getattr(cache, "_is_user_defined", False) else None


def preparing(
    use: Callable[[Prepared], T], wrapper: Any = None, predictions: Sequence[Sequence[int]] = ()
) -> Callable[..., T]:
    """The callable for `custom_generate=` that passes what `model.generate` has prepared to `use`.

    Args:
        use: its result is what `model.generate` returns.
        wrapper: see `Prepared`; None for the model itself.
        predictions: see `Prepared`.
    """

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
_STAND_IN = 0
"""The id in a text whose embeddings alone are given; it is neither fed nor shown."""


@dataclass(frozen=True)
class PromptTexts:
    """The texts of P prompts.

    Attributes:
        ids: `[P]`, of each text.
        columns: `[P]`, those that it stands in, ascending.
        width: L, columns that plain decoding prefills.
        shown: columns that processors are shown: L, or 0 where there are embeddings alone.
    """

    ids: Sequence[list[int]]
    columns: Sequence[Sequence[int]]
    width: int
    shown: int

    @classmethod
    def of(cls, prepared: Prepared) -> PromptTexts:
        """Those of a decoder's prompts.

        Raises:
            UnsupportedArgumentError: the mask or the embeddings are none that ids could stand for.
        """
        prompts, kwargs, embeddings = prepared.prompts, prepared.model_kwargs, prepared.embeddings
        shown = width = prompts.shape[1]
        if embeddings is not None:
            width = embeddings.shape[1]
            if shown not in (0, width):
                _refuse(f"inputs_embeds of {width} columns", f"input_ids have {shown}, and stand for others")
            prompts = prompts if shown else prompts.new_full((len(prompts), width), _STAND_IN)
        mask = kwargs.get("attention_mask")
        columns = _unmasked(prompts, None if mask is None else mask[:: prepared.beams])
        ids = [[row[column] for column in seen] for row, seen in zip(prompts.tolist(), columns, strict=True)]
        return cls(ids, columns, width, shown)

    @classmethod
    def without_padding(cls, prompts: torch.Tensor) -> PromptTexts:
        """Those of prompts `[P, L]` that are text in all columns."""
        width = prompts.shape[1]
        return cls(prompts.tolist(), [range(width)] * len(prompts), width, width)

    def __len__(self) -> int:
        """P."""
        return len(self.ids)

    @property
    def hidden(self) -> list[int]:
        """`[P]`, how many columns more than its text processors are shown of a prompt; fewer are less than 0."""
        return [self.shown - len(text) for text in self.ids]

    @property
    def padding(self) -> int:
        """Columns that the model does not see of the shortest text."""
        return self.width - min(map(len, self.ids))

    @property
    def has_gaps(self) -> bool:
        """Whether columns are masked after others that are not."""
        return any(list(seen) != list(range(self.width - len(seen), self.width)) for seen in self.columns)


def _unmasked(prompts: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Sequence[int]]:
    """The columns that each row of `[P, L]` shows, given its mask `[P, L]` of 0 and 1, or None for all."""
    rows, width = prompts.shape
    if attention_mask is None:
        return [range(width)] * rows
    if attention_mask.shape != prompts.shape:
        _refuse(f"an attention_mask of shape {list(attention_mask.shape)}", "it must have one column a token")
    columns: list[Sequence[int]] = []
    for mask in attention_mask.tolist():
        if not any(mask):
            _refuse("an attention_mask of zeros", "there is no text to continue")
        if not mask[-1]:
            _refuse("an attention_mask that ends with 0", "plain decoding then begins after padding on the right")
        columns.append([column for column, seen in enumerate(mask) if seen])
    return columns


def _refuse(what: str, why: str) -> None:
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding: {why}", REMEDY)


PROMPTS = ("inputs", "input_ids", "inputs_embeds")


def argument_of(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """A field of the final generation_config: an argument, None included, or what a config says."""
    if name in arguments:
        return arguments[name]
    configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def prompts_in(arguments: Mapping[str, Any]) -> Any:
    """The prompts as `model.generate` is given them, under whatever name; None without any."""
    return next((arguments[name] for name in PROMPTS if arguments.get(name) is not None), None)
