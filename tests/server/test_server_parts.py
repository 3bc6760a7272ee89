"""Thoughts, calls of tools and answers, told apart however the text is cut; tokens as bytes."""

import json

import pytest
from served import MODEL, TOKENIZER, byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lade.config import LookaheadConfig
from lade.server.memories import Memories
from lade.server.message_parts import Markup, Parts
from lade.server.served_model import ServedModel
from lade.server.token_text import TokenText

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
def test_thoughts_are_no_answer(size):
    parts = parsed("<think>\nlet me see\n</think>\n\nIt is 4.", size=size)
    assert (parts.reasoning, parts.content) == ("let me see", "It is 4.")
    assert parsed("plainly < this > that", size=size).content == "plainly < this > that"


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_thoughts_may_begin_in_the_prompt(size):
    parts = parsed("so\n</think>\nyes", size=size, prompt="<user>hi<assistant><think>\n")
    assert (parts.reasoning, parts.content) == ("so", "yes")
    cut = parsed("never ends", size=size, prompt="<think>")
    assert (cut.reasoning, cut.content) == ("never ends", "")


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_of_tools_are_told_apart(size):
    parts = parsed(f"<think>hm</think>I call.\n{CALL}\n{CALL}", size=size, tools=TOOLS)
    assert (parts.reasoning, parts.content.strip()) == ("hm", "I call.")
    assert [call["function"]["name"] for call in parts.tool_calls] == ["add", "add"]
    assert json.loads(parts.tool_calls[0]["function"]["arguments"]) == {"a": 1}
    assert len({call["id"] for call in parts.tool_calls}) == 2
    assert parsed(CALL, size=size).content == CALL, "without tools it is text"


@pytest.mark.parametrize("size", [1, 1000])
def test_what_cannot_be_parsed_is_text(size):
    parts = parsed("<tool_call>\n{no json}\n</tool_call> after", size=size, tools=TOOLS)
    assert not parts.tool_calls and "{no json}" in parts.content and parts.content.endswith("after")


def test_models_without_marks_say_everything():
    assert parsed("<think>a</think>b", template="nothing").content == "<think>a</think>b"


def test_a_tokenizer_may_bring_a_template_of_its_own():
    tokenizer = byte_tokenizer("x")
    fields = {"thinking": {"open": "[T]", "close": "[/T]", "content": "text"}, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "<assistant>", "fields": fields}
    markup = Markup(ServedModel(MODEL, tokenizer))
    parser = markup.parser("<user>hi<assistant>[T]", None)
    assert markup.has_special_tokens and parser.thinks
    parts = parser.push("a[/T]b")
    parts.add(parser.finish())
    assert (parts.reasoning, parts.content) == ("a", "b")


def test_tokens_as_bytes():
    spelling, ids = TokenText(TOKENIZER), TOKENIZER("é🙂 a\n")["input_ids"]
    assert b"".join(spelling.bytes(token) for token in ids).decode() == "é🙂 a\n"
    assert spelling.text(ids[0]) == "\ufffd" and spelling.text(ids[-2]) == "a"
    assert spelling.bytes(0) == b"" and spelling.text(0) == "</s>"
    assert spelling.offsets(ids) == [0, 0, 1, 1, 1, 1, 2, 3, 4]


def test_tokens_of_a_tokenizer_that_writes_spaces_as_lines():
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spelling = TokenText(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    assert b"".join(map(spelling.bytes, [1, 2, 3, 4])).decode() == " abé"


def test_memories_are_kept_apart():
    memories = Memories("auto", "key")
    of = {name: memories.lookahead("auto", memories.scope(*name)).memory
          for name in [("a", None), ("a", "s"), ("b", None), ("b", "s")]}  # fmt: skip
    assert len(set(map(id, of.values()))) == 4
    assert memories.lookahead("auto", memories.scope("a", None)).memory is of["a", None]
    everyone = Memories("auto", "all")
    assert everyone.scope("a", None) == everyone.scope("b", None) != everyone.scope("a", "s")
    assert Memories("auto", "none").lookahead("auto", Memories("auto", "none").scope("a", None)).memory is None
    assert memories.lookahead(None, "x") is None and Memories(None, "key").lookahead("auto", "x") is None
    paper = LookaheadConfig(window=3)
    assert memories.lookahead(paper, "x") is paper
    own = Memories(LookaheadConfig(memory=of["a", None]), "key")
    assert own.lookahead("auto", "x").memory is own.lookahead(LookaheadConfig(budget=4), "y").memory is of["a", None]


def test_memories_have_a_bound():
    memories = Memories("auto", "key")
    first = memories.lookahead("auto", "first").memory
    for number in range(16):
        memories.lookahead("auto", str(number))
    assert memories.lookahead("auto", "first").memory is not first
