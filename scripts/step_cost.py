"""What a forward pass over S tokens costs, as the model is, prepacked, and compiled: the yardstick of every tree size.

    python scripts/step_cost.py --model FOLDER --inflate 100e6 --dtype bfloat16 --threads 1 --rounds 20

Without --model the embedded one is measured, which is too small to say much unless it is inflated. The arms take turns
S by S and round by round, so that whatever else the machine does hits all of them. A cell is the median in
milliseconds with the quartiles; the lines below say what S tokens cost in units of one. With --compile an arm of
`torch.compile` with inductor's freezing, which prepacks too, is added; compiling one S takes up to a minute and is
timed apart. The last line is JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import lade
from lade.model.packing.pack import packed_layers

STEPS = (1, 2, 4, 8, 16, 32, 64)
Pass = Callable[[torch.Tensor, DynamicCache], None]


def load(model: Path | None, inflate: float | None, dtype: str) -> PreTrainedModel:
    from lade.embedded.files import model_path

    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model or model_path(), dtype=getattr(torch, dtype))
    if inflate is None:
        return loaded.eval()
    from lade.bench.inflation.inflate import inflate as inflated

    return inflated(loaded, params=inflate).eval()


def forward(model: Any) -> Pass:
    def run(ids: torch.Tensor, cache: DynamicCache) -> None:
        model(ids, past_key_values=cache, use_cache=True)

    return run


def compiled(model: Any) -> Pass:
    import torch._inductor.config as inductor

    inductor.freezing = True
    return forward(torch.compile(model, dynamic=False))


def arms_of(model: PreTrainedModel, with_compile: bool) -> dict[str, Pass]:
    packed = lade.pack(copy.deepcopy(model))
    print(f"{model.num_parameters() / 1e6:.0f}M parameters, {packed_layers(packed)} layers packed")
    arms = {"eager": forward(model), "packed": forward(packed)}
    return arms | {"frozen": compiled(copy.deepcopy(model))} if with_compile else arms


@torch.no_grad()
def timed(run: Pass, ids: torch.Tensor, prefix: DynamicCache) -> float:
    cache = copy.deepcopy(prefix)
    start = perf_counter()
    run(ids, cache)
    return 1e3 * (perf_counter() - start)


def table(samples: dict[str, dict[int, list[float]]]) -> None:
    print(f"{'S':>8}" + "".join(f"{size:>20}" for size in STEPS))
    for name, cells in samples.items():
        shown = []
        for size in STEPS:
            low, _, high = quantiles(cells[size], n=4)
            shown.append(f"{median(cells[size]):.1f} ({low:.1f}-{high:.1f})")
        print(f"{name:>8}" + "".join(f"{cell:>20}" for cell in shown))
        print(f"{'/ S=1':>8}" + "".join(f"{median(cells[size]) / median(cells[1]):>20.2f}" for size in STEPS))


def main(
    model: Annotated[Path | None, typer.Option(help="folder of a causal language model")] = None,
    inflate: Annotated[float | None, typer.Option(help="parameters of a larger model with the same function")] = None,
    dtype: str = "float32",
    threads: int = 1,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    prefix: Annotated[int, typer.Option(help="tokens in the cache")] = 128,
    compile: Annotated[bool, typer.Option("--compile", help="an arm with inductor's freezing")] = False,
) -> None:
    torch.set_num_threads(threads)
    loaded = load(model, inflate, dtype)
    arms = arms_of(loaded, compile)
    ids = torch.randint(loaded.config.vocab_size, (1, max(*STEPS, prefix)), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=loaded.config)
    with torch.no_grad():
        loaded(ids[:, :prefix], past_key_values=cache, use_cache=True)
    first = {name: {size: timed(run, ids[:, :size], cache) for size in STEPS} for name, run in arms.items()}
    samples: dict[str, dict[int, list[float]]] = {name: {size: [] for size in STEPS} for name in arms}
    for _ in range(rounds):
        for size in STEPS:
            for name, run in arms.items():
                samples[name][size].append(timed(run, ids[:, :size], cache))
    table(samples)
    facts = {"dtype": dtype, "threads": threads, "prefix": prefix, "parameters": loaded.num_parameters()}
    print(json.dumps({**facts, "torch": torch.__version__, "first_ms": first, "ms": samples}))


if __name__ == "__main__":
    typer.run(main)
