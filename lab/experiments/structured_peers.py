"""JSON schemas through other servers: how many answers are invalid, and how many change with speculation.

    python lab/experiments/structured_peers.py ask --url URL --server vLLM --speculation none --schemas FILE --out OUT
    python lab/experiments/structured_peers.py ask --url URL --server vLLM --speculation ngram --schemas FILE --out OUT
    python lab/experiments/structured_peers.py table --out OUT

All servers have the same model in float32 and get the same prompt, as ids, schemas, and 128 tokens at most, from
one user and from eight at once; greedily and at temperature 0.7 with a seed, without top-k, top-p or min-p. *Different*
is an answer whose tokens are not those of the same server without speculation, asked by one user.

    python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 --enforce-eager --max-model-len 1024
        --speculative-config '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1,
                               "prompt_lookup_max": 4}'
    llama-server -m FILE.gguf -ctk f32 -ctv f32 -np 8 --kv-unified -c 8192 --spec-type ngram-simple
        --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8
    lade serve --model FOLDER --dtype fp32 --max-rows 8

The file for llama-server is written by `lab/experiments/write_gguf.py --text`. For `lade serve`, --speculation sets the
field `lookahead` of the requests: "none", or a name that ends with a size, such as "adaptive 16".
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from structured import PROMPT, cause, lines, misfit
from transformers import AutoTokenizer

from lade.embedded import model_path
from lade_lab.replay import table

SERVERS = ("vLLM", "llama-server", "lade")
USERS, TEMPERATURES, SEED = (1, 8), (0.0, 0.7), 11
PLAIN = "none"
"""The speculation of the answers that all others of a server are compared with."""
app = typer.Typer()

Record = dict[str, Any]


def body_of(
    server: str, speculation: str, prompt: Sequence[int], schema: Any, temperature: float, tokens: int
) -> Record:
    """Return the request in a server's own fields."""
    body = {"prompt": list(prompt), "temperature": temperature, "seed": SEED, "top_p": 1.0, "min_p": 0.0}
    if server == "llama-server":
        own = {"n_predict": tokens, "json_schema": schema, "return_tokens": True, "cache_prompt": False, "top_k": 0}
        return {**body, **own}
    body |= {"max_tokens": tokens, "structured_outputs": {"json": schema}, "return_token_ids": True}
    if server == "lade":
        body["lookahead"] = None if speculation == PLAIN else {"budget": int(speculation.rsplit(maxsplit=1)[-1])}
    return body


def answer(url: str, server: str, body: Mapping[str, Any]) -> Record:
    """Post a request; return text, tokens, end and accepted tokens, or the refusal."""
    path = "/completion" if server == "llama-server" else "/v1/completions"
    headers = {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, json.dumps(body).encode(), headers), timeout=120
        ) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as problem:
        return {"refused": message_of(problem.read().decode())}
    except OSError as problem:  # the server has gone, or does not answer
        return {"refused": f"no answer: {problem}"[:300]}
    if server == "llama-server":
        ended, timings = found["stop_type"] == "eos", found["timings"]
        return {
            "text": found["content"],
            "tokens": found["tokens"],
            "ended": ended,
            "accepted": timings.get("draft_n_accepted", 0),
        }
    (choice,) = found["choices"]
    return {"text": choice["text"], "tokens": choice["token_ids"], "ended": choice["finish_reason"] == "stop"}


