"""The checks. A model need not be clever: what it says has to be what it says alone and by `model.generate`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lade.cli.loading import LoadedModel
from lade_lab.live_server import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Answer, Client, Reply, answer_of

TOOL_TOKENS, TURNS, AT_ONCE = 25_000, 40, 8
SECRET = "48151"
MEMBERS = {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 99}}
SCHEMA = {"type": "object", "properties": MEMBERS, "required": [*MEMBERS], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Count things.", "parameters": SCHEMA}}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "seed": 7, "max_tokens": 24}
ROOM = 600  # tokens left for templates, questions and answers
_salts = (f"fresh {number}" for number in range(10**9))


class FailedError(Exception):
    """A check has not passed."""


def expect(true: object, otherwise: str) -> None:
    """Raise `FailedError` otherwise."""
    if not true:
        raise FailedError(otherwise)


@dataclass(frozen=True)
class Tried:
    """The server under test."""

    url: str
    loaded: LoadedModel
    context: int
    most: int

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send a request over a connection of its own."""
        return Client(self.url).post(path, body)

    def ask(self, path: str, **body: Any) -> Answer:
        """Return the answer to a request."""
        return answer_of(path, self.post(path, body))

    def alone(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a chat decoded plainly, with nothing cached."""
        return self.ask(CHAT, **{**body, "lookahead": None, "cache_salt": next(_salts)})

    def tokens(self, body: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return the ids of a chat's prompt and of its answer."""
        prompt, reply = (self.post(path, {**body, "return_token_ids": True}) for path in ("/tokenize", CHAT))
        expect(prompt.status == reply.status == 200, f"{reply.status}: {reply.body[:200]!r}")
        return prompt.json["tokens"], reply.json["choices"][0]["token_ids"]

    def generated(self, ids: list[int], body: Mapping[str, Any]) -> list[int]:
        """Return transformers' answer to a prompt."""
        given, sampled = torch.tensor([ids]), body["temperature"] != 0
        arguments = {name: body[name] for name in ("temperature", "top_p", "top_k") if sampled}
        arguments |= {"attention_mask": torch.ones_like(given), "max_new_tokens": body["max_tokens"]}
        torch.manual_seed(body.get("seed", 0))
        return list(self.loaded.model.generate(given, do_sample=sampled, **arguments)[0, len(ids) :].tolist())

    def same(self, body: Mapping[str, Any]) -> list[int]:
        """Return the answer to a chat, after holding it against transformers' on the same ids."""
        ids, answer = self.tokens({**body, "cache_salt": next(_salts)})
        expect(answer == self.generated(ids, body), f"not model.generate's answer to {len(ids):,} tokens")
        return answer

    def decoded(self, tokens: list[int]) -> str:
        """Return the text of an answer."""
        return str(self.loaded.tokenizer.decode(tokens, skip_special_tokens=True))


def said(content: str) -> dict[str, Any]:
    """Return a message of a user."""
    return {"role": "user", "content": content}


def haystack(tried: Tried, tokens: int) -> str:
    """Return notes of about so many tokens, one of which has the secret number."""
    rng, things, kept, count = random.Random(3), ("lamp", "chair", "book", "clock", "map"), list[str](), 20
    while count < tokens - 40:
        thing, shelf, price = rng.choice(things), rng.randrange(90), rng.randrange(900)
        kept.append(f"Note {len(kept)}: the {thing} on shelf {shelf} costs {price}.")
        count += len(tried.loaded.tokenizer(f"{kept[-1]}\n", add_special_tokens=False)["input_ids"])
    kept.insert(3 * len(kept) // 8, f"The secret number is {SECRET}.")
    return "\n".join(kept)


def as_model_generate(tried: Tried) -> str:
    """Short answers, greedy and seeded, are those of transformers."""
    questions = ["What is the capital of France?", "Write a function that adds two numbers.", "Name three colours."]
    answers = [tried.same({"messages": [said(each)], **how}) for each in questions for how in (GREEDY, SEEDED)]
    return f"{len(answers)} answers equal; the first: {tried.decoded(answers[0])[:40]!r}"


def needle_in_a_long_context(tried: Tried) -> str:
    """A prompt as long as the context takes, with one line that matters."""
    tokens = min(tried.context - ROOM, tried.most)
    question = f"{haystack(tried, tokens)}\n\nWhat is the secret number? Answer with the number."
    answer = tried.decoded(tried.same({"messages": [said(question)], **GREEDY}))
    return f"{tokens:,} tokens: model.generate's answer; {'found' if SECRET in answer else 'the model did not find it'}"


def long_answer_of_a_tool(tried: Tried) -> str:
    """An answer of a tool of 25,000 tokens, or of as many as the options allow; and one that is too long."""
    tokens = min(TOOL_TOKENS, tried.most)
    fits = tokens <= tried.context - ROOM
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}

    def body(length: int) -> dict[str, Any]:
        asked = [said("Read the notes."), {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "call_1", "content": haystack(tried, length)}
        return {"messages": [*asked, result, said("What is the secret number?")], "tools": TOOLS, **GREEDY}

    found = "found" if fits and SECRET in tried.decoded(tried.same(body(tokens))) else "not found by the model"
    refused = tried.post(CHAT, body(tried.context + 10 if fits else tokens))
    error = refused.json.get("error", {})
    clean = refused.status == 400 and error.get("code") == "context_length_exceeded"
    expect(clean and str(tried.context) in error["message"], f"too long: {refused.status} {refused.body[:200]!r}")
    limit = f"refused by 400, which names the limit of {tried.context:,}"
    return f"{tokens:,} tokens: " + (f"model.generate's answer, {found}; a longer one {limit}" if fits else limit)


def forty_turns_with_tools(tried: Tried) -> str:
    """Forty turns with tools: calls are of the schema, prefixes are reused, answers are those of plain decoding."""
    conversation, calls, cached, prompts, choices = list[dict[str, Any]](), 0, 0, 0, ["required", "auto"]
    body: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, "temperature": 0}
    for turn in range(TURNS):
        conversation.append(said(f"{turn}: how many things of kind {turn % 7} are there?"))
        asked = {**body, "messages": conversation, "tool_choice": choices[turn % len(choices)]}
        asked["max_tokens"] = 32 if asked["tool_choice"] == "auto" else 120
        reply = tried.post(CHAT, {**asked, "cache_salt": "agent"})
        if reply.status == 400 and "markup" in reply.json["error"]["message"] and not calls:
            choices, asked["tool_choice"] = ["auto"], "auto"  # the template has no calls that can be demanded
            reply = tried.post(CHAT, {**asked, "cache_salt": "agent"})
        expect(reply.status == 200, f"turn {turn + 1}: {reply.status} {reply.body[:200]!r}")
        if turn % 10 == 9:
            expect(answer_of(CHAT, reply) == tried.alone(asked), f"turn {turn + 1} is not as decoded plainly")
        (choice,), usage = reply.json["choices"], reply.json["usage"]
        message = choice["message"]
        if choice["finish_reason"] == "length":
            message.pop("tool_calls", None)  # it is cut off
        prompts += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        conversation.append({"role": "assistant", "content": message.get("content") or ""})
        if made := message.get("tool_calls"):
            conversation[-1]["tool_calls"] = made
        for call in made or ():
            check_schema(call["function"]["arguments"], f"turn {turn + 1}")
            conversation.append({"role": "tool", "tool_call_id": call["id"], "content": str(turn)})
        expect(made or asked["tool_choice"] == "auto", f"turn {turn + 1}: no call, though one is required")
        calls += len(made or ())
        if usage["prompt_tokens"] > min(tried.context - ROOM / 2, tried.most):  # as clients do: the older half goes
            users = [at for at, each in enumerate(conversation) if each["role"] == "user"]
            del conversation[: users[len(users) // 2]]
    demanded = "" if len(choices) > 1 else ", which the template cannot demand"
    return f"{TURNS} turns, {calls} calls{demanded}; {cached / prompts:.0%} of {prompts:,} prompt tokens cached"


def check_schema(text: str, where: str) -> None:
    """Raise `FailedError` or `ValueError` unless a text is JSON of `SCHEMA`."""
    found = json.loads(text)
    right = isinstance(found, dict) and set(found) == set(MEMBERS)
    expect(right and isinstance(found["name"], str) and found["count"] in range(100), f"{where}: {text[:80]!r}")


def json_under_load(tried: Tried) -> str:
    """Eight answers in JSON at once: all are of the schema, and equal to those given alone."""
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
    bodies = [
        {"messages": [said(f"An object about number {n}.")], "response_format": form, **how, "max_tokens": 80}
        for n in range(AT_ONCE // 2)
        for how in (GREEDY, SEEDED)
    ]
    alone = [tried.alone(body).text for body in bodies]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = [answer.text for answer in pool.map(lambda body: tried.ask(CHAT, **body), bodies)]
    for text in together:
        check_schema(text, "under load")
    equal = sum(map(str.__eq__, alone, together))
    expect(equal == AT_ONCE, f"{AT_ONCE} parse, but {equal} equal the answer given alone")
    return f"{AT_ONCE} at once: all parse, all equal to the answer given alone"


def reasoning(tried: Tried) -> str:
    """Marks of reasoning are parsed, or there are none."""
    body = {"messages": [said("Think: what is 17 times 3?")], "reasoning_effort": "low", **GREEDY, "max_tokens": 120}
    whole, streamed = (tried.ask(CHAT, **body, stream=stream) for stream in (False, True))
    expect("think>" not in whole.text, f"a mark in the text: {whole.text[:80]!r}")
    expect(whole == streamed, "streamed, it is another answer")
    thoughts = "".join(whole.of_kind("reasoning"))
    return f"{len(thoughts)} characters of reasoning apart from the text" if thoughts else "no reasoning, and no marks"


def stop_texts(tried: Tried) -> str:
    """Answers end before the first stop text, streamed or not."""
    body = {"prompt": "The days of the week are Monday, Tuesday,", "max_tokens": 40, "temperature": 0}
    whole = tried.ask(COMPLETIONS, **body).text
    places = [at for at in (len(whole) // 4, len(whole) // 2, 3 * len(whole) // 4) if whole[at : at + 4]]
    expect(places, "the answer is empty")
    for stop in [whole[at : at + 4] for at in places]:
        cut = whole[: whole.index(stop)]
        for stream in (False, True):
            found = tried.ask(COMPLETIONS, **body, stop=[stop, "never said"], stream=stream)
            expect(found.text == cut and found.ends == ["stop"], f"stop {stop!r}: {found.text!r}, not {cut!r}")
    return f"{2 * len(places)} answers cut at their stop text"


def streamed_as_whole(tried: Tried) -> str:
    """What is streamed is what is answered whole, by four APIs."""
    question = "Tell me about the sea."
    fields: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [said(question)]}, COMPLETIONS: {"prompt": question},
        RESPONSES: {"input": question}, MESSAGES: {"messages": [said(question)]},
    }  # fmt: skip
    for path, own in fields.items():
        for how in (GREEDY, SEEDED):
            body = {**own, **how}
            if path == RESPONSES:
                body["max_output_tokens"] = body.pop("max_tokens")
            expect(tried.ask(path, **body) == tried.ask(path, **body, stream=True), f"{path}: they differ")
    return f"{2 * len(fields)} pairs equal"


def seeds(tried: Tried) -> str:
    """A seed gives one answer, `n` choices those of the seeds that follow."""
    body = {"messages": [said("Invent a name for a ship.")], **SEEDED}
    three = tried.ask(CHAT, **{**body, "n": 3}).choices
    lone = [tried.ask(CHAT, **{**body, "seed": SEEDED["seed"] + k}).choices[0] for k in range(3)]
    expect(three == lone, "choices of n=3 are not those of the three seeds")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        again = list(pool.map(lambda _: tried.ask(CHAT, **body).choices[0], range(AT_ONCE)))
    expect(all(each == lone[0] for each in again), f"of {AT_ONCE} at once some differ")
    return f"n=3 are three seeds; {AT_ONCE} at once equal"


def health_and_metrics(tried: Tried) -> str:
    """Probes are green, metrics add up, nothing is left in progress."""
    paths = ("/live", "/ready", "/health", "/version", "/v1/models", "/metrics")
    replies = [Client(tried.url).get(path) for path in paths]
    expect({each.status for each in replies} == {200}, f"statuses {[each.status for each in replies]}")
    busy = re.compile(r'lade_kv_slots_used|lade_requests_total.*outcome="error"')
    wrong = [line for line in replies[-1].body.decode().splitlines() if busy.match(line) and not line.endswith(" 0.0")]
    expect(not wrong, f"not at rest, or failed: {wrong}")
    return f"{len(paths)} probes green, no slot in use, no answer failed"


FIRST = as_model_generate, needle_in_a_long_context, long_answer_of_a_tool, forty_turns_with_tools, json_under_load
LAST = reasoning, stop_texts, streamed_as_whole, seeds, health_and_metrics
CHECKS = {each.__name__.replace("_", " "): each for each in (*FIRST, *LAST)}
"""Checks by name; each returns what happened, or raises `FailedError`."""
