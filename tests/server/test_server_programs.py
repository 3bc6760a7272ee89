"""Codex and Claude Code themselves, where they are in PATH: a call that they make, and the answer to what came of it.

npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code
PATH=FOLDER/node_modules/.bin:$PATH python -m pytest -m slow tests/server/test_server_programs.py
"""

import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from scripted import scripted
from served import SERVED, byte_tokenizer, running

from lade.server import completions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{# <think> <tool_call> #}"
)
CODEX = """
model = "toy"
model_provider = "lade"
[model_providers.lade]
name = "lade"
base_url = "{}/v1"
wire_api = "responses"
"""


@pytest.fixture
def say(monkeypatch):
    """What the model is to say instead, until a tool has returned something: then it is done, and says so."""
    prepare, texts = completions.with_generation_config, []
    done = ["<think>", "hm", "</think>", "All done."]
    scripted(monkeypatch, lambda prompt: done if "<tool>" in prompt.text else texts)
    ends = {"logit_bias": {0: 100.0}, "min_tokens": 6, "lookahead": None}
    monkeypatch.setattr(completions, "with_generation_config", lambda body: prepare(body.model_copy(update=ends)))
    return texts


@pytest.fixture
def server():
    with running(replace(SERVED, tokenizer=byte_tokenizer(TEMPLATE)), max_rows=2) as made:
        yield made


def call(name, **arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    return ["<think>", "let me see", "</think>", "I look.", f"<tool_call>{written}</tool_call>"]


def told(folder, *command, **environment):
    """What a program prints, in a folder with one file, and with a home of its own."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} in PATH")
    work = folder / "work"
    work.mkdir()
    (work / "only-file").write_text("x")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", **environment}
    given = {"cwd": work, "env": environment, "stdin": subprocess.DEVNULL}
    ran = subprocess.run(command, **given, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "returned"),
    [
        ("exec_command", {"cmd": "ls"}, "only-file"),
        ("multi_agent_v1__close_agent", {"target": "nobody"}, "invalid agent id nobody"),
    ],
)
def test_codex_makes_calls_alone_and_in_namespaces(server, say, tmp_path, name, arguments, returned):
    say += call(name, **arguments)
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CODEX.format(server.url))
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    said, log = told(tmp_path, "codex", "exec", *flags, "list the files")
    assert said.strip() == "All done." and returned in log


def test_claude_code_makes_calls(server, say, tmp_path):
    say += call("Bash", command="ls > listed", description="list")
    own = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "toy"}
    quiet = {"ANTHROPIC_SMALL_FAST_MODEL": "toy", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    said, _ = told(tmp_path, "claude", "-p", "list the files", "--allowedTools", "Bash", **own, **quiet)
    assert said.strip() == "All done." and "only-file" in (tmp_path / "work" / "listed").read_text()
