"""The MTP layer's runner: whatever was drafted, accepted and dropped, its cache is that of one pass over the text."""

import random

import numpy as np
import pytest
import torch
from mtp_toys import Text, llama_with_mtp
from transformers.cache_utils import MtpCache

from lade.backends.mtp.backend import Head, KnownStates, MtpRunner
from lade.backends.mtp.load import NoLayersError, check_room, examine, find, layer_number, layer_of
from lade.decoding.kernels.native_tree import Frontier
from lade.model.runner import EagerRunner
from lade.model.supports import supports

VOCABULARY = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama_with_mtp(tmp_path_factory.mktemp("mtp"))


def runner_of(model, **options):
    return MtpRunner(EagerRunner(model, supports(model).plan, model.generation_config), layer_of(model), **options)


@pytest.fixture
def runner(model):
    return runner_of(model, gathers=False)


def random_tokens(count, chance):
    return [chance.randrange(1, VOCABULARY) for _ in range(count)]


def states_of(model, tokens):
    with torch.no_grad():
        return model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]


def one_pass(model, tokens):
    """Keys of one pass of transformers' own over a text, and the likeliest tokens after it."""
    mtp, length = layer_of(model).mtp, len(tokens)
    cache = MtpCache(config=mtp.config)
    with torch.no_grad():
        states = states_of(model, tokens[:-1])[None]
        _, logits, _ = mtp(torch.tensor([tokens[1:]]), states, None, torch.arange(1, length)[None], cache)
    return cache.layers[0].keys[0], logits[0, -1].topk(16).indices.tolist()


def read(runner, model, rows):
    with torch.no_grad(), runner.reading(rows):
        for row in rows:
            model(input_ids=torch.tensor([row.tokens[:-1]]))


def held_of(runner, row):
    """What is kept of a row."""
    return runner._held[row]


def accept(runner, model, rows, more):
    """A pass of the model over chains that hold what is accepted, and after it what is not."""
    with torch.no_grad(), runner.watching():
        width = max(map(len, more)) + 2
        for row, tokens in zip(rows, more, strict=True):
            row.tokens += tokens
        fed = [
            states_of(model, [*row.tokens[:-1], *([5] * (width - len(tokens)))])[-width:]
            for row, tokens in zip(rows, more, strict=True)
        ]
        runner._states.append(torch.stack(fed))
    runner.accept(rows, [range(len(tokens)) for tokens in more], width)


def frontier_of(*nodes):
    """Nodes, each given by the number of its parent, its token and its depth."""
    parents, tokens, depths = map(list, zip(*nodes, strict=True)) if nodes else ([], [], [])
    return Frontier([0] * len(nodes), parents, tokens, depths, [0.5] * len(nodes), 1.0)


def look_around(runner, rows, chance):
    """Predict, then look at nodes at random, one, two and three levels down."""
    predictions = runner.predict(rows, None)
    known = {row: [(0, 0)] for row in rows}  # number and depth of what has been looked at
    for _ in range(chance.randrange(4)):
        frontiers = []
        for row in rows:
            own, tree = {}, held_of(runner, row).tree
            for _ in range(chance.randrange(4)):
                parent, depth = chance.choice(known[row])
                token = chance.randrange(1, VOCABULARY)
                if tree.child(parent, token) is None:
                    own[parent, token] = depth + 1
            known[row] += [(len(tree) + at, depth) for at, depth in enumerate(own.values())]
            frontiers.append(frontier_of(*((*place, depth) for place, depth in own.items())))
        if any(each.nodes for each in frontiers):
            runner.look(rows, frontiers, None)
    return predictions


@pytest.mark.parametrize("seed", range(4))
def test_the_cache_is_that_of_one_pass_over_each_text(model, runner, seed):
    chance = random.Random(seed)
    rows = [Text(random_tokens(chance.randrange(2, 20), chance)) for _ in range(3)]
    read(runner, model, rows)
    for _ in range(6):
        drafting = rows if chance.random() < 0.7 else chance.sample(rows, min(2, len(rows)))
        predictions = look_around(runner, drafting, chance)
        for place, row in enumerate(drafting):
            keys, best = one_pass(model, row.tokens)
            held, number = held_of(runner, row), runner._order.index(row)
            entries = runner._cache.layers[0].keys[number, :, : held.end - held.start]
            torch.testing.assert_close(entries, keys, atol=1e-6, rtol=1e-5)
            assert predictions.tokens[place].tolist() == best
        if len(rows) > 1 and chance.random() < 0.3:
            runner.leave(rows.pop(chance.randrange(len(rows))))
        accept(runner, model, rows, [random_tokens(chance.randrange(1, 5), chance) for _ in rows])
    assert all(map(runner.knows, rows))


