"""Settings, live rows, keys, names for those who do not see, small screens, themes."""

import pytest
from scripted_server import POEM, turn

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
    seen.ask("merge them")
    (body,) = seen.script.asked
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 7}
    expected = {**sampling, "max_tokens": 40, "stop": ["END", "HALT"], "lookahead": None}
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


def test_where_nothing_is_set_defaults_are_shown_and_a_checkpoint_that_asks_for_no_sampling_is_asked_greedily(seen):
    seen.button("Settings").click()
    for label, default in {"Temperature": "0.7", "Longest answer": "512", "Seed": "random"}.items():
        expect(seen.page.get_by_label(label)).to_have_attribute("placeholder", default)
    seen.script.page = {"temperature": 0}
    seen.page.reload()
    seen.button("Settings").click()
    expect(seen.page.get_by_label("Temperature")).to_have_attribute("placeholder", "0")
    seen.ask("merge them")
    seen.page.get_by_label("Temperature").fill("0.5")
    seen.say("again")
    seen.until(lambda: len(seen.script.asked) == 2)
    assert [body["temperature"] for body in seen.script.asked] == [0, 0.5]


def test_the_form_of_the_answer_goes_into_the_request(seen):
    seen.button("Settings").click()
    form, schema = seen.page.get_by_label("Form of the answer"), seen.page.get_by_label("JSON schema")
    expect(schema).to_be_hidden()
    form.select_option("schema")
    wrong = seen.page.locator("#field-schema .wrong")
    for text in ("", "{", "5", "[]"):
        schema.fill(text)
        schema.blur()
        expect(wrong).to_contain_text("not a JSON object")
    schema.fill('{"type": "object"}')
    schema.blur()
    expect(wrong).to_have_text("")
    seen.ask("merge them")
    form.select_option("json")
    seen.say("merge them")
    seen.until(lambda: len(seen.script.asked) == 2)
    json_schema = {"name": "answer", "schema": {"type": "object"}}
    formats = [body["response_format"] for body in seen.script.asked]
    assert formats == [{"type": "json_schema", "json_schema": json_schema}, {"type": "json_object"}]


def test_the_form_of_a_continued_text_goes_into_the_request(seen):
    seen.script.templated = False
    seen.page.reload()
    seen.page.get_by_text("Begin a text").wait_for()
    seen.button("Settings").click()
    seen.page.get_by_label("Form of the answer").select_option("schema")
    seen.page.get_by_label("JSON schema").fill('{"type": "object"}')
    seen.say("x")
    seen.until(lambda: len(seen.script.asked) == 1)
    (body,) = seen.script.asked
    assert body["structured_outputs"] == {"json": {"type": "object"}} and "response_format" not in body


def test_code_and_answers_are_copied(seen):
    answer = seen.ask("merge them")
    answer.get_by_role("button", name="Copy the code").click()
    assert seen.page.evaluate("() => navigator.clipboard.readText()").startswith(
        "def merge(left, right):\n    merged = []\n"
    )
    answer.get_by_role("button", name="Copy as Markdown", exact=True).click()
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
    seen.ask("merge them")
    seen.button("Settings").click()
    nameless = seen.page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select")]
            .filter((part) => !(part.ariaLabel || part.textContent.trim() || part.labels?.length))
            .map((part) => part.outerHTML)"""
    )
    assert nameless == []


PHONE = pytest.mark.parametrize(
    "seen", [{"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}], indirect=True
)


@PHONE
def test_on_a_phone_nothing_is_wider_than_the_screen_and_the_model_has_its_name(seen):
    seen.ask("merge them")
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
    expect(seen.page.locator("#model")).to_be_visible()
    expect(seen.page.locator("#model")).to_have_text("tiny-story-model")
    box = seen.page.locator("#model").bounding_box()
    assert box["width"] > 80 and box["x"] + box["width"] <= 360


@PHONE
def test_fingers_have_44_pixels_for_all_that_is_pressed(seen):
    def small() -> list[str]:
        return seen.page.evaluate(
            """() => [...document.querySelectorAll("button, input:not(.prose *), select, textarea, summary")]
                .filter((part) => part.checkVisibility({ visibilityProperty: true }))
                .map((part) => [part.getBoundingClientRect(), part.outerHTML.slice(0, 120)])
                .filter(([{ width, height }]) => width < 44 || height < 44)
                .map(([{ width, height }, name]) => `${width} x ${height}: ${name}`)"""
        )

    assert small() == []
    seen.script.thinks = "So."
    for _ in range(2):
        seen.ask("merge them")
    seen.button("Answer again").last.click()
    seen.answered()
    seen.answer.locator(".steps summary").click()
    assert small() == []
    for opened in ("Settings", "Conversations"):
        seen.button(opened).click()
        assert small() == []
        seen.page.keyboard.press("Escape")
    seen.button("Actions").click()
    assert small() == []


@pytest.mark.parametrize("seen", [{"viewport": {"width": 360, "height": 640}}], indirect=True)
def test_tables_split_no_words(seen):
    words = ["internationally", "counterrevolutionary", "noteworthy", "characteristics"]
    table = f"| {' | '.join(words)} |\n|{'-|' * 4}\n| {' | '.join(words)} |\n"
    seen.keep(messages=[turn("user", "go"), turn("assistant", table)])
    cells = seen.answer.locator(".prose td")
    expect(cells).to_have_count(4)
    assert max(box["height"] for box in (cell.bounding_box() for cell in cells.all())) < 45  # one line
    assert seen.page.evaluate("() => document.documentElement.scrollWidth") == 360


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
