"""JSON schemas through the server: valid, and the tokens of plain decoding with the same grammar, in every situation.

    python lab/experiments/structured.py --schemas FILE.jsonl --out FILE.jsonl [--bfcl FOLDER] [--seconds S]

The file of schemas has one JSON object a line with `id` and `schema`, as jsonschemabench's sample of 400 has
(github.com/guidance-ai/jsonschemabench); the folder has BFCL's `BFCL_v4_*.json` (github.com/ShishirPatil/gorilla). Each
schema is asked for greedily and at temperature 0.7, alone, with many others at once, streamed, behind a prompt in the
prefix cache, and beside requests whose clients leave; each answer is compared with that of `model.generate` with
`Grammar.processor`. Answers go to --out as they come: a run that ended early goes on where it was. By default the model
is the embedded one, in float64.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import torch
import typer

import lade
from lade.embedded import model_path
from lade.server.served_model import ServedModel
from lade.server.settings import Settings
from lade_lab.replay import read_model, table
from lade_lab.served import Reply, ask, ask_streamed, server

CELLS = ("alone", "many at once", "streamed", "prefix reused", "cancelled neighbours")
TEMPERATURES = (0.0, 0.7)
BLOCK, USERS, SIZE, SEED = 8, 32, 16, 11
PROMPT = '''"""Records of the archive, one JSON object each, as they were exported: names, dates, places and amounts.

