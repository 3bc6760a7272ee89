"""Clients of `lade serve` that need an environment of their own: all must say what a plain request says.

Usage: python scripts/try_clients.py path/to/lade
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import litellm
import openai
from huggingface_hub import InferenceClient
from langchain_openai import ChatOpenAI

PROMPT = '"""Return the mean of the values."""\ndef mean(values):'
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": PROMPT}]
TOKENS = 40


@contextmanager
def serving(lade: str) -> Iterator[str]:
    """The embedded model, with a chat template that adds nothing; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        template.write_text(TEMPLATE)
        command = [
            lade,
            "serve",
            "--port",
            "0",
            "--json",
            "--quiet",
            "--max-rows",
            "2",
            "--chat-template",
            str(template),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())["url"]
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0


def plainly(url: str, content: str = PROMPT) -> str:
    """By nothing but Python."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": TOKENS}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def by_openai(url: str) -> Iterator[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        arguments = {"model": "embedded", "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}
        yield client.chat.completions.create(**arguments).choices[0].message.content
        chunks = client.chat.completions.create(**arguments, stream=True)
        yield "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_langchain(url: str) -> Iterator[str]:
    chat = ChatOpenAI(
        model="embedded", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=TOKENS, stream_usage=True
    )
    answer = chat.invoke(PROMPT)
    assert answer.usage_metadata["output_tokens"] <= TOKENS
    yield answer.content
    pieces = list(chat.stream(PROMPT))
    assert any(piece.usage_metadata for piece in pieces)
    yield "".join(piece.content for piece in pieces)


def by_litellm(url: str) -> Iterator[str]:
    where = {"model": "openai/embedded", "api_base": f"{url}/v1", "api_key": "none"}
    arguments = {**where, "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}
    yield litellm.completion(**arguments).choices[0].message.content
    chunks = litellm.completion(**arguments, stream=True)
    yield "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_hub(url: str) -> Iterator[str]:
    client = InferenceClient(base_url=url, api_key="none")
    arguments = {"messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}
    yield client.chat_completion(**arguments).choices[0].message.content
    yield "".join(chunk.choices[0].delta.content or "" for chunk in client.chat_completion(**arguments, stream=True))


def try_transformers_chat(transformers: Path, url: str) -> None:
    """It shows answers as Markdown: all that is left of them for certain is letters and digits."""
    command = [transformers, "chat", "embedded", url, f"max_new_tokens={TOKENS}", "do_sample=False"]
    line = "def mean(values): return"
    lines = f"{line}\nn\n!exit\n"  # n: no, it is not to go on
    shown = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    said, shown = (re.sub("[^0-9A-Za-z]", "", text) for text in (plainly(url, line), shown))
    assert said and said in shown, (said, shown)


def main() -> None:
    ways: dict[str, Callable[[str], Iterator[str]]] = {
        f"openai {openai.__version__}": by_openai,
        "langchain-openai": by_langchain,
        "litellm": by_litellm,
        f"huggingface_hub {huggingface_hub.__version__}": by_hub,
    }
    with serving(sys.argv[1]) as url:
        expected = plainly(url)
        for name, way in ways.items():
            whole, streamed = way(url)
            assert whole == streamed == expected, (name, whole, streamed, expected)
            print(f"{name}: whole and streamed as they should be")
        try_transformers_chat(Path(sys.argv[1]).with_name("transformers"), url)
        print("transformers chat: shows what it should")


if __name__ == "__main__":
    main()
