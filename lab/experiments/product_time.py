"""Time of matrix products with packed weights, alone and in the passes of a model as it is and invariant.

    python lab/experiments/product_time.py alone [--shape 6080x768 --shape 768x6080] [--rows 1 --rows 8]
    python lab/experiments/product_time.py invariant --model stories3M-hf --inflate 500e6 --threads 2

"alone": of each shape there are so many weights that a core's cache holds none of them, and all are multiplied in turn.
"Own" products, of weights in panels, are those in tiles or by dot products, whichever the processor has; the others are
oneDNN's. A shape with the outputs of several layers says what one product in place of theirs would take.

"invariant": passes over one token and over a tree of sixteen behind 512 cached tokens, over one token behind 1,500, and
a prefill of 500 tokens. Rounds alternate between the packed model as it is and the same one invariant; milliseconds are
medians, with the least in brackets, which a busy machine disturbs less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import lade
from lade.backends.cpu.packing.integers import int4_codes, int8_codes
from lade.backends.cpu.packing.panel_products import panel_for, panel_product
from lade.backends.cpu.packing.weight import HugePages, PanelWeight, has_block_kernels, in_panels, packed_weight
from lade.decoding.tree import TokenTree
from lade.model.runner import EagerRunner
from lade.model.supports import supports

app = typer.Typer(add_completion=False)
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


@app.command()
@torch.no_grad()
def alone(
    shape: Annotated[list[str] | None, typer.Option(help="outputs x inputs; may be repeated")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="rows of a product, 512 at most; may be repeated")] = None,
    rounds: int = 9,
    threads: int = 1,
) -> None:
    """Time of a product of a few rows, beside reading its weight once."""
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


def tree_passes(model: Any, cached: int, sizes: Sequence[int]) -> list[Callable[[], None]]:
    """Passes over trees of so many nodes behind a text of so many tokens."""
    runner = EagerRunner(model, supports(model).require(), model.generation_config)
    text = torch.randint(1, model.config.vocab_size, (cached,)).tolist()
    cache = runner.tree_cache()
    runner.prefill([text], cache)

    def run(tree: TokenTree) -> None:
        runner.forward([tree], [[*text, 1]], cache)
        cache.keep([[]], fed=len(tree))

    return [partial(run, tree_of(nodes)) for nodes in sizes]


def tree_of(nodes: int) -> TokenTree:
    """A binary tree."""
    tree = TokenTree(1)
    for node in range(1, nodes):
        tree.add((node - 1) // 2, node + 1, "pool")
    return tree


def prefill(model: Any, tokens: int) -> Callable[[], Any]:
    """A prompt of so many tokens."""
    runner = EagerRunner(model, supports(model).require(), model.generation_config)
    text = torch.randint(1, model.config.vocab_size, (tokens,)).tolist()
    return lambda: runner.prefill([text], runner.tree_cache())


def cases(model: Any) -> dict[str, Callable[[], Any]]:
    """Return the timed calls by name."""
    lone, tree = tree_passes(model, 512, (1, 16))
    (far,) = tree_passes(model, 1500, (1,))
    return {
        "one token, 512 cached": lone,
        "16 tokens, 512 cached": tree,
        "one token, 1,500 cached": far,
        "prefill of 500": prefill(model, 500),
    }


@app.command()
@torch.no_grad()
def invariant(
    model: Annotated[str, typer.Option(help="A checkpoint.")],
    params: Annotated[float, typer.Option("--inflate", help="Parameters to inflate it to.")] = 500e6,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    threads: Annotated[int, typer.Option()] = 2,
    rounds: Annotated[int, typer.Option(help="Of which the first warms up.")] = 9,
    seconds: Annotated[float, typer.Option(help="Begin no further round after this time, but for the third.")] = 1e9,
) -> None:
    """Time of passes of a packed model, as it is and invariant."""
    begun = perf_counter()
    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    inflated = lade.pack(lade.bench.inflate(loaded, params, dtype=getattr(torch, dtype)))
    inflated.config.max_position_embeddings = 4096
    copied = copy.deepcopy(inflated)
    start = perf_counter()
    lade.invariant(copied)
    print(f"trials: {perf_counter() - start:.1f} s", flush=True)
    known = {False: cases(inflated), True: cases(copied)}
    samples: dict[tuple[str, bool], list[float]] = {}
    for number in range(rounds):
        if number > 2 and perf_counter() - begun > seconds:
            break
        for name in known[True]:
            for made, runs in known.items():
                start = perf_counter()
                runs[name]()
                samples.setdefault((name, made), []).append(1e3 * (perf_counter() - start))
    for name in known[True]:
        taken = [samples[name, made][1:] for made in (False, True)]
        columns = "".join(f"{median(each):9.1f} ({min(each):.1f})" for each in taken)
        more = (100 * (statistic(taken[1]) / statistic(taken[0]) - 1) for statistic in (median, min))
        print(f"{name:24}{columns} ms  " + "{:+.1f} % ({:+.1f} %)".format(*more))


if __name__ == "__main__":
    app()
