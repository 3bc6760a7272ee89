"""Tokens per second of batches: transformers' own, ours, and the engine's; outputs are compared first.

    python scripts/measure_batches.py --model FOLDER --prompts FILE.jsonl --rows 1 --rows 4 --rows 8 --rows 16
    python scripts/measure_batches.py --model FOLDER --prompts FILE.jsonl --rows 8 --arrivals
    python scripts/measure_batches.py --inflate 7e9 --dtype bfloat16 --device cuda --rows 8

Without --model and --prompts it is the embedded model, and what `lade bench` has it write. In float32 a text that is
not transformers' ends the run; in bfloat16 near ties part texts, so there they are counted.

Transformers gets the prompts in batches, in the order of the file: a batch ends when its last row does. In the engine
the next prompt takes the place of one that has ended. `kept` arms have one memory for all prompts of a round; it begins
empty. Every round runs all arms, each round another one first.

With --arrivals prompts come at random, as often as transformers' batches can just serve (exponential gaps, the same for
all arms). Transformers takes what waits, up to so many rows, when its batch before has ended. Latency is the time from
a prompt's arrival to its last token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.bench import inflate
from lade.bench.workloads import load
from lade.embedded.files import model_path

PLAIN = lade.LookaheadConfig(window=0, ngram=2, guesses=0)
Texts = list[list[int]]


@dataclass
class Arm:
    """One way to decode all prompts, and what each round of it took."""

    name: str
    run: Callable[[], tuple[Texts, lade.Stats]]
    seconds: list[float] = field(default_factory=list)
    stats: lade.Stats = field(default_factory=lade.Stats)
    parting: int = 0

    def measure(self, expected: Texts, *, exact: bool) -> None:
        """One round; the texts must be those expected, if they are `exact`."""
        start = perf_counter()
        texts, self.stats = self.run()
        self.seconds.append(perf_counter() - start)
        self.parting = sum(text != other for text, other in zip(texts, expected, strict=True))
        if self.parting and exact:
            raise SystemExit(f"{self.name}: {self.parting} of {len(texts)} texts are not those of model.generate")


class Subject:
    """A model, its prompts, and the ways to decode them.

    Args:
        folder: of a causal language model.
        texts: to be continued.
        max_new_tokens: of each answer.
        params: the model is to have, as far as passes cost; None for its own.
        dtype: of its weights.
        device: where it is to be.
    """

    def __init__(
        self,
        folder: Path,
        texts: list[str],
        max_new_tokens: int,
        *,
        params: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = own.to(device) if params is None else inflate(own, params, dtype=dtype, device=device)
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.prompts = [self.tokenizer(text).input_ids for text in texts]
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.tokenizer.pad_token = self.tokenizer.eos_token
        self.arguments = {
            "max_new_tokens": max_new_tokens,
            "do_sample": False,
            "pad_token_id": self.tokenizer.eos_token_id,
        }

    def batch(self, prompts: Texts, generate: Callable[..., torch.Tensor]) -> Texts:
        """The answers to prompts decoded as one padded batch."""
        padded = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.model.device)
        output = generate(input_ids=padded.input_ids, attention_mask=padded.attention_mask, **self.arguments)
        return [self.cut(row) for row in output[:, padded.input_ids.shape[1] :].tolist()]

    def cut(self, answer: list[int]) -> list[int]:
        """An answer without padding."""
        length = next((place for place, token in enumerate(answer, start=1) if token in self.ends), len(answer))
        return answer[:length]

    def batches(self, rows: int, lookahead: lade.LookaheadConfig | None) -> tuple[Texts, lade.Stats]:
        """All prompts in batches of so many rows; None for `model.generate`."""
        stats, texts = lade.Stats(), []
        for first in range(0, len(self.prompts), rows):
            prompts = self.prompts[first : first + rows]
            if lookahead is None:
                texts += self.batch(prompts, self.model.generate)
            else:
                texts += self.batch(
                    prompts, lambda **given: lade.generate(self.model, lookahead=lookahead, stats=stats, **given)
                )
        return texts, stats

    def engine(self, rows: int, make: Callable[[], lade.LookaheadConfig]) -> tuple[Texts, lade.Stats]:
        """All prompts through an engine of so many rows."""
        config, stats = make(), lade.Stats()
        with lade.Engine(self.model, max_rows=rows) as engine:
            handles = [engine.add(ids, lookahead=config, stats=stats, **self.arguments) for ids in self.prompts]
            texts = [handle.result()[0, len(ids) :].tolist() for handle, ids in zip(handles, self.prompts, strict=True)]
        return texts, stats

    def arms(self, rows: int) -> list[Arm]:
        """All ways, transformers' own first."""
        kept = lambda: lade.LookaheadConfig(memory=lade.Memory())  # noqa: E731 - one a round
        return [
            Arm("transformers, batches", lambda: self.batches(rows, None)),
            Arm("lade.generate, plain, batches", lambda: self.batches(rows, PLAIN)),
            Arm("lade.generate, adaptive, batches", lambda: self.batches(rows, lade.LookaheadConfig())),
            Arm("engine, plain", lambda: self.engine(rows, lambda: PLAIN)),
            Arm("engine, adaptive", lambda: self.engine(rows, lade.LookaheadConfig)),
            Arm("engine, adaptive, kept", lambda: self.engine(rows, kept)),
        ]


