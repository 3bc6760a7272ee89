"""Fields of a configuration, also of one whose layers have values of their own."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


def field(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    """The value of a field.

    Args:
        config: the text config of a model.
        name: name of the field.
        default: value for configs that have no such field.

    Returns:
        One value, or a list of the layers' values where they differ: transformers raises an error if such a field
        (`head_dim` of Gemma 4) is read from the model's config.
    """
    try:
        return getattr(config, name, default)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError, which not every version has
        return [getattr(layer, name, default) for layer in config.per_layer_config]


def per_layer(config: PretrainedConfig, name: str) -> list[Any]:
    """The value of a field in each layer; None where there is no such field."""
    value = field(config, name)
    layers = field(config, "num_hidden_layers") or 1
    return value if isinstance(value, list) and len(value) == layers else [value] * layers
