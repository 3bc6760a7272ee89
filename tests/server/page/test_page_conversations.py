"""Conversations on the page: their versions, names, files, and what the browser keeps of them."""

import json

import pytest
from scripted_server import POEM, POEM_WORDS, turn

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page").expect


def choose(seen, action: str, conversation: str = "Actions") -> None:
    """Something of a conversation's menu."""
    if conversation != "Actions":
        seen.page.locator("#conversations li").first.hover()
    seen.button(conversation).click()
    seen.page.get_by_role("menuitem", name=action).click()


def test_answering_again_asks_the_same_again_and_keeps_both_answers(seen):
    seen.script.answers["name one"] = "The first."
    seen.say("name one")
    seen.answered("The first.")
    seen.script.answers["name one"] = "The second."
    seen.button("Answer again").click()
    seen.answered("The second.")
    first, second = seen.script.asked
    assert first == second and seen.page.locator("article").count() == 2
    expect(seen.answer.locator(".versions")).to_have_text("2 / 2")
    expect(seen.button("Next version")).to_be_disabled()
    seen.button("Previous version").click()
    expect(seen.answer).to_contain_text("The first.")
    expect(seen.button("Next version")).to_be_focused()  # for whoever uses keys
    seen.page.reload()
    expect(seen.answer).to_contain_text("The first.")
    expect(seen.answer.locator(".versions")).to_have_text("1 / 2")
    seen.ask("go on")
    assert [message["content"] for message in seen.script.asked[-1]["messages"]] == ["name one", "The first.", "go on"]


def test_an_edited_message_has_versions_with_all_that_followed(seen):
    for text in ("one", "two"):
        seen.ask(text)
    question = seen.page.locator(".question").first
    question.hover()
    question.get_by_role("button", name="Edit").click()
    seen.page.get_by_label("Edit your message").fill("another")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("article")).to_have_count(2)
    seen.answered()
    assert [message["content"] for message in seen.script.asked[-1]["messages"]] == ["another"]
    seen.ask("more")
    question.get_by_role("button", name="Previous version").click()
    expect(seen.page.locator(".said")).to_have_text(["one", "two"])
    question.get_by_role("button", name="Next version").click()
    expect(seen.page.locator(".said")).to_have_text(["another", "more"])


def test_a_version_is_shown_where_the_other_one_was(seen):
    """An earlier message stays in sight, though all that follows is another text."""
    seen.keep(messages=[turn("user", "one"), turn("user", "two", parent=-1), turn("assistant", "line\n\n" * 100)])
    seen.page.locator("#transcript").evaluate("node => { node.scrollTop = 0; }")
    seen.button("Previous version").click()
    expect(seen.page.locator(".said")).to_have_text("one")
    seen.button("Next version").click()
    expect(seen.page.locator(".said")).to_be_in_viewport()


def test_an_answer_that_failed_is_no_version(seen):
    seen.allowed.append("500")
    seen.script.refuse = (500, {"code": "internal_error", "message": "see the log"})
    seen.say("merge them")
    expect(seen.answer.get_by_role("alert")).to_be_visible()
    seen.script.refuse = None
    seen.button("Try again").click()
    seen.answered()
    expect(seen.page.locator(".versions")).to_have_count(0)


def test_a_version_is_chosen_while_another_is_written(seen):
    seen.say("endless")
    expect(seen.answer).to_contain_text("on on on")
    seen.page.keyboard.press("Escape")
    expect(seen.button("Send")).to_be_visible()
    seen.button("Answer again").click()
    expect(seen.answer).to_contain_text("on on on")
    seen.button("Previous version").click()
    expect(seen.button("Send")).to_be_visible()
    seen.until(lambda: seen.script.running == 0)
    expect(seen.answer.locator(".versions")).to_have_text("1 / 2")
    expect(seen.answer.locator(".steps summary")).to_contain_text("stopped")


def test_conversations_are_renamed_deleted_and_brought_back(seen):
    seen.ask("merge them")
    choose(seen, "Rename", "Actions for merge them")
    seen.page.get_by_label("Name", exact=True).fill("lists")
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("#title")).to_have_text("lists")
    item = seen.page.locator("#conversations li")
    choose(seen, "Delete")
    expect(item).to_have_count(0)
    seen.button("Undo").click()
    expect(item).to_have_text("lists")
    assert seen.answered().locator(".prose .token.memory").count()


