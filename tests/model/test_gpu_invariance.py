"""Attention in tiles at fixed positions: a query's bits depend on the keys on its path alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from exact_products import exact_dots
from pretend import own_kernel_cache
from trees import tree_of

from lade.decoding.tree import TokenTree

triton = pytest.importorskip("triton", reason="Triton is not installed: make test-kernel")
attention: ModuleType = pytest.importorskip("lade.backends.cuda_graphs.invariant.attention")
kernel: ModuleType = pytest.importorskip("lade.backends.cuda_graphs.invariant.kernel")
Places, attend = attention.Places, attention.attend

INTERPRETED = not isinstance(kernel.attend_span, triton.runtime.JITFunction)
NO_CUDA = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
NOT_INTERPRETED = pytest.mark.skipif(not INTERPRETED, reason="compiled code needs a GPU: make test-kernel")
DEVICES = [pytest.param("cpu", marks=NOT_INTERPRETED), pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
BOUNDS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16] if INTERPRETED else list(BOUNDS)
BORDERS = (63, 64, 65, 127, 128, 129, 255, 256, 257)
SCALE, HEADS, KV_HEADS, DIM = 0.3, 4, 2, 16


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if INTERPRETED:
        exact_dots(monkeypatch)
    return torch.device(request.param)


class Text:
    """Queries, keys and values of B rows of text, each followed by a tree."""

    def __init__(self, trees: list[TokenTree], lengths: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.trees, self.lengths, self.device = trees, lengths, device
        self.step, generator = max(map(len, trees)), torch.Generator().manual_seed(0)
        slots = max(lengths) + self.step
        self.query = torch.randn(len(trees), self.step, HEADS, DIM, generator=generator).to(device, dtype)
        states = torch.randn(2, len(trees), KV_HEADS, slots, DIM, generator=generator).to(device, dtype)
        self.keys, self.values = states

    def of_trees(self, padding: int = 0, window: int = 0) -> torch.Tensor:
        """All nodes, as captured passes feed them, beside `padding` more slots."""
        closure = torch.zeros(len(self.trees), self.step, self.step, dtype=torch.bool)
        positions = torch.tensor(self.lengths)[:, None].repeat(1, self.step)
        for row, tree in enumerate(self.trees):
            closure[row, : len(tree), : len(tree)] = torch.from_numpy(tree.closure())
            closure[row, len(tree) :, 0] = True
            positions[row, : len(tree)] += torch.tensor(tree.depths)
        keys, values = (torch.nn.functional.pad(each, (0, 0, 0, padding)) for each in (self.keys, self.values))
        tensors = [each.to(self.device) for each in (closure, positions, torch.tensor(self.lengths))]
        places = Places.of_trees(*tensors, torch.zeros_like(tensors[2]), keys.shape[2])
        return attend(self.query, keys, values, places.within(window), scale=SCALE)

    def path(self, row: int, node: int) -> list[int]:
        """Slots of the text and of the node's path."""
        length = self.lengths[row]
        return [*range(length), *(length + int(each) for each in np.flatnonzero(self.trees[row].closure()[node]))]

    def alone(self, row: int, node: int, window: int = 0) -> torch.Tensor:
        """A node as the last token of its text, as plain decoding feeds it."""
        path = self.path(row, node)
        places = Places.of_text(torch.tensor([[len(path) - 1]], device=self.device), len(path)).within(window)
        keys, values = (each[row : row + 1, :, path] for each in (self.keys, self.values))
        return attend(self.query[row : row + 1, node : node + 1], keys, values, places, scale=SCALE)[0, 0]

    def expected(self, row: int, node: int, window: int = 0) -> torch.Tensor:
        """The same in double precision, `[H, D]`."""
        path = self.path(row, node)[-window:]
        keys, values = (
            each[row, :, path].double().repeat_interleave(HEADS // KV_HEADS, 0) for each in (self.keys, self.values)
        )
        scores = torch.einsum("hd,hkd->hk", self.query[row, node].double(), keys) * SCALE
        return torch.einsum("hk,hkd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", BORDERS)
def test_a_node_has_the_bits_of_its_path_alone(length, dtype, window, device):
    tree = tree_of([0, 1, 0, 3, 1])
    text = Text([tree], [length], dtype, device)
    found = text.of_trees(window=window)[0]
    for node in range(len(tree)):
        assert torch.equal(found[node], text.alone(0, node, window)), node
        assert (found[node].double() - text.expected(0, node, window)).abs().max() < BOUNDS[dtype]


@pytest.mark.parametrize("length", [62, 126, 254])
def test_a_chain_has_the_bits_of_a_prompt_and_of_single_tokens(length, device):
    chain = tree_of(list(range(5)))  # crosses a border
    text = Text([chain], [length], DTYPES[-1], device)
    found = text.of_trees()
    positions = length + torch.arange(len(chain), device=device)[None]
    prompt = attend(text.query, text.keys, text.values, Places.of_text(positions, length + len(chain)), scale=SCALE)
    assert torch.equal(found, prompt)
    assert all(torch.equal(found[0, node], text.alone(0, node)) for node in range(len(chain)))


def test_company_and_padding_change_no_bit(device):
    trees, lengths = [tree_of([0, 0, 1, 3]), tree_of([0, 1])], [130, 61]
    text = Text(trees, lengths, DTYPES[-1], device)
    found = text.of_trees()
    assert torch.equal(found, text.of_trees(padding=300))
    for row, tree in enumerate(trees):
        for node in range(len(tree)):
            assert torch.equal(found[row, node], text.alone(row, node))


@pytest.mark.parametrize(("length", "window"), [(61, 0), (130, 0), (130, 70), (300, 40)])
def test_masks_tell_where_the_keys_are(length, window, device):
    """As transformers gives them: a row with padding on the left, and a tree; then keys that a window has dropped."""
    tree = tree_of([0, 1, 0, 3])
    text = Text([tree], [length], DTYPES[-1], device)
    expected, padding, dropped = text.of_trees(window=window), 3, max(0, length - window) // 2 if window else 0
    allowed = torch.zeros(1, len(tree), padding + length + len(tree), dtype=torch.bool)
    for node in range(len(tree)):
        allowed[0, node, [padding + slot for slot in text.path(0, node)[-window:]]] = True
    keys, values = (
        torch.nn.functional.pad(each, (0, 0, padding, 0))[:, :, dropped:] for each in (text.keys, text.values)
    )
    positions = (length + torch.tensor(tree.depths))[None].to(device)
    places = Places.of_mask(positions, allowed[..., dropped:].to(device))
    assert torch.equal(attend(text.query, keys, values, places, scale=SCALE), expected)
    if window:  # one token, of which the mask is left out where all keys that are left are seen
        seen = text.path(0, 1)[-window:]
        last = Places.of_text(positions[:, 1:2], len(seen))
        keys, values = (each[:, :, seen] for each in (text.keys, text.values))
        assert torch.equal(attend(text.query[:, 1:2], keys, values, last, scale=SCALE)[:, 0], expected[:, 1])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(20, 1, 24), (3, 3, 8)])
