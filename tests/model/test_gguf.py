"""GGUF files: models with the file's own values, exact drafts, and files that are damaged or hostile."""

import struct
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_gguf import OWN, SPECIAL, TOKENS, blocks_of, written
from pretend import without
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

import lade
from lade.backends.cpu.invariant.fused import FusedLayer
from lade.backends.cpu.packing import gguf_model as load
from lade.backends.cpu.packing.gguf_file import _KINDS, TensorPlace, codes_of, has_codes, read_header, values_of
from lade.backends.cpu.packing.integers import GgufLinear
from lade.backends.cpu.packing.pack import packed_layers
from lade.errors import InputError, UnsupportedModelError

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="GGUF files need transformers 5.23"
)
IDS = torch.tensor([[30, 41, 52, 63, 41, 52, 7, 80]])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files by architecture and type, each written once."""
    folder, made = tmp_path_factory.mktemp("gguf"), dict[tuple, Path]()

    def of(architecture="llama", kind="Q4_K", **more):
        key = architecture, kind, *sorted(more.items())
        if key not in made:
            made[key] = written(folder / f"{len(made)}.gguf", architecture, kind, more)
        return made[key]

    return of


def dequantised(path: Path):
    """The model as transformers loads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def in_float32(path: Path):
    return lade.load_gguf(path, dtype=torch.float32)[0]


# Values


@pytest.mark.parametrize("kind", _KINDS)
def test_codes_stand_for_the_values_of_the_file(kind):
    raw = torch.from_numpy(blocks_of(kind, (40, 768), np.random.default_rng(1)))
    expected = values_of(raw, TensorPlace("", (40, 768), kind, 0, raw.numel()))
    assert torch.equal(codes_of(raw, kind).dense(torch.float32), expected) and expected.abs().max() < 0.3
    assert not has_codes("Q2_K")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", _KINDS)
def test_weights_and_logits_are_those_of_the_dequantised_model(kind, files):
    assert_is_dequantised(files("llama", kind))


@pytest.mark.parametrize("architecture", OWN)
def test_each_architecture_has_the_weights_of_the_dequantised_model(architecture, files):
    """As in files that are mixed: values in Q6_K, some matrices in Q8_0."""
    path = files(architecture, "Q4_K", attn_v="Q6_K", token_embd="Q8_0", ffn_down="Q6_K")
    assert_is_dequantised(path)
    config = load.config_of(read_header(path)).to_dict()
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    assert {name for name in theirs if config.get(name) != theirs[name]} <= {"_name_or_path", "_model_name_or_path"} | {
        "unk_token_id", "pad_token_id", "quantization_config", "torch_dtype", "dtype",
    }  # fmt: skip


@torch.no_grad()
def assert_is_dequantised(path: Path) -> None:
    model, theirs = in_float32(path), dequantised(path)
    own, expected = model.state_dict(), theirs.state_dict()
    assert own.keys() == expected.keys()
    assert [name for name in own if not torch.equal(own[name], expected[name])] == []
    assert any(isinstance(module, GgufLinear) for module in model.modules())
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    ids = torch.arange(1, 41)[None]
    found, logits = model(ids).logits, theirs(ids).logits
    assert (found - logits).norm() < 0.05 * logits.norm()


def test_types_without_a_kernel_are_dequantised_and_named(files, caplog):
    path = files("llama", "Q8_0", ffn_down="BF16", attn_q="F16")
    with caplog.at_level("INFO"):
        model = in_float32(path)
    expected = dequantised(path).state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    assert "dequantised to torch.float32: 2 in F16, 2 in BF16" in caplog.text
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_other_architectures_are_dequantised_whole(files, caplog):
    with caplog.at_level("INFO"):
        model = in_float32(files("gemma2", "Q8_0"))
    assert "weights of gemma2 are dequantised to torch.float32" in caplog.text and packed_layers(model) == 0
    expected = dequantised(files("gemma2", "Q8_0")).state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    found = lade.generate(lade.invariant(model), input_ids=IDS, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, model.generate(IDS, max_new_tokens=20, do_sample=False))