The first of them follows here, on a line of its own, and then the next ones, until the end of this file.
"""

RECORD = '''
TOOLS = (
    "{% for tool in tools or () %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m['content'] }}\n"
    "{% endfor %}{# <tool_call></tool_call> #}"
)
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}

Record = dict[str, Any]


class Plain:
    """Plain decoding with the same grammar: the reference."""

    def __init__(self, model: Any, tokenizer: Any, tokens: int) -> None:
        self._model, self._tokenizer, self._tokens = model, tokenizer, tokens

    def answer(self, schema: Any, temperature: float) -> Reply:
        """Return the answer of `model.generate`, or why there is none."""
        try:
            processor = lade.Grammar.json_schema(schema).processor(self._tokenizer)
        except (lade.InputError, lade.ConfigError) as problem:
            return Reply(error=str(problem))
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        ids = torch.tensor([self._tokenizer(PROMPT)["input_ids"]])
        torch.manual_seed(SEED)
        arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": self._tokens, **drawn}
        written = self._model.generate(ids, logits_processor=[processor], **arguments)[0, ids.shape[1] :].tolist()
        ended = written[-1] == self._model.generation_config.eos_token_id
        text = self._tokenizer.decode(written, skip_special_tokens=True)
        return Reply(text=text, tokens=written, finish="stop" if ended else "length")


def body_of(schema: Any, temperature: float, tokens: int, salt: str) -> dict[str, Any]:
    """Return the request; only requests with the same salt share memory and prefixes."""
    sampling = {"temperature": temperature, "seed": SEED, "max_tokens": tokens, "cache_salt": salt}
    return {"prompt": PROMPT, "structured_outputs": {"json": schema}, "lookahead": {"budget": SIZE}, **sampling}


def cell_replies(url: str, cell: str, temperature: float, block: Sequence[Record], tokens: int) -> Iterator[Reply]:
    """Yield the answers for a block of schemas in one situation."""
    url, salts = f"{url}/v1/completions", [f"{cell} {temperature} {each['id']}" for each in block]
    if cell == "prefix reused":
        salts = ["the same"] * len(block)
    bodies = [body_of(each["schema"], temperature, tokens, salt) for each, salt in zip(block, salts, strict=True)]
    if cell in ("alone", "prefix reused"):
        yield from (ask(url, body) for body in bodies)
        return
    if cell == "streamed":
        yield from (ask_streamed(url, body) for body in bodies)
        return
    with ThreadPoolExecutor(USERS) as pool:
        others = bodies * (USERS // len(bodies) - 1) if cell == "many at once" else bodies
        leave = partial(ask_streamed, url, leave_after=2)
        neighbours = [
            pool.submit(ask if cell == "many at once" else leave, *args) for args in _pairs(cell, url, others)
        ]
        yield from pool.map(partial(ask, url), bodies)
        for neighbour in neighbours:
            neighbour.result()


def _pairs(cell: str, url: str, bodies: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    salted = [{**body, "cache_salt": f"{body['cache_salt']} neighbour", "seed": SEED + 1} for body in bodies]
    return [(url, body) if cell == "many at once" else (body,) for body in salted]


def judged(schema: Any, plain: Reply, reply: Reply) -> dict[str, Any]:
    """Return what an answer is worth beside that of plain decoding."""
    found = {"refused": reply.error, "different": reply.tokens != plain.tokens or reply.text != plain.text}
    found |= {"finish": reply.finish, "invalid": False, "tokens": len(reply.tokens), "steps": reply.steps}
    if reply.error:
        found["different"] = False
    elif reply.finish == "stop" and (why := misfit(reply.text, schema)):
        found["invalid"], found["why"] = True, why
    if found["different"]:
        found |= {"plain": plain.text, "own": reply.text}
    return {**found, "cached": reply.cached}


def run_schemas(url: str, plain: Plain, schemas: Sequence[Record], tokens: int, out: Path, until: float) -> None:
    """Ask for all schemas that the file of answers does not have yet, a block at a time, until a time."""
    done = {(each["id"], each["temperature"]) for each in lines(out)}
    for temperature, start in ((t, start) for start in range(0, len(schemas), BLOCK) for t in TEMPERATURES):
        missing = [each for each in schemas[start : start + BLOCK] if (each["id"], temperature) not in done]
        if not missing or time.monotonic() > until:
            continue
        references = [plain.answer(each["schema"], temperature) for each in missing]
        written = [
            {"id": each["id"], "temperature": temperature, "cell": "plain", **asdict(reference)}
            | {"server": ask(f"{url}/v1/completions", body_of(each["schema"], temperature, tokens, "")).error}
            for each, reference in zip(missing, references, strict=True)
            if reference.error
        ]
        able = [(each, own) for each, own in zip(missing, references, strict=True) if not own.error]
        for cell in CELLS if able else ():
            replies = cell_replies(url, cell, temperature, [each for each, _ in able], tokens)
            for (each, own), reply in zip(able, replies, strict=True):
                verdict = judged(each["schema"], own, reply)
                written.append({"id": each["id"], "temperature": temperature, "cell": cell, **verdict})
        with out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in written)


def lines(path: Path) -> list[Record]:
    """Return the records of a file of JSON lines; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cause(message: str) -> str:
    """Return a refusal without names and numbers, so that equal causes are equal."""
    return re.sub(r"\d+", "N", re.sub(r"(['\"`]).*?\1", "...", message))[:90]


def summary(records: Sequence[Record]) -> list[Record]:
    """Return the rows of the table, one for each situation and temperature."""
    rows = list[Record]()
    for temperature, cell in ((temperature, cell) for temperature in TEMPERATURES for cell in CELLS):
        own = [each for each in records if (each["temperature"], each["cell"]) == (temperature, cell)]
        answered = [each for each in own if not each["refused"]]
        steps = sum(each["steps"] for each in answered)
        row = {"temperature": str(temperature), "situation": cell, "asked": len(own), "answered": len(answered)}
        row |= {"ended": sum(each["finish"] == "stop" for each in answered)}
        row |= {name: sum(each[name] for each in answered) for name in ("invalid", "different", "tokens")}
        row["tokens per step"] = sum(each["tokens"] - 1 for each in answered) / steps if steps else 0.0
        rows.append({**row, "reused": sum(each["cached"] > 0 for each in answered)})
    return rows


def refusals(records: Sequence[Record]) -> list[Record]:
    """Return how often which cause was given, by plain decoding and by the server."""
    causes = Counter[tuple[str, str]]()
    for each in records:
        if each["cell"] == "plain":
            causes["both" if each["server"] else "plain decoding alone", cause(each["error"])] += 1
        elif each["refused"]:
            causes["server alone", cause(each["refused"])] += 1
    return [{"refused by": by, "cause": why, "times": times} for (by, why), times in causes.most_common()]


