"""What models and strangers write cannot hurt the page: degenerate answers, markup, formulas."""

import pytest
from scripted_server import turn

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page").expect

DEGENERATE = {  # each overflowed the parser's stack, froze the page for seconds, or was lost from sight
    "quotes without spaces": ">" * 2000,
    "quotes": "> " * 2000,
    "lists": "- " * 2000 + "x",
    "numbered lists": "1. " * 2000,
    "stars": "*" * 3000 + "x" + "*" * 3000,
    "mixed": "> - 1. " * 1000,
    "quotes that the parser can read": "> " * 300 + "deep",
    "emphasis that never ends": "*a_" * 6000,
}
HARMLESS = {
    "long code of dollars": "```java\n" + "$" * 20_000 + "\n```",
    "code of many lines": "```csharp\n" + "a\n" * 15_000 + "```",
    "entities": "&times;" * 10_000,
    "cells": "|" + "a|" * 1000 + "\n|" + "-|" * 1000 + "\n",
    "formulas": "$" + "\\sqrt{" * 250 + "x" + "}" * 250 + "$",
}


@pytest.mark.parametrize("text", DEGENERATE.values(), ids=DEGENERATE)
def test_a_degenerate_answer_is_plain_text_and_the_page_lives_on(seen, text):
    ordinary = [turn("user", "hello"), turn("assistant", "*hi*")]
    seen.keep(messages=[*ordinary, turn("user", "go"), turn("assistant", text)])
    for _ in range(2):
        expect(seen.answer.locator(".prose.plain").last).to_have_text(text.strip(), use_inner_text=True)
        expect(seen.answer.locator(".note")).to_contain_text("Shown as plain text")
        expect(seen.page.locator(".answer").first.locator("em")).to_have_text("hi")
        seen.page.reload()
    seen.ask("merge them")


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_an_odd_answer_is_drawn_soon(seen, text):
    seen.keep(messages=[turn("user", "go"), turn("assistant", text)])
    expect(seen.answer.locator(".prose").last).not_to_be_empty()
    expect(seen.answer.locator(".note")).to_be_hidden()


def test_a_degenerate_answer_streams_and_is_plain_after_reloads(seen):
    seen.script.answers["degenerate"] = text = "> " * 1500
    seen.script.pause_s = 0
    seen.say("degenerate")
    expect(seen.answer.locator(".steps summary")).to_contain_text("3,000 tokens", timeout=30_000)
    for _ in range(2):
        expect(seen.answer.locator(".prose.plain").last).to_have_text(text.strip(), use_inner_text=True)
        assert seen.answer.locator(".prose .token.memory").count()
        seen.page.reload()
    seen.button("Try again").click()  # which fails again
    expect(seen.answer.locator(".note")).to_contain_text("Shown as plain text")


def test_what_was_shown_as_plain_text_can_be_drawn_again(seen):
    seen.keep(messages=[turn("user", "go"), turn("assistant", "**bold**", plain=True)])
    expect(seen.answer.locator(".prose.plain").last).to_have_text("**bold**")
    seen.button("Try again").click()
    expect(seen.answer.locator("strong")).to_have_text("bold")
    expect(seen.answer.locator(".note")).to_be_hidden()


PAYLOADS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<object data=javascript:alert(1)>",
    "<embed src=javascript:alert(1)>",
    "<body onload=alert(1)>",
    "<input autofocus onfocus=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)></style></mglyph></table></mtext></math>",
    '<form><math><mtext></form><form><mglyph><svg><mtext><style><path id="</style><img onerror=alert(1) src>">',
    "<a href=javascript:alert(1)>x</a>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:msgbox(1))",
    '[x](https://example.com "x\\" onmouseover=\\"alert(1)")',
    '![x](x" onerror="alert(1))',
    "![x](https://evil.example/p.png)",
    "<javascript:alert(1)>",
    '```html" onmouseover="alert(1)\n<b>x</b>\n```',
    "```\n</code></pre><img src=x onerror=alert(1)>\n```",
    "`<img src=x onerror=alert(1)>`",
    "|<img src=x onerror=alert(1)>|\n|-|\n|<svg onload=alert(1)>|",
    "[x]: javascript:alert(1)\n\n[x]",
    "<style>*{background:url(https://evil.example/)}</style>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<base href=https://evil.example/>",
]


def test_no_payload_runs_loads_or_leaves_an_attribute(seen):
    """What `opened` looks for at the end: dialogs, errors, requests elsewhere, breaches of the policy."""
    messages = [turn("user", PAYLOADS[0])]
    for payload in PAYLOADS:
        messages += [turn("assistant", payload), turn("user", payload)]
    seen.keep(messages=messages, title=PAYLOADS[1])
    expect(seen.page.locator(".answer")).to_have_count(len(PAYLOADS))
    for link in seen.page.locator(".answer .prose a[href]").all():
        assert link.get_attribute("href").startswith(("https://example.com", "mailto:"))
    made = seen.page.evaluate(
        """() => {
            const drawn = [...document.querySelectorAll(".answer .prose *, .said *, #conversations *")];
            const names = new Set(drawn.flatMap((part) => part.getAttributeNames()));
            const tags = new Set(drawn.map((part) => part.localName));
            return [[...names].filter((name) => name.startsWith("on")), [...tags]];
        }"""
    )
    assert made[0] == []
    assert not {"script", "img", "iframe", "object", "embed", "style", "link", "meta", "base", "form"} & set(made[1])
    for part in seen.page.locator(".answer .prose :is(a:not([href]), code, td)").all():
        part.dispatch_event("mouseover")
        part.dispatch_event("click")
    seen.page.wait_for_timeout(100)
