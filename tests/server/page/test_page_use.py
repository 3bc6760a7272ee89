"""Settings, live rows, keys, names for those who do not see, small screens, themes."""

from __future__ import annotations

import pytest
from scripted_server import POEM

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page").expect


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
