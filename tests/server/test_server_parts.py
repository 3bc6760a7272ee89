"""Thoughts, calls of tools and answers, told apart however the text is cut; tokens as bytes."""

import json
import random
import time

import pytest
from served import MODEL, TOKENIZER, byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lade.config import LookaheadConfig
from lade.server.output_parser import Markup, Parts
from lade.server.served_model import ServedModel, TextOffsets, TokenText
from lade.server.tenants import MAX_SCOPES, TenantMemories

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def parsed(text, *, size=1, template="<think></think><tool_call>", prompt="", tools=None):
    parser = Markup(ServedModel(MODEL, byte_tokenizer(template))).parser(prompt, tools)
    parts = Parts()
    for at in range(0, len(text), size):
        parts.add(parser.push(text[at : at + size]))
    parts.add(parser.finish())
    return parts


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "given", "reasoning", "content"),
    [
        ("<think>\nlet me see\n</think>\n\nIt is 4.", {}, "let me see", "It is 4."),
        ("plainly < this > that", {}, "", "plainly < this > that"),
        ("so\n</think>\nyes", {"prompt": "<user>hi<assistant><think>\n"}, "so", "yes"),
        ("never ends", {"prompt": "<think>"}, "never ends", ""),
        (CALL, {}, "", CALL),  # without tools it is text
        ("<think>a</think>b", {"template": "nothing"}, "", "<think>a</think>b"),
    ],
)
def test_thoughts_are_no_answer(size, text, given, reasoning, content):
    parts = parsed(text, size=size, **given)
    assert (parts.reasoning, parts.content) == (reasoning, content)


@pytest.mark.parametrize(("before", "after"), [("", "x"), ("", "<think>so</think>x"), ("<think>", "so</think>x")])
def test_many_spaces_cost_as_much_as_other_text(before, after):
    """By CPU time: a search that begins anew at each of them would take some 20 s."""
    start = time.thread_time()
    parts = parsed(before + " " * 80_000 + after, size=1000, tools=TOOLS)
    assert time.thread_time() - start < 2.0
    assert parts.content.strip() == "x" and parts.reasoning.strip() == ("" if after == "x" else "so")


def pieces(text, *, size=1, cut=False, parser=None):
    """What is told of calls, piece by piece, and the text of the answer."""
    parser = parser or Markup(ServedModel(MODEL, byte_tokenizer("<think></think><tool_call>"))).parser("", TOOLS)
    told = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    told.append(parser.finish(cut=cut))
    return [call for parts in told for call in parts.tool_calls], "".join(parts.content for parts in told)


ARGUMENTS = r'{"path": "a}\"{b", "lines": ["1\n", {"x": null}]}'


@pytest.mark.parametrize("size", [1, 2, 7])
def test_arguments_are_told_while_they_are_written(size):
    said = f'so <tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>{CALL} done'
    calls, content = pieces(said, size=size)
    first = [call for call in calls if call.index == 0]
    assert (first[0].name, first[0].id[:5], {(call.name, call.id) for call in first[1:]}) == (
        "add",
        "call_",
        {("", "")},
    )
    assert "".join(call.arguments for call in first) == ARGUMENTS and len(first) >= len(ARGUMENTS) // size - 2
    second = [call for call in calls if call.index == 1]
    assert "".join(call.arguments for call in second) == '{"a": 1}' and second[0].id not in ("", first[0].id)
    assert content.split() == ["so", "done"]
    whole = Parts()
    for call in calls:
        whole.add(Parts(tool_calls=[call]))
    assert [json.loads(call.arguments) for call in whole.tool_calls] == [json.loads(ARGUMENTS), {"a": 1}]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "add"}', "add", '{"a": 1}'),
        ('{"id": ["}"], "name": "\\u0061dd", "arguments": "{\\"a\\": 1}", "more": -1.5}', "add", '{"a": 1}'),
        ('{"name": "add"}', "add", "{}"),
        ('{"name": "add", "arguments": null}', "add", "null"),
    ],
)
def test_calls_may_be_written_otherwise(text, name, arguments):
    for size in (1, 1000):
        calls, content = pieces(f"<tool_call>{text}</tool_call>", size=size)
        assert (calls[0].name, "".join(call.arguments for call in calls), content) == (name, arguments, "")


@pytest.mark.parametrize(
    "text", ["{no json}", '{"foo": 1}', "[1]", '{"name": 5}', '{"name": "add", "arguments": oops}']
)
def test_what_is_no_call_is_text_and_calls_behind_it_are_calls(text):
    said = f"a <tool_call>{text}</tool_call> b"
    for size in (1, 1000):
        calls, content = pieces(said + CALL, size=size)
        assert "".join(content.split()) == "".join(said.split()) and [call.name for call in calls if call.id] == ["add"]


WRITTEN = 'I call.\n<tool_call>\n{"name": "add", "arguments": {"a": [1, "x'


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_that_is_cut_off_is_told_as_far_as_it_goes(size):
    for end in range(len("I call."), len(WRITTEN) + 1):
        calls, content = pieces(WRITTEN[:end], size=size, cut=True)
        begun = WRITTEN[:end].partition('"arguments": ')[2]
        assert "".join(call.arguments for call in calls) == begun, "no more and no less"
        assert [call.name for call in calls[:1]] == ["add"] * ('"add"' in WRITTEN[:end])
        held = content.removeprefix("I call.").strip()
        assert "<tool_call>".startswith(held) and len(held) < 5, "less than that may be text"
    calls, content = pieces('<tool_call>{"na', size=size)
    assert (calls, content) == ([], '<tool_call>{"na'), "what the model itself has ended is text"


