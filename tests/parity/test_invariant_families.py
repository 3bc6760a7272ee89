"""Every architecture made invariant: each token and each logit is plain decoding's bit for bit, or it is refused."""

import re
from itertools import cycle
from pathlib import Path

import pytest
import torch
import transformers
from comparing import PAPER, batch, in_turn, prompt
from families import FAMILIES, RECURRENT_FAMILIES
from packaging.version import Version
from pretend import short_trials

import lade

pytestmark = pytest.mark.by_processor

REFUSED = {
    "bloom": "does not use",
    "falcon": "does not use",
    "falcon-new": "does not use",
    **(
        {}
        if Version(transformers.__version__) >= Version("5.24")
        else dict.fromkeys(("codegen", "gptj"), "does not use")
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), "its indexers select keys"),
}
BY_TRIAL = {"llama4_text": r"feed_forward' is the first part"}
"""Their random weights decide whether the trial finds a difference."""
SCORES = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "max_new_tokens": 30}
MODELS = Path(__file__).parents[2] / "docs/models.md"
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
"""Families take turns with them."""


def assert_equal_bits(model, ids, **arguments):
    plain = model.generate(ids, **SCORES, **arguments)
    ours = lade.generate(model, input_ids=ids, lookahead=PAPER, **SCORES, **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    assert all(map(torch.equal, ours.logits, plain.logits))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), list(zip(FAMILIES, cycle(DTYPES))), ids=str)
def test_an_architecture_is_bit_equal_or_refused(case, dtype):
    model = case.build(dtype=dtype)
    if str(case) in REFUSED:
        with pytest.raises(lade.UnsupportedModelError, match=REFUSED[str(case)]):
            lade.invariant(model)
        return
    try:
        lade.invariant(model)
    except lade.UnsupportedModelError as refusal:
        if not re.search(BY_TRIAL.get(str(case), "$."), str(refusal)):
            raise
        return
    for length in in_turn((5, 20, 50, 63, 120), case, dtype, count=2):
        assert_equal_bits(model, prompt(length))
    if str(case) not in BY_TRIAL:  # which counts padding, and takes none on the left
        padded = batch(9, 20, 3)
        assert_equal_bits(model, padded.pop("ids"), pad_token_id=0, **padded)


def test_the_table_of_families_is_true():
    """What is here expected of each family is what docs/models.md says of it."""
    section = MODELS.read_text().split("\n## Bit for bit in 16 bits\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if " | " in line.strip("| ")]
    said = {name: verdict for names, verdict in rows for name in re.sub(r" \(.*?\)", "", names).split(", ")}
    for case in FAMILIES:
        verdict = said[case.model_type.removesuffix("_text").removesuffix("_unified")]
        assert ("refused" in verdict) if str(case) in REFUSED else verdict.startswith("bit-equal"), case


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe"])
def test_windows_and_experts(name, monkeypatch):
    short_trials(monkeypatch)
    case = next(case for case in FAMILIES if str(case) == name)
    model = lade.invariant(case.build(dtype=torch.float32, num_hidden_layers=4))
    assert_equal_bits(model, prompt(50))


def test_recurrent_layers_are_refused():
    with pytest.raises(lade.UnsupportedModelError, match="its recurrent layers"):
        lade.invariant(RECURRENT_FAMILIES[0].build(dtype=torch.float32))
