"""A memory saved and loaded: all of it, or a word about what is wrong."""

import functools
import hashlib
import json
import os
import re
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from memories import known, learn, random_rows, rows_of, tails_of, unpacked
from safetensors import numpy as container
from spies import failing

import lade
from lade import memory as memory_file
from lade.decoding.drafting.memory import LEAST_BYTES, SLOT_BYTES
from lade.decoding.kernels.layout import BITS, END, LENGTHS, ORDERS, TEXT_ORDERS, TOKEN, WEIGHT_SETS, WIDTH
from lade.errors import ConfigError, InputError, LadeError
from lade.memory import Memory
from lade.testing import toy_model

LARGEST = TOKEN - 1


class Vocabulary:
    """A tokenizer, as far as memories know one."""

    def __init__(self, *tokens, length=None):
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._length = len(tokens) if length is None else length

    def get_vocab(self):
        return dict(self._ids)

    def __len__(self):
        return self._length


def filled(seed=0, contexts=40, *, vocabulary=50, max_bytes=2**20, rounds=3):
    rng = np.random.default_rng(seed)
    memory = Memory(max_bytes)
    for _ in range(rounds):
        texts = [rng.integers(0, vocabulary, rng.integers(1, 10)).tolist() for _ in range(contexts)]
        memory.learn(tails_of(texts), random_rows(rng, contexts, min(vocabulary, 4000)) + max(0, vocabulary - 4000))
        memory.learn_text(tails_of(texts), rng.integers(0, vocabulary, contexts).tolist())
    memory.weights[:] = rng.normal(size=memory.weights.shape)
    return memory


def slots(table):
    """What is in it, in an order that does not depend on its size."""
    return sorted(table[table[:, 0] != 0].tolist())


def kinds(table):
    return table[:, 0] & 7


def same(one, other):
    """Whether two memories are equal, in what they hold and in what they say."""
    assert np.array_equal(one.weights, other.weights)
    for mine, its in zip(one.tables, other.tables, strict=True):
        assert slots(mine) == slots(its)
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = rng.integers(0, 50, 5).tolist()
        assert known(one, text) == known(other, text)
    return len(one) == len(other)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "texts.memory"


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    contexts=st.integers(1, 60),
    vocabulary=st.sampled_from([2, 7, 300, 151_936, LARGEST + 1]),
    max_bytes=st.sampled_from([LEAST_BYTES, 10_000, 30_001, 2**20]),
)
def test_what_is_loaded_is_what_was_saved(tmp_path_factory, seed, contexts, vocabulary, max_bytes):
    path = tmp_path_factory.mktemp("memory") / "m"
    memory = filled(seed, contexts, vocabulary=vocabulary, max_bytes=max_bytes)
    memory.save(path)
    loaded = Memory.load(path)
    assert loaded.max_bytes == max_bytes and loaded.fingerprint is None
    assert same(memory, loaded)
    again = path.with_name("again")
    loaded.save(again)
    assert same(loaded, Memory.load(again))


def test_all_places_of_all_contexts_are_kept(path):
    """Each of a context's tokens at its limits, in turn."""
    memory, longest = Memory(), max(LENGTHS)
    places = range(longest)
    texts = [[token if place == i else 5 for i in places] for place in places for token in (0, 1, LARGEST, 2**31 - 1)]
    texts += [[], [0], [LARGEST] * longest, [0] * longest, [7, 8]]
    learn(memory, texts, [{LARGEST - 9 * number: 255, 0: number} for number in range(len(texts))])
    memory.save(path)
    loaded = Memory.load(path)
    assert same(memory, loaded)
    for number, text in enumerate(texts):
        assert known(loaded, text)[0][-1] == {LARGEST - 9 * number: 255, 0: number}


