"""`python -m lade_lab soak`: serve the embedded model, send requests, take samples, and give a verdict."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import typer
from rich.table import Table

from lade.cli.options import decoding as options
from lade.cli.terminal import Terminal, terminal
from lade.errors import InputError
from lade.native import processor_name
from lade_lab.cli.job import check_drawing
from lade_lab.live_server import BrokenAnswerError, Client, LiveServer, live_server
from lade_lab.soak.clients import Clients
from lade_lab.soak.figure import draw
from lade_lab.soak.probe import Probed, probe
from lade_lab.soak.process import usage
from lade_lab.soak.requests import TEMPLATE
from lade_lab.soak.verdict import Sample, verdict

EXAMPLE = "Example:  [bold]python -m lade_lab soak --hours 1 --out soak-results[/bold]"


PREFIX_CACHE = "32MiB"
"""Full within a minute: by default it takes a tenth of what the KV cache may, and would grow through most of a run."""
_CACHED = re.compile(r"^lade_prefix_cache_bytes\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Soak:
    """Options: how to soak."""

    hours: Annotated[float, typer.Option(help="Length of the run.")] = 1.0
    rate: Annotated[float, typer.Option(help="Requests per second, of all clients.")] = 3.0
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 4
    every: Annotated[float, typer.Option(help="Seconds between samples.")] = 60.0
    seed: Annotated[int, typer.Option(help="Seed of the choice of requests.")] = 1
    out: Annotated[Path | None, typer.Option(help="Folder for samples, picture and log. Default: soak-results.")] = None
    serve: Annotated[list[str] | None, typer.Option(help="Further option of lade serve. Repeatable.")] = None


@options.grouped
def soak(
    *,
    how: Soak,
    report: Annotated[Path | None, typer.Option(help="soak.jsonl of an earlier run, to be reported again.")] = None,
    output: options.Output,
) -> None:
    """Serve the embedded model under mixed requests for hours, and see whether it stays as it was.

    Samples are written as they are taken, and Ctrl-C ends the run with the verdict on those there are.

    Exit code 1: a bar is missed.
    """
    with terminal(output) as term:
        check_drawing()
        folder = how.out or (Path("soak-results") if report is None else report.parent)
        samples = run(how, folder, term) if report is None else samples_of(report)
        passed = tell(samples, folder / "soak.svg", term)
    if not passed:
        raise typer.Exit(1)


def samples_of(file: Path) -> list[Sample]:
    """Read the samples of a run.

    Raises:
        InputError: there are none.
    """
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as problem:
        raise InputError(f"{str(file)!r} cannot be read ({problem}): give the soak.jsonl of a run") from None
    if not (found := [each for each in records if each["kind"] == "sample"]):
        raise InputError(f"{str(file)!r} has no samples: give the soak.jsonl of a run")
    return found


@dataclass
class Log:
    """A file of JSON lines, each of which is there as soon as it is written."""

    path: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def run(how: Soak, out: Path, term: Terminal) -> list[Sample]:
    """Serve, send and take samples until the time is over or Ctrl-C is pressed."""
    import torch
    import transformers

    out.mkdir(parents=True, exist_ok=True)
    log = Log(out / "soak.jsonl")
    log.path.unlink(missing_ok=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "processor": processor_name()}
    log({"kind": "start", "hours": how.hours, "rate": how.rate, "clients": how.clients, "seed": how.seed, **versions})
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        template.write_text(TEMPLATE, encoding="utf-8")
        serve = ["--quiet", "--prefix-cache", PREFIX_CACHE, "--chat-template", str(template), *(how.serve or ())]
        with live_server(serve, out / "server.log") as server:
            return soaked(server, how, log, term)


def soaked(server: LiveServer, how: Soak, log: Log, term: Terminal) -> list[Sample]:
    """Send to a server that is ready, and take samples."""
    clients = Clients(server.url, how.clients, how.rate, how.seed, log)
    first = probe(server.url, server.pid)
    start, samples = time.monotonic(), list[Sample]()
    last = start, usage(server.pid).processor_s
    clients.start()
    term.status.hide()
    try:
        while time.monotonic() < start + 3600 * how.hours:
            time.sleep(max(0.0, start + how.every * (len(samples) + 1) - time.monotonic()))
            sample, last = sampled(server, clients, first, start, last)
            samples.append(sample)
            log(sample)
            term.say(line(sample))
    except KeyboardInterrupt:
        term.say("interrupted", "yellow")
    clients.end()
    return samples


Mark = tuple[float, float]
"""A time, and the server's processor time by then."""


