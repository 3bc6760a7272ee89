"""Recorded runs of agents, replayed turn by turn: tokens per step by turn, and how much of each prompt is reused.

    python lab/experiments/agents.py --tau FILE.json --swe FOLDER [--runs 30] [--sizes 8,16] [--times] [--json FILE]

FILE is a file of recorded runs of tau-bench (github.com/sierra-research/tau-bench, `historical_trajectories`), FOLDER
has trajectories of SWE-agent (`*.traj`). Each answer of the agent, tool calls included, takes the place of the model's
choices (`lade_lab.replay`). The library's method decodes in an engine with a prefix cache, as `lade serve` does: *kept*
with one memory for all turns and runs, in order; *cold* with an empty one each turn. Prompt lookup is vLLM's ngram,
with all places in one tree; *suffix* knows the request, *suffix, kept* the earlier answers too; *kept,
answers* predicts each answer by the earlier ones, the latest `ANSWERS` tokens of them. *server, kept* is the
same by `/v1/chat/completions` of a server, whose chat template writes the messages as the others read them; calls are
text there, too.

With --times it is the time to the first token that is measured, of *adaptive, kept* with and without a prefix cache.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

import lade
from lade.embedded import model_path
from lade.server.served_model import ServedModel
from lade.server.settings import Settings
from lade_lab.replay import read_model, recorded, replay, table, without_end
from lade_lab.served import ask, server

BUCKETS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 999))
"""First and last turn of each column."""
PREFIX_BYTES = 2**30
METHODS = ("prompt lookup", "suffix", "suffix, kept", "adaptive, cold", "adaptive, kept", "adaptive, kept, answers")
METHODS += ("server, kept",)
ANSWERS = 4096
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class Turn(NamedTuple):
    """One answer of an agent, from number 1 on in its run, and the conversation before it, as ids."""

    number: int
    prompt: list[int]
    answer: list[int]


class Counts(NamedTuple):
    """Figures of one turn by one method; `first_s` is the time to the first token, of engines only."""

    number: int
    stats: lade.Stats
    prompt_tokens: int
    cached_tokens: int
    first_s: float = 0.0


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, tool calls as JSON."""
    calls = message.get("tool_calls") or []
    if isinstance(calls, str):
        calls = ast.literal_eval(calls)  # SWE-agent writes Python
    functions = [json.dumps(call["function"], sort_keys=True) for call in calls]
    content = message.get("content") or ""
    content = content if isinstance(content, str) else json.dumps(content)
    return "\n".join([*([content] if content else []), *(f"<tool_call>{each}</tool_call>" for each in functions)])


def turns(messages: Sequence[Mapping[str, Any]], encode: Callable[[str], list[int]]) -> Iterator[Turn]:
    """Yield the agent's turns; each message is encoded alone, so that prompts begin with the one before."""
    known, number = list[int](), 0
    for message in messages:
        known = [*known, *encode(f"<|{message['role']}|>\n")]
        written = encode(f"{text_of(message)}<|end|>\n")
        if message["role"] == "assistant":
            number += 1
            yield Turn(number, known, written)
        known = [*known, *written]


def tau_runs(path: Path) -> list[list[dict[str, Any]]]:
    """Return the conversations of a file of tau-bench."""
    return [run["traj"] for run in json.loads(path.read_text())]


