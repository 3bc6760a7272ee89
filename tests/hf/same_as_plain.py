"""Prompts of several lengths, and beams through `lade.generate` compared with those of `model.generate`."""

import torch

import lade

VOCABULARY, PAD = 48, 0
PAPER = lade.LookaheadConfig(7, 5, 7)
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def padded(prompts):
    """Ids and mask `[B, L]`, padded on the left."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def both(model, lookahead=PAPER, *, stats=None, seed=None, **arguments):
    """Plain's output and ours, each with the generator's state afterwards."""
    outputs, arguments = [], {"max_new_tokens": 40, **EVERYTHING, **arguments}
    for way in (model.generate, lambda **rest: lade.generate(model, lookahead=lookahead, stats=stats, **rest)):
        if seed is not None:
            torch.manual_seed(seed)
        outputs.append((way(**arguments), torch.get_rng_state()))
    return outputs


def assert_same_beams(model, lookahead=PAPER, **arguments):
    """Texts, scores and origins of the beams, and the generator; returns our output."""
    (plain, plain_state), (ours, our_state) = both(model, lookahead, **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(ours.beam_indices, plain.beam_indices)
    torch.testing.assert_close(ours.sequences_scores, plain.sequences_scores)
    assert len(ours.scores) == len(plain.scores)
    torch.testing.assert_close(ours.scores, plain.scores)
    torch.testing.assert_close(ours.logits, plain.logits)
    assert torch.equal(our_state, plain_state)
    return ours