def converted(parameters: Any) -> Any:
    """Return BFCL's description of parameters as JSON schema."""
    if isinstance(parameters, list):
        return [converted(each) for each in parameters]
    if not isinstance(parameters, Mapping):
        return parameters
    kind, made = parameters.get("type"), {name: converted(each) for name, each in parameters.items()}
    if isinstance(kind, str):
        made["type"] = _TYPES.get(kind, kind)
        if kind == "any":
            del made["type"]
    return {name: each for name, each in made.items() if name not in ("default", "optional")}


def run_calls(url: str, folder: Path, limit: int, tokens: int, until: float) -> Record:
    """Force a call for each question; return how many arguments parse and fit their schema."""
    counts = Counter[str]()
    questions = [each for path in sorted(folder.glob("BFCL_v4_[sl]*.json")) for each in lines(path)[:limit]]
    for each in questions:
        if time.monotonic() > until:
            break
        functions = [
            {
                **function,
                "name": re.sub(r"[^\w-]", "_", function["name"]),
                "parameters": converted(function["parameters"]),
            }
            for function in each["function"]
        ]
        tools = [{"type": "function", "function": function} for function in functions]
        fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": tokens}
        reply = ask(f"{url}/v1/chat/completions", {"messages": each["question"][0], "tools": tools, **fields})
        counts["asked"] += 1
        counts[f"refused: {cause(reply.error)}" if reply.error else f"ended by {reply.finish}"] += 1
        for call in reply.calls if reply.finish == "tool_calls" else ():
            counts["calls"] += 1
            said, named = call["function"], {function["name"]: function["parameters"] for function in functions}
            if misfit(said["arguments"], {}):
                counts["arguments that do not parse"] += 1
            else:
                counts["arguments that do not fit"] += bool(misfit(said["arguments"], named[said["name"]]))
    return dict(counts)


def misfit(text: str, schema: Any) -> str:
    """Return why a text is not JSON that fits a schema; "" if it is."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as problem:
        return str(problem)[:300]
    return ""


@contextmanager
def serving(model: str) -> Iterator[tuple[str, Any, Any]]:
    """Serve a model that `read_model` reads; yield the URL, the model and its tokenizer."""
    loaded, tokenizer = read_model(model, torch.float64)
    if "tools" not in (tokenizer.chat_template or ""):  # the model's own has no calls
        tokenizer.chat_template = TOOLS
    context = loaded.config.max_position_embeddings
    settings = Settings(max_rows=8, max_waiting=4 * USERS, prefix_cache=2**28)
    with server(ServedModel(loaded, tokenizer, context=context), settings) as url:
        yield url, loaded, tokenizer


def main(
    out: Annotated[Path, typer.Option(help="file of answers; a run goes on where it ended")],
    schemas: Annotated[Path | None, typer.Option(help="schemas, one a line")] = None,
    bfcl: Annotated[Path | None, typer.Option(help="folder with BFCL's files")] = None,
    model: Annotated[str, typer.Option(help="folder, hub id or GGUF file")] = str(model_path()),
    limit: int = 200,
    tokens: int = 128,
    seconds: float = 1e9,
) -> None:
    until = time.monotonic() + seconds
    with serving(model) as (url, loaded, tokenizer):
        if schemas is not None:
            run_schemas(url, Plain(loaded, tokenizer, tokens), lines(schemas)[:limit], tokens, out, until)
        if bfcl is not None:
            print(json.dumps(run_calls(url, bfcl, limit, tokens, until), indent=1))
    records = lines(out)
    columns = ["asked", "answered", "ended", "invalid", "different", "tokens", "tokens per step", "reused"]
    print(table(["temperature", "situation", *columns], summary(records)))
    print(table(["refused by", "cause", "times"], refusals(records)))


if __name__ == "__main__":
    typer.run(main)
