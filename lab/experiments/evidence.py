"""Run the experiments behind docs/evidence.md on a model, and renew the page's tables from what they wrote.

    python lab/experiments/evidence.py --model FILE.gguf --data FOLDER --results FOLDER [--minutes 60]
    python lab/experiments/evidence.py --results FOLDER

The data are the files that the page names, below one folder. Results are `FOLDER/*.json` and `*.jsonl`: a file that is
there is not written again (one of JSON lines is continued), so that a run goes on where it ended. On the page each
table stands below a comment, `<!-- table: NAME -->`; those whose file is missing stay as they are. The sentences are
written by hand: what they say of a table must be compared with it afterwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import agents
import edits
import ledger
import structured
import structured_peers
import typer

from lade_lab.replay import table

Record = dict[str, Any]
SCHEMAS, CALLED, EDITS, RUNS = 60, 40, 24, 2
"""Schemas, questions of each set of BFCL, edits, and runs of agents of each kind."""
TOKENS, SIZES = 128, (16,)
"""Tokens of an answer at most, and tokens fed, of agents."""
CALLS = {
    "asked": "asked",
    "calls": "calls that ended",
    "arguments that do not parse": "arguments that do not parse",
    "arguments that do not fit": "arguments that do not fit",
    "ended by length": "cut off by the limit",
}


def grouped(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in Markdown, thousands separated by commas."""
    return table(columns, [{k: f"{v:,}" if isinstance(v, int) else v for k, v in row.items()} for row in rows])


def ledger_table(found: Sequence[Record]) -> str:
    """Return the table of the exactness ledger."""
    return grouped(["path", "models", "texts", "tokens", "different"], ledger.summary(found))


def schemas_table(found: Sequence[Record]) -> str:
    """Return the table of schemas by situation."""
    columns = ["temperature", "situation", "asked", "answered", "ended", "invalid", "different", "tokens"]
    return grouped([*columns, "tokens per step", "reused"], structured.summary(found))


def refusals_table(found: Sequence[Record]) -> str:
    """Return the table of schemas refused."""
    return table(["refused by", "cause", "times"], structured.refusals(found))


def calls_table(counts: Record) -> str:
    """Return the table of forced calls."""
    rows = [{"": name, "count": counts.get(key, 0)} for key, name in CALLS.items()]
    refused = sum(count for key, count in counts.items() if key.startswith("refused"))
    return grouped(["", "count"], [*rows, {"": "refused: the prompt is too long for the model", "count": refused}])


def edits_table(rows: Sequence[Record]) -> str:
    """Return the table of edits."""
    return grouped(["form", "size", "method", "tokens per step", "fed", "best in", "tasks", "tokens"], rows)


def agents_table(rows: Sequence[Record]) -> str:
    """Return the table of agents' turns."""
    columns = ["all", *agents.NAMES, "fed", "reused, %", "turns", "tokens"]
    return grouped(["runs of", "size", "method", *columns], rows)


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ledger": ("ledger.jsonl", ledger_table),
    "ledger of the model": ("model-ledger.jsonl", ledger_table),
    "schemas": ("schemas.jsonl", schemas_table),
    "schemas of the model": ("model-schemas.jsonl", schemas_table),
    "refusals": ("schemas.jsonl", refusals_table),
    "calls": ("calls.json", calls_table),
    "edits": ("edits.json", edits_table),
    "agents": ("agents.json", agents_table),
    "other servers": ("peers.jsonl", structured_peers.answers_table),
    "refusals of other servers": ("peers.jsonl", structured_peers.refusals_table),
}


def renewed(page: str, results: Path) -> str:
    """Return the page with the tables whose file there is.

    Raises:
        ValueError: a table has no place on the page.
    """
    for name, (file, make) in TABLES.items():
        path = results / file
        if not path.exists():
            continue
        found = structured.lines(path) if file.endswith("jsonl") else json.loads(path.read_text())
        place = re.compile(rf"(<!-- table: {name} -->\n\n)(?:\|.*\n)*")
        if not place.search(page):
            raise ValueError(f"the page has no place for {name!r}: add a line <!-- table: {name} -->")
        made = make(found)
        page = place.sub(lambda match, made=made: f"{match[1]}{made}\n", page)
    return page


def run(model: str, data: Path, results: Path, minutes: float) -> None:
    """Run all experiments that have no result yet; ledger and schemas may take so many minutes each."""
    results.mkdir(parents=True, exist_ok=True)
    prompts = data / "mt_bench" / "question.jsonl"
    until = time.monotonic() + 60 * minutes
    ledger.run(results / "model-ledger.jsonl", list(ledger.PATHS), [model], prompts, until=until)
    until = time.monotonic() + 60 * minutes
    with structured.serving(model) as (url, loaded, tokenizer):
        schemas = structured.lines(data / "jsonschemabench" / "maskbench_400.jsonl")[:SCHEMAS]
        plain = structured.Plain(loaded, tokenizer, TOKENS)
        structured.run_schemas(url, plain, schemas, TOKENS, results / "model-schemas.jsonl", until)
        written(results / "calls.json", lambda: structured.run_calls(url, data / "bfcl", CALLED, TOKENS, float("inf")))
    written(results / "edits.json", lambda: edits.rows(model, data / "instructcoder", EDITS))
    recorded = {
        "tau-bench": agents.tau_runs(data / "tau_bench" / "gpt-4o-airline.json")[:RUNS],
        "SWE-agent": agents.swe_runs(data / "swe_agent")[:RUNS],
    }
    written(results / "agents.json", lambda: list(agents.rows(model, recorded, SIZES)))


def written(path: Path, make: Callable[[], Any]) -> None:
    """Write what an experiment returns, unless it is there."""
    if not path.exists():
        path.write_text(json.dumps(make(), indent=1) + "\n")
    print(path, flush=True)


def main(
    results: Annotated[Path, typer.Option(help="folder with the files of the experiments")],
    model: Annotated[str, typer.Option(help="run them first, on this folder or GGUF file")] = "",
    data: Annotated[Path, typer.Option(help="folder with the data")] = Path("data"),
    minutes: Annotated[float, typer.Option(help="for the ledger, and for the schemas")] = 60.0,
    page: Annotated[Path, typer.Option(help="the page")] = Path("docs/evidence.md"),
) -> None:
    if model:
        run(model, data, results, minutes)
    page.write_text(renewed(page.read_text(), results))


if __name__ == "__main__":
    typer.run(main)
