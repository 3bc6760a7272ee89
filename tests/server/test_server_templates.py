"""Conversations as clients send them, through templates as models have them."""

import base64
import io
import json
import re
import threading

import pytest
from PIL import EpsImagePlugin, Image, PngImagePlugin
from served import MODEL, byte_tokenizer, running
from spies import failing, watched

from lade.cli.encoder import open_image
from lade.errors import InputError
from lade.files import IMAGE_FORMATS
from lade.server.chat_template import ChatTemplate, Images
from lade.server.errors import ApiError
from lade.server.schemas import ChatRequest
from lade.server.served_model import ServedModel
from lade.server.settings import MAX_IMAGES, MAX_PIXELS

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
    return ChatTemplate(served, defaults or {})


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
    with pytest.raises(ApiError, match="rejects this conversation") as raised:
        shown("{{ messages[0].content.nothing.at.all }}", said("user", "hi"))
    assert raised.value.code == "chat_template_error"
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


def picture(kind="PNG", size=(3, 2)):
    file = io.BytesIO()
    Image.new("RGB" if size == (3, 2) else "1", size, "red").save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def read(data):
    return Images().read(f"data:image/png;base64,{data}", "here")


def test_images_come_as_data_urls_alone():
    for kind in IMAGE_FORMATS:
        image = read(picture(kind))
        assert image.size == (3, 2) and image.mode == "RGB"
    for url in ("https://example.org/x.png", "file:///etc/passwd", "data:image/png,abc", "/etc/passwd"):
        with pytest.raises(ApiError, match="not fetched") as raised:
            Images().read(url, "here")
        assert (raised.value.code, raised.value.param) == ("unsupported_parameter", "here")
    for data in ("AAAA", "!!!", picture()[:30], ""):
        with pytest.raises(ApiError, match="not a readable image"):
            read(data)


def test_no_other_kind_of_image_is_opened(monkeypatch, tmp_path):
    """What an EPS file says is a program, which Pillow has Ghostscript run."""
    programs = failing(monkeypatch, EpsImagePlugin, "Ghostscript", AssertionError("a program is run"))
    (tmp_path / "x.png").write_bytes(base64.b64decode(picture("EPS")))
    with pytest.raises(InputError, match="PNG, JPEG, WEBP, GIF or BMP"):
        open_image(tmp_path / "x.png")
    for kind in ("EPS", "PCX", "TIFF", "PPM"):
        with pytest.raises(ApiError, match="send a PNG, JPEG, WEBP, GIF or BMP"):
            read(picture(kind))
    assert not programs


@pytest.mark.parametrize("problem", [KeyError("x"), MemoryError(), RecursionError(), ZeroDivisionError()])
def test_whatever_a_decoder_raises_is_the_images_fault(monkeypatch, problem):
    failing(monkeypatch, PngImagePlugin.PngImageFile, "load", problem)
    with pytest.raises(ApiError, match=f"not a readable image \\({type(problem).__name__}"):
        read(picture())


