"""A prompt as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
