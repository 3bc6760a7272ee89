"""Time of a product of a few rows with a packed weight, beside reading that weight once.

    python lab/experiments/product_cost.py [--shape 6080x768 --shape 768x6080] [--rows 1 --rows 8]

Of each shape there are so many weights that a core's cache holds none of them, and all are multiplied in turn. "Own"
products, of weights in panels, are those in tiles or by dot products, whichever the processor has; the others are
oneDNN's. A shape with the outputs of several layers says what one product in place of theirs would take.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from lade.backends.cpu.packing.integers import int4_codes, int8_codes
from lade.backends.cpu.packing.panel_products import panel_for, panel_product
from lade.backends.cpu.packing.panel_weight import PanelWeight, has_block_kernels
from lade.backends.cpu.packing.panels import in_panels
from lade.backends.cpu.packing.weight import HugePages, packed_weight

BYTES = 200e6
"""Bytes of all weights of a shape, in 16 bits."""
GIB = 2**30
MOST_ROWS = 512
Product = Callable[[int], object]


def in_own_dtype(outputs: int, inputs: int, count: int, dtype: torch.dtype) -> Product:
    """All products with weights of this dtype, of as many rows as it is called with."""
    linear = torch.ops.mkldnn._linear_pointwise
    weights = [packed_weight(torch.randn(outputs, inputs).to(dtype)) for _ in range(count)]
    x = torch.randn(MOST_ROWS, inputs).to(dtype)
    return lambda rows: [linear(x[:rows], weight, None, "none", [], "") for weight in weights]


def own_in_integers(outputs: int, inputs: int, count: int, rounded: Callable[[torch.Tensor], Any]) -> Product:
    """The same by products of our own, in int8 or int4."""
    pages, x, codes = HugePages(), torch.randn(MOST_ROWS, inputs), rounded(torch.randn(outputs, inputs))
    weights = [codes.in_panels(pages) for _ in range(count)]
    return lambda rows: [weight.product(x[:rows]) for weight in weights]


def own_in_bfloat16(outputs: int, inputs: int, count: int) -> Product:
    """The same in bfloat16."""
    pages, x = HugePages(), torch.randn(MOST_ROWS, inputs).bfloat16()
    panel = panel_for(torch.bfloat16)
    panels = [in_panels(torch.randn(outputs, inputs).bfloat16(), pages, panel) for _ in range(count)]
    weights = [PanelWeight(each, outputs, inputs) for each in panels]
    return lambda rows: [panel_product(x[:rows], weight, None) for weight in weights]


def arms_of(outputs: int, inputs: int, count: int) -> dict[str, tuple[float, Product]]:
    """Bytes of a weight, and its products, as far as there are any here."""
    arms: dict[str, tuple[float, Product]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        with suppress(RuntimeError):  # oneDNN has none for this processor
            arms[str(dtype)[6:]] = dtype.itemsize, in_own_dtype(outputs, inputs, count, dtype)
    if panel_for(torch.bfloat16):
        arms["bfloat16, own"] = 2, own_in_bfloat16(outputs, inputs, count)
    if has_block_kernels():
        arms["int8, own"] = 17 / 16, own_in_integers(outputs, inputs, count, int8_codes)
        arms["int4, own"] = 9 / 16, own_in_integers(outputs, inputs, count, int4_codes)
    return arms


def bandwidth() -> float:
    """Bytes per second at which memory is read."""
    block, taken = torch.ones(GIB // 4), list[float]()
    for _ in range(5):
        start = perf_counter()
        block.sum()
        taken.append(perf_counter() - start)
    return block.nbytes / min(taken)


@torch.no_grad()
def main(
    shape: Annotated[list[str] | None, typer.Option(help="outputs x inputs; may be repeated")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="rows of a product, 512 at most; may be repeated")] = None,
    rounds: int = 9,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    speed, sizes = bandwidth(), rows or [1, 4, 8, 16, 32]
    print(f"memory: {speed / 1e9:.1f} GB/s; us a product, median (least), for {sizes} rows")
    for text in shape or ["6080x768", "768x6080", "2048x2048"]:
        outputs, inputs = map(int, text.split("x"))
        count = round(BYTES / (2 * outputs * inputs))
        arms = arms_of(outputs, inputs, count)
        taken: dict[tuple[str, int], list[float]] = {(arm, size): [] for arm in arms for size in sizes}
        for _ in range(rounds + 1):
            for (arm, size), found in taken.items():
                start = perf_counter()
                arms[arm][1](size)
                found.append(1e6 * (perf_counter() - start) / count)
        for arm, (width, _) in arms.items():
            shown = (f"{median(taken[arm, size][1:]):.0f} ({min(taken[arm, size][1:]):.0f})" for size in sizes)
            floor = 1e6 * width * outputs * inputs / speed
            print(f"{text:10} {arm:14} reading it {floor:4.0f}: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
