"""Seeded sampling: plain's tokens, and plain's generator afterwards."""

import pytest
import torch
from same_as_plain import assert_same_tokens

import lade
from lade import LookaheadConfig, Stats
from lade.testing import toy_model

MODELS = {family: toy_model(family, dtype=torch.float32) for family in ("llama", "qwen3", "gpt2")}
IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


def test_the_checkpoints_own_generation_config_is_obeyed():
    model = toy_model(dtype=torch.float32)
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=5)
    assert_same_tokens(model, LookaheadConfig(), seed=1, input_ids=IDS, max_new_tokens=30)


@pytest.mark.slow
def test_samples_follow_the_exact_distribution():
    """Two sampled tokens of a vocabulary of six, against the products of the model's own probabilities.

    The statistic is Pearson's chi-square over 36 pairs (35 degrees of freedom); with n = 3000 a correct sampler exceeds
    the bound of 77 with probability 5e-5 (Wilson-Hilferty), so one false alarm in 20,000 runs; and the seed is fixed.
    Guesses come from a prompt that repeats itself, so that they are accepted and rejected all the time.
    """
    model = toy_model(vocabulary=6, dtype=torch.float32, seed=5)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5] * 3 + [0]])
    arguments = {"do_sample": True, "temperature": 2.0, "top_k": 0}
    exact = torch.zeros(6, 6, dtype=torch.float64)
    with torch.no_grad():
        first = (model(ids).logits[0, -1].double() / 2).softmax(-1)
        for token in range(6):
            second = model(torch.cat([ids, torch.tensor([[token]])], dim=1)).logits[0, -1].double()
            exact[token] = first[token] * (second / 2).softmax(-1)
    counts = torch.zeros(6, 6, dtype=torch.float64)
    stats, draws = Stats(), 3000
    torch.manual_seed(11)
    for _ in range(draws):
        # The third token is there so that two can come in one step.
        output = lade.generate(
            model, input_ids=ids, max_new_tokens=3, lookahead=LookaheadConfig(0, 3, 3), stats=stats, **arguments
        )
        counts[output[0, -3], output[0, -2]] += 1
    assert stats.tokens_per_step > 1.1, "nothing was accepted, so nothing was tested"
    chi_square = float(((counts - draws * exact) ** 2 / (draws * exact)).sum())
    assert chi_square < 77


@pytest.mark.one_in(6)
@pytest.mark.parametrize("outputs", [{"output_scores": True}, {"output_logits": True}, {}])
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_are_those_of_plain_decoding(outputs, do_sample):
    model = toy_model()
    arguments = {"input_ids": IDS, "max_new_tokens": 40, "return_dict_in_generate": True, "do_sample": do_sample}
    arguments |= {"repetition_penalty": 1.1, **outputs}
    torch.manual_seed(0)
    expected = model.generate(**arguments)
    torch.manual_seed(0)
    ours = lade.generate(model, lookahead=LookaheadConfig(), **arguments)
    assert torch.equal(ours.sequences, expected.sequences)
    for name in ("scores", "logits"):
        theirs, mine = getattr(expected, name), getattr(ours, name)
        assert (theirs is None) == (mine is None) == (f"output_{name}" not in outputs)
        if theirs is not None:
            assert len(mine) == len(theirs) == 40
            for a, b in zip(mine, theirs, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert torch.allclose(a, b, atol=1e-5)


def test_criteria_see_the_scores_so_far():
    def run(generate, **more):
        seen = []

        def watch(input_ids, scores, **kwargs):
            seen.append((input_ids.tolist(), [score.argmax().item() for score in scores]))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        asked = {"return_dict_in_generate": True, "output_scores": True}
        generate(input_ids=IDS, max_new_tokens=20, stopping_criteria=[watch], **asked, **more)
        return seen

    model = toy_model()
    assert run(lade.generate, model=model, lookahead=LookaheadConfig()) == run(model.generate)
