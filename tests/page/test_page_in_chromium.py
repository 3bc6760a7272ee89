"""The chat page as its users have it, in Chromium against a scripted server: `make test-page`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_server import POEM, Running, Script

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
POEM_WORDS = "Here is how two sorted lists are merged, with one pass over both:"
expect = api.expect


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


@dataclass
class Seen:
    """A page with its server, and what went wrong in it."""

    page: Any
    script: Script
    url: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    @property
    def answer(self) -> Any:
        return self.page.locator(".answer").last

    def answered(self, text: str = POEM_WORDS) -> Any:
        expect(self.answer).to_contain_text(text)
        expect(self.answer).to_have_attribute("aria-busy", "false")
        return self.answer

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def until(self, holds: Any) -> None:
        for _ in range(100):
            if holds():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not come true within five seconds")


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def seen(browser: Any, script: Script, request: pytest.FixtureRequest) -> Iterator[Seen]:
    """A page that was just opened; what must never happen is looked for when the test is over."""
    running = Running(script)
    options = {"viewport": {"width": 1200, "height": 800}, **getattr(request, "param", {})}
    context = browser.new_context(**options, permissions=["clipboard-read", "clipboard-write"])
    seen = Seen(context.new_page(), script, running.url)
    seen.page.set_default_timeout(8000)
    seen.page.on("console", lambda message: message.type in ("error", "warning") and seen.errors.append(message.text))
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
    seen.page.on("dialog", lambda dialog: seen.errors.append(dialog.message) or dialog.dismiss())
    context.on("request", lambda asked: seen.requests.append(asked.url))
    seen.page.goto(running.url)
    expect(seen.page.locator("#model")).to_have_text("tiny-story-model")
    yield seen
    context.close()
    running.close()
    assert [error for error in seen.errors if not any(word in error for word in seen.allowed)] == []
    assert [url for url in seen.requests if not url.startswith((running.url, "blob:", "data:"))] == []


def test_an_answer_streams_and_its_tokens_have_the_colours_of_their_sources(seen):
    seen.say("merge them")
    answer = seen.answered()
    assert answer.locator("strong").inner_text() == "one pass"
    assert answer.locator("pre .hljs-keyword").first.inner_text() == "def"
    assert answer.locator("table th").count() == 3 and answer.locator("ol li").count() == 2
    expect(answer.locator("a")).to_have_attribute("href", "https://docs.python.org/3/")
    painted = answer.locator(".prose .token").all_inner_texts()
    whole = "".join(answer.locator(".prose > div").all_inner_texts())
    assert len("".join(painted)) > 0.9 * len(whole.replace("\n", "")) - 20
    for source in ("memory", "pool", "window", "prompt", "text"):
        assert answer.locator(f".prose .token.{source}").count() and answer.locator(f".strip i.{source}").count()
        expect(seen.page.locator("#legend")).to_contain_text(source)
    assert answer.locator(".prose .token").first.inner_text() == "Here"  # the first token, which prefill yields
    assert "tokens per pass" in answer.locator("summary").last.inner_text()
    (body,) = seen.script.asked
    assert (
        body["stream"]
        and body["lade"] == {"trace": True}
        and body["messages"] == [{"role": "user", "content": "merge them"}]
    )


def test_every_token_stands_in_the_table_of_passes(seen):
    seen.say("merge them")
    seen.answered().locator(".steps summary").click()
    chips = seen.answer.locator(".chips .token").all_inner_texts()
    assert "".join(chips).replace("·", " ").replace("⏎", "\n") == POEM
    assert seen.answer.locator(".strip > span").count() == seen.answer.locator(".steps tbody tr").count()
    expect(seen.answer.locator(".steps")).to_contain_text("seed 7")


def test_pointing_at_a_token_tells_its_source_and_shows_its_pass(seen):
    seen.say("merge them")
    token = seen.answered().locator(".prose .token:not(.own)").first
    token.hover()
    step = token.get_attribute("data-step")
    expect(seen.page.locator("#tip")).to_contain_text(f"pass {step}: ")
    expect(seen.page.locator("#tip")).to_contain_text("out of 17 fed")
    expect(seen.answer.locator(f".strip span.lit[data-step='{step}']")).to_have_count(1)
    seen.button("Colour tokens by source").click()
    expect(seen.answer.locator(".strip")).to_be_hidden()


def test_stop_frees_the_row_and_keeps_what_came(seen):
    seen.say("endless")
    expect(seen.answer).to_contain_text("on on on")
    assert seen.script.running == 1
    seen.button("Stop").click()
    seen.until(lambda: seen.script.running == 0)
    assert seen.script.left == 1
    expect(seen.answer.locator(".steps summary")).to_contain_text("stopped")
    expect(seen.button("Send")).to_be_visible()
    seen.say("endless")
    expect(seen.answer).to_contain_text("on on on")
    seen.page.keyboard.press("Escape")
    seen.until(lambda: seen.script.left == 2)


def test_closing_the_page_frees_the_row(seen):
    seen.say("endless")
    expect(seen.answer).to_contain_text("on on on")
    seen.page.close()
    for _ in range(100):
        if seen.script.running == 0:
            break
        seen.page.context.new_page().wait_for_timeout(50)
    assert seen.script.left == 1


def test_answering_again_asks_the_same_again(seen):
    seen.say("merge them")
    seen.answered()
    seen.button("Answer again").click()
    seen.until(lambda: len(seen.script.asked) == 2)
    seen.answered()
    first, second = seen.script.asked
    assert first == second and seen.page.locator("article").count() == 2
    seen.button("Undo").click()
    assert seen.answered().locator(".prose .token.memory").count()


def test_an_edited_message_takes_the_place_of_the_old_one_and_can_be_brought_back(seen):
    for text in ("one", "two"):
        seen.say(text)
        seen.answered()
    seen.page.locator(".question").first.hover()
    seen.page.locator(".question").first.get_by_role("button", name="Edit").click()
    seen.page.get_by_label("Edit your message").fill("another")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("article")).to_have_count(2)
    seen.answered()
    assert [turn["content"] for turn in seen.script.asked[-1]["messages"]] == ["another"]
    seen.button("Undo").click()
    expect(seen.page.locator("article")).to_have_count(4)
    expect(seen.page.locator(".question").first).to_have_text("one")


def test_a_conversation_is_there_after_a_reload_with_its_colours(seen):
    seen.say("merge them")
    painted = seen.answered().locator(".prose .token").count()
    figures = seen.answer.locator(".steps summary").inner_text()
    seen.page.reload()
    assert seen.answered().locator(".prose .token").count() == painted
    assert seen.answer.locator(".steps summary").inner_text() == figures
    expect(seen.page.locator("#title")).to_have_text("merge them")
    seen.button("New chat").click()
    seen.say("another")
    seen.answered()
    seen.page.locator("#conversations").get_by_role("button", name="merge them").click()
    expect(seen.page.locator(".question")).to_have_text("merge them")
    sessions = seen.script.sessions
    assert len(sessions) == 2 and sessions[0] != sessions[1]


def test_an_answer_that_a_reload_cuts_is_kept_and_said_to_be_cut(seen):
    seen.say("endless")
    expect(seen.answer).to_contain_text("on on on")
    seen.page.reload()
    expect(seen.answer).to_contain_text("on on on")
    expect(seen.answer.locator(".steps summary")).to_contain_text("broken off")
    seen.until(lambda: seen.script.running == 0)


def test_conversations_are_renamed_deleted_and_brought_back(seen):
    seen.say("merge them")
    seen.answered()
    item = seen.page.locator("#conversations li")
    item.hover()
    item.get_by_role("button", name="Rename").click()
    seen.page.get_by_label("Name of the conversation").fill("lists")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("#title")).to_have_text("lists")
    item.hover()
    item.get_by_role("button", name="Delete").click()
    expect(item).to_have_count(0)
    seen.button("Undo").click()
    expect(item).to_have_count(1)
    assert seen.answered().locator(".prose .token.memory").count()
    item.hover()
    with seen.page.expect_download() as download:
        item.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "lists.json"


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
    seen.say("again")  # the tab keeps the key
    seen.answered()
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
        (
            (400, {"code": "context_length_exceeded", "message": "the prompt has 2000 tokens"}),
            "The prompt has 2000 tokens.",
        ),
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


def test_settings_go_into_the_request_and_stay(seen):
    seen.button("Settings").click()
    for label, value in {"Temperature": "0.5", "Top-p": "0.9", "Seed": "7", "Longest answer": "40"}.items():
        seen.page.get_by_label(label).fill(value)
    seen.page.get_by_label("Stop at").fill("END\nHALT")
    seen.page.get_by_label("Lookahead").select_option("off")
    seen.page.get_by_label("Reasoning").select_option("off")
    seen.page.get_by_label("System prompt").fill("Be brief.")
    seen.page.reload()
    seen.button("Settings").click()
    seen.page.get_by_label("System prompt").fill("Be brief.")
    seen.say("merge them")
    seen.answered()
    (body,) = seen.script.asked
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    expected = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "max_tokens": 40,
        "stop": ["END", "HALT"],
        "lookahead": None,
    }
    assert expected.items() <= body.items() and body["chat_template_kwargs"] == {"enable_thinking": False}
    seen.page.get_by_label("Lookahead").select_option("budget")
    seen.page.get_by_label("Tokens fed in each pass").fill("24")
    seen.page.get_by_label("Temperature").fill("9")  # too high: it is marked, and not sent
    seen.say("again")
    seen.until(lambda: len(seen.script.asked) == 2)
    seen.answered()
    body = seen.script.asked[-1]
    assert body["lookahead"] == {"budget": 24} and "temperature" not in body
    seen.button("Back to the defaults").click()
    seen.say("again")
    seen.until(lambda: len(seen.script.asked) == 3)
    assert set(seen.script.asked[-1]) == {"messages", "stream", "stream_options", "lade"}


def test_reasoning_is_folded_and_painted(seen):
    seen.script.thinks = "The lists are sorted, so the first items are enough to look at."
    seen.say("merge them")
    answer = seen.answered()
    thought = answer.locator(".reasoning")
    expect(thought.locator(".prose")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator(".prose")).to_have_text(seen.script.thinks)
    assert "".join(thought.locator(".token").all_inner_texts()) == seen.script.thinks
    assert answer.locator(".prose").last.locator(".token").first.inner_text() == "Here"


@pytest.mark.parametrize("told", [True, False])
def test_a_model_without_chat_template_continues_text(seen, told):
    seen.allowed.append("400")  # where the server does not tell beforehand
    seen.script.templated, seen.script.told = False, told
    seen.page.reload()
    if told:
        expect(seen.page.get_by_text("Begin a text")).to_be_visible()
    seen.page.get_by_label("Message", exact=True).fill("def f():\n    ")
    seen.page.keyboard.press("Enter")
    answer = seen.answered("```python")  # no Markdown
    assert answer.locator(".token.memory").count()
    seen.say("more")
    seen.until(lambda: len(seen.script.asked) == 2)
    first, second = (body["prompt"] for body in seen.script.asked)
    assert first == ("def f():\n    " if told else "def f():") and second == f"{first}{POEM}more"
    expect(seen.answer.locator(".prose").last).to_have_text(POEM, use_inner_text=True)


def test_live_rows_are_shown(seen):
    seen.button("Live rows").click()
    rows = seen.page.locator("#rows")
    expect(rows).to_contain_text("Rows 3 of 16")
    expect(rows.locator("li.decoding").first).to_contain_text("writes")
    expect(rows.locator("li.prefill")).to_contain_text("reads its prompt")
    expect(rows.locator("li").first).to_contain_text("2.54 per pass")
    seen.page.keyboard.press("Escape")
    expect(rows).to_be_hidden()


def test_code_and_answers_are_copied(seen):
    seen.say("merge them")
    answer = seen.answered()
    answer.get_by_role("button", name="Copy the code").click()
    assert seen.page.evaluate("() => navigator.clipboard.readText()").startswith(
        "def merge(left, right):\n    merged = []\n"
    )
    answer.get_by_role("button", name="Copy", exact=True).click()
    assert seen.page.evaluate("() => navigator.clipboard.readText()") == POEM


def test_the_page_is_used_by_keys_alone(seen):
    press = seen.page.keyboard.press
    expect(seen.page.get_by_label("Message", exact=True)).to_be_focused()
    seen.page.keyboard.type("one")
    press("Shift+Enter")
    seen.page.keyboard.type("two")
    press("Enter")
    seen.answered()
    expect(seen.page.locator(".said")).to_have_text("one\ntwo", use_inner_text=True)
    press("Control+Shift+O")
    expect(seen.page.locator("article")).to_have_count(0)
    press("Tab")
    expect(seen.button("Send")).to_be_focused()
    press("?")
    expect(seen.page.get_by_role("dialog")).to_contain_text("What the colours mean")
    press("Escape")
    expect(seen.page.get_by_role("dialog")).to_be_hidden()
    press("/")
    expect(seen.page.get_by_label("Message", exact=True)).to_be_focused()


def test_everything_that_is_pressed_or_filled_has_a_name(seen):
    seen.say("merge them")
    seen.answered()
    seen.button("Settings").click()
    nameless = seen.page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select")]
            .filter((part) => !(part.ariaLabel || part.textContent.trim() || part.labels?.length))
            .map((part) => part.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize(
    "seen", [{"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}], indirect=True
)
def test_on_a_phone_nothing_is_wider_than_the_screen(seen):
    seen.say("merge them")
    seen.answered()
    wide = "() => document.documentElement.scrollWidth"
    assert seen.page.evaluate(wide) == 360
    expect(seen.page.locator("#sidebar")).to_be_hidden()
    seen.button("Conversations").click()
    expect(seen.page.locator("#sidebar")).to_be_visible()
    seen.page.locator("#conversations .name").first.click()
    expect(seen.page.locator("#sidebar")).to_be_hidden()
    seen.button("Settings").click()
    assert seen.page.evaluate(wide) == 360
    seen.page.get_by_label("Close the settings").click()


@pytest.mark.parametrize("seen", [{"color_scheme": "dark"}], indirect=True)
def test_the_theme_follows_the_system_until_one_is_chosen(seen):
    ground = "() => getComputedStyle(document.body).backgroundColor"
    dark = seen.page.evaluate(ground)
    seen.button("Theme: system").click()
    light = seen.page.evaluate(ground)
    assert dark != light
    seen.page.reload()
    assert seen.page.evaluate(ground) == light
    seen.button("Theme: light").click()
    assert seen.page.evaluate(ground) == dark
