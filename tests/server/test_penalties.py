"""Presence and frequency penalties: the formula, and that they count the answer of whoever calls."""

from collections import Counter

import pytest
import torch

import lade
from lade import LookaheadConfig
from lade.server.sampling_parameters import Penalties
from lade.testing import toy_model

LLAMA = toy_model("llama", vocabulary=48)
PROMPT = torch.tensor([[5, 6, 7, 5, 5]])


def penalised(answer, scores, presence, frequency):
    counts = Counter(answer)
    return [score - frequency * counts[i] - presence * (counts[i] > 0) for i, score in enumerate(scores)]


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.7), (1.5, -0.25), (-2.0, 2.0)])
def test_the_formula(presence, frequency):
    processor, rows = Penalties(presence, frequency, prompt_length=2), torch.tensor([[1, 2], [3, 3]])
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        scores = torch.randn(2, 6, generator=generator)
        given = scores.clone()
        found = processor(rows, scores)
        pairs = zip(rows[:, 2:].tolist(), scores.tolist(), strict=True)
        expected = [penalised(answer, line, presence, frequency) for answer, line in pairs]
        assert torch.allclose(found, torch.tensor(expected), atol=1e-6) and torch.equal(scores, given)
        rows = torch.cat([rows, torch.randint(0, 6, (2, 1), generator=generator)], dim=1)


def test_a_text_that_is_not_the_one_counted_is_counted_anew():
    used, scores = Penalties(0.5, 0.25, prompt_length=1), torch.zeros(1, 6)
    for text in ([0, 1], [0, 1, 2], [0, 3, 2], [0, 3, 2, 2, 2], [0], [0, 4]):
        ids = torch.tensor([text])
        assert torch.equal(used(ids, scores), Penalties(0.5, 0.25, prompt_length=1)(ids, scores))


@pytest.mark.parametrize("lookahead", ["auto", LookaheadConfig(5, 4, 5)])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_p": 0.9}])
def test_ours_writes_what_plain_decoding_writes(lookahead, sampling):
    texts = []
    for generate in (LLAMA.generate, lambda ids, **more: lade.generate(LLAMA, ids, lookahead=lookahead, **more)):
        torch.manual_seed(3)
        processor = [Penalties(0.8, 0.6, prompt_length=5)]
        texts.append(generate(PROMPT, logits_processor=processor, max_new_tokens=25, pad_token_id=0, **sampling))
    assert torch.equal(*texts)
    torch.manual_seed(3)
    assert not torch.equal(texts[0], LLAMA.generate(PROMPT, max_new_tokens=25, pad_token_id=0, **sampling))
