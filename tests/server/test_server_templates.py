"""Conversations as clients send them, through templates as models have them."""

import base64
import io
import json

import pytest
from PIL import Image
from served import MODEL, byte_tokenizer

from lade.server.errors import ApiError
from lade.server.images import read_image
from lade.server.schemas import ChatRequest
from lade.server.served_model import ServedModel
from lade.server.templates import ChatTemplate
from lade.server.text_encoder import TextEncoder

SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
FIRST_ONLY = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
PARTS = """\
{%- for m in messages %}
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}
{%- endif %}
{%- endfor %}"""
FIELDS = """\
{{- tools | tojson if tools else '' }}
{%- for m in messages %}
{{- m.reasoning_content or '' }}|
{{- m.tool_calls[0].function.arguments.city if m.tool_calls else '' }}|{{ m.name or '' }}|{{ m.content }}
{%- endfor %}
{{- style or '' }}{{ reasoning_effort or '' }}"""


def template_of(served, defaults=None):
    return ChatTemplate(served, TextEncoder(served.tokenizer, None), defaults or {})


def shown(template, *messages, defaults=None, **fields):
    tokenizer = byte_tokenizer(template)
    served = ServedModel(MODEL, tokenizer)
    body = ChatRequest.model_validate({"messages": list(messages), **fields})
    ids, media = template_of(served, defaults).encode(body)
    assert not media
    return tokenizer.decode(ids)


def said(role, content, **others):
    return {"role": role, "content": content, **others}


def test_a_developer_is_the_system_unless_the_template_knows_developers():
    messages = said("developer", "be nice"), said("user", "hi")
    assert shown(SIMPLE, *messages) == "<system>be nice<user>hi<a>"
    assert shown(SIMPLE + "{# developer #}", *messages) == "<developer>be nice<user>hi<a>"


def test_several_system_messages_are_merged_only_where_the_template_refuses_them():
    messages = said("system", "one"), said("developer", "two"), said("user", "hi")
    assert shown(SIMPLE, *messages) == "<system>one<system>two<user>hi<a>"
    assert shown(FIRST_ONLY, *messages) == "<system>one\n\ntwo<user>hi"


def test_what_a_template_raises_is_told():
    with pytest.raises(ApiError, match="must be at the beginning") as raised:
        shown(FIRST_ONLY, said("user", "hi"), said("system", "late"))
    assert (raised.value.status, raised.value.code) == (400, "chat_template_error")
    with pytest.raises(ApiError, match="refuses this conversation") as raised:
        shown("{{ messages[0].content.nothing.at.all }}", said("user", "hi"))
    assert raised.value.code == "chat_template_error"


def test_a_model_without_a_template_is_told_apart():
    with pytest.raises(ApiError, match="--chat-template") as raised:
        shown(None, said("user", "hi"))
    assert raised.value.code == "no_chat_template"


def test_parts_are_joined_unless_the_template_takes_parts():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert shown(SIMPLE, said("user", parts)) == "<user>one two<a>"
    assert shown(PARTS, said("user", parts)) == "[one ][two]"
    assert shown(SIMPLE, said("assistant", None), said("user", "hi")) == "<assistant><user>hi<a>"


def test_other_fields_of_messages_and_requests_go_to_the_template():
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    message = said("assistant", "x", tool_calls=[call], reasoning="hm", name="bot")
    assert shown(FIELDS, message) == "hm|Bern|bot|x"
    assert shown(FIELDS, said("user", "x"), chat_template_kwargs={"style": "s"}, reasoning_effort="low") == "|||xslow"
    assert shown(FIELDS, said("user", "x"), defaults={"style": "d"}) == "|||xd"
    assert shown(FIELDS, said("user", "x"), defaults={"style": "d"}, chat_template_kwargs={"style": "s"}) == "|||xs"
    tool = {"type": "function", "function": {"name": "f"}}
    assert json.loads(shown("{{ tools | tojson }}", said("user", "x"), tools=[tool])) == [tool]
    assert shown(FIELDS, said("user", "x"), tools=[tool], tool_choice="none") == "|||x"


def test_an_answer_can_be_sent_back_as_it_came():
    """With refusals in place of answers, and all the nulls that clients' classes write out."""
    part = {"type": "refusal", "refusal": "I can't."}
    assert shown(SIMPLE, said("user", "hi"), said("assistant", [part])) == "<user>hi<assistant>I can't.<a>"
    assert shown(PARTS, said("assistant", [{"type": "text", "text": "No."}, part])) == "[No.][I can't.]"
    nulls = dict.fromkeys(["audio", "function_call", "tool_calls", "name", "reasoning_content"])
    assert shown(SIMPLE, said("assistant", None, refusal="I can't.", **nulls)) == "<assistant>I can't.<a>"
    assert shown(SIMPLE, said("assistant", "Yes.", refusal=None, **nulls)) == "<assistant>Yes.<a>"
    strict = (
        "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls | length }}{% endif %}-{% endfor %}"
    )
    assert shown(strict, said("assistant", "Yes.", **nulls)) == "-"
    with pytest.raises(ApiError, match="'refusal'"):
        shown(SIMPLE, said("assistant", [{"type": "refusal"}]))


def test_the_last_message_can_be_continued():
    messages = said("user", "hi"), said("assistant", "well, ")
    assert shown(SIMPLE, *messages, continue_final_message=True) == "<user>hi<assistant>well, "
    assert shown(SIMPLE, *messages) == "<user>hi<assistant>well, <a>"
    assert shown(SIMPLE, *messages, add_generation_prompt=False) == "<user>hi<assistant>well, "


def picture(kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def test_images_come_as_data_urls_alone():
    image = read_image(f"data:image/png;base64,{picture()}", "here")
    assert image.size == (3, 2) and image.mode == "RGB"
    for url in ("https://example.org/x.png", "file:///etc/passwd", "data:image/png,abc", "/etc/passwd"):
        with pytest.raises(ApiError, match="not fetched") as raised:
            read_image(url, "here")
        assert (raised.value.code, raised.value.param) == ("unsupported_parameter", "here")
    for data in ("AAAA", "!!!", picture()[:30], ""):
        with pytest.raises(ApiError, match="no image"):
            read_image(f"data:image/png;base64,{data}", "here")


def test_images_go_where_the_model_takes_them():
    seen = []

    def encode(messages, arguments, check):
        seen.append(messages)
        return [1, 2, 3], {"pixel_values": "x"}

    served = ServedModel(MODEL, byte_tokenizer(SIMPLE), encode_images=encode)
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}
    body = ChatRequest.model_validate({"messages": [said("user", [{"type": "text", "text": "what?"}, part])]})
    assert template_of(served).encode(body) == ([1, 2, 3], {"pixel_values": "x"})
    (message,) = seen[0]
    assert [each["type"] for each in message["content"]] == ["text", "image"]
    with pytest.raises(ApiError, match="takes no images"):
        template_of(ServedModel(MODEL, byte_tokenizer(SIMPLE))).encode(body)
