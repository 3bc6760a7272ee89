"""Tokens per second beside llama.cpp's plain decoding, at the same shape, on the same machine, arm by arm in turn.

    python lab/experiments/beside_llama.py --model FOLDER --prompts FILE.jsonl --inflate 500e6 --threads 1 \
        --llama-bench PATH --gguf bf16.gguf --gguf q8_0.gguf --gguf q4_0.gguf
    python lab/experiments/beside_llama.py -m model.gguf --prompts FILE.jsonl --threads 1 --llama-bench PATH

A GGUF file is read by both, as it is, and prompts pass through its chat template, if it has one. `write_gguf.py`
beside this file makes the GGUF files; without any the other arms are timed alone. At every prompt the bandwidth of
memory is measured, too, and each arm writes the same number of tokens, another one first each time; prefill does not
count. "kept" is the adaptive method whose memory has learned from answers to prompts that are not timed: the small
model writes them, which computes the same function; in int4 it is packed likewise, so that the answers are those of
rounded weights. A checkpoint with an MTP layer of its own has that grown, too, and arms "no layer" without it.

Where a model is invariant, in int8 and int4 always, the texts must be those of its plain decoding. In bfloat16 as it
is they may part at near ties; how many do is told.
"""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade_lab.harness.arms import OwnArm, TransformersArm
from lade_lab.harness.methods import parse
from lade_lab.inflated_layer import FILE, inflate_layer
from lade_lab.inflation import inflate

OWN = {"plain": "plain", "adaptive": "adaptive", "kept": "adaptive-warm"}
ARGUMENTS = {"do_sample": False, "num_beams": 1, "eos_token_id": None}
GIB = 2**30
MODELS = ("bf16", "invariant bf16", "int8", "int4")


def packed(small: Any, params: float, dtype: str, weights: str | None = None) -> Any:
    """The inflated model, packed, with its MTP layer if the small one's checkpoint has one."""
    large = inflate(small, params, dtype=getattr(torch, dtype))
    if has_layer(small):
        inflate_layer(small, large, Path(tempfile.mkdtemp(prefix="layer-")))
    return lade.pack(large, weights=weights)


def has_layer(small: Any) -> bool:
    """True for a model whose checkpoint has an MTP layer of its own."""
    return (Path(small.config.name_or_path) / FILE).is_file()


def arms_of(small: Any, params: float, int8_dtype: str, wanted: list[str]) -> dict[str, Any]:
    """All arms of this library and of transformers, with these models."""
    models: dict[str, Any] = {}
    try:
        for name in wanted:
            integers = name in ("int8", "int4")
            model = packed(small, params, int8_dtype if integers else "bfloat16", name if integers else None)
            models[name] = model if name == "bf16" else lade.invariant(model)  # else nobody can guess texts of integers
    except lade.UnsupportedError as refusal:
        print(f"not invariant, or no integers: {refusal}")
    arms: dict[str, Any] = {}
    if "bf16" in wanted:
        dense = inflate(small, params, dtype=torch.bfloat16)
        arms["model.generate, bf16"] = TransformersArm(parse("hf"), dense, ARGUMENTS)
    for name, model in models.items():
        arms |= {f"{name} {arm}": OwnArm(parse(kind), model, ARGUMENTS) for arm, kind in OWN.items()}
        if has_layer(small):
            arms[f"{name} no layer"] = OwnArm(replace(parse("adaptive"), config={"mtp": False}), model, ARGUMENTS)
            kept = replace(parse("adaptive-warm"), config={"mtp": False})
            arms[f"{name} kept, no layer"] = OwnArm(kept, model, ARGUMENTS)
    return arms


def arms_of_file(model: Any) -> dict[str, Any]:
    """The arms of a model from a GGUF file."""
    model = lade.invariant(model)
    return {f"file {arm}": OwnArm(parse(kind), model, ARGUMENTS) for arm, kind in OWN.items()}


def read(model: str) -> tuple[Any, Any]:
    """A model and its tokenizer, from a folder, the hub or a GGUF file."""
    if model.endswith(".gguf"):
        return lade.load_gguf(model)
    small: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return small, AutoTokenizer.from_pretrained(model)


def encoded(tokenizer: Any, prompt: str, *, templated: bool) -> list[int]:
    """The ids of a prompt, as a user's message if it is `templated`."""
    if not (templated and tokenizer.chat_template):
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])


def teach(small: Any, arms: dict[str, Any], prompts: list[list[int]], tokens: int) -> None:
    """Fill the memories that are kept."""
    in_int4 = lade.pack(copy.deepcopy(small), weights="int4", min_weights=1) if "int4 kept" in arms else None
    for name, arm in arms.items():
        if arm.memory is not None:
            teacher = lade.invariant(in_int4) if in_int4 is not None and name == "int4 kept" else small
            config = lade.LookaheadConfig(budget=16, memory=arm.memory)
            for prompt in prompts:
                ids = torch.tensor([prompt])
                lade.generate(teacher, input_ids=ids, lookahead=config, max_new_tokens=tokens, **ARGUMENTS)