def test_a_menu_is_used_by_keys(seen):
    seen.ask("merge them")
    seen.button("Actions").focus()
    press = seen.page.keyboard.press
    press("Enter")
    expect(seen.page.get_by_role("menuitem").first).to_be_focused()
    press("ArrowUp")
    expect(seen.page.get_by_role("menuitem", name="Delete")).to_be_focused()
    press("Escape")
    expect(seen.page.get_by_role("menu")).to_be_hidden()
    expect(seen.button("Actions")).to_be_focused()


def test_what_earlier_versions_of_the_page_kept_is_shown(seen):
    """They had no parents: each message follows the one before it."""
    answer = {"role": "assistant", "content": POEM, "finish": "stop", "seconds": 1.5, "usage": {"prompt_tokens": 9}}
    trace = [[1, "0", [4]], [17, "mmb", [3, 4, 4]], [17, "b", [len(POEM) - 15]]]
    one, two = ({"role": "user", "content": content} for content in ("one", "two"))
    seen.keep(messages=[one, {**answer, "trace": trace}, two, answer], system="Be brief.")
    expect(seen.page.locator(".said")).to_have_text(["one", "two"])
    expect(seen.page.locator(".answer").first.locator(".token.memory")).to_have_count(2)
    seen.ask("three")
    assert [message["role"] for message in seen.script.asked[-1]["messages"]][:2] == ["system", "user"]
    assert len(seen.script.asked[-1]["messages"]) == 6


DAMAGED = {
    "no text": "{",
    "another form": "5",
    "no messages": '{"id": "kept"}',
    "messages that are none": '{"messages": 5}',
    "a message that is none": '{"messages": [null]}',
    "a message without content": '{"messages": [{"role": "user"}]}',
    "a parent that comes later": '{"messages": [{"role": "user", "content": "", "parent": 1}]}',
    "a last message that is missing": '{"messages": [], "leaf": 7}',
}


def test_every_kind_of_damage_is_told(seen):
    for kept in DAMAGED.values():
        seen.store("lade.chat.kept", kept)
        expect(seen.page.get_by_role("alert")).to_contain_text("cannot be shown")
        expect(seen.page.locator("#conversations li")).to_have_count(1)


def test_a_damaged_conversation_is_deleted(seen):
    seen.store("lade.chat.kept", DAMAGED["a message that is none"])
    seen.button("Delete").click()
    expect(seen.page.get_by_text("What would you like to read?")).to_be_visible()
    expect(seen.page.locator("#conversations li")).to_have_count(0)
    seen.button("Undo").click()
    expect(seen.page.get_by_role("alert")).to_contain_text("cannot be shown")
    seen.ask("merge them")  # which begins another one
    expect(seen.page.locator("#conversations li")).to_have_count(2)


def test_a_conversation_that_a_fault_of_the_page_keeps_from_being_drawn_is_deleted(seen):
    seen.page.add_init_script(
        """const set = Element.prototype.setAttribute;
        Element.prototype.setAttribute = function (name, value) {
            if (name === "aria-busy") throw new Error("a fault");
            return set.call(this, name, value);
        };"""
    )
    seen.keep(messages=[turn("user", "hello"), turn("assistant", "one two")])
    expect(seen.page.get_by_role("alert")).to_contain_text("cannot be shown")
    seen.button("Delete").click()
    expect(seen.page.locator("#conversations li")).to_have_count(0)


def test_a_trace_that_is_none_is_left_out(seen):
    answer = turn("assistant", POEM) | {"trace": [[1, "mb", [3]], "x", None]}
    seen.keep(messages=[turn("user", "hello"), answer])
    expect(seen.answer).to_contain_text(POEM_WORDS)
    expect(seen.answer.locator(".steps")).to_be_hidden()


def test_where_the_browser_has_no_room_older_conversations_lose_their_passes(seen):
    passes = [[1, "b", [5]]] * 100_000
    old = [turn("user", "old"), turn("assistant", "one two", trace=passes)]
    kept = "([key, text]) => localStorage.setItem(key, text)"
    seen.page.evaluate(kept, ["lade.chat.old", json.dumps({"messages": old}, separators=(",", ":"))])
    seen.page.evaluate(
        """() => {
            let filler = "x".repeat(2 ** 20);
            for (let n = 0; filler.length > 100; ) {
                try { localStorage.setItem(`filler.${n}`, filler); n += 1; } catch { filler = filler.slice(filler.length / 2); }
            }
        }"""  # noqa: E501
    )
    seen.ask("merge them")
    expect(seen.page.locator("#toast")).to_be_hidden()
    seen.page.reload()
    seen.answered()
    left = json.loads(seen.page.evaluate("() => localStorage.getItem('lade.chat.old')"))
    assert [message.get("trace") for message in left["messages"]] == [None, None]
    assert left["messages"][1]["content"] == "one two"
