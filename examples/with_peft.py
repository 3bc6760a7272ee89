"""A LoRA adapter of PEFT: python examples/with_peft.py [MODEL [ADAPTER]]."""

from __future__ import annotations

import sys
from typing import Any

import torch
from comparison import DTYPE, MODEL, compare
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade.embedded import prompts

base, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPE), AutoTokenizer.from_pretrained(MODEL)
if len(sys.argv) > 2:
    model = PeftModel.from_pretrained(base, sys.argv[2])
else:  # an adapter that was never trained: random numbers, which change the text
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config).eval()
inputs = tokenizer(prompts()[0], return_tensors="pt").to(base.device)


def run(**further: Any) -> str:
    """PEFT passes on everything to the `generate` of the model inside, whose layers have the adapter's."""
    ids = model.generate(**inputs, max_new_tokens=120, do_sample=False, **further)
    text: str = tokenizer.decode(ids[0], skip_special_tokens=True)
    return text


compare(run)
