"""Draws of a batch whose rows go on at their own pace, against `torch.multinomial` on all rows at once."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lade.hf.sampling import MOST_BYTES, NO_TOKEN, Draws, LoneSampler, NoiseBlocks, RowSampler


def distributions(rows, tokens, vocabulary, seed):
    """Probabilities `[T, B, V]`, some of them sharp, some with zeros, as top-k and the like leave them."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3.0 * torch.randn(tokens, rows, vocabulary, generator=generator)
    banned = torch.rand(scores.shape, generator=generator) < 0.4
    banned[..., 0] = False
    return scores.masked_fill(banned, -torch.inf).softmax(dim=-1)


def assert_nothing_is_kept(draws):
    assert not draws.noise._kept and not draws.noise._states


def in_step(probabilities, ends):
    """What plain decoding draws, until the last row has ended: tokens `[B][]`, and the generator's state."""
    drawn = [torch.multinomial(step, num_samples=1)[:, 0].tolist() for step in probabilities[: max(ends)]]
    return [[step[row] for step in drawn[:end]] for row, end in enumerate(ends)], torch.get_rng_state()


def at_their_own_pace(probabilities, ends, order, most_bytes=MOST_BYTES):
    """The same by `Draws`; `order` picks whose turn it is."""
    draws = Draws(len(ends), most_bytes)
    samplers = [RowSampler(draws, row) for row in range(len(ends))]
    texts = [[] for _ in ends]
    while left := [row for row, end in enumerate(ends) if len(texts[row]) < end]:
        row = left[order(len(left))]
        texts[row].append(samplers[row].draw(probabilities[len(texts[row]), row : row + 1]))
        if len(texts[row]) == ends[row]:
            draws.leave(row)
    assert_nothing_is_kept(draws)
    return texts, torch.get_rng_state()


@settings(max_examples=examples(60))
@given(
    ends=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    vocabulary=st.sampled_from([1, 2, 3, 7, 15, 16, 17, 64, 257, 1000, 4099]),
    seed=st.integers(0, 2**31),
    kept=st.sampled_from([0, 1, 3, 100]),
    data=st.data(),
)
def test_every_row_draws_what_it_would_draw_in_step(ends, vocabulary, seed, kept, data):
    probabilities = distributions(len(ends), max(ends), vocabulary, seed)
    torch.manual_seed(seed)
    expected, state = in_step(probabilities, ends)
    torch.manual_seed(seed)
    most_bytes = kept * 4 * len(ends) * vocabulary
    order = lambda left: data.draw(st.integers(0, left - 1))  # noqa: E731
    texts, our_state = at_their_own_pace(probabilities, ends, order, most_bytes)
    assert texts == expected
    assert torch.equal(our_state, state)


@settings(max_examples=examples(60))
@given(
    ends=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    vocabulary=st.sampled_from([1, 3, 17, 257, 4099]),
    seed=st.integers(0, 2**31),
    kept=st.sampled_from([0, 1, 3, 100]),
    own=st.booleans(),
    data=st.data(),
)
def test_what_is_drawn_ahead_is_what_would_be_drawn(ends, vocabulary, seed, kept, own, data):
    """Steps of random depth, of which random many tokens are taken; the generator never shows what is ahead."""
    probabilities = distributions(len(ends), 2 * max(ends) + 5, vocabulary, seed)
    torch.manual_seed(seed)
    states, expected = [torch.get_rng_state()], []
    for step in probabilities[: max(ends)]:
        expected.append(torch.multinomial(step, num_samples=1)[:, 0].tolist())
        states.append(torch.get_rng_state())
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed) if own else None
    draws = Draws(len(ends), kept * 4 * len(ends) * vocabulary, generator)
    samplers = [RowSampler(draws, row) for row in range(len(ends))]
    texts = [[] for _ in ends]
    while left := [row for row, end in enumerate(ends) if len(texts[row]) < end]:
        row = data.draw(st.sampled_from(left))
        depth, start = data.draw(st.integers(0, 4)), len(texts[row])
        depths = [*range(depth + 1), *data.draw(st.lists(st.integers(0, depth), max_size=3))]
        nodes = torch.stack([probabilities[start + level, row] for level in depths])
        before = generator.get_state() if generator else torch.get_rng_state()
        found = samplers[row].draw_ahead(nodes, depths).tolist()
        assert torch.equal(generator.get_state() if generator else torch.get_rng_state(), before)
        assert all(found[at] == found[level] for at, level in enumerate(depths)), "a level has one noise"
        for token in found[: min(data.draw(st.integers(1, depth + 1)), ends[row] - start)]:
            texts[row].append(token)
            samplers[row].take()
        if len(texts[row]) == ends[row]:
            draws.leave(row)
        furthest = max(map(len, texts))
        ours = generator.get_state() if generator else torch.get_rng_state()
        assert torch.equal(ours, states[furthest]), "as if no more had been drawn than was taken"
    assert texts == [[step[row] for step in expected[:end]] for row, end in enumerate(ends)]
    assert_nothing_is_kept(draws)


