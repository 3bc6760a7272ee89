"""Chromium, and a page in it with a scripted server or a real one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_server import POEM_WORDS, Running, Script

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
BUSY = ".answer[aria-busy=true]"


@dataclass
class Seen:
    """A page in Chromium, and what went wrong in it."""

    page: Any
    script: Script  # of a scripted server
    errors: list[str] = field(default_factory=list)  # messages of the console, exceptions, dialogs
    requests: list[str] = field(default_factory=list)  # addresses that were asked for
    allowed: list[str] = field(default_factory=list)  # words of errors that a test provokes

    def say(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> Any:
        """The answer, once it is whole."""
        self.say(text)
        return self.answered()

    @property
    def answer(self) -> Any:
        return self.page.locator(".answer").last

    def answered(self, text: str = POEM_WORDS) -> Any:
        """The last answer, once it is whole."""
        self.answer.get_by_text(text).first.wait_for()
        self.page.locator(BUSY).wait_for(state="detached")
        return self.answer

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def keep(self, **conversation: Any) -> None:
        """Let the browser have kept a conversation, and open the page again with it."""
        kept = {"id": "kept", "title": "kept", "changed": 1, "system": "", "messages": [], **conversation}
        self.store("lade.chat.kept", json.dumps(kept))

    def store(self, key: str, text: str) -> None:
        """Put something into the browser's storage, and open the page again with that conversation."""
        self.page.evaluate("([key, text]) => localStorage.setItem(key, text)", [key, text])
        self.page.evaluate(
            "key => localStorage.setItem('lade.open', JSON.stringify(key))", key.removeprefix("lade.chat.")
        )
        self.page.reload()

    def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(100):
            if holds():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not come true within five seconds")


@contextmanager
def opened(browser: Any, url: str, model: str, script: Script, **options: Any) -> Iterator[Seen]:
    """A page that was just opened; what must never happen is looked for at the end."""
    context = browser.new_context(**options, permissions=["clipboard-read", "clipboard-write"])
    seen = Seen(context.new_page(), script)
    seen.page.set_default_timeout(8000)
    seen.page.on("console", lambda message: message.type in ("error", "warning") and seen.errors.append(message.text))
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
    seen.page.on("dialog", lambda dialog: seen.errors.append(dialog.message) or dialog.dismiss())
    context.on("request", lambda asked: seen.requests.append(asked.url))
    seen.page.goto(url)
    seen.page.get_by_text(model, exact=True).wait_for(state="attached")
    yield seen
    context.close()
    assert [error for error in seen.errors if not any(word in error for word in seen.allowed)] == []
    assert [asked for asked in seen.requests if not asked.startswith((url, "blob:", "data:"))] == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


@pytest.fixture
def seen(browser: Any, request: pytest.FixtureRequest) -> Iterator[Seen]:
    """A page with a server of its own, which answers from a script."""
    options = {"viewport": {"width": 1200, "height": 800}, **getattr(request, "param", {})}
    running = Running(script := Script())
    with opened(browser, running.url, "tiny-story-model", script, **options) as seen:
        yield seen
    running.close()
