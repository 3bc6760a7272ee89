"""Time of a model's pass by tokens fed, launched kernel by kernel, replayed, and fused, beside its lower bounds.

    python benchmarks/gpu/steps.py --shape llama-3-8b --out results/steps-llama-3-8b.json

Two floors stand before the measurement. A pass reads all weights but the embeddings it does not look up, and the cache:
these bytes over the bandwidth that a plain copy reaches on this machine. And it multiplies by every weight for each
token: these operations over the rate that a large matrix product reaches. No pass is faster than the higher one.

The weights are random: what a pass takes does not depend on them.

Then all runners take turns at every size, so that a drift of the machine's speed meets all. Two times are taken of
each pass: what it takes by the device's own clock, and what the whole step takes on the wall, without choosing tokens:
making the tree, launching, waiting for the logits, and dropping the tree from the cache.
"Replayed" is the model's own layers as a CUDA graph, "fused" the same in fewer kernels:
see `lade/backends/cuda_graphs/fused.py`.
Where passes cannot be captured, or the device is a CPU, both are called again with the same padding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.cuda_graphs.buffers import EagerReplay
from lade.backends.cuda_graphs.fused import fusion_refusal
from lade.backends.cuda_graphs.pool import new_pool, pool_of
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.model.facts import ModelFacts
from lade.model.inputs import step_bucket
from lade.model.runner import EagerRunner
from lade.tuning.cost_cache import StepTimer
from lade_lab.harness.benchmark import command_line, environment_of

RUNNERS = ("eager", "replayed", "fused")
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    },
    "llama-2-7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    },
    "qwen-3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
"""Configurations as their authors publish them; the last one to try this program."""
LARGE = {"cuda": (2**30, 8192), "cpu": (2**26, 512)}  # bytes copied, and rows of the square matrices
ROUNDS_OF_FLOORS = 10
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Median of several runs of it, the first one left out, until the device has ended it."""
    taken = []
    for _ in range(ROUNDS_OF_FLOORS + 1):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(perf_counter() - start)
    return statistics.median(taken[1:])