def sampled(server: LiveServer, clients: Clients, first: Probed, start: float, last: Mark) -> tuple[Sample, Mark]:
    """Take a sample while the clients hold, so that neither their connections nor their answers are in it."""
    clients.gate.hold()
    now, account = time.monotonic(), clients.account
    busy = (usage(server.pid).processor_s - last[1]) / (now - last[0])
    try:
        found = probe(server.url, server.pid)
        equal = found[2:] == first[2:]
    except (OSError, BrokenAnswerError):
        found, equal = Probed(float("nan"), float("nan"), [], []), False
    took, cached = usage(server.pid), cached_mb(server)
    cuts = quantiles(account.seconds, n=20) if len(account.seconds) > 1 else [0.0] * 19
    account.seconds.clear()
    sample = {
        "kind": "sample",
        "minute": round((now - start) / 60, 3),
        "rss_mb": round(took.rss_mb, 1),
        "anonymous_mb": round(took.anonymous_mb, 1),
        "prefix_cache_mb": round(cached, 1),
        "descriptors": took.descriptors,
        "threads": took.threads,
        "probe_ms": round(1000 * found.seconds, 1),
        "probe_processor_ms": round(1000 * found.processor_s, 1),
        "equal": equal,
        "requests": account.kinds.total(),
        "kinds": dict(account.kinds),
        "lost": account.lost,
        "compared": account.compared,
        "different": account.different,
        "median_ms": round(1000 * cuts[9], 1),
        "p95_ms": round(1000 * cuts[18], 1),
        "cores": round(busy, 2),
    }
    mark = time.monotonic(), took.processor_s
    clients.gate.open()
    return sample, mark


def cached_mb(server: LiveServer) -> float:
    """What the prefix cache holds, by the server's metrics."""
    client = Client(server.url)
    found = _CACHED.search(client.get("/metrics").body.decode())
    client.close()
    return float(found[1]) / 1e6 if found else float("nan")


def line(sample: Sample) -> str:
    """A sample in one line, for whoever watches."""
    return (
        f"{sample['minute']:6.1f} min  {sample['rss_mb']:7.1f} MB  {sample['descriptors']:3} descriptors  "
        f"{sample['threads']:3} threads  probe {sample['probe_ms']:5.0f} ms, "
        f"{'equal' if sample['equal'] else 'DIFFERS'}  {sample['requests']:6,} requests, {sample['lost']} lost, "
        f"{sample['different']} differ  {sample['cores']:.2f} cores"
    )


def tell(samples: Sequence[Sample], picture: Path, term: Terminal) -> bool:
    """Show the verdict and draw the picture; whether all bars are met."""
    from matplotlib import rc_context

    from lade_lab.report.theme import RC, as_svg

    found = verdict(samples)
    table = Table("", "found", "bar", "", box=None)
    for each in found:
        passed = "[green]pass[/green]" if each.passed else "[bold red]FAIL[/bold red]"
        table.add_row(each.what, each.found, each.bar, passed)
    term.out.print(table)
    if samples:
        with rc_context(RC):
            picture.write_text(as_svg(draw(samples)), encoding="utf-8")
        term.say(f"samples and picture are in {picture.parent}")
    return all(each.passed for each in found)
