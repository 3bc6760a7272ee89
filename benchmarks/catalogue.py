"""All benchmarks of this folder with their settings: what `run.py` runs, and what the tables tell of."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
METHODS = "hf,hf-prompt-lookup,plain,lookahead,adaptive=8,adaptive=16,adaptive,adaptive-warm"
CHAT, CODE, MATHS = "mt_bench/question.jsonl", "human_eval/HumanEval.jsonl", "gsm8k/test.jsonl"
"""Prompts of the lookahead paper: files below the folder of the data."""
SMOLLM2 = "SmolLM2-135M-Instruct.gguf"


@dataclass(frozen=True)
class Benchmark:
    """One call of `lade bench`, with one folder for what it finds.

    Attributes:
        name: of the folder, and on the command line.
        question: what it asks, in a few words.
        options: of the command.
        minutes: about how long it takes on two cores of a Zen 5 processor.
        model: file below the folder of the models; none for the model that the project has.
        prompts: files below the folder of the data; none for the prompts that the project has.
        command: `bench`, or `bench scaling`.
    """

    name: str
    question: str
    options: str
    minutes: float
    model: str = ""
    prompts: tuple[str, ...] = ()
    command: str = "bench"

    @property
    def results(self) -> Path:
        """The file with what was found, relative to the folder of all benchmarks."""
        return Path(self.name) / ("scaling.json" if self.command == "bench scaling" else "results.json")

    def words(self, models: Path, data: Path, out: Path) -> list[str]:
        """The arguments of `lade`.

        Args:
            models: folder of the models.
            data: folder of the prompts.
            out: folder for the results.
        """
        subject = ["--model", str(models / self.model)] if self.model else []
        for file in self.prompts:
            subject += ["--prompts", str(data / file)]
        own = shlex.split(self.options)
        return [*shlex.split(self.command), *subject, *own, "--out", str(out), "--figures", "--resume"]


def _real(name: str, model: str, what: str, minutes: float, options: str = "") -> Benchmark:
    shared = f"--methods {METHODS} --limit 4 --max-new-tokens 128 {options}"
    return Benchmark(name, what, shared, minutes, model, (CHAT, CODE, MATHS))


def _sampled(temperature: float) -> Benchmark:
    return Benchmark(
        f"sampling/temperature-{temperature:.1f}",
        f"SmolLM2-135M, drawn at temperature {temperature:.1f}, two seeds",
        f"--temperature {temperature} --seed 0,1 --limit 2 --max-new-tokens 128 "
        "--methods hf,plain,lookahead,adaptive,adaptive-warm",
        1,
        SMOLLM2,
        (CHAT, CODE, MATHS),
    )


BENCHMARKS = [
    Benchmark(
        "embedded-code",
        "the model that comes with the project, at its own size: what `lade bench` shows without options",
        "--threads 1 --dtype float32 --no-pack --max-new-tokens 128",
        2,
    ),
    _real("smollm2-135m", SMOLLM2, "SmolLM2-135M-Instruct, Q4_1: chat, code and maths", 2),
    _real(
        "qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct.gguf", "the same of Qwen2.5-Coder-0.5B-Instruct, Q4_K_M", 5
    ),
    _real("gemma-3-270m", "gemma-3-270m.gguf", "the same texts, continued by gemma-3-270m, a base model", 3, "--raw"),
    _sampled(0.7),
    _sampled(1.0),
    Benchmark(
        "scaling",
        "the paper's scaling law: tokens per step against the logarithm of the tokens fed",
        "--threads 1 --limit 2 --max-new-tokens 64 --windows 1,2,4,8,16 --ngrams 3,5",
        4,
        SMOLLM2,
        (MATHS,),
        "bench scaling",
    ),
]