def test_the_images_of_a_request_are_bounded_together(monkeypatch):
    small, half = (f"data:image/png;base64,{picture(size=size)}" for size in ((3, 2), (2**13, MAX_PIXELS // 2**14)))
    images = Images()
    for _ in range(MAX_IMAGES):
        images.read(small, "here")
    with pytest.raises(ApiError, match=f"more than {MAX_IMAGES} images"):
        images.read(small, "here")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in (half, half, small)]
    body = ChatRequest.model_validate({"messages": [said("user", parts[:2]), said("user", parts[2:])]})
    served = ServedModel(MODEL, byte_tokenizer(SIMPLE), encode_images=lambda *_: ([1], {}))
    with pytest.raises(ApiError, match=f"{MAX_PIXELS} pixels together") as raised:
        template_of(served).encode(body)
    assert raised.value.param == "messages[1].content[0].image_url.url"
    decoded = watched(monkeypatch, PngImagePlugin.PngImageFile, "load")
    with pytest.raises(ApiError, match="pixels together"):
        read(picture(size=(2**13, 2**13)))
    assert not decoded


def test_the_images_of_one_request_at_a_time_are_decoded(monkeypatch):
    """Else as many as there are threads would be in memory."""
    inside, go_on = threading.Semaphore(0), threading.Event()
    decoded = watched(monkeypatch, Images, "read")

    def encode(*given):
        inside.release()
        assert go_on.wait(60)
        return [1], {}

    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}
    body = ChatRequest.model_validate({"messages": [said("user", [part])]})
    template = template_of(ServedModel(MODEL, byte_tokenizer(SIMPLE), encode_images=encode))
    threads = [threading.Thread(target=template.encode, args=[body]) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=60)
    assert not inside.acquire(timeout=0.2) and len(decoded) == 1
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(decoded) == 3


def test_bodies_may_be_larger_where_the_model_takes_images():
    for encode, status in ((None, 413), (lambda *_: ([1], {}), 400)):
        with running(ServedModel(MODEL, byte_tokenizer(SIMPLE), context=512, encode_images=encode)) as server:
            assert server.chat(temperature=-1, user="a" * 5 * 2**20).status_code == status


EACH = "{% for m in messages %}<{{ m.role }}>BODY|{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
IDS = "{% if (m.tool_call_id or c.id) | length != 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}"
AFTER_TOOL_CALLS = {  # what each family's template does, in one line
    "DeepSeek V3.1, concatenated": "{{ m.content or '' }}CALLS{{ '[f ' + c.function.arguments + ']' }}",
    "DeepSeek R1, where content is none": (
        "{% if m['content'] is none %}CALLS{{ '[f ' + c.function.arguments + ']' }}END"
        "{% else %}{{ m.content }}{% endif %}"
    ),
    "Qwen, Llama, Hermes": "{{ m.content or '' }}CALLS[f {{ c.function.arguments | tojson }}]",
    "Qwen3, either": (
        "{{ m.content or '' }}CALLS[f {% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}]"
    ),
    "GLM": (
        "{{ m.content or '' }}CALLS[f {% for k, v in c.function.arguments.items() %}"
        '{"{{ k }}": {{ v | tojson }}}{% endfor %}]'
    ),
    "Mistral": (
        "{% set c = none %}{% if m.role == 'tool' %}IDS{% endif %}{{ m.content or '' }}"
        "CALLSIDS[f {{ c.function.arguments | tojson }}]"
    ),
    "parts only": "{% for p in m.content %}{{ p.text }}{% endfor %}CALLS[f {{ c.function.arguments | tojson }}]",
}


def family(name):
    body, _, tail = AFTER_TOOL_CALLS[name].partition("END")
    before, _, call = body.partition("CALLS")
    whole = before + CALLS.replace("CALL", call) + tail
    return EACH.replace("BODY", whole.replace("IDS", IDS))


ARGUMENTS = {
    "a text": ('{"city": "Bern"}', '{"city": "Bern"}'),
    "an object": ({"city": "Bern"}, '{"city": "Bern"}'),
    "encoded twice": ('"{\\"city\\": \\"Bern\\"}"', '{"city": "Bern"}'),
    "empty": ("", "{}"),
    "none": (None, "{}"),
    "no JSON": ('{"city": Bern', None),
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", AFTER_TOOL_CALLS)
@pytest.mark.parametrize("content", [None, ""])
def test_the_turn_after_a_tool_call_shows_the_call(name, arguments, content):
    given, expected = ARGUMENTS[arguments]
    if name == "GLM" and expected == "{}":
        expected = ""
    call = {"id": "call_8f14e45fceea167a", "type": "function", "function": {"name": "f", "arguments": given}}
    result = said("tool", "sunny", tool_call_id=call["id"])
    text = shown(family(name), said("user", "Bern?"), said("assistant", content, tool_calls=[call]), result)
    assert text.startswith("<user>Bern?|<assistant>[f ") and text.endswith("<tool>sunny|")
    assert "Bern" in text[12:] if expected is None else f"[f {expected}]" in text


def test_call_ids_are_changed_only_where_the_template_wants_others():
    template = EACH.replace(
        "BODY",
        CALLS.replace("CALL", "{{ c.id }}{{ c.function.arguments | tojson }}") + "{{ m.tool_call_id }}{{ m.content }}",
    )
    for before, given, expected in (("", "call_1", "call_1"), (IDS, "a1B2c3D4e", "a1B2c3D4e"), (IDS, "call_1", None)):
        call = {"id": given, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = said("assistant", "-", tool_calls=[call]), said("tool", "-", tool_call_id=given)
        text = shown(template.replace("{{ c.id }}", before + "{{ c.id }}"), *messages)
        found = re.fullmatch("<assistant>(.*){}-[|]<tool>(.*)-[|]", text)
        assert found[1] == found[2] and (found[1] == expected if expected else len(found[1]) == 9)


IN_PARTS = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
PARTS_ONLY = "{% for m in messages %}<{{ m.role }}>" + IN_PARTS + "{% endfor %}"
FIRST_PART = "{% for m in messages %}<{{ m.role }}{{ m.content[0].type }}>" + IN_PARTS + "{% endfor %}"
SYSTEM_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content + '!' }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)


def test_a_text_is_shown_by_templates_that_know_parts_alone():
    """Such as those of LLaVA, Idefics3 and SmolVLM: over the letters of a text their loops find nothing."""
    messages = said("system", "be nice"), said("user", "hi"), said("assistant", None), said("user", "why?")
    assert shown(PARTS_ONLY, *messages) == "<system>be nice<user>hi<assistant><user>why?"
    assert shown(FIRST_PART, *messages) == "<systemtext>be nice<usertext>hi<assistanttext><usertext>why?"
    assert shown(SYSTEM_TEXT, *messages[:2]) == "<system>be nice!<user>hi"
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "nice"}]
    assert shown(SYSTEM_TEXT, said("system", parts), said("user", "hi")) == "<system>be nice!<user>hi"
