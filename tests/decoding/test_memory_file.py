"""A memory saved and loaded: all of it, or a word about what is wrong."""

import functools
import hashlib
import json
import os
import random
import stat
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as container

import lade
from lade.decoding import memory_file
from lade.decoding.contexts import MASKS, ORDERS, WIDTH, context_of, extended
from lade.decoding.memory import ENTRY_BYTES, Memory
from lade.decoding.readout import Readout
from lade.errors import ConfigError, InputError, LadeError

LARGEST = 2**21 - 2


class Vocabulary:
    """A tokenizer, as far as memories know one."""

    def __init__(self, *tokens, length=None):
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._length = len(tokens) if length is None else length

    def get_vocab(self):
        return dict(self._ids)

    def __len__(self):
        return self._length


def filled(seed=0, contexts=40, *, vocabulary=50, width=WIDTH, max_bytes=2**20, rounds=3):
    rng = np.random.default_rng(seed)
    memory = Memory(max_bytes)
    for _ in range(rounds):
        texts = [rng.integers(0, vocabulary, rng.integers(1, 8)).tolist() for _ in range(contexts)]
        tokens = np.argsort(rng.random((contexts, max(width, 1))), axis=1).astype(np.int32) + max(0, vocabulary - width)
        values = rng.integers(0, 256, (contexts, max(width, 1))).astype(np.uint8)
        memory.learn([context_of(text) for text in texts], Readout(tokens, values))
    for weights in memory.mixer.weights:
        weights[:] = rng.normal(size=len(weights)).tolist()
    return memory


def keys(memory):
    """The contexts of each order, the oldest first."""
    both = zip(memory._old, memory._young, strict=True)
    return [[*(key for key in old if key not in young), *young] for old, young in both]


def same(one, other):
    """Whether two memories are equal, in what they hold and in what they say."""
    assert one.mixer.weights == other.mixer.weights
    assert keys(one) == keys(other), "the same contexts in the same order"
    assert [list(table) for table in one._young] == [list(table) for table in other._young]
    rng = random.Random(0)
    for context in keys(one)[-1][:100]:
        assert len(one.lookup(context)) == len(ORDERS)
        for probe in (context, extended(context, rng.randrange(50))):
            assert one.lookup(probe) == other.lookup(probe)
    return len(one) == len(other)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "texts.memory"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    contexts=st.integers(1, 60),
    vocabulary=st.sampled_from([2, 7, 300, 151_936, LARGEST]),
    width=st.integers(1, WIDTH),
    contexts_at_most=st.sampled_from([1, 8, 100, 10_000]),
)
def test_what_is_loaded_is_what_was_saved(tmp_path_factory, seed, contexts, vocabulary, width, contexts_at_most):
    path = tmp_path_factory.mktemp("memory") / "m"
    max_bytes = contexts_at_most * ENTRY_BYTES
    memory = filled(seed, contexts, vocabulary=vocabulary, width=min(width, vocabulary), max_bytes=max_bytes)
    memory.save(path)
    loaded = Memory.load(path)
    assert loaded.max_bytes == max_bytes and loaded.fingerprint is None
    assert same(memory, loaded)
    again = path.with_name("again")
    loaded.save(again)
    assert same(loaded, Memory.load(again))


def test_an_empty_memory(path):
    Memory(12345).save(path)
    loaded = Memory.load(str(path))
    assert len(loaded) == 0 and loaded.max_bytes == 12345 and loaded.mixer.weights == Memory().mixer.weights


def test_all_places_of_all_contexts_are_kept(path):
    """Each of a context's tokens at its limits, in turn."""
    memory = Memory()
    longest = ORDERS[-1]
    places = range(longest)
    texts = [[token if place == i else 5 for i in places] for place in places for token in (0, 1, LARGEST)]
    texts += [[], [0], [LARGEST] * longest, [0] * longest, [7, 8]]
    readout = Readout(np.full((len(texts), WIDTH), LARGEST, np.int32), np.zeros((len(texts), WIDTH), np.uint8))
    memory.learn([context_of(text) for text in texts], readout)
    memory.save(path)
    assert same(memory, Memory.load(path))
    contexts = container.load(path.read_bytes())[f"contexts.{longest}"].tolist()
    assert [-1] * (longest - 2) + [7, 8] in contexts and [0] + [5] * (longest - 1) in contexts
    assert [5, 5, LARGEST] + [5] * (longest - 3) in contexts


def test_a_loaded_memory_goes_on_learning_as_the_saved_one(path):
    memory = filled(max_bytes=300 * ENTRY_BYTES)
    memory.save(path)
    loaded = Memory.load(path)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        contexts = [context_of(text) for text in rng.integers(0, 50, (20, 5)).tolist()]
        readout = Readout(
            rng.integers(0, 50, (20, WIDTH)).astype(np.int32), rng.integers(0, 256, (20, WIDTH)).astype(np.uint8)
        )
        memory.learn(contexts, readout)
        loaded.learn(contexts, readout)
        assert keys(memory) == keys(loaded)


