"""Prompts of a file through Ray Data: python examples/ray_data.py IN.jsonl OUT_FOLDER [MODEL [ACTORS [MEMORY]]]."""

from __future__ import annotations

import sys
from typing import Any

import ray
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.embedded import model_path


class Predictor:
    """An engine, in an actor of its own; all actors begin with one memory of `lade warm`, if there is one."""

    def __init__(self, name: str, memory: str | None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.engine = lade.Engine(AutoModelForCausalLM.from_pretrained(name), max_rows=8, max_waiting=1024)
        kept = lade.Memory() if memory is None else lade.Memory.load(memory, self.tokenizer)
        self.lookahead = lade.LookaheadConfig(memory=kept)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Column `text` to column `prompt`: the texts of plain `model.generate`, in 16 bits up to near ties."""
        ids = [self.tokenizer(prompt).input_ids for prompt in batch["prompt"]]
        asked = {"max_new_tokens": 100, "do_sample": False, "lookahead": self.lookahead}
        answers = [handle.result()[0] for handle in [self.engine.add(each, **asked) for each in ids]]
        new = [answer[len(each) :] for answer, each in zip(answers, ids, strict=True)]
        return {**batch, "text": [self.tokenizer.decode(each, skip_special_tokens=True) for each in new]}


if __name__ == "__main__":
    source, out, name, actors, memory = [*sys.argv[1:], *[str(model_path()), "2", None][len(sys.argv) - 3 :]]
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=int(actors))
    prompts = ray.data.read_json(source).repartition(4 * int(actors))
    arguments = {"fn_constructor_args": (name, memory), "batch_size": 16, "compute": pool, "num_cpus": 0.5}
    prompts.map_batches(Predictor, **arguments).write_json(out)  # half a core is booked: reading and writing want some