@pytest.mark.parametrize("max_bytes", (LEAST_BYTES, 20_000, 2**20))
def test_a_loaded_memory_goes_on_learning_as_the_saved_one(path, max_bytes):
    memory = filled(max_bytes=max_bytes)
    memory.save(path)
    loaded = Memory.load(path)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        tails, rows = tails_of(rng.integers(0, 50, (20, 9)).tolist()), random_rows(rng, 20, 50)
        for each in (memory, loaded):
            each.learn(tails, rows)
            each.learn_text(tails, [3] * 20)
            each.weights += 1.0
        if max_bytes == 2**20:
            assert same(memory, loaded)
    assert sum(map(len, loaded.tables)) * SLOT_BYTES <= max_bytes
    assert abs(len(memory) - len(loaded)) <= max_bytes // SLOT_BYTES // 2


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 999), less=st.integers(LEAST_BYTES, 40_000), first=st.sampled_from([10_000, 2**20]))
def test_less_room_keeps_the_shorter_contexts(tmp_path_factory, seed, less, first):
    path = tmp_path_factory.mktemp("memory") / "m"
    memory = filled(seed, max_bytes=first)
    memory.save(path)
    loaded = Memory.load(path, max_bytes=less)
    assert loaded.max_bytes == less
    assert sum(map(len, loaded.tables)) * SLOT_BYTES <= less
    room, lengths = 2 * (less // (2 * SLOT_BYTES)) // 3, np.array(LENGTHS)
    for before, after in zip(memory.tables, loaded.tables, strict=True):
        saved, kept = slots(before), slots(after)
        gone = [slot for slot in saved if slot not in kept]
        assert len(kept) == min(len(saved), room) and len(gone) == len(saved) - len(kept)
        assert not gone or lengths[kinds(np.array(kept)) - 1].max() <= lengths[kinds(np.array(gone)) - 1].min()
    rng = np.random.default_rng(0)
    learn(loaded, rng.integers(0, 50, (300, 9)).tolist(), [{1: 2}] * 300)
    assert sum(map(len, loaded.tables)) * SLOT_BYTES <= less


def test_more_room_keeps_everything_and_no_room_is_an_error(path):
    memory = filled()
    memory.save(path)
    loaded = Memory.load(path, max_bytes=2**30)
    assert loaded.max_bytes == 2**30 and same(memory, loaded)
    for none in (5, LEAST_BYTES - 1):
        with pytest.raises(ConfigError, match=f"max_bytes={none}"):
            Memory.load(path, max_bytes=none)


# Damage


@functools.cache
def good():
    """The bytes of a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m")
        filled().save(path, Vocabulary("a", "b"))
        return path.read_bytes()


def refused(path, content, *words):
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        Memory.load(path)
    message = str(caught.value)
    assert repr(str(path)) in message and "lade warm" in message, message
    for word in words:
        assert word in message, message


@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_truncated_file_is_refused(tmp_path_factory, data):
    refused(tmp_path_factory.getbasetemp() / "short", good()[: data.draw(st.integers(0, len(good()) - 1))])


@settings(max_examples=examples(400))
@given(data=st.data())
def test_a_file_with_a_changed_byte_is_refused(tmp_path_factory, data):
    whole = bytearray(good())
    header = 8 + int.from_bytes(whole[:8], "little")
    place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(whole) - 1)))
    whole[place] ^= data.draw(st.integers(1, 255))
    refused(tmp_path_factory.getbasetemp() / "flipped", bytes(whole))


def test_blanks_in_the_header_count_too(path):
    end = 8 + int.from_bytes(good()[:8], "little")
    assert good()[end - 1 : end] in b" }"
    padded = json.dumps(json.loads(good()[8:end]), separators=(",", ":")).encode() + b" " * 16
    refused(path, len(padded).to_bytes(8, "little") + padded + good()[end:], "checksum")
    refused(path, good() + b"\0", "checksum")


def test_what_never_was_a_memory_or_cannot_be_read(path, tmp_path):
    for content in (b"", b"\0" * 8, b"\0" * 100, b"\xff" * 100, b"texts", b"[" * 10_000, b"\5" + b"\0" * 7 + b"[1,2]"):
        refused(path, content)
    refused(path, container.save({"x": np.zeros(3)}), "not a memory file", "lade.memory")
    refused(path, container.save({"x": np.zeros(3)}, {"format": "pt"}), "not a memory file")
    with pytest.raises(InputError, match=r"none.*No such file.*lade warm"):
        Memory.load(tmp_path / "none")
    with pytest.raises(InputError, match="directory"):
        Memory.load(tmp_path)


def rewritten(change):
    """A file with a right checksum, written by someone else's program."""
    arrays = {name: array.copy() for name, array in container.load(good()).items()}
    end = 8 + int.from_bytes(good()[:8], "little")
    metadata = dict(json.loads(good()[8:end])["__metadata__"], sha256="0" * 64)
    change(arrays, metadata)
    unsealed = container.save(arrays, metadata)
    return unsealed.replace(b"0" * 64, hashlib.sha256(unsealed).hexdigest().encode(), 1)


def put(name, value):
    def change(arrays, metadata):
        if value is None:
            (arrays if name in arrays else metadata).pop(name)
        elif isinstance(value, str):
            metadata[name] = value
        else:
            arrays[name] = value(arrays[name])

    return change


def element(value, place=(0, 0)):
    def change(array):
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", "1", ["version 1", "reads version 2"]),
        ("version", "3", ["version 3", "reads version 2"]),
        ("version", None, ["version None"]),
        ("layout", "{}", ["layout"]),
        ("layout", None, ["layout"]),
        ("max_bytes", None, ["max_bytes"]),
        ("max_bytes", "many", ["many"]),
        ("max_bytes", "-4", ["max_bytes=-4"]),
        ("max_bytes", str(LEAST_BYTES - 1), [f"max_bytes={LEAST_BYTES - 1} is less than"]),
        ("young", None, ["lacks young"]),
        ("old", None, ["lacks old"]),
        ("weights", None, ["lacks weights"]),
        ("young", lambda a: a.astype(np.int64), ["young is int64"]),
        ("young", lambda a: a.astype(np.uint32), ["young is uint32"]),
        ("young", lambda a: a[:, :-1].copy(), ["young is int32", "not int32"]),
        ("old", lambda a: np.zeros((1, 3 + WIDTH), np.int32), ["old is int32"]),
        ("young", lambda a: a.ravel(), ["young is int32"]),
        ("young", element(0), ["young", "invalid key"]),
        ("young", element(8), ["young", "invalid key"]),
        ("young", element(-8), ["young", "invalid key"]),
        *([("young", element(END + 1), ["young", "invalid key"])] if END < 7 else []),
        ("young", element(-1, (1, 2)), ["young", "entry"]),
        ("young", element(-(2**31), (1, 1 + WIDTH)), ["young", "entry"]),
        ("young", element(256 << BITS, (1, 1 + WIDTH)), ["young", "entry"]),
        ("old", lambda a: np.full((1, 2 + WIDTH), -2, np.int32), ["old", "entry"]),
        ("young", lambda a: np.vstack([a, a[:1]]), ["young", "twice"]),
        ("young", lambda a: np.vstack([a, a[:1] * ([1] * (1 + WIDTH) + [0])]).astype(np.int32), ["young", "twice"]),
        ("weights", element(np.nan), ["weights"]),
        ("weights", element(np.inf, (WEIGHT_SETS - 1, END)), ["weights"]),
        ("weights", lambda a: a[1:].copy(), ["weights"]),
        ("weights", lambda a: a[:, 1:].copy(), ["weights"]),
        ("weights", lambda a: a.astype(np.float32), ["weights is float32"]),
    ],
)
def test_contents_that_make_no_sense_are_refused_though_the_checksum_is_right(path, name, value, words):
    refused(path, rewritten(put(name, value)), *words)


