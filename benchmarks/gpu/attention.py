"""Time of attention over a token tree, by length of the cache and tokens of a step.

    python benchmarks/gpu/attention.py --out FOLDER

Before anything is measured it is compared: each arm's largest error against float64, in units of the largest value.

* `lade_tree`: our kernel.
* `sdpa`: what transformers does with a dense mask, which is to copy keys and values for each head that shares them.
* `sdpa-gqa`: SDPA with a dense mask, told that heads share keys.
* `flex`: FlexAttention, compiled for each shape, with a block mask.
* `flash`: every query sees every key. That is not attention over a tree; it is what reading the cache costs at least
  by the best kernel there is, with nothing to look up.
* `floor`: bytes of keys and values over the bandwidth of a copy, measured here.

Masks are made before the clock starts. On a GPU each sample is the replay of a CUDA graph over several copies of the
cache, together larger than the second-level cache, so neither launches nor warm caches flatter anybody; the arms take
turns, sample by sample. FOLDER gets attention.json, with all samples, and attention.txt, the medians in microseconds.

`--sweep` measures other tiles of `lade_tree` instead, and says which are best. `--device cpu` tries the script itself;
with TRITON_INTERPRET=1 in the environment it has the kernel, too, interpreted.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lade
from lade.backends.tree_attention.backend import kernel_for
from lade.backends.tree_attention.tree_mask import TreeInputs
from lade.decoding.tree import TokenTree
from lade.model.inputs import FULL, StepInputs
from lade_lab.harness.benchmark import commit_of

POOL_BYTES = 256 << 20  # of all copies of a cache: several times the second-level cache of any GPU
MOST_COPIES = 64
ARMS = ("lade_tree", "sdpa", "sdpa-gqa", "flash")
Arm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(keys, values) `[B, Hkv, K, D]` -> `[B, S, H, D]`."""


