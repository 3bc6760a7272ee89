"""Answers on the page: streamed, coloured, stopped, asked for again, kept."""

from __future__ import annotations

import pytest
from scripted_server import POEM

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page").expect


def test_an_answer_streams_and_its_tokens_have_the_colours_of_their_sources(seen):
    seen.say("merge them")
    answer = seen.answered()
    assert answer.locator("strong").inner_text() == "one pass"
    assert answer.locator("pre .hljs-keyword").first.inner_text() == "def"
    assert answer.locator("table th").count() == 3 and answer.locator("ol li").count() == 2
    assert answer.locator(":is(table, thead, tbody, tr, ul, ol) > span").count() == 0  # else cells move
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
