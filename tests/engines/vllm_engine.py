"""Generates with one vLLM engine, as its only argument says in JSON, and prints a line with the results.

vLLM's CPU build 0.32 loses what its `expand` kernel writes, unless that is int64: temperature, top-k and top-p at
drafted tokens are what memory held, with any proposer. It is replaced here, so that sampling can be tried.
"""

import json
import sys

import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils import cpu_triton_utils


def expand(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """Give each drafted token what its request has; `ends` are cumulative counts of drafted tokens."""
    values = torch.where(values == replace_from, replace_to, values)
    output.copy_(values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1))))


def generate(llm, prompts, case):
    """Return `[ids, reason, log-probabilities]` of each choice of each prompt, `group` prompts at a time."""
    wanted = dict(case["sampling"])
    if "structured" in wanted:
        wanted["structured_outputs"] = StructuredOutputsParams(**wanted.pop("structured"))
    outs, group = [], case.get("group", len(prompts))
    for _ in range(case.get("repeat", 1)):
        for first in range(0, len(prompts), group):
            outs += llm.generate(prompts[first : first + group], SamplingParams(**wanted), use_tqdm=False)
    return [[list(choice.token_ids), choice.finish_reason, logprobs(choice)] for out in outs for choice in out.outputs]


def logprobs(choice):
    if choice.logprobs is None:
        return None
    at = zip(choice.token_ids, choice.logprobs, strict=True)
    return [[token, round(each[token].logprob, 3), each[token].rank] for token, each in at]


def main():
    cpu_triton_utils._expand_kernel_impl = expand
    given = json.loads(sys.argv[1])
    llm = LLM(
        dtype="float32", enforce_eager=True, max_model_len=512, seed=0, disable_log_stats=False, **given["engine"]
    )
    cases = [generate(llm, given["prompts"], case) for case in given["cases"]]
    llm.generate(["a"], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)  # in it, earlier requests end
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = getattr(getattr(runner, "drafter", None), "drafter", None)
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    left = 0 if drafter is None else len(drafter.requests)
    sys.stdout.write(f"RESULT {json.dumps({'cases': cases, 'left': left, 'metrics': metrics})}\n")


main()
