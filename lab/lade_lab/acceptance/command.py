"""`python -m lade_lab acceptance -m MODEL`: serve a model, try it as a user would, print a table."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from lade.cli.options import decoding as options
from lade.cli.options.model import Loading, ModelChoice
from lade.cli.terminal import Terminal, terminal

EXAMPLE = "Example:  [bold]python -m lade_lab acceptance -m SmolLM2-135M-Instruct.gguf[/bold]"
TEMPLATE = (  # for models that have none
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m['tool_calls'] or () %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class Line(NamedTuple):
    """One line of the table."""

    check: str
    passed: bool
    what: str
    seconds: float


@options.grouped
def acceptance(
    *,
    choice: ModelChoice,
    long: Annotated[int, typer.Option(help="Most tokens of a long prompt. Default: what the context takes.")] = 10**9,
    second: Annotated[str | None, typer.Option(help="Model to serve next. Default: the embedded one.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the checks whose names have this. Repeatable.")] = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Serve a model and try what users try: long prompts, tools, JSON under load, stops, streams, seeds.

    Passing means: the same answer as transformers' own, or as the same request alone. How clever it is does not count.

    Exit code 1: a check did not pass.
    """
    with terminal(output) as term, tempfile.TemporaryDirectory() as folder:
        facts, lines = run(choice, long, second, only or [""], Path(folder), term)
        tell(facts, lines, term, json=json)
    if not all(line.passed for line in lines):
        raise typer.Exit(1)


def run(
    choice: ModelChoice, long: int, second: str | None, only: list[str], folder: Path, term: Terminal
) -> tuple[dict[str, Any], list[Line]]:
    """Do it; return facts about the model, and the lines of the table."""
    import torch
    import transformers

    from lade.cli.loading import load
    from lade.native import processor_name
    from lade_lab.acceptance.checks import CHECKS, Tried
    from lade_lab.live_server import Client, NoServerError, live_server

    loaded = load(Loading(choice.model, choice.dtype, choice.device), term=term, pack=None, images=None, invariant=None)
    facts, lines, log = {**loaded.facts, "context": 0}, list[Line](), folder / "log"
    serve = ["--dtype", choice.dtype, "--device", choice.device, "--quiet"]
    serve += [] if choice.model is None else ["--model", choice.model]
    if not loaded.tokenizer.chat_template:
        (folder / "template").write_text(TEMPLATE, encoding="utf-8")
        serve += ["--chat-template", str(folder / "template")]
    term.show_status("starting the server")
    try:
        with live_server(serve, log) as server:
            facts |= {"context": Client(server.url).get("/v1/models").json["data"][0]["max_model_len"]}
            tried = Tried(server.url, loaded, facts["context"], long)
            for name, check in CHECKS.items():
                if any(part in name for part in only):
                    term.show_status(name)
                    lines.append(timed(name, partial(check, tried)))
        if any(part in "two models in turn" for part in only):
            term.show_status("serving a second model")
            lines.append(timed("two models in turn", lambda: in_turn(second, folder)))
    except NoServerError as problem:
        lines.append(Line("end of the server", False, str(problem), 0.0))
    problems = log.read_text(encoding="utf-8").strip()
    lines.append(Line("log of the server", not problems, problems[-300:] or "no warnings, no errors", 0.0))
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "processor": processor_name()}
    return facts, lines


def timed(name: str, check: Callable[[], str]) -> Line:
    """Make a check; whatever it raises is what happened."""
    start = time.perf_counter()
    try:
        passed, what = True, check()
    except Exception as problem:  # noqa: BLE001 - a fault of one check is a line of the table
        passed, what = False, f"{problem}" if type(problem).__name__ == "FailedError" else repr(problem)
    return Line(name, passed, what, round(time.perf_counter() - start, 1))


def in_turn(second: str | None, folder: Path) -> str:
    """Serve another model after the first has ended well."""
    from lade_lab.live_server import COMPLETIONS, Client, answer_of, live_server

    options = [*([] if second is None else ["--model", second]), "--quiet"]
    with live_server(options, folder / "log") as server:
        reply = Client(server.url).post(COMPLETIONS, {"prompt": "def f(", "max_tokens": 8})
        answer = answer_of(COMPLETIONS, reply)
    return f"the first ended with 0, then {server.model} answered ({len(answer.text)} characters), and ended with 0"


def tell(facts: dict[str, Any], lines: list[Line], term: Terminal, *, json: bool) -> None:
    """Print the table, or JSON."""
    if json:
        term.write_json({**facts, "checks": [line._asdict() for line in lines]})
        return
    kind = ", ".join([str(facts["dtype"]), *(name for name in ("packed", "invariant") if facts[name])])
    term.out.print(f"{facts['model']} ({kind}), context {facts['context']:,}")
    table = Table("check", "", "what happened", "s", box=None)
    for check, passed, what, seconds in lines:
        table.add_row(check, "[green]pass" if passed else "[bold red]FAIL", what, f"{seconds:.1f}")
    term.out.print(table)
