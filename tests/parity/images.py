"""Prompts with images for the tiny multimodal models, as their processors make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from multimodal import END, IMAGE, START, Multimodal, text

Arguments = dict[str, Any]
SIDE = 16
Size = tuple[int, int]
"""Patches of an image, high and wide; those of 4 by 4 are all that some models take."""
SQUARE: Size = (4, 4)


def _noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _of_squares(sizes: Sequence[Size], seed: int) -> Arguments:
    return {"pixel_values": _noise(len(sizes), 3, SIDE, SIDE, seed=seed)}


def _of_mistral(sizes: Sequence[Size], seed: int) -> Arguments:
    """Smaller images are padded to the largest one, and masked."""
    pixels = torch.zeros(len(sizes), 3, SIDE, SIDE, dtype=torch.float64)
    for number, (high, wide) in enumerate(sizes):
        pixels[number, :, : 4 * high, : 4 * wide] = _noise(3, 4 * high, 4 * wide, seed=seed + number)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([(4 * high, 4 * wide) for high, wide in sizes])}


def _of_gemma4(sizes: Sequence[Size], seed: int) -> Arguments:
    places = [[(x, y) for y in range(wide) for x in range(high)] for high, wide in sizes]
    longest = max(map(len, places))
    positions = torch.tensor([place + [(-1, -1)] * (longest - len(place)) for place in places])
    return {"pixel_values": _noise(len(sizes), longest, 48, seed=seed).sigmoid(), "image_position_ids": positions}


def _of_grid(depth: int) -> Callable[[Sequence[Size], int], Arguments]:
    def make(sizes: Sequence[Size], seed: int) -> Arguments:
        patches = sum(high * wide for high, wide in sizes)
        return {
            "pixel_values": _noise(patches, 3 * depth * 4 * 4, seed=seed),
            "image_grid_thw": torch.tensor([(1, high, wide) for high, wide in sizes]),
        }

    return make


def _of_tiles(sizes: Sequence[Size], seed: int) -> Arguments:
    """An image, and itself as a single tile."""
    pixels = _noise(len(sizes), 2, 3, SIDE, SIDE, seed=seed)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([(SIDE, SIDE)] * len(sizes))}


QWEN = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5")
MAKERS: dict[str, Callable[[Sequence[Size], int], Arguments]] = {
    **dict.fromkeys((*QWEN, "Glm4v"), _of_grid(2)),
    "Ernie4_5_VLMoe": _of_grid(1),
    "Gemma4": _of_gemma4,
    "Mistral3": _of_mistral,
    "VideoLlava": lambda sizes, seed: {"pixel_values_images": _noise(len(sizes), 3, SIDE, SIDE, seed=seed)},
    **dict.fromkeys(("LlavaNext", "LlavaOnevision"), _of_tiles),
}
PER_ROW = frozenset({"SmolVLM", "Idefics3"})
"""They take the images of each prompt by themselves, as many for each."""
OF_SEVERAL_SIZES = frozenset({*QWEN, "Glm4v", "Ernie4_5_VLMoe", "Mistral3", "Gemma4"})
PLACEHOLDERS = {"DeepseekVL": 16, "LlavaNext": 10, "LlavaOnevision": 36}
"""Of an image; where it is no fourth of its patches."""


def _placeholders(case: Multimodal, size: Size) -> list[int]:
    count = PLACEHOLDERS.get(case.kind, size[0] * size[1] // 4)
    return [START, *[IMAGE] * count, END]


def prompt(case: Multimodal, images: Sequence[Size] = (SQUARE,), *, seed: int = 0) -> Arguments:
    """The arguments of `generate` for a prompt with these images, text before, between and after them."""
    return batch(case, [images], seed=seed)


def batch(case: Multimodal, rows: Sequence[Sequence[Size]], *, seed: int = 0) -> Arguments:
    """The same for several prompts, given the images of each; the shorter ones are padded on the left."""
    texts = [_ids(case, images, seed + number) for number, images in enumerate(rows)]
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids in texts])
    images = [size for row in rows for size in row]
    arguments = MAKERS.get(case.kind, _of_squares)(images, seed) if images else {}
    if case.kind in PER_ROW and images:
        arguments = {name: it.view(len(rows), -1, *it.shape[1:]) for name, it in arguments.items()}
    if case.dtype is torch.float32:
        arguments = {name: it.float() if it.is_floating_point() else it for name, it in arguments.items()}
    mask = {"attention_mask": (ids != 0).long()} if len(rows) > 1 else {}
    return {"input_ids": ids, **mask, **_kinds(case, ids), **arguments}


def _ids(case: Multimodal, images: Sequence[Size], seed: int) -> list[int]:
    ids: list[int] = text(6, seed=seed)[0].tolist()
    for number, size in enumerate(images):
        ids += [*_placeholders(case, size), *text(3 + number, seed=seed + 1)[0].tolist()]
    return ids


def _kinds(case: Multimodal, input_ids: torch.Tensor) -> Arguments:
    """What the processor says of each token: 1 for those of images."""
    kinds = (input_ids == IMAGE).long()
    if case.kind == "Gemma3":
        return {"token_type_ids": kinds}
    if case.kind == "Ernie4_5_VLMoe":
        return {"mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds}
    return {"mm_token_type_ids": kinds} if case.kind in (*QWEN, "Glm4v", "Gemma4") else {}


def without_image(arguments: Arguments) -> Arguments:
    """The text alone, placeholders included, which are embedded like other tokens then."""
    return {name: arguments[name] for name in ("input_ids", "attention_mask") if name in arguments}