def test_the_frequencies_of_llama_3_are_used(tmp_path):
    factors = np.linspace(1, 8, 32).astype(np.float32)
    path = written(tmp_path / "m.gguf", "llama", "Q8_0", values={"rope_freqs.weight": factors})
    model, theirs = in_float32(path), dequantised(path)
    rotary = theirs.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / torch.from_numpy(factors)
    assert torch.equal(model.model.rotary_emb.inv_freq, rotary.inv_freq)
    ids = torch.arange(1, 201)[None]
    found, logits = (each(ids).logits for each in (model, theirs))
    assert (found - logits).norm() < 0.05 * logits.norm()


def test_what_a_model_does_not_use_is_an_error_or_named(tmp_path, caplog):
    one = np.ones(256, np.float32)
    path = written(tmp_path / "m.gguf", "llama", "Q8_0", values={"blk.1.attn_q.bias": one})
    assert_refused(path, "its llama has no place for tensor 'blk.1.attn_q.bias'")
    path = written(tmp_path / "m.gguf", "llama", "Q8_0", values={"rope_factors_long.weight": one})
    lade.load_gguf(path)
    assert "not used, so long texts may suffer: rope_factors_long.weight" in caplog.text


def test_tokenizer_template_and_stops_are_the_files(files):
    model, tokenizer = lade.load_gguf(files().parent / files().name)
    assert tokenizer.vocab_size == len(TOKENS) and tokenizer.eos_token == "<|end|>" and model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer("the thé the")["input_ids"]) == "the thé the"
    given = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert given == "<|start|>user\nthe<|end|>\n<|start|>"
    assert tokenizer(given)["input_ids"][0] == SPECIAL.index("<|start|>")
    assert model.generation_config.eos_token_id == [2] and model.generation_config.pad_token_id == 2


# Drafts


@pytest.mark.parametrize(
    ("architecture", "dtype"), list(zip(OWN, cycle([torch.bfloat16, torch.float32]), strict=False)), ids=str
)
def test_lookahead_writes_the_tokens_of_plain_decoding(architecture, dtype, files):
    path = files(architecture, "Q4_K", attn_v="Q6_K", token_embd="Q8_0", ffn_down="Q6_K")
    model = lade.invariant(lade.load_gguf(path, dtype=dtype)[0])
    if architecture in ("llama", "qwen2", "qwen3"):
        assert isinstance(model.model.layers[0], FusedLayer), "matrices of several types are one call"
    for arguments in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        given = {"input_ids": IDS, "max_new_tokens": 18, "eos_token_id": None, **arguments}
        texts = []
        for lookahead in (None, lade.LookaheadConfig(4, 3, 4), lade.LookaheadConfig(budget=16)):
            torch.manual_seed(7)
            plain = lookahead is None
            texts.append(model.generate(**given) if plain else lade.generate(model, lookahead=lookahead, **given))
        assert torch.equal(texts[1], texts[0]) and torch.equal(texts[2], texts[0])


def test_a_model_of_a_file_is_not_packed_or_saved_again(files, tmp_path):
    model = in_float32(files())
    parts = list(model.modules())[1:]
    assert list(lade.pack(model, weights="int8", min_weights=1).modules())[2:] == parts[1:]
    with pytest.raises(UnsupportedModelError, match="GGUF file; keep that file"):
        lade.save_packed(model, tmp_path)
    with pytest.raises(UnsupportedModelError, match="not kept"):
        lade.unpack(model)


# Files that are not what they say