@dataclass
class Queue:
    """What one arm made of prompts that arrived at random.

    Attributes:
        name: of the arm.
        seconds: until the last answer, one a round.
        latencies: of all answers.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


def serve_in_batches(subject: Subject, rows: int, arrivals: list[float], queue: Queue) -> None:
    """Transformers: what waits, up to so many rows, when the batch before has ended."""
    start, served = perf_counter(), 0
    while served < len(arrivals):
        sleep(max(0.0, arrivals[served] - (perf_counter() - start)))
        now = perf_counter() - start
        taken = sum(arrival <= now for arrival in arrivals[served : served + rows])
        subject.batch(subject.prompts[served : served + taken], subject.model.generate)
        now = perf_counter() - start
        queue.latencies += [now - arrival for arrival in arrivals[served : served + taken]]
        served += taken
    queue.seconds.append(perf_counter() - start)


def serve_in_engine(
    subject: Subject, rows: int, arrivals: list[float], queue: Queue, config: lade.LookaheadConfig
) -> None:
    """The engine: each prompt is added when it arrives."""
    ends = [0.0] * len(arrivals)
    with lade.Engine(subject.model, max_rows=rows) as engine:
        start, handles = perf_counter(), []
        for number, (arrival, ids) in enumerate(zip(arrivals, subject.prompts, strict=True)):
            sleep(max(0.0, arrival - (perf_counter() - start)))

            def note(step: lade.Step, number: int = number) -> None:
                ends[number] = perf_counter() - start

            handles.append(engine.add(ids, lookahead=config, on_step=note, **subject.arguments))
        for handle in handles:
            handle.result()
        queue.seconds.append(perf_counter() - start)
    queue.latencies += [end - arrival for end, arrival in zip(ends, arrivals, strict=True)]


def serve(subject: Subject, rows: int, rounds: int, progress: Progress) -> tuple[float, list[Queue]]:
    """All arms on the same arrivals; requests per second that arrive, and what came of them."""
    start = perf_counter()
    subject.batches(rows, None)
    rate = len(subject.prompts) / (perf_counter() - start)
    queues = [Queue("transformers, batches"), Queue("engine, plain"), Queue("engine, adaptive, kept")]
    task = progress.add_task(f"{rows} rows, arrivals", total=rounds * len(queues))
    for number in range(rounds):
        draw, arrivals = random.Random(number), [0.0]
        for _ in subject.prompts[1:]:
            arrivals.append(arrivals[-1] + draw.expovariate(rate))
        for queue in queues[number % 3 :] + queues[: number % 3]:
            if queue is queues[0]:
                serve_in_batches(subject, rows, arrivals, queue)
            else:
                config = PLAIN if queue is queues[1] else lade.LookaheadConfig(memory=lade.Memory())
                serve_in_engine(subject, rows, arrivals, queue, config)
            progress.advance(task)
    return rate, queues


def compare(subject: Subject, rows: int, rounds: int, progress: Progress) -> list[Arm]:
    """All arms, round after round."""
    arms = subject.arms(rows)
    expected, _ = arms[0].run()
    for arm in arms[1:]:
        arm.run()  # warm: step costs are measured, kernels compiled
    task = progress.add_task(f"{rows} rows", total=rounds * len(arms))
    for number in range(rounds):
        for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
            arm.measure(expected, exact=subject.model.dtype == torch.float32)
            progress.advance(task)
    return arms


def compared(rows: int, arms: list[Arm], tokens: int) -> Table:
    """The table of `compare`."""
    table = Table(
        "method", "tokens/s: median (range)", "of transformers'", "S", "fed", "library, us a step and row", "parting"
    )
    table.title = f"{rows} rows"
    for arm in arms:
        rates = sorted(tokens / seconds for seconds in arm.seconds)
        ratios = [base / own for base, own in zip(arms[0].seconds, arm.seconds, strict=True)]
        stats, told = arm.stats, arm.stats.steps > 0
        rows_told = rows if "engine" in arm.name else 1  # each request of an engine counts its passes whole
        library = 1e6 * stats.library_s / stats.steps / rows_told if told else 0.0
        table.add_row(
            arm.name,
            f"{median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})",
            f"{median(ratios):.2f}",
            f"{stats.tokens_per_step:.2f}" if told else "",
            f"{stats.fed_tokens / stats.steps:.1f}" if told else "",
            f"{library:.0f}" if told else "",
            f"{arm.parting}",
        )
    return table


def served(rows: int, rate: float, queues: list[Queue], prompts: int) -> Table:
    """The table of `serve`."""
    table = Table("method", "requests/s", "latency, s: median", "19 in 20 below")
    table.title = f"{rows} rows, {rate:.2f} requests/s arriving"
    for queue in queues:
        table.add_row(
            queue.name,
            f"{median(prompts / seconds for seconds in queue.seconds):.2f}",
            f"{median(queue.latencies):.2f}",
            f"{quantiles(queue.latencies, n=20)[-1]:.2f}",
        )
    return table


def texts_of(prompts: Path | None) -> list[str]:
    """Prompts of a file, or those that `lade bench` has built in."""
    if prompts is None:
        return [item.turns[0] for item in load("builtin").items]
    return [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]


def main(
    *,
    model: Annotated[Path | None, typer.Option(help="folder of a causal language model")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with the key `prompt`")] = None,
    params: Annotated[float | None, typer.Option("--inflate", help="at the cost of so many parameters")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    device: str = "cpu",
    rows: Annotated[list[int], typer.Option(help="may be given several times")] = [1, 4, 8, 16],  # noqa: B006
    limit: int = 64,
    max_new_tokens: int = 200,
    rounds: int = 3,
    threads: Annotated[int | None, typer.Option(help="torch threads")] = None,
    arrivals: Annotated[bool, typer.Option(help="prompts come at random")] = False,
    out: Annotated[Path | None, typer.Option(help="a text file for the tables")] = None,
) -> None:
    """Measure and print tables."""
    if threads:
        torch.set_num_threads(threads)
    texts = texts_of(prompts)[:limit]
    kind: torch.dtype = getattr(torch, dtype)
    subject = Subject(model or model_path(), texts, max_new_tokens, params=params, dtype=kind, device=device)
    console = Console(width=130, record=True)
    for batch in rows:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            if arrivals:
                rate, queues = serve(subject, batch, rounds, progress)
                console.print(served(batch, rate, queues, len(subject.prompts)))
            else:
                arms = compare(subject, batch, rounds, progress)
                tokens = sum(map(len, arms[0].run()[0]))
                console.print(compared(batch, arms, tokens))
    console.print(
        f"{len(subject.prompts)} prompts, {rounds} rounds, {dtype}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, lade {lade.__version__}"
    )
    if out is not None:
        console.save_text(str(out))


if __name__ == "__main__":
    typer.run(main)
