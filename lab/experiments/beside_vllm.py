"""Tokens per step inside vLLM: its n-gram and suffix drafters beside ours, each in an engine and process of its own.

    python lab/experiments/beside_vllm.py --model FOLDER --prompts FILE.jsonl --batch 1

It runs in the environment of `make test-vllm`; the suffix drafter needs `pip install arctic-inference==0.3.0` there.
Decoding is greedy, float32. An arm first answers `--count` prompts with nothing learned ("cold") and then as many
others with what it has learned ("kept"). Its texts are compared with those of vLLM without speculation.

"fed" counts the tokens a request feeds in a step, the last one of its text included; prefill does not count. CPU
seconds are the whole process's, prefill included. At so small a model a pass is vLLM's host work, so they do not say
what a GPU would take; other load on the machine does not add to them much, but they vary by some 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

OURS = {"method": "custom_class", "model": "lade.engines.vllm.Proposer"}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram 1-4, k 4": {"speculative_config": {**NGRAM, "num_speculative_tokens": 4}},
    "ngram 1-4, k 8": {"speculative_config": {**NGRAM, "num_speculative_tokens": 8}},
    "suffix, its defaults": {"speculative_config": {"method": "suffix"}},
    "suffix, factor 4, probability 0.05": {
        "speculative_config": {
            "method": "suffix",
            "suffix_decoding_max_spec_factor": 4.0,
            "suffix_decoding_min_token_prob": 0.05,
        }
    },
    "lade, k 16": {"speculative_config": {**OURS, "num_speculative_tokens": 16}},
    **{
        f"lade, k {most}, price 0": {
            "speculative_config": {**OURS, "num_speculative_tokens": most},
            "additional_config": {"lade": {"price": 0.0}},
        }
        for most in (4, 8, 16)
    },
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def count_steps(counts: Counter[str]) -> None:
    """Have vLLM's scheduler count the steps of requests that decode, and the tokens fed and emitted in them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output

    def update_from_output(self: Any, scheduled: Any, output: Any) -> Any:
        for request, fed in scheduled.num_scheduled_tokens.items():
            emitted = output.sampled_token_ids[output.req_id_to_index[request]] if output.sampled_token_ids else []
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(request, ()))
            if emitted and fed == 1 + drafted and self.requests[request].num_output_tokens:
                counts.update(steps=1, fed=fed, emitted=len(emitted))
        return original(self, scheduled, output)

    Scheduler.update_from_output = update_from_output


def run_arm(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answer the prompts with one arm, in this process."""
    counts = Counter[str]()
    count_steps(counts)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=args.batch,
        seed=0,
        **ARMS[name],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    prompts = [json.loads(line)["prompt"] for line in Path(args.prompts).read_text().splitlines()]
    halves, texts = [], []
    for first in (0, args.count):
        counts.clear()
        start, written = time.process_time(), []
        for one in range(first, first + args.count, args.batch):
            part = prompts[one : min(one + args.batch, first + args.count)]
            written += [list(out.outputs[0].token_ids) for out in llm.generate(part, sampling, use_tqdm=False)]
        seconds, tokens = time.process_time() - start, sum(map(len, written))
        halves.append(
            {
                "S": counts["emitted"] / counts["steps"],
                "fed": counts["fed"] / counts["steps"],
                "cpu_ms": 1e3 * seconds / tokens,
            }
        )
        texts += written
    return {"halves": halves, "texts": texts}


def in_a_process(name: str) -> dict[str, Any]:
    """Run this program for one arm, with the arguments that it has been given."""
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def main() -> None:
    """Print the table, or a line with the result of one arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--prompts", required=True, help='JSON lines with a "prompt" each, twice --count of them')
    parser.add_argument("--count", type=int, default=20, help="prompts of each half")
    parser.add_argument("--tokens", type=int, default=160, help="new tokens for each prompt")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--only", action="append", choices=list(ARMS), help="an arm beside none; may be repeated")
    parser.add_argument("--arm", choices=list(ARMS), help="run this one here, and print its result as JSON")
    args = parser.parse_args()
    if args.arm is not None:
        print("RESULT", json.dumps(run_arm(args.arm, args)))
        return
    print("| drafts | S cold / kept | fed cold / kept | CPU ms a token cold / kept | texts equal |")
    print("|---|---|---|---|---|", flush=True)
    plain: list[list[int]] = []
    for name in ["none", *(args.only or list(ARMS)[1:])]:
        result = in_a_process(name)
        plain = plain or result["texts"]
        equal = sum(one == other for one, other in zip(result["texts"], plain, strict=True))
        cells = (" / ".join(f"{half[key]:.2f}" for half in result["halves"]) for key in ("S", "fed", "cpu_ms"))
        print(f"| {name} | {' | '.join(cells)} | {equal} of {len(plain)} |", flush=True)


if __name__ == "__main__":
    main()
