"""What a product of a few rows with a packed weight takes, beside reading that weight once.

    python scripts/product_cost.py [--shape 6080x768 --shape 768x6080] [--rows 1 --rows 8]

Of each shape there are so many weights that a core's cache holds none of them, and all are multiplied in turn. An int8
product is that of integers alone, without rounding its inputs: by oneDNN, and in tiles where the processor has them. A
shape with the outputs of several layers says what one product in place of theirs would take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer

from lade.model.kernels.tiles import has_tiles
from lade.model.packing.codes import in_form
from lade.model.packing.huge_pages import HugePages
from lade.model.packing.integer_product import multiplied, prepacked
from lade.model.packing.integer_trial import input_dtype
from lade.model.packing.layout import packed_weight
from lade.model.packing.panels import in_panels
from lade.model.packing.tile_codes import coded, multiplied_in_tiles

BYTES = 200e6
"""Of all weights of a shape, in 16 bits."""
GIB = 2**30
MOST_ROWS = 512
Product = Callable[[int], object]


def in_own_dtype(outputs: int, inputs: int, count: int, dtype: torch.dtype) -> Product:
    """All products with weights of this dtype, of as many rows as it is called with."""
    linear = torch.ops.mkldnn._linear_pointwise
    weights = [packed_weight(torch.randn(outputs, inputs).to(dtype)) for _ in range(count)]
    x = torch.randn(MOST_ROWS, inputs).to(dtype)
    return lambda rows: [linear(x[:rows], weight, None, "none", [], "") for weight in weights]


def in_int8(outputs: int, inputs: int, count: int) -> Product:
    """The same in int8."""
    weights = [prepacked(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)) for _ in range(count)]
    scale, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int)
    codes = in_form(torch.randint(1, 256, (MOST_ROWS, inputs), dtype=torch.uint8), input_dtype(inputs, outputs))
    return lambda rows: [multiplied(codes[:rows], weight, scale, zeros) for weight in weights]


def in_tiles(outputs: int, inputs: int, count: int) -> Product:
    """The same in tiles."""
    pages, scale, x = HugePages(), torch.ones(outputs), torch.randn(MOST_ROWS, inputs)
    weights = [in_panels(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), pages) for _ in range(count)]
    given = cache(lambda rows: coded(x[:rows]))

    def product(rows: int) -> None:
        for weight in weights:
            multiplied_in_tiles(*given(rows), weight, scale, None, torch.empty(rows, outputs))

    return product


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
        arms = {
            str(dtype)[6:]: in_own_dtype(outputs, inputs, count, dtype) for dtype in (torch.float32, torch.bfloat16)
        }
        arms["int8"] = in_int8(outputs, inputs, count)
        if has_tiles():
            arms["int8 tiles"] = in_tiles(outputs, inputs, count)
        taken: dict[tuple[str, int], list[float]] = {(arm, size): [] for arm in arms for size in sizes}
        for _ in range(rounds + 1):
            for (arm, size), found in taken.items():
                start = perf_counter()
                arms[arm](size)
                found.append(1e6 * (perf_counter() - start) / count)
        for arm, width in zip(arms, (4, 2, 1, 1), strict=False):
            shown = (f"{median(taken[arm, size][1:]):.0f} ({min(taken[arm, size][1:]):.0f})" for size in sizes)
            floor = 1e6 * width * outputs * inputs / speed
            print(f"{text:10} {arm:10} reading it {floor:4.0f}: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
