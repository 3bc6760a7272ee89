"""Answers in a form, and calls that are forced: the tokens of `model.generate` with the grammar's processor."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import jsonschema
import pytest
from pretend import without
from served import (
    MODEL,
    SOON,
    TOKENIZER,
    byte_model,
    byte_tokenizer,
    plain,
    running,
    slow_served,
    templated,
    text_of,
    until,
)

from lade import Grammar
from lade.backends.grammar import trial as trials
from lade.backends.grammar.compiled import GrammarBudget, vocabulary_of_tokenizer
from lade.grammar import GrammarError
from lade.server.errors import ApiError
from lade.server.keys import Key, Keys
from lade.server.schemas import ChatRequest
from lade.server.served_model import ServedModel
from lade.server.structured_output import message_grammar, requested_calls, requested_grammar
from lade.serving.request import GrammarCompiler

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "city": {"enum": ["Rome", "Paris"]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "city", "ok"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.json_schema(SCHEMA)
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


def guided(grammar, seed=None, tokens=80, **arguments):
    """The new tokens of `model.generate` with the processor."""
    own = [grammar.processor(TOKENIZER)]
    return plain(templated(MESSAGES), seed=seed, max_new_tokens=tokens, logits_processor=own, **arguments)


@pytest.mark.parametrize("seed", [None, 3])
def test_an_answer_has_the_form_and_the_tokens_of_generate_with_the_processor(server, seed):
    sampling = {"temperature": 0} if seed is None else {"seed": seed}
    drawn = {} if seed is None else {"do_sample": True, "top_k": 0}
    sampling |= {"lookahead": {"budget": 16}, "max_tokens": 80, "return_token_ids": True}
    answer = server.chat(response_format=FORMAT, **sampling).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == guided(GRAMMAR, seed, **drawn)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert answer["lade"]["tokens_per_step"] >= 2.5


def test_it_is_streamed_and_each_choice_has_its_own(server):
    fields = {"messages": MESSAGES, "seed": 5, "max_tokens": 80, "n": 2}
    events = server.events("/v1/chat/completions", response_format=FORMAT, lade={"trace": True}, **fields)
    texts, sources = ["", ""], set()
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
        sources.update(event.get("lade", {}).get("sources", ()))
    assert "grammar" in sources
    for number, text in enumerate(texts):
        assert text == text_of(guided(GRAMMAR, 5 + number, do_sample=True, top_k=0))
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar.choice(["yes", "no"])),
        ({"structured_outputs": {"regex": "[0-9]{4}x"}}, Grammar.regex("[0-9]{4}x")),
        ({"structured_outputs": {"json": SCHEMA, "whitespace": True}}, Grammar.json_schema(SCHEMA, whitespace=True)),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, Grammar.lark('start: "(" start ")" | "x"')),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GRAMMAR),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GRAMMAR),
    ],
)
def test_all_ways_to_ask_for_a_form(server, fields, grammar):
    answer = server.chat(temperature=0, max_tokens=50, return_token_ids=True, **fields).json()
    assert answer["choices"][0]["token_ids"] == guided(grammar, tokens=50)


def test_completions_follow_forms_too(server):
    answer = server.complete("abc", temperature=0, max_tokens=80, structured_outputs={"json": SCHEMA}).json()
    jsonschema.validate(json.loads(answer["choices"][0]["text"]), SCHEMA)


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE = {
    "deeper than parsers go": nested(200),
    "deeper still, as text": '{"items": ' * 3000 + "{}" + "}" * 3000,
    "as large as a book": {"enum": [f"value {number}" for number in range(3000)]},
    "members without end": {"type": "object", "properties": {f"member {k}": {"type": "string"} for k in range(2000)}},
    "nothing but itself": {"$ref": "#"},
    "two in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "another machine's": {"$ref": "http://169.254.169.254/latest/meta-data"},
    "this machine's files": {"$ref": "file:///etc/passwd"},
    "a place that is not there": {"$ref": "#/$defs/nowhere"},
    "looking ahead": {"type": "string", "pattern": "^(?=a)b"},
    "looking back": {"type": "string", "pattern": r"^(a)\1$"},
    "a pattern that is none": {"type": "string", "pattern": "^(a"},
    "many patterns at once": {"allOf": [{"type": "string", "pattern": f"^.*{letter}.*$"} for letter in "abcdefghij"]},
    "a product of choices": {
        "allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in range(10)]} for i in range(10)]
    },
    "a number beyond floats": {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-7},
    "an integer of 400 digits": {"type": "integer", "maximum": 10**400},
    "a type that is none": {"type": "strin"},
    "what it is not": {"not": {"type": "string"}},
    "one of several": {"oneOf": [{"type": "string"}, {"maxLength": 4}]},
    "unevaluated": {"unevaluatedProperties": False},
    "less than nothing": {"type": "string", "minLength": 5, "maxLength": 2},
    "multiples of a large number": {"type": "integer", "multipleOf": 999_983},
    "a list": [1, 2],
    "a text that is no JSON": "{",
}


def test_hostile_schemas_are_refused_at_once_while_another_stream_goes_on():
    """By the time of this process, in which the server is: other programs may use the machine."""
    with running(slow_served(0.01)) as server:
        gaps, stop, last = [], threading.Event(), [0.0]

        def read():
            body = {"messages": MESSAGES, "stream": True, "max_tokens": 400, "temperature": 0, "lookahead": None}
            while not stop.is_set():
                with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                    last[0] = 0.0
                    for _ in response.iter_lines():
                        now = time.process_time()
                        if last[0]:
                            gaps.append(now - last[0])
                        last[0] = now
                        if stop.is_set():
                            return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for name, schema in HOSTILE.items():
                start = time.process_time()
                format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                answer = server.chat(response_format=format_)
                seconds = time.process_time() - start
                assert answer.status_code == 400, name
                error = answer.json()["error"]
                assert error["code"] in ("invalid_schema", "invalid_value") and error["message"], (name, error)
                assert seconds < 1, (name, seconds)
        finally:
            stop.set()
            reader.join()
        assert gaps and max(gaps) < 1


class HeldTrial:
    """Notes each grammar, and waits until a test lets it go on, or fail."""

    def __init__(self):
        self.tried, self.let, self.problem = [], threading.Semaphore(0), None

    def __call__(self, grammar):
        self.tried.append(next(name for name in ("slow", "a0", "a1", "a2", "a3", "a4", "b0") if name in grammar))
        assert self.let.acquire(timeout=SOON)
        if self.problem:
            raise self.problem

    def close(self):
        self.let.release(100)


@pytest.fixture
def held(monkeypatch):
    """A server with the keys "ka" and "kb", whose trials wait to be let; and threads that ask it."""
    trial = HeldTrial()
    monkeypatch.setattr(trials, "GrammarTrial", lambda specials: trial)
    with running(keys=Keys((Key("a", "ka"), Key("b", "kb")))) as server, ThreadPoolExecutor(8) as threads:
        try:
            yield server, trial, lambda *given: threads.submit(ask, server, *given)
        finally:
            trial.close()


def ask(server, regex=None, key="ka", timeout=SOON):
    body = {"prompt": "x", "max_tokens": 3, "structured_outputs": regex and {"regex": regex}}
    return server.http.post("/v1/completions", json=body, headers={"x-api-key": key}, timeout=timeout)


def test_nobody_waits_for_grammars_of_others_to_be_tried(held):
    server, trial, submit = held
    many = [submit(f"a{number}") for number in range(5)]
    until(lambda: trial.tried)
    assert ask(server).status_code == 200, "without a grammar"
    until(lambda: len(server.service.in_flight) == 5)
    other = submit("b0", "kb")
    until(lambda: len(server.service.in_flight) == 6)
    trial.let.release(2)
    until(lambda: len(trial.tried) == 3)
    assert "b0" in trial.tried, "the next turn but one at most"
    trial.let.release(100)
    assert all(each.result(SOON).status_code == 200 for each in [*many, other])
    assert ask(server, "a0").status_code == 200 and len(trial.tried) == 6, "it is compiled"
    assert ask(server, "a0", "kb").status_code == 200 and len(trial.tried) == 7, (
        "which no other key can tell by the time"
    )


def test_a_grammar_that_has_failed_its_trial_is_not_tried_again(held):
    server, trial, _ = held
    trial.problem = GrammarError("too slow")
    trial.let.release(1)
    for _ in range(3):
        answer = ask(server, "slow")
        assert answer.status_code == 400 and "too slow" in answer.json()["error"]["message"]
    assert trial.tried == ["slow"]


def test_a_grammar_that_could_not_be_tried_is_tried_again(held):
    server, trial, _ = held
    trial.let.release(100)
    trial.problem = OSError("it could not be tried")
    answer = ask(server, "a0")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "grammar_not_tried"
    trial.problem = None
    assert ask(server, "a0").status_code == 200


def test_grammars_that_nobody_waits_for_any_more_are_not_tried(held):
    server, trial, submit = held
    first = submit("a0")
    until(lambda: trial.tried)
    for regex in ("a1", "a2"):
        with pytest.raises(httpx.ReadTimeout):
            ask(server, regex, timeout=0.3)
    last = submit("b0", "kb")
    until(lambda: len(server.service.in_flight) == 2)
    trial.let.release(100)
    assert first.result(SOON).status_code == last.result(SOON).status_code == 200
    assert trial.tried == ["a0", "b0"]


def test_a_grammar_that_takes_too_long_to_follow_ends_its_request_alone(monkeypatch):
    exhausted = GrammarBudget(0.0, 0.0)
    monkeypatch.setattr(GrammarCompiler, "budget", lambda *_: exhausted)
    with running() as server:
        answer = server.chat(structured_outputs={"choice": ["yes", "no"]}, max_tokens=4)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "invalid_schema", answer.text
        assert "takes too long to follow" in error["message"]
        assert server.chat(max_tokens=4).status_code == 200


def test_a_choice_of_two_thousand_texts_is_followed(server):
    texts = [f"word {number}" for number in range(2_000)]
    answer = server.chat(structured_outputs={"choice": texts}, max_tokens=40, temperature=0)
    assert answer.json()["choices"][0]["message"]["content"] in texts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, fields, param):
    answer = server.chat(**fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


SHOWN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}{{ tools | length if tools else '' }}"
    "{# <tool_call></tool_call> #}<assistant>"
)
THINKING = SHOWN + "<think>{# </think> #}"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PLACES = {"weather": ["Rome", "Oslo"], "news": ["here", "there"]}


def tool(name, **more):
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": PLACES[name]}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool(name) for name in PLACES]


def tokenizer_with(marks, template=SHOWN):
    """One for which the marks are text, or special tokens."""
    tokenizer = byte_tokenizer(template)
    if marks == "special":
        tokenizer.add_tokens(MARKS)
    return tokenizer


@pytest.fixture(scope="module", params=["text", "special"])
def calling(request):
    tokenizer = tokenizer_with(request.param)
    with running(ServedModel(byte_model(tokenizer), tokenizer, context=512)) as made:
        yield made


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_is_required_is_written(calling, parallel):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel, "seed": 1}
    (choice,) = calling.chat(max_tokens=120, **fields).json()["choices"]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == ("length" if parallel and len(calls) > 1 else "tool_calls")
    assert parallel or len(calls) == 1
    for call in calls:
        assert json.loads(call["function"]["arguments"])["at"] in PLACES[call["function"]["name"]]


def test_a_call_of_a_named_function_is_streamed_by_index_after_thoughts():
    tokenizer = tokenizer_with("special", THINKING)
    with running(ServedModel(byte_model(tokenizer), tokenizer, context=512)) as server:
        named = {"type": "function", "function": {"name": "news"}}
        bias = {str(tokenizer.convert_tokens_to_ids("</think>")): 5.0}
        fields = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": named, "seed": 1, "logit_bias": bias}
        events = server.events("/v1/chat/completions", max_tokens=300, **fields)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    call, *others = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (call["index"], call["function"]["name"]) == (0, "news") and {each["index"] for each in others} == {0}
    arguments = "".join(each["function"]["arguments"] for each in [call, *others])
    assert json.loads(arguments)["at"] in PLACES["news"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert not "".join(delta.get("content", "") for delta in deltas)


CALL = '<tool_call>\n{"name": "news", "arguments": {"at":"here"}}\n</tool_call>'
OTHER = CALL.replace("news", "weather").replace("here", "Rome")


@pytest.mark.parametrize("marks", ["text", "special"])
@pytest.mark.parametrize(
    ("fields", "thinks", "right", "wrong"),
    [
        ({"tool_choice": "auto"}, False, ["", "text < text", f"so: {CALL}\n{OTHER} done"],
         ["<tool_call>x", CALL.replace("here", "Rome"), f"{CALL} and <tool_call>\n{{}}"]),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, False, [f"so: {CALL} done"], [CALL + CALL]),
        ({"tool_choice": "required"}, False, [CALL, f"{OTHER}\n{CALL}"], ["text", f"text {CALL}", f"{CALL} text"]),
        ({"tool_choice": "required"}, True, [f"hm</think>\n\n{CALL}"], [CALL, "hm</think>text"]),
        ({"tool_choice": {"type": "function", "function": {"name": "news"}}}, False, [CALL], [OTHER, CALL + CALL]),
        ({"tools": None, "structured_outputs": {"regex": "[ab]+"}}, True, ["hm</think>ab", "<x></think>\na"],
         ["ab", "hm</think>c"]),
        ({"structured_outputs": {"regex": "[ab]+"}}, False, ["ab", CALL], ["c", f"a{CALL}", f"{CALL}a"]),
    ],
    ids=["auto", "one", "required", "thoughts", "named", "form after thoughts", "form or calls"],
)  # fmt: skip
def test_what_a_message_may_be(marks, fields, thinks, right, wrong):
    tokenizer = tokenizer_with(marks, THINKING if thinks else SHOWN)
    vocabulary = vocabulary_of_tokenizer(tokenizer)
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": TOOLS, **fields})
    form, calls = requested_grammar(body), requested_calls(body, vocabulary)
    prompt = "<assistant><think>\n" if thinks else "<assistant>"
    made = message_grammar(tokenizer.chat_template, prompt, form and form[0], calls, vocabulary)
    for text in (*right, *wrong):
        ids, matcher = tokenizer(text)["input_ids"], vocabulary.compiled(made.source).deep_copy()
        allowed = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert allowed is (text in right), text


def test_tools_that_cannot_be_described_take_any_object_unless_they_are_strict():
    vocabulary = vocabulary_of_tokenizer(TOKENIZER)
    odd = {"parameters": {"type": "object", "not": {"required": ["x"]}}}
    body = {"messages": MESSAGES, "tool_choice": "required", "tools": [tool("news", **odd)]}
    calls = requested_calls(ChatRequest.model_validate(body), vocabulary)
    assert calls.tools[0].arguments == Grammar.json_object()
    strict = {**body, "tools": [tool("news", **odd, strict=True)]}
    with pytest.raises(ApiError, match="Unimplemented keys") as raised:
        requested_calls(ChatRequest.model_validate(strict), vocabulary)
    assert raised.value.param == "tools[0].function.parameters"


def test_without_the_library_forms_are_refused_with_the_remedy_and_calls_are_free(monkeypatch):
    without(monkeypatch, "llguidance.hf")
    with running(ServedModel(MODEL, byte_tokenizer(SHOWN), context=512)) as server:
        answer = server.chat(response_format=FORMAT)
        assert answer.status_code == 400 and "'.[grammar]'" in answer.json()["error"]["message"]
        assert server.chat(tools=TOOLS, max_tokens=3).status_code == 200


def test_calls_are_left_to_the_model_where_the_answer_is_to_go_on(calling):
    answer = calling.chat(tools=TOOLS, ignore_eos=True, min_tokens=3, max_tokens=5)
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_thoughts_in_a_markup_of_their_own_are_left_alone():
    tokenizer = byte_tokenizer(SHOWN)
    fields = {"thinking": {"open": "[T]", "close": "[/T]", "content": "text"}, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "<assistant>", "fields": fields}
    with running(ServedModel(MODEL, tokenizer, context=512)) as server:
        answer = server.chat(response_format=FORMAT)
        assert answer.status_code == 400 and "reasoning markup" in answer.json()["error"]["message"]
        assert server.chat(tools=TOOLS, max_tokens=3).status_code == 200
