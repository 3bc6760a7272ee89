"""`lade serve` beside `transformers serve --continuous-batching`: the same model folder, prompts and clients.

The servers take turns; the one whose turn it is not is stopped. Needs `pip install "transformers[serving]"`.

Usage: python lab/experiments/compare_serving.py --model FOLDER --prompts FILE.jsonl [--params 100e6] [--streams 1 8]
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer

from lade_lab import inflate

THEIRS, OURS, PLAIN = "transformers serve --continuous-batching", "lade serve", "lade serve --method plain"
START_S = 300.0
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


def through_http(url: str, texts: list[str], **fields: Any) -> Answers:
    """Answers of a server to clients in a process of their own, which all ask at once."""
    command = [sys.executable, "-c", CLIENT, json.dumps([url, fields, texts])]
    answers, seconds = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    firsts = statistics.median(first for _, first, _ in answers)
    return Answers(sum(count for count, _, _ in answers) / seconds, firsts, [text for _, _, text in answers])


def summary(figures: list[Answers]) -> str:
    """Medians and spread, in words."""
    rates, firsts = [each.rate for each in figures], [1e3 * each.first_s for each in figures]
    spread, first = f"{min(rates):.0f} to {max(rates):.0f}", f"{min(firsts):.0f} to {max(firsts):.0f}"
    return (
        f"{statistics.median(rates):8.1f} tokens/s ({spread}), "
        f"first token after {statistics.median(firsts):.0f} ms ({first})"
    )


class Server:
    """A server in a process of its own, stopped but while it is asked.

    Args:
        command: that starts it, but for the port.
        port: a free one.
    """

    def __init__(self, command: list[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while not self._is_ready():
            assert self.process.poll() is None and time.monotonic() < end, command
            time.sleep(0.2)
        self.process.send_signal(signal.SIGSTOP)

    def _is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health").status == 200)
        except urllib.error.URLError:
            return False

    def ask(self, texts: list[str], tokens: int) -> Answers:
        """Its answers to these prompts, asked at once."""
        self.process.send_signal(signal.SIGCONT)
        try:
            return through_http(self.url, texts, max_tokens=tokens)
        finally:
            self.process.send_signal(signal.SIGSTOP)


@contextmanager
def running(command: list[str], port: int) -> Iterator[Server]:
    server = Server(command, port)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.process.kill()
        server.process.wait()


def copy_of(model: str, params: float | None, folder: str) -> str:
    """A folder that both servers know by the same name, of the model itself or inflated."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    made = Path(folder) / "model"
    (inflate(loaded, params) if params else loaded).save_pretrained(made)
    AutoTokenizer.from_pretrained(model).save_pretrained(made)
    print(f"{sum(each.numel() for each in loaded.parameters()) / 1e6:.0f} M parameters as {params or 'they are'}")
    return str(made)


def measure(servers: dict[str, Server], texts: list[str], tokens: int, rounds: int) -> None:
    """Print the figures of all servers with these prompts at a time."""
    found: dict[str, list[Answers]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name in list(servers)[:: 1 if number % 2 else -1]:
            answers = servers[name].ask(texts, tokens)
            if number:  # the first round warms up
                found[name].append(answers)
    print(f"{len(texts)} streams of {tokens} tokens at most, {rounds} rounds")
    reference = found[PLAIN][0].texts
    for name, figures in found.items():
        # but for spaces at the ends
        pairs = [pair for each in figures for pair in zip(each.texts, reference, strict=True)]
        same = sum(text.strip() == other.strip() for text, other in pairs)
        print(f"  {name:40}{summary(figures)}; {same} of {len(texts) * rounds} texts as {PLAIN}")
    ratios = [ours.rate / theirs.rate for ours, theirs in zip(found[OURS], found[THEIRS], strict=True)]
    print(f"  {OURS} / {THEIRS}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--params", type=float)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8101)
    asked = parser.parse_args()
    texts = [json.loads(line)["prompt"] for line in Path(asked.prompts).read_text().splitlines()]
    bin = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = copy_of(asked.model, asked.params, folder)
        # nothing is kept between rounds: each server answers as if asked for the first time
        lade = [str(bin / "lade"), "serve", "--model", model, "--dtype", "float32", "--quiet", "--share", "none"]
        theirs = [str(bin / "transformers"), "serve", model, "--dtype", "float32", "--continuous-batching"]
        theirs += ["--host", "127.0.0.1"]
        commands = {THEIRS: theirs, OURS: lade, PLAIN: [*lade, "--method", "plain"]}
        servers = {
            name: stack.enter_context(running(command, asked.port + number))
            for number, (name, command) in enumerate(commands.items())
        }
        for streams in asked.streams:
            measure(servers, texts[:streams], asked.tokens, asked.rounds)


if __name__ == "__main__":
    main()