@settings(max_examples=40)
@given(seed=st.integers(0, 999), most=st.integers(1, 400), first=st.sampled_from([100, 10_000]))
def test_less_room_keeps_the_newest(tmp_path_factory, seed, most, first):
    path = tmp_path_factory.mktemp("memory") / "m"
    memory = filled(seed, max_bytes=first * ENTRY_BYTES)
    memory.save(path)
    loaded = Memory.load(path, max_bytes=most * ENTRY_BYTES)
    assert loaded.max_bytes == most * ENTRY_BYTES
    if most >= first:
        assert same(memory, loaded)
        return
    assert len(loaded) <= most
    for number, (before, after) in enumerate(zip(keys(memory), keys(loaded), strict=True)):
        newest = before[len(before) - len(after) :] if number == 0 else before
        assert set(after) <= set(newest)
    for table in range(1, len(ORDERS)):
        shorter = set(keys(loaded)[table - 1])
        assert all(key & MASKS[table - 1] in shorter for key in keys(loaded)[table]), "each can be found"
    if most >= len(ORDERS) * 2 and len(memory) > most:
        assert len(keys(loaded)[0]) >= min(len(keys(memory)[0]), most // 2 // len(ORDERS)), "and they are many"
    for key in keys(loaded)[-1]:
        assert loaded.lookup(key) == memory.lookup(key)


def test_more_room_keeps_everything_and_no_room_is_an_error(path):
    memory = filled()
    memory.save(path)
    loaded = Memory.load(path, max_bytes=2**30)
    assert loaded.max_bytes == 2**30 and same(memory, loaded)
    with pytest.raises(ConfigError, match="max_bytes=5"):
        Memory.load(path, max_bytes=5)


# Damage


@functools.cache
def good():
    """The bytes of a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        filled().save(os.path.join(folder, "m"), Vocabulary("a", "b"))
        with open(os.path.join(folder, "m"), "rb") as file:
            return file.read()


def refused(path, content, *words):
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        Memory.load(path)
    message = str(caught.value)
    assert repr(str(path)) in message and "lade warm" in message, message
    for word in words:
        assert word in message, message


@settings(max_examples=150)
@given(data=st.data())
def test_a_truncated_file_is_refused(tmp_path_factory, data):
    refused(tmp_path_factory.getbasetemp() / "short", good()[: data.draw(st.integers(0, len(good()) - 1))])


@settings(max_examples=400)
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


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\0" * 100, b"\xff" * 100, b"texts", b"[" * 10_000, b"\5" + b"\0" * 7 + b"[1,2]"]
)
def test_what_never_was_a_memory(path, content):
    refused(path, content)


def test_a_file_of_another_kind(path):
    refused(path, container.save({"x": np.zeros(3)}), "something else", "lade.memory")
    refused(path, container.save({"x": np.zeros(3)}, {"format": "pt"}), "something else")


def rewritten(change):
    """A file with a right checksum, written by someone else's program."""
    arrays = {name: array.copy() for name, array in container.load(good()).items()}
    end = 8 + int.from_bytes(good()[:8], "little")
    metadata = dict(json.loads(good()[8:end])["__metadata__"], sha256="0" * 64)
    change(arrays, metadata)
    return memory_file._sealed(container.save(arrays, metadata))


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
        ("version", "2", ["version 2", "reads version 1"]),
        ("version", None, ["version None"]),
        ("layout", "{}", ["layout"]),
        ("max_bytes", None, ["max_bytes"]),
        ("max_bytes", "many", ["many"]),
        ("max_bytes", "-4", ["max_bytes=-4"]),
        ("young", None, ["young"]),
        ("young", "[1]", ["young=[1]"]),
        ("young", "7", ["metadata"]),
        ("young", "[1e999, 0, 0, 0]", ["metadata"]),
        ("young", "[-1, 0, 0, 0]", ["young=[-1"]),
        ("young", "[9999, 0, 0, 0]", ["young=[9999"]),
        ("contexts.3", None, ["lacks contexts.3"]),
        ("tokens.1", None, ["lacks tokens.1"]),
        ("values.5", None, ["lacks values.5"]),
        ("weights.2", None, ["lacks weights.2"]),
        ("contexts.2", lambda a: a.astype(np.int64), ["contexts.2 is int64"]),
        ("contexts.2", lambda a: a[:, :1].copy(), ["contexts.2", "not int32"]),
        ("contexts.2", lambda a: a[:-1].copy(), ["tokens.2"]),
        ("contexts.2", lambda a: a.ravel(), ["contexts.2"]),
        ("tokens.2", lambda a: a[:, :-1].copy(), ["tokens.2"]),
        ("tokens.2", lambda a: a.astype(np.float32), ["tokens.2 is float32"]),
        ("values.2", lambda a: a.astype(np.int8), ["values.2 is int8"]),
        ("values.2", lambda a: a[1:].copy(), ["values.2"]),
        ("contexts.5", element(-2), ["contexts.5", "-2"]),
        ("contexts.5", element(LARGEST + 1), ["contexts.5", str(LARGEST + 1)]),
        ("tokens.1", element(-2), ["tokens.1", "-2"]),
        ("tokens.1", element(LARGEST + 1), ["tokens.1", str(LARGEST + 1)]),
        ("weights.1", element(np.nan, 0), ["weights.1"]),
        ("weights.4", element(np.inf, 4), ["weights.4"]),
        ("weights.4", lambda a: a[1:].copy(), ["weights.4"]),
        ("weights.3", lambda a: a.astype(np.float32), ["weights.3 is float32"]),
    ],
)
def test_contents_that_make_no_sense_are_refused_though_the_checksum_is_right(path, name, value, words):
    refused(path, rewritten(put(name, value)), *words)