def test_a_tokenizers_own_calls_are_told_while_they_are_written_where_they_are_json():
    tokenizer, fields = byte_tokenizer("x"), {"content": {"content": "text"}}
    call = {"open": "[C]", "close": "[/C]", "repeats": True, "content": "json"}
    as_it_is = {"transform": {"type": "function", "function": "{content}"}}
    other = {"transform": {"type": "function", "function": {"name": "{content.fn}", "arguments": "{content.args}"}}}
    for added, said, least in (
        (as_it_is, '{"name": "add", "arguments": {"a": 1}}', 6),
        (other, '{"fn": "add", "args": {"a": 1}}', 1),
    ):
        fields["tool_calls"] = call | added
        tokenizer.response_template = {"start_anchor": "<a>", "fields": fields}
        markup = Markup(ServedModel(MODEL, tokenizer))
        calls, content = pieces(f"so [C]{said}[/C]", parser=markup.parser("<a>", TOOLS))
        assert ("".join(each.arguments for each in calls), content.strip()) == ('{"a": 1}', "so")
        assert calls[0].name == "add" and len(calls) >= least
        assert pieces(f"so [C]{said[:9]}", parser=markup.parser("<a>", TOOLS), cut=True) == ([], "so ")


def test_a_tokenizer_may_bring_a_template_of_its_own():
    tokenizer = byte_tokenizer("x")
    fields = {"thinking": {"open": "[T]", "close": "[/T]", "content": "text"}, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "<assistant>", "fields": fields}
    markup = Markup(ServedModel(MODEL, tokenizer))
    parser = markup.parser("<user>hi<assistant>[T]", None)
    assert markup.has_special_tokens and parser.in_reasoning
    parts = parser.push("a[/T]b")
    parts.add(parser.finish())
    assert (parts.reasoning, parts.content) == ("a", "b")


def test_tokens_as_bytes():
    spelling, ids = TokenText(TOKENIZER), TOKENIZER("é🙂 a\n")["input_ids"]
    assert b"".join(spelling.bytes(token) for token in ids).decode() == "é🙂 a\n"
    assert spelling.text(ids[0]) == "\ufffd" and spelling.text(ids[-2]) == "a"
    assert spelling.bytes(0) == b"" and spelling.text(0) == "</s>"
    offsets = TextOffsets(spelling)
    assert offsets.take(ids[:1]) + offsets.take(ids[1:4]) + offsets.take(ids[4:]) == [0, 0, 1, 1, 1, 1, 2, 3, 4]


def test_offsets_are_those_of_the_text_before_whatever_the_bytes_are():
    draw, spelling = random.Random(3), TokenText(TOKENIZER)
    for _ in range(50):
        ids = draw.choices(range(len(TOKENIZER)), k=40)
        raw = [spelling.bytes(token) for token in ids]
        before = [len(b"".join(raw[:at]).decode(errors="ignore")) for at in range(len(ids))]
        assert TextOffsets(spelling).take(ids) == before


def test_tokens_of_a_tokenizer_that_writes_spaces_as_lines():
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spelling = TokenText(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    assert b"".join(map(spelling.bytes, [1, 2, 3, 4])).decode() == " abé"


def test_memories_are_kept_apart():
    memories = TenantMemories("auto", "key")
    of = {name: memories.lookahead("auto", memories.scope(*name)).memory
          for name in [("a", None), ("a", "s"), ("b", None), ("b", "s")]}  # fmt: skip
    assert len(set(map(id, of.values()))) == 4
    assert memories.lookahead("auto", memories.scope("a", None)).memory is of["a", None]
    everyone = TenantMemories("auto", "all")
    assert everyone.scope("a", None) == everyone.scope("b", None) != everyone.scope("a", "s")
    assert (
        TenantMemories("auto", "none").lookahead("auto", TenantMemories("auto", "none").scope("a", None)).memory is None
    )
    assert memories.lookahead(None, "x") is None and TenantMemories(None, "key").lookahead("auto", "x") is None
    paper = LookaheadConfig(window=3)
    assert memories.lookahead(paper, "x") is paper
    own = TenantMemories(LookaheadConfig(memory=of["a", None]), "key")
    assert own.lookahead("auto", "x\0").memory is of["a", None]
    assert own.lookahead(LookaheadConfig(budget=4), "y\0").memory is of["a", None]


def memory_of(memories, key, salt=None):
    return memories.lookahead("auto", memories.scope(key, salt)).memory


@pytest.mark.parametrize("share", ["key", "all"])
def test_salts_wipe_nobodys_memory_but_that_of_other_salts(share):
    """Neither another key's, nor that which requests without a salt share: there may be no keys at all."""
    memories = TenantMemories("auto", share)
    kept = {place: memory_of(memories, *place) for place in [("a", None), ("b", None), ("b", "his own"), ("c", None)]}
    used_last = None
    for number in range(5 * MAX_SCOPES):
        used_last = memory_of(memories, "a", str(number))
    assert memory_of(memories, "a", str(number)) is used_last
    spared = [place for place in kept if share == "key" or place[1] is None]
    assert [place for place in spared if memory_of(memories, *place) is not kept[place]] == []
    assert memory_of(memories, "a", "0") is not used_last


def test_memories_of_keys_go_in_the_order_of_their_use():
    memories = TenantMemories("auto", "key")
    kept = [memory_of(memories, str(number)) for number in range(MAX_SCOPES)]
    assert memory_of(memories, "0") is kept[0]
    memory_of(memories, "one more")
    assert memory_of(memories, "0") is kept[0] and memory_of(memories, "2") is kept[2]
    assert memory_of(memories, "1") is not kept[1]
