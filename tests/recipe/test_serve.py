"""`transformers serve FOLDER --trust-remote-code`, where the model's folder holds the recipe."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lade
import lade.recipe.generate
from lade.recipe.export import export_recipe

httpx = pytest.importorskip("httpx")
for needed in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed)

GREEDY = {"max_tokens": 40, "temperature": 0.0}


@pytest.fixture(scope="module")
def served(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(folder, target)
    export_recipe(target, force=True)
    return target


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> lade.Stats:
    """The figures of all that goes through the recipe."""
    stats, decode = lade.Stats(), lade.recipe.generate.generate

    def watched(*args: Any, **kwargs: Any) -> Any:
        return decode(*args, **kwargs, lookahead="budget=16", stats=stats)

    monkeypatch.setattr(lade.recipe.generate, "generate", watched)
    return stats


@contextmanager
def server(name: Path, **options: Any) -> Iterator[str]:
    """The address of a server."""
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    serve = Serve(force_model=str(name), port=port, device="cpu", dtype="float32", non_blocking=True, **options)
    try:
        while not serve.server.started:
            time.sleep(0.05)
        yield f"http://localhost:{port}/v1/completions"
    finally:
        serve.kill_server()
        serve._thread.join()
        del serve
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            gc.collect()  # its event loop is never closed


def answers(url: str, name: Path, text: str) -> list[str]:
    """One as a whole, one as it comes."""
    body = {"model": str(name), "prompt": text, **GREEDY}
    whole = httpx.post(url, json=body, timeout=100).json()["choices"][0]["text"]
    lines = httpx.post(url, json={**body, "stream": True}, timeout=100).text.splitlines()
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    return [whole, "".join(pieces)]


def test_its_answers_are_accelerated_and_the_same(served: Path, seen: lade.Stats, text: str) -> None:
    with server(served, trust_remote_code=False) as url:
        expected = answers(url, served, text)
    assert seen.generations == 0
    with server(served, trust_remote_code=True) as url:
        assert answers(url, served, text) == expected
    assert seen.generations == 2 and seen.tokens_per_step > 1
    assert expected[0] == expected[1] != ""


def test_continuous_batching_is_a_loop_of_its_own(served: Path, seen: lade.Stats, text: str) -> None:
    """docs/frameworks.md says that it gains nothing."""
    small = {"cb_num_blocks": 16, "cb_max_batch_tokens": 256}
    with server(served, trust_remote_code=True, continuous_batching=True, **small) as url:
        assert answers(url, served, text)[0]
    assert seen.generations == 0