def test_who_draws_between_two_steps_is_heard():
    """Plain decoding would draw what comes then from the generator as it was left."""
    probabilities = distributions(1, 6, 50, seed=4)

    def outcome(tokens):
        torch.manual_seed(2)
        drawn = tokens(slice(0, 2))
        torch.rand(3)
        return drawn + tokens(slice(2, 6)), torch.get_rng_state()

    def plainly(steps):
        return [int(torch.multinomial(each, num_samples=1)) for each in probabilities[steps]]

    sampler = LoneSampler()

    def ahead(steps):
        first, end, _ = steps.indices(6)
        nodes = probabilities[first:, 0]  # all that are left, more than are taken
        found = sampler.draw_ahead(nodes, range(len(nodes))).tolist()[: end - first]
        for _ in found:
            sampler.take()
        return found

    expected, state = outcome(plainly)
    ours, our_state = outcome(ahead)
    assert ours == expected and torch.equal(our_state, state)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 50000), (2, 32000), (3, 50257), (16, 32000), (5, 128256)])
def test_at_the_size_of_real_vocabularies(rows, vocabulary):
    """There noise is drawn by several threads and by vector instructions."""
    probabilities = distributions(rows, 3, vocabulary, seed=rows)
    ends = [3 - row % 2 for row in range(rows)]
    torch.manual_seed(5)
    expected, state = in_step(probabilities, ends)
    torch.manual_seed(5)
    texts, our_state = at_their_own_pace(probabilities, ends, lambda left: left - 1)
    assert texts == expected and torch.equal(our_state, state)


def test_a_block_is_kept_until_the_last_row_has_passed_it():
    draws, (probabilities,) = Draws(3), distributions(1, 1, 10, seed=0)
    for _ in range(4):
        RowSampler(draws, 0).draw(probabilities)
    assert len(draws.noise) == 4
    RowSampler(draws, 1).draw(probabilities)
    assert len(draws.noise) == 4, "row 2 needs them all"
    draws.leave(2)
    assert len(draws.noise) == 3
    draws.leave(1)
    assert len(draws.noise) == 0, "row 0 draws new ones"
    RowSampler(draws, 0).draw(probabilities)
    assert len(draws.noise) == 0


def test_what_is_kept_is_bounded():
    noise, (probabilities,) = NoiseBlocks(3, most_bytes=2 * 3 * 4 * 10 + 1), distributions(1, 1, 10, seed=0)
    torch.manual_seed(7)
    blocks = [noise.block(number, probabilities).clone() for number in range(5)]
    assert len(noise) == 2
    state = torch.get_rng_state()
    for number in (4, 2, 0, 3, 1, 4):
        assert torch.equal(noise.block(number, probabilities), blocks[number])
    assert len(noise) == 2
    noise.forget(2)
    assert torch.equal(noise.block(3, probabilities), blocks[3]) and len(noise) == 1, "there is room for it now"
    assert torch.equal(torch.get_rng_state(), state), "what is drawn again leaves no trace"


@pytest.mark.parametrize("wrong", [[0.5, torch.nan], [torch.inf, 0.5], [-0.1, 1.1], [0.0, 0.0]])
def test_what_is_no_distribution_has_no_token_ahead_and_fails_as_in_torch(wrong):
    nodes = torch.tensor([[0.5, 0.5], wrong, [0.0, 1.0]])
    found = LoneSampler().draw_ahead(nodes, [0, 1, 1]).tolist()
    assert found[0] in (0, 1) and found[1:] == [NO_TOKEN, 1]
    wrong = torch.tensor([wrong])
    with pytest.raises(RuntimeError) as ours:
        RowSampler(Draws(2), 0).draw(wrong)
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(wrong, num_samples=1)
    assert str(ours.value) == str(theirs.value)
