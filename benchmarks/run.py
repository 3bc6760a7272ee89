"""Runs benchmarks of this folder, one after the other; see README.md.

    python benchmarks/run.py                                   what there is
    python benchmarks/run.py embedded-code                     this one
    python benchmarks/run.py all --models FOLDER --data FOLDER

One that is complete is only reported again, and one that was interrupted is continued, so the same command can be
given at any time. To repeat a benchmark, give another folder with --out, and compare both with `lade bench compare`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from catalogue import BENCHMARKS, FOLDER, Benchmark

QUICK = "--limit 2 --max-new-tokens 6"
QUICK_SCALING = "--windows 1,3 --ngrams 2,3"
INTERRUPTED = 130
DIFFERENT = 1


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if not given.names:
        _show(given.out)
        return 0
    known = {each.name: each for each in BENCHMARKS}
    unknown = [name for name in given.names if name not in known and name != "all"]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: give all, or some of {', '.join(known)}")
    wanted = BENCHMARKS if "all" in given.names else [known[name] for name in dict.fromkeys(given.names)]
    for folder, option, files in _needed(wanted, given):
        if missing := [file for file in files if folder is None or not (folder / file).is_file()]:
            parser.error(f"give the folder with {', '.join(missing)} as {option}; see README.md")
    if given.quick and given.out == FOLDER:
        parser.error("give --out with --quick: its figures are worth nothing")
    return _run(wanted, given)


def _needed(wanted: list[Benchmark], given: argparse.Namespace) -> list[tuple[Path | None, str, list[str]]]:
    """Return of models and prompts the folder, the option that gives it, and the files that have to be there."""
    models = list(dict.fromkeys(each.model for each in wanted if each.model))
    prompts = list(dict.fromkeys(file for each in wanted for file in each.prompts))
    return [(given.models, "--models", models), (given.data, "--data", prompts)]


def complete(benchmark: Benchmark, out: Path) -> bool:
    """Return whether its results are complete."""
    path = out / benchmark.results
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["complete"])


def _run(wanted: list[Benchmark], given: argparse.Namespace) -> int:
    different = []
    for number, benchmark in enumerate(wanted):
        left = sum(each.minutes for each in wanted[number:] if not complete(each, given.out))
        print(f"\n{number + 1} of {len(wanted)}: {benchmark.name}; about {left:.0f} min left in all", flush=True)
        code = _call(benchmark, given)
        if code == DIFFERENT:
            different.append(benchmark.name)
        elif code:
            return code
    if different:
        print(f"\noutputs differ: {', '.join(different)}")
    if given.out == FOLDER:
        print("\ndone; python benchmarks/summarize.py writes the figures into the pages")
    return DIFFERENT if different else 0


def _call(benchmark: Benchmark, given: argparse.Namespace) -> int:
    """Run it in a process of its own: threads and memory are its own, and Ctrl-C leaves it time to save."""
    words = benchmark.words(given.models or Path(), given.data or Path(), given.out / benchmark.name)
    if given.quick:
        scaling = [QUICK_SCALING] if benchmark.command == "bench scaling" else []
        words += " ".join([QUICK, *scaling]).split()  # of an option given twice the last counts
    process = subprocess.Popen([sys.executable, "-m", "lade", *words])
    try:
        return process.wait()
    except KeyboardInterrupt:  # the process has got it too
        process.wait()
        return INTERRUPTED


def _show(out: Path) -> None:
    width = max(len(each.name) for each in BENCHMARKS)
    for each in BENCHMARKS:
        state = "complete" if complete(each, out) else f"{each.minutes:g} min"
        print(f"{each.name:{width}}  {state:8}  {each.question}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description="Run benchmarks; without names, list them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a folder of this one, or all")
    parser.add_argument("--models", metavar="FOLDER", type=Path, help="has the models, as GGUF files")
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="has the prompts")
    parser.add_argument("--out", metavar="DIR", type=lambda text: Path(text).resolve(), default=FOLDER, help="not here")
    parser.add_argument("--quick", action="store_true", help="a few tokens, only to see that everything runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
