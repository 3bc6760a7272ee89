"""Answers with markup, which toy models do not write, and streams of events with names."""

import json

from served import byte_tokenizer

from lade.server.completions import ChatPreprocessor

TALKS = byte_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}<think>{# <tool_call> #}")


def scripted(monkeypatch, said):
    """Answers whose text is `said`, or what that returns for a prompt, whatever the tokens: toys write no markup."""
    parse = ChatPreprocessor.parser

    def parser(self, prompt, serving):
        inner, texts = parse(self, prompt, serving), iter(said(prompt) if callable(said) else said)

        class Scripted:
            in_reasoning = False

            def push(self, text):
                return inner.push(next(texts, ""))

            def finish(self, *, cut):
                return inner.finish(cut=cut)

        return Scripted()

    monkeypatch.setattr(ChatPreprocessor, "parser", parser)


AGENTS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{# <think> <tool_call> #}"
)
"""A chat template that shows all that an agent sends."""
PLAIN = {"extra_body": {"lookahead": None, "ignore_eos": True}}
SAID = ["let me", " see</think>", "I add.", '<tool_call>{"name": "add", ', '"arguments": {"a": 1}}</tool_call>']


def frames(server, path, **body):
    """Names and contents of the events of a stream."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        raw = b"".join(response.iter_bytes()).decode()
    found = [frame.split("\n") for frame in raw.split("\n\n") if frame and not frame.startswith(":")]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in found)
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]
    assert all(data["type"] == name for name, data in events)
    return events
