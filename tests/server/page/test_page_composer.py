"""What is sent beside words: pictures, text files; and how full the context is."""

from __future__ import annotations

import base64
import struct
import zlib

import pytest
from scripted_server import POEM, turn

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page").expect


def png(width: int, height: int) -> bytes:
    """A grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x80" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def file(name: str, content: bytes, kind: str = "") -> dict[str, object]:
    return {"name": name, "mimeType": kind, "buffer": content}


PICTURE = file("grey.png", png(40, 30), "image/png")
CODE = file("one.py", b"print(1)\n", "text/x-python")


@pytest.fixture
def sees(seen):
    """A page whose model takes images."""
    seen.script.images = True
    seen.page.reload()
    seen.page.get_by_text("tiny-story-model", exact=True).wait_for()
    return seen


def attach(seen, *files: dict[str, object]) -> None:
    seen.page.locator("#files").set_input_files(list(files))


def dropped(seen, event: str, target: str, *files: dict[str, object]) -> None:
    """Let files be dropped, or pasted."""
    data = [[each["name"], base64.b64encode(each["buffer"]).decode(), each["mimeType"]] for each in files]
    seen.page.evaluate(
        """([event, target, files]) => {
            const transfer = new DataTransfer();
            for (const [name, data, type] of files) {
                transfer.items.add(new File([Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0))], name, { type }));
            }
            const named = event === "paste" ? { clipboardData: transfer } : { dataTransfer: transfer };
            const kind = event === "paste" ? ClipboardEvent : DragEvent;
            document.querySelector(target).dispatchEvent(new kind(event, { ...named, bubbles: true, cancelable: true }));
        }""",  # noqa: E501
        [event, target, data],
    )


def test_pictures_and_texts_go_with_a_message_and_are_there_after_a_reload(sees):
    attach(sees, PICTURE, CODE)
    tray = sees.page.locator("#tray")
    expect(tray.locator("img")).to_have_attribute("alt", "grey.png")
    expect(tray).to_contain_text("one.py")
    sees.say("what is this?")
    sees.answered()
    expect(tray).to_be_hidden()
    url = "data:image/png;base64," + base64.b64encode(PICTURE["buffer"]).decode()
    text = "one.py:\n```\nprint(1)\n```\n\nwhat is this?"
    said = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    assert sees.script.asked[-1]["messages"] == [{"role": "user", "content": said}]
    sees.page.reload()
    expect(sees.page.locator(".question img")).to_have_js_property("naturalWidth", 40)
    sees.say("and now?")
    sees.answered()
    assert sees.script.asked[-1]["messages"][0]["content"] == said
    assert "base64" not in sees.page.evaluate("() => JSON.stringify(localStorage)")


def test_the_end_stays_in_sight_though_pictures_come_late(sees):
    left = "() => { const { scrollHeight, scrollTop, clientHeight } = document.getElementById('transcript'); return scrollHeight - scrollTop - clientHeight; }"  # noqa: E501
    attach(sees, file("tall.png", png(40, 600), "image/png"))
    for _ in range(3):
        sees.say("what is this?")
        sees.answered()
        sees.until(lambda: sees.page.evaluate(left) < 2)
    sees.page.locator("#transcript").evaluate("node => { node.scrollTop -= 300; }")  # by whoever reads
    expect(sees.page.get_by_label("To the latest")).to_be_visible()
    sees.page.get_by_label("To the latest").click()
    sees.until(lambda: sees.page.evaluate(left) < 2)


def test_pictures_are_exported_and_imported(sees, tmp_path):
    attach(sees, PICTURE)
    sees.say("what is this?")
    sees.answered()
    sees.button("Actions").click()
    with sees.page.expect_download() as download:
        sees.page.get_by_role("menuitem", name="Export").click()
    download.value.save_as(tmp_path / "chat.json")
    sees.page.evaluate(
        "() => new Promise((done) => { localStorage.clear(); indexedDB.deleteDatabase('lade').onblocked = done; })"
    )
    sees.page.reload()
    sees.page.locator("#import-files").set_input_files(tmp_path / "chat.json")
    expect(sees.page.locator(".question img")).to_have_js_property("naturalWidth", 40)


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_files_are_dropped_and_pasted(sees, way):
    dropped(sees, way, "#say", PICTURE, CODE)
    expect(sees.page.locator("#tray li")).to_have_count(2)
    sees.page.get_by_label("Remove grey.png").click()
    expect(sees.page.locator("#tray li")).to_have_count(1)
    sees.button("Send").click()  # without a word
    sees.answered()
    assert sees.script.asked[-1]["messages"][0]["content"] == "one.py:\n```\nprint(1)\n```"
    expect(sees.page.locator("#title")).to_have_text("one.py")


def test_large_pictures_are_made_smaller(sees):
    attach(sees, file("wide.png", png(5000, 1000), "image/png"))
    sees.say("what is this?")
    sees.answered()
    url = sees.script.asked[-1]["messages"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/jpeg;base64,")
    picture = sees.page.locator(".question img")
    expect(picture).to_have_js_property("naturalWidth", 2048)
    expect(picture).to_have_js_property("naturalHeight", 410)


@pytest.mark.parametrize(
    ("attached", "words"),
    [
        (file("x.bin", b"\xff\xfe\x00", "application/octet-stream"), "x.bin is neither a text nor a picture"),
        (file("x.txt", b"a\0b", "text/plain"), "x.txt is neither a text nor a picture"),
        (file("x.png", b"no picture", "image/png"), "x.png is no picture that the browser can read"),
        (file("x.txt", b"a" * (2**20 + 1), "text/plain"), "x.txt is larger than 1 MB"),
    ],
)
def test_what_cannot_be_attached_is_told(sees, attached, words):
    attach(sees, attached)
    expect(sees.page.locator("#toast")).to_contain_text(words)
    expect(sees.page.locator("#tray")).to_be_hidden()


def test_a_model_without_eyes_gets_no_pictures(seen):
    attach(seen, PICTURE)
    expect(seen.page.locator("#toast")).to_contain_text("this model reads only text")
    attach(seen, file("drawing.svg", b"<svg/>", "image/svg+xml"))  # which is a text
    expect(seen.page.locator("#tray")).to_contain_text("drawing.svg")


def test_a_text_with_fences_is_fenced_by_longer_ones(seen):
    attach(seen, file("a.md", b"````\ncode\n````", "text/markdown"))
    seen.say("explain")
    seen.answered()
    assert seen.script.asked[-1]["messages"][0]["content"] == "a.md:\n`````\n````\ncode\n````\n`````\n\nexplain"


def test_an_edited_message_keeps_its_files(sees):
    attach(sees, PICTURE)
    sees.say("what is this?")
    sees.answered()
    question = sees.page.locator(".question")
    question.hover()
    question.get_by_role("button", name="Edit").click()
    sees.page.get_by_label("Edit your message").fill("and this?")
    sees.page.keyboard.press("Enter")
    sees.until(lambda: len(sees.script.asked) == 2)
    first, second = (body["messages"][0]["content"] for body in sees.script.asked)
    assert first[0] == second[0] and second[1]["text"] == "and this?"


def test_a_model_that_continues_text_gets_a_file_into_the_field(seen):
    seen.script.templated = False
    seen.page.reload()
    seen.page.get_by_text("Begin a text").wait_for()
    attach(seen, CODE)
    expect(seen.page.get_by_label("Message", exact=True)).to_have_value("print(1)\n")


def test_the_meter_tells_how_full_the_context_is(seen):
    expect(seen.page.locator("#context")).to_be_hidden()
    seen.say("merge them")
    seen.answered()
    expect(seen.page.locator("#context-words")).to_have_text("120 of 1,024 tokens")
    expect(seen.button("Drop the oldest")).to_be_hidden()
    seen.page.reload()
    expect(seen.page.locator("#context-words")).to_have_text("120 of 1,024 tokens")
    seen.button("New chat").click()
    expect(seen.page.locator("#context")).to_be_hidden()


def test_where_the_context_is_nearly_full_the_oldest_are_dropped(seen):
    seen.script.prompt_tokens = 900
    for text in ("one", "two", "three"):
        seen.say(text)
        seen.answered()
    expect(seen.page.locator("#context-words")).to_have_text("999 of 1,024 tokens")
    seen.button("Drop the oldest").click()
    expect(seen.page.locator(".dropped + .question")).to_contain_text("three")
    expect(seen.page.locator("#context-words")).to_have_text("334 of 1,024 tokens")
    seen.say("four")
    seen.answered()
    assert [message["content"] for message in seen.script.asked[-1]["messages"]] == ["three", POEM, "four"]
    seen.page.reload()
    expect(seen.page.locator(".dropped")).to_be_visible()
    seen.button("Send all").click()
    expect(seen.page.locator(".dropped")).to_have_count(0)
    seen.say("five")
    seen.answered()
    assert len(seen.script.asked[-1]["messages"]) == 9


def test_where_a_prompt_is_too_long_the_oldest_are_dropped_and_it_is_sent_again(seen):
    seen.allowed.append("400")
    seen.say("one")
    seen.answered()
    full = (400, {"code": "context_length_exceeded", "message": "the prompt has 2000 tokens"})
    seen.script.refuse = full
    seen.say("two")
    expect(seen.answer.get_by_role("alert")).to_contain_text("2000 tokens")
    seen.answer.get_by_role("button", name="Drop the oldest").click()
    expect(seen.page.locator(".dropped + .question")).to_contain_text("two")
    expect(seen.answer.get_by_role("alert")).to_contain_text("2000 tokens")
    seen.answer.get_by_role("button", name="Drop the oldest").click()
    expect(seen.page.locator("#toast")).to_contain_text("Only your last message is left")
    seen.script.refuse = None
    seen.button("Try again").click()
    seen.answered()
    assert [message["content"] for message in seen.script.asked[-1]["messages"]] == ["two"]


def test_a_conversation_without_figures_has_no_meter(seen):
    seen.keep(messages=[turn("user", "hello"), turn("assistant", "one two")])
    expect(seen.answer).to_contain_text("one two")
    expect(seen.page.locator("#context")).to_be_hidden()