def test_a_file_may_claim_less_room_than_it_takes_and_more_than_there_is(path):
    """One cannot make a table that is too full with it."""
    path.write_bytes(rewritten(put("max_bytes", str(LEAST_BYTES))))
    loaded = Memory.load(path)
    assert sum(map(len, loaded.tables)) * SLOT_BYTES <= LEAST_BYTES
    assert len(loaded) < len(filled())
    path.write_bytes(rewritten(put("max_bytes", "1" + "0" * 30)))
    assert same(filled(), Memory.load(path))


def test_rows_that_nobody_would_have_written_do_no_harm(path):
    """With a token twice, or none before some."""

    def change(arrays, metadata):
        arrays["young"][:, 2:] = [TOKEN, 5, 5, TOKEN, 7 | 9 << BITS, 0][:WIDTH] + [TOKEN] * (WIDTH - 6)

    path.write_bytes(rewritten(change))
    loaded = Memory.load(path)
    ids = torch.tensor([[1, 2, 3, 4]])
    config = lade.LookaheadConfig(memory=loaded, budget=16)
    model = toy_model()
    ours = lade.generate(model, input_ids=ids, max_new_tokens=20, lookahead=config)
    assert torch.equal(ours, model.generate(ids, max_new_tokens=20))


# The tokenizer