def bandwidth_of(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = LARGE[device.type][0]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def rate_of(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product."""
    rows = LARGE[device.type][1]
    matrix = torch.rand(rows, rows, device=device).to(dtype)
    return 2 * rows**3 / seconds_of(lambda: matrix @ matrix, device)


def weights_read(model: Any) -> int:
    """Parameters that every pass multiplies by: all but an embedding that is only looked up."""
    total = sum(parameter.numel() for parameter in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if table is head else total - table.numel()


def cache_bytes(model: Any, cached: int, rows: int) -> int:
    """Keys and values of this many tokens."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * cached * rows * model.dtype.itemsize


class Lane:
    """One runner, and the passes it was timed with.

    Attributes:
        device_s, wall_s: by size, seconds of each pass.
    """

    def __init__(self, runner: EagerRunner, sizes: Sequence[int], cached: int, rows: int) -> None:
        vocabulary = runner.model.get_input_embeddings().weight.shape[0]
        self._timer = StepTimer(runner, vocabulary=vocabulary, largest=max(sizes), cached=cached, batch=rows)
        self.device_s: dict[int, list[float]] = {size: [] for size in sizes}
        self.wall_s: dict[int, list[float]] = {size: [] for size in sizes}

    def run(self, size: int, *, counts: bool) -> None:
        """One pass; the first ones warm up and do not count."""
        start = perf_counter()
        device_s = self._timer(size)  # waits for the device
        wall_s = perf_counter() - start
        if counts:
            self.device_s[size].append(device_s)
            self.wall_s[size].append(wall_s)


def measure(lanes: Sequence[Lane], sizes: Sequence[int], rounds: int) -> None:
    """All lanes and sizes in turn."""
    for number in range(rounds + 2):
        for size in sizes:
            for lane in lanes:
                lane.run(size, counts=number >= 2)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile, in milliseconds."""
    ordered = sorted(seconds)
    places = {"p10": len(ordered) // 10, "p90": len(ordered) * 9 // 10}
    found = {name: 1e3 * ordered[place] for name, place in places.items()}
    return {"median": 1e3 * statistics.median(ordered), **found}


def line_of(size: int, floors: tuple[float, float], lanes: dict[str, Lane]) -> dict[str, Any]:
    """Return the measurements of a size, in milliseconds."""
    line: dict[str, Any] = {"size": size, "padded": step_bucket(size)}
    line |= {"bytes_floor_ms": 1e3 * floors[0], "operations_floor_ms": 1e3 * floors[1] * size}
    for name, lane in lanes.items():
        line[name] = {"device_ms": spread(lane.device_s[size]), "wall_ms": spread(lane.wall_s[size])}
    return line


def table_of(lines: Sequence[dict[str, Any]]) -> str:
    """The lines for people: medians, and how far above the higher floor a fused pass is."""
    headings = [f"{name + ' ms (wall)':>18}" for name in RUNNERS]
    rows = [
        " | ".join(["tokens  padded   bytes     ops", *headings, "over floor  over 1 token"]),
        " | ".join(["------  ------  ------  ------", *["-" * 18] * len(RUNNERS), "----------  ------------"]),
    ]
    one = lines[0]["fused"]["device_ms"]["median"]
    for line in lines:
        times = [[line[name][clock]["median"] for clock in ("device_ms", "wall_ms")] for name in RUNNERS]
        floor = max(line["bytes_floor_ms"], line["operations_floor_ms"])
        cells = [
            f"{line['size']:6}  {line['padded']:6}  {line['bytes_floor_ms']:6.3f}  {line['operations_floor_ms']:6.3f}",
            *(f"{device:8.3f} ({wall:7.3f})" for device, wall in times),
            f"{times[-1][0] / floor:9.2f}x  {times[-1][0] / one:11.2f}x",
        ]
        rows.append(" | ".join(cells))
    return "\n".join(rows)


def model_of(shape: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of this shape with random weights."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**SHAPES[shape], max_position_embeddings=8192, **special)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description="What one pass takes, with and without graphs.")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="configuration of the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--cached", type=int, default=512, help="tokens in the cache")
    parser.add_argument("--rows", type=int, default=1, help="rows of the batch")
    parser.add_argument("--sizes", default="1,8,16,32,64", help="tokens fed, the first one to compare with")
    parser.add_argument("--rounds", type=int, default=30, help="passes of each size and runner that count")
    parser.add_argument("--out", type=Path, help="a JSON file; beside it the table, as .txt")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, save; 1 where passes could not be captured on a device that has graphs."""
    options = arguments(words)
    device, sizes = torch.device(options.device), [int(size) for size in options.sizes.split(",")]
    model = model_of(options.shape, DTYPES[options.dtype], device)
    bandwidth, rate, weights = bandwidth_of(device), rate_of(device, model.dtype), weights_read(model)
    bytes_read = weights * model.dtype.itemsize + cache_bytes(model, options.cached, options.rows)
    floors = bytes_read / bandwidth, 2 * weights * options.rows / rate
    print(
        f"{weights / 1e9:.3f} billion weights and {options.cached} cached tokens: {bytes_read / 1e9:.3f} GB a pass; "
        f"copies reach {bandwidth / 1e9:.0f} GB/s, matrix products {rate / 1e12:.2f} TFLOP/s",
        flush=True,
    )

    plan = lade.supports(model).require()
    print(f"fused: {fusion_refusal(ModelFacts.of(model), plan) or 'yes, if its trials agree'}", flush=True)
    graphs = device.type == "cuda" and not capture_refusal(model)
    pool = pool_of(model, device) if graphs else new_pool(model, EagerReplay)
    runners = {
        "eager": EagerRunner(model, plan, model.generation_config),
        "replayed": GraphRunner(model, plan, model.generation_config, pool, fuses=False),
        "fused": GraphRunner(model, plan, model.generation_config, pool),
    }
    lanes = {name: Lane(runner, sizes, options.cached, options.rows) for name, runner in runners.items()}
    measure(list(lanes.values()), sizes, options.rounds)

    captured = graphs and pool.capture_failed_in is None
    lines = [line_of(size, floors, lanes) for size in sizes]
    table = f"{table_of(lines)}\nreplayed: {'CUDA graphs' if captured else 'called again, not captured'}"
    print(table)
    if options.out is not None:
        found = {"captured": captured, "bandwidth": bandwidth, "operations_per_s": rate, "weights": weights}
        found |= {"bytes_read": bytes_read, "dtype": options.dtype, "cached": options.cached, "rows": options.rows}
        found |= {"command": command_line(sys.argv), "environment": vars(environment_of(model)), "passes": lines}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    return 0 if captured or device.type == "cpu" else 1


if __name__ == "__main__":
    sys.exit(main())
