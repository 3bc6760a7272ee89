"""A file of prompts through two engines of Ray Data: each once, with plain's texts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scale_toys import saved

pytest.importorskip("ray", reason="ray is not installed: make test-scale")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
READY_S = 500.0


def test_a_data_set_goes_through_two_engines(tmp_path):
    folder, model, tokenizer = saved(tmp_path / "toy")
    model.float()  # as it was saved
    source, out = tmp_path / "prompts.jsonl", tmp_path / "answers"
    prompts = [f"say {number}" for number in range(64)]
    source.write_text("".join(json.dumps({"id": n, "prompt": text}) + "\n" for n, text in enumerate(prompts)))
    command = [sys.executable, str(ROOT / "examples" / "ray_data.py"), str(source), str(out), str(folder), "2"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=READY_S)
    found = [json.loads(line) for file in sorted(out.iterdir()) for line in file.read_text().splitlines()]
    assert sorted(line["id"] for line in found) == list(range(64)), "each once"
    for line in found[::16]:
        ids = tokenizer(line["prompt"], return_tensors="pt", return_token_type_ids=False)
        wanted = model.generate(**ids, max_new_tokens=100, do_sample=False)[0, ids.input_ids.shape[1] :]
        assert line["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
