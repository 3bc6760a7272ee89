"""Answers on the page: streamed, coloured, stopped, asked for again, kept."""

import pytest
from scripted_server import POEM, turn

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page").expect


def test_an_answer_streams_and_its_tokens_have_the_colours_of_their_sources(seen):
    answer = seen.ask("merge them")
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
    assert "2.85 tokens per pass" in answer.locator("summary").last.inner_text()
    (body,) = seen.script.asked
    assert body["stream"] and body["lade"] == {"trace": True}
    assert body["messages"] == [{"role": "user", "content": "merge them"}]


def test_every_token_stands_in_the_table_of_passes(seen):
    seen.ask("merge them").locator(".steps summary").click()
    chips = seen.answer.locator(".chips .token").all_inner_texts()
    assert "".join(chips).replace("·", " ").replace("⏎", "\n") == POEM
    assert seen.answer.locator(".strip > span").count() == seen.answer.locator(".steps tbody tr").count()
    expect(seen.answer.locator(".steps")).to_contain_text("seed 7")


def test_pointing_at_a_token_tells_its_source_and_shows_its_pass(seen):
    token = seen.ask("merge them").locator(".prose .token:not(.own)").first
    token.hover()
    step = token.get_attribute("data-step")
    expect(seen.page.locator("#tip")).to_contain_text(f"pass {step}: ")
    expect(seen.page.locator("#tip")).to_contain_text("out of 17 fed")
    expect(seen.answer.locator(f".strip span.lit[data-step='{step}']")).to_have_count(1)
    seen.button("Colour tokens by source").click()
    expect(seen.answer.locator(".strip")).to_be_hidden()


def test_passes_of_one_token_are_folded_to_one_quiet_line(seen):
    seen.script.guessed = ()
    answer = seen.ask("merge them")
    expect(answer.locator(".strip")).to_be_hidden()
    expect(seen.page.locator("#legend")).to_be_hidden()
    line = answer.locator(".steps summary")
    assert "235 tokens" in line.inner_text() and "pass" not in line.inner_text()
    line.click()
    expect(answer.locator(".strip")).to_be_visible()
    expect(answer.locator(".steps")).to_contain_text("1.00 tokens in each")


def test_a_rate_is_told_only_of_answers_that_took_a_while(seen):
    seen.keep(messages=[turn("user", "hello"), turn("assistant", "one two", seconds=0.19), turn("user", "again")])
    expect(seen.answer.locator(".steps summary")).to_have_text("2 tokens")
    seen.keep(messages=[turn("user", "hello"), turn("assistant", "one two", seconds=0.25)])
    expect(seen.answer.locator(".steps summary")).to_have_text("2 tokens · 8 tokens/s")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"content": ""}, "The model ended its answer without a word."),
        ({"content": " \n"}, "nothing but blank space"),
        ({"content": "", "finish": "stopped"}, "Stopped before the answer began."),
        ({"content": "", "reasoning": "Hm."}, "without an answer"),
        ({"content": "", "reasoning": "Hm", "finish": "length"}, "amid the reasoning"),
    ],
)
def test_an_empty_answer_says_so(seen, answer, words):
    seen.keep(messages=[turn("user", "hello"), {**turn("assistant", ""), **answer}])
    expect(seen.answer.locator(".note")).to_contain_text(words)


def test_an_answer_without_a_word_says_so_when_it_has_come(seen):
    seen.script.answers["say nothing"] = ""
    seen.say("say nothing")
    expect(seen.answer.locator(".note")).to_have_text("The model ended its answer without a word.")
    seen.ask("merge them")
    expect(seen.page.locator(".note:visible")).to_have_count(1)


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


def test_a_conversation_is_there_after_a_reload_with_its_colours(seen):
    painted = seen.ask("merge them").locator(".prose .token").count()
    figures = seen.answer.locator(".steps summary").inner_text()
    seen.page.reload()
    assert seen.answered().locator(".prose .token").count() == painted
    assert seen.answer.locator(".steps summary").inner_text() == figures
    expect(seen.page.locator("#title")).to_have_text("merge them")
    seen.button("New chat").click()
    seen.ask("another")
    seen.page.locator("#conversations").get_by_role("button", name="merge them", exact=True).click()
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


def test_reasoning_is_folded_and_painted(seen):
    seen.script.thinks = "The lists are sorted, so the first items are enough to look at."
    answer = seen.ask("merge them")
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
    seen.say("def f():\n    ")
    answer = seen.answered("```python")  # no Markdown
    assert answer.locator(".token.memory").count()
    seen.say("more")
    seen.until(lambda: len(seen.script.asked) == 2)
    first, second = (body["prompt"] for body in seen.script.asked)
    assert first == ("def f():\n    " if told else "def f():") and second == f"{first}{POEM}more"
    expect(seen.answer.locator(".prose").last).to_have_text(POEM, use_inner_text=True)