def assert_refused(path: Path, match: str = "model file") -> None:
    with pytest.raises(InputError, match=match) as refusal:
        lade.load_gguf(path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def value_place(data: bytes, key: str) -> int:
    """Where the value of a key begins, after its type."""
    return data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4


def changed(path: Path, target: Path, place: int, new: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[place : place + len(new)] = new
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("count", [2**63, 2**40, 10**6])
@pytest.mark.parametrize(("place", "what"), [(8, "tensors"), (16, "values")])
def test_counts_are_compared_with_the_size_of_the_file(place, what, count, files, tmp_path):
    assert_refused(
        changed(files(), tmp_path / "m.gguf", place, struct.pack("<Q", count)), "are left|does not exist|bytes"
    )


@pytest.mark.parametrize("length", [2**64 - 1, 2**62, 2**31, 2**20 + 1])
def test_lengths_of_strings_and_arrays_are_compared_with_what_is_left(length, files, tmp_path):
    path, data = files(), files().read_bytes()
    long = struct.pack("<Q", length)
    assert_refused(changed(path, tmp_path / "m.gguf", 24, long), "a string at byte 32 has|needs")
    for key, skipped in (("tokenizer.chat_template", 0), ("tokenizer.ggml.tokens", 4), ("tokenizer.ggml.tokens", 12)):
        assert_refused(changed(path, tmp_path / "m.gguf", value_place(data, key) + skipped, long), "damaged")
    assert_refused(
        changed(path, tmp_path / "m.gguf", value_place(data, "tokenizer.ggml.token_type") + 4, long), "damaged"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**32 - 1),
        ("llama.block_count", 10**6),
        ("llama.block_count", 0),
        ("llama.block_count", 1),
        ("llama.rope.dimension_count", 2**31),
        ("llama.attention.head_count", 2**30),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.embedding_length", 64),
        ("llama.feed_forward_length", 513),
        ("tokenizer.ggml.eos_token_id", 2**31),
    ],
)
def test_numbers_that_do_not_fit_the_tensors_are_refused(key, value, files, tmp_path):
    place = value_place(files().read_bytes(), key)
    assert_refused(changed(files(), tmp_path / "m.gguf", place, struct.pack("<I", value)))


def test_tensors_lie_within_the_file_and_fill_their_blocks(files, tmp_path):
    path, data = files(), files().read_bytes()
    name = b"blk.1.ffn_up.weight"
    place = data.index(name) + len(name)  # dimensions, sizes, type, offset
    for skipped, new, match in (
        (0, struct.pack("<I", 0), "0 dimensions"),
        (0, struct.pack("<I", 2**32 - 1), "4294967295 dimensions"),
        (4, struct.pack("<Q", 2**63), "has the shape"),
        (4, struct.pack("<Q", 255), "does not fit"),
        (12, struct.pack("<Q", 0), "has the shape"),
        (12, struct.pack("<Q", 2**30), "does not lie within"),
        (20, struct.pack("<I", 77), "unknown"),
        (24, struct.pack("<Q", 2**63), "does not lie within"),
        (24, struct.pack("<Q", 32 * 10**6), "does not lie within"),
        (24, struct.pack("<Q", 33), "does not lie within"),
    ):
        assert_refused(changed(path, tmp_path / "m.gguf", place + skipped, new), match)
    again = data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")
    (tmp_path / "m.gguf").write_bytes(again)
    assert_refused(tmp_path / "m.gguf", "is there twice")


def test_other_files_are_told_apart(files, tmp_path):
    data, target = files().read_bytes(), tmp_path / "m.gguf"
    for content, match in (
        (b"", "does not begin with GGUF"),
        (b"GGUF", "needs"),
        (b"PK\x03\x04" + data[4:], "does not begin with GGUF"),
        (data[:4] + struct.pack(">I", 3) + data[8:], "version is 50331648"),
        (data[: len(data) // 2], "may not be wholly downloaded"),
        (data.replace(b"general.architecture", b"general.architectura"), "no general.architecture"),
        (data.replace(b"made", b"\xff\xfe\xfd\xfc"), "not UTF-8"),
        (data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"), "the file lacks it"),
        (data.replace(b"token_embd.weight", b"token_embx.weight"), "token_embd"),
    ):
        target.write_bytes(content)
        assert_refused(target, match)
    assert_refused(tmp_path / "none.gguf", "neither a GGUF file nor a folder with one")
    assert_refused(tmp_path.parent, "neither a GGUF file nor a folder with one")


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_bytes_of_a_header_are_changed_one_line_says_so(data, files, tmp_path):
    path = files("llama", "Q8_0")
    first = min(each.offset for each in read_header(path).tensors.values())
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, first - 1))] = data.draw(st.integers(0, 255))
    target = tmp_path / "changed.gguf"
    target.write_bytes(content)
    try:
        lade.load_gguf(target)
    except InputError as refusal:
        assert "\n" not in str(refusal)


def test_without_the_package_one_line_says_what_to_install(files, monkeypatch):
    path = files()
    without(monkeypatch, "gguf")
    assert_refused(path, r"GGUF files need gguf \(.*\): run  pip install gguf")
