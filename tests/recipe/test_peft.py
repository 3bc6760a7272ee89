"""Models with adapters of PEFT, which calls the `generate` of the model inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerating import RECIPE, Way, accelerated
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import lade

# PEFT asks transformers for a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GREEDY = {"do_sample": False, "max_new_tokens": 40}


def with_adapter(folder: str, config: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()


@pytest.mark.slow
def test_a_lora_adapter(folder: str, way: Way, tokenizer: Any, text: str) -> None:
    targets = ["q_proj", "v_proj"]
    model = with_adapter(folder, LoraConfig(target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"))
    inputs = tokenizer(text, return_tensors="pt")

    def run(**further: Any) -> list[list[int]]:
        ids: list[list[int]] = model.generate(**inputs, **GREEDY, **further).tolist()
        return ids

    adapted = accelerated(way, model.get_base_model(), run)
    with model.disable_adapter():
        bare = accelerated(way, model.get_base_model(), run)
    assert adapted != bare, "the adapter does nothing"


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
def test_learned_tokens_before_the_prompt_are_decoded_plainly(folder: str, tokenizer: Any, text: str) -> None:
    model = with_adapter(folder, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    inputs = tokenizer(text, return_tensors="pt")
    expected = model.generate(**inputs, **GREEDY)
    with pytest.warns(lade.FallbackWarning, match="puts learned tokens before the prompt"):
        assert torch.equal(model.generate(**inputs, **GREEDY, **RECIPE), expected)
