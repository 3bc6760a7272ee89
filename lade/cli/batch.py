"""`lade batch`: answer a file of requests in the format of OpenAI's batch API."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path

from lade.cli.batch_files import Results, read_requests, sharded
from lade.cli.options import decoding as options
from lade.cli.options import option
from lade.cli.serve import EngineLimits, ServedTemplate, check_all, load_served, served_names
from lade.cli.terminal import terminal

EXAMPLE = "Example:  [bold]lade batch -i requests.jsonl -o results.jsonl --model Qwen/Qwen3-0.6B[/bold]"
_MAX_BODY = 2**30


@dataclass(frozen=True)
class Files:
    """Request and result files."""

    input: Path = option(MISSING, "FILE", "OpenAI batch file, or prompts, one per line.", "--input", "-i")
    out: Path = option(MISSING, "FILE", "Write the results to this file.", "--out", "-o")
    resume: bool = option(False, "", "Continue the run that wrote --out.", "--resume")
    shard: str | None = option(None, "I/N", "Take every N-th line only, from the I-th on: 1/4, ..., 4/4.")
    name: list[str] | None = option(
        None, "NAME", "Model name in requests. Repeatable. Default: from --model.", "--name"
    )


@options.grouped
def batch(
    *,
    files: Files,
    limits: EngineLimits,
    template: ServedTemplate,
    speed: options.Speed,
    loading: options.Loading,
    output: options.Output,
) -> None:
    """Answer a file of requests in the format of OpenAI's batch API, or of prompts, with the answers of lade serve.

    Results are written as they complete, matched by custom_id; an interrupted run keeps them.

    Exit code 1: a request failed. --resume retries failed requests and answers those without a result.
    """
    with terminal(output) as term:
        check_all(limits, loading=loading, speed=speed, template=template)
        wanted = sharded(read_requests(files.input), files.shard)
        results = Results(files.out, wanted, resume=files.resume)
        if not results.unanswered:
            results.drop_failures()
            term.say(f"{str(results.path)!r} is complete: {len(wanted)} requests", "dim")
            return
        chat_template = template.text()
        from lade.cli.batch_run import run
        from lade.server.service import Service
        from lade.server.settings import MAX_CHOICES, MAX_PROMPTS, Settings

        settings = Settings(
            names=served_names(files.name, loading),
            max_rows=limits.max_rows,
            max_waiting=2 * limits.max_rows * MAX_CHOICES * MAX_PROMPTS,
            max_tokens=limits.max_tokens,
            answer_tokens=limits.answer_tokens,
            max_body=_MAX_BODY,
            template_arguments=template.arguments,
            page=False,
        )
        service = Service(settings, partial(load_served, loading, speed, chat_template, term))
        run(service, results, len(wanted), term)
