"""Options of `lade bench`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lade.cli.options import decoding as options
from lade.cli.options import options_in
from lade.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from lade_lab.results import Method, Settings
    from lade_lab.workloads import Workload


FOLDER = Path("bench-results")

_what, _answers = options_in("What to run"), options_in("Answers")
_results, _model = options_in("Results"), options_in("Model")


def whole_numbers(name: str, text: str, least: int, example: str) -> list[int]:
    """Parse comma-separated whole numbers of at most nine digits, none below `least`.

    Raises:
        ConfigError: the text has anything else in it.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts):
        remedy = f"give whole numbers >= {least} separated by commas, such as {example}"
        raise ConfigError(name, text if len(text) < 100 else f"{text[:100]}...", remedy)
    return [int(part) for part in parts]


def check_drawing() -> None:
    """Raise `MissingExtraError` where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")


def command_line() -> list[str]:
    """Return the command line of this process for a record, without the hub token."""
    words = ["lade", *sys.argv[1:]]
    for place, word in enumerate(words):
        if word.startswith("--token="):
            words[place] = "--token=..."
        elif word == "--token" and place + 1 < len(words):
            words[place + 1] = "..."
    return words


@dataclass(frozen=True)
class Runs:
    """Options: which methods run on which prompts."""

    workload: list[str] | None = _what(
        None,
        "FILE",
        "Prompts: Spec-Bench, MT-Bench, HumanEval, MBPP, GSM8K, ClassEval, or JSON lines with the key prompt. "
        "Repeatable. Default: builtin, Python to continue.",
        "--prompts",
        "-w",
    )
    format: str | None = _what(None, "NAME", "Format of the files. Default: recognised by their keys.")
    limit: int | None = _what(None, "P", "Only the first P prompts of each file.")
    raw: bool = _what(False, "", "Continue prompts as they are, without the model's chat template.", "--raw")
    methods: list[str] | None = _what(
        None,
        "M,M,...",
        "Such as hf, plain, suffix=16, mtp=4, lookahead=7,5,7 or adaptive; a wrong name lists all. Default: "
        "this library, transformers, peers and fixed sizes.",
    )
    draft: str | None = _what(None, "MODEL", "Folder or hub id of the model that hf-assisted drafts with.")
    drafter: list[str] | None = _what(
        None,
        "CLASS",
        "MODULE:CLASS[=B], a lade.Drafter of your own to run as one more method, with B tokens fed per step. "
        "Repeatable.",
    )

    def parsed(self, *, sampling: bool) -> list[Method]:
        """The methods."""
        from lade_lab.harness.methods import DEFAULT, parse_all

        texts = self.methods or [*DEFAULT, *(["hf-assisted"] if self.draft is not None else [])]
        texts = [*texts, *(f"drafter={place}" for place in self.drafter or ())]
        return parse_all(texts, sampling=sampling, draft=self.draft is not None)

    def workloads(self) -> list[Workload]:
        """The prompts."""
        from lade_lab import workloads

        sources = self.workload or [workloads.BUILTIN]
        return [workloads.load(source, self.format, self.limit, raw=self.raw) for source in sources]


@dataclass(frozen=True)
class Answers:
    """Options of generation and timing; see `Settings`."""

    max_new_tokens: int = _answers(128, "N", "Maximum number of tokens to generate.", "--max-new-tokens", "-n")
    ignore_eos: bool = _answers(False, "", "Continue after the end-of-text token.", "--ignore-eos")
    temperature: float | None = _answers(
        None, "T", "Sampling temperature; below 1 is less random. Default: greedy decoding."
    )
    top_k: int | None = _answers(None, "K", "Sample from the K most likely tokens.")
    top_p: float | None = _answers(None, "P", "Sample from the most likely tokens whose probabilities add up to P.")
    seeds: str = _answers("0", "S,S,...", "Sampling seeds; each prompt is answered once per seed.", "--seed")
    repeats: int = _answers(1, "R", "Number of times each answer is generated.")

    def settings(self) -> Settings:
        """The same for the record.

        Raises:
            ConfigError: a value out of range.
        """
        from lade_lab.harness.methods import check_settings
        from lade_lab.results import Settings

        options.check_max_new_tokens(self.max_new_tokens)
        options.check_ranges(vars(self))
        seeds = whole_numbers("seed", self.seeds, 0, "0,1,2")
        settings = Settings(**{**vars(self), "temperature": self.temperature or None, "seeds": seeds})
        try:
            check_settings(settings)
        except ConfigError as problem:
            raise ConfigError(problem.field.replace("seeds", "seed"), problem.value, problem.remedy) from problem
        return settings


@dataclass(frozen=True)
class Files:
    """Options: output files. Without `figures` the speed-up alone is drawn, where matplotlib is installed."""

    out: Path | None = _results(None, "DIR", "Folder for the results. Default: bench-results/MODEL.")
    resume: bool = _results(False, "", "Continue an interrupted run; a complete one is reported again.", "--resume")
    figures: bool = _results(False, "", "Write all pictures as SVG and PNG.", "--figures")
    allow_near_ties: bool = _results(
        False, "", "Exit with 0 if rounding explains all differences.", "--allow-near-ties"
    )
    json: options.Json = False


@dataclass(frozen=True)
class Weights:
    """Options of weights and threads. All methods run on the same weights where the model is made invariant."""

    inflate: float | None = _model(
        None, "PARAMS", "Pad the model to this many parameters, such as 500e6: the same text at a larger cost."
    )
    threads: options.Threads = None
    pack: bool | None = _model(
        None,
        "",
        "Prepack linear layers for all methods but hf, which gets a copy. Default: if measured to be faster.",
        "--pack/--no-pack",
    )
    invariant: bool | None = _model(
        None,
        "",
        "Batch-invariant kernels for all methods: 16-bit outputs must be equal, too. Default: on a CPU, for "
        "models in 16 bits, int8 or int4.",
        "--invariant/--no-invariant",
    )


@dataclass(frozen=True)
class Plan:
    """A benchmark, checked as far as that can be done without a model."""

    loading: options.Loading
    draft: str | None
    methods: list[Method]
    workloads: list[Workload]
    settings: Settings
    out: Path
    files: Files
    weights: Weights

    @classmethod
    def of(cls, loading: options.Loading, runs: Runs, answers: Answers, files: Files, weights: Weights) -> Plan:
        """The benchmark that options describe.

        Raises:
            ConfigError, InputError, MissingExtraError: an option, or a file, that would end the work.
        """
        from lade_lab.harness.benchmark import check_folder

        if weights.invariant and files.allow_near_ties:
            raise ConfigError("allow-near-ties", True, "an invariant model has none: leave it out, or --invariant")
        if files.allow_near_ties or loading.attn_implementation is not None:
            weights = replace(weights, invariant=bool(weights.invariant))
        settings = answers.settings()
        size = "" if weights.inflate is None else f"-{weights.inflate / 1e6:.0f}M"
        out = files.out or FOLDER / (loading.name.split("/")[-1] + size)
        if files.figures:
            check_drawing()
        options.check_threads(weights.threads)
        loading.check_layout(weights.pack, invariant=weights.invariant)
        check_folder(out, resume=files.resume)
        methods = runs.parsed(sampling=settings.temperature is not None)
        return cls(loading, runs.draft, methods, runs.workloads(), settings, out, files, weights)

    def model_name(self, *, invariant: bool) -> str:
        """Return the name of the model in the record."""
        return self.loading.label(*(["invariant"] if invariant else []))