def test_heads_of_other_numbers_and_sizes(heads, kv_heads, dim, device, monkeypatch):
    for name, value in (("HEADS", heads), ("KV_HEADS", kv_heads), ("DIM", dim)):
        monkeypatch.setitem(globals(), name, value)
    text = Text([tree_of([0, 0, 1])], [126], DTYPES[-1], device)
    found = text.of_trees()[0]
    for node in range(4):
        assert torch.equal(found[node], text.alone(0, node)), node
        assert (found[node].double() - text.expected(0, node)).abs().max() < BOUNDS[DTYPES[-1]]


def test_long_prompts_are_attended_in_pieces(device, monkeypatch):
    text = Text([tree_of(list(range(69)))], [0], DTYPES[-1], device)
    places = Places.of_text(torch.arange(70, device=device)[None], 70)
    whole = attend(text.query, text.keys, text.values, places, scale=SCALE)
    monkeypatch.setattr(attention, "MOST_BYTES", 33 * 4 * places.spans * HEADS * DIM)  # 32 at a time
    assert torch.equal(attend(text.query, text.keys, text.values, places, scale=SCALE), whole)


KERNELS: dict[str, dict[str, Any]] = {
    "attend_span": {"KV_HEADS": 8, "GROUP": 4, "QUERIES": 16, "KEYS": 64, "TILES": attention.TILES},
    "merge_spans": {"SPAN": attention.SPAN},
}
POINTERS = dict.fromkeys(("query", "key", "value", "out"), "") | dict.fromkeys(("parts", "tops", "totals"), "fp32")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile(name, dtype, dim, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    own_kernel_cache(monkeypatch, tmp_path)
    function, constants = getattr(kernel, name), KERNELS[name] | {"DIM": dim, "BLOCK": triton.next_power_of_2(dim)}
    names = function.arg_names
    types = {each: f"*{POINTERS[each] or dtype}" for each in names if each in POINTERS}
    types |= dict.fromkeys(set(names) & {"positions", "starts", "shifts", "bases", "paths"}, "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {each: types.get(each, "i32") for each in names}
    aligned = {(names.index(each),): [["tt.divisibility", 16]] for each in names if signature[each][0] == "*"}
    size = constants["BLOCK"] * (4 if dtype == "fp32" else 2)
    warps, stages = (4, 1 if size > 256 else 2) if name == "attend_span" else (1, 3)
    compiled = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False},
    )
    assert compiled.metadata.shared <= 227 * 1024 and compiled.asm["cubin"]
