"""Fields that differ from layer to layer, and the masks that a configuration asks for."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from lade.model.config import field, per_layer, window_too_short
from lade.model.inputs import FULL, chunked, plan_for, sliding

TYPES = ["sliding_attention", "full_attention"] * 2


def config(model_type: str = "gemma3_text", **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, num_hidden_layers=4, **fields)


def test_a_field_of_which_layers_have_values_of_their_own_is_a_list():
    uneven = config("gemma4_text", layer_types=TYPES, head_dim=8, global_head_dim=16)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        uneven.head_dim  # noqa: B018 - reading it is the test
    assert field(uneven, "head_dim") == per_layer(uneven, "head_dim") == [8, 16, 8, 16]
    assert field(uneven, "num_hidden_layers") == 4 and per_layer(uneven, "num_hidden_layers") == [4] * 4
    assert field(uneven, "nothing") is None and field(uneven, "nothing", 3) == 3


def test_each_layer_type_has_its_reach():
    plan = plan_for(config(layer_types=TYPES, sliding_window=12), by_layer_type=True)
    assert plan.spans == {"sliding_attention": sliding(12), "full_attention": FULL}
    types = ["chunked_attention", "full_attention"] * 2
    plan = plan_for(config("llama4_text", layer_types=types, attention_chunk_size=5), by_layer_type=True)
    assert plan.spans == {"chunked_attention": chunked(5), "full_attention": FULL}


@pytest.mark.parametrize(
    ("fields", "span"),
    [
        ({}, FULL),
        ({"sliding_window": 7}, sliding(7)),
        ({"attention_chunk_size": 7}, sliding(7)),  # the cache of plain decoding holds that much
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 7}, FULL),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 7}, sliding(7)),
    ],
)
def test_one_mask_for_all_layers(fields, span):
    assert plan_for(config("llama", **fields), by_layer_type=False).spans == {"attention": span}


@pytest.mark.parametrize("by_layer_type", [True, False])
def test_layers_that_would_need_several_masks_of_one_type(by_layer_type):
    windows = {1: {"sliding_window": 4}, 2: {"sliding_window": 6}}
    uneven = config("llama", layer_types=["sliding_attention"] * 4, sliding_window=6, per_layer_config=windows)
    with pytest.raises(ValueError, match=r"takes one mask for layers with different windows \(\['4', '6'\]\)"):
        plan_for(uneven, by_layer_type=by_layer_type)


def test_windows_that_are_too_short_are_named():
    assert window_too_short(config("llama")) == window_too_short(config("mistral", sliding_window=2)) == ""
    assert window_too_short(config("mistral", sliding_window=1)) == "sliding_window=1"
    full = config(layer_types=["full_attention"] * 4, sliding_window=1)
    assert window_too_short(full) == "", "no layer has it"
