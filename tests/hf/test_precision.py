"""Half precision: the same text but for near ties, and no work that nobody asked for."""

import pytest
import torch

import lade
from lade.testing import toy_model

# Relative spacing of numbers: 2**-8 for bfloat16 and 2**-11 for float16; sums over a few layers lose some of them.
ROUNDING = {torch.bfloat16: 16 * 2**-8, torch.float16: 16 * 2**-11}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("seed", range(4))
def test_the_first_differing_token_is_a_near_tie(dtype, seed):
    model = toy_model(dtype=dtype, seed=seed)
    ids = torch.randint(48, (1, 10), generator=torch.Generator().manual_seed(seed))
    plain = model.generate(ids, max_new_tokens=100, return_dict_in_generate=True, output_logits=True)
    ours = lade.generate(model, input_ids=ids, max_new_tokens=100)
    differing = (plain.sequences != ours).nonzero()
    if len(differing):
        position = int(differing[0, 1])
        logits = plain.logits[position - ids.shape[1]][0]
        gap = logits[plain.sequences[0, position]] - logits[ours[0, position]]
        assert 0 <= gap <= ROUNDING[dtype] * logits.abs().max()


def test_the_head_runs_on_the_last_token_of_the_prompt_only():
    model, fed = toy_model(), []
    model.lm_head.register_forward_hook(lambda module, args, output: fed.append(output.shape[1]))
    stats = lade.Stats()
    paper = lade.LookaheadConfig(7, 5, 7)
    lade.generate(model, input_ids=torch.ones(1, 30, dtype=torch.long), max_new_tokens=10, stats=stats, lookahead=paper)
    assert fed == [1, *stats.step_tokens]