ONE, OTHER = Vocabulary("a", "b", "c"), Vocabulary("a", "c", "b")


def test_a_fingerprint_is_of_the_vocabulary_and_nothing_else():
    class Reordered(Vocabulary):
        def get_vocab(self):
            return dict(reversed(super().get_vocab().items()))

    assert memory_file.fingerprint_of(ONE) == memory_file.fingerprint_of(Reordered("a", "b", "c"))
    assert memory_file.fingerprint_of(ONE) != memory_file.fingerprint_of(OTHER)
    assert memory_file.fingerprint_of(ONE) != memory_file.fingerprint_of(Vocabulary("a", "b", "c", "d"))
    assert len(memory_file.fingerprint_of(Vocabulary("\ud800", "é"))) == 64, "tokens may be broken text"


def test_a_file_and_a_memory_are_tied_to_their_tokenizer(path):
    memory = filled()
    memory.save(path, ONE)
    assert memory.fingerprint == memory_file.fingerprint_of(ONE)
    for tokenizer in (ONE, None):
        assert Memory.load(path, tokenizer=tokenizer).fingerprint == memory.fingerprint
    with pytest.raises(InputError) as caught:
        Memory.load(path, tokenizer=OTHER)
    for word in (memory.fingerprint[:8], memory_file.fingerprint_of(OTHER)[:8], "lade warm", str(path)):
        assert word in str(caught.value)
    loaded = Memory.load(path)
    loaded.save(path)
    assert Memory.load(path).fingerprint == memory.fingerprint
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        loaded.save(path, OTHER)
    assert all(memory_file.fingerprint_of(each)[:8] in str(caught.value) for each in (ONE, OTHER))
    assert path.read_bytes() == before


def test_without_a_fingerprint_the_ids_must_fit(path):
    filled(vocabulary=50).save(path)
    assert Memory.load(path).fingerprint is None
    fits = Vocabulary("a", length=50)
    assert Memory.load(path, fits).fingerprint == memory_file.fingerprint_of(fits)
    with pytest.raises(InputError, match=r"the id 49, .* only 49: .*lade warm"):
        Memory.load(path, Vocabulary("a", length=49))
    Memory().save(path)
    assert len(Memory.load(path, Vocabulary())) == 0