def message_of(answer: str) -> str:
    """Return the message of an error in OpenAI's shape, or the beginning of any other."""
    try:
        return str(json.loads(answer)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return answer[:300]


def accepted(url: str) -> float:
    """Return the sum of accepted draft tokens by the server's metrics; 0 where there are none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics") as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError:
        return 0.0
    found = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def summary(records: Sequence[Record]) -> list[Record]:
    """Return a row of the table for each server, speculation, temperature and number of users."""
    rows = list[Record]()
    plain = {
        (r["server"], r["temperature"], r["id"]): r["tokens"]
        for r in records
        if r["speculation"] == PLAIN and r["users"] == 1 and "tokens" in r
    }
    keys = dict.fromkeys((r["server"], r["speculation"], r["temperature"], r["users"]) for r in records)
    for server, speculation, temperature, users in sorted(
        keys, key=lambda k: (SERVERS.index(k[0]), k[2], k[1] != PLAIN, *k)
    ):
        names = ("server", "speculation", "temperature", "users")
        own = [r for r in records if tuple(r[name] for name in names) == (server, speculation, temperature, users)]
        answered = [r for r in own if "tokens" in r]
        tokens = sum(len(r["tokens"]) for r in answered)
        both = [
            (plain[server, temperature, r["id"]], r["tokens"])
            for r in answered
            if (server, temperature, r["id"]) in plain
        ]
        row = {"server": server, "speculation": speculation, "temperature": str(temperature), "users": users}
        row |= {"asked": len(own), "answered": len(answered), "ended": sum(r["ended"] for r in answered)}
        row |= {"invalid": sum(r["ended"] and not r["valid"] for r in answered)}
        row |= {"compared": len(both), "different": sum(one != other for one, other in both)}
        rows.append({**row, "tokens per step": tokens / max(1, tokens - sum(r["accepted"] for r in answered))})
    return rows


def answers_table(records: Sequence[Record]) -> str:
    """Return the table of answers by server."""
    columns = ["asked", "answered", "ended", "invalid", "compared", "different", "tokens per step"]
    return table(["server", "speculation", "temperature", "users", *columns], summary(records))


def refusals_table(records: Sequence[Record]) -> str:
    """Return the table of refusals by server and cause."""
    causes = Counter((r["server"], cause(r["refused"])) for r in records if "refused" in r)
    return table(
        ["server", "cause", "times"], [{"server": s, "cause": c, "times": n} for (s, c), n in causes.most_common()]
    )


@app.command()
def ask(
    url: Annotated[str, typer.Option(help="URL of a running server, without a path")],
    server: Annotated[str, typer.Option(help=f"its kind: {', '.join(SERVERS)}")],
    speculation: Annotated[str, typer.Option(help=f"name for the table; {PLAIN!r} without")],
    schemas: Annotated[Path, typer.Option(help="schemas, one a line")],
    out: Annotated[Path, typer.Option(help="file of answers, which are appended")],
    model: Annotated[str, typer.Option(help="folder of the tokenizer")] = str(model_path()),
    limit: int = 40,
    tokens: int = 128,
) -> None:
    """Ask one server for all schemas, and append its answers."""
    prompt, found = AutoTokenizer.from_pretrained(model)(PROMPT)["input_ids"], lines(schemas)[:limit]
    for temperature, users in ((temperature, users) for temperature in TEMPERATURES for users in USERS):
        before, began = accepted(url), time.monotonic()
        with ThreadPoolExecutor(users) as pool:
            bodies = [body_of(server, speculation, prompt, each["schema"], temperature, tokens) for each in found]
            replies = list(pool.map(lambda body: answer(url, server, body), bodies))
        written = list[Record]()
        for each, reply in zip(found, replies, strict=True):
            fields = {"server": server, "speculation": speculation, "temperature": temperature, "users": users}
            if reply.get("ended"):
                reply["valid"] = not misfit(reply["text"], each["schema"])
            written.append({**fields, "id": each["id"], "accepted": 0, **reply})
        if server != "llama-server":  # those of all answers, noted with the first
            next(each for each in written if "tokens" in each)["accepted"] = accepted(url) - before
        with out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in written)
        print(server, speculation, temperature, users, f"{time.monotonic() - began:.1f} s", flush=True)


@app.command("table")
def show(out: Annotated[Path, typer.Option(help="file of answers")]) -> None:
    """Print the table, and the causes of refusals."""
    print(answers_table(lines(out)), refusals_table(lines(out)), sep="\n\n")


if __name__ == "__main__":
    app()
