"""How far ahead of the text a tree may reach.

Window cells and guesses lie at positions that plain decoding has not reached yet. Two things must not notice them: a
table of learned positions, which ends, and rotary scalings that look at the longest position of a pass and switch all
frequencies (dynamic NTK at the model's length, longrope at the original one). So no tree crosses such a *wall*; the
token that crosses it is fed alone, as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "opt", "biogpt", "xglm", "openai-gpt"})
"""Families that look positions up in a table: beyond its end even plain decoding fails."""


@dataclass(frozen=True)
class Positions:
    """Walls of one model.

    Attributes:
        walls: positions, ascending: no tree crosses them, and the token that lies on one is fed alone. Beyond the
            last one every token is fed alone.
        switch: the wall at which longrope changes its frequencies; some models then compute the whole text anew.
    """

    walls: tuple[int, ...] = ()
    switch: int | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Positions:
        """Read them from the text config of a model."""
        length = getattr(config, "max_position_embeddings", None)
        switch = _longrope_switch(config)
        walls = sorted({wall for wall in (switch, length) if isinstance(wall, int)})
        return cls(tuple(walls), switch)

    def room(self, cached: int) -> int | None:
        """Greatest depth of a tree whose root lies at position `cached`; None where there is no wall."""
        if not self.walls:
            return None
        if cached in self.walls:
            return 0
        return next((wall - 1 - cached for wall in self.walls if cached < wall), 0)


def _longrope_switch(config: PretrainedConfig) -> int | None:
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]  # one dict a layer type
    for parameters in [rope, *nested]:
        if parameters.get("rope_type") == "longrope":
            switch = parameters.get("original_max_position_embeddings")
            return int(switch or getattr(config, "original_max_position_embeddings", config.max_position_embeddings))
    return None
