"""The proposer inside vLLM: texts equal to vLLM's without it. Run by `make test-vllm`, in an environment of its own.

Once numba is imported, vLLM's CPU worker cannot start: so the engine without drafts is made first, and settings that
need another engine run in processes of their own.
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import openai
import pytest

vllm = pytest.importorskip("vllm", exc_type=ImportError)

from lade.embedded.files import model_path, prompts  # noqa: E402
from lade.engines.vllm import Proposer  # noqa: E402

SPECULATIVE = {"method": "custom_class", "model": "lade.engines.vllm.Proposer", "num_speculative_tokens": 16}
SETTINGS = {"price": 0.0}
RUN = """
import json, os, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
given = json.loads(sys.argv[1])
llm = LLM(dtype="float32", enforce_eager=True, max_model_len=512, seed=0, **given["engine"])
cases = []
for case in given["cases"]:
    wanted = dict(case["sampling"])
    if "structured" in wanted:
        wanted["structured_outputs"] = StructuredOutputsParams(**wanted.pop("structured"))
    outs = []
    for _ in range(case.get("repeat", 1)):
        group = case.get("group", len(given["prompts"]))
        for first in range(0, len(given["prompts"]), group):
            part = given["prompts"][first : first + group]
            outs += llm.generate(part, SamplingParams(**wanted), use_tqdm=False)
    cases.append([[list(choice.token_ids), choice.finish_reason, choice.logprobs and [
        [id, round(each[id].logprob, 3), each[id].rank] for id, each in zip(choice.token_ids, choice.logprobs)]]
        for out in outs for choice in out.outputs])
runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
drafter = getattr(getattr(runner, "drafter", None), "drafter", None)
steps = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
print("RESULT", json.dumps({"cases": cases, "left": 0 if drafter is None else len(drafter.requests), "metrics": steps}))
"""


def run(cases, *, speculative=True, texts=None, **engine):
    """Generate with one engine, in a process of its own."""
    if speculative:
        engine |= {"speculative_config": SPECULATIVE, "additional_config": {"lade": SETTINGS}}
    given = {
        "engine": {"model": str(model_path()), "disable_log_stats": False, **engine},
        "cases": cases,
        "prompts": list(prompts()[:6]) if texts is None else texts,
    }
    run = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(given)], capture_output=True, text=True, env=environment(), check=False
    )
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
    "batch": {"sampling": GREEDY},
    "one by one": {"sampling": GREEDY, "group": 1},
    "prefix cached": {"sampling": GREEDY, "repeat": 2},
    "penalties": {"sampling": {**GREEDY, "presence_penalty": 0.5, "repetition_penalty": 1.2}},
    "log-probabilities": {"sampling": {**GREEDY, "logprobs": 2}},
    "prompt log-probabilities": {"sampling": {**GREEDY, "prompt_logprobs": 1, "max_tokens": 40}},
    "stop strings": {"sampling": {**GREEDY, "stop": ["return", "="]}},
    "regex": {"sampling": {**GREEDY, "max_tokens": 40, "structured": {"regex": "[a-c]{5,30}=[0-9]{4}"}}},
    "JSON": {"sampling": {**GREEDY, "max_tokens": 60, "structured": {"json": JSON_SCHEMA}}},
}


@pytest.fixture(scope="module")
def expected():
    return dict(zip(CASES, run(list(CASES.values()), speculative=False)["cases"], strict=True))


@pytest.fixture(scope="module")
def drafted():
    return run(list(CASES.values()))


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_vllm_without_drafts(case, expected, drafted):
    assert dict(zip(CASES, drafted["cases"], strict=True))[case] == expected[case]


def test_of_requests_that_have_ended_none_but_those_of_the_last_pass_is_left(drafted):
    assert drafted["left"] <= len(prompts()[:6])


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_chunked_prefill": True},
        {"num_gpu_blocks_override": 6, "max_num_seqs": 8},
    ],
    ids=["chunked prefill, drafts cut by the budget", "preemption"],
)
def test_texts_are_the_same_where_drafts_are_cut_and_dropped(engine, expected):
    result = run([CASES["batch"]], **engine)
    assert result["cases"] == [expected["batch"]]


def test_one_request_at_a_time_gets_at_least_one_and_a_half_tokens_a_pass():
    metrics = run([CASES["one by one"]])["metrics"]
    accepted, passes = metrics["vllm:spec_decode_num_accepted_tokens"], metrics["vllm:spec_decode_num_drafts"]
    assert 1.0 + accepted / passes >= 1.5


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
