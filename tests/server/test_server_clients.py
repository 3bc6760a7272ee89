"""Clients that people use: openai, huggingface_hub, and what `transformers chat` asks for."""

import json

import openai
import pytest
from huggingface_hub import InferenceClient
from served import plain, templated, text_of

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_helper_for_streams_takes_several_choices(client):
    arguments = {"model": "toy", "messages": MESSAGES, "seed": 3, "n": 3, "max_tokens": 12, "logprobs": True}
    with client.chat.completions.stream(**arguments) as stream:
        for _ in stream:
            snapshot = stream.current_completion_snapshot
    whole = client.chat.completions.create(**arguments)
    for mine, other in zip(snapshot.choices, whole.choices, strict=True):
        assert mine.message.content == other.message.content and mine.finish_reason == other.finish_reason
        assert [entry.logprob for entry in mine.logprobs.content] == [entry.logprob for entry in other.logprobs.content]


def test_openai_raises_what_it_should_and_lists_models(client):
    with pytest.raises(openai.NotFoundError, match="toy, other-name"):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="toy", messages=MESSAGES, temperature=-1)
    assert raised.value.param == "temperature" and raised.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as raised:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x" * 600}])
    assert raised.value.code == "context_length_exceeded"
    assert [model.id for model in client.models.list()] == ["toy", "other-name"]
    assert client.models.retrieve("toy").id == "toy"


def test_huggingface_hub_answers(server):
    client = InferenceClient(base_url=server.url, api_key="none")
    answer = client.chat_completion(MESSAGES, temperature=0, max_tokens=20)
    text = text_of(plain(templated(MESSAGES), max_new_tokens=20))
    assert answer.choices[0].message.content == text
    pieces = client.chat_completion(MESSAGES, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == text


def test_transformers_chat_finds_what_it_asks_for(server):
    assert server.http.get("/health").status_code == 200
    with server.http.stream("POST", "/load_model", json={"model": "toy"}) as response:
        (line,) = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert json.loads(line[6:])["status"] == "ready"
    config = {"do_sample": False, "max_new_tokens": 7, "temperature": 0.3, "top_k": 50, "transformers_version": "5"}
    body = {"messages": MESSAGES, "generation_config": json.dumps(config), "return_token_ids": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == plain(templated(MESSAGES), max_new_tokens=7)
    body |= {"generation_config": json.dumps({"temperature": 0.3, "max_new_tokens": 9}), "seed": 4, "max_tokens": 6}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    tokens = plain(templated(MESSAGES), seed=4, do_sample=True, temperature=0.3, top_k=0, max_new_tokens=6)
    assert answer["choices"][0]["token_ids"] == tokens, "what the request says itself counts more"


def test_the_python_block_of_the_documentation_runs(server, capsys):
    assert server.run_documented("serve.md") == 1
    ids = templated([{"role": "user", "content": "Why is the sky blue?"}])
    text = text_of(plain(ids, seed=7, do_sample=True, top_k=0, max_new_tokens=20))
    assert capsys.readouterr().out == text + "\n"