@dataclass(frozen=True)
class Point:
    """One place of the grid."""

    heads: int
    kv_heads: int
    dim: int
    length: int
    step: int

    @property
    def shape(self) -> str:
        """Its sizes but for the tokens, as they are given on the command line."""
        return f"{self.heads}x{self.kv_heads}x{self.dim}"

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values that every arm must read."""
        return 2 * self.kv_heads * (self.length + self.step) * self.dim * dtype.itemsize


class Problem:
    """Queries, a pool of caches, and the mask of a tree as each arm wants it."""

    def __init__(self, point: Point, device: torch.device, dtype: torch.dtype) -> None:
        self.point = point
        tree = TokenTree(0)
        for node in range(1, point.step):  # three children each: guesses, as wide as they are deep
            tree.add((node - 1) // 3, node, "pool")
        self.mask, self.dense = (
            kind.of([tree], [point.length], device).mask(FULL) for kind in (TreeInputs, StepInputs)
        )
        generator = torch.Generator(device).manual_seed(0)
        self.query = torch.randn(1, point.heads, point.step, point.dim, device=device, dtype=dtype, generator=generator)
        copies = POOL_BYTES // point.bytes(dtype) + 2 if device.type == "cuda" else 2
        shape = (min(copies, MOST_COPIES), 2, 1, point.kv_heads, point.length + point.step, point.dim)
        self.pool = torch.randn(shape, device=device, dtype=dtype, generator=generator)

    def arms(self) -> dict[str, Arm]:
        """Return the arms that run here."""
        layer = SimpleNamespace(num_key_value_groups=self.point.heads // self.point.kv_heads, is_causal=True)
        scale = self.point.dim**-0.5
        kernel = kernel_for(self.query, *self.pool[0])

        def grouped(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            found = torch.nn.functional.scaled_dot_product_attention(
                self.query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
            )
            return found.transpose(1, 2)

        def flash(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return grouped(key, value, None)

        arms: dict[str, Arm] = {}
        if kernel is not None:
            arms["lade_tree"] = lambda key, value: kernel.attend(self.query, key, value, self.mask, scale=scale)
        arms["sdpa"] = lambda key, value: sdpa_attention_forward(
            layer, self.query, key, value, self.dense, scaling=scale
        )[0]
        arms["sdpa-gqa"] = lambda key, value: grouped(key, value, self.dense)
        return arms | {"flash": flash}

    def flex(self) -> Arm:
        """FlexAttention, compiled again, since it would run uncompiled after a few shapes."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self.dense[batch, 0, query, key]

        torch.compiler.reset()
        step, slots = self.dense.shape[2:]
        blocks = create_block_mask(seen, 1, None, step, slots, device=self.query.device)
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        scale = self.point.dim**-0.5
        return lambda key, value: compiled(
            self.query, key, value, block_mask=blocks, scale=scale, enable_gqa=True
        ).transpose(1, 2)

    def tiled(self) -> Iterator[tuple[Any, Arm]]:
        """Our kernel with other tiles than those that it chooses; it has to run here."""
        kernel: Any = kernel_for(self.query, *self.pool[0])
        chosen = kernel.Tiles.fitting(self.query, *self.pool[0])
        sizes = itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (0.5, 1, 2))
        wanted = self.point.step * (self.point.heads // self.point.kv_heads)
        for queries, keys, warps, stages, splits in sizes:
            if queries > max(16, 2 * wanted):
                continue
            other = replace(chosen, queries=queries, keys=keys, warps=warps, stages=stages)
            other = replace(other, splits=max(1, math.ceil(chosen.splits * splits)))
            yield (
                other,
                lambda key, value, other=other: kernel.attend(
                    self.query, key, value, self.mask, scale=self.point.dim**-0.5, tiles=other
                ),
            )

    def error(self, arm: Arm) -> float:
        """Largest difference from float64, in units of the largest value."""
        key, value = (states.double().repeat_interleave(self._group, dim=1) for states in self.pool[0])
        worst, largest = 0.0, 0.0
        found = arm(*self.pool[0]).transpose(1, 2)  # [1, H, S, D]
        for head in range(self.point.heads):  # one at a time: float64 scores of all would not fit
            scores = self.query[0, head].double() @ key[0, head].T * self.point.dim**-0.5
            expected = scores.masked_fill(~self.dense[0, 0], -math.inf).softmax(-1) @ value[0, head]
            worst = max(worst, float((found[0, head].double() - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
        return worst / largest

    @property
    def _group(self) -> int:
        return self.point.heads // self.point.kv_heads


def sampler(arm: Arm, pool: torch.Tensor) -> Callable[[], float]:
    """Returns microseconds for one call of `arm`, the mean over the pool, each time it is called."""

    def every() -> None:
        for key, value in pool:
            arm(key, value)

    every()
    if pool.device.type != "cuda":
        return lambda: _clocked(every) / len(pool)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()

    def sample() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / len(pool)

    sample()
    return sample


def _clocked(call: Callable[[], None]) -> float:
    start = perf_counter()
    call()
    return 1e6 * (perf_counter() - start)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by the copy of one large tensor."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source = torch.zeros(2, size // 2, dtype=torch.uint8, device=device)
    copy = sampler(lambda key, value: value.copy_(key), source[None])
    return 1e6 * size / min(copy() for _ in range(5))


def measured(problem: Problem, arms: dict[str, Arm], rounds: int) -> dict[str, dict[str, Any]]:
    """Errors and samples of all arms; what an arm that fails says."""
    found: dict[str, dict[str, Any]] = {}
    samplers = {}
    for name, arm in arms.items():
        try:
            error = None if name == "flash" else problem.error(arm)
            samplers[name] = sampler(arm, problem.pool)
            found[name] = {"error": error, "us": []}
        except Exception as failure:  # noqa: BLE001 - what one arm cannot do, the others may: it is told in the table
            found[name] = {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}
    for _ in range(rounds):
        for name, sample in samplers.items():
            found[name]["us"].append(sample())
    return found


def table(results: list[dict[str, Any]], bandwidth: float) -> str:
    """Medians in microseconds, one line for each point."""
    arms = [*ARMS, "flex"]
    lines = [f"{'heads':>10}{'cached':>8}{'S':>5}{'floor':>10}" + "".join(f"{arm:>20}" for arm in arms)]
    for result in results:
        shape, point = result["shape"], f"{result['length']:>8}{result['step']:>5}"
        line = f"{shape:>10}{point}{1e6 * result['bytes'] / bandwidth:>10.1f}"
        lines.append(line + "".join(f"{_cell(result['arms'].get(arm)):>20}" for arm in arms))
    return "\n".join([*lines, "", "In brackets the largest error, in units of the largest value."])


def _cell(found: dict[str, Any] | None) -> str:
    if found is None or not found.get("us"):
        return "failed" if found and "failed" in found else "-"
    shown = f"{median(found['us']):.1f}"
    return shown if found["error"] is None else f"{shown} ({found['error']:.0e})"


def grid(shapes: str, lengths: str, steps: str) -> list[Point]:
    """All points, those of short caches first."""
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]
    return [
        Point(*size, length, step)
        for length, step, size in itertools.product(
            map(int, lengths.split(",")), list(map(int, steps.split(","))), sizes
        )
    ]


def sweep(points: list[Point], device: torch.device, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """The best tiles of each point, the chosen ones beside them."""
    found = []
    for point in points:
        problem = Problem(point, device, dtype)
        arms = {"chosen": problem.arms()["lade_tree"]}
        arms |= {str(tiles): arm for tiles, arm in problem.tiled()}
        cells = measured(problem, arms, rounds)
        best = sorted((median(cell["us"]), name) for name, cell in cells.items() if cell.get("us"))
        print(point, f"chosen {median(cells['chosen']['us']):.1f} us; best:", *best[:3], sep="\n  ", flush=True)
        found.append({**vars(point), "arms": cells})
    return found


def main(
    out: Annotated[Path, typer.Option(help="folder for attention.json and attention.txt")],
    device: str = "cuda",
    dtype: str = "bfloat16",
    shapes: Annotated[str, typer.Option(help="heads x KV heads x dimension")] = "32x8x128,32x32x128",
    lengths: Annotated[str, typer.Option(help="cached tokens")] = "512,2048,8192,32768",
    steps: Annotated[str, typer.Option(help="tokens of a step")] = "1,8,16,32,64,128",
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    flex: Annotated[bool, typer.Option(help="FlexAttention, which takes seconds to compile for each point")] = True,
    limit_s: Annotated[float, typer.Option(help="begin no other point after this many seconds")] = math.inf,
    sweep_tiles: Annotated[bool, typer.Option("--sweep", help="measure other tiles of our kernel instead")] = False,
) -> None:
    """Measure, save after each point, and print a table."""
    began, where, kind = perf_counter(), torch.device(device), getattr(torch, dtype)
    points = grid(shapes, lengths, steps)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    facts = {"device": name, "dtype": dtype, "torch": torch.__version__, "rounds": rounds}
    facts["commit"] = commit_of(Path(lade.__file__).parent.parent)
    out.mkdir(parents=True, exist_ok=True)
    if sweep_tiles:
        (out / "sweep.json").write_text(json.dumps({**facts, "points": sweep(points, where, kind, rounds)}))
        return
    bandwidth, results = copy_bandwidth(where), []
    text = f"{name}, {dtype}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s\n\n"
    for with_flex in (False, True) if flex else (False,):  # first the whole grid, then what takes long
        for number, point in enumerate(points):
            if perf_counter() - began > limit_s:
                break
            problem = Problem(point, where, kind)
            if with_flex:
                results[number]["arms"] |= measured(problem, {"flex": problem.flex()}, rounds)
            else:
                arms = measured(problem, problem.arms(), rounds)
                size = point.bytes(kind)
                results.append({**vars(point), "shape": point.shape, "bytes": size, "arms": arms})
            saved = {**facts, "copy_bytes_per_s": bandwidth, "points": results}
            (out / "attention.json").write_text(json.dumps(saved, indent=1), encoding="utf-8")
            (out / "attention.txt").write_text(text + table(results, bandwidth) + "\n", encoding="utf-8")
    print((out / "attention.txt").read_text(encoding="utf-8"))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