def test_text_taken_in_piece_by_piece_predicts_as_at_once(model):
    tokens = random_tokens(40, random.Random(3))
    runners = [runner_of(model) for _ in range(2)]
    rows = [Text(tokens[:11]), Text(tokens[:11])]
    for runner, row in zip(runners, rows, strict=True):
        read(runner, model, [row])
    for start in range(11, 40, 3):
        for number, (runner, row) in enumerate(zip(runners, rows, strict=True)):
            if number == 0:
                runner.predict([row], None)
            accept(runner, model, [row], [tokens[start : start + 3]])
    pieces, whole = (runner.predict([row], None) for runner, row in zip(runners, rows, strict=True))
    assert pieces.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(pieces.odds, whole.odds, atol=1e-5)


def test_nodes_are_predicted_as_the_layer_on_its_own_output(model, runner):
    """A node's prediction is that of text whose last state is the layer's own output."""
    row = Text(random_tokens(12, random.Random(1)))
    read(runner, model, [row])
    runner.predict([row], None)
    found = runner.look([row], [frontier_of((0, 7, 1), (0, 9, 1))], None)
    deeper = runner.look([row], [frontier_of((2, 11, 2))], None)
    mtp = layer_of(model).mtp
    with torch.no_grad():
        states = states_of(model, row.tokens[:-1])
        for tokens, predicted in (([7], found.tokens[0]), ([9], found.tokens[1]), ([9, 11], deeper.tokens[0])):
            own = states[None]
            text = list(row.tokens)
            for token in tokens:
                cache, length = MtpCache(config=mtp.config), len(text)
                out = mtp.forward_layer(0, own, torch.arange(1, length)[None], cache, torch.tensor([text[1:]]))
                own, text = torch.cat([own, out[:, -1:]], 1), [*text, token]
            cache, length = MtpCache(config=mtp.config), len(text)
            out = mtp.forward_layer(0, own, torch.arange(1, length)[None], cache, torch.tensor([text[1:]]))
            assert mtp.shared_head(out)[0, -1].topk(16).indices.tolist() == predicted.tolist()


def test_a_row_whose_states_have_a_gap_begins_anew(model, runner):
    row = Text(random_tokens(9, random.Random(2)))
    read(runner, model, [row])
    runner.predict([row], None)
    row.tokens += [3, 4, 5]  # of a pass that nobody watched
    assert not runner.knows(row)
    accept(runner, model, [row], [[6, 7]])
    assert runner.knows(row)
    assert len(runner.predict([row], None).tokens) == 1
    assert (held_of(runner, row).start, held_of(runner, row).end) == (11, 13)


def test_old_states_are_dropped_so_that_long_prompts_take_bounded_memory(monkeypatch):
    monkeypatch.setattr("lade.backends.mtp.backend.MOST_TOKENS", 10)
    known = KnownStates(0)
    for start in range(0, 30, 6):
        known.add(start, torch.arange(start, start + 6)[:, None])
        assert known.end - known.start <= 10 and known.end == start + 6
    assert known.take()[:, 0].tolist() == list(range(20, 30))


def test_a_gathered_head_finds_what_the_whole_one_finds_among_what_it_computes(model):
    mtp, states = layer_of(model).mtp, torch.randn(64, 32, dtype=torch.float64)
    whole, gathered = Head(mtp, gathers=False), Head(mtp, gathers=True)
    for _ in range(5):  # the whole head is computed until there is a hot list
        gathered.predict(states, ())
    candidates = range(VOCABULARY)
    ours, theirs = gathered.predict(states, candidates), whole.predict(states, candidates)
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    np.testing.assert_allclose(ours.odds, theirs.odds, atol=1e-4)
    few = gathered.predict(states, ())
    assert set(few.tokens[few.tokens >= 0].tolist()) == set(gathered._hot.tolist())


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("mtp.layers.0.self_attn.q_proj.weight", 0),
        ("model.mtp.layers.2.mlp.up_proj.weight", 2),
        ("mtp.fc.weight", -1),
        ("model.layers.4.eh_proj.weight", 0),
        ("model.language_model.layers.5.enorm.weight", 1),
        ("model.layers.3.self_attn.q_proj.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_names_of_weights_tell_the_layer(name, number):
    assert layer_number(name, hidden_layers=4) == number


def test_a_layer_that_does_not_fit_is_refused_with_what_it_takes(model, monkeypatch):
    found = find(model)
    free = [2 * found.parameters * 8 - 1]
    monkeypatch.setattr("lade.backends.mtp.load.free_bytes", lambda device: free[-1])
    with pytest.raises(NoLayersError, match="GiB are free on cpu"):
        check_room(model, found)
    free.append(2 * found.parameters * 8)
    check_room(model, found)


def test_what_a_layer_takes_is_known_before_it_is_loaded(tmp_path):
    model = llama_with_mtp(tmp_path)
    before = examine(model)
    assert before.layers == 1 and not before.loaded
    assert before.nbytes == layer_of(model).nbytes == examine(model).nbytes
    assert examine(model).loaded
