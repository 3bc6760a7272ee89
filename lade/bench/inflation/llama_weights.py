"""The weights of a Llama: how each of them grows, and what its new entries may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Axis = Literal["vocabulary", "hidden", "heads", "feed_forward", "head"]
"""What a dimension counts: tokens, hidden values, values of all heads, feed-forward values, values of one head."""

Filling = Literal["noise", "zeros", "ones"]


@dataclass(frozen=True)
class Part:
    """One kind of weight.

    Attributes:
        axes: what the dimensions of its weight count, outputs first; a bias has the first of them.
        filling: what its new entries hold. `zeros` where they would be added to the residual stream, `noise` where
            they read zeros or are read by zeros.
        norm: whether it is the norm of a hidden state.
    """

    axes: tuple[Axis, ...]
    filling: Filling
    norm: bool = False

    def grown(self, shape: Sequence[int], factor: int, intermediate_size: int) -> tuple[int, ...]:
        """The shape after widening; what counts tokens or the values of one head stays."""
        grow = {"hidden": factor, "heads": factor}
        return tuple(
            intermediate_size if axis == "feed_forward" else size * grow.get(axis, 1)
            for size, axis in zip(shape, self.axes, strict=False)  # a bias has fewer dimensions than axes
        )


_PROJECTION_IN = Part(("heads", "hidden"), "noise")
_FEED_FORWARD_IN = Part(("feed_forward", "hidden"), "noise")
_HIDDEN_NORM = Part(("hidden",), "ones", norm=True)
_HEAD_NORM = Part(("head",), "ones")

PARTS = {
    "embed_tokens": Part(("vocabulary", "hidden"), "zeros"),
    "q_proj": _PROJECTION_IN,
    "k_proj": _PROJECTION_IN,
    "v_proj": _PROJECTION_IN,
    "o_proj": Part(("hidden", "heads"), "zeros"),
    "gate_proj": _FEED_FORWARD_IN,
    "up_proj": _FEED_FORWARD_IN,
    "down_proj": Part(("hidden", "feed_forward"), "zeros"),
    "q_norm": _HEAD_NORM,
    "k_norm": _HEAD_NORM,
    "input_layernorm": _HIDDEN_NORM,
    "post_attention_layernorm": _HIDDEN_NORM,
    "norm": _HIDDEN_NORM,
    "lm_head": Part(("vocabulary", "hidden"), "noise"),
}
"""By the name of the module that holds the weight."""


def part_of(name: str) -> Part:
    """The part that a parameter belongs to.

    Args:
        name: as in `named_parameters`, for example `model.layers.0.mlp.up_proj.weight`.
    """
    return PARTS[name.split(".")[-2]]
