"""A model with its tokenizer, as the shell has loaded it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lade.backends.cpu.invariant_marker import invariance_of
from lade.backends.cpu.packing import pack as packing
from lade.errors import InputError
from lade.hf.ids import placeholder_ids
from lade.model.config import LEARNED_POSITIONS
from lade.model.support.supports import unwrap


def _no_processor() -> Any:
    raise InputError("this model takes no images: leave them out")


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its tokenizer.

    Attributes:
        name: as the user gave it, or "embedded".
        model: a transformers causal language model; its generation_config decodes greedily.
        tokenizer: its tokenizer.
        checkpoint_defaults: what its checkpoint's generation_config has on sampling and beams; `model` lacks it.
        variant: how it was loaded, as far as that changes its texts; see `Loading.variant`.
        processor: loads what makes tensors of images, once; raises `InputError` where it has none.
    """

    name: str
    model: Any
    tokenizer: Any
    checkpoint_defaults: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, str] = field(default_factory=dict)
    processor: Callable[[], Any] = _no_processor

    @property
    def dtype(self) -> str:
        """Such as "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def packed(self) -> bool:
        """Whether any of its layers are prepacked for the CPU."""
        return packing.packed_layers(self.model) > 0

    @property
    def facts(self) -> dict[str, Any]:
        """What every `--json` says of it."""
        weights = packing.INT8 if packing.int8_layers(self.model) else None
        named = {"model": self.name, "dtype": self.dtype, "packed": self.packed}
        return {**named, "weights": weights, "invariant": self.invariant}

    @property
    def layout(self) -> str:
        """How its layers lie and round, to be put behind its dtype, such as ", int8, invariant"."""
        packed = ", int8" if packing.int8_layers(self.model) else ", packed" if self.packed else ""
        return packed + (", invariant" if self.invariant else "")

    @property
    def invariant(self) -> bool:
        """Whether it rounds alike in every pass."""
        return invariance_of(unwrap(self.model)) is not None

    @property
    def context(self) -> int | None:
        """Tokens the model was made for; None where it does not say."""
        config = self.model.config.get_text_config(decoder=True)
        length = getattr(config, "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def ends(self) -> bool:
        """Whether the model cannot run beyond its context at all, because it looks positions up in a table."""
        return self.model.config.get_text_config(decoder=True).model_type in LEARNED_POSITIONS

    def room(self, ids: list[int], max_new_tokens: int, *, within: bool = False) -> int:
        """How many of `max_new_tokens` can be generated; `within`: without leaving the context."""
        if self.context is None or not (within or self.ends):
            return max_new_tokens
        return min(max_new_tokens, self.context - len(ids) + (not within))  # the last token is not fed any more

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, special tokens included; see `check`."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        self.check(ids)
        return ids

    def check(self, ids: list[int]) -> None:
        """Raise `InputError` for ids that the model cannot continue."""
        if not ids:
            raise InputError("the prompt has no tokens: give a longer one")
        vocabulary = self.model.get_input_embeddings().num_embeddings
        largest = max(set(ids) - placeholder_ids(self.model), default=0)  # which stand for images
        if largest >= vocabulary:
            raise InputError(
                f"the tokenizer yields the id {largest}, but the model has a vocabulary of {vocabulary}: "
                f"{self.name!r} needs the tokenizer it was trained with"
            )
        if self.context and len(ids) >= self.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens, but the model's context holds {self.context}: shorten the prompt"
            )