def swe_runs(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the conversations of a folder of SWE-agent."""
    return [json.loads(path.read_text())["history"] for path in sorted(folder.glob("*.traj"))]


def by_peer(name: str, size: int, runs: Sequence[Sequence[Turn]], vocabulary: int) -> Iterator[Counts]:
    """Replay all runs by a method that does not read logits."""
    drafters: dict[str, lade.Drafter] = {
        "prompt lookup": lade.peers.PromptLookup(size),
        "suffix": lade.peers.Suffix(size),
        "suffix, kept": lade.peers.Suffix(size, keep_tokens=sys.maxsize),
    }
    for turn in (turn for run in runs for turn in run):
        stats = replay(turn.prompt, turn.answer, drafters[name], vocabulary)
        yield Counts(turn.number, stats, len(turn.prompt), 0)


class Way(NamedTuple):
    """How an engine replays runs.

    Attributes:
        kept: one memory for all turns and runs.
        answers: earlier answers are predictions.
        cache: size of the prefix cache in bytes.
        timed: the time to the first token is wanted, so that only the answer's logits are replaced.
    """

    kept: bool = True
    answers: bool = False
    cache: int = PREFIX_BYTES
    timed: bool = False


def by_engine(way: Way, size: int, runs: Sequence[Sequence[Turn]], model: Any) -> Iterator[Counts]:
    """Replay all runs by the library's method, in an engine."""
    memory, earlier = lade.Memory(), list[int]()
    with lade.Engine(model, max_rows=1, max_tokens=2**16, prefix_cache=way.cache) as engine:
        for turn in (turn for run in runs for turn in run):
            text = [*turn.prompt, *turn.answer]
            config = lade.LookaheadConfig(budget=size, memory=memory if way.kept else lade.Memory())
            with recorded(model, text, len(turn.prompt) - 1 if way.timed else 0):
                arguments = {"max_new_tokens": len(turn.answer), "do_sample": False}
                prediction = earlier[-ANSWERS:] if way.answers and earlier else None
                handle = engine.add(turn.prompt, lookahead=config, prediction=prediction, scope="agent", **arguments)
                assert handle.result()[0].tolist() == text, "the recorded text is not what was decoded"
            earlier += turn.answer
            assert handle.queue_s is not None
            assert handle.prefill_s is not None
            waited = handle.queue_s + handle.prefill_s
            yield Counts(turn.number, handle.stats, handle.prompt_tokens, handle.cached_tokens, waited)


def first_tokens(size: int, runs: Sequence[Sequence[Turn]], model: Any) -> Iterator[dict[str, Any]]:
    """Yield a row of the table of times with and without a prefix cache: medians by the number of the turn."""
    for cache in (PREFIX_BYTES, 0):
        groups = by_turn(list(by_engine(Way(cache=cache, timed=True), size, runs, model)))
        if cache:
            prompts = {name: int(median(each.prompt_tokens for each in group)) for name, group in groups.items()}
            yield {"": "tokens of the prompt", **prompts}
            fresh = {k: int(median(e.prompt_tokens - e.cached_tokens for e in group)) for k, group in groups.items()}
            yield {"": "of them not in the cache", **fresh}
        times = {name: 1000 * median(each.first_s for each in group) for name, group in groups.items()}
        yield {"": f"ms to the first token, {'with' if cache else 'without'} the cache", **times}


def by_server(size: int, runs: Sequence[Sequence[Mapping[str, Any]]], model: Any, tokenizer: Any) -> Iterator[Counts]:
    """Replay all runs, given as messages, by chat completions, with one memory and prefix cache."""
    tokenizer.chat_template = TEMPLATE
    served = ServedModel(model, tokenizer, context=2**16)
    with server(served, Settings(max_rows=1, max_tokens=2**16, prefix_cache=PREFIX_BYTES, max_body=2**26)) as url:
        for messages in runs:
            sent, number = list[dict[str, str]](), 0
            for message in messages:
                content = text_of(message)
                if message["role"] == "assistant":
                    number += 1
                    yield _asked(url, size, Asked(number, sent, content), model, tokenizer)
                sent.append({"role": "user" if message["role"] == "tool" else message["role"], "content": content})


class Asked(NamedTuple):
    """One request of an agent: the number of its answer in the run, the conversation so far and the recorded answer."""

    number: int
    messages: list[dict[str, str]]
    answer: str


def _asked(url: str, size: int, asked: Asked, model: Any, tokenizer: Any) -> Counts:
    prompt = tokenizer.apply_chat_template(asked.messages, add_generation_prompt=True, return_dict=False)
    answer = tokenizer(f"{asked.answer}<|end|>\n", add_special_tokens=False)["input_ids"]
    body = {"messages": asked.messages, "max_tokens": len(answer), "temperature": 0, "lookahead": {"budget": size}}
    with recorded(model, [*prompt, *answer]):
        reply = ask(f"{url}/v1/chat/completions", {**body, "cache_salt": "agent"})
    assert reply.tokens == answer, reply.error or "the recorded answer is not what was decoded"
    stats = lade.Stats(new_tokens=len(answer), steps=reply.steps, accepted_tokens=len(answer) - 1)
    return Counts(asked.number, stats, len(prompt), reply.cached)


def by_turn(counts: Sequence[Counts]) -> dict[str, list[Counts]]:
    """Return the turns by the column that their number belongs to, and all of them."""
    groups: dict[str, list[Counts]] = defaultdict(list)
    for each in counts:
        groups["all"].append(each)
        groups[next(_name(bucket) for bucket in BUCKETS if bucket[0] <= each.number <= bucket[1])].append(each)
    return groups


def summary(counts: Sequence[Counts]) -> dict[str, Any]:
    """Return tokens per step, in all and by turn, tokens fed, and the share of the prompts that was reused."""
    groups, row = by_turn(counts), dict[str, Any]()
    for name, group in groups.items():
        steps = sum(each.stats.steps for each in group)
        row[name] = sum(each.stats.accepted_tokens for each in group) / max(1, steps)
    total = groups["all"]
    if fed := sum(each.stats.fed_tokens for each in total):  # a server does not tell
        row["fed"] = fed / max(1, sum(each.stats.steps for each in total))
    if cached := sum(each.cached_tokens for each in total):
        row["reused, %"] = 100 * cached / sum(each.prompt_tokens for each in total)
    row["turns"], row["tokens"] = len(total), sum(each.stats.new_tokens for each in total)
    return row


def _name(bucket: tuple[int, int]) -> str:
    first, last = bucket
    return f"turn {first}" if first == last else f"{first}+" if last == BUCKETS[-1][1] else f"{first}-{last}"


NAMES = [_name(bucket) for bucket in BUCKETS]
"""Columns by turn."""


def rows(
    model: str,
    found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    sizes: Sequence[int],
    methods: Sequence[str] = METHODS,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table for recorded runs, given as messages by their source; see `read_model`."""
    _, tokenizer = read_model(model)
    for (data, conversations), size in product(found.items(), sizes):
        replayed = [list(turns(messages, partial(ids_of, tokenizer))) for messages in conversations]
        for name in methods if replayed else ():
            loaded = without_end(model, longest(replayed))  # what is learned of its MTP layer stays with a model
            if name.startswith("server"):
                counts = list(by_server(size, conversations, loaded, tokenizer))
            elif name.startswith("adaptive"):
                counts = list(by_engine(Way("kept" in name, "answers" in name), size, replayed, loaded))
            else:
                counts = list(by_peer(name, size, replayed, loaded.config.vocab_size))
            yield {"runs of": data, "size": size, "method": name, **summary(counts)}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return a text's ids, without special ones."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def longest(runs: Sequence[Sequence[Turn]]) -> int:
    """Return the most tokens that a turn of these runs has, prompt and answer."""
    return max(len(turn.prompt) + len(turn.answer) for run in runs for turn in run)


def main(
    tau: Annotated[Path | None, typer.Option(help="file of recorded runs of tau-bench")] = None,
    swe: Annotated[Path | None, typer.Option(help="folder of trajectories of SWE-agent")] = None,
    model: Annotated[str, typer.Option(help="folder, hub id or GGUF file")] = str(model_path()),
    runs: int = 30,
    sizes: str = "8,16",
    methods: str = ";".join(METHODS),
    times: Annotated[bool, typer.Option(help="measure the time to the first token only")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="file for the figures")] = None,
) -> None:
    found = {
        "tau-bench": [] if tau is None else tau_runs(tau)[:runs],
        "SWE-agent": [] if swe is None else swe_runs(swe)[:runs],
    }
    by_size = [int(size) for size in sizes.split(",")]
    if times:
        _, tokenizer = read_model(model)
        for conversations, size in product(found.values(), by_size):
            if replayed := [list(turns(messages, partial(ids_of, tokenizer))) for messages in conversations]:
                loaded = without_end(model, longest(replayed))
                print(table(["", "all", *NAMES], list(first_tokens(size, replayed, loaded))))
        return
    made = list[dict[str, Any]]()
    for row in rows(model, found, by_size, methods.split(";")):
        made.append(row)
        print(row, flush=True)
    columns = ["all", *NAMES, "fed", "reused, %", "turns", "tokens"]
    print(table(["runs of", "size", "method", *columns], made))
    if output is not None:
        output.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
