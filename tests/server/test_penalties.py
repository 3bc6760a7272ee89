"""Presence and frequency penalties: the formula, and that they count the answer of whoever calls."""

from collections import Counter

import pytest
import torch

from lade.server.sampling_parameters import Penalties


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
