"""A prompt as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lade.server.errors import invalid


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        ids: of its tokens.
        media: the other arguments of `generate`: pixels, and what says where they belong.
        text: as the model sees it, special tokens included, where something depends on that.
    """

    ids: list[int]
    media: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def check_ids(self, vocabulary: int) -> None:
        """Raise `ApiError` where it has no tokens, or one that cannot be fed.

        Args:
            vocabulary: V; placeholders of images may be above it.
        """
        if not self.ids:
            raise invalid(None, "the prompt has no tokens: send a longer one")
        if max(self.ids) >= vocabulary and not self.media:
            raise invalid("prompt", f"the prompt has the id {max(self.ids)}: give ids below {vocabulary}")
