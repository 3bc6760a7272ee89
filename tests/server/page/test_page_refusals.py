"""What a model must not do to the page, and what the page says where the server does not answer."""

import pytest
from scripted_server import POEM_WORDS

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page").expect


def test_what_a_model_writes_is_never_executed_and_loads_nothing(seen):
    seen.say("evil")
    answer = seen.answered("a link")
    expect(answer).to_contain_text("<img src=x onerror=alert(1)>")  # as text
    expect(answer).to_contain_text("<script>alert(3)</script>")
    tags, attributes = seen.page.evaluate(
        """() => {
            const own = ".code-head, .code-head *";
            const made = [...document.querySelectorAll(".answer .prose *")].filter((part) => !part.matches(own));
            const names = made.flatMap((part) => part.getAttributeNames());
            return [[...new Set(made.map((part) => part.tagName))], [...new Set(names)]];
        }"""
    )
    assert set(tags) <= {"A", "BR", "CODE", "DIV", "P", "PRE", "SPAN"}
    assert set(attributes) <= {"class", "data-language", "data-step", "data-token", "rel", "tabindex", "target"}
    assert answer.locator(".prose a[href]").count() == 0
    answer.get_by_text("a link").click()
    seen.page.wait_for_timeout(100)
    assert not any("evil.example" in url or url.endswith("/x") for url in seen.requests)


def test_a_server_with_keys_asks_for_one_and_goes_on_with_it(seen):
    seen.allowed.append("401")
    seen.script.key = "sk-right"
    seen.say("merge them")
    dialog = seen.page.get_by_role("dialog")
    expect(dialog).to_contain_text("asks for a key")
    seen.page.get_by_label("Key", exact=True).fill("wrong")
    seen.page.keyboard.press("Enter")
    expect(dialog).to_contain_text("does not know this key")
    seen.page.get_by_label("Key", exact=True).fill("sk-right")
    seen.page.keyboard.press("Enter")
    seen.answered()
    seen.page.reload()
    seen.ask("again")  # the tab keeps the key
    kept = seen.page.evaluate("() => [JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert "sk-right" not in kept[0] and "sk-right" in kept[1]


def test_a_dismissed_key_leaves_the_message_to_be_tried_again(seen):
    seen.allowed.append("401")
    seen.script.key = "sk-right"
    seen.say("merge them")
    seen.button("Not now").click()
    expect(seen.answer).to_contain_text("The server asks for a key")
    seen.button("Try again").click()
    seen.page.get_by_label("Key", exact=True).fill("sk-right")
    seen.page.keyboard.press("Enter")
    seen.answered()


def test_while_the_model_is_loaded_the_page_says_so_and_answers_then(seen):
    seen.allowed.append("503")
    seen.script.state = "loading"
    seen.page.reload()
    expect(seen.page.locator("#banner")).to_contain_text("being loaded")
    seen.say("merge them")
    expect(seen.answer).to_contain_text("being loaded")
    seen.script.state = "ok"
    seen.answered()
    expect(seen.page.locator("#banner")).to_be_hidden()


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ((503, {"code": "engine_overloaded", "message": "no place"}), "waiting places of the server are taken"),
        ((503, {"code": "server_shutting_down", "message": "bye"}), "shutting down"),
        ((400, {"code": "context_length_exceeded", "message": "the prompt is long"}), "The prompt is long."),
        ((500, {"code": "internal_error", "message": "see the log"}), "See the log."),
    ],
)
def test_a_refusal_is_told_in_words_and_can_be_tried_again(seen, refuse, words):
    seen.allowed.append(str(refuse[0]))
    seen.script.refuse = refuse
    seen.say("merge them")
    expect(seen.answer.get_by_role("alert")).to_contain_text(words)
    seen.script.refuse = None
    seen.button("Try again").click()
    seen.answered()


def test_a_stream_that_breaks_keeps_its_text_and_says_why(seen):
    seen.script.breaks = True
    seen.say("merge them")
    expect(seen.answer.get_by_role("alert")).to_contain_text("The pass failed.")
    expect(seen.answer).to_contain_text(POEM_WORDS)


def test_a_server_that_is_gone_is_told(seen):
    seen.allowed.append("ERR_")
    seen.page.route("**/v1/**", lambda route: route.abort())
    seen.page.route("**/ready", lambda route: route.abort())
    seen.say("merge them")
    expect(seen.answer.get_by_role("alert")).to_contain_text("does not answer")
    expect(seen.page.locator("#banner")).to_contain_text("does not answer")
    seen.page.unroute_all()
    expect(seen.page.locator("#banner")).to_be_hidden()
    seen.button("Try again").click()
    seen.answered()