# Writing


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(path, monkeypatch, step, problem):
    filled(1).save(path)
    before = path.read_bytes()
    failing(monkeypatch, os, step, problem)
    with pytest.raises(InputError if isinstance(problem, OSError) else KeyboardInterrupt) as caught:
        filled(2).save(path)
    if isinstance(problem, OSError):
        assert "No space left" in str(caught.value) and repr(str(path)) in str(caught.value)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_paths_that_cannot_be_written_and_that_is_known_before_there_is_anything(tmp_path):
    memory = filled()
    with pytest.raises(InputError, match="regular file"):
        memory.save(tmp_path)
    with pytest.raises(InputError, match=r"no/folder.*No such file"):
        memory.save(tmp_path / "no" / "folder", ONE)
    assert memory.fingerprint is None, "it is not tied to the tokenizer"
    kept = tmp_path / "kept"
    kept.write_bytes(b"as it was")
    with pytest.raises(InputError):
        memory.save(kept / "m")
    with pytest.raises(LadeError):
        memory.save("/dev/null")
    memory_file.check(kept)
    memory_file.check(tmp_path / "new")
    assert os.listdir(tmp_path) == ["kept"] and kept.read_bytes() == b"as it was"
    for path in (tmp_path / "no" / "folder", kept / "below", tmp_path):
        with pytest.raises(InputError, match="cannot be written: "):
            memory_file.check(path)


def test_a_new_file_is_its_owners_and_an_old_one_keeps_its_permissions(path, tmp_path):
    filled(1).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(path)
    filled(2).save(link)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert link.is_symlink() and same(filled(2), Memory.load(path)), "a link leads to the same file afterwards"


ACTS = {
    "saves": lambda memory, path: memory.save(path),
    "learns": lambda memory, path: memory.learn(tails_of([[1]]), rows_of([{5: 9}])),
    "learns a text": lambda memory, path: memory.learn_text(tails_of([[1]]), [5]),
}


@pytest.mark.parametrize("act", ACTS)
def test_who_saves_or_learns_waits_until_what_is_being_learned_is_learned(act, path):
    memory, done = filled(), []
    acting = threading.Thread(target=lambda: done.append(ACTS[act](memory, path)))
    with memory._writing:
        acting.start()
        acting.join(0.05)
        assert not done and not path.exists()
    acting.join()
    assert done and (act != "saves" or same(memory, Memory.load(path)))


def test_the_container_is_one_that_others_can_read(path):
    memory = filled()
    memory.save(path, ONE)
    whole = path.read_bytes()
    arrays = container.load(whole)
    shapes = {name: (array.dtype, array.shape[1]) for name, array in arrays.items()}
    slot = (np.int32, 2 + WIDTH)
    assert shapes == {"old": slot, "young": slot, "weights": (np.float64, END + 1)}
    assert slots(arrays["young"]) == slots(memory.tables[0]) and slots(arrays["old"]) == slots(memory.tables[1])
    rows = sorted(tuple(unpacked(row).items()) for row in arrays["young"][kinds(arrays["young"]) == 1][:, 2:])
    said = [known(memory, [1] * 8 + [token])[0] for token in range(50)]
    assert rows == sorted(tuple(short[0].items()) for short in said if short) and len(rows) > 40
    end = 8 + int.from_bytes(whole[:8], "little")
    metadata = json.loads(whole[8:end])["__metadata__"]
    assert metadata["format"] == "lade.memory" and metadata["version"] == "2"
    layout = json.loads(metadata["layout"])
    assert (layout["orders"], layout["text"], layout["width"]) == (list(ORDERS), list(TEXT_ORDERS), WIDTH)
    assert metadata["library"] == lade.__version__ and metadata["tokenizer"] == memory.fingerprint
    digest = metadata["sha256"].encode()
    assert hashlib.sha256(whole.replace(digest, b"0" * 64)).hexdigest().encode() == digest


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_is_no_name_of_a_file_is_told_so(name):
    for act in (Memory().save, Memory.load, memory_file.check):
        with pytest.raises(InputError, match=re.escape(f"memory file {name!r} cannot be ") + ".*give another one"):
            act(name)
