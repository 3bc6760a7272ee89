"""All benchmarks of this folder with their settings: what `run.py` runs, and what the tables tell of."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).resolve().parent
ALL_METHODS = "hf,hf-prompt-lookup,plain,lookahead,adaptive,adaptive-warm"


@dataclass(frozen=True)
class Benchmark:
    """One call of `lade bench`, with one folder for what it finds.

    Attributes:
        name: of the folder, and on the command line.
        model: `stories`, given on the command line with its prompts, or `embedded`, which the project has.
        question: what it asks, in a few words.
        options: of the command.
        minutes: about how long it takes on two cores of a Zen 4 processor.
        command: `bench`, or `bench scaling`.
    """

    name: str
    model: Literal["stories", "embedded"]
    question: str
    options: str
    minutes: float
    command: str = "bench"

    @property
    def results(self) -> Path:
        """The file with what was found, relative to the folder of all benchmarks."""
        return Path(self.name) / ("scaling.json" if self.command == "bench scaling" else "results.json")

    def words(self, stories: str, prompts: str, out: Path) -> list[str]:
        """The arguments of `lade`.

        Args:
            stories: folder of the model that writes stories.
            prompts: file with its prompts.
            out: folder for the results.
        """
        subject = ["--model", stories, "--prompts", prompts] if self.model == "stories" else []
        return [
            *shlex.split(self.command),
            *subject,
            *shlex.split(self.options),
            "--out",
            str(out),
            "--figures",
            "--resume",
        ]


def _inflated(
    params: int, dtype: Literal["bfloat16", "float32"], limits: str, minutes: float, *, invariant: bool = False
) -> list[Benchmark]:
    """Both models at the cost of a larger one.

    Args:
        params: in millions.
        dtype: of the weights.
        limits: `--limit` and `--max-new-tokens`: fewer where a token takes longer.
        minutes: see `Benchmark`.
        invariant: whether it rounds alike in every pass: then texts have to be equal in bfloat16, too.
    """
    short = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    ties = " --allow-near-ties" if dtype == "bfloat16" and not invariant else ""
    pack = " --pack" if dtype == "bfloat16" else ""  # in float32 it pays on some processors only: tried, as by default
    shared = f"--inflate {params}e6 --dtype {dtype}{pack} --threads 2 --methods {ALL_METHODS} {limits}{ties}"
    what, name = f"at the cost of {params} million parameters, {dtype}", f"{params}M-{short}"
    if invariant:
        shared, what, name = f"{shared} --invariant", f"{what}, invariant", f"{name}-invariant"
    return [
        Benchmark(f"stories-{name}", "stories", f"stories {what}", f"{shared} --ignore-eos", minutes),
        Benchmark(f"code-{name}", "embedded", f"code {what}", shared, minutes),
    ]


def _sampled(temperature: float) -> Benchmark:
    return Benchmark(
        f"sampling/temperature-{temperature:.1f}",
        "stories",
        f"stories drawn at temperature {temperature:.1f}, three seeds",
        f"--temperature {temperature} --seed 0,1,2 --threads 1 --dtype float32 --no-pack "
        "--methods hf,plain,lookahead,adaptive,adaptive-warm --limit 20 --max-new-tokens 128",
        4,
    )


BENCHMARKS = [
    Benchmark(
        "stories3M",
        "stories",
        "tokens per step against tokens fed, every method at several sizes",
        "--threads 1 --dtype float32 --no-pack --limit 40 --max-new-tokens 200 --ignore-eos --methods "
        "hf,hf-prompt-lookup,plain,jacobi,lookahead,lookahead=15,5,15,adaptive=16,adaptive=64,adaptive,"
        "adaptive-warm=16,adaptive-warm=64,adaptive-warm",
        6,
    ),
    Benchmark(
        "embedded-code",
        "embedded",
        "the model that comes with the project, at its own size: what `lade bench` shows without options",
        "--threads 1 --dtype float32 --no-pack --max-new-tokens 128",
        2,
    ),
    *_inflated(100, "bfloat16", "--limit 16 --max-new-tokens 128", 3),
    *_inflated(100, "float32", "--limit 12 --max-new-tokens 128", 4),
    *_inflated(500, "bfloat16", "--limit 10 --max-new-tokens 64", 4),
    *_inflated(500, "bfloat16", "--limit 10 --max-new-tokens 64", 4, invariant=True),
    *_inflated(500, "float32", "--limit 5 --max-new-tokens 64", 4),
    _sampled(0.7),
    _sampled(1.0),
    Benchmark(
        "scaling",
        "stories",
        "the paper's scaling law: tokens per step against the logarithm of the tokens fed",
        "--threads 1 --dtype float32 --limit 12 --max-new-tokens 128 --ignore-eos "
        "--windows 1,2,4,8,16,32 --ngrams 3,4,5,6,7",
        5,
        command="bench scaling",
    ),
]
