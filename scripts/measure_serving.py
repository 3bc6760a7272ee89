"""What HTTP costs: tokens per second of the engine alone, and of the same requests through `lade serve`.

Both arms decode the same prompts greedily on the embedded model, taking turns; the clients of the second one are in a
process of their own.

Usage: python scripts/measure_serving.py [streams] [tokens] [rounds]
"""

import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

from lade import Engine
from lade.cli.loading.load import load
from lade.cli.options.model import Loading
from lade.cli.terminal import terminal
from lade.embedded.files import prompts
from lade.server.listen import run
from lade.server.served_model import ServedModel
from lade.server.service import Service
from lade.server.settings import Settings
from lade.server.sockets import bound, url_of

CLIENT = """
import json, sys, threading, time, urllib.request
url, tokens, texts = json.loads(sys.argv[1])
counts = []
firsts = []
def ask(text):
    start = time.perf_counter()
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    last = None
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                if last is None:
                    firsts.append(time.perf_counter() - start)
                last = line
    counts.append(json.loads(last[6:])["usage"]["completion_tokens"])
start = time.perf_counter()
threads = [threading.Thread(target=ask, args=[text]) for text in texts]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps([sum(counts), time.perf_counter() - start, sorted(firsts)[len(firsts) // 2]]))
"""


def alone(engine: Engine, tokenizer, texts: list[str], tokens: int) -> tuple[float, float]:
    """Tokens per second, and the median of seconds until the first token."""
    start = time.perf_counter()
    arguments = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "stop_texts": []}
    handles = [engine.add(tokenizer(text)["input_ids"], tokenizer=tokenizer, **arguments) for text in texts]
    done = sum(len(handle.result()[0]) - handle.prompt_tokens for handle in handles)
    seconds = time.perf_counter() - start
    return done / seconds, statistics.median(handle.queue_s + handle.prefill_s for handle in handles)


def through_http(url: str, texts: list[str], tokens: int) -> tuple[float, float]:
    """The same."""
    command = [sys.executable, "-c", CLIENT, json.dumps([url, tokens, texts])]
    done, seconds, first = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return done / seconds, first


def main() -> None:
    streams, tokens, rounds = (int(word) for word in (sys.argv[1:] + ["8", "200", "5"][len(sys.argv) - 1 :]))
    with terminal() as term:
        loaded = load(Loading(), term=term)
    served = ServedModel(loaded.model, loaded.tokenizer, context=loaded.context)
    # nothing is kept between requests: both arms draft alike in every round
    service = Service(Settings(max_rows=streams, max_waiting=4 * streams, share="none"), lambda: served)
    listening = bound("127.0.0.1", 0)
    thread = threading.Thread(target=run, args=[service, listening], daemon=True)
    thread.start()
    while service.phase == "loading" and service.problem is None:
        time.sleep(0.1)
    url = url_of("127.0.0.1", listening)
    urllib.request.urlopen(f"{url}/ready").close()
    texts = (prompts() * streams)[:streams]
    found = {"engine": [], "http": []}
    for number in range(rounds + 1):
        for name in sorted(found, reverse=bool(number % 2)):
            if name == "engine":
                figures = alone(service.engine, loaded.tokenizer, texts, tokens)
            else:
                figures = through_http(url, texts, tokens)
            if number:  # the first round warms up
                found[name].append(figures)
    for name, figures in found.items():
        rates, firsts = ([pair[k] for pair in figures] for k in (0, 1))
        spread = f"{min(rates):.0f} to {max(rates):.0f}"
        first = 1e3 * statistics.median(firsts)
        print(f"{name:7}{statistics.median(rates):8.1f} tokens/s ({spread}), first token after {first:.1f} ms")
    ratio = statistics.median(b[0] / a[0] for a, b in zip(found["engine"], found["http"], strict=True))
    print(f"http / engine, {streams} streams: {ratio:.3f} (median of {rounds} pairs)")


if __name__ == "__main__":
    main()
