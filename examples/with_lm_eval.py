"""lm-eval on a task of three prompts: python examples/with_lm_eval.py [MODEL]."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import torch
from comparison import DTYPE, MODEL, compare
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lade.embedded import prompts

TASK = """
{task: code, dataset_path: json, dataset_kwargs: {data_files: {test: "DATA"}}, test_split: test,
 output_type: generate_until, generation_kwargs: {until: ["\\n\\n\\n"], max_gen_toks: 120, do_sample: false},
 doc_to_text: "{{prompt}}", doc_to_target: "", metric_list: [{metric: exact_match}]}"""
device = "cuda" if torch.cuda.is_available() else "cpu"
model = HFLM(pretrained=MODEL, dtype=DTYPE, device=device, batch_size=1)  # larger batches would be decoded plainly


def run(stats: Any = None, **further: Any) -> str:
    """What `--gen_kwargs custom_generate=DIR,trust_remote_code=True` asks for. Its copy of stats never comes back."""
    with tempfile.TemporaryDirectory() as folder:
        data, task = Path(folder) / "code.jsonl", Path(folder) / "code.yaml"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()[:3]))
        task.write_text(TASK.replace("DATA", str(data)))
        tasks = TaskManager(include_path=folder, include_defaults=False)
        found = lm_eval.simple_evaluate(
            model, tasks=["code"], task_manager=tasks, gen_kwargs=further or None, bootstrap_iters=0
        )
    return "\n----\n".join(sample["resps"][0][0] for sample in found["samples"]["code"])


compare(run)
