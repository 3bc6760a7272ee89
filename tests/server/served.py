"""A toy model behind a real server, in this process, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import shell_fixtures
import torch
from pretend import cost_of_passes
from prometheus_client.parser import text_string_to_metric_families
from shell_fixtures import CONTEXT, byte_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lade.server.listen import Server
from lade.server.served_model import ServedModel
from lade.server.service import Service
from lade.server.settings import Settings

SOON = 60.0
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = Settings(names=("toy", "other-name"), max_rows=8, max_waiting=32, answer_tokens=40, ping_s=0.2)
HEADERS = {"content-type": "application/json"}


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    return shell_fixtures.byte_tokenizer(template)


def byte_model(tokenizer: Any = None, seed: int = 3) -> LlamaForCausalLM:
    return byte_llama(tokenizer, seed).to(torch.float64).requires_grad_(False).eval()


TOKENIZER = byte_tokenizer()
MODEL = byte_model()
SERVED = ServedModel(MODEL, TOKENIZER, context=CONTEXT)


def plain(ids: list[int], *, seed: int | None = None, **arguments: Any) -> list[int]:
    """The new tokens of `model.generate` alone."""
    if seed is not None:
        torch.manual_seed(seed)
    output = MODEL.generate(torch.tensor([ids]), **{"do_sample": False, **arguments})
    return output[0, len(ids) :].tolist()


def templated(messages: list[dict[str, Any]]) -> list[int]:
    return TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


class Running:
    """A server in a thread; its address, its state, and a client for it."""

    def __init__(self, settings: Settings, served: Callable[[], ServedModel] | ServedModel, log: Any = None) -> None:
        load = served if callable(served) else lambda: served
        self.lines: list[str] = []
        self.service = Service(settings, load, log=log(self.lines.append) if log else None)
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.service)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listening])), daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=SOON, verify=False)  # to read certificates takes 20 ms

    def stop(self) -> None:
        self.http.close()
        if self.thread.is_alive() and self.server.ends_at is None:
            self.service.abort()
            self.server.handle_exit(15, None)
        self.end_now()

    def end_now(self) -> None:
        """Of the time that a server leaves for its last answers nothing is left, also if its engine dies only now."""
        self.server.ends_at = 1e-9
        self.thread.join(SOON)
        assert not self.thread.is_alive()

    def chat(self, content: str = "hello", **fields: Any) -> Any:
        return self.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields}
        )

    def complete(self, prompt: Any = "abc", **fields: Any) -> Any:
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def events(self, path: str, **body: Any) -> list[Any]:
        """What a stream has to say, its end included; pings are left out."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            raw = b"".join(response.iter_bytes())
        frames = [frame for frame in raw.decode().split("\n\n") if frame and not frame.startswith(":")]
        assert all(frame.startswith("data: ") for frame in frames)
        return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]

    def metric(self, name: str, **labels: str) -> float:
        """A sample of `/metrics` by its labels, that of the model aside; 0 if there is none yet."""
        samples = (
            each for family in text_string_to_metric_families(self.http.get("/metrics").text) for each in family.samples
        )
        found = (each.value for each in samples if each.name == name and {"model": "toy", **labels} == each.labels)
        return next(found, 0.0)

    def run_documented(self, page: str) -> int:
        """Run the Python blocks of a page of docs/howto against this server; their number."""
        text = (Path(__file__).parents[2] / "docs" / "howto" / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for block in blocks:
            here = block.replace("http://127.0.0.1:8000", self.url).replace("Qwen3-0.6B", "toy").replace("=200", "=20")
            names: dict[str, Any] = {}
            exec(compile(here, page, "exec"), names)
            names["client"].close()
        return len(blocks)

    def at_rest(self) -> bool:
        """Whether nothing is decoded, and nothing waits."""
        now = self.service.snapshot()
        return now is not None and now.rows == now.waiting == 0 and not self.service.in_flight


@contextmanager
def running(served: Any = SERVED, log: Any = None, ready: bool = True, **changes: Any) -> Iterator[Running]:
    """A server with other settings than usual; what its passes cost is known, and not measured."""
    known = pytest.MonkeyPatch()
    cost_of_passes(known)
    made = Running(replace(SETTINGS, **changes), served, log)
    made.thread.start()
    try:
        if ready:
            until(lambda: made.service.phase == "ready" or made.service.problem)
            assert made.service.problem is None, made.service.problem
            known.undo()  # from now on that is the business of each test
            if isinstance(served, ServedModel) and hasattr(served.model, "paused"):
                served.model.paused.set()
        yield made
    finally:
        made.stop()
        known.undo()


def until(true: Callable[[], Any], seconds: float = SOON) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never comes true"
        time.sleep(0.005)


class Passes:
    """A `wait` of `slow_served`: passes are made when a test lets them, so that it needs no clock."""

    def __init__(self) -> None:
        self.left, self._changed = 0, threading.Condition()

    def __call__(self, pass_s: float) -> None:
        with self._changed:
            if pass_s:  # else the server is not ready yet
                assert self._changed.wait_for(lambda: self.left, SOON), "no pass is allowed"
                self.left -= 1

    def let(self, passes: int = 1) -> None:
        with self._changed:
            self.left += passes
            self._changed.notify_all()

    def let_all(self) -> None:
        self.let(10**6)


def held_up(patch: pytest.MonkeyPatch, server: Running) -> tuple[threading.Event, threading.Event]:
    """Hold requests up on their way to the engine; the event that one is there, and the one that lets them go on."""
    engine, inside, go_on = server.service.serving.engine, threading.Event(), threading.Event()
    add = engine.add

    def slowly(*arguments: Any, **named: Any) -> Any:
        inside.set()
        assert go_on.wait(SOON)
        return add(*arguments, **named)

    patch.setattr(engine, "add", slowly)
    return inside, go_on


def until_placed(server: Running, passes: Passes, rows: int, waiting: int) -> None:
    """Wait until so many requests have a row, and so many wait; whoever waits for a row has to have passes made.

    Those that are still prepared count as waiting, but no pass is made for them: the others would be done before.
    """

    def placed() -> bool:
        now, ready = server.service.snapshot(), not repr(server.service.serving.engine).endswith(", 0 waiting)")
        if now.rows < rows and ready and not passes.left:
            passes.let()
        return bool((now.rows, now.waiting) == (rows, waiting))

    until(placed)


def slow_served(
    pass_s: float = 0.01, failing: Callable[[], bool] = lambda: False, wait: Callable[[float], None] = time.sleep
) -> ServedModel:
    """A model of its own, whose passes take their time once the server is ready, and fail when told to."""
    model = byte_model()
    model.paused = threading.Event()

    def hook(module: Any, arguments: Any) -> None:
        wait(pass_s if model.paused.is_set() else 0.0)
        if failing():
            raise RuntimeError("the device is gone")

    model.register_forward_pre_hook(hook)
    return ServedModel(model, TOKENIZER, context=CONTEXT)
