"""Time a packed model spends between its matrix products, by part and number of tokens.

    python lab/experiments/between_products.py --model FOLDER --inflate 500e6 [--weights int8 --dtype float32]

A step is what the library makes of one: the inputs, the pass over a tree, the logits read, the path kept. It is timed
as it is, where *between* is the whole less its products, and *alone*, where products give back a tensor made
beforehand, so that caches stay warm; either once more with all parts timed, where what modelling code does itself
(residuals, reshapes) and Python are *the rest*. Rounds take all sizes in turn; numbers are medians, in ms.

Layers that an invariant model makes in few calls are timed first, as they are and apart, arm by arm in turn; then they
are taken apart, since their products cannot be told from what is between.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lade
from lade.backends.cpu.invariant.fused import Fused, FusedLayer
from lade.backends.cpu.packing.linear import PackedLinear
from lade.decoding.readout import read
from lade.decoding.tree import TokenTree
from lade.model.runner import EagerRunner
from lade.model.supports import supports
from lade_lab.inflation import inflate

SIZES = (1, 8, 16)
PRODUCTS = "products"
ROTARY = "apply_rotary_pos_emb"
Wrapper = Callable[[Callable[..., Any], str], Callable[..., Any]]


class Parts:
    """The functions that a step's parts are, and what they are replaced by for a while.

    Args:
        model: packed.
        runner: of the model.
        cache: that steps work on.
    """

    def __init__(self, model: Any, runner: EagerRunner, cache: Any) -> None:
        self._places: list[tuple[Any, str, str]] = [
            (runner, "_inputs", "tree's tensors"),
            (runner, "_arguments", "masks and arguments"),
            (cache, "update", "cache"),
            (cache, "keep", "keep"),
        ]
        for module in model.modules():
            if isinstance(module, PackedLinear):
                self._places.append((module, "_product", PRODUCTS))
            elif isinstance(module, torch.nn.Linear):
                self._places.append((module, "forward", PRODUCTS))
            elif not module._modules and not isinstance(module, torch.nn.Identity):
                self._places.append((module, "forward", type(module).__name__))
        modelling = {type(module).__module__ for module in model.modules()}
        self._places += [
            (sys.modules[name], ROTARY, "rotary") for name in modelling if hasattr(sys.modules[name], ROTARY)
        ]
        self._attention = model.config._attn_implementation

    @property
    def names(self) -> list[str]:
        """All but the products."""
        return sorted({part for _, _, part in self._places} | {"attention"} - {PRODUCTS})

    @contextmanager
    def wrapped(self, wrapper: Wrapper, *only: str) -> Iterator[None]:
        """Functions of the named parts, or of all, replaced by what the wrapper makes of them."""
        own = ALL_ATTENTION_FUNCTIONS[self._attention]
        with ExitStack() as stack:
            for owner, name, part in self._places:
                if not only or part in only:
                    before = vars(owner).get(name)
                    setattr(owner, name, wrapper(getattr(owner, name), part))
                    undo = (setattr, owner, name, before) if before is not None else (delattr, owner, name)
                    stack.callback(*undo)
            if not only or "attention" in only:
                ALL_ATTENTION_FUNCTIONS.register(self._attention, wrapper(own, "attention"))
                stack.callback(ALL_ATTENTION_FUNCTIONS.register, self._attention, own)
            yield


def timed(spent: defaultdict[str, float]) -> Wrapper:
    """Count what a function takes; each within another counts in both."""

    def wrapper(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += perf_counter() - start

        return call

    return wrapper


def given_back() -> Wrapper:
    """Products that cost nothing: what the first one of its shape gave."""
    known: dict[Any, torch.Tensor] = {}

    def wrapper(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        method: Any = function
        outputs = method.__self__.out_features

        def call(x: torch.Tensor) -> torch.Tensor:
            found = known.get((x.shape, outputs))
            if found is None:
                found = known[x.shape, outputs] = function(x)
            return found

        return call

    return wrapper


def tree_of(nodes: int) -> TokenTree:
    """A binary tree."""
    tree = TokenTree(1)
    for node in range(1, nodes):
        tree.add((node - 1) // 2, node + 1, "pool")
    return tree


def steps_of(model: Any, runner: EagerRunner, cache: Any, cached: int) -> dict[int, Callable[[], None]]:
    """Steps behind a text of so many tokens, by their size."""
    text = torch.randint(1, model.config.vocab_size, (cached,), generator=torch.Generator().manual_seed(0)).tolist()
    runner.prefill([text], cache)

    def run(tree: TokenTree) -> None:
        logits = runner.forward([tree], [[*text, 1]], cache)
        read(logits, wants_entries=True)
        cache.keep([[]], fed=len(tree))

    return {size: partial(run, tree_of(size)) for size in SIZES}


def medians(
    steps: dict[int, Callable[[], None]], rounds: int, spent: defaultdict[str, float]
) -> dict[int, dict[str, float]]:
    """Return the milliseconds of each part by size."""
    samples: dict[int, list[defaultdict[str, float]]] = {size: [] for size in steps}
    for _ in range(rounds + 2):
        for size, run in steps.items():
            spent.clear()
            start = perf_counter()
            run()
            samples[size].append(defaultdict(float, spent, whole=perf_counter() - start))
    return {
        size: {part: 1e3 * median(sample[part] for sample in found[2:]) for part in found[-1]}
        for size, found in samples.items()
    }


def compare_fused(model: Any, steps: dict[int, Callable[[], None]], rounds: int) -> None:
    """Print what steps take by what is made in few calls, and leave all modules apart."""
    fused: dict[Any, Any] = {module: type(module) for module in model.modules() if isinstance(module, Fused)}
    arms = {
        "layers in two calls": list(fused),
        "projections, blocks": [module for module, kind in fused.items() if not issubclass(kind, FusedLayer)],
        "parts apart": [],
    }
    samples: dict[str, dict[int, list[float]]] = {arm: {size: [] for size in steps} for arm in arms}
    for _ in range(rounds + 1):
        for size, run in steps.items():
            for arm, taken in arms.items():
                for module, kind in fused.items():
                    module.__class__ = kind if module in taken else kind.original
                run()  # what the arm before has left in caches
                start = perf_counter()
                run()
                samples[arm][size].append(1e3 * (perf_counter() - start))
    print(f"{len(fused)} modules in few calls" + "".join(f"{size:8}" for size in steps))
    for arm, by_size in samples.items():
        print(f"  {arm:26}" + "".join(f"{median(found[1:]):8.2f}" for found in by_size.values()))


def show(title: str, columns: dict[int, dict[str, float]]) -> None:
    """Print a table of parts by sizes."""
    print(f"{title:28}" + "".join(f"{size:8}" for size in columns))
    for part in sorted(columns[SIZES[-1]], key=lambda part: -columns[SIZES[-1]][part]):
        print(f"  {part:26}" + "".join(f"{column.get(part, 0.0):8.2f}" for column in columns.values()))


def prepared(model: str, params: float, dtype: str, weights: str) -> Any:
    """The model, packed and invariant."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loaded = inflate(loaded, params).to(getattr(torch, dtype))
    return lade.invariant(lade.pack(loaded, weights=None if weights == "packed" else weights))


