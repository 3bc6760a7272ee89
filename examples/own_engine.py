"""An engine of one's own, with drafts of `lade.EngineDrafter`: python examples/own_engine.py."""

from __future__ import annotations

from time import perf_counter

import torch
from comparison import DTYPE, MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.embedded import prompts

model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPE), AutoTokenizer.from_pretrained(MODEL)
drafter = lade.EngineDrafter(model.config.vocab_size)


@torch.inference_mode()
def generate(texts: dict[str, list[int]], count: int, most: int) -> int:
    """Append `count` tokens to each text, greedily; return the number of passes. No KV cache, to be short."""
    ends = {name: len(text) + count for name, text in texts.items()}
    for name, text in texts.items():
        drafter.begin(name, text)
    passes = 0
    while running := [name for name, text in texts.items() if len(text) < ends[name]]:
        start, fed, emitted = perf_counter(), 0, 0
        drafts = drafter.propose(running, [min(most, ends[name] - len(texts[name]) - 1) for name in running])
        for name, draft in zip(running, drafts, strict=True):
            text = texts[name]
            logits = model(torch.tensor([[*text, *draft.ids]])).logits[0, len(text) - 1 :]  # [1 + N, V]
            choices, accepted = logits.argmax(-1).tolist(), 0
            while accepted < len(draft) and draft.ids[accepted] == choices[accepted]:
                accepted += 1
            drafter.learn(name, choices[: accepted + 1], drafter.read_rows(logits))
            text += choices[: accepted + 1]
            fed, emitted = fed + len(choices), emitted + accepted + 1
        drafter.observe(fed, emitted, perf_counter() - start)
        passes += 1
    for name in texts:
        drafter.end(name)
    return passes


results = []
for most in (0, 8):  # without drafts, and with them
    texts = {f"request {number}": tokenizer(prompt).input_ids for number, prompt in enumerate(prompts()[:2])}
    results.append((generate(texts, 60, most), texts))
(plain, expected), (drafted, texts) = results
print(f"{'the same' if texts == expected else 'OTHER'} tokens, {plain} passes without drafts and {drafted} with them")
