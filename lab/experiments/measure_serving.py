"""Cost of HTTP: tokens per second of the engine alone and of the same requests through `lade serve`.

Both arms decode the same prompts greedily, taking turns; the clients of the second one are in a process of their own.

Usage: python lab/experiments/measure_serving.py [--model FOLDER] [--params 100e6] [--streams 1 8] [--rounds 5]
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lade import Engine
from lade.cli.loading.load import load
from lade.cli.options.model import Loading
from lade.cli.terminal import terminal
from lade.embedded.files import prompts
from lade.server.listen import run
from lade.server.served_model import ServedModel
from lade.server.service import Service
from lade.server.settings import Settings, bound, url_of
from lade_lab import inflate

CLIENT = """
import json, sys, threading, time, urllib.request
url, fields, texts = json.loads(sys.argv[1])
answers = [None] * len(texts)
def ask(number):
    start = time.perf_counter()
    body = {"prompt": texts[number], "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body |= fields
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    first, parts, last = None, [], None
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - start
                parts.append(line)
    events = [json.loads(line[6:]) for line in parts]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    answers[number] = [events[-1]["usage"]["completion_tokens"], first, text]
start = time.perf_counter()
threads = [threading.Thread(target=ask, args=[number]) for number in range(len(texts))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps([answers, time.perf_counter() - start]))
"""


class Answers(NamedTuple):
    """Outcome of a number of concurrent requests.

    Attributes:
        rate: tokens per second, of all together.
        first_s: median of the seconds until the first token.
        texts: of the answers; empty where there are only tokens.
    """

    rate: float
    first_s: float
    texts: list[str]


def alone(engine: Engine, tokenizer: Any, texts: list[str], tokens: int) -> Answers:
    """Answers of an engine, without HTTP."""
    start, made = time.perf_counter(), []
    arguments = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "stop_texts": []}
    for text in texts:
        handle = engine.add(tokenizer(text)["input_ids"], tokenizer=tokenizer, **arguments)
        made.append((handle, time.perf_counter() - start))
    done = sum(len(handle.result()[0]) - handle.prompt_tokens for handle, _ in made)
    seconds = time.perf_counter() - start
    firsts = [added + handle.queue_s + handle.prefill_s for handle, added in made]
    return Answers(done / seconds, statistics.median(firsts), [])


def through_http(url: str, texts: list[str], **fields: Any) -> Answers:
    """Answers of a server to clients in a process of their own, which all ask at once."""
    command = [sys.executable, "-c", CLIENT, json.dumps([url, fields, texts])]
    answers, seconds = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    firsts = statistics.median(first for _, first, _ in answers)
    return Answers(sum(count for count, _, _ in answers) / seconds, firsts, [text for _, _, text in answers])


@contextmanager
def serving(model: str | None, params: float | None, rows: int) -> Iterator[tuple[Service, str, int]]:
    """A server in a thread of this process: its service, its address, and the thread that speaks HTTP."""
    with terminal() as term:
        loaded = load(Loading(model=model), term=term)
    if params:
        loaded = replace(loaded, model=inflate(loaded.model, params))
    served = ServedModel(loaded.model, loaded.tokenizer, context=loaded.context)
    # nothing is kept between requests: both arms draft alike in every round
    service = Service(Settings(max_rows=rows, max_waiting=4 * rows, share="none"), lambda: served)
    listening = bound("127.0.0.1", 0)
    thread = threading.Thread(target=run, args=[service, listening], daemon=True)
    thread.start()
    while service.phase == "loading" and service.problem is None:
        time.sleep(0.1)
    url = url_of("127.0.0.1", listening)
    urllib.request.urlopen(f"{url}/ready").close()
    assert thread.ident is not None
    yield service, url, time.pthread_getcpuclockid(thread.ident)


def measure(service: Service, url: str, clock: int, streams: int, tokens: int, rounds: int) -> None:
    """Print the figures of both arms with so many requests at a time."""
    texts = (prompts() * streams)[:streams]
    found: dict[str, list[Answers]] = {"engine": [], "http": []}
    busy, events = 0.0, 0
    for number in range(rounds + 1):
        for name in sorted(found, reverse=bool(number % 2)):
            if name == "engine":
                figures = alone(service.engine, service.model.tokenizer, texts, tokens)
            else:
                before, steps = time.clock_gettime(clock), service.engine.snapshot().steps
                figures = through_http(url, texts, max_tokens=tokens, ignore_eos=True)
                busy += time.clock_gettime(clock) - before if number else 0
                events += service.engine.snapshot().steps - steps if number else 0
            if number:  # the first round warms up
                found[name].append(figures)
    print(f"{streams} streams of {tokens} tokens, {rounds} rounds")
    for name, figures in found.items():
        print(f"  {name:7}{summary(figures)}")
    ratios = [b.rate / a.rate for a, b in zip(found["engine"], found["http"], strict=True)]
    print(f"  http / engine: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"  the thread that speaks HTTP: {1e6 * busy / events:.0f} us of processor time an event", flush=True)


def summary(figures: list[Answers]) -> str:
    """Medians and spread, in words."""
    rates, firsts = [each.rate for each in figures], [1e3 * each.first_s for each in figures]
    spread, first = f"{min(rates):.0f} to {max(rates):.0f}", f"{min(firsts):.0f} to {max(firsts):.0f}"
    return (
        f"{statistics.median(rates):8.1f} tokens/s ({spread}), "
        f"first token after {statistics.median(firsts):.0f} ms ({first})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--params", type=float)
    parser.add_argument("--streams", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with serving(asked.model, asked.params, max(asked.streams)) as (service, url, clock):
        size = sum(each.numel() for each in service.model.model.parameters())
        print(f"{size / 1e6:.0f} M parameters, {torch.get_num_threads()} threads of torch")
        for streams in asked.streams:
            measure(service, url, clock, streams, asked.tokens, asked.rounds)


if __name__ == "__main__":
    main()