@torch.no_grad()
def measure(model: Any, cached: int, rounds: int) -> None:
    """Print the tables."""
    runner = EagerRunner(model, supports(model).require(), model.generation_config)
    cache = runner.tree_cache()
    steps, spent = steps_of(model, runner, cache, cached), defaultdict[str, float](float)
    compare_fused(model, steps, rounds)
    parts = Parts(model, runner, cache)
    with parts.wrapped(timed(spent), PRODUCTS):
        found = medians(steps, rounds, spent)
    show("with products", {s: {**of, "between": of["whole"] - of[PRODUCTS]} for s, of in found.items()})
    with parts.wrapped(timed(spent)):
        found = medians(steps, rounds, spent)
    for of in found.values():
        of["the rest"] = 2 * of["whole"] - sum(of.values())
    show("with products, by parts", found)
    with parts.wrapped(given_back(), PRODUCTS):
        alone = medians(steps, 2 * rounds, spent)
        with parts.wrapped(timed(spent), *(set(parts.names) - {PRODUCTS})):
            found = medians(steps, 2 * rounds, spent)
        for of in found.values():
            of["the rest"] = 2 * of["whole"] - sum(of.values())
        show("alone", alone)
        show("alone, by parts", found)


def main(
    model: Annotated[str, typer.Option(help="folder or hub id")],
    params: Annotated[float, typer.Option("--inflate", help="parameters to grow it to")] = 500e6,
    dtype: str = "bfloat16",
    weights: Annotated[str, typer.Option(help="packed, int8 or int4")] = "packed",
    cached: Annotated[int, typer.Option(help="tokens in the cache")] = 100,
    rounds: int = 15,
    threads: int = 1,
) -> None:
    """Measure a model."""
    torch.set_num_threads(threads)
    measure(prepared(model, params, dtype, weights), cached, rounds)


if __name__ == "__main__":
    typer.run(main)
