"""Configs, prompts of several lengths, and beams through `lade.generate` compared with those of `model.generate`."""

import functools

import torch
from hypothesis import strategies as st
from small_models import small_model
from transformers import WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import lade
from lade.backends.user_cache import UnreadCache
from lade.testing import toy_model

VOCABULARY, PAD = 48, 0
PAPER = lade.LookaheadConfig(7, 5, 7)
PAPERS = st.builds(
    lade.LookaheadConfig,
    window=st.integers(0, 8),
    ngram=st.integers(2, 6),
    guesses=st.integers(0, 8),
    prompt_ngrams=st.booleans(),
    seed=st.integers(0, 3),
)
SHARED = lade.Memory()  # of all models and texts: what it says is mostly wrong, and must only cost time
SMALL = lade.Memory(60_000)  # forgets all the time
CONFIGS = PAPERS | st.builds(
    lade.LookaheadConfig,
    budget=st.none() | st.integers(1, 40),
    memory=st.sampled_from([None, SHARED, SMALL]),
    prompt_ngrams=st.booleans(),
    seed=st.integers(0, 3),
)
"""Any that `lade.generate` takes: of the paper's method, and of the adaptive one."""
PROMPTS = st.lists(st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12), min_size=2, max_size=5)
MODELS = {
    "llama": toy_model("llama"),
    "qwen3": toy_model("qwen3", dtype=torch.float32, attention="eager"),
    "gpt2": toy_model("gpt2"),
}
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
windowed = functools.partial(small_model, "mistral", torch.float64, sliding_window=8)
"""A model whose layers see eight tokens back."""
unsupported = functools.partial(small_model, "gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]])
"""A model that is decoded plainly, for its local attention."""


def processing(vocabulary):
    """Arguments that transformers turns into processors and criteria."""
    tokens = st.integers(0, vocabulary - 1)
    words = st.lists(tokens, min_size=1, max_size=2)
    biases = st.tuples(words.map(tuple), st.sampled_from([-4.0, 2.0]))
    return {
        "do_sample": st.just(True),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "bad_words_ids": st.lists(words, min_size=1, max_size=3),
        "min_new_tokens": st.integers(0, 12),
        "min_length": st.integers(0, 15),
        "forced_eos_token_id": tokens,
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=5),
        "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=5),
        "sequence_bias": st.lists(biases, min_size=1, max_size=3, unique_by=lambda pair: pair[0]).map(dict),
        "exponential_decay_length_penalty": st.tuples(st.integers(0, 5), st.sampled_from([1.1, 2.0])),
        "watermarking_config": st.just(WatermarkingConfig(greenlist_ratio=0.4, bias=2.0)),
        "renormalize_logits": st.just(True),
        "remove_invalid_values": st.just(True),
        "max_time": st.just(1000.0),
    }


class Spelled:
    """As much of a tokenizer as a streamer needs."""

    def decode(self, ids, **kwargs):
        return "".join(f"{int(i)} " for i in ids)


class Listener(BaseStreamer):
    """Notes the tokens of each call, and how often it was ended."""

    def __init__(self):
        self.received, self.ends = [], 0

    def put(self, value):
        self.received.append(value.tolist())

    def end(self):
        self.ends += 1


def random_texts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(prompts):
    """Ids and mask `[B, L]`, padded on the left."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def assert_same_cache(ours, plain, mask=None):
    """Class, lengths, keys and values are plain's; slots that the mask of the prompts, `[B, L]`, hides may differ."""
    assert type(ours) in (type(plain), UnreadCache)
    assert ours.get_seq_length() == plain.get_seq_length() and type(ours) is type(plain)
    assert [type(layer) for layer in ours.layers] == [type(layer) for layer in plain.layers]
    for layer, expected in zip(ours.layers, plain.layers, strict=True):
        rows, _, slots, _ = expected.keys.shape
        shown = torch.ones(rows, 1, slots, 1)
        if mask is not None and slots >= mask.shape[1]:
            shown[:, 0, : mask.shape[1], 0] = mask.repeat_interleave(rows // len(mask), dim=0)
        torch.testing.assert_close(layer.keys * shown, expected.keys * shown)
        torch.testing.assert_close(layer.values * shown, expected.values * shown)


def assert_same_tokens(model, lookahead=PAPER, *, seed=0, stats=None, **arguments):
    """Plain's ids, and plain's generator afterwards; returns the ids."""
    torch.manual_seed(seed)
    expected, state = model.generate(**arguments), torch.get_rng_state()
    torch.manual_seed(seed)
    assert torch.equal(lade.generate(model, lookahead=lookahead, stats=stats, **arguments), expected)
    assert torch.equal(torch.get_rng_state(), state)
    return expected


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
