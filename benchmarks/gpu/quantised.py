"""From how many tokens a step on does lookahead pay for a quantised model? Passes of several tokens, beside one's.

    python benchmarks/gpu/quantised.py --params 7e9 --out results/quantised-7B.json

A step that feeds T tokens takes t(T). It is worth while if it yields more than t(T) / t(1) tokens: that is the
break-even S. Weights of fewer bits are read in less time, so one token costs less; what turns them into numbers again
and multiplies is often made for one token, so several may cost more. Only a measurement tells.

The embedded model is inflated again for each way to quantise it. Weights alone are quantised, the head is not, as the
libraries have it; what else there is this library refuses (docs/models.md). A library or a kernel that is missing here
is named and left out. Passes run as a user's do: replayed as CUDA graphs where they can be captured.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from steps import Lane, measure, spread
from torch import nn
from transformers import AutoModelForCausalLM

import lade
from lade.backends.cuda_graphs.pool import pool_of
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.embedded import model_path
from lade.model.facts import ModelFacts, bytes_by_kind
from lade.model.runner import runner_for
from lade_lab import inflate
from lade_lab.harness.benchmark import command_line, environment_of
from lade_lab.inflation import Wanted, choose

DTYPE = torch.bfloat16
GROUP, WIDTHS = 32, 128
"""Weights that share a scale, and what a layer's width is a multiple of."""


class MissingError(Exception):
    """Return what this machine lacks for a quantisation method."""


@dataclass(frozen=True)
class Way:
    """A way to quantise the weights of a model, in place.

    Attributes:
        name: for the table.
        apply: may raise `MissingError`, or what the library raises where it has no kernel.
    """

    name: str
    apply: Callable[[Any], None]


