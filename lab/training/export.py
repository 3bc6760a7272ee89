"""Writing a trained model as a folder that `from_pretrained` loads: bf16 weights, configuration, tokenizer."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.tokens import BOS_ID, EOS_ID, PAD_ID


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Write `model` in bf16 and `tokenizer` to `folder` and return the size of the weights in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    small = copy.deepcopy(model).bfloat16()
    small.config.dtype = torch.bfloat16
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    small.generation_config = GenerationConfig.from_dict(ids)
    small.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _name_tokenizer_class(folder / "tokenizer_config.json")
    weights = folder / "model.safetensors"
    weights.chmod(0o644)  # safetensors writes for the owner alone, but a package is read by everybody
    return weights.stat().st_size


def _name_tokenizer_class(path: Path) -> None:
    """Name the class that every transformers release knows, and nothing of this machine."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    for private in ("backend", "is_local", "local_files_only"):
        settings.pop(private, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