def test_rewriting_alone_does_no_harm(path):
    path.write_bytes(rewritten(lambda arrays, metadata: None))
    assert same(filled(), Memory.load(path))


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"none.*No such file.*lade warm"):
        Memory.load(tmp_path / "none")
    with pytest.raises(InputError, match="directory"):
        Memory.load(tmp_path)


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


def test_a_file_is_tied_to_its_tokenizer(path):
    memory = filled()
    memory.save(path, ONE)
    assert memory.fingerprint == memory_file.fingerprint_of(ONE)
    for tokenizer in (ONE, None):
        assert Memory.load(path, tokenizer=tokenizer).fingerprint == memory.fingerprint
    with pytest.raises(InputError) as caught:
        Memory.load(path, tokenizer=OTHER)
    for word in (memory.fingerprint[:8], memory_file.fingerprint_of(OTHER)[:8], "lade warm", str(path)):
        assert word in str(caught.value)


def test_a_memory_remembers_its_tokenizer(path):
    filled().save(path, ONE)
    loaded = Memory.load(path)
    loaded.save(path)
    assert Memory.load(path).fingerprint == memory_file.fingerprint_of(ONE)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        loaded.save(path, OTHER)
    assert memory_file.fingerprint_of(ONE)[:8] in str(caught.value)
    assert memory_file.fingerprint_of(OTHER)[:8] in str(caught.value)
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


def test_a_failed_save_ties_nothing(tmp_path):
    memory = filled()
    with pytest.raises(InputError):
        memory.save(tmp_path / "no" / "folder", ONE)
    assert memory.fingerprint is None


# Writing


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(path, monkeypatch, failing, problem):
    filled(1).save(path)
    before = path.read_bytes()

    def fail(*arguments):
        raise problem

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(InputError if isinstance(problem, OSError) else KeyboardInterrupt) as caught:
        filled(2).save(path)
    if isinstance(problem, OSError):
        assert "No space left" in str(caught.value) and repr(str(path)) in str(caught.value)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_paths_that_cannot_be_written(tmp_path):
    memory = filled()
    with pytest.raises(InputError, match="regular file"):
        memory.save(tmp_path)
    with pytest.raises(InputError, match=r"no/folder.*No such file"):
        memory.save(tmp_path / "no" / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        memory.save(tmp_path / "file" / "m")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(LadeError):
        memory.save("/dev/null")


def test_a_new_file_is_its_owners_and_an_old_one_keeps_its_permissions(path, tmp_path):
    filled(1).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(path)
    filled(2).save(link)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert link.is_symlink() and same(filled(2), Memory.load(path)), "a link leads to the same file afterwards"


def test_saving_waits_until_what_is_being_learned_is_learned(path):
    memory = filled()
    saving = threading.Thread(target=memory.save, args=[path])
    with memory._writing:
        saving.start()
        saving.join(0.2)
        assert not path.exists()
    saving.join()
    assert same(memory, Memory.load(path))


def test_saving_while_others_learn_is_a_snapshot(path):
    """Each learned batch is in a file whole or not at all."""
    memory, done = Memory(2**24), threading.Event()
    batch = 16

    def learn():
        rng = np.random.default_rng(0)
        while not done.is_set():
            texts = rng.integers(0, 2000, (batch, 5)).tolist()
            rows = Readout(np.zeros((batch, WIDTH), np.int32), np.zeros((batch, WIDTH), np.uint8))
            memory.learn([context_of(text) for text in texts], rows)

    threads = [threading.Thread(target=learn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            memory.save(path)
            assert len(keys(Memory.load(path))[-1]) % batch == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_the_container_is_one_that_others_can_read(path):
    memory = filled()
    memory.save(path, ONE)
    whole = path.read_bytes()
    arrays = container.load(whole)
    assert {name.split(".")[0] for name in arrays} == {"contexts", "tokens", "values", "weights"}
    rows = arrays["tokens.1"], arrays["values.1"]
    for token, ids, values in zip(arrays["contexts.1"][:, 0].tolist(), *rows, strict=True):
        (row, *_) = memory.lookup(context_of([token]))
        assert row == (values.astype(int) << 21 | ids & (1 << 21) - 1).astype("<i4").tobytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    metadata = json.loads(whole[8:end])["__metadata__"]
    assert metadata["format"] == "lade.memory" and metadata["version"] == "1"
    assert metadata["library"] == lade.__version__ and metadata["tokenizer"] == memory.fingerprint
    digest = metadata["sha256"].encode()
    assert hashlib.sha256(whole.replace(digest, b"0" * 64)).hexdigest().encode() == digest