def linears(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name and layer of all that is quantised: every linear layer but the head."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and layer is not head:
                yield parent, name, layer


def torchao(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Quantise by the config that is made of `torchao.quantization`."""

    def apply(model: Any) -> None:
        try:
            from torchao import quantization
        except ImportError as problem:
            raise MissingError(f"torchao cannot be imported ({problem})") from problem
        layers = {id(layer) for *_, layer in linears(model)}
        quantization.quantize_(model, make(quantization), filter_fn=lambda layer, name: id(layer) in layers)

    return apply


def int4(quantization: Any) -> Any:
    """The format of PyTorch's own kernel on a GPU; elsewhere weights that are widened before they are multiplied."""
    if torch.cuda.is_available():
        return quantization.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    return quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(GROUP))


def nf4(model: Any) -> None:
    """As transformers loads a model with `load_in_4bit`."""
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as problem:
        raise MissingError(f"bitsandbytes cannot be imported ({problem})") from problem
    for parent, name, layer in linears(model):
        has_bias = layer.bias is not None
        made = Linear4bit(layer.in_features, layer.out_features, has_bias, DTYPE, quant_type="nf4", device="meta")
        made.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        made.bias = layer.bias
        setattr(parent, name, made.to(layer.weight.device))


WAYS = (
    Way("bfloat16", lambda model: None),
    Way("int8 (torchao)", torchao(lambda quantization: quantization.Int8WeightOnlyConfig())),
    Way("int4 (torchao)", torchao(int4)),
    Way("nf4 (bitsandbytes)", nf4),
)


def inflated(params: float, device: torch.device) -> Any:
    """The embedded model at the cost of about this many parameters, of a width that can be cut into blocks."""
    small = AutoModelForCausalLM.from_pretrained(model_path(), dtype=DTYPE)
    sizes = choose(small, Wanted(params))
    width = max(small.config.intermediate_size, sizes.intermediate_size // WIDTHS * WIDTHS)
    sizing = {"layers": sizes.layers, "hidden_factor": sizes.hidden_factor, "intermediate_size": width}
    return inflate(small, None, **sizing, dtype=DTYPE, device=device)


def measured(model: Any, sizes: Sequence[int], cached: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each size, the break-even S of each, and what was measured."""
    runner = runner_for(ModelFacts.of(model), lade.supports(model).require(), model.generation_config)
    lane = Lane(runner, sizes, cached, rows=1)
    measure([lane], sizes, rounds)
    replayed = isinstance(runner, GraphRunner) and pool_of(model, runner.device).capture_failed_in is None
    passes = [{"size": size, "device_ms": spread(lane.device_s[size]), "wall_ms": spread(lane.wall_s[size])}
              for size in sizes]  # fmt: skip
    one = passes[0]["device_ms"]["median"]
    return {
        "weight_bytes": sum(bytes_by_kind(model.parameters()).values()),
        "replayed": replayed,
        "passes": [each | {"break_even": each["device_ms"]["median"] / one} for each in passes],
        "environment": vars(environment_of(model)),
    }


def tried(way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one method, or why there are none."""
    device, sizes = torch.device(options.device), [int(size) for size in options.sizes.split(",")]
    model = inflated(options.params, device)
    try:
        way.apply(model)
        return {"way": way.name, **measured(model, sizes, options.cached, options.rounds)}
    except (MissingError, ImportError, NotImplementedError, AssertionError, RuntimeError) as problem:  # no kernel here
        return {"way": way.name, "missing": f"{type(problem).__name__}: {problem}".splitlines()[0]}
    except lade.UnsupportedModelError as problem:
        return {"way": way.name, "refused": problem.reason}
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def table_of(found: Sequence[dict[str, Any]]) -> str:
    """One line for each way: gigabytes, milliseconds of one token, and the break-even S of more; or why not."""
    sizes = next(([each["size"] for each in one["passes"]] for one in found if "passes" in one), [])
    head = f"{'weights':<20}  {'GB':>6}  {'1 token, ms':>11}  " + "  ".join(f"S({size})".rjust(6) for size in sizes)
    rows = [head, "-" * len(head)]
    for one in found:
        if "passes" not in one:
            rows.append(f"{one['way']:<20}  not measured: {one.get('missing') or one['refused']}")
            continue
        cells = [f"{one['weight_bytes'] / 1e9:6.3f}", f"{one['passes'][0]['device_ms']['median']:11.3f}"]
        cells += [f"{each['break_even']:6.2f}" for each in one["passes"]]
        rows.append(f"{one['way']:<20}  " + "  ".join(cells) + ("" if one["replayed"] else "  launched, not replayed"))
    return "\n".join(rows)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description="What several tokens cost with quantised weights.")
    parser.add_argument("--params", type=float, default=7e9, help="parameters of the inflated embedded model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cached", type=int, default=512, help="tokens in the cache")
    parser.add_argument("--sizes", default="1,8,16,32,64", help="tokens fed, beginning with 1")
    parser.add_argument("--rounds", type=int, default=20, help="passes of each size that count")
    parser.add_argument("--limit-s", type=float, default=3600, help="begin nothing after this many seconds")
    parser.add_argument("--out", type=Path, help="a JSON file; beside it the table, as .txt")
    options = parser.parse_args(words)
    if options.sizes.split(",")[0] != "1":
        parser.error(f"--sizes {options.sizes}: give 1 first, which the others are compared with")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print one way after the other, saving as it goes; 1 if unquantised weights could not be measured."""
    options, found, start = arguments(words), [], perf_counter()
    warnings.filterwarnings("ignore", module=r"torchao|bitsandbytes")  # of kernels for other machines
    for way in WAYS:
        late = perf_counter() - start > options.limit_s
        found.append({"way": way.name, "missing": "no time was left"} if late else tried(way, options))
        table = table_of(found)
        print(f"{table}\n", flush=True)
        if options.out is not None:
            record = {
                "command": command_line(sys.argv),
                "params": options.params,
                "cached": options.cached,
                "ways": found,
            }
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            options.out.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    return 0 if "passes" in found[0] else 1


if __name__ == "__main__":
    sys.exit(main())
