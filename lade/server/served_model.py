"""A loaded model as a server needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lade.config import Lookahead
from lade.hf.ids import ids_of, vocabulary_of
from lade.model.support.supports import unwrap


@dataclass(frozen=True)
class ServedModel:
    """A model, its tokenizer, and what its checkpoint says about choosing tokens.

    Attributes:
        model: a transformers causal language model; its generation_config decodes greedily.
        tokenizer: its tokenizer, with the chat template that is to be used, if any.
        sampling: what its checkpoint says about drawing tokens, by the names of `model.generate`.
        context: tokens it was made for; None where it does not say.
        lookahead: how requests are drafted that do not say.
        encode_images: makes ids, and the other arguments of `generate`, of messages with images, arguments for their
            template, and what is called with their text before that is tokenised; None where it takes none.
        save: keeps what was learned, and raises `LadeError` where it cannot; None where nothing is to be kept.
        close: is called when the server has ended.
    """

    model: Any
    tokenizer: Any
    sampling: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None
    lookahead: Lookahead = "auto"
    encode_images: Callable[..., tuple[list[int], Mapping[str, Any]]] | None = None
    save: Callable[[], None] | None = None
    close: Callable[[], None] = lambda: None

    @property
    def chat_template(self) -> str:
        """As text; "" where there is none."""
        template = getattr(self.tokenizer, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def vocabulary(self) -> int:
        """V: ids below it can be fed."""
        return vocabulary_of(unwrap(self.model))

    @property
    def ends(self) -> list[int]:
        """Ids that end a text."""
        return sorted(ids_of(self.model.generation_config.eos_token_id))