def bandwidth(block: torch.Tensor) -> float:
    """Bytes per second at which memory is read."""
    start = perf_counter()
    block.sum()
    return block.nbytes / (perf_counter() - start)


def of_llama(program: Path, gguf: Path, threads: int, tokens: int) -> float:
    """Tokens per second of `llama-bench`, without a prompt."""
    command = [program, "-m", gguf, "-p", "0", "-n", tokens, "-t", threads, "-r", "1", "-ngl", "0", "-o", "json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def plain_of(name: str) -> str:
    """The arm whose texts an arm has to write."""
    for model in ("int8", "int4", "invariant bf16", "file"):
        if name.startswith(model):
            return f"{model} plain"
    return "bf16 plain"


def check(number: int, texts: dict[str, list[list[int]]]) -> None:
    """Raise `SystemExit` if an invariant model wrote another text at the last prompt than plainly."""
    for name, written in texts.items():
        plain = plain_of(name)
        if plain != "bf16 plain" and written[-1] != texts[plain][-1]:
            raise SystemExit(f"prompt {number}: {name} parts from {plain}")


def report(rates: dict[str, list[float]], texts: dict[str, list[list[int]]], fed: dict[str, list[float]]) -> None:
    """A line for each arm: median and quarters, tokens per step, and how many texts are not plain's."""
    for name, found in rates.items():
        low, middle, high = quantiles(found, n=4) if len(found) > 1 else found * 3
        line = f"{name:24} {middle:6.1f} ({low:.1f} to {high:.1f})"
        if name in texts:
            parted = sum(one != other for one, other in zip(texts[name], texts[plain_of(name)], strict=True))
            line += f"  S {fmean(fed[name]):.2f}  {parted} of {len(found)} texts part from plain's"
        print(line)


def main(
    model: Annotated[str, typer.Option("--model", "-m", help="folder or hub id of a Llama, or a GGUF file")],
    prompts: Annotated[Path, typer.Option(help='JSON lines with a "prompt" each')],
    params: Annotated[float, typer.Option("--inflate", help="parameters to grow it to")] = 500e6,
    threads: int = 1,
    limit: Annotated[int, typer.Option(help="prompts that are timed")] = 4,
    earlier: Annotated[int, typer.Option(help="prompts behind them that kept memories have learned from")] = 24,
    new_tokens: int = 64,
    int8_dtype: Annotated[str, typer.Option(help="of what is not in int8 or int4 there")] = "float32",
    only: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(MODELS)}; may be repeated")] = None,
    llama_bench: Annotated[Path | None, typer.Option(help="program of llama.cpp")] = None,
    gguf: Annotated[list[Path] | None, typer.Option(help="file for it; may be repeated")] = None,
) -> None:
    torch.set_num_threads(threads)
    small, tokenizer = read(model)
    is_file = model.endswith(".gguf")
    lines = prompts.read_text(encoding="utf-8").splitlines()[: limit + earlier]
    ids = [encoded(tokenizer, json.loads(line)["prompt"], templated=is_file) for line in lines]
    if is_file:
        arms, gguf = arms_of_file(small), [Path(model)] if llama_bench is not None else []
    else:
        arms = arms_of(small, params, int8_dtype, only or list(MODELS))
    block = torch.ones(GIB // 4)
    teach(small, arms, ids[limit:], 2 * new_tokens)
    rates: dict[str, list[float]] = {"memory, GB/s": []} | {str(file): [] for file in gguf or []}
    rates |= {name: [] for name in arms}
    texts: dict[str, list[list[int]]] = {name: [] for name in arms}
    fed: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for arm in arms.values():
        arm.complete(ids[-1], 0, 8)
    for number, prompt in enumerate(ids[:limit]):
        rates["memory, GB/s"].append(max(bandwidth(block) for _ in range(2)) / 1e9)
        for file in gguf or []:
            assert llama_bench is not None
            rates[str(file)].append(of_llama(llama_bench, file, threads, new_tokens))
        for name in names[number % len(names) :] + names[: number % len(names)]:
            done = arms[name].complete(prompt, 0, new_tokens)
            rates[name].append((new_tokens - 1) / done.stats.decode_s)
            texts[name].append(done.tokens)
            fed[name].append(done.stats.tokens_per_step)
        check(number, texts)
        told = [f"{name} {found[-1]:.1f}" for name, found in rates.items()]
        told += [f"{name} S {found[-1]:.2f}" for name, found in fed.items()]
        print(f"prompt {number}: {', '.join(told)}", flush=True)
    report(rates, texts, fed)


if __name__ == "__main__":
    typer.run(main)
