"""The proposer inside vLLM: texts equal to vLLM's without it. Run by `make test-vllm`, in an environment of its own.

Each engine runs in a process of its own, by `vllm_engine.py` beside this file, over eight prompts at a time.
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

vllm = pytest.importorskip("vllm", exc_type=ImportError)

from lade.embedded import model_path, prompts  # noqa: E402
from lade.engines.vllm import Proposer  # noqa: E402

SPECULATIVE = {"method": "custom_class", "model": "lade.engines.vllm.Proposer", "num_speculative_tokens": 16}
SETTINGS = {"price": 0.0}
BLOCK = 32  # tokens of a block of the KV cache: prompts are longer, so that prefixes are found
TEXTS = [*prompts(), prompts()[0][:110], prompts()[3][:110]]


def run(cases, *, speculative=True, **engine):
    """Generate with one engine, in a process of its own."""
    if speculative:
        engine |= {"speculative_config": SPECULATIVE, "additional_config": {"lade": SETTINGS}}
    given = {"engine": {"model": str(model_path()), "block_size": BLOCK, **engine}, "cases": cases, "prompts": TEXTS}
    command = [sys.executable, Path(__file__).with_name("vllm_engine.py"), json.dumps(given)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def environment():
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NUMBA_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


GREEDY = {"temperature": 0.0, "max_tokens": 80}
JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
CASES = {
    "batch of 8": {"sampling": GREEDY},
    "one by one": {"sampling": GREEDY, "group": 1},
    "prefix cached": {"sampling": GREEDY, "repeat": 2},
    "penalties": {"sampling": {**GREEDY, "presence_penalty": 0.5, "repetition_penalty": 1.2}},
    "log-probabilities": {"sampling": {**GREEDY, "logprobs": 2}},
    "prompt log-probabilities": {"sampling": {**GREEDY, "prompt_logprobs": 1, "max_tokens": 40}},
    "stop strings": {"sampling": {**GREEDY, "stop": ["return", "="]}},
    "several choices": {"sampling": {"temperature": 1.0, "top_p": 1e-6, "n": 3, "max_tokens": 40}},
    "regex": {"sampling": {**GREEDY, "max_tokens": 40, "structured": {"regex": "[a-c]{5,30}=[0-9]{4}"}}},
    "JSON": {"sampling": {**GREEDY, "max_tokens": 60, "structured": {"json": JSON_SCHEMA}}},
}
TEMPERATURE = 0.9
SAMPLED = {"sampling": {"temperature": TEMPERATURE, "max_tokens": 40, "n": 8, "ignore_eos": True}}


@pytest.fixture(scope="module")
def expected():
    return dict(zip(CASES, run(list(CASES.values()), speculative=False)["cases"], strict=True))


@pytest.fixture(scope="module")
def drafted():
    return run(list(CASES.values()))


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_vllm_without_drafts(case, expected, drafted):
    assert dict(zip(CASES, drafted["cases"], strict=True))[case] == expected[case]


def test_cases_are_what_they_are_called_and_nothing_is_left_of_requests_that_have_ended(expected, drafted):
    greedy = [ids for ids, *_ in expected["batch of 8"]]
    assert len(greedy) == 8 and len(set(map(tuple, greedy))) == 8
    assert drafted["metrics"]["vllm:prefix_cache_hits"] > 0
    assert [ids for ids, *_ in expected["several choices"]] == [ids[:40] for ids in greedy for _ in range(3)]
    assert expected["penalties"] != expected["batch of 8"] != expected["stop strings"]
    assert {reason for _, reason, _ in expected["stop strings"]} == {"stop", "length"}
    assert drafted["left"] <= 1  # the one of the last pass


def test_texts_are_the_same_with_chunked_prefill_and_drafts_that_a_budget_cuts(expected):
    budget = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_chunked_prefill": True}
    result = run([CASES["batch of 8"]], **budget)
    assert result["cases"] == [expected["batch of 8"]]
    drafts, fed = (result["metrics"][f"vllm:spec_decode_num_{name}"] for name in ("drafts", "draft_tokens"))
    assert 0 < fed < 15 * drafts  # of 16 that are proposed
    assert result["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_texts_are_the_same_where_requests_are_preempted(expected):
    result = run([CASES["batch of 8"]], num_gpu_blocks_override=26, max_num_seqs=8)
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert result["cases"] == [expected["batch of 8"]]
    assert result["left"] <= 1


def test_sampled_tokens_follow_the_model_s_distribution():
    """Where each token lies in its exact distribution, given the text before it, must be uniform over [0, 1).

    Kolmogorov and Smirnov's test over 2560 tokens, with the vocabulary in order of likelihood, which drafts depend on,
    and of ids: a correct sampler fails once in some 2 million runs.
    """
    result = run([SAMPLED])
    assert result["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 300
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path()), AutoTokenizer.from_pretrained(model_path())
    model, generator, places = model.float(), torch.Generator().manual_seed(0), []
    for number, (ids, *_) in enumerate(result["cases"][0]):
        prompt = tokenizer(TEXTS[number // SAMPLED["sampling"]["n"]]).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        shares, at = (logits.double() / TEMPERATURE).softmax(-1), torch.tensor(ids)[:, None]  # [T, V], [T, 1]
        own = shares.gather(1, at)
        likelier = torch.where(shares > own, shares, 0.0).sum(-1, keepdim=True)
        before = torch.cat([likelier, shares.cumsum(-1).gather(1, at) - own], 1)  # [T, 2]
        places.append(before + own * torch.rand(len(ids), 2, generator=generator, dtype=torch.float64))
    found, _ = torch.cat(places).sort(0)
    count = len(found)
    above = torch.arange(1, count + 1)[:, None] / count - found
    assert count == 8 * 8 * 40
    assert float(torch.maximum(above, 1 / count - above).max()) * count**0.5 < 2.8


def test_one_request_at_a_time_gets_at_least_one_and_a_half_tokens_a_pass():
    metrics = run([CASES["one by one"]])["metrics"]
    accepted, passes = metrics["vllm:spec_decode_num_accepted_tokens"], metrics["vllm:spec_decode_num_drafts"]
    assert 1.0 + accepted / passes >= 1.5
    assert metrics["vllm:spec_decode_num_draft_tokens"] > 15.5 * passes  # nothing cuts them


def test_a_memory_is_saved_at_the_end_and_loaded_at_the_start(tmp_path, monkeypatch):
    path = tmp_path / "kept.memory"
    monkeypatch.setitem(SETTINGS, "memory", str(path))
    passes = [run([CASES["one by one"]])["metrics"]["vllm:spec_decode_num_drafts"] for _ in range(2)]
    assert path.exists()
    assert passes[1] < 0.8 * passes[0]


def test_the_module_imports_no_compiled_code():
    code = "import sys, lade.engines.vllm; assert not {'numba', 'llvmlite', 'lade.decoding'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(ValueError, match=r"vLLM 0\.33\.0 is not one of the versions .* install one of them"):
        Proposer(None)


SERVE = ["-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]


@contextmanager
def served(port, *more):
    """Return a client of vLLM's server, once it answers."""
    command = [sys.executable, *SERVE, "--model", model_path(), "--served-model-name", "m", "--port", str(port), *more]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(list(map(str, command)), env=environment(), **quiet) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        try:
            for _ in range(600):
                assert server.poll() is None
                with suppress(openai.APIConnectionError):
                    client.models.list()
                    break
                time.sleep(0.5)
            yield client
        finally:
            server.terminate()


def test_over_http_with_the_openai_client():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    drafting = ["--speculative-config", json.dumps(SPECULATIVE), "--additional-config", json.dumps({"lade": SETTINGS})]
    answers = []
    for more in ([], drafting):
        with served(port, *more) as client:
            parts = client.completions.create(
                model="m", prompt=prompts()[0], max_tokens=60, temperature=0.0, stream=True
            )
            answers.append("".join(part.choices[0].text for part in parts))
    assert answers[0] == answers[1] != ""
