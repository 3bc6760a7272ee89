"""How many texts of a quantised model part from `model.generate` of the same model, if it were not refused.

    python scripts/quantised_texts.py --model FOLDER --prompts FILE.jsonl [--limit 12]

Needs torchao and bitsandbytes beside the project (`make test-quantised` puts them into `.venv-quantised`, for
PYTHONPATH). Where texts part, the gap is between the model's own scores of the two tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torchao import quantization as ao
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import lade
from lade.model.support import supports as support

Make = Callable[[Path, torch.dtype], Any]
BUDGET = 16


def by_torchao(config: Any) -> Make:
    def make(folder: Path, dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        if config is not None:
            ao.quantize_(model, config)
        return model

    return make


def by_bitsandbytes(kind: str) -> Make:
    def make(folder: Path, dtype: torch.dtype) -> Any:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)

    return make


WAYS = {
    "not quantised": by_torchao(None),
    "torchao, int8 weights": by_torchao(ao.Int8WeightOnlyConfig()),
    "bitsandbytes nf4": by_bitsandbytes("nf4"),
    "bitsandbytes fp4": by_bitsandbytes("fp4"),
    "torchao, int8 inputs, a scale for each token": by_torchao(ao.Int8DynamicActivationInt8WeightConfig()),
    "the same, 4-bit weights": by_torchao(
        ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32))
    ),
    "torchao, int8 inputs, one scale for all tokens": by_torchao(
        ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor())
    ),
}


@torch.no_grad()
def gap_of(model: Any, ids: torch.Tensor, new_tokens: int) -> float | None:
    """Between the scores of the two tokens where the texts part; None where they do not."""
    arguments = {"input_ids": ids, "max_new_tokens": new_tokens, "do_sample": False}
    plain = model.generate(**arguments)[0]
    ours = lade.generate(model, lookahead=lade.LookaheadConfig(budget=BUDGET), **arguments)[0]
    size = min(len(plain), len(ours))
    parted = (plain[:size] != ours[:size]).nonzero()
    if not len(parted):
        return None
    place = int(parted[0])
    scores = model(plain[None, :place]).logits[0, -1].float()
    return abs(float(scores[plain[place]] - scores[ours[place]]))


def main(
    model: Annotated[Path, typer.Option(help="folder of a causal language model")],
    prompts: Annotated[Path, typer.Option(help='JSON lines with a "prompt" each')],
    limit: Annotated[int, typer.Option(help="prompts")] = 12,
    new_tokens: Annotated[int, typer.Option(help="tokens to write for each")] = 100,
) -> None:
    support.linear_refusal = lambda model: ""  # what is refused is what is looked at
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = prompts.read_text(encoding="utf-8").splitlines()[:limit]
    ids = [tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids for line in lines]
    for name, make in WAYS.items():
        for dtype in (torch.float32, torch.bfloat16):
            loaded = make(model, dtype)
            gaps = [gap for gap in (gap_of(loaded, each, new_tokens) for each in ids) if gap is not None]
            told = f"{len(gaps)} of {len(ids)} part" + (f", gaps up to {max(gaps):.2g}" if gaps else "")
            print(f"{name}, {dtype}: {told}".replace("torch.", ""), flush=True)


if __name__ == "__main__":
    typer.run(main)
