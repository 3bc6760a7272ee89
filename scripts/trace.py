"""Follow a real run step by step: what each pass fed, who proposed it, and what the model confirmed.

    python scripts/trace.py --budget 14                       # the adaptive method, at most 14 tokens a step
    python scripts/trace.py --window 3 --ngram 3 --guesses 2  # the paper's method, at small sizes

The embedded model continues one of the built-in prompts greedily. Each step is printed as the tree that was fed: one
token a line, a child below its parent, then who proposed it; `*` marks what the model had chosen. The last choice of a
step, which needed no guess, is the root of the next one.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from lade import LookaheadConfig, Stats, Step
from lade.decoding.drafting.adaptive import drafter_for
from lade.decoding.drafting.drafter import Candidates, Draft, Drafter
from lade.decoding.tree import ROOT, TokenTree
from lade.embedded import model_path
from lade.hf.session import Session
from lade.model.prepared import custom_generate_for, special_ids
from lade_lab.workloads import load


class Recorder:
    """A drafter that keeps the last tree that another one drafted, and is otherwise that one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.tree = TokenTree(0)

    def candidates(self, context: list[int], max_depth: int | None) -> Candidates:
        """See `Drafter`."""
        return Candidates((), functools.partial(self.draft, context, max_depth))

    def draft(self, context: list[int], max_depth: int | None) -> Draft:
        """See `Drafter`."""
        draft = self._drafter.draft(context, max_depth)
        self.tree = draft.tree
        return draft

    def __getattr__(self, name: str) -> object:
        return getattr(self._drafter, name)


def steps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, config: LookaheadConfig
) -> Iterator[tuple[Step, TokenTree]]:
    """Every step with the tree that it fed; the first one is prefill, whose tree is empty."""
    recorder = Recorder(drafter_for(config, special_ids(model.generation_config), vocabulary=model.config.vocab_size))
    make = functools.partial(Session, config=config, stats=Stats(), drafter=recorder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    for step in model.generate(
        **inputs, max_new_tokens=200, do_sample=False, custom_generate=custom_generate_for(make)
    ):
        yield step, recorder.tree


def drawn(tree: TokenTree, step: Step, names: list[str]) -> Iterator[str]:
    """A tree as lines of text."""
    children: dict[int, list[int]] = {}
    for node in range(1, len(tree)):
        children.setdefault(tree.parents[node], []).append(node)
    chosen = {ROOT}
    node: int | None = ROOT
    for token in step.tokens:
        node = None if node is None else tree.child(node, token)
        chosen |= {node} if node is not None else set()

    def below(node: int, stem: str) -> Iterator[str]:
        for child in children.get(node, []):
            last = child == children[node][-1]
            mark = "*" if child in chosen else " "
            yield f"{mark} {stem}{'└─' if last else '├─'} {names[child]:<{34 - len(stem)}} {tree.sources[child]}"
            yield from below(child, stem + ("   " if last else "│  "))

    yield f"* {names[ROOT]}"
    yield from below(ROOT, "")


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    texts = {item.id: item.turns[0] for item in load("builtin").items}
    config = LookaheadConfig(budget=arguments.budget)
    if arguments.window is not None:
        config = LookaheadConfig(arguments.window, arguments.ngram, arguments.guesses)
    prompt = texts[arguments.prompt]
    print("\n".join(f"> {line}" for line in prompt.split("\n")[-3:]))
    for step, tree in steps(model, tokenizer, prompt, config):
        written = ", ".join(f"{tokenizer.decode(t)!r} ({s})" for t, s in zip(step.tokens, step.sources, strict=True))
        print(f"\nstep {step.index}: {step.fed} fed, {len(step.tokens)} written: {written}")
        if step.index:
            print("\n".join(line.rstrip() for line in drawn(tree, step, [repr(tokenizer.decode(t)) for t in tree.ids])))
        if step.index == arguments.steps:
            break


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Follow a run of the embedded model step by step.")
    parser.add_argument("--steps", type=int, default=8, help="how many to print, after prefill")
    parser.add_argument("--prompt", default="difflib.diff_bytes", help="id of a built-in prompt")
    parser.add_argument("--budget", type=int, default=14, help="tokens fed in a step by the adaptive method, at most")
    parser.add_argument("--window", type=int, help="W: columns of the window; the paper's method")
    parser.add_argument("--ngram", type=int, default=3, help="N: length of the n-grams")
    parser.add_argument("--guesses", type=int, default=2, help="G: guesses per step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
